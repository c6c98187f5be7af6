"""Sessions with the members of an etcd: what one member is asked over a channel, which one answers, what it watches.

Owns what an etcd has said of its revisions, by which it is known again when it answers after a while.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from phalanx._store.etcd import api
from phalanx._store.etcd.settings import EtcdSettings
from phalanx._store.store import Changed, Entry, Snapshot

MOST_BYTES = 64 << 20
"""Of an answer of etcd's that is taken."""
_PAGE = 32  # keys of one answer: etcd takes values of 1.5 MiB

_LEADER = (("hasleader", "true"),)  # has etcd end a stream of a member that has lost its leader

_PREFACE = re.compile(r"^(.*last error: )?([A-Z_]+: )?(ipv[46]:\S+: )?", re.DOTALL)  # of what grpc says
_ENDED = "the session has ended"
_WATCH_ENDED = "etcd has ended a watch"
_CLOSED = "Socket closed"
_FOREIGN = "Failed parsing HTTP/2"  # so grpc begins on what does not speak it
_OLDER_HTTP = "http1.x"
_code = api.grpc.StatusCode
_NEVER = (_code.UNAUTHENTICATED, _code.PERMISSION_DENIED, _code.UNIMPLEMENTED)
_OUTDATED = (_code.UNAUTHENTICATED, _code.INVALID_ARGUMENT)  # a token; the second: users were changed meanwhile


class RefusedError(Exception):
    """Etcd does not have us, and will not."""


class BrokenError(Exception):
    """The session has broken."""


BROKEN = Exception
"""What is raised when a session has broken: of grpc that is more than its AioRpcError, such as InvalidStateError."""


