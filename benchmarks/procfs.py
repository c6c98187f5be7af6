"""What the kernel says of processes: memory, CPU time, descriptors, threads, kinship. Read from /proc (proc(5)).

Knows nothing of groups. A process that leaves while it is being read counts as having nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from pathlib import Path

MARK = "PHALANX_BENCHMARK"
"""Environment variable, unique to a run, that every process started by a contender inherits."""

LEAVE = 1.0
"""Seconds that what a contender started may take to go once it has ended."""

_EXECUTE = 0.2  # seconds that the execution of a program takes at most, on a machine that is busy
_PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except _GONE:
        return ""


def _kilobytes(text: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) if found else 0


def peak_mb(pid: int) -> float:
    """Return the peak resident memory of a process in MB (10^6 bytes)."""
    return _kilobytes(_read(pid, "status"), "VmHWM") * 1024 / 1e6


def pss_kb(pid: int) -> float:
    """Return the memory of a process in kB (2^10 bytes), pages shared with others counted in proportion."""
    return _kilobytes(_read(pid, "smaps_rollup"), "Pss")


def anonymous_kb(pid: int) -> float:
    """Return the resident memory of a process in kB (2^10 bytes) that is of no file: what it has taken for itself."""
    return _kilobytes(_read(pid, "status"), "RssAnon")


def fds(pid: int) -> int:
    """Return the number of descriptors that a process has open."""
    return _entries(pid, "fd")


def threads(pid: int) -> int:
    """Return the number of threads of a process."""
    return _entries(pid, "task")


def _entries(pid: int, folder: str) -> int:
    try:
        return len(os.listdir(_PROC / str(pid) / folder))
    except _GONE:
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that the living threads of a process have used.

    From schedstat, in nanoseconds; utime and stime in stat have a grain of 10 ms, half of what the tightest target
    allows over ten seconds. Kernels without schedstat give zero there, and stat is used.
    """
    total = 0.0
    with contextlib.suppress(*_GONE):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(*_GONE):
                total += int((task / "schedstat").read_text().split()[0]) / 1e9
    if total:
        return total
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields of stat from the state on: the name before it is free text in parentheses."""
    return _read(pid, "stat").rpartition(")")[2].split()


def command(pid: int) -> str:
    """Return the command line of a process."""
    return _read(pid, "cmdline").replace("\0", " ").strip()


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]


def helpers(launcher: int, workers: set[int]) -> set[int]:
    """Return the processes between a launcher and its workers.

    These are its descendants, less the workers and what is below them, and the workers' parents, whosever children
    those are.
    """
    parent = {pid: int(fields[1]) for pid in _pids() if (fields := _stat(pid))}
    found = {parent[worker] for worker in workers if worker in parent} - {launcher, 1}
    for pid in parent:
        line = [pid]
        while line[-1] in parent and line[-1] != launcher:
            line.append(parent[line[-1]])
        if line[-1] == launcher and not workers.intersection(line):
            found.update(line[:-1])
    return found


def marked(mark: str) -> set[int]:
    """Return the living processes, other than the caller, whose environment at their start carried this mark."""
    return {pid for pid in _pids() if pid != os.getpid() and _carries(pid, mark)}


def _carries(pid: int, mark: str) -> bool:
    """Return whether a process has the mark. Amid execve(2) it shows no environment: it is read again for a moment."""
    until = time.monotonic() + _EXECUTE
    while not (text := _read(pid, "environ")) and pid != 1 and _read(pid, "statm")[:1] not in ("", "0"):
        if time.monotonic() >= until:
            break
        time.sleep(0.001)
    return f"{MARK}={mark}" in text.split("\0")


def sweep(mark: str) -> int:
    """Kill every process that carries the mark and is not gone within ``LEAVE``; return how many there were.

    One that was killed is waited for as long again, not for ever: in uninterruptible sleep it would stay.
    """
    deadline = time.monotonic() + LEAVE
    seen: set[int] = set()
    killed = 0
    while found := marked(mark) - seen:
        seen |= found
        killed += sum(_end(pid, mark, deadline) for pid in found)
    return killed


def _end(pid: int, mark: str, deadline: float) -> bool:
    """Kill a process that is there at the deadline, and tell whether it had to be.

    The mark is read again once a pidfd is open, so that no reused pid is signalled (pidfd_send_signal(2)).
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        gone, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        if gone or not _carries(pid, mark):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], LEAVE)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True
