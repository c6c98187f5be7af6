"""What agents and the store say to each other, as typed values, and how these are written and read.

Anybody may have sent it who reaches the port, until the sender is known: what is read is checked for its types and
bounds, and executed never. The values are written as MessagePack. The protocol, a message a line:

    to the store    Hello, Enter, Watch, Unwatch, Submit, Fetch, Beat, Leave
    to an agent     Challenge or Refusal, Welcome, Read, Changes, Made, Beat, Left
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from phalanx._store.store import MOST_VALUE, Entry, Key, Revision, Transaction

VERSION = 5
"""Of the protocol. Agents of another one are refused: `Hello` and `Refusal` begin the same in all versions."""

MOST_BODY = 64 << 20
"""Bytes of a message that is taken."""
MOST_REQUEST = MOST_VALUE
"""Bytes of a request."""
MOST_HELLO = 1024
"""Bytes of a message from somebody who is not known."""
MOST_NAME = 200
"""Characters of a run id that are shown; jobs are told apart by its hash."""

NONCE = 32
SESSION = 16

_PART = 1 << 20  # bytes of values, after which a long answer goes on in another message

_Number = Annotated[int, Meta(ge=0, le=1 << 62)]
_Version = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Name = Annotated[str, Meta(max_length=MOST_NAME)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE, max_length=NONCE)]
_Session = Annotated[bytes, Meta(min_length=SESSION, max_length=SESSION)]


class _Message(Struct, frozen=True, array_like=True, tag=str.lower):
    """A message: an array, whose first element says which."""


class Hello(_Message, frozen=True):
    """An agent would like to enter. The first message.

    Attributes:
        version: See `VERSION`.
        run: The hash of the run id.
        name: The beginning of the run id.
        nonce: Random bytes.
        encrypts: Whether it can, see `wire.Cipher`.
    """

    version: _Version
    run: Annotated[bytes, Meta(min_length=32, max_length=32)]
    name: _Name
    nonce: _Nonce
    encrypts: bool = False


class Challenge(_Message, frozen=True):
    """The store's random bytes: from now on, messages are authenticated.

    ``encrypts``: whether what follows `Welcome` is encrypted, too: both can.
    """

    nonce: _Nonce
    encrypts: bool = False


class Refusal(_Message, frozen=True):
    """The store does not let an agent in.

    ``why``: its version, its run id or its secret is another than the store's; or it cannot encrypt, and is to.
    ``version`` and ``name`` are the store's.
    """

    why: Literal["version", "run", "secret", "encrypt"]
    version: _Version
    name: _Name


class Enter(_Message, frozen=True):
    """The agent enters, and proves by it that it knows the secret. ``session``: the one that it has had, if any."""

    session: _Session | None


class Welcome(_Message, frozen=True):
    """The agent has entered.

    Attributes:
        session: If it is not the one that the agent has had, that one has ended, and its lease, too.
        ttl: Seconds after which the lease ends, if nothing is heard.
        store: Which store it is: one that is started again is another one.
    """

    session: _Session
    ttl: Annotated[float, Meta(gt=0, le=1e6)]
    store: _Session


class Beat(_Message, frozen=True):
    """The agent is there; and the store's answer."""


class Watch(_Message, frozen=True):
    """See `Store.watch`. `Read` is the answer; then come `Changes`. ``number``: the agent counts its requests."""

    number: _Number
    prefix: Key


class Unwatch(_Message, frozen=True):
    """See `Store.unwatch`."""

    prefix: Key


class Submit(_Message, frozen=True):
    """A transaction; `Made` is the answer."""

    number: _Number
    transaction: Transaction


class Made(_Message, frozen=True):
    """The end of a transaction. ``made``: whether its conditions held."""

    number: _Number
    made: bool
    revision: Revision


class Fetch(_Message, frozen=True):
    """See `Store.fetch`. `Read` is the answer."""

    number: _Number
    prefix: Key


_Items = Annotated[tuple[Entry, ...], Meta(max_length=1 << 20)]


class Read(_Message, frozen=True):
    """The keys below a prefix at a revision. ``more``: others follow in another message."""

    number: _Number
    revision: Revision
    items: _Items
    more: bool


class Changes(_Message, frozen=True):
    """What a revision has written below a watched prefix."""

    prefix: Key
    revision: Revision
    written: _Items
    deleted: Annotated[tuple[Key, ...], Meta(max_length=1 << 20)]


class Leave(_Message, frozen=True):
    """The agent goes, and gives its lease back; ``ends_job``: that of the job, too. `Left` is the answer."""

    ends_job: bool


class Left(_Message, frozen=True):
    """The agent has gone. The last message."""


T = TypeVar("T")


class DamagedError(ValueError):
    """What was read is no message that is expected here."""


_encoder = msgspec.msgpack.Encoder()


def write(message: Struct) -> bytes:
    """Return a message as bytes. Raises ValueError: a text in it is no Unicode."""
    return _encoder.encode(message)


class Reader(Generic[T]):
    """Reads messages of a type. Raises DamagedError.

    >>> read_hello(write(Beat()))
    Traceback (most recent call last):
    phalanx._store.hub.messages.DamagedError: Expected `array` of at least length 5, got 1
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def __call__(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise DamagedError(str(error)) from None


# Of an agent: its first two messages, and those that follow once it has entered; likewise of the store.
read_hello: Reader[Hello] = Reader(Hello)
read_enter: Reader[Enter] = Reader(Enter)
read_request: Reader[Watch | Unwatch | Submit | Fetch | Beat | Leave] = Reader(
    Watch | Unwatch | Submit | Fetch | Beat | Leave
)
read_answer: Reader[Challenge | Refusal] = Reader(Challenge | Refusal)
read_welcome: Reader[Welcome] = Reader(Welcome)
read_news: Reader[Read | Changes | Made | Beat | Left] = Reader(Read | Changes | Made | Beat | Left)


def parts(entries: tuple[Entry, ...]) -> Iterator[tuple[tuple[Entry, ...], bool]]:
    """Yield keys in parts that messages can have: the keys, and whether others follow. There is one part at least.

    >>> [(len(some), more) for some, more in parts((Entry("a", bytes(1 << 20), 1, 1), Entry("b", b"", 2, 2)))]
    [(1, True), (1, False)]
    >>> list(parts(()))
    [((), False)]
    """
    some: list[Entry] = []
    size = 0
    for entry in entries:
        if size >= _PART:
            yield tuple(some), True
            some, size = [], 0
        some.append(entry)
        size += len(entry.key) + len(entry.value)
    yield tuple(some), False
