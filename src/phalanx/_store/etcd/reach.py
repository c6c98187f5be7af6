"""Finds a member of an etcd that answers: which one is asked, and for how long it is waited for alone."""

from __future__ import annotations

import asyncio

from phalanx._store.etcd.session import BrokenError, RefusedError, Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._store.etcd.settings import EtcdSettings


ALONE = 0.5
"""Seconds after which the next member is asked, too; a tenth of the ttl, where that is less.

A member that is stopped, or cut off from the others, lets a request wait until its deadline. An agent that it has
served notices after two thirds of its ttl at the latest, and has to be heard by another member before the end of that.
"""


async def reach(settings: EtcdSettings, first: int) -> tuple[Session, int, Exception | None]:
    """Return a session with the member that answers before the others, and its revision.

    The members are asked in turn, from the one with the index ``first`` on: each when the one before it has failed, or
    has not answered for `ALONE`; it may answer yet. Where none answers, what is wrong with the first of them is
    returned, too: rather with one that answers, and cannot be used. Raises RefusedError.
    """
    count = len(settings.endpoints)
    asked: dict[asyncio.Future[int], Session] = {}
    failed: list[tuple[Session, Exception]] = []
    found: Session | None = None
    try:
        for number in range(first, first + count):
            session = Session(settings, settings.endpoints[number % count])
            asked[asyncio.ensure_future(session.greet(settings.prefix.encode()))] = session
            is_last = number == first + count - 1
            while asked:
                done, _ = await asyncio.wait(
                    asked,
                    timeout=None if is_last else min(ALONE, settings.ttl / 10),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    session, error = asked.pop(task), task.exception()
                    if error is None:
                        found = session
                        return session, task.result(), None
                    failed.append((session, _known(error)))
                if not is_last:
                    break
        found, error = next((one for one in failed if isinstance(one[1], BrokenError)), failed[0])
        return found, 0, error
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for session in (*asked.values(), *(one for one, _ in failed)):
            if session is not found:
                await session.close()


def _known(error: BaseException) -> Exception:
    """Return what has broken a session. Raises what is no reason to ask another member."""
    if isinstance(error, RefusedError) or not isinstance(error, Exception):
        raise error
    return error
