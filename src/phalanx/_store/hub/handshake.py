"""Both sides of the beginning of a connection: who is let in, and why somebody is not. Pure, but for random bytes.

See `wire` for what is said, and what it proves.
"""

from __future__ import annotations

import hmac
import os
from typing import Literal

from phalanx._store.hub import messages, wire
from phalanx._store.hub.addresses import Encryption, HubSettings
from phalanx._store.hub.messages import NONCE, VERSION, Challenge, Enter, Hello, Refusal, Welcome
from phalanx._store.hub.wire import NEEDS, ConnectionKeys, can_encrypt


class RefusedError(Exception):
    """The store does not have this agent. The words tell why, in one line."""


class TurnedAwayError(Exception):
    """The store does not let an agent in.

    Attributes:
        why: See `Refusal`.
        words: What is said of it on rank 0's console.
    """

    def __init__(self, why: Literal["version", "run", "secret", "encrypt"], words: str) -> None:
        super().__init__(words)
        self.why = why
        self.words = words


class AgentSide:
    """How an agent enters.

    Args:
        settings: Who we are.
        session: The session that we have had; b"": none.
    """

    def __init__(self, settings: HubSettings, session: bytes) -> None:
        self._settings = settings
        self._session = session
        self._run = wire.run_hash(settings.run_id)
        self._nonce = os.urandom(NONCE)
        self._lacks = _lacks(settings.encrypt, settings.secret)
        self.encrypts = False
        """Whether what follows `welcome` is encrypted: known after `enter`."""

    def hello(self) -> bytes:
        """Return the first message."""
        return messages.write(Hello(VERSION, self._run, shown(self._settings.run_id), self._nonce, not self._lacks))

    def enter(self, body: bytes) -> tuple[bytes, ConnectionKeys]:
        """Take the store's first message. Returns the second one, which is sealed; and the keys of the connection.

        Raises RefusedError; DamagedError.
        """
        answer = messages.read_answer(body)
        if isinstance(answer, Refusal):
            raise self._refused(answer)
        self.encrypts = answer.encrypts and not self._lacks
        if self._settings.encrypt == "require" and not self.encrypts:
            where = self._settings.where
            raise RefusedError(f"{where} does not encrypt, which encrypt=require asks for: {self._lacks or _THERE}")
        keys = wire.connection_keys(
            self._settings.secret,
            VERSION,
            self._run,
            self._nonce,
            answer.nonce,
            can=not self._lacks,
            do=answer.encrypts,
        )
        return messages.write(Enter(self._session or None)), keys

    def welcome(self, body: bytes, *, is_sealed: bool) -> Welcome:
        """Take the store's second message, and return it. Raises RefusedError; DamagedError."""
        if is_sealed:
            return messages.read_welcome(body)
        answer = messages.read_answer(body)
        if isinstance(answer, Refusal):
            raise self._refused(answer)
        raise messages.DamagedError("a challenge comes twice")

    def _refused(self, refusal: Refusal) -> RefusedError:
        where, mine = self._settings.where, shown(self._settings.run_id)
        if refusal.why == "version":
            spoken = f"version {refusal.version} of the store's protocol; this agent speaks version {VERSION}"
            return RefusedError(f"{where} speaks {spoken}")
        if refusal.why == "run":
            return RefusedError(f"{where} serves the job {refusal.name!r}; this agent is of the job {mine!r}")
        if refusal.why == "encrypt":
            return RefusedError(f"{where} wants what is said to be encrypted (encrypt=require): {self._lacks}")
        return RefusedError(f"the job's secret is not the one of {where}")


class StoreSide:
    """How the store lets an agent in.

    Args:
        run_id: Of its job.
        secret: Of its job.
        encrypt: See `HubSettings`.
    """

    def __init__(self, run_id: str, secret: bytes, encrypt: Encryption = "auto") -> None:
        self._run = wire.run_hash(run_id)
        self._name = shown(run_id)
        self._secret = secret
        self._wants = encrypt == "require"
        self._lacks = _lacks(encrypt, secret)

    def challenge(self, body: bytes) -> tuple[bytes, ConnectionKeys, bool]:
        """Take an agent's first message. Returns the answer; the keys; and whether what follows `Welcome` is encrypted.

        Raises TurnedAwayError; DamagedError.
        """
        hello = messages.read_hello(body)
        if hello.version != VERSION:
            spoken = f"version {hello.version} of the store's protocol; the one here is {VERSION}"
            raise TurnedAwayError("version", f"it speaks {spoken}")
        if not hmac.compare_digest(hello.run, self._run):
            raise TurnedAwayError("run", f"it is of the job {hello.name!r}; the one here is {self._name!r}")
        do = hello.encrypts and not self._lacks
        if self._wants and not do:
            raise TurnedAwayError(
                "encrypt", f"nothing would be encrypted, which encrypt=require asks for: {self._lacks or _THERE}"
            )
        nonce = os.urandom(NONCE)
        keys = wire.connection_keys(self._secret, VERSION, self._run, hello.nonce, nonce, can=hello.encrypts, do=do)
        return messages.write(Challenge(nonce, do)), keys, do

    def refusal(self, error: TurnedAwayError) -> bytes:
        """Return what an agent is told that is turned away."""
        return messages.write(Refusal(error.why, VERSION, self._name))


_THERE = f"{NEEDS} is needed there, and not encrypt=no"


def _lacks(encrypt: Encryption, secret: bytes) -> str:
    """Return why nothing can be encrypted at this end; "": it can."""
    if encrypt == "no":
        return "encrypt=no was given here"
    if not secret:
        return "there is no secret, of which the key would be made"
    return "" if can_encrypt() else f"{NEEDS} is needed here"


def shown(run_id: str) -> str:
    """Return a run id as it is shown to others.

    >>> shown("night7"), len(shown("x" * 1000))
    ('night7', 200)
    """
    return run_id.encode("utf-8", "replace").decode()[: messages.MOST_NAME]
