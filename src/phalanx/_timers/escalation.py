"""Timers of a group expire here: when that is, and what follows, in the steps that the owner chose.

Runs in the keeper. `TimerScheduler` looks at a `TimerTable` at the next deadline, or when a client writes to its bell;
never else. It owns which expired timers are new, how long a deadline is postponed after the keeper was stopped, and
what is held: while the group is paused, nothing expires; while a process stands at a breakpoint, breakpoints alone do.

`Escalation` decides which rank a timer belongs to, when each step is due (report, dump, SIGTERM, SIGKILL), and which
processes are signalled. Before a step that signals, the launcher takes the stacks of all ranks; the keeper waits
`EVIDENCE_WAIT` for that, so a launcher that is busy or stopped delays no kill. What the launcher reports and writes
down is in `hang_reporter`.
"""

from __future__ import annotations

import os

from phalanx._base import clock, linux
from phalanx._base.loop import SLACK, wait_slice
from phalanx._base.process import Process, lineage
from phalanx._timers.hang import Hang
from phalanx._timers.layout import BREAKPOINT, NEVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections import deque
    from collections.abc import Callable, Iterable, Sequence

    from phalanx._base.loop import Deadline, Loop
    from phalanx._timers.hang import Key, Timer
    from phalanx._timers.table import TimerTable
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    from _collections import deque  # the C half, which the keeper has sooner

AT_ONCE = 64
"""The most timers that are passed on in one turn of the loop: other callbacks have their turn before the next ones."""

EVIDENCE_WAIT = 1.0
"""Seconds from the moment of a step that signals until it is taken without the launcher's evidence."""

_TURNS = 8
_FOREVER = float("inf")

_RETRY = clock.NS  # nanoseconds until a process is examined again that could not be
_SHORTEST = clock.NS // 10  # nanoseconds until a timer that was reported can be reported again
_SURVIVED = 1.0  # seconds between two checks whether a signalled process has left its block
_SIGNALS = {"terminate": int(signal.SIGTERM), "kill": linux.SIGKILL}