class Session:
    """What one member of the etcd is asked, over one channel. Its methods raise RefusedError, and `BROKEN`."""

    def __init__(self, settings: EtcdSettings, endpoint: str) -> None:
        self._channel: Any = None
        self._settings = settings
        self.endpoint = endpoint
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._has_answered = False
        self._keeper: Any = None
        self._keeping = asyncio.Lock()  # a stream takes one message at a time
        self.broken = asyncio.Event()
        self.why: Exception | None = None
        self.followers: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin to connect. The files for TLS are read each time: certificates are renewed while a job runs."""
        options = (
            ("grpc.max_receive_message_length", MOST_BYTES),
            ("grpc.max_send_message_length", MOST_BYTES),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        )
        files = self._settings.tls.read()
        if files is None:
            self._channel = api.aio.insecure_channel(self.endpoint, options=options)
        else:
            credentials = api.grpc.ssl_channel_credentials(*files)
            self._channel = api.aio.secure_channel(self.endpoint, credentials, options=options)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, on which the member has said something."""
        return self._channel is not None and self._channel.get_state() == api.grpc.ChannelConnectivity.READY

    def words(self, error: Exception) -> str:
        """Return what has broken the session, in words."""
        if not isinstance(error, api.aio.AioRpcError):
            said = str(error)
        elif error.code() == _code.DEADLINE_EXCEEDED:
            said = ""
        else:
            said = _PREFACE.sub("", error.details() or error.code().name.lower())
        said = self._settings.tls.words(said, self.endpoint.rpartition(":")[0])
        if said.startswith(_FOREIGN):
            spoken = ", it speaks HTTP" if _OLDER_HTTP in said else ""
            said = f"what answers there is no etcd{spoken}: another port is needed"
        if said == _CLOSED and not (self._has_answered or self._settings.ca or self._settings.cert):
            said += ", as an etcd does that wants TLS (ca=PATH)"
        return f"{self.endpoint}: {said or 'no answer in time'}"

    def end(self, why: Exception) -> None:
        """End the session: what uses it has broken."""
        self.why = self.why or why
        self.broken.set()

    async def _ask(self, method: api.Method, **fields: Any) -> Any:
        request = fields.pop("request", None) or api.messages[method.request](**fields)
        for is_last in (not self._settings.user, True):
            try:
                return await self._call(method, request, self._metadata)
            except api.aio.AioRpcError as error:
                if is_last or error.code() not in _OUTDATED:
                    if error.code() in _NEVER:
                        raise self._refused(error) from None
                    raise
            await self.authenticate()  # the token has expired: etcd has not looked at the request
        raise AssertionError

    def _refused(self, error: api.aio.AioRpcError) -> RefusedError:
        return RefusedError(f"etcd at {self.endpoint} refuses this agent: {error.details()}")

    async def _call(self, method: api.Method, request: Any, metadata: tuple[tuple[str, str], ...]) -> Any:
        if self._channel is None:
            raise BrokenError(_ENDED)
        with _not_cancelled():
            call = api.call(self._channel.unary_unary, method)
            answer = await call(request, timeout=self._settings.timeout, metadata=metadata)
        self._has_answered = True
        return answer

    async def authenticate(self) -> None:
        """Say who we are. Raises RefusedError."""
        settings = self._settings
        if not settings.user:
            return
        try:
            request = api.messages["AuthenticateRequest"](name=settings.user, password=settings.password)
            answer = await self._call(api.AUTHENTICATE, request, ())
        except api.aio.AioRpcError as error:
            if error.code() in (_code.INVALID_ARGUMENT, _code.FAILED_PRECONDITION, *_NEVER):
                msg = f"etcd at {self.endpoint} refuses the user {settings.user!r}: {error.details()}"
                raise RefusedError(msg) from None
            raise
        except UnicodeEncodeError:
            raise RefusedError(f"the name or the password of the user {settings.user!a} is not UTF-8") from None
        self._metadata = (("token", answer.token),)

    async def check(self, prefix: bytes) -> int:
        """See that etcd lets us have the keys below a prefix. Returns its revision."""
        try:
            answer = await self._ask(api.RANGE, key=prefix, range_end=api.end_of(prefix), limit=1)
        except api.aio.AioRpcError as error:
            if error.code() == _code.INVALID_ARGUMENT:  # no user is named
                raise self._refused(error) from None
            raise
        return int(answer.header.revision)

    async def grant(self, ttl: int, lease: int = 0) -> int:
        """Have a lease made, if it is not there. Returns its id."""
        try:
            return int((await self._ask(api.GRANT, TTL=ttl, ID=lease)).ID)
        except api.aio.AioRpcError as error:
            if error.code() == _code.FAILED_PRECONDITION and lease:  # it is there
                return lease
            raise

    async def keep(self, lease: int) -> bool:
        """Keep a lease alive. Returns whether it is there."""
        patience = min(self._settings.timeout, self._settings.ttl / 3)  # another member has to hear of us in time
        async with asyncio.timeout(patience), self._keeping:
            if self._channel is None:
                raise BrokenError(_ENDED)
            if self._keeper is None:
                self._keeper = api.call(self._channel.stream_stream, api.KEEP_ALIVE)(
                    metadata=(*self._metadata, *_LEADER)
                )
            with _not_cancelled():
                with suppress(asyncio.InvalidStateError):  # the stream has ended: the read tells why
                    await self._keeper.write(api.messages["LeaseKeepAliveRequest"](ID=lease))
                answer = await self._keeper.read()
        if answer is api.aio.EOF:
            raise BrokenError("etcd has ended the stream of leases")
        return bool(answer.TTL > 0)

    async def revoke(self, lease: int) -> None:
        """Give a lease back."""
        await self._ask(api.REVOKE, ID=lease)

    async def txn(self, request: Any) -> Any:
        """Make a transaction."""
        return await self._ask(api.TXN, request=request)

    async def range(self, prefix: bytes) -> tuple[list[Any], int]:
        """Read all keys below a prefix. Returns them, and at which revision they were so."""
        kvs: list[Any] = []
        first, end, revision = prefix, api.end_of(prefix), 0
        while True:
            answer = await self._ask(api.RANGE, key=first, range_end=end, revision=revision, limit=_PAGE)
            kvs += answer.kvs
            revision = revision or answer.header.revision
            if not answer.more:
                return kvs, revision
            first = kvs[-1].key + b"\0"

    async def greet(self, prefix: bytes) -> int:
        """Connect, say who we are, and see that etcd lets us have the keys below a prefix. Returns its revision."""
        self.open()
        await self.authenticate()
        return await self.check(prefix)

    async def has_written(self, key: bytes, revision: int) -> bool:
        """Whether etcd has written a key at a revision. What it has compacted since then it cannot tell: True."""
        try:
            answer = await self._ask(api.RANGE, key=key, revision=revision)
        except api.aio.AioRpcError as error:
            if error.code() == _code.OUT_OF_RANGE:  # it is compacted, or yet to come
                return "compacted" in (error.details() or "")
            raise
        return any(kv.mod_revision == revision for kv in answer.kvs)

    def watch(self, prefix: bytes, revision: int) -> AsyncIterator[Any]:
        """Return what etcd tells of the keys below a prefix, from a revision on."""
        return self._watch(key=prefix, range_end=api.end_of(prefix), start_revision=revision)

    async def deletions(self, key: bytes) -> AsyncIterator[None]:
        """Yield once a key is watched, and at each deletion from then on. Raises BrokenError: etcd ends the watch."""
        async for response in self._watch(key=key, filters=[api.NO_PUT]):
            if response.canceled:
                raise BrokenError(response.cancel_reason or _WATCH_ENDED)
            if response.created or response.events:
                yield
        raise BrokenError(_WATCH_ENDED)

    async def _watch(self, **fields: Any) -> AsyncIterator[Any]:
        """Yield what etcd tells of a watch. Where it refuses that, a token may have expired: it is asked again."""
        create = api.messages["WatchRequest"](create_request=api.messages["WatchCreateRequest"](**fields))
        for is_last in (not self._settings.user, True):
            if self._channel is None:
                raise BrokenError(_ENDED)
            call = api.call(self._channel.stream_stream, api.WATCH)(metadata=(*self._metadata, *_LEADER))
            try:
                await call.write(create)
                while (response := await call.read()) is not api.aio.EOF:
                    if response.created and response.canceled and not is_last:
                        break
                    yield response
                else:
                    return
            finally:
                call.cancel()
            await self.check(self._settings.prefix.encode())  # a request renews a token, and a watch does not

    async def close(self) -> None:
        """Close the channel. Calls of grpc's refer to themselves, and to its socket: a collection closes that."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        self.followers.clear()
        self.why = None


@contextmanager
def _not_cancelled() -> Iterator[None]:
    """Raise BrokenError where a call was cancelled and the task was not: the channel was closed meanwhile."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BrokenError(_ENDED) from None


