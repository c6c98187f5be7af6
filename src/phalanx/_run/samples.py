"""Samples of a run's workers, taken again and again: their file, and which ranks are slow.

Owns ``samples.jsonl``, and the rule by which a rank is slow. `_run.status` knows how a sample is taken. A thread of its
own does all of this, which may wait for a disk: nobody waits for it.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from phalanx._base import clock, disk, files
from phalanx._base.text import name_ranks, one_line
from phalanx._base.threads import Latch
from phalanx._base.tty import sanitise
from phalanx._events.agent_kinds import RankSlow
from phalanx._run.control import Control, nodes_of
from phalanx._run.status import RunStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._rendezvous.life import Found

SAMPLES = "samples.jsonl"
"""The name of the file, in a run's folder."""

SAMPLES_SIZE = 8 << 20
"""The most bytes of the file. When it is full, every second line is removed: so older samples are further apart."""

SLOW_RATIO = 1.5
"""A rank is slow if its step takes so many times as long as the median of all ranks,"""

SLOW_SECONDS = 30.0
"""for so many seconds, over"""

SLOW_STEPS = 3
"""so many new steps at least,"""

SLOW_SHARE = 0.1
"""and has lost so much of that time by it: else the steps are short, and the rank hardly delays the others."""

SLOW_RANKS = 3
"""Of so many ranks, at least, it must be known how long their steps take."""

_MEDIANS = 4  # of its steps, or `SLOW_SECONDS`: a rank that has reported none for longer is no evidence
_ASK_SECONDS = 15.0  # between two questions to all machines of a job
_SHARE = 0.0009  # of the time: the CPU time that this thread takes at most, however many ranks there are
_FIELDS = ("cpu", "memory", "threads", "fds", "step", "step_time", "beat", "gpu", "gpu_memory")
_DIGITS = {"cpu": 2, "step_time": 6, "beat": 1, "gpu": 1}


class StepTime(NamedTuple):
    """How long a rank takes: the ``median`` of a step, in seconds; how many were timed; seconds since the last one."""

    median: float
    steps: int
    age: float


class Slow(NamedTuple):
    """A rank that is slow: how long its step takes, compared with the median of all; and for how many seconds."""

    rank: int
    ratio: float
    seconds: float


class _Held(NamedTuple):
    """For how long a rank has been slow, at how many samples, and how many of its steps were timed when it began."""

    seconds: float
    samples: int
    first: int


class Stragglers:
    """Decides which ranks are slow, from samples. Pure.

    Seconds in which nothing is known of a rank (it stands at a breakpoint, it rests, it takes no step) neither count
    nor begin anew.

    Attributes:
        slow: The ranks that are slow now, and were found before: how much, by rank.

    >>> stragglers = Stragglers()
    >>> for now in range(0, 40, 5):
    ...     times = {rank: StepTime(1.0 + (rank == 2), 10 + now, 0.5) for rank in range(4)}
    ...     found = stragglers.add(float(now), 0, times)
    ...     if found:
    ...         print(now, found)
    30 [Slow(rank=2, ratio=2.0, seconds=30.0)]
    >>> stragglers.slow
    {2: 2.0}
    """

    def __init__(self) -> None:
        self.slow: dict[int, float] = {}
        self._attempt = -1
        self._now = 0.0
        self._held: dict[int, _Held] = {}
        self._found: set[int] = set()

    def add(self, now: float, attempt: int, times: Mapping[int, StepTime]) -> list[Slow]:
        """Return the ranks that are slow, and were not yet in this attempt.

        Args:
            now: Seconds, by any clock that goes on.
            attempt: The attempt; of another one, nothing is known yet.
            times: By rank: how long its steps take.
        """
        elapsed, self._now = now - self._now, now
        if attempt != self._attempt:
            self._attempt, self._held, self._found = attempt, {}, set()
        known = {
            rank: one for rank, one in times.items()
            if one.steps >= SLOW_STEPS and one.age <= max(SLOW_SECONDS, _MEDIANS * one.median)
        }  # fmt: skip
        middle = _middle(sorted(one.median for one in known.values())) if len(known) >= SLOW_RANKS else 0.0
        self.slow, found = {}, []
        for rank, one in sorted(known.items()) if middle > 0 else ():
            ratio = one.median / middle
            if ratio < SLOW_RATIO:
                self._held.pop(rank, None)
                continue
            held = self._held.get(rank)
            seconds, samples, first = (0.0, 0, one.steps) if held is None else (held.seconds + elapsed, *held[1:])
            held = self._held[rank] = _Held(seconds, samples + 1, first)
            steps = one.steps - held.first
            is_slow = held.seconds >= SLOW_SECONDS and steps >= SLOW_STEPS
            is_felt = (one.median - middle) * steps >= SLOW_SHARE * held.seconds
            if is_slow and is_felt and held.samples >= SLOW_STEPS and rank not in self._found:
                self._found.add(rank)
                found.append(Slow(rank, ratio, held.seconds))
            if rank in self._found:
                self.slow[rank] = round(ratio, 2)
        return found


