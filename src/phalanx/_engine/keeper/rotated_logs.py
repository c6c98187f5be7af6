"""The keeper's view of its log writer, which fills log files of bounded size: its start, its end, what it left.

Loaded by groups that have one. The process itself is `log_writer`: a disk may block it, and no other process.
"""

from __future__ import annotations

import errno

from phalanx._engine import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from phalanx._base.loop import Loop
    from phalanx._engine.keeper.log_writer import LogWriter
    from phalanx._logs.rotated import Bounds
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_NO_ERRNO = 255  # the exit code of a log writer that could not go on


class RotatedLogs:
    """One group's log writer. ``pid`` is its process, or 0 when it has ended or was not started."""

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.incomplete = ""
        """Why log files are not complete; "": they are, or may be yet."""
        self._writer: LogWriter | None = None

    def start(self, loop: Loop, notes: int, send: Callable[[protocol.Message], object]) -> protocol.Message:
        """Fork the log writer, which notes its pid in the pipe ``notes``. Returns (), or `protocol.start_failed`.

        ``send`` is called with `protocol.logs_refused`.
        """
        try:
            from phalanx._engine.keeper.log_writer import LogWriter

            self._writer = LogWriter(loop, notes, lambda number: send(protocol.logs_refused(number)))
            self.pid = self._writer.pid
        except (OSError, ImportError) as error:
            number = getattr(error, "errno", None) or errno.EMFILE
            return protocol.start_failed(-1, "starting what writes its log files", number, "")
        return ()

    @property
    def add(self) -> Callable[[str, Bounds, int, int], None] | None:
        """What has the log writer fill one more file; None: it was not started here."""
        return None if self._writer is None else self._writer.add

    def descriptors(self) -> list[int]:
        """Return the open descriptors."""
        return [] if self._writer is None else self._writer.descriptors()

    def finish(self) -> None:
        """Have the log writer write what is in its pipes, and exit."""
        if self._writer is not None:
            self._writer.finish()

    def reaped(self, status: int) -> int:
        """Note the end of the log writer. Returns how it ended, if it could not do its work; else 0."""
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        refused = 0 < code < _NO_ERRNO  # an errno, see `log_writer.LogWriter`
        if code:
            self.incomplete = os.strerror(code) if refused else f"the process that wrote them was lost ({code})"
        return 0 if refused else code

    def abandon(self) -> None:
        """Leave the log writer to itself."""
        self.incomplete = f"process {self.pid} still writes them"
