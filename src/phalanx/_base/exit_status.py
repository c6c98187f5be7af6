"""Reads the wait status of a process: how it ended."""

from __future__ import annotations

import os


class Exit:
    """The end of a process: an exit code, or the signal that killed it.

    ``returncode`` follows `subprocess`: 0 to 255 for an exit code, ``-n`` for signal ``n``.

    >>> Exit(0).ok, Exit(-9).ok
    (True, False)
    >>> Exit(-9).signal, Exit(3).signal
    (9, None)
    >>> Exit(-15).shell_code, Exit(3).shell_code
    (143, 3)
    """

    __slots__ = ("returncode",)

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    @classmethod
    def of_status(cls, status: int) -> Exit:
        """Read a status word as wait(2) fills it.

        >>> Exit.of_status(256).returncode, Exit.of_status(9).returncode
        (1, -9)
        """
        return cls(os.waitstatus_to_exitcode(status))

    @property
    def ok(self) -> bool:
        """Whether the process ended by itself with exit code 0."""
        return self.returncode == 0

    @property
    def signal(self) -> int | None:
        """The number of the signal that killed the process, or None."""
        return -self.returncode if self.returncode < 0 else None

    @property
    def description(self) -> str:
        """The end in words.

        >>> Exit(0).description, Exit(-9).description
        ('exit code 0', 'signal 9')
        """
        return f"signal {-self.returncode}" if self.returncode < 0 else f"exit code {self.returncode}"

    @property
    def shell_code(self) -> int:
        """What a POSIX shell would show in ``$?``: the exit code, or 128 + the signal's number."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exit) and other.returncode == self.returncode

    def __hash__(self) -> int:
        return hash((Exit, self.returncode))

    def __repr__(self) -> str:
        return f"Exit({self.returncode})"
