"""The pages that are served: made when a browser asks, once per change for all of them, watched while a browser does.

Owns how much time goes into that, and what is kept. What pages are made of, and when that has changed, `sources` says.
All of it but the making is the event loop's, which waits for no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from http import HTTPStatus
from typing import NamedTuple, TypeVar

from phalanx._base import clock
from phalanx._base.stderr import mention
from phalanx._base.text import one_line
from phalanx._base.threads import SerialExecutor
from phalanx._base.tty import printable
from phalanx._serve.sources import ListSource, NoPageError, RunSource, Source, find_run

MOST_WATCHERS = 64
"""Streams of events at a time."""

MOST_KEPT = 16
"""Pages of runs that are kept: the latest that were asked for, and those that are watched."""

LEAST_PAUSE = 1.0
"""Seconds between two looks at what a page is made of, at the least;"""

SHARE = 10
"""and so many times as long as it takes to look at, and to make, all pages that are watched."""

_GONE = "gone"
_LEVEL = 4  # of gzip: of a page of 2 MB, 20 ms

_Result = TypeVar("_Result")


class Page(NamedTuple):
    """What is answered: HTML if the status is OK, else a line of text; compressed by gzip."""

    version: int
    status: HTTPStatus
    body: bytes

    def text(self) -> bytes:
        """Return it as it was before it was compressed."""
        return gzip.decompress(self.body)


class FullError(Exception):
    """As many watch as may."""


class LivePage:
    """A page as it is now.

    Args:
        source: What it is made of.
        pages: Those that it is one of.

    Attributes:
        version: A number that grows with each change. Later servers have higher ones.
        watchers: How many wait for changes.
        is_gone: Whether there is nothing any more that it is made of.
        cost: Seconds that the latest look at its source, and the latest making of it, have taken.
    """

    def __init__(self, source: Source, pages: Pages) -> None:
        self.version = time.time_ns() // 1_000_000
        self.watchers = 0
        self.is_gone = False
        self._source, self._pages = source, pages
        self._page: Page | None = None
        self._state: Hashable = None
        self._due = 0.0
        self._look_cost = self._make_cost = 0.0
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    @property
    def cost(self) -> float:
        """See the class."""
        return self._look_cost + self._make_cost

    async def current(self) -> Page:
        """Return the page: the one that there is, if nothing has changed, or too little time has passed."""
        async with self._lock:
            await self._look()
            if self._page is None or self._page.version != self.version:
                make = functools.partial(self._made, self.version)
                page, self._make_cost = await call(self._pages.making, lambda: _timed(make))
                self._page = page
                self._pause()
            return self._page

    async def change(self, known: int) -> None:
        """Return once the version is another than ``known``, or the server ends."""
        while self.version == known and not self._pages.is_closed:
            await self._changed.wait()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look for changes as long as the context is open. Raises FullError."""
        if self._pages.watchers >= MOST_WATCHERS:
            raise FullError
        self.watchers += 1
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers and self._watching is not None:
                self._watching.cancel()
                self._watching = None

    def wake(self) -> None:
        """Have all that wait for changes look whether there is one."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._due - clock.now()))
            async with self._lock:
                await self._look()

    async def _look(self) -> None:
        """Look whether the source has changed, if it is time."""
        if clock.now() < self._due:
            return
        try:
            state, self._look_cost = await call(self._pages.looking, lambda: _timed(self._seen))
        except RuntimeError as error:  # no thread can be started: there may be one later
            mention(f"phalanx: changes are not seen now: {error}")
            self._pause()
            return
        self.is_gone = state == _GONE
        if self._state not in (None, state):
            self.version = max(self.version + 1, time.time_ns() // 1_000_000)
            self.wake()
        self._state = state
        self._pause()

    def _pause(self) -> None:
        self._due = clock.now() + max(LEAST_PAUSE, SHARE * self._pages.cost(self))

    # --- on threads

    def _seen(self) -> Hashable:
        try:
            return self._source.state()
        except FileNotFoundError:
            return _GONE
        except Exception as error:  # noqa: BLE001 - whatever it is: when it becomes another one, the page is made anew
            return repr(error)

    def _made(self, version: int) -> Page:
        status = HTTPStatus.OK
        try:
            text = self._source.make(version)
        except NoPageError as error:
            status, text = error.status, f"{printable(str(error))}\n"
        except Exception as error:  # noqa: BLE001 - whatever lies in a folder: the next page is made all the same
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, f"This page cannot be made: {printable(one_line(error))}\n"
            mention(f"phalanx: {text.rstrip()} ({type(error).__name__})")
        return Page(version, status, gzip.compress(text.encode("utf-8", "backslashreplace"), _LEVEL, mtime=0))


class Pages:
    """All pages.

    Args:
        roots: The folders that hold runs.
        controls: Whether pages have buttons.

    Attributes:
        runs: The page of the list.
        looking, making: The threads that look at the sources, and make pages.
        is_closed: Whether the server ends.
    """

    def __init__(self, roots: Sequence[str], *, controls: bool) -> None:
        self._roots, self._controls = roots, controls
        self.looking, self.making = SerialExecutor("phalanx-looking"), SerialExecutor("phalanx-making")
        self.is_closed = False
        self.runs = LivePage(ListSource(roots), self)
        self._of_runs: dict[str, LivePage] = {}

    @property
    def watchers(self) -> int:
        """How many wait for changes, of all pages."""
        return sum(page.watchers for page in self._all())

    def cost(self, page: LivePage) -> float:
        """Return what all pages cost that are watched, and this one."""
        return sum(one.cost for one in self._all() if one.watchers or one is page)

    async def path(self, name: str) -> str:
        """Return the folder of a run; "": there is none of this very name."""
        return await call(self.looking, lambda: find_run(self._roots, name))

    async def of_run(self, name: str) -> LivePage | None:
        """Return the page of a run; None: there is none of this very name."""
        page = self._of_runs.get(name)
        if page is None or page.is_gone:
            path = await self.path(name)
            if not path:
                return None
            page = self._of_runs.get(name) or LivePage(RunSource(path, controls=self._controls), self)
        self._of_runs.pop(name, None)
        self._of_runs[name] = page  # the latest
        idle = [other for other, one in self._of_runs.items() if not one.watchers and one is not page]
        for each in idle[: max(0, len(self._of_runs) - MOST_KEPT)]:
            del self._of_runs[each]
        return page

    def close(self) -> None:
        """Have all that wait for changes end."""
        self.is_closed = True
        for page in self._all():
            page.wake()

    def _all(self) -> list[LivePage]:
        return [self.runs, *self._of_runs.values()]


def _timed(function: Callable[[], _Result]) -> tuple[_Result, float]:
    began = clock.now()
    return function(), clock.now() - began


async def call(executor: SerialExecutor, function: Callable[[], _Result]) -> _Result:
    """Call a function on an executor's thread, and return what it returns. Whoever is cancelled does not wait for it.

    Raises what it raises; RuntimeError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def act() -> None:
        try:
            outcome: Callable[[], None] = functools.partial(done.set_result, function())
        except Exception as error:  # noqa: BLE001 - it is the caller's
            outcome = functools.partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

    if not executor.submit(act):
        raise RuntimeError("no thread can be started")
    return await done
