"""What /proc says of a process that cannot speak for itself. Owns the reading; never raises, never waits."""

from __future__ import annotations

import os

from phalanx._base import linux

_TASKS = 64
_STATUS = ("Name", "State", "PPid", "Threads", "VmRSS", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")


def facts(pid: int) -> str:
    """What the kernel says of any process and where its threads are, as far as it may be read. Never raises.

    From /proc/PID/status a few lines; and of each thread (64 at the most) its state, ``wchan``, ``syscall`` and
    ``stack``, see proc_pid_wchan(5), proc_pid_syscall(5) and proc_pid_stack(5).
    """
    whole = status(pid)
    if not whole:
        return ""
    lines = [f"{name}: {whole[name]}" for name in _STATUS if name in whole]
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        tasks = []
    for task in tasks[:_TASKS]:
        folder = f"{pid}/task/{task}"
        one = status(folder)
        line = f"thread {task} ({one.get('Name', '?')}): {one.get('State', '?')}"
        for name in ("wchan", "syscall"):
            said = _proc(folder, name).strip()
            if said and said != "0":
                line += f", {name} {said}"
        lines.append(line)
        lines += [f"  {frame}" for frame in _proc(folder, "stack").splitlines()]
    if len(tasks) > _TASKS:
        lines.append(f"... and {len(tasks) - _TASKS} threads more")
    return "\n".join(lines) + "\n"


def _proc(folder: str, name: str) -> str:
    try:
        with open(f"/proc/{folder}/{name}", "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def status(folder: int | str) -> dict[str, str]:
    """The fields of /proc/PID/status; none if it is gone, or not ours to read."""
    fields = (line.partition(":") for line in _proc(str(folder), "status").splitlines())
    return {name: " ".join(value.split()) for name, _, value in fields}


def states(pid: int, most: int = _TASKS) -> list[str]:
    """The states of its first threads, a letter each (proc_pid_stat(5)), the main thread's first; none: it is gone."""
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda task: task != pid) if most > 1 else [pid]
    except OSError:
        return []
    return [_proc(f"{pid}/task/{task}", "stat").rpartition(")")[2].lstrip()[:1] for task in tasks[:most]]


def has_ended(pid: int) -> bool:
    """Whether a process has, reaped or not."""
    try:
        return linux.Stat(pid).state in ("Z", "X")
    except ProcessLookupError:
        return True
    except OSError:  # no descriptor is left to find out
        return False


def mask(fields: dict[str, str], name: str) -> int:
    """One of the sets of signals in a `status`; 0 if it is not there."""
    try:
        return int(fields.get(name, "0"), 16)
    except ValueError:
        return 0
