"""Starts the log writer, the process that fills log files of bounded size. Runs in the keeper.

A worker that writes to a file itself cannot be made to write to another one, and to truncate the file behind its back
loses what it writes between the copy and the truncation. So with a bound, and only then, the worker has a pipe, and the
group's log writer fills the files: ``path`` is always the newest, ``path.1`` the oldest, and a rotated file keeps its
name, but for the ``.gz`` of one that is compressed (see `_logs.rotated`).

The log writer is a process of its own, a fork of the keeper: a worker that writes without end, or a disk that does not
answer, must not block those who supervise. It depends on none of them: what a worker has written before it dies is in
the pipe, and is read even if launcher, keeper and guard are dead; it exits when every pipe is at EOF. Only if it is
killed itself is anything lost: the chunk in its hands (256 KiB) and what is in the pipes (64 KiB each).
"""

from __future__ import annotations

import os

from phalanx._base import channels
from phalanx._base.loop import READ, WRITE
from phalanx._engine.rotation import main

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx._base.loop import Loop
    from phalanx._logs.rotated import Bounds


class LogWriter:
    """Forks the log writer, and is the keeper's end of the channel to it. Raises OSError.

    The process first writes its pid into ``notes``, a pipe to the guard, which kills everything below it but the log
    writer. Its exit code is 0; the errno of a write that failed, which means that lines are missing in a file; or 255
    if it could not go on.

    Args:
        loop: Waits for room in the socket, and for what the process sends.
        notes: The pipe.
        refused: Called with the errno of the first write that has failed, when it has. What a file does not take is
            dropped, and the workers go on.
    """

    def __init__(self, loop: Loop, notes: int, refused: Callable[[int], object]) -> None:
        ours, theirs = channels.pair()
        try:
            self.pid = os.fork()
        except BaseException:
            ours.close()
            theirs.close()
            raise
        if self.pid == 0:
            main.serve(channels.Channel(theirs), notes)
        theirs.close()
        self._channel = channels.Channel(ours)
        self._loop = loop
        self._tell = refused
        self._waits = False  # for room in the socket
        self._finished = self._has_exited = False
        loop.watch(self._channel.fileno(), self._on_channel)

    def descriptors(self) -> list[int]:
        """Return the open descriptors."""
        return [] if self._has_exited else self._channel.descriptors()

    def add(self, path: str, bounds: Bounds, file: int, reader: int) -> None:
        """Have one more file filled from a pipe. The descriptors are duplicated: the caller closes its own."""
        self._send(("add", path, bounds), (file, reader))

    def finish(self) -> None:
        """Send "finish": no worker is left, so it writes what is in the pipes, and exits. Idempotent."""
        if not self._finished:
            self._finished = True
            self._send(("finish",))

    def _send(self, message: channels.Message, fds: Sequence[int] = ()) -> None:
        if self._has_exited:  # which the keeper learns by SIGCHLD
            return
        try:
            sent = self._channel.send(message, fds)
        except channels.Closed:  # as above; `_on_channel` sees it as well
            return
        if not sent and not self._waits:
            self._waits = True
            self._loop.change(self._channel.fileno(), READ | WRITE)

    def _on_channel(self, _events: int) -> None:
        try:
            if self._waits and self._channel.flush():
                self._waits = False
                self._loop.change(self._channel.fileno(), READ)
            received = self._channel.receive()
        except channels.Closed:
            self._has_exited = True
            self._loop.forget(self._channel.fileno())
            self._channel.close()
            return
        if received is not None:
            self._tell(received[0][1])  # type: ignore[arg-type]  # an int, as `main` sends it
