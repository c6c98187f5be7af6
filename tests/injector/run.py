"""One run: starts the launcher, brings the faults about at their moments, and records what happens.

This process is a subreaper: a process of the run that loses all of its parents becomes its child. So every survivor is
found among its descendants, even one that has left its session. `carry_out` kills all survivors before it returns.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.injector import faults
from tests.injector.check import NS, Record, Shot, Word, bounds
from tests.injector.faults import Crowd, Disk, Ends, Process
from tests.injector.plan import HELPERS, Fault, Plan
from tests.injector.worker import EVENTS, FIFO, LOGS

ROOT = Path(__file__).parents[2]
MARK = "PHALANX_INJECTOR"
"""An environment variable that every process of a run carries."""

HANGS = 20.0
"""A run that is late by so many seconds is killed, and said to hang."""

_MEMORY = "/dev/shm"
_LOOK = 0.001  # seconds between two looks for the helpers while a fault waits for one of them
_GLANCE = 0.02  # seconds between two looks at other times
_serial = itertools.count()


def carry_out(plan: Plan, source: Path, keep: Path | None = None) -> Record:
    """Run a plan with the package in ``source``. The files of the run are copied to ``keep``, if that is given."""
    # In memory, because a disk may take a minute to remove thousands of log files.
    folder = tempfile.mkdtemp(prefix="phalanx-injector-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    try:
        run = _Run(plan, source, folder)
        try:
            run.go()
            run.read()
        finally:
            if keep is not None:
                shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns(FIFO))
            run.close()
        return run.record
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Run:
    def __init__(self, plan: Plan, source: Path, folder: str) -> None:
        self.record = Record()
        self._plan = plan
        self._source = source
        self._folder = folder
        self._name = f"phalanx-injector-{os.getpid()}-{next(_serial)}"
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._reached: set[str] = set()
        self._launcher = 0
        self._helpers: dict[str, Process] = {}
        self._workers: dict[int, tuple[int, int]] = {}  # pid and start
        self._children: list[tuple[int, int, int]] = []  # rank, pid and start
        self._limits: dict[int, tuple[int, int]] = {}
        self._over = False
        os.mkdir(os.path.join(folder, LOGS))
        os.mkfifo(os.path.join(folder, FIFO))
        whats = {fault.what for fault in plan.faults}
        self._crowd = Crowd(self._name)
        self._disk = Disk(os.path.join(folder, LOGS)) if "disk" in whats else None
        self._ends = Ends(plan.reader)
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(f"\0{self._name}")
        self._ear.setblocking(False)
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._go = -1  # the launcher's stdin

    # --- the course of it

    def go(self) -> None:
        """Start the launcher, and serve until all processes are gone, or until it takes too long."""
        self.record.began = time.monotonic_ns()
        self._watch(self._ear.fileno(), self._hear)
        self._start()
        while not self._over:
            now = time.monotonic_ns()
            wait = (self._due[0][0] - now) / NS if self._due else 1.0
            wait = max(0.0, min(wait, _LOOK if self._looking() else _GLANCE))
            for fd, _events in self._epoll.poll(wait):
                if fd in self._callbacks:
                    self._callbacks[fd]()
            self._look()
            while self._due and self._due[0][0] <= time.monotonic_ns():
                heapq.heappop(self._due)[2]()
            self._reap()
            self._judge()
        self._sweep()

    def _start(self) -> None:
        plan = self._plan
        code = "from tests.injector.launcher import main; main()"
        command = [sys.executable, "-c", code, str(plan.seed), self._folder, self._name]
        if any(fault.what == "inotify" for fault in plan.faults):
            if faults.can_have_own_user():
                command = faults.own_user(command)
            else:
                self.record.left_out.append("inotify")
        env = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PHALANX"))}
        env |= {"PYTHONPATH": f"{self._source}{os.pathsep}{ROOT}", MARK: self._name, "PYTHONDONTWRITEBYTECODE": "1"}
        read, self._go = os.pipe2(os.O_CLOEXEC)
        with open(os.path.join(self._folder, "stderr"), "wb") as stderr:
            launcher = subprocess.Popen(
                command,
                stdin=read,
                stdout=self._ends.theirs,
                stderr=self._ends.theirs if plan.reader.both else stderr,
                env=env,
                cwd=self._folder,
                start_new_session=True,
            )
        os.close(read)
        self._ends.let_go()
        self._launcher = launcher.pid
        launcher.returncode = 0  # it is reaped here, with all the others
        self._crowd.take(self._launcher)
        if plan.file_size:
            faults.limit_files(self._launcher, plan.file_size)
        self._begin_to_read()

    def _hear(self) -> None:
        """Receive what launcher, workers and their children say."""
        while True:
            try:
                text = self._ear.recv(4096).decode()
            except BlockingIOError:
                return
            what, *numbers = text.rsplit(" ", 4)
            rank, pid, start, moment = map(int, numbers)
            word = Word(what, rank, pid, start, moment)
            self.record.words.append(word)
            getattr(self, f"_on_{what}", lambda _word: None)(word)
            self._reach(what)

    def _on_ready(self, _word: Word) -> None:
        self._reach("launched")
        self._let_go_on()

    def _on_up(self, word: Word) -> None:
        if word.start:
            self._workers[word.rank] = word.pid, word.start

    def _on_child(self, word: Word) -> None:
        if word.start:
            self._children.append((word.rank, word.pid, word.start))

    def _on_acting(self, word: Word) -> None:
        acting = {each.rank for each in self.record.words if each.what == "acting"}
        if self._plan.works[word.rank].end != "succeed" or len(acting) == len(self._plan.works):
            self._reach("ending")

    def _on_closing(self, _word: Word) -> None:
        self._reach("ending")

    def _on_started(self, _word: Word) -> None:
        self._read_events()
        found = faults.process(int(self.record.event("started").get("log_writer") or 0))
        if found is not None:
            self._helpers["log writer"] = found

    def _on_ended(self, _word: Word) -> None:
        self._look()
        self.record.at_end = self._named(each for each in self._alive() if not self._is_ours(each))

    def _on_closed(self, _word: Word) -> None:
        """Let there be enough of everything again: the launcher looks for what is left in it."""
        self._lift()
        self._let_go_on()

    def _let_go_on(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has been killed meanwhile
            os.write(self._go, b"\n")

    def _reach(self, phase: str) -> None:
        if phase not in self._reached:
            self._reached.add(phase)
            for fault in self._plan.faults:
                if fault.phase == phase:
                    self._at(fault.delay, lambda fault=fault: self._bring_about(fault))  # type: ignore[misc]  # bound at once

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic_ns() + int(seconds * NS), next(self._order), action))

    def _judge(self) -> None:
        """Find out whether the run is over."""
        now = time.monotonic_ns()
        members, launcher = bounds(self._plan, self.record)
        if self.record.status is not None:
            alive = self._alive()
            if not alive:
                self.record.gone, self._over = now, True
            elif now > members:
                self.record.survivors = self._named(alive)
                self._over = True
        elif now > launcher + HANGS * NS:
            self.record.hung = self._named(self._alive())
            self._over = True
        elif now > members and (left := [each for each in self._alive() if not self._is_ours(each)]):
            self.record.survivors = self._named(left)
            self._over = True

    # --- who is there

    def _looking(self) -> bool:
        """Whether a fault needs a helper to be seen as soon as it starts."""
        if "booting" not in self._reached or "ended" in self._reached or "keeper" in self._helpers:
            return False
        return any({fault.phase, fault.target} & {"guard", "keeper", "fork server"} for fault in self._plan.faults)

    def _look(self) -> None:
        """Find the helpers: each is the first child of the one above, from the launcher on."""
        above = self._launcher
        for name in ("fork server", "guard", "keeper") if self._plan.preload else ("guard", "keeper"):
            if name not in self._helpers:
                if "booting" not in self._reached:
                    return
                found = next(filter(None, map(faults.process, faults.children(above)[:1])), None)
                if found is None:
                    return
                self._helpers[name] = found
                self._reach(name)
            above = self._helpers[name].pid

    def _is_ours(self, each: Process) -> bool:
        """Whether a process is the launcher or a helper: their session is the guard's, and a worker has its own."""
        if self._launcher in (each.pid, each.parent):
            return True
        known = [(helper.pid, helper.start) for helper in self._helpers.values()]
        guard = self._helpers.get("guard")
        return (each.pid, each.start) in known or (guard is not None and each.session == guard.pid)

    def _alive(self) -> list[Process]:
        found = {each.pid: each for each in faults.descendants(os.getpid()) if each.alive}
        if not found:  # a chain of processes may be faster than such a look, and not as fast as the kernel
            found = {pid: Process(pid, 0, 0, 0, "?") for pid in self._crowd.members()}
        return list(found.values())

    def _named(self, those: Iterable[Process]) -> list[str]:
        """Names for these processes, with all that /proc shows of them."""
        names = {(helper.pid, helper.start): name for name, helper in self._helpers.items()}
        names |= {known: f"worker {rank}" for rank, known in self._workers.items()}
        names |= {(pid, start): f"child of rank {rank}" for rank, pid, start in self._children}
        return [
            f"{names.get((each.pid, each.start), 'launcher' if each.pid == self._launcher else 'process')} {each.pid} "
            f"({each.state})\n{faults.dump(each.pid)}"
            for each in those
        ]

    def _reap(self) -> None:
        """Reap the launcher, and the orphans that have become our children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._launcher:
                self.record.status = os.waitstatus_to_exitcode(status)
                self._lift()

    # --- faults

    def _bring_about(self, fault: Fault) -> None:
        shot = Shot(fault, time.monotonic_ns())
        self.record.shots.append(shot)
        if not fault.signal:
            self._run_out(fault, shot)
            return
        target = self._target(fault, shot)
        if target is None:
            return
        shot.pid = target[0]
        shot.hit = faults.send(fault.signal, *target)
        if fault.what == "SIGSTOP" and shot.hit:

            def go_on() -> None:
                faults.send(signal.SIGCONT, *target)
                shot.ended = time.monotonic_ns()

            self._at(fault.lasting, go_on)

    def _target(self, fault: Fault, shot: Shot) -> tuple[int, int] | None:
        """The pid and the start time of the process that a fault is for; None if there is none."""
        if fault.target == "launcher":
            found = faults.process(self._launcher) if self.record.status is None else None
            return None if found is None else (found.pid, found.start)
        if fault.target in HELPERS:
            self._look()
            helper = self._helpers.get(fault.target)
            return None if helper is None else (helper.pid, helper.start)
        if fault.target == "worker" and self._workers:
            shot.rank = sorted(self._workers)[fault.which % len(self._workers)]
            return self._workers[shot.rank]
        if fault.target == "child" and self._children:
            shot.rank, *known = self._children[fault.which % len(self._children)]
            return known[0], known[1]
        return None

    def _run_out(self, fault: Fault, shot: Shot) -> None:
        if "closed" in self._reached:  # the launcher looks for what is left in it, for which it needs descriptors
            return
        if fault.what == "descriptors":
            shot.hit = self._few_descriptors(fault, shot)
        elif fault.what == "processes":
            shot.hit = self._crowd.limit(fault.amount)
        elif fault.what == "inotify":
            shot.hit = "inotify" not in self.record.left_out
        else:
            shot.hit = self._disk is not None and self._disk.fill(fault.amount)
        if not shot.hit and fault.what != "descriptors":
            self.record.left_out.append(fault.what)
        if shot.hit and fault.lasting:

            def go_on() -> None:
                self._lift(fault.what)
                shot.ended = time.monotonic_ns()

            self._at(fault.lasting, go_on)

    def _few_descriptors(self, fault: Fault, shot: Shot) -> bool:
        target = self._target(fault, shot)
        if target is None:
            return False
        shot.pid = target[0]
        try:
            before = faults.few_descriptors(target[0], fault.amount)
        except OSError:  # it has just gone
            return False
        self._limits.setdefault(target[0], before)
        return True

    def _lift(self, what: str = "") -> None:
        """Let there be enough of ``what`` again, or of everything."""
        if what in ("", "processes"):
            self._crowd.lift()
        if what in ("", "disk") and self._disk is not None:
            self._disk.lift()
        for pid, limits in self._limits.items() if what in ("", "descriptors") else ():
            faults.enough_descriptors(pid, limits)

    # --- the console

    def _begin_to_read(self) -> None:
        reader = self._plan.reader
        if reader.way == "slow":
            self._read_slowly()
        elif reader.way == "late":
            self._at(reader.after, self._watch_console)
        elif reader.way != "never":
            self._watch_console()
        if reader.way == "leaves":
            self._at(reader.after, self._leave_console)

    def _watch_console(self) -> None:
        if self._ends.ours >= 0:
            self._watch(self._ends.ours, self._read)

    def _leave_console(self) -> None:
        self._forget(self._ends.ours)
        self._ends.leave()

    def _read(self) -> None:
        if not self._ends.take():
            self._forget(self._ends.ours)

    def _read_slowly(self) -> None:
        if self._ends.take(Ends.TURN) and not self._over:
            self._at(Ends.EVERY, self._read_slowly)

    # --- waiting

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._callbacks[fd] = callback

    def _forget(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    # --- the end

    def _sweep(self) -> None:
        """Kill every process that is left."""
        self._lift()
        self._crowd.limit(0)  # a chain of processes could be faster than we are
        while left := self._alive():
            for each in left:
                faults.send(signal.SIGKILL, each.pid, each.start)
            select.poll().poll(5)
            self._reap()
        while hidden := list(faults.marked(f"{MARK}={self._name}")):  # such a chain may escape one look, or two
            for each in hidden:
                self.record.survivors.append(f"{each.pid}, which was not seen at first\n{faults.dump(each.pid)}")
                faults.send(signal.SIGKILL, each.pid, each.start)
            select.poll().poll(5)
            self._reap()
        self._reap()

    def _read_events(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self._folder, EVENTS), "rb") as file:
            self.record.events = [json.loads(line) for line in file.read().split(b"\n")[:-1]]

    def read(self) -> None:
        """Read what the run has left in its folder."""
        record = self.record
        self._hear()
        self._read_events()
        self._ends.drain()
        record.console = bytes(self._ends.data)
        with open(os.path.join(self._folder, "stderr"), "rb") as file:
            record.stderr = file.read()
        for rank in range(len(self._plan.works)):
            with (
                contextlib.suppress(FileNotFoundError),
                open(os.path.join(self._folder, f"written-{rank}"), "rb") as file,
            ):
                data = file.read().ljust(24, b"\0")
                numbers = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in (0, 8, 16)]
                record.written[rank] = numbers[0], numbers[1], numbers[2]
        for path in Path(self._folder, LOGS).glob("*/attempt_0/*/std*.log"):
            parts = sorted(path.parent.glob(f"{path.name}.[0-9]*"), key=lambda part: int(part.suffix[1:]))
            if not parts or not path.samefile(parts[-1]):  # so it is when the log writer dies as it sets a file aside
                parts.append(path)
            stream = 1 if path.name == "stdout.log" else 2
            record.logs[int(path.parent.name), stream] = [part.read_bytes() for part in parts]

    def close(self) -> None:
        """Kill every process that is left, and give everything back."""
        self._sweep()
        self._crowd.close()
        if self._disk is not None:
            self._disk.close()
        self._ends.close()
        self._ear.close()
        self._epoll.close()
        if self._go >= 0:
            os.close(self._go)
