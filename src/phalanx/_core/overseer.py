"""What a group does about a worker that hangs: say so, take the evidence, end it. Step by step, as its owner wants it.

Owns the order of things once a timer has expired: whose it is, the stacks of all ranks before anything is signalled,
the steps and their delays, the signals to what hangs, and the words. Works in the group's loop. Does not know how
timers are set (`timetable`), nor how stacks are got (`stacks`).
"""

from __future__ import annotations

import contextlib
import os
import signal

from phalanx._core import clock, evidence, linux
from phalanx._core.lookout import Lookout
from phalanx._core.ranks import named
from phalanx._core.witnesses import Witnesses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from phalanx._core.loop import Loop
    from phalanx._core.timetable import Timer, Timetable

_AGAIN = clock.NS  # nanoseconds after which somebody is looked up again who could not be
_SHORTEST = 0.1  # seconds until a timer that was reported is so again
_SIGNALS = {"terminate": int(signal.SIGTERM), "kill": int(signal.SIGKILL)}


class Hang:
    """One expired timer: whose it is, and what is to be said of it."""

    def __init__(self, timer: Timer, rank: int, pid: int, *, own: bool) -> None:
        self.timer = timer
        self.rank = rank
        self.pid = pid
        self.own = own  # the worker's, and not that of a process below it

    def late(self) -> float:
        """Seconds beyond the deadline, now."""
        return (clock.now_ns() - self.timer.deadline) / clock.NS

    @property
    def what(self) -> str:
        """What was not done in time, in words."""
        timer = self.timer
        span = f"{timer.span / clock.NS:g} s"
        who = "" if self.own else f", in process {self.pid} below the worker"
        if not timer.slot:
            return f"no heartbeat for {span} (the last at step {timer.step}){who}"
        if timer.scope:
            return f"{timer.scope!r} ({timer.place}) was not left within {span}{who}"
        return f"the block at {timer.place} was not left within {span}{who}"


