"""The settle window of a group: the looks at the other workers in it, and whether it may end early.

A worker that is on its way to a failure of its own (a traceback, a teardown) uses the processor. So a short window is
over as soon as that can be ruled out: the first failure was not brought about by a peer, which the launcher says, who
can read its evidence; no other worker has exited, or is on its way out; and each of them sleeps, and has used no CPU
time for a twentieth of the window. A worker that would have failed later in the window, and slept in that time, is
stopped instead; the cause that is named is the same (`_outcomes.result.stands_alone`). The processes that a worker has
started are not looked at.

A lost connection is brought about by a peer, as a rule, whose exception may still be on its way up, through handlers
that close what it had open. A short window lasts longer for such a first failure: until the launcher, which may be
busy, has reported that it is none.
"""

from __future__ import annotations

import time

from phalanx._base import clock
from phalanx._engine.protocol import SHORT_SETTLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx._base.loop import Loop
    from phalanx._engine.keeper.children import Children
    from phalanx._engine.keeper.waits import Waits

LOOKS = 20
"""The parts of a window, after each of which it may end."""

MOST = 128
"""Live workers that are looked at, at most: a look at one takes some 20 microseconds."""

_BEFORE = 0.01  # seconds before the end of the window in which workers are looked at once more


class Settling:
    """One group's settle window.

    Args:
        children: The workers.
        loop: Calls back for the looks.
        waits: Has the length of the window, and brings its end.
        lasts: Whether it is open.
        quiet: Called when it may end early.
    """

    def __init__(
        self, children: Children, loop: Loop, waits: Waits, lasts: Callable[[], bool], quiet: Callable[[], None]
    ) -> None:
        self._children = children
        self._loop = loop
        self._waits = waits
        self._lasts = lasts
        self._quiet = quiet
        self._conclusive = False
        self._began = 0.0
        self._left = LOOKS
        self._used: dict[int, int] = {}  # CPU time in nanoseconds of the live workers that do not leave, by pid

    def begin(self) -> None:
        """Open the window: the first failure has just been seen."""
        self._began = clock.now()
        window = self._waits.settle
        self._last(max(window, SHORT_SETTLE) if window else 0.0)
        self._loop.when_idle(lambda: self._note_exiting(early=True))
        if 0 < window <= SHORT_SETTLE and len(self._children.workers) <= MOST:
            self._used = self._cpu_times()
            self._look_later()

    def judged(self, rank: int, alone: bool | None) -> None:  # noqa: ARG002, FBT001 - as `protocol` has it
        """The first failure was not brought about by a peer; or it is a lost connection; None: that is not known."""
        self._conclusive = bool(alone)
        if alone is not False and self._lasts():
            self._last(self._waits.settle)

    def _last(self, window: float) -> None:
        """Let the window last for so many seconds from its beginning."""
        until = self._began + window
        self._waits.arm("SETTLED", until)
        if window > _BEFORE:  # not when it is over: a look at many takes milliseconds
            self._loop.at(until - _BEFORE, lambda: self._note_exiting(early=False))

    def _note_exiting(self, *, early: bool) -> None:
        self._children.note_exiting(self._lasts, early=early)

    def _look_later(self) -> None:
        self._left -= 1
        if self._used and self._left:  # with the last part, the window itself is over
            self._loop.after(self._waits.settle / LOOKS, self._look)

    def _look(self) -> None:
        if not self._lasts() or len(self._others()) < len(self._used):
            return
        before, self._used = self._used, self._cpu_times()
        if self._conclusive and before == self._used and self._all_sleep():
            self._quiet()
        else:
            self._look_later()

    def _others(self) -> list[int]:
        """The pids of the live workers, but for those that have failed and leave."""
        return [pid for pid, worker in self._children.workers.items() if not worker.leaving]

    def _cpu_times(self) -> dict[int, int]:
        """The CPU time of each of these, all of its threads together; {}: it cannot be read."""
        try:
            # The clock of another process, see clock_getcpuclockid(3). A pid that is not reaped is nobody else's.
            return {pid: time.clock_gettime_ns((~pid << 3) | 2) for pid in self._others()}
        except OSError:
            return {}

    def _all_sleep(self) -> bool:
        """Whether the main thread of each of these waits for something.

        One that waits for a processor, or for a disk, that is stopped, or on its way out, may have something to say;
        one that records an exception has. Its failure may have begun before the first one that was seen.
        """
        from phalanx._base import linux, procfs

        recording = linux.text_of(linux.RECORDING)
        try:
            stats = map(procfs.Stat, self._others())
            return all(stat.state == "S" and not stat.exiting and stat.comm != recording for stat in stats)
        except OSError:
            return False
