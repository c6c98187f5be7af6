"""How the store in an agent is reached: its address, the job and its secret, and the times that hold."""

from __future__ import annotations

from typing import Literal, NamedTuple

from phalanx._base.host_names import address_text

Encryption = Literal["auto", "require", "no"]
"""When what is said is encrypted."""


class HubSettings(NamedTuple):
    """How the store is reached.

    Attributes:
        host: The name or the address of the agent's machine. A name is resolved anew each time.
        port: Where that agent listens.
        run_id: Which job it is.
        secret: What all agents of the job know, and nobody else; empty: everybody is let in who knows the run id.
        ttl: Seconds (2 or more) after which the keys of an agent go that is not heard of. The same for all agents.
        timeout: Seconds that an answer may take.
        encrypt: "auto": what is said is encrypted where both ends can; "require": else there is no connection; "no".
        endpoint: What the user knows it as; "": the host and the port.
    """

    host: str
    port: int
    run_id: str
    secret: bytes
    ttl: int
    timeout: float = 3.0
    encrypt: Encryption = "auto"
    endpoint: str = ""

    @property
    def where(self) -> str:
        """Where the store is, for a reader.

        >>> HubSettings("::1", 29500, "night7", b"", 5).where
        '[::1]:29500'
        """
        return self.endpoint or address_text(self.host, self.port)

    def __repr__(self) -> str:
        # A secret is not shown by what shows the settings.
        return f"HubSettings({self.where}, run_id={self.run_id!r}, ttl={self.ttl}, timeout={self.timeout})"
