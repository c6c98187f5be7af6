"""What a run's agent tells of itself, and of its workers on this machine, to those who ask.

Owns what is known of the agent, by the run's events, and the samples of the workers: CPU time, memory, the last line.
Nothing is sampled unless somebody asks, and none of it by the keeper.
"""

from __future__ import annotations

import math
import os
from _thread import allocate_lock
from contextlib import suppress

from phalanx._base import clock, files, procfs
from phalanx._base.threads import Latch, SerialExecutor
from phalanx._events.agent_kinds import AgentState, AgentStatus, RestartDecided
from phalanx._events.kinds import WorkerStarted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx._events.kinds import Event
    from phalanx.multiprocessing import PContext

LINE = 200
"""Characters of a worker's last line."""

_FRESH = 5.0  # seconds for which the memory of a worker is not read again
_SPENT = 0.04  # seconds of one answer after which no further memory is read: that of a large process takes long
_WAIT = 0.25  # seconds that an answer waits for memory and lines: a disk may not answer, nor may a process that waits
_TAIL = 4096  # bytes of a log file in which its last line is found


class RunStatus:
    """The state of a run's agent, and of its workers on this machine. An observer of the run's `EventStream`.

    Args:
        run_id: The id of the run.
        max_restarts: How many restarts there may be.

    Attributes:
        name: What the workers run.
        group: Returns the group of the attempt that runs, or ran last; None: there was none.
        max_restarts: See the arguments.

    >>> status = RunStatus("night", 3)
    >>> status.observe([AgentState(0, 10**9, state="RUNNING")])
    >>> status.collect()["state"], status.collect()["attempt"], status.collect()["ranks"]
    ('RUNNING', 0, [])
    """

    def __init__(self, run_id: str, max_restarts: int) -> None:
        self.run_id, self.max_restarts = run_id, max_restarts
        self.name = ""
        self.group: Callable[[], PContext | None] = lambda: None
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

    def collect(self, max_age: float = 0.0) -> dict[str, Any]:
        """Return what `agent` does, and what is known besides, as JSON can hold it.

        That are ``time`` (now, Unix seconds), ``host``, ``name``, ``restarts`` (those that count), ``group_rank``,
        ``paused`` and ``ranks``, the workers of this machine. Of each that are ``rank`` (in the job), ``local_rank``,
        ``pid``, ``state``, ``exitcode`` and, each None if it is not known, or there is none:

        - ``started``: when, in Unix seconds.
        - ``step``, ``beat``, ``breakpoint``: the highest step that it has reported; the seconds since its last
          heartbeat; where it stands at a breakpoint.
        - ``cpu``: the seconds of CPU time that it and its live descendants have used, and children that have ended.
        - ``memory``: their bytes: PSS, at most 5 s old; RSS where that cannot be read, or was not yet.
        - ``threads``: how many they have.
        - ``line``: the last line that it wrote to a log file, `LINE` characters of it at most.

        Any thread may call it, but no signal handler. It waits at most 0.25 s, and as long for a thread that is at it.

        Args:
            max_age: Seconds that the answer may be old: then it is that which another one has got, and is not to be
                changed. By default, it is no older than the call.
        """
        asked = clock.now()
        with self._collecting:
            if self._latest[0] < asked - max_age:
                self._latest = clock.now(), self._collect()
            return self._latest[1]

    def _collect(self) -> dict[str, Any]:
        group = self.group()
        ranks: list[dict[str, Any]] = []
        for local_rank, worker in ({} if group is None else group.status()).items():
            assert group is not None
            pid, started = self._started.get(local_rank, (0, 0.0))
            ranks.append({
                "rank": int(group.envs[local_rank].get("RANK", local_rank)), "local_rank": local_rank,
                "pid": worker.pid, "state": worker.state, "exitcode": worker.exitcode,
                "started": round(started, 3) if pid == worker.pid else None, "step": worker.step,
                "beat": None if worker.beat_age is None else round(worker.beat_age, 3), "breakpoint": worker.breakpoint,
            })  # fmt: skip
        if group is not None:
            self._samples.add(ranks, group.logs.stdouts, group.logs.stderrs)
        return self.agent() | {
            "time": round(clock.wall(), 3), "host": os.uname().nodename, "name": self.name, "restarts": self._restarts,
            "group_rank": self._group_rank, "ranks": ranks,
            "paused": group is not None and group.is_paused,
        }  # fmt: skip


class _Samples:
    """Samples workers. The thread that asks reads what the kernel has at hand; another one what may take for ever."""

    def __init__(self) -> None:
        self._thread = SerialExecutor("phalanx-samples")
        self._done: Latch | None = None  # of the latest work of that thread
        self._memory: dict[int, tuple[float, int]] = {}  # by the pid of a worker: when it was read, and bytes
        self._lines: dict[str, tuple[tuple[int, int, int], str]] = {}  # by path: of what state, and which

    def add(self, ranks: list[dict[str, Any]], *logs: dict[int, str]) -> None:
        """Add the samples of each worker to what is known of it."""
        usage = procfs.usage()
        below: dict[int, list[int]] = {}
        for pid, (parent, *_) in usage.items():
            below.setdefault(parent, []).append(pid)
        trees = {
            rank["pid"]: _tree(rank["pid"], below)
            for rank in ranks
            if rank["exitcode"] is None and rank["pid"] in usage
        }
        paths = {rank["local_rank"]: [log[rank["local_rank"]] for log in logs] for rank in ranks}
        self._read(trees, [path for both in paths.values() for path in both])
        tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGESIZE")
        for rank in ranks:
            rank |= {"cpu": None, "memory": None, "threads": None, "line": self._line(paths[rank["local_rank"]])}
            tree = trees.get(rank["pid"], ())
            if tree:
                used = [usage[pid] for pid in tree]
                _, read = self._memory.get(rank["pid"], (0.0, 0))
                rank["cpu"] = round(sum(each[1] for each in used) / tick, 2)
                rank["memory"] = read or sum(each[3] for each in used) * page
                rank["threads"] = sum(each[2] for each in used)

    def _read(self, trees: dict[int, list[int]], paths: list[str]) -> None:
        """Have memory and lines read, and wait for that; not for what is still being read since an earlier time."""
        if self._done is None or self._done:
            done = self._done = Latch()
            if self._thread.submit(lambda: self._read_now(trees, paths, done)):
                done.wait(_WAIT)
            else:
                done.open()

    # --- the thread for what may wait

    def _read_now(self, trees: dict[int, list[int]], paths: list[str], done: Latch) -> None:
        try:
            now = clock.now()
            for path in paths:
                with suppress(OSError):
                    self._read_line(path)
            memory = {pid: self._memory.get(pid, (0.0, 0)) for pid in trees}  # without workers that are gone
            for pid in sorted(trees, key=memory.__getitem__):
                if memory[pid][0] and now - memory[pid][0] < _FRESH:
                    break  # and so are the others
                read = [procfs.proportional_memory(each) for each in trees[pid]]
                memory[pid] = now, sum(filter(None, read)) if None not in read else 0
                if clock.now() - now > _SPENT:
                    break
            self._memory = memory
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


def _tree(pid: int, below: dict[int, list[int]]) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for each in found:  # which grows
        found += below.get(each, ())
    return found
