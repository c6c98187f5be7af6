"""`EtcdStore`: the keys of a job in an etcd, version 3.4 or later, over gRPC.

The thread of `loop_thread` runs it: a session with one member at a time, with the stream that keeps the leases
alive, a stream for each watch, and one transaction after another. What breaks ends the session: `Away` says so, and the
next member is tried, within a second. A watch goes on from the revision that it has told last; where etcd has compacted
that, all is read anew.

An etcd that does not hold any more what it has told is none: its data were lost, or it is another one. It is tried
again, and `Away` says why.

A request that was lost on its way may have been made: it is not repeated, but for those that etcd has refused.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from phalanx._base import clock
from phalanx._store.etcd import api, loop_thread
from phalanx._store.etcd.session import BROKEN, BrokenError, Keys, RefusedError, Session, Watched, reach
from phalanx._store.etcd.settings import EtcdSettings
from phalanx._store.store import (
    JOB,
    KEPT,
    OWN,
    Away,
    Back,
    Done,
    Fetched,
    LeaseLost,
    Put,
    Refused,
    Store,
    StoreEvent,
    Transaction,
)  # fmt: skip

_PATIENCE = 1.0
_PAUSE = (0.05, 1.0)  # seconds between two tries to connect: the first, and the longest
_LASTING = 10.0  # seconds after which a session was a good one: the next try is a first one again
_code = api.grpc.StatusCode


class EtcdStore(Store):
    """The keys of a job in an etcd.

    Args:
        settings: How it is reached.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._owner = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Future[None] | None = None  # of all that is done for this store
        self._session: Session | None = None
        self._watched: dict[str, Watched] = {}
        self._queue: asyncio.Queue[tuple[int, Transaction]] = asyncio.Queue()
        self._keys = Keys(settings.prefix.encode())
        self._lease = 0
        self._own = b""  # a key that goes with the lease
        self._keeping = asyncio.Lock()  # a lease that is gone is made anew once
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._until = 0.0
        self._ends_job = False

    # --- any thread

    def open(self, deliver: Callable[[StoreEvent], None]) -> None:
        """See `Store`."""
        self._deliver = deliver
        self._settings.tls.read()
        self._loop = loop_thread.acquire()
        self._end = asyncio.run_coroutine_threadsafe(self._main(), self._loop)

    def watch(self, prefix: str) -> None:
        """See `Store`."""
        self._call(lambda: self._watch(prefix))

    def unwatch(self, prefix: str) -> None:
        """See `Store`."""
        self._call(lambda: self._unwatch(prefix))

    def submit(self, ticket: int, transaction: Transaction) -> None:
        """See `Store`."""
        self._call(lambda: self._queue.put_nowait((ticket, transaction)))

    def fetch(self, ticket: int, prefix: str) -> None:
        """See `Store`."""
        self._call(lambda: self._hold(asyncio.ensure_future(self._fetch(ticket, prefix))))

    def close(self, seconds: float, *, ends_job: bool = False) -> None:
        """See `Store`."""
        end = self._end
        if end is None or self._owner != os.getpid():
            return
        self._ends_job, self._until = ends_job, clock.now() + seconds
        self._call(self._closing.set)
        try:
            with suppress(TimeoutError):
                end.result(seconds + _PATIENCE)
        finally:  # a signal may raise while it waits
            self._loop = self._end = None
            loop_thread.release(_PATIENCE)

    def _call(self, action: Callable[[], None]) -> None:
        """Have an action carried out by the store's thread; if the store is closed, not at all."""
        loop = self._loop
        if loop is not None and self._owner == os.getpid():
            with suppress(RuntimeError):  # it has been closed just now
                loop.call_soon_threadsafe(action)

    # --- the store's thread

    async def _main(self) -> None:
        main = asyncio.ensure_future(self._carry_on())
        writer = asyncio.ensure_future(self._write_all())
        closing = asyncio.ensure_future(self._closing.wait())
        ended, _ = await asyncio.wait((main, writer, closing), return_when=asyncio.FIRST_COMPLETED)
        for task in ended:  # the agent must not wait for ever for what does not come
            error = asyncio.CancelledError("by grpc") if task.cancelled() else task.exception()
            if error is not None:
                self._deliver(Refused(f"the store has ended: {type(error).__name__}: {error}"))
        await closing  # refused: nothing follows but that
        await self._leave()
        tasks = (main, writer, *self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _hold(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_on(self) -> None:
        """Have one session after another, until etcd refuses us."""
        pause, since, endpoints = _PAUSE[0], clock.now(), self._settings.endpoints
        first, away = 0, ""
        while True:
            session = None
            try:
                session, revision, wrong = await reach(self._settings, first)
                first = endpoints.index(session.endpoint) + 1
                if wrong is not None:
                    raise wrong
                await self._settle(session, revision)
                self._session = session
                self._deliver(Back())
                since = clock.now()
                away = ""
                await self._stay(session)
            except RefusedError as error:
                self._deliver(Refused(str(error)))
                return
            except BROKEN as error:
                if session is None:
                    raise
                if self._session is session and clock.now() - since > _LASTING:
                    pause = _PAUSE[0]
                why = session.words(error)
                if why != away:
                    away = why
                    self._deliver(Away(why))
            finally:
                self._session = None
                if session is not None:
                    await session.close()
            await asyncio.sleep(pause * (1 + random.random()) / 2)  # noqa: S311 - it spreads retries
            pause = min(2 * pause, _PAUSE[1])

    async def _settle(self, session: Session, revision: int) -> None:
        """See that it is the etcd that it was, and see to the leases."""
        if self._lease:
            await self._keys.check(session, revision)
            await session.grant(self._settings.job_ttl, self._settings.job_lease)  # refused while etcd has no space
        await self._see_to_leases(session)

    async def _stay(self, session: Session) -> None:
        """Keep the leases, and follow the watches, until something breaks. Raises what that is."""
        for watched in self._watched.values():
            self._follow(session, watched)
        if self._own:
            self._guard(session)
        keeps = asyncio.ensure_future(self._keep(session))
        broken = asyncio.ensure_future(session.broken.wait())
        try:
            await asyncio.wait((keeps, broken), return_when=asyncio.FIRST_COMPLETED)
            if keeps.done():
                keeps.result()
            raise session.why or BrokenError("the session has ended")
        finally:
            tasks: list[asyncio.Future[Any]] = [keeps, broken, *session.followers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, session: Session) -> None:
        """Keep the leases alive."""
        while True:
            await asyncio.sleep(self._settings.ttl / 3)
            await self._see_to_leases(session)

    async def _see_to_leases(self, session: Session) -> None:
        """Keep the leases alive, once. One that is gone is made anew; of our own, that is told."""
        async with self._keeping:
            await self._see_to_own(session)
            await self._see_to_job(session)

    async def _see_to_own(self, session: Session) -> None:
        if not self._lease:
            self._lease = await session.grant(self._settings.ttl)
        elif not await session.keep(self._lease):
            await self._keys.check(session)
            self._lease = await session.grant(self._settings.ttl)
            self._deliver(LeaseLost())

    async def _see_to_job(self, session: Session) -> None:
        if not await session.keep(self._settings.job_lease):
            await session.grant(self._settings.job_ttl, self._settings.job_lease)

    def _guard(self, session: Session) -> None:
        session.followers.add(asyncio.ensure_future(self._see_lease_end(session)))

    async def _see_lease_end(self, session: Session) -> None:
        """Have the lease made anew at once when etcd has ended it, and not when it is to be kept alive again.

        Etcd before 3.4.31 and 3.5.13 ends leases that are kept alive: a leader that was stopped for longer than their
        ttl, and goes on, takes them for expired, and has the new leader end them. It may be gone before its key is
        watched. What breaks ends the session.
        """
        try:
            async for _ in session.deletions(self._own):
                if not self._closing.is_set():
                    await self._see_to_leases(session)
        except BROKEN as error:
            session.end(error)

    # --- watches

    def _watch(self, prefix: str) -> None:
        self._unwatch(prefix)
        watched = self._watched[prefix] = Watched(prefix)
        if self._session is not None:
            self._follow(self._session, watched)

    def _unwatch(self, prefix: str) -> None:
        watched = self._watched.pop(prefix, None)
        if watched is not None and watched.follower is not None:
            watched.follower.cancel()
            if self._session is not None:
                self._session.followers.discard(watched.follower)
                self._hold(watched.follower)

    def _follow(self, session: Session, watched: Watched) -> None:
        watched.follower = asyncio.ensure_future(watched.tell(session, self._keys, self._deliver))
        session.followers.add(watched.follower)

    # --- requests

    async def _write_all(self) -> None:
        """Make one transaction after another, in their order."""
        while True:
            ticket, transaction = await self._queue.get()
            try:
                self._deliver(await self._write(ticket, transaction))
            finally:
                self._queue.task_done()

    async def _write(self, ticket: int, transaction: Transaction) -> Done:
        session, lease = self._session, self._lease
        if session is None:
            return Done(ticket, None, 0)
        try:
            try:
                answer = await session.txn(self._request(transaction))
            except api.aio.AioRpcError as error:
                if error.code() != _code.NOT_FOUND:
                    raise
                await self._see_to_leases(session)  # one of them is not there, so nothing was written
                if self._lease != lease:  # what was to be written with the old one is out of date
                    return Done(ticket, None, 0)
                answer = await session.txn(self._request(transaction))
        except BROKEN as error:
            session.end(error)
            return Done(ticket, None, 0)
        self._keys.see(answer.header.revision)
        if answer.succeeded:
            self._note_made(session, transaction, answer.header.revision)
        return Done(ticket, answer.succeeded, answer.header.revision)

    def _note_made(self, session: Session, transaction: Transaction, revision: int) -> None:
        for write in (write for write in transaction.writes if isinstance(write, Put)):
            key = self._keys.prefix + write.key.encode()
            self._keys.see(revision, key)
            if write.lease == OWN and not self._own:
                self._own = key
                self._guard(session)

    def _request(self, transaction: Transaction) -> Any:
        return api.transaction_message(
            transaction, self._keys.prefix, {OWN: self._lease, JOB: self._settings.job_lease, KEPT: 0}
        )

    async def _fetch(self, ticket: int, prefix: str) -> None:
        entries, session = None, self._session
        if session is not None:
            try:
                entries, _ = await self._keys.read(session, prefix)
            except BROKEN as error:
                session.end(error)
        self._deliver(Fetched(ticket, entries))

    async def _leave(self) -> None:
        """Give the leases back, once what was submitted is made."""
        if (session := self._session) is None:
            return
        with suppress(BROKEN):
            async with asyncio.timeout(max(0.1, self._until - clock.now())):
                await self._queue.join()
                for lease in filter(None, (self._lease, self._ends_job and self._settings.job_lease)):
                    await session.revoke(lease)