class TimerScheduler:
    """Calls ``expired`` with the timers whose deadline is over, each once, in the loop's thread.

    A deadline is postponed by the time in which this process could not run, see `loop.wait_slice`, or it was held.

    Args:
        table: The table to look at.
        loop: The loop that waits.
        expired: Called with one to `AT_ONCE` timers. It may `rearm` them.
        seen: Called with one to `AT_ONCE` timers in slots that were not in use before.
        standing: Called at each look with the timers of breakpoints at which processes stand. Returns those that count,
            each as its seat and its slot.
    """

    def __init__(
        self,
        table: TimerTable,
        loop: Loop,
        expired: Callable[[list[Timer]], None],
        seen: Callable[[list[Timer]], None] = lambda _timers: None,
        standing: Callable[[list[Key]], Iterable[tuple[int, int]]] = lambda _keys: (),
    ) -> None:
        self._table = table
        self._loop = loop
        self._expired = expired
        self._seen = seen
        self._find_standing = standing
        self._standing: set[tuple[int, int]] = set()
        self._stands_since, self._paused_since = 0.0, 0.0  # 0: nobody stands; the group is not paused
        self._held: list[Callable[[], None]] = []  # to be called when something is held no longer
        self._later: dict[Key, int] = {}  # of expired timers that are still set: when they expire again
        self._rearmed: dict[Key, int] = {}  # the deadlines that `rearm` has given them
        self._new: deque[Key] = deque()  # to be passed to `seen`
        self._due: deque[Key] = deque()  # to be passed to `expired`
        self._busy = False  # whether one turn does not take all of them
        self._next: Deadline | None = None
        self._planned = NEVER  # the moment of the next look, in nanoseconds

    def open(self) -> None:
        """Start to look."""
        self._loop.watch(self._table.fileno(), self._on_bell)
        self._look()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._loop.forget(self._table.fileno())
        self._new.clear()
        self._due.clear()
        self._busy = False
        if self._next is not None:
            self._next.cancel()

    def look(self) -> None:
        """Look now: something may have changed of which no client tells."""
        self._look()

    def pause(self, is_paused: bool) -> None:  # noqa: FBT001 - as the order has it
        """Hold all timers, or go on."""
        if is_paused:
            self._paused_since = self._paused_since or clock.now_ns() / clock.NS
        elif self._paused_since:
            self._end_hold(self._paused_since)
            self._paused_since = 0.0
            self._release()
            self._look()

    @property
    def stands(self) -> bool:
        """Whether a process stands at a breakpoint."""
        return bool(self._standing)

    def holds(self, seat: int, slot: int) -> bool:
        """Whether this timer does not expire just now, and the steps after its expiry wait."""
        return self._paused_since > 0 or (self.stands and (seat, slot) not in self._standing)

    def when_released(self, action: Callable[[], None]) -> None:
        """Call ``action`` once something is held no longer: it has to find out what."""
        self._held.append(action)

    def _end_hold(self, since: float) -> None:
        self._loop.pauses.add(since, clock.now_ns() / clock.NS)

    def _release(self) -> None:
        held, self._held = self._held, []
        for action in held:
            action()

    def _update_standing(self) -> None:
        before, self._standing = self._standing, set(self._find_standing(self._table.standing()))
        if self._standing and not before:
            self._stands_since = clock.now_ns() / clock.NS
        elif before and not self._standing:
            self._end_hold(self._stands_since)
            self._loop.call(self._release)  # and not within a look

    def rearm(self, timer: Timer, moment: int) -> None:
        """Have an expired timer expire again at ``moment`` (nanoseconds), unless it is disarmed before."""
        self._rearmed[timer.seat, timer.slot, timer.deadline] = moment
        self._postpone((timer.seat, timer.slot, timer.deadline), moment)

    def _postpone(self, key: Key, moment: int) -> None:
        self._later[key] = moment
        if moment < self._planned:
            self._plan(max(moment, clock.now_ns()))

    def _on_bell(self, _events: int) -> None:
        self._table.clear_bell()
        self._look()

    def _plan(self, moment: int) -> None:
        """Look at ``moment``, and not before, unless the bell is written to."""
        if self._next is not None:
            self._next.cancel()
        self._next = None if moment == NEVER else self._loop.at(moment / clock.NS, self._look)
        self._loop.watch_for_pauses(moment / clock.NS if moment != NEVER else 0.0)
        self._planned = moment

    def _look(self) -> None:
        if self._busy:  # the next look comes once all is passed on: that delay is ours, and postpones no deadline
            self._plan(NEVER)
            return
        now = clock.now_ns()
        planned = self._planned
        due, then = self._table.look(now)
        for turn in range(_TURNS):
            self._later = {key: self._later[key] for key in due if key in self._later}
            self._rearmed = {key: moment for key, moment in self._rearmed.items() if key in self._later}
            then = min([then, *(moment for moment in self._later.values() if moment > now)])
            self._table.publish(then)
            now = clock.now_ns()
            due, earliest = self._table.look(now)
            if earliest >= then:
                break
            # A client that sets ever earlier deadlines must not keep this loop going.
            then = earliest if turn + 1 < _TURNS else now
        self._plan(then)
        self._update_standing()
        fresh = [key for key in due if self._later.get(key, 0) <= now and not self.holds(*key[:2])]
        fresh = [key for key in fresh if not self._postponed_by_pause(key, planned, now)]
        self._later.update(dict.fromkeys(fresh, NEVER))
        self._new.extend(self._table.newly_armed())
        self._due.extend(sorted(fresh, key=lambda key: key[2]))
        self._pass_on()

    def _postponed_by_pause(self, key: Key, planned: int, now: int) -> bool:
        """Postpone an expired timer by the time in which this process could not run. Returns whether it did.

        The look that found it was ``planned`` for one moment, and is ``now``.
        """
        loop, deadline = self._loop, self._rearmed.get(key, key[2])
        unseen = key[2] < planned and loop.waited_until - loop.waited_from > SLACK
        timer = self._table.read(key) if loop.pauses or unseen else None
        if timer is None:
            return False
        set_at = (deadline - timer.span) / clock.NS
        if not timer.slot and deadline == key[2]:  # a heartbeat, which a long block may have extended
            set_at = min(set_at, self._table.last_beat(timer.seat) / clock.NS)
        lost = loop.pauses.lost(set_at)
        if unseen:  # its deadline was before this look was planned, so its client has written to the bell
            lost = loop.pauses.owed(set_at, loop.waited_from, loop.waited_until)
        until = deadline + int(lost * clock.NS)
        if until > now:
            self._postpone(key, until)
        return until > now

    def _pass_on(self) -> None:
        """Pass on some timers, and the others in the next turn. Look again once several turns have passed."""
        for keys, take in ((self._new, self._seen), (self._due, self._expired)):
            some = (self._table.read(keys.popleft()) for _ in range(min(len(keys), AT_ONCE)))
            timers = [timer for timer in some if timer is not None]
            if timers:
                take(timers)
        before, self._busy = self._busy, bool(self._new or self._due)
        if self._busy:
            self._loop.call(self._pass_on)
        elif before:
            self._look()


