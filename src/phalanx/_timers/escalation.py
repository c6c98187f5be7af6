"""What a group does about a worker that hangs, step by step, as its owner wants it. Runs in the keeper.

Owns the order of things once a timer has expired: whose it is, the steps and their delays, the signals to what hangs.
Before a step that signals, the launcher is asked to take the stacks of all ranks, and is given `EVIDENCE_WAIT` for it:
a launcher that is busy or stopped holds up no kill. Does not know how timers are set (`timetable`), and writes nothing.
"""

from __future__ import annotations

import os

from phalanx._base import clock, linux
from phalanx._base.process import Process, lineage
from phalanx._base.suspension import wait_slice
from phalanx._timers.hang import Hang
from phalanx._timers.scheduler import Lookout

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

    from phalanx._base.deadlines import Deadline
    from phalanx._base.loop import Loop
    from phalanx._timers.timetable import Timer, Timetable
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms

EVIDENCE_WAIT = 1.0
"""Seconds from the moment of a step that signals until it is taken without the launcher's evidence."""

_FOREVER = float("inf")

_AGAIN = clock.NS  # nanoseconds after which somebody is looked up again who could not be
_SHORTEST = clock.NS // 10  # nanoseconds until a timer that was reported is so again
_SURVIVED = 1.0  # seconds from one look at what was sent a signal to the next
_SIGNALS = {"terminate": int(signal.SIGTERM), "kill": linux.SIGKILL}


