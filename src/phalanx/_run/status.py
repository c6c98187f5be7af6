"""What a run's agent tells of itself, and of its workers on this machine, to those who ask.

Owns what is known of the agent, by the run's events, and the samples of the workers: CPU time, memory, the last line.
Nothing is sampled unless somebody asks, or `phalanx._run.samples` does, and none of it by the keeper.
"""

from __future__ import annotations

import math
import os
import time
from _thread import allocate_lock
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from phalanx._base import clock, files, procfs
from phalanx._base.threads import Latch, SerialExecutor
from phalanx._events.agent_kinds import AgentState, AgentStatus, RestartDecided
from phalanx._events.kinds import Event, WorkerStarted
from phalanx._group.context import PContext
from phalanx._run.gpus import Gpus, total

LINE = 200
"""Characters of a worker's last line."""

_FRESH = 5.0  # seconds for which the memory of a worker is not read again
_SPENT = 0.04  # seconds of one answer after which no further memory is read: that of a large process takes long
_WAIT = 0.25  # seconds that an answer waits for memory and lines: a disk may not answer, nor may a process that waits
_TAIL = 4096  # bytes of a log file in which its last line is found
_SCAN, _SCAN_SHARE = 60.0, 1 / 5000  # of brief answers: seconds between two looks at all processes, or that CPU time
_MEMORY_SHARE = 1 / 10_000  # of the time: the CPU time for which brief answers have memory read


class RunStatus:
    """The state of a run's agent, and of its workers on this machine. An observer of the run's `EventStream`.

    Args:
        run_id: The id of the run.
        max_restarts: How many restarts there may be.

    Attributes:
        name: What the workers run.
        group: Returns the group of the attempt that runs, or ran last; None: there was none.
        max_restarts: See the arguments.
        slow: An attempt, and those ranks of the job that are slow in it, as far as it is known here, and how much: see
            `phalanx._run.samples`.

    >>> status = RunStatus("night", 3)
    >>> status.observe([AgentState(0, 10**9, state="RUNNING")])
    >>> status.collect()["state"], status.collect()["attempt"], status.collect()["ranks"]
    ('RUNNING', 0, [])
    """

    def __init__(self, run_id: str, max_restarts: int) -> None:
        self.run_id, self.max_restarts = run_id, max_restarts
        self.name = ""
        self.group: Callable[[], PContext | None] = lambda: None
        self.slow: tuple[int, Mapping[int, float]] = -1, {}
        self._state: tuple[str, int, float] = ("NEW", -1, clock.wall())
        self._restarts = 0
        self._group_rank: int | None = None
        self._started: dict[int, tuple[int, float]] = {}  # by local rank: the pid of the latest worker, and when
        self._samples = _Samples()
        self._collecting = allocate_lock()
        self._latest: tuple[float, dict[str, Any]] = -math.inf, {}  # when its collection began, and what it has found

    def observe(self, events: list[Event]) -> None:
        """Handle what has happened."""
        for event in events:
            if isinstance(event, AgentState):
                attempt = max(self._state[1], event.attempt)
                if (event.state, attempt) != self._state[:2]:
                    self._state = event.state, attempt, event.time
            elif isinstance(event, RestartDecided):
                self._restarts += event.counted
            elif isinstance(event, AgentStatus):
                self._group_rank = event.group_rank
            elif isinstance(event, WorkerStarted):
                self._started[event.rank] = event.pid, event.time

    def agent(self) -> dict[str, Any]:
        """Return the state of the agent. Does not wait.

        ``state`` (see `phalanx._run.attempts.STATES`), ``attempt`` (from 0 on; None: there was none), ``since`` (of the
        state, Unix seconds), ``run_id``, ``max_restarts`` and the ``pid`` of this process.
        """
        state, attempt, since = self._state
        return {
            "run_id": self.run_id, "max_restarts": self.max_restarts, "pid": os.getpid(), "state": state,
            "attempt": None if attempt < 0 else attempt, "since": round(since, 3),
        }  # fmt: skip

    def collect(self) -> dict[str, Any]:
        """Return what `agent` does, and what is known besides, as JSON can hold it.

        That are ``time`` (now, Unix seconds), ``host``, ``name``, ``restarts`` (those that count), ``group_rank``,
        ``paused``, ``slow`` (by rank, in the whole job, as far as it is known here) and ``ranks``, the workers of this
        machine. Of each that are ``rank`` (in the job), ``local_rank``, ``pid``, ``state``, ``exitcode`` and, each None
        if it is not known, or there is none:

        - ``started``: when, in Unix seconds.
        - ``step``, ``beat``, ``breakpoint``: the highest step that it has reported; the seconds since its last
          heartbeat; where it stands at a breakpoint.
        - ``step_at``, ``step_time``: when it has reported its last step, in Unix seconds; how long the latest took, in
          seconds: ``min``, ``median``, ``max`` and ``mean``, and the ``count`` of all that were timed.
        - ``slow``: if it is slow: how long its step takes, compared with the median of all ranks.
        - ``cpu``: the seconds of CPU time that it and its live descendants have used, and children that have ended.
        - ``memory``: their bytes: RSS, or PSS where that could be read: see `_Samples`.
        - ``threads``, ``fds``: how many threads, and open descriptors, they have.
        - ``gpu``, ``gpu_memory``: what they use of GPUs, in percent of a GPU's time, and in bytes: see `Gpus`.
        - ``line``: the last line that it wrote to a log file, `LINE` characters of it at most.

        Any thread may call it, but no signal handler. It waits at most 0.25 s, and as long for a thread that is at it.
        What it returns is no older than the call, and not to be changed: threads that call it at once get the same.
        """
        asked = clock.now()
        with self._collecting:
            if self._latest[0] < asked:
                self._latest = clock.now(), self._collect()
            return self._latest[1]

    def sample(self) -> dict[str, Any]:
        """Return what `collect` does, for little CPU time and without waiting: ``line`` is not read.

        Descendants are those of the last look at all processes, a minute ago or more.
        """
        with self._collecting:
            return self._collect(is_brief=True)

    def _collect(self, *, is_brief: bool = False) -> dict[str, Any]:
        group, now, agent = self.group(), clock.wall(), self.agent()
        attempt, slow = self.slow
        if (agent["state"], agent["attempt"]) != ("RUNNING", attempt):  # what was found of an attempt is of no other
            slow = {}
        ranks: list[dict[str, Any]] = []
        for local_rank, worker in ({} if group is None else group.status()).items():
            assert group is not None
            pid, started = self._started.get(local_rank, (0, 0.0))
            number = int(group.envs[local_rank].get("RANK", local_rank))
            ranks.append({
                "rank": number, "local_rank": local_rank,
                "pid": worker.pid, "state": worker.state, "exitcode": worker.exitcode,
                "started": round(started, 3) if pid == worker.pid else None, "step": worker.step,
                "beat": None if worker.beat_age is None else round(worker.beat_age, 3), "breakpoint": worker.breakpoint,
                "step_at": None if worker.step_age is None else round(now - worker.step_age, 3),
                "step_time": worker.step_time, "slow": slow.get(number),
            })  # fmt: skip
        if group is not None:
            self._samples.add(ranks, *(() if is_brief else (group.logs.stdouts, group.logs.stderrs)))
        return agent | {
            "time": round(now, 3), "host": os.uname().nodename, "name": self.name, "restarts": self._restarts,
            "group_rank": self._group_rank, "ranks": ranks,
            "paused": group is not None and group.is_paused,
            "slow": {str(rank): ratio for rank, ratio in slow.items()},
        }  # fmt: skip