class Escalation:
    """Watches one group's timers, in the keeper's loop.

    Args:
        table: The group's table; closed with this.
        steps: What follows an expiry, in order: name and delay in seconds.
        loop: The loop that waits.
        pids: Returns the live workers' pids by rank; empty once the group is being stopped.
        signal_worker: Sends one worker, by its pid, a signal.
        send: Sends the launcher a message.
    """

    def __init__(
        self,
        table: TimerTable,
        steps: Sequence[tuple[str, float]],
        loop: Loop,
        pids: Callable[[], dict[int, int]],
        signal_worker: Callable[[int, int], None],
        send: Callable[..., object],
    ) -> None:
        self._table = table
        self._steps = steps
        self._loop = loop
        self._pids = pids
        self._signal_worker = signal_worker
        self._send = send
        self._refused: set[int] = set()
        self._serial = 0
        # Steps for which the launcher takes evidence, by serial number.
        self._requested: dict[int, tuple[int, list[Hang], Deadline | None]] = {}
        self._standing: dict[tuple[int, int], str] = {}  # the locations of breakpoints, by seat and slot
        self._watched: dict[int, Process] = {}  # the processes that stand there
        self._scheduler = TimerScheduler(
            table,
            loop,
            self._on_expired,
            lambda timers: self._send_hangs(self._find_ranks(timers), "armed"),
            self._find_standing,
        )

    def open(self) -> None:
        """Start to watch."""
        self._scheduler.open()

    def close(self) -> None:
        """Stop watching, and close the table."""
        self._scheduler.close()
        self._watch_standing(set())
        self._table.close()

    # --- what is held

    def pause(self, is_paused: bool) -> None:  # noqa: FBT001 - as the order has it
        """Hold all timers, and all steps, or go on."""
        self._scheduler.pause(is_paused)

    @property
    def stands(self) -> bool:
        """Whether a process of the group stands at a breakpoint."""
        return self._scheduler.stands

    def when_released(self, action: Callable[[], None]) -> None:
        """Call ``action`` once nobody stands at a breakpoint any more, or perhaps before."""
        self._scheduler.when_released(action)

    def _find_standing(self, keys: list[Key]) -> Iterable[tuple[int, int]]:
        """Return the breakpoints that are of this group. Report each to the launcher, once."""
        known = self._standing
        found = [self._table.read_now(seat, slot) for seat, slot, _ in keys]  # `attach` sets one anew
        timers = [timer for timer in found if timer is not None and timer.scope == BREAKPOINT]
        hangs = self._find_ranks(timers) if timers else []
        self._standing = {(hang.timer.seat, hang.timer.slot): hang.timer.location for hang in hangs}
        fresh = [hang for hang in hangs if known.get((hang.timer.seat, hang.timer.slot)) != hang.timer.location]
        for first in range(0, len(fresh), AT_ONCE):
            self._send_hangs(fresh[first : first + AT_ONCE], "stands")
        self._watch_standing({hang.pid for hang in hangs})
        return self._standing

    def _watch_standing(self, pids: set[int]) -> None:
        """Look once one of these processes has exited: it does not write to the bell then."""
        for pid in self._watched.keys() - pids:
            self._loop.forget(self._watched[pid].pidfd)
            self._watched.pop(pid).close()
        for pid in pids - self._watched.keys():
            try:
                process = Process(pid)
            except ProcessLookupError:
                self._loop.call(self._scheduler.look)
            except OSError:  # no descriptor is left: the look at the next deadline finds out
                continue
            else:
                self._watched[pid] = process
                self._loop.watch(process.pidfd, lambda _events, pid=pid: self._on_exit(pid))  # type: ignore[misc]  # mypy has no type for it

    def _on_exit(self, pid: int) -> None:
        self._loop.forget(self._watched[pid].pidfd)
        self._scheduler.look()

    def _holds(self, hangs: list[Hang]) -> bool:
        return any(self._scheduler.holds(hang.timer.seat, hang.timer.slot) for hang in hangs)

    # --- whose timers they are

    def _on_expired(self, timers: list[Timer]) -> None:
        hangs = self._without_excused(self._find_ranks(timers))
        self._send_hangs(hangs, "expired")
        if hangs:
            self._schedule(0, hangs)

    def _send_hangs(self, hangs: list[Hang], *what: object) -> None:
        """Send the launcher a message about these, if there are any. `AT_ONCE` of them fit into a packet."""
        if hangs:
            self._send(*what, clock.now_ns(), [hang.to_tuple() for hang in hangs])

    def _without_excused(self, hangs: list[Hang]) -> list[Hang]:
        """Leave out heartbeats whose absence is excused: below a process that rests, or below a silent worker."""
        workers = {hang.rank for hang in hangs if hang.is_worker and not hang.timer.slot}
        resting = self._resting(hangs)
        missing = []
        for hang in hangs:
            if not hang.timer.slot:
                try:
                    if (hang.rank in workers and not hang.is_worker) or self._rests(hang, resting):
                        continue
                except OSError:  # no descriptor is left to find out
                    self._scheduler.rearm(hang.timer, clock.now_ns() + _RETRY)
                    continue
            missing.append(hang)
        return missing

    def _resting(self, hangs: list[Hang]) -> set[int]:
        """Return the processes that rest; empty if none of these is a heartbeat: only then it matters."""
        return self._table.resting() if any(not hang.timer.slot for hang in hangs) else set()

    def _rests(self, hang: Hang, resting: set[int]) -> bool:
        """Whether a heartbeat was suspended, by its process or by one above it. Raises OSError.

        A process that has left its worker's tree (a double fork) is covered by its worker.
        """
        if not resting:
            return False
        above = _ancestors(hang.pid)
        if os.getpid() in above:  # from the keeper upwards, no process is of the group
            above = above[: above.index(os.getpid())]
        return not resting.isdisjoint((hang.pid, self._pids().get(hang.rank, 0), *above))

    def _find_ranks(self, timers: list[Timer]) -> list[Hang]:
        """Return the timers that belong to ranks of this group; none once the group is being stopped."""
        ranks = {pid: rank for rank, pid in self._pids().items()}
        if not ranks:
            return []
        owners: dict[int, tuple[int, int] | None] = {}
        hangs = []
        for timer in timers:
            if timer.seat not in owners:
                owners[timer.seat] = self._find_owner(timer, ranks)
            owner = owners[timer.seat]
            if owner is None:
                self._scheduler.rearm(timer, clock.now_ns() + _RETRY)
            elif owner[1]:
                rank, holder = owner
                hangs.append(Hang(rank, holder, holder in ranks, timer))
        return hangs

    def _find_owner(self, timer: Timer, ranks: dict[int, int]) -> tuple[int, int] | None:
        """Return the rank and the process that a timer belongs to; (-1, 0) if the process is not in this group.

        None: no descriptor is left to find out.
        """
        holder = self._table.holder(timer.seat)
        if holder in ranks:
            return ranks[holder], holder
        if not holder:  # the process has ended, and its timers with it
            return -1, 0
        try:
            above = _ancestors(holder)
        except OSError:
            return None
        rank = next((ranks[pid] for pid in above if pid in ranks), -1)
        if rank < 0 and os.getpid() in above:  # an orphan, adopted by the keeper
            claimed = self._table.rank(timer.seat)
            rank = claimed if claimed in ranks.values() else -1
        if rank >= 0:
            return rank, holder
        if holder not in self._refused:
            self._refused.add(holder)
            self._send("refused", holder, timer.scope, timer.location)
        return -1, 0

    # --- the steps

    def _schedule(self, step: int, hangs: list[Hang], *, signalled: bool = False) -> None:
        """Take step number ``step`` after its delay. As a timer's, the delay is extended if the keeper was stopped.

        Until then, drop processes that were ``signalled``, survive and leave their block. An exception that the signal
        has raised leaves the block at once, and may end the process a little later: so they are looked at once a
        second, and not at once.
        """
        delay = self._steps[step][1] if step < len(self._steps) else _FOREVER
        part = _SURVIVED if signalled else wait_slice(delay)  # in parts, so that a pause is seen
        began = clock.now()

        def look(hangs: list[Hang]) -> None:
            if self._holds(hangs):
                self._scheduler.when_released(lambda: look(hangs))
                return
            now = clock.now()
            left = began + delay + self._loop.pauses.lost(began) - now
            if left <= 0:
                self._take_step(step, hangs)
            elif rest := self._still_hung(hangs) if signalled else hangs:
                self._loop.at(now + min(left, part), lambda: look(rest))

        if signalled and hangs:
            self._loop.at(began + min(delay, part), lambda: look(hangs))
        elif not signalled:
            look(hangs)

    def _take_step(self, step: int, hangs: list[Hang]) -> None:
        hangs = self._still_hung(hangs)
        if not hangs:
            return
        # Have the launcher take the evidence that the step wants, and report the step.
        name = self._steps[step][0]
        number = _SIGNALS.get(name, 0)
        self._serial += 1
        serial = self._serial
        timeout = self._loop.after(EVIDENCE_WAIT, lambda: self.evidence_taken(serial)) if number else None
        self._requested[serial] = (step, hangs, timeout)
        self._send_hangs(hangs, "hang", serial, name, number)
        if not number and step + 1 < len(self._steps):
            self._schedule(step + 1, hangs)

    def evidence_taken(self, serial: int) -> None:
        """Finish the step of this serial number: the launcher has its evidence, or `EVIDENCE_WAIT` is over."""
        if serial in self._requested and self._holds(self._requested[serial][1]):
            self._scheduler.when_released(lambda: self.evidence_taken(serial))
            return
        step, hangs, timeout = self._requested.pop(serial, (0, [], None))
        if timeout is not None:
            timeout.cancel()
        last = step + 1 == len(self._steps)
        number = _SIGNALS.get(self._steps[step][0], 0)
        if not number and not last:  # the next step reports which blocks were left meanwhile
            return
        hangs = self._still_hung(hangs)
        if number:
            self._signal(hangs, number)
            if number != linux.SIGKILL:
                self._schedule(step + 1, hangs, signalled=True)
        elif last:  # not sooner: to a launcher that is stopped for long, reports are not sent without end
            self._rearm(hangs)

    def _rearm(self, hangs: list[Hang]) -> None:
        """Have timers expire again, after as long as they had; report if a worker goes on meanwhile."""
        now = clock.now_ns()
        spans: dict[int, list[Hang]] = {}
        for hang in hangs:
            spans.setdefault(max(hang.timer.span, _SHORTEST), []).append(hang)
        for span, those in spans.items():
            for hang in those:
                self._scheduler.rearm(hang.timer, now + span)
            self._loop.after(span / clock.NS, lambda those=those: self._still_hung(those))  # type: ignore[misc,arg-type]  # mypy has no type for it

    def _still_hung(self, hangs: list[Hang]) -> list[Hang]:
        """Return those whose timers are still set. Reports those that have left their blocks."""
        pids = self._pids()
        holders = {seat: self._table.holder(seat) for seat in {hang.timer.seat for hang in hangs}}
        live = [hang for hang in hangs if hang.rank in pids and holders[hang.timer.seat] == hang.pid]
        stuck = [hang for hang in live if self._table.is_still_set(hang.timer)]
        resting = self._resting(stuck)
        stuck = [hang for hang in stuck if hang.timer.slot or not self._now_rests(hang, resting)]
        self._send_hangs([hang for hang in live if hang not in stuck], "left")
        return stuck

    def _now_rests(self, hang: Hang, resting: set[int]) -> bool:
        """Whether a heartbeat was suspended after it was found missing."""
        try:
            return self._rests(hang, resting)
        except OSError:  # no descriptor is left to find out: then it counts as missing
            return False

    def _signal(self, hangs: list[Hang], number: int) -> None:
        pids = self._pids()
        for hang in hangs:
            self._signal_rank(hang, pids[hang.rank], number)
        self._send_hangs(hangs, "struck", number)

    def _signal_rank(self, hang: Hang, worker: int, number: int) -> None:
        """Signal the worker, then the process below it that hangs: the worker might survive that one's end."""
        process = None if hang.is_worker else self._open_below(hang, worker)
        self._signal_worker(worker, number)
        if process is None:
            return
        with process:
            try:
                process.signal(number)
                if number != linux.SIGKILL:
                    process.signal(signal.SIGCONT)  # a stopped process would not see it
            except OSError:  # it has exited
                pass

    def _open_below(self, hang: Hang, worker: int) -> Process | None:
        """Open the process below a worker that hangs; None if it has ended, or no descriptor is left.

        The pid in its seat is not enough: a worker may have written there the pid of a process that has it now. So its
        ancestors are read once it is open, when the pid cannot pass to another process.
        """
        try:
            process = Process(hang.pid)
        except OSError:
            return None
        if self._find_owner(hang.timer, {worker: hang.rank}) == (hang.rank, hang.pid):
            return process
        process.close()
        return None


def _ancestors(pid: int) -> list[int]:
    """Return the pids of a process's ancestors, as far as they can be read. Raises OSError if no descriptor is left."""
    return [stat.parent for stat in lineage(pid)]