class Overseer:
    """Watches one group's timers. Everything happens in the group's thread.

    Args:
        table: The group's; closed with this.
        steps: What follows an expiry, in order: name and delay in seconds.
        error_files: Each rank's. Its folder takes the rank's stacks.
        emit: Called with events, in their order, when nothing else is to be done.
        say: Shows a line.

    Attributes:
        unwritten: What was to be left as evidence of a rank, and could not be.
    """

    def __init__(
        self,
        table: Timetable,
        steps: Sequence[tuple[str, float]],
        error_files: Mapping[int, str],
        emit: Callable[[list[dict[str, Any]]], None],
        say: Callable[[str], None],
    ) -> None:
        self._table = table
        self._steps = steps
        self._error_files = error_files
        self._emit = emit
        self._say = say
        self._lookout: Lookout | None = None
        self._refused: set[int] = set()
        self._witnesses = Witnesses(error_files)
        self._ended: list[Hang] = []  # those that were signalled, and have not gone on
        self._events: list[dict[str, Any]] = []
        self.unwritten: dict[int, str] = {}

    def open(
        self,
        loop: Loop,
        pids: Callable[[], dict[int, int]],
        send: Callable[[int, int], None],
    ) -> None:
        """Begin. ``pids`` gives the live workers, none once the group is being stopped; ``send`` signals one."""
        self._loop, self._pids, self._send = loop, pids, send
        self._witnesses.open(loop, pids)
        self._lookout = Lookout(self._table, loop, self._on_expired, self._on_seen)
        self._lookout.open()

    def close(self) -> None:
        """End, and let go of the table. Idempotent."""
        if self._lookout is not None:
            self._lookout.close()
            self._lookout = None
        self._witnesses.close()
        self._flush()
        self._table.close()

    # --- who

    def _on_seen(self, timers: list[Timer]) -> None:
        self._witnesses.get_ready()
        for timer in timers:
            hang = self._whose(timer)
            if hang is not None:
                self._tell("timer.armed", hang, overdue=0.0)

    def _on_expired(self, timers: list[Timer]) -> None:
        late = [timer for timer in timers if timer.slot or not self._beats(timer)]
        hangs = [hang for hang in map(self._whose, late) if hang is not None]
        for hang in hangs:
            self._tell("timer.expired", hang)
        if hangs:
            self._after(0, hangs)

    def _beats(self, heartbeat: Timer) -> bool:
        """Whether another process of the rank has sent a heartbeat since: it is the rank that has to."""
        again = self._table.latest_beat(heartbeat.seat) + heartbeat.span
        if again <= clock.now_ns() or self._lookout is None:
            return False
        self._lookout.rearm(heartbeat, again)
        return True

    def _whose(self, timer: Timer) -> Hang | None:
        """The rank and the process that a timer belongs to; None if that is nobody of this group."""
        holder = self._table.holder(timer.seat)
        pids = self._pids()
        if not holder or not pids:  # it has ended, and its timers with it; or we are about to end all
            return None
        ranks = {pid: rank for rank, pid in pids.items()}
        if holder in ranks:
            return Hang(timer, ranks[holder], holder, own=True)
        try:
            above = list(_ancestors(holder))
            rank = next((ranks[pid] for pid in above if pid in ranks), None)
            if rank is None and any(next(iter(_ancestors(pid)), 0) in above for pid in ranks):
                claimed = self._table.rank(timer.seat)  # an orphan, which our keeper, the workers' parent, has adopted
                rank = claimed if claimed in pids else None
        except OSError:  # no descriptor is left to find out
            if self._lookout is not None:
                self._lookout.rearm(timer, clock.now_ns() + _AGAIN)
            return None
        if rank is not None:
            return Hang(timer, rank, holder, own=False)
        if holder not in self._refused:
            self._refused.add(holder)
            self._say(f"process {holder} is not in the group: its timers are not watched")
            self._note("request.refused", pid=holder, scope=timer.scope, place=timer.place)
        return None

    # --- what follows

    def _after(self, step: int, hangs: list[Hang]) -> None:
        """Take step number ``step`` when its time comes."""
        delay = self._steps[step][1]
        if delay:
            self._loop.after(delay, lambda: self._take(step, hangs))
        else:
            self._take(step, hangs)

    def _take(self, step: int, hangs: list[Hang]) -> None:
        name = self._steps[step][0]
        if name == "report":
            self._do(step, hangs)
        else:
            since = max(hang.timer.deadline - hang.timer.span for hang in hangs) / clock.NS
            self._witnesses.hear({hang.rank: hang.pid for hang in hangs}, since, lambda: self._do(step, hangs))

    def _do(self, step: int, hangs: list[Hang]) -> None:
        hangs = [hang for hang in hangs if self._hangs_still(hang)]
        if not hangs or self._lookout is None:
            return
        name = self._steps[step][0]
        number = _SIGNALS.get(name)
        # Once the group is about to end, the report will tell of the others.
        quiet = number is not None and bool(self._ended) and not any(hang in self._ended for hang in hangs)
        if number is not None:
            self._end_all(hangs, number)
        if name != "report":
            self._witnesses.write()
        if not quiet:
            self._say_all(hangs, name)
        if step + 1 < len(self._steps):
            self._after(step + 1, hangs)
        elif number is None:
            for hang in hangs:
                self._arm_again(hang, self._lookout)

    def _arm_again(self, hang: Hang, lookout: Lookout) -> None:
        """Have the timer expire again, for as long as it was; should the worker go on meanwhile, say that."""
        seconds = max(hang.timer.span / clock.NS, _SHORTEST)
        lookout.rearm(hang.timer, clock.now_ns() + int(seconds * clock.NS))

        def look() -> None:
            self._hangs_still(hang)

        self._loop.after(seconds, look)

    def _hangs_still(self, hang: Hang) -> bool:
        """Whether the worker is where it was when its timer expired; what has left the block is let go."""
        if hang.rank not in self._pids() or self._table.holder(hang.timer.seat) != hang.pid:  # it has ended
            return False
        if self._table.still(hang.timer):
            return True
        if hang in self._ended:  # by a signal that it has survived: what it fails of one day, it is to tell itself
            self._ended.remove(hang)
            evidence.withdraw(self._error_files[hang.rank])
            self.unwritten.pop(hang.rank, None)
        self._say(f"rank {hang.rank}: {hang.what}; it has gone on since")
        self._tell("timer.left", hang)
        return False

    def _end_all(self, hangs: list[Hang], number: int) -> None:
        self._ended += [hang for hang in hangs if hang not in self._ended]
        if number != signal.SIGKILL:  # what a worker raises because of it comes second, and must not be found first
            for hang in hangs:
                self._record(hang)
        for hang in hangs:
            self._end(hang, number)
        for hang in hangs:  # what is told of them can wait for that
            self._record(hang)
            self._tell("worker.reaped", hang, signal=number)

    def _end(self, hang: Hang, number: int) -> None:
        """Signal the process that hangs; before it the worker above it, which might get over its end, and succeed."""
        if not hang.own:
            worker = self._pids()[hang.rank]
            if not _send_if(worker, number, lambda: worker in _ancestors(hang.pid)):  # it hangs, and is no orphan
                self._send(hang.rank, number)
        sent = _send_if(hang.pid, number, lambda: self._table.holder(hang.timer.seat) == hang.pid)
        if hang.own and not sent:  # no descriptor is left for a pidfd; or it has gone, which the keeper knows
            self._send(hang.rank, number)

    # --- words

    def _record(self, hang: Hang) -> None:
        """Leave evidence where the worker would have left its own: what came first stays.

        Who waits for another hangs as well, and perhaps sooner: the one that is elsewhere than most hung first.
        """
        moment = hang.timer.deadline
        if hang.rank in self._witnesses.apart():
            moment = min(other.timer.deadline for other in (hang, *self._ended)) - 1
        path = self._error_files[hang.rank]
        pids = self._pids()
        if evidence.written_by(evidence.read(path)[0]) in pids.values():
            return
        self._witnesses.write()
        detail = [
            f"{clock.spoken(hang.late())} over its deadline",
            self._witnesses.sum_up(hang.rank, hang.timer.thread),
        ]
        if file := self._witnesses.files.get(hang.rank):
            detail.append(f"stacks of all ranks: {os.path.basename(file)} in each rank's folder")
        message, said = f"Hang: {hang.what}", "\n".join(filter(None, detail))
        try:
            evidence.write_error_file(
                path,
                message,
                evidence.without_us(self._witnesses.texts.get(hang.rank, "")),
                monotonic_ns=moment,
                pid=pids[hang.rank],
                observer="timer",
                scope=hang.timer.scope or hang.timer.place,
                detail=said,
            )
        except Exception:  # noqa: BLE001 - the disk is full, or no descriptor is left: that is no reason to go
            self.unwritten[hang.rank] = f"{message}\n{said}"

    def _say_all(self, hangs: list[Hang], step: str) -> None:
        """One line for all ranks of which the same is to be said."""
        same: dict[str, list[Hang]] = {}
        for hang in hangs:
            same.setdefault(hang.what, []).append(hang)
        for what, those in same.items():
            over = clock.spoken(max(hang.late() for hang in those))
            text = f"{named(hang.rank for hang in those)}: {what}; {over} over"
            first = those[0]
            if step != "report" and (where := self._witnesses.sum_up(first.rank, first.timer.thread)):
                text += f"; {where}"
            if step == "dump":
                text += f"; stacks: {self._witnesses.files.get(first.rank) or 'none'}"
            if step in _SIGNALS:
                text += f"; {signal.Signals(_SIGNALS[step]).name}"
            self._say(text)

    def _tell(self, name: str, hang: Hang, **facts: Any) -> None:
        timer = hang.timer
        told = {"rank": hang.rank, "pid": hang.pid, "scope": timer.scope or timer.place, "place": timer.place}
        self._note(name, **{**told, "overdue": hang.late(), **facts})

    def _note(self, name: str, **facts: Any) -> None:
        """Have an event told when there is time: not between a deadline and what follows it."""
        if not self._events:
            self._loop.when_idle(self._flush)
        self._events.append({"name": name, "timestamp": clock.wall(), "monotonic_ns": clock.now_ns(), **facts})

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events:
            self._emit(events)


def _send_if(pid: int, number: int, known: Callable[[], bool]) -> bool:
    """Signal a process, if it is ``known`` to live once it is held, and so is no later one of its number."""
    with contextlib.suppress(OSError):  # it has gone
        fd = os.pidfd_open(pid)
        try:
            if known():
                signal.pidfd_send_signal(fd, number)
                if number != signal.SIGKILL:
                    signal.pidfd_send_signal(fd, signal.SIGCONT)  # a stopped process would not see it
                return True
        finally:
            os.close(fd)
    return False


def _ancestors(pid: int) -> Iterable[int]:
    with contextlib.suppress(ProcessLookupError):
        while pid > 1:
            pid = linux.Stat(pid).parent
            yield pid