class Escalation:
    """Watches one group's timers, in the keeper's loop.

    Args:
        table: The group's; closed with this.
        steps: What follows an expiry, in order: name and delay in seconds.
        loop: What waits.
        pids: Gives the live workers by rank; none once the group is being stopped.
        send: Sends one worker, by its pid, a signal.
        tell: Sends the launcher a message.
    """

    def __init__(
        self,
        table: Timetable,
        steps: Sequence[tuple[str, float]],
        loop: Loop,
        pids: Callable[[], dict[int, int]],
        send: Callable[[int, int], None],
        tell: Callable[..., object],
    ) -> None:
        self._table = table
        self._steps = steps
        self._loop = loop
        self._pids = pids
        self._send = send
        self._tell = tell
        self._refused: set[int] = set()
        self._serial = 0
        self._asked: dict[int, tuple[int, list[Hang], Deadline | None]] = {}  # steps, until the launcher has testified
        self._lookout = Lookout(table, loop, self._on_expired, self._on_seen)

    def open(self) -> None:
        """Begin."""
        self._lookout.open()

    def close(self) -> None:
        """End, and let go of the table."""
        self._lookout.close()
        self._table.close()

    # --- who

    def _on_seen(self, timers: list[Timer]) -> None:
        self._tell_of(self._whose(timers), "armed")

    def _on_expired(self, timers: list[Timer]) -> None:
        hangs = self._silent(self._whose(timers))
        self._tell_of(hangs, "expired")
        if hangs:
            self._after(0, hangs)

    def _tell_of(self, hangs: list[Hang], *what: object) -> None:
        """Say something of these, unless there are none. It fits a packet: of more than a few nobody ever speaks."""
        if hangs:
            self._tell(*what, clock.now_ns(), [hang.told for hang in hangs])

    def _silent(self, hangs: list[Hang]) -> list[Hang]:
        """These, but for heartbeats that nobody expects: of who is below a process that rests, or a silent worker."""
        workers = {hang.rank for hang in hangs if hang.own and not hang.timer.slot}
        resting = self._resting(hangs)
        silent = []
        for hang in hangs:
            if not hang.timer.slot:
                try:
                    if (hang.rank in workers and not hang.own) or self._rests(hang, resting):
                        continue
                except OSError:  # there is no descriptor left to find out
                    self._lookout.rearm(hang.timer, clock.now_ns() + _AGAIN)
                    continue
            silent.append(hang)
        return silent

    def _resting(self, hangs: list[Hang]) -> set[int]:
        """The processes that rest, if any of these is a heartbeat: only then it is of interest."""
        return self._table.resting() if any(not hang.timer.slot for hang in hangs) else set()

    def _rests(self, hang: Hang, resting: set[int]) -> bool:
        """Whether a heartbeat has been ended, by its process or by one above it. Raises OSError.

        A process that has left its worker's tree (a double fork) is taken for one of the worker's.
        """
        if not resting:
            return False
        above = _ancestors(hang.pid)
        if os.getpid() in above:  # from here on, nobody is of the group
            above = above[: above.index(os.getpid())]
        return not resting.isdisjoint((hang.pid, self._pids().get(hang.rank, 0), *above))

    def _whose(self, timers: list[Timer]) -> list[Hang]:
        """Those that belong to ranks of this group; none once they are about to be ended anyway."""
        ranks = {pid: rank for rank, pid in self._pids().items()}
        if not ranks:
            return []
        owners: dict[int, tuple[int, int] | None] = {}
        hangs = []
        for timer in timers:
            if timer.seat not in owners:
                owners[timer.seat] = self._owner(timer, ranks)
            owner = owners[timer.seat]
            if owner is None:
                self._lookout.rearm(timer, clock.now_ns() + _AGAIN)
            elif owner[1]:
                rank, holder = owner
                hangs.append(Hang(rank, holder, holder in ranks, timer))
        return hangs

    def _owner(self, timer: Timer, ranks: dict[int, int]) -> tuple[int, int] | None:
        """The rank and the process that a timer belongs to; no process, if that is nobody of this group.

        None: there is no descriptor left to find out.
        """
        holder = self._table.holder(timer.seat)
        if holder in ranks:
            return ranks[holder], holder
        if not holder:  # it has ended, and its timers with it
            return -1, 0
        try:
            above = _ancestors(holder)
        except OSError:
            return None
        rank = next((ranks[pid] for pid in above if pid in ranks), -1)
        if rank < 0 and os.getpid() in above:  # an orphan, which we have adopted
            claimed = self._table.rank(timer.seat)
            rank = claimed if claimed in ranks.values() else -1
        if rank >= 0:
            return rank, holder
        if holder not in self._refused:
            self._refused.add(holder)
            self._tell("refused", holder, timer.scope, timer.place)
        return -1, 0

    # --- what follows

    def _after(self, step: int, hangs: list[Hang]) -> None:
        """Take step number ``step`` when its time comes. Who is stopped with us meanwhile has more time, as a timer."""
        delay = self._steps[step][1]
        began = clock.now()

        def look() -> None:
            now = clock.now()
            left = began + delay + self._loop.pauses.lost(began) - now
            if left > 0:  # in parts, so that a pause is seen
                self._loop.at(now + min(left, wait_slice(delay)), look)
            else:
                self._take(step, hangs)

        look()

    def _take(self, step: int, hangs: list[Hang]) -> None:
        hangs = self._still(hangs)
        if hangs:
            self._ask(step, hangs)
            if self._steps[step][0] not in _SIGNALS and step + 1 < len(self._steps):
                self._after(step + 1, hangs)

    def _ask(self, step: int, hangs: list[Hang]) -> None:
        """Have the launcher take the evidence that belongs to a step, or say what there is to be said."""
        name = self._steps[step][0]
        number = _SIGNALS.get(name, 0)
        self._serial += 1
        serial = self._serial
        late = self._loop.after(EVIDENCE_WAIT, lambda: self.testified(serial)) if number else None
        self._asked[serial] = (step, hangs, late)
        self._tell_of(hangs, "hang", serial, name, number)

    def testified(self, serial: int) -> None:
        """The launcher has the evidence of a step; or is too late with it, and the step is taken all the same."""
        step, hangs, late = self._asked.pop(serial, (0, [], None))
        if late is not None:
            late.cancel()
        last = step + 1 == len(self._steps)
        number = _SIGNALS.get(self._steps[step][0], 0)
        if not number and not last:  # the next step looks who has left meanwhile; to say that here would say it twice
            return
        hangs = self._still(hangs)
        if number:
            self._strike(hangs, number)
            if number != linux.SIGKILL:
                self._watch(step + 1, hangs, clock.now(), _FOREVER if last else self._steps[step + 1][1])
        elif last:  # not before the launcher has dealt with it: one that is stopped for long is not told without end
            self._arm_again(hangs)

    def _watch(self, step: int, hangs: list[Hang], began: float, delay: float) -> None:
        """Take step number ``step`` as `_after` does; until then, let those go that have survived a signal, and go on.

        What they have left their block by may end them yet: they have a second for that.
        """

        def due() -> float:
            return began + delay + self._loop.pauses.lost(began)

        def look() -> None:
            if clock.now() >= due():
                self._take(step, hangs)
            else:
                self._watch(step, self._still(hangs), began, delay)

        if hangs:
            self._loop.at(min(due(), clock.now() + _SURVIVED), look)

    def _arm_again(self, hangs: list[Hang]) -> None:
        """Have timers expire again, for as long as they were; should the worker go on meanwhile, say that."""
        now = clock.now_ns()
        spans: dict[int, list[Hang]] = {}
        for hang in hangs:
            spans.setdefault(max(hang.timer.span, _SHORTEST), []).append(hang)
        for span, those in spans.items():
            for hang in those:
                self._lookout.rearm(hang.timer, now + span)
            self._loop.after(span / clock.NS, lambda those=those: self._still(those))  # type: ignore[misc,arg-type]  # mypy has no type for it

    def _still(self, hangs: list[Hang]) -> list[Hang]:
        """Those that are where they were when their timers expired. What has left its block is let go."""
        pids = self._pids()
        holders = {seat: self._table.holder(seat) for seat in {hang.timer.seat for hang in hangs}}
        live = [hang for hang in hangs if hang.rank in pids and holders[hang.timer.seat] == hang.pid]
        stuck = [hang for hang in live if self._table.still(hang.timer)]
        resting = self._resting(stuck)
        stuck = [hang for hang in stuck if hang.timer.slot or not self._now_rests(hang, resting)]
        self._tell_of([hang for hang in live if hang not in stuck], "left")
        return stuck

    def _now_rests(self, hang: Hang, resting: set[int]) -> bool:
        """Whether a heartbeat has been ended since it was found missing."""
        try:
            return self._rests(hang, resting)
        except OSError:  # as far as is known, it was not
            return False

    def _strike(self, hangs: list[Hang], number: int) -> None:
        pids = self._pids()
        for hang in hangs:
            self._end(hang, pids[hang.rank], number)
        self._tell_of(hangs, "struck", number)

    def _end(self, hang: Hang, worker: int, number: int) -> None:
        """Signal the worker; and the process below it that hangs, after it: it might get over its end, and succeed."""
        process = None if hang.own else self._held(hang, worker)
        self._send(worker, number)
        if process is None:
            return
        with process:
            try:
                process.signal(number)
                if number != linux.SIGKILL:
                    process.signal(signal.SIGCONT)  # a stopped process would not see it
            except OSError:  # it has exited
                pass

    def _held(self, hang: Hang, worker: int) -> Process | None:
        """Take hold of a process below a worker; None if it has gone, or no descriptor is left.

        What its seat says of it is not enough: a worker may have written there who has the number now. So it is looked
        at who is above it, once it cannot come to be another.
        """
        try:
            process = Process(hang.pid)
        except OSError:
            return None
        if self._owner(hang.timer, {worker: hang.rank}) == (hang.rank, hang.pid):
            return process
        process.close()
        return None


def _ancestors(pid: int) -> list[int]:
    """The processes above one, as far as they can be seen. Raises OSError when no descriptor is left to look."""
    return [stat.parent for stat in lineage(pid)]