ALONE = 0.5
"""Seconds after which the next member is asked, too; a tenth of the ttl, where that is less.

A member that is stopped, or cut off from the others, lets a request wait until its deadline. An agent that it has
served notices after two thirds of its ttl at the latest, and has to be heard by another member before the end of that.
"""

LEAST = 3
"""How many connections are begun at least, while none is made: one that was begun while the network was cut is made
seconds after that, for TCP waits ever longer until it tries again; a new one is made at once."""


def _has_failed_or_may_answer(endpoint: str, opened: Iterable[Session], asked: Collection[Session]) -> bool:
    return any(each.endpoint == endpoint and (each.is_connected or each not in asked) for each in opened)


async def reach(settings: EtcdSettings, first: int) -> tuple[Session, int, Exception | None]:
    """Return a session with the member that answers before the others, and its revision.

    The members are asked in turn, from the one with the index ``first`` on: each when the one before it has failed, or
    has not answered for `ALONE`; it may answer yet. Where none answers, what is wrong with the first of them is
    returned, too: rather with one that answers, and cannot be used. Raises RefusedError.
    """
    endpoints = itertools.cycle((*settings.endpoints[first:], *settings.endpoints[:first]))
    left = list(itertools.islice(endpoints, max(len(settings.endpoints), LEAST)))
    asked: dict[asyncio.Future[int], Session] = {}
    failed: list[tuple[Session, Exception]] = []
    opened: list[Session] = []
    kept: Session | None = None
    try:
        while left or asked:
            if left:
                endpoint, *left = left
                if _has_failed_or_may_answer(endpoint, opened, asked.values()):
                    continue
                session = Session(settings, endpoint)
                opened.append(session)
                asked[asyncio.ensure_future(session.greet(settings.prefix.encode()))] = session
            seconds = min(ALONE, settings.ttl / 10) if left else None
            done, _ = await asyncio.wait(asked, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                session, error = asked.pop(task), task.exception()
                if error is None:
                    kept = session
                    return kept, task.result(), None
                if not isinstance(error, Exception) or isinstance(error, RefusedError):
                    raise error
                failed.append((session, error))
        kept, wrong = next((one for one in failed if isinstance(one[1], BrokenError)), failed[0])
        return kept, 0, wrong
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for session in opened:
            if session is not kept:
                await session.close()


class Keys:
    """The keys of a job, as an etcd has them.

    Args:
        prefix: What they begin with there.
    """

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self._newest = 0  # the newest revision that the etcd has told
        self._written: tuple[bytes, int] | None = None  # the latest of which a key is known that it has written

    def see(self, revision: int, key: bytes = b"") -> None:
        """Note a revision. ``key``: what it has written; empty: that is not known."""
        self._newest = max(self._newest, revision)
        if key and (self._written is None or revision > self._written[1]):
            self._written = key, revision

    async def check(self, session: Session, revision: int = 0) -> None:
        """Check that an etcd, at a revision, holds what it has told. Raises BrokenError: it has lost its data.

        The revision alone does not show that: in an etcd that began anew, others may have written as often meanwhile.
        An etcd cannot say what it has compacted since then: watches then tell all there is.
        """
        if 0 < revision < self._newest:  # a watch would tell nothing until it has as many again
            raise BrokenError(f"it has lost what it held: it was at revision {self._newest}, and is before that")
        if self._written is not None and not await session.has_written(*self._written):
            key, at = self._written
            raise BrokenError(
                f"it has lost what it held: it has not written {key.decode(errors='replace')} at revision {at}"
            )

    async def read(self, session: Session, prefix: str) -> tuple[tuple[Entry, ...], int]:
        """Return the keys below a prefix, and the revision at which they are so."""
        kvs, revision = await session.range(self.prefix + prefix.encode())
        self.see(revision)
        for kv in kvs:
            self.see(kv.mod_revision, kv.key)
        return tuple(self.entry(kv) for kv in kvs), revision

    def entry(self, kv: Any) -> Entry:
        """Return a key of etcd's as the store tells it."""
        return Entry(self.name(kv.key), kv.value, kv.create_revision, kv.mod_revision)

    def name(self, key: bytes) -> str:
        """Return the name of a key of etcd's."""
        return key[len(self.prefix) :].decode("utf-8", "replace")


class Watched:
    """A prefix that is watched, and up to which revision it has been told; -1: all is to be read."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.revision = -1
        self.follower: asyncio.Task[None] | None = None

    async def tell(self, session: Session, keys: Keys, deliver: Callable[[Snapshot | Changed], None]) -> None:
        """Tell all keys below the prefix, and what becomes of them. What breaks ends the session."""
        try:
            while True:
                try:
                    await self._tell_changes(session, keys, deliver)
                except api.aio.AioRpcError as error:
                    if error.code() != _code.RESOURCE_EXHAUSTED or self.revision < 0:
                        raise  # the latter: all keys are asked for again in a while, by another session
                    self.revision = -1  # more has changed meanwhile than one message may hold
        except BROKEN as error:
            session.end(error)

    async def _tell_changes(self, session: Session, keys: Keys, deliver: Callable[[Snapshot | Changed], None]) -> None:
        """Tell what changes, until the stream ends: etcd has compacted what was to be told.

        All keys are read once the watch is there, and not before it: a watch from a revision on that is not the last
        is served by etcd's next look at those that lag behind, which is 0.1 s later. The revision 0 is the present.
        """
        read = 0
        async for response in session.watch(keys.prefix + self.prefix.encode(), self.revision + 1):
            if response.canceled:
                if not response.compact_revision:
                    raise BrokenError(response.cancel_reason or _WATCH_ENDED)
                self.revision = -1
                return
            if self.revision < 0:
                entries, read = await keys.read(session, self.prefix)
                self.revision = read
                deliver(Snapshot(self.prefix, read, entries))
            for revision, events in itertools.groupby(response.events, key=lambda event: event.kv.mod_revision):
                if revision <= read:
                    continue
                written, deleted = [], []
                for event in events:
                    if event.type == api.DELETE:
                        deleted.append(keys.name(event.kv.key))
                    else:
                        written.append(keys.entry(event.kv))
                        keys.see(revision, event.kv.key)
                self.revision = revision
                keys.see(revision)
                deliver(Changed(self.prefix, revision, tuple(written), tuple(deleted)))
        raise BrokenError(_WATCH_ENDED)
