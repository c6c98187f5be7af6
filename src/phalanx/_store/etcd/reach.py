"""Finds a member of an etcd that answers: which one is asked, and for how long it is waited for alone."""

from __future__ import annotations

import asyncio

from phalanx._store.etcd.session import BrokenError, RefusedError, Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from phalanx._store.etcd.settings import EtcdSettings

    Asked = dict[asyncio.Future[int], Session]
    Failed = list[tuple[Session, Exception]]

ALONE = 0.5
"""Seconds after which the next member is asked, too; a tenth of the ttl, where that is less.

A member that is stopped, or cut off from the others, lets a request wait until its deadline. An agent that it has
served notices after two thirds of its ttl at the latest, and has to be heard by another member before the end of that.
"""

LEAST = 3
"""How many connections are begun at least, while none is made: one that was begun while the network was cut is made
seconds after that, for TCP waits ever longer until it tries again; a new one is made at once."""


async def reach(settings: EtcdSettings, first: int) -> tuple[Session, int, Exception | None]:
    """Return a session with the member that answers before the others, and its revision.

    The members are asked in turn, from the one with the index ``first`` on: each when the one before it has failed, or
    has not answered for `ALONE`; it may answer yet. Where none answers, what is wrong with the first of them is
    returned, too: rather with one that answers, and cannot be used. Raises RefusedError.
    """
    count = len(settings.endpoints)
    asked: Asked = {}
    failed: Failed = []
    kept: Session | None = None
    try:
        for number in range(max(count, LEAST)):
            endpoint = settings.endpoints[(first + number) % count]
            its = [session for session in asked.values() if session.endpoint == endpoint]
            has_failed = any(session.endpoint == endpoint for session, _ in failed)
            if not has_failed and not any(session.is_connected for session in its):
                session = Session(settings, endpoint)
                asked[asyncio.ensure_future(session.greet(settings.prefix.encode()))] = session
                if found := await _look(asked, failed, min(ALONE, settings.ttl / 10)):
                    kept, revision = found
                    return kept, revision, None
        while asked:
            if found := await _look(asked, failed, None):
                kept, revision = found
                return kept, revision, None
        kept, error = next((one for one in failed if isinstance(one[1], BrokenError)), failed[0])
        return kept, 0, error
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for session in (*asked.values(), *(session for session, _ in failed)):
            if session is not kept:
                await session.close()


async def _look(asked: Asked, failed: Failed, seconds: float | None) -> tuple[Session, int] | None:
    """Wait until a request has ended, or for so many seconds. Returns the session with an answer, or None."""
    done, _ = await asyncio.wait(asked, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        session, error = asked.pop(task), task.exception()
        if error is None:
            return session, task.result()
        if not isinstance(error, Exception):
            raise error
        failed.append((session, error))
        if isinstance(error, RefusedError):
            raise error
    return None


async def together(*steps: Coroutine[Any, Any, object]) -> None:
    """Take steps at once. Raises what one has raised, when all have ended: that etcd refuses us goes first."""
    ended = await asyncio.gather(*steps, return_exceptions=True)
    errors = [each for each in ended if isinstance(each, BaseException)]
    for error in sorted(errors, key=lambda each: not isinstance(each, RefusedError)):
        raise error
