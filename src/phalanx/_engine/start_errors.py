"""The errors of a group that could not start, or whose helper processes have died, in words."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class KeeperLostError(RuntimeError):
    """A helper process of a group was killed. Every process of the group has been killed with it.

    Attributes:
        failures: The `ProcessFailure` of each rank that had failed by itself before, as far as that is known, by local
            rank.
    """

    __module__ = "phalanx.multiprocessing"

    failures: Mapping[int, Any] = {}

    def __str__(self) -> str:
        first = min(self.failures.values(), key=lambda failure: failure.first_key, default=None)
        text = super().__str__()
        return text if first is None else f"{text}; before that, rank {first.local_rank} had failed: {first.message}"


def how_ended(returncode: int) -> str:
    """How a process has ended, in words."""
    return f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"


def of_helper(who: str, returncode: int) -> str:
    """Which helper process has died, and how, in words."""
    return f"the group's {who} process {how_ended(returncode)}"


def of_the_rest(found: tuple[list[int], list[int]] | None) -> str:
    """What became of the processes of a group without helpers, in words."""
    if found is None:
        return "no descriptor is left, or no /proc, to look for its processes: some may live on"
    left, silent = found
    then = "every process of the group was killed with it"
    if left:
        then = f"left are processes {_some(left)}, which outlived SIGKILL"
    if silent:
        then += (
            f"; but for processes {_some(silent)} it cannot be said whether they are of the group: they do not answer"
        )
    return then


def _some(pids: list[int]) -> str:
    return ", ".join(map(str, pids[:16])) + " …" * (len(pids) > 16)  # noqa: PLR2004 - enough to look at


def explain(number: int) -> str:
    """An errno in words, with what to look at."""
    hints = {
        errno.ENOENT: "is it there, and the interpreter that its first line names?",
        errno.EMFILE: "open files: see ulimit -n",
        errno.ENFILE: "open files, of the whole machine: see fs.file-max",
        errno.EAGAIN: "processes or memory have run out: see ulimit -u and the cgroup's pids.max",
        errno.ENOMEM: "processes or memory have run out: see ulimit -u and the cgroup's pids.max",
        errno.ENOEXEC: "a script needs a first line like #!/bin/sh",
    }
    return f"{os.strerror(number)} ({hints[number]})" if number in hints else os.strerror(number)


def not_started(rank: int, doing: str, number: int, filename: str) -> OSError:
    """The error for `protocol.start_failed`."""
    what = explain(number) if number != errno.ENOENT or doing == "starting it" else os.strerror(number)
    name = f": {filename}" if filename else ""
    who = f"worker {rank} was not started; {doing} failed" if rank >= 0 else "the group's keeper was not started"
    if rank < 0 and doing:
        who = f"the group was not started; {doing} failed"
    return OSError(number, f"{who}: {what}{name}")


def of_both_helpers(executable: str, code: int | None) -> str:
    """Why there is neither guard nor keeper: ``code`` is the guard's exit code, if nothing was received from it."""
    if not executable or code is None:
        return "the group's keeper and its guard were killed"
    if code < 0:
        return f"the group's guard process was killed by signal {-code} before its keeper was up"
    from phalanx._base import interpreter

    return (
        f"the group's keeper did not get up: {executable} ended with exit code {code}; "
        f"if that is no Python interpreter, {interpreter.HINT}"
    )


def of_survivors(left: list[tuple[int, str, str]]) -> str:
    """Processes (pid, name, state) that outlive SIGKILL, in words; pid 0: some that could not be found."""
    return ", ".join(
        f"pid {pid} ({name}, state {state})"
        if pid
        else "perhaps some that could not be found, for /proc does not show them"
        for pid, name, state in left
    )