class _Samples:
    """Samples workers. The thread that asks reads what the kernel has at hand; another one what may take for ever.

    That is the memory that a process shares with others in proportion (PSS): of many, or large ones, each is read
    rarely. Meanwhile it is estimated: it grows as the resident memory (RSS) does.
    """

    def __init__(self) -> None:
        self._thread = SerialExecutor("phalanx-samples")
        self._done: Latch | None = None  # of the latest work of that thread
        self._memory: dict[int, _Memory] = {}  # by the pid of a worker
        self._lines: dict[str, tuple[tuple[int, int, int], str]] = {}  # by path: of what state, and which
        self._trees: dict[int, list[int]] = {}  # by the pid of a worker: itself and its descendants, when last seen
        self._scan_at = 0.0  # when a brief answer looks at all processes again
        self._gpus = Gpus()
        self._began, self._spent = clock.now(), 0.0  # seconds of CPU time for memory, for brief answers

    def add(self, ranks: list[dict[str, Any]], *logs: dict[int, str]) -> None:
        """Add the samples of each worker to what is known of it. ``logs``: of its streams; none: it is to be brief."""
        alive = [rank["pid"] for rank in ranks if rank["exitcode"] is None]
        usage, trees = self._look(alive, is_brief=not logs)
        tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGESIZE")
        resident = {pid: sum(usage[each][3] for each in tree) * page for pid, tree in trees.items()}
        paths = {rank["local_rank"]: [log[rank["local_rank"]] for log in logs] for rank in ranks}
        if logs or self._spent < _MEMORY_SHARE * (clock.now() - self._began):
            self._read(trees, resident, [path for both in paths.values() for path in both], is_brief=not logs)
        on_gpus = self._gpus.use() if alive else {}
        for rank in ranks:
            line = self._line(paths[rank["local_rank"]])
            rank.update(dict.fromkeys(("cpu", "memory", "threads", "fds", "gpu", "gpu_memory")), line=line)
            tree = trees.get(rank["pid"], ())
            if tree:
                used = [usage[pid] for pid in tree]
                memory, now = self._memory.get(rank["pid"]), resident[rank["pid"]]
                fds = [procfs.descriptors(pid) for pid in tree]
                rank["cpu"] = round(sum(each[1] for each in used) / tick, 2)
                rank["memory"] = memory.estimate(now) if memory is not None else now
                rank["threads"] = sum(each[2] for each in used)
                rank["fds"] = None if None in fds else sum(filter(None, fds))
                rank.update(total(on_gpus[pid] for pid in tree if pid in on_gpus)._asdict())

    def _look(
        self, alive: list[int], *, is_brief: bool
    ) -> tuple[dict[int, tuple[int, int, int, int]], dict[int, list[int]]]:
        """Return what processes have used, by pid, and of each live worker its own pid and those of its descendants."""
        known = {pid: self._trees[pid] for pid in alive if pid in self._trees}
        if is_brief and len(known) == len(alive) and clock.now() < self._scan_at:
            usage = procfs.usage([pid for tree in known.values() for pid in tree])
        else:
            began = time.thread_time()
            usage = procfs.usage()
            self._scan_at = clock.now() + max(_SCAN, (time.thread_time() - began) / _SCAN_SHARE)
        below: dict[int, list[int]] = {}
        for pid, (parent, *_) in usage.items():
            below.setdefault(parent, []).append(pid)
        self._trees = {pid: _tree(pid, below) for pid in alive if pid in usage}
        return usage, self._trees

    def _read(self, trees: dict[int, list[int]], resident: dict[int, int], paths: list[str], *, is_brief: bool) -> None:
        """Have memory and lines read, and wait for that; not for what is still being read since an earlier time."""
        if self._done is None or self._done:
            done = self._done = Latch()
            if self._thread.submit(lambda: self._read_now(trees, resident, paths, done, 0.0 if is_brief else _SPENT)):
                done.wait(0 if is_brief else _WAIT)
            else:
                done.open()

    # --- the thread for what may wait

    def _read_now(
        self, trees: dict[int, list[int]], resident: dict[int, int], paths: list[str], done: Latch, most: float
    ) -> None:
        try:
            now, began = clock.now(), time.thread_time()
            for path in paths:
                with suppress(OSError):
                    self._read_line(path)
            # Without workers that are gone; those come first whose processes have changed.
            memory = {pid: self._memory.get(pid, _Memory()) for pid in trees}
            for pid in sorted(trees, key=lambda pid: (len(trees[pid]) == memory[pid].processes, memory[pid].read)):
                if now - memory[pid].read < _FRESH:
                    continue
                read = [procfs.proportional_memory(each) for each in trees[pid]]
                shared = sum(filter(None, read)) if None not in read else 0
                memory[pid] = _Memory(now, shared, resident[pid], len(trees[pid]))
                if clock.now() - now > most:
                    break
            self._memory = memory
            if not most:
                self._spent += time.thread_time() - began
        finally:
            done.open()

    def _read_line(self, path: str) -> None:
        """Read the last line of a file, if it has changed. Raises OSError."""
        from phalanx._base.tty import plain

        found = os.stat(path)
        key = found.st_ino, found.st_size, found.st_mtime_ns
        if not found.st_size or self._lines.get(path, (None, ""))[0] == key:
            return
        fd = files.opened(path, links=files.OWN_LINKS)
        try:
            data = os.pread(fd, _TAIL, max(0, found.st_size - _TAIL))
        finally:
            os.close(fd)
        lines = [line for line in plain(data.decode("utf-8", "backslashreplace")).split("\n") if line.strip()]
        if lines:
            line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in lines[-1])
            self._lines[path] = key, line.strip()[:LINE]

    def _line(self, paths: list[str]) -> str | None:
        """Return the last line of the file that was written last; None: there is none."""
        known = [self._lines[path] for path in paths if path in self._lines]
        return max(known, key=lambda each: each[0][2])[1] if known else None


class _Memory(NamedTuple):
    """The memory of a worker and its descendants, so many ``processes``: PSS and RSS in bytes, and when it was read."""

    read: float = -math.inf
    proportional: int = 0
    resident: int = 0
    processes: int = 0

    def estimate(self, resident: int) -> int:
        """Return how much it is now, by the RSS of now."""
        if not (self.proportional and self.resident):
            return resident
        return resident * self.proportional // self.resident


def _tree(pid: int, below: dict[int, list[int]]) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for each in found:  # which grows
        found += below.get(each, ())
    return found
