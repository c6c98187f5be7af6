"""What the kernel tells of a process: facts, for one that shows no stack; and which one does the work of a worker.

A worker may only wait for a process below it: ``sh run.sh``, ``numactl``.
"""

from __future__ import annotations

import os

from phalanx._base import procfs
from phalanx._base.text import how_many

MOST_THREADS = 64
"""Threads of a process that are looked at."""

_DEEPEST = 4  # wrappers, one in another
_STATUS = ("Name", "State", "PPid", "Threads", "VmRSS", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")


def facts(pid: int) -> str:
    """Describe a process, in lines that end with a newline; "" if it may not be read, or is gone. Never raises.

    From /proc/PID/status a few lines; and of each thread (64 at the most) its state, ``wchan``, ``syscall`` and
    ``stack``, see proc_pid_wchan(5), proc_pid_syscall(5) and proc_pid_stack(5).
    """
    status = procfs.status(pid)
    if not status:
        return ""
    lines = [f"{name}: {status[name]}" for name in _STATUS if name in status]
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        tasks = []
    for task in tasks[:MOST_THREADS]:
        folder = f"{pid}/task/{task}"
        thread = procfs.status(folder)
        line = f"thread {task} ({thread.get('Name', '?')}): {thread.get('State', '?')}"
        for name in ("wchan", "syscall"):
            text = _text(folder, name).strip()
            if text and text != "0":
                line += f", {name} {text}"
        lines.append(line)
        lines += [f"  {frame}" for frame in _text(folder, "stack").splitlines()]
    if len(tasks) > MOST_THREADS:
        lines.append(f"... and {how_many(len(tasks) - MOST_THREADS, 'more thread')}")
    return "\n".join(lines) + "\n"


def _text(folder: str, name: str) -> str:
    return procfs.read(f"/proc/{folder}/{name}").decode("utf-8", "replace")


def working_process(pid: int) -> int:
    """Find the process whose stacks tell of the worker ``pid``: itself, or the one below it. Never raises.

    It is one below where the worker is no Python program, has a single child, and that child is the same user's (it is
    not below ``sudo``).
    """
    for _ in range(_DEEPEST):
        try:
            if "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
                break
            below = procfs.children(pid)
        except OSError:
            break
        if len(below) != 1 or not _have_one_owner(pid, below[0]):
            break
        (pid,) = below
    return pid


def _have_one_owner(*pids: int) -> bool:
    try:
        return len({os.stat(f"/proc/{pid}").st_uid for pid in pids}) == 1
    except OSError:
        return False
