"""The log writer's process: fills the log files of a group from its workers' pipes, until all of these are at EOF."""

from __future__ import annotations

import errno
import os

from phalanx._base import channels, linux
from phalanx._base.loop import Loop
from phalanx._engine.rotation.rotator import Rotator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from phalanx._engine.rotation.compress import Compressor

_FAILED = 255


def serve(channel: channels.Channel, notes: int) -> NoReturn:
    """Run the log writer in a new fork, to its end. ``notes`` is a pipe that gets our pid."""
    code = _FAILED
    try:
        try:
            os.write(notes, b"%d " % os.getpid())
        except BrokenPipeError:  # the guard has exited
            pass
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # we may outlive the launcher: readers of its output wait for EOF
            os.dup2(null, fd)
        linux.close_all_but([channel.fileno()])
        _raise_limit()
        code = _LogWriterLoop(Loop(), channel).run()
    finally:
        os._exit(code)


def _raise_limit() -> None:
    """Raise the soft limit on open files to the hard one: two descriptors are open for each log file."""
    try:
        from resource import RLIMIT_NOFILE, getrlimit, setrlimit

        hard = getrlimit(RLIMIT_NOFILE)[1]
        setrlimit(RLIMIT_NOFILE, (hard, hard))
    except (ImportError, OSError, ValueError):  # ValueError: the kernel allows for less by now (fs.nr_open)
        return


class _LogWriterLoop:
    """Fills the files, one chunk of each in turn."""

    def __init__(self, loop: Loop, channel: channels.Channel) -> None:
        self._loop = loop
        self._channel = channel
        self._open: list[Rotator] = []
        self._complete = False  # whether no file will be added
        self._refused = 0
        self._compressor: Compressor | None = None

    def run(self) -> int:
        """Fill the files until every pipe is at EOF; or, after "finish", with what is in the pipes then.

        Returns 0, or the errno of the first write that failed.
        """
        self._loop.watch(self._channel.fileno(), self._on_channel)
        while self._open or not self._complete:
            self._loop.once()
        if self._compressor is not None:
            self._compressor.stop()
        return self._refused

    def _on_channel(self, _events: int) -> None:
        try:
            received = self._channel.receive()
        except channels.Truncated:  # no descriptor was left to receive it; the pipe's writer gets EPIPE
            self._refused = errno.EMFILE
            return
        except channels.Closed:  # the keeper was killed: workers may still write
            self._complete = True
            self._loop.forget(self._channel.fileno())
            return
        if received is None:
            return
        message: tuple[Any, ...] = received[0]
        if message[0] == "add":
            self._add(*message[1:], *received[1])
        else:
            self._finish()

    def _add(self, path: Any, bounds: Any, file: int, reader: int) -> None:
        if bounds[2] and self._compressor is None:
            from phalanx._engine.rotation.compress import Compressor

            self._compressor = Compressor()
        try:
            rotator = Rotator(path, bounds, file, reader, self._compressor)
        except OSError as error:
            self._refused = self._refused or error.errno or errno.EIO
            os.close(file)
            os.close(reader)
            return
        self._open.append(rotator)
        self._loop.watch(rotator.reader, lambda _events: self._fill(rotator))

    def _fill(self, rotator: Rotator) -> None:
        self._turn(rotator)

    def _turn(self, rotator: Rotator) -> bool:
        """Write one chunk of one file. Returns whether there was one."""
        try:
            count = rotator.turn()
        except OSError as error:  # of the pipe
            rotator.refused = error.errno or errno.EIO
            count = -1
        if rotator.refused and not self._refused:
            self._refused = rotator.refused
            try:
                self._channel.send(("refused", self._refused))
            except channels.Closed:  # the keeper was killed
                pass
        if count < 0:
            self._loop.forget(rotator.reader)
            rotator.close()
            self._open.remove(rotator)
        return count > 0

    def _finish(self) -> None:
        """Write what is in the pipes, and close all files: no worker is left to write more."""
        self._complete = True
        self._loop.forget(self._channel.fileno())
        for rotator in list(self._open):
            while self._turn(rotator):
                pass
        self._open.clear()
