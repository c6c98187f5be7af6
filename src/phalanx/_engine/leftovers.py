"""Reports the processes that workers left behind: values for programs, lines for people."""

from __future__ import annotations

import os
import signal

from phalanx._base.clock import format_duration
from phalanx._base.frozen import Value
from phalanx._base.text import name_ranks
from phalanx._engine.protocol import Orphan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any


_NAMED = 4  # processes that get a line each
_COMMAND = 80  # characters of a command in a line


class Leftover(Value):
    """A process that a worker left behind, and that was ended when no worker was left.

    Attributes:
        pid: The process.
        command: Its command line, up to 200 characters; or its name.
        local_rank: The worker's rank in its group; None when that is not known.
        age: Its age in seconds when it was first signalled.
        signal_sent: The last signal that it was sent.
        exitcode: As `subprocess` gives it, negative for a signal; None when it outlived even SIGKILL.

    >>> Leftover(4711, "python upload.py", 2, 12.34, 15, -15).describe()
    'pid 4711 (python upload.py) of rank 2, 12.3s old: SIGTERM'
    """

    __slots__ = ("pid", "command", "local_rank", "age", "signal_sent", "exitcode")  # noqa: RUF023 - as the arguments

    pid: int
    command: str
    local_rank: int | None
    age: float
    signal_sent: int
    exitcode: int | None

    def __init__(
        self, pid: int, command: str, local_rank: int | None, age: float, signal_sent: int, exitcode: int | None
    ) -> None:
        self._store(
            pid=pid, command=command, local_rank=local_rank, age=age, signal_sent=signal_sent, exitcode=exitcode
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    def describe(self) -> str:
        """The process, and how it was ended, in one line."""
        sent = signal.Signals(self.signal_sent).name
        still = "" if self.exitcode is not None else ", and it is still there"
        return f"{_who(self)}: {sent}{still}"


def of(entry: tuple[Any, ...]) -> Leftover:
    """The process that a packed `protocol.Orphan` describes."""
    orphan = Orphan(*entry)
    exitcode = None if orphan.status is None else os.waitstatus_to_exitcode(orphan.status)
    rank = None if orphan.rank < 0 else orphan.rank
    return Leftover(orphan.pid, orphan.command, rank, orphan.age, orphan.signal, exitcode)


def lines_of_ended(ended: list[Leftover], beyond: int) -> Iterator[str]:
    """Yield lines on the processes that were ended. ``beyond`` counts those that are not described."""
    for one in ended[:_NAMED]:
        yield f"ended what was left behind: {one.describe()}"
    more = len(ended) - _NAMED + beyond
    if more > 0:
        yield f"ended what was left behind: {more} more process{'es' * (more > 1)}{_whose(ended[_NAMED:])}"


def line_of_waiting(waiting: list[Leftover], count: int, seconds: float) -> str:
    """One line on ``count`` processes that are waited for, of which the first ones are described."""
    those = ", ".join(map(_who, waiting[:_NAMED]))
    more = f" and {count - _NAMED} more{_whose(waiting[_NAMED:])}" if count > _NAMED else ""
    return f"waiting at most {seconds:g} s for what is left behind: {those}{more}"


def _who(one: Leftover) -> str:
    rank = "a worker" if one.local_rank is None else f"rank {one.local_rank}"
    command = one.command if len(one.command) <= _COMMAND else f"{one.command[: _COMMAND - 1]}…"
    return f"pid {one.pid} ({_printable(command)}) of {rank}, {format_duration(one.age)} old"


def _whose(those: Iterable[Leftover]) -> str:
    ranks = {one.local_rank for one in those if one.local_rank is not None}
    return f" of {name_ranks(ranks)}" if ranks else ""


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
