"""Describes a process that shows no stack by what the kernel tells of it and of its threads (/proc/PID)."""

from __future__ import annotations

import os

from phalanx._base import procfs
from phalanx._base.text import how_many

MOST_THREADS = 64
"""Threads of a process that are looked at."""

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
