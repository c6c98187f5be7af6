"""How the store in rank 0's agent is reached: its address, the job and its secret, and the times that hold."""

from __future__ import annotations

from typing import NamedTuple


class HubSettings(NamedTuple):
    """How the store is reached.

    Attributes:
        host: The name or the address of rank 0's machine. A name is resolved anew each time.
        port: Where rank 0's agent listens.
        run_id: Which job it is.
        secret: What all agents of the job know, and nobody else; empty: everybody is let in who knows the run id.
        ttl: Seconds (2 or more) after which the keys of an agent go that is not heard of. The same for all agents.
        timeout: Seconds that an answer may take.
    """

    host: str
    port: int
    run_id: str
    secret: bytes
    ttl: int
    timeout: float = 3.0

    @property
    def where(self) -> str:
        """Where the store is, for a reader.

        >>> HubSettings("::1", 29500, "night7", b"", 5).where
        '[::1]:29500'
        """
        return address_text(self.host, self.port)

    def __repr__(self) -> str:
        # A secret is not shown by what shows the settings.
        return f"HubSettings({self.where}, run_id={self.run_id!r}, ttl={self.ttl}, timeout={self.timeout})"


def address_text(host: str, port: int) -> str:
    """Return an address and a port, as messages have them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
