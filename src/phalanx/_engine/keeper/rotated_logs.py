"""The keeper's end of its log writer, the process that fills log files of bounded size: its start, orders, and end.

Loaded by groups that have one. The process itself is `log_writer`: a disk may block it, and no other process.
"""

from __future__ import annotations

import errno

from phalanx._base import channels
from phalanx._base.loop import READ, WRITE
from phalanx._engine import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from phalanx._base.loop import Loop
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
        self._channel: channels.Channel | None = None  # None: it was not started here, or has exited
        self._waits = False  # for room in the socket

    def start(self, loop: Loop, notes: int, send: Callable[[protocol.Message], object]) -> protocol.Message:
        """Fork the log writer, which writes its pid into the pipe ``notes``. Returns (), or `protocol.start_failed`.

        ``send`` is called with `protocol.logs_refused` when a file does not take a write for the first time. Such lines
        are dropped, and the workers go on.
        """
        self._loop, self._send_launcher = loop, send
        try:
            from phalanx._engine.keeper import log_writer

            ours, theirs = channels.pair()
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    log_writer.serve(channels.Channel(theirs), notes)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        except (OSError, ImportError) as error:
            number = getattr(error, "errno", None) or errno.EMFILE
            return protocol.start_failed(-1, "starting what writes its log files", number, "")
        self._channel = channels.Channel(ours)
        loop.watch(self._channel.fileno(), self._on_channel)
        return ()

    def descriptors(self) -> list[int]:
        """Return the open descriptors."""
        return [] if self._channel is None else self._channel.descriptors()

    def add(self, path: str, bounds: Bounds, file: int, reader: int, is_terminal: bool) -> None:  # noqa: FBT001 - as it is called
        """Have one more file filled from a pipe, or from a terminal. The caller closes its own descriptors."""
        self._send(("add", path, bounds, is_terminal), (file, reader))

    def finish(self) -> None:
        """Have the log writer write what is in its pipes, and exit: no worker is left."""
        self._send(("finish",))

    def _send(self, message: channels.Message, fds: Sequence[int] = ()) -> None:
        if self._channel is None:  # the keeper learns of its exit by SIGCHLD
            return
        try:
            sent = self._channel.send(message, fds)
        except channels.Closed:  # as above; `_on_channel` sees it as well
            return
        if not sent and not self._waits:
            self._waits = True
            self._loop.change(self._channel.fileno(), READ | WRITE)

    def _on_channel(self, _events: int) -> None:
        channel = self._channel
        assert channel is not None
        try:
            if self._waits and channel.flush():
                self._waits = False
                self._loop.change(channel.fileno(), READ)
            received = channel.receive()
        except channels.Closed:
            self._channel = None
            self._loop.forget(channel.fileno())
            channel.close()
            return
        if received is not None:
            self._send_launcher(protocol.logs_refused(received[0][1]))  # type: ignore[arg-type]  # an int, as it sends it

    def reaped(self, status: int) -> int:
        """Record the end of the log writer. Returns how it ended, if it could not do its work; else 0."""
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        refused = 0 < code < _NO_ERRNO  # an errno, see `log_writer`
        if code:
            self.incomplete = os.strerror(code) if refused else f"the process that wrote them was lost ({code})"
        return 0 if refused else code

    def abandon(self) -> None:
        """Leave the log writer to itself."""
        self.incomplete = f"process {self.pid} still writes them"