def _middle(ordered: Sequence[float]) -> float:
    """Return the median. That of `statistics` would load the decimal numbers into each launcher, which is 1 MB."""
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


class SampleFile:
    """Appends samples to a file of bounded size, each as one line. What a full disk does not take is lost.

    Args:
        path: The file.
        warn: Called with the first error.
        most: The most bytes of the file.
    """

    def __init__(self, path: str, warn: Callable[[str], object], most: int = SAMPLES_SIZE) -> None:
        self.path, self._warn, self._most = path, warn, most
        self._has_failed = False

    def write(self, sample: dict[str, Any]) -> None:
        """Append a sample. Does not raise OSError."""
        line = json.dumps(sample, separators=(",", ":")).encode() + b"\n"
        try:
            fd = files.opened(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":  # a launcher before this one was killed within it
                    line = b"\n" + line
                if size and size + len(line) > self._most:
                    self._thin_out(files.pread(fd, min(size, 2 * self._most)), line)
                elif os.write(fd, line) < len(line):  # the disk is full: half a line is none
                    os.ftruncate(fd, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            finally:
                os.close(fd)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"{SAMPLES} is not complete: {disk.in_words(error, self.path)}")

    def _thin_out(self, data: bytes, line: bytes) -> None:
        """Write every second line of the file anew, and a further one. Raises OSError."""
        temporary = f"{self.path}.new"
        with suppress(FileNotFoundError):
            os.unlink(temporary)  # of a launcher that was killed
        kept = b"".join(data.splitlines(keepends=True)[::2]).rstrip(b"\n")
        files.replace(self.path, temporary, kept + b"\n" + line.lstrip(b"\n"))


class Sampler:
    """Takes samples of a run until its end.

    Args:
        status: Takes a sample.
        control: Has the job of many machines; None: it is none.
        folder: Returns the run's folder; "": there is none, and no file.
        interval: Seconds between two samples, at least.
        warn: Prints a line. It does not wait.
        emit: Emits an event of an attempt.
    """

    def __init__(
        self, status: RunStatus, control: Control, folder: Callable[[], str], interval: float,
        warn: Callable[[str], None], emit: Callable[..., None],
    ) -> None:  # fmt: skip
        self._status, self._control, self._folder, self._interval = status, control, folder, interval
        self._warn, self._emit = warn, emit
        self._file: SampleFile | None = None
        self._stragglers = Stragglers()
        self._ask_at = 0.0
        self._answers: deque[Found] = deque()  # of the nodes of a job
        self._has_failed = False

    def run(self, end: Latch) -> None:
        """Take a sample at once, and again and again until ``end`` is open."""
        while not end:
            began = time.thread_time()
            try:
                self._take()
            except Exception as error:  # noqa: BLE001 - whatever it is, a run of days must not end for a sample
                if not self._has_failed:
                    self._has_failed = True
                    self._warn(f"a sample of the workers could not be taken: {type(error).__name__}: {error}")
            end.wait(max(self._interval, (time.thread_time() - began) / _SHARE))

    def _take(self) -> None:
        found = self._status.sample()
        if any(rank["exitcode"] is None and rank["state"] == "running" for rank in found["ranks"]):
            self._write(found)
        if found["state"] == "RUNNING":
            self._judge(found)

    def _write(self, found: dict[str, Any]) -> None:
        folder = self._folder()
        if not folder:
            return
        path = os.path.join(folder, SAMPLES)
        if self._file is None or self._file.path != path:
            self._file = SampleFile(path, self._warn)
        self._file.write(sample_of(found))

    # --- who is slow

    def _judge(self, found: dict[str, Any]) -> None:
        """Find the ranks that are slow: of a job of many machines, those of all, by the agent of the first one."""
        attempt, job = found["attempt"], self._control.job
        if job is None:
            self._compare(attempt, [found])
            return
        if found["group_rank"] != 0:
            self._status.slow = attempt, {}
            return
        while self._answers:
            nodes = json.loads(nodes_of(self._answers.popleft())).get("nodes", ())
            self._compare(attempt, [node for node in nodes if node["attempt"] == attempt])
        if clock.now() >= self._ask_at:
            from phalanx._rendezvous import questions  # which is loaded where there is a job

            self._ask_at = clock.now() + _ASK_SECONDS
            job.ask(questions.STATUS, self._answers.append)

    def _compare(self, attempt: int, nodes: Iterable[dict[str, Any]]) -> None:
        times: dict[int, StepTime] = {}
        hosts: dict[int, str] = {}
        for node in nodes:
            for rank in () if node["paused"] else node["ranks"]:
                step_time, step_at = rank.get("step_time"), rank.get("step_at")
                if step_time and step_at and rank["exitcode"] is None and not rank["breakpoint"]:
                    times[rank["rank"]] = StepTime(step_time["median"], step_time["count"], node["time"] - step_at)
                    hosts[rank["rank"]] = sanitise(one_line(str(node["host"])))
        slow = self._stragglers.add(clock.now(), attempt, times)
        self._status.slow = attempt, self._stragglers.slow
        for host in dict.fromkeys(hosts[one.rank] for one in slow):
            self._warn(say_slow(host, [one for one in slow if hosts[one.rank] == host]))
        for one in slow:
            facts = {"ratio": round(one.ratio, 2), "seconds": round(one.seconds, 1)}
            self._emit(RankSlow, attempt, rank=one.rank, host=hosts[one.rank], **facts)


def sample_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return a line of `SAMPLES`: what `RunStatus.collect` has, with a list for each figure, in the order of ``ranks``.

    >>> found = {"time": 5.0, "attempt": 0, "ranks": [{"rank": 3, "cpu": 1.5, "step_time": {"median": 0.25}}]}
    >>> line = sample_of(found)
    >>> line["ranks"], line["cpu"], line["step_time"], line["beat"]
    ([3], [1.5], [0.25], [None])
    """
    ranks = [
        rank | {"step_time": (rank.get("step_time") or {}).get("median")}
        for rank in sorted(found["ranks"], key=lambda rank: int(rank["rank"]))
    ]
    line = {"time": found["time"], "attempt": found["attempt"], "ranks": [rank["rank"] for rank in ranks]}
    for field in _FIELDS:
        values, digits = [rank.get(field) for rank in ranks], _DIGITS.get(field)
        line[field] = [None if value is None else round(value, digits) for value in values] if digits else values
    return line


def say_slow(host: str, slow: list[Slow]) -> str:
    """Return the line on ranks of a machine that are slow.

    >>> say_slow("b", [Slow(5, 1.82, 30.0)])
    'rank 5 (host b) is slow: 1.8 x the median step for 30 s'
    >>> say_slow("b", [Slow(5, 1.82, 30.0), Slow(4, 2.31, 35.0)])
    'ranks 4-5 (host b) are slow: 1.8 to 2.3 x the median step for 30 s'
    """
    least, most = (f"{choose(one.ratio for one in slow):.1f}" for choose in (min, max))
    ratio = least if least == most else f"{least} to {most}"
    who = f"{name_ranks(one.rank for one in slow)} (host {host}) {'is' if len(slow) == 1 else 'are'} slow"
    return f"{who}: {ratio} x the median step for {min(one.seconds for one in slow):.0f} s"
