"""The log writer: the process that fills log files of bounded size, and those of ranks with a terminal.

`RotatedLogs` is the keeper's end, loaded by groups that have one: a disk may block the process, and no other.

A worker that writes to a file itself cannot be made to write to another one, and to truncate the file behind its back
loses what it writes between the copy and the truncation. So with a bound, and only then, the worker has a pipe, and the
group's log writer fills the files: ``path`` is always the newest, ``path.1`` the oldest, and a rotated file keeps its
name, but for the ``.gz`` of one that is compressed (see `_logs.rotated`). A worker with a terminal has no pipe: our end
of the terminal is read instead, and `terminal` serves those who are attached to it.

The log writer is a process of its own, a fork of the keeper: a worker that writes without end, or a disk that does not
answer, must not block those who supervise. It depends on none of them: what a worker has written before it dies is in
the pipe, and is read even if launcher, keeper and guard are dead; it exits when every pipe is at EOF. Only if it is
killed itself is anything lost: the chunk in its hands (256 KiB) and what is in the pipes (64 KiB each).

It first writes its pid into a pipe to the guard, which kills everything below it but the log writer. Its exit code is
0; the errno of a write that failed, which means that lines are missing in a file; or 255 if it could not go on.
"""

from __future__ import annotations

import errno
import os
from _thread import allocate_lock, start_new_thread

from phalanx._base import channels, files, linux
from phalanx._base.loop import READ, WRITE, Loop
from phalanx._engine import protocol
from phalanx._logs.rotated import GZIP_SUFFIX, numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from phalanx._engine.keeper.terminal import Terminal
    from phalanx._logs.rotated import Bounds
else:
    from _collections import deque


_FAILED = 255  # the exit code of a log writer that could not go on
_PART_WITHIN = 1.0  # seconds for which the end waits for those who are attached to terminals


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
        self._terminals: dict[Rotator, Terminal] = {}

    def run(self) -> int:
        """Fill the files until every pipe is at EOF; or, after "finish", with what is in the pipes then.

        Returns 0, or the errno of the first write that failed.
        """
        self._loop.watch(self._channel.fileno(), self._on_channel)
        while self._open or not self._complete:
            self._loop.once()
        if self._terminals:
            self._part()
        if self._compressor is not None:
            self._compressor.stop()
        return self._refused

    def _part(self) -> None:
        """Send those who are attached the rest, within a second."""
        for terminal in self._terminals.values():
            terminal.close()
        self._loop.after(_PART_WITHIN, self._terminals.clear)
        while any(terminal.is_attached for terminal in self._terminals.values()):
            self._loop.once()

    def _on_channel(self, _events: int) -> None:
        try:
            received = self._channel.receive()
        except channels.Truncated:  # no descriptor was left to receive it; the pipe's writer gets EPIPE
            self._refused = errno.EMFILE
            return
        except channels.Closed:  # the keeper was killed: workers may still write
            self._complete = True
            self._loop.forget(self._channel.fileno())
            for rotator in list(self._terminals):  # those that no process has open
                self._turn(rotator)
            return
        if received is None:
            return
        message: tuple[Any, ...] = received[0]
        if message[0] == "add":
            self._add(*message[1:], *received[1])
        else:
            self._finish()

    def _add(self, path: Any, bounds: Any, is_terminal: Any, file: int, reader: int) -> None:
        if bounds[2] and self._compressor is None:
            self._compressor = Compressor()
        try:
            rotator = Rotator(path, bounds, file, reader, self._compressor)
        except OSError as error:
            self._refused = self._refused or error.errno or errno.EIO
            os.close(file)
            os.close(reader)
            return
        self._open.append(rotator)
        if not is_terminal or not self._serve(rotator, path):
            self._loop.watch(rotator.reader, lambda _events: self._fill(rotator))

    def _serve(self, rotator: Rotator, path: str) -> bool:
        """Let people attach to a terminal, and watch it. Returns False if no descriptor is left to load what does."""
        try:
            from phalanx._engine.keeper.terminal import Terminal
        except (OSError, ImportError):
            return False
        terminal = self._terminals[rotator] = Terminal(self._loop, path, rotator.reader, lambda: self._fill(rotator))
        rotator.copy = terminal.show
        return True

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
            terminal = self._terminals.get(rotator)
            if terminal is not None and not self._complete:
                terminal.rest()
                return False
            self._loop.forget(rotator.reader)
            rotator.close()
            self._open.remove(rotator)
            if terminal is not None:
                terminal.close()
        return count > 0

    def _finish(self) -> None:
        """Write what is in the pipes, and close all files: no worker is left to write more."""
        self._complete = True
        self._loop.forget(self._channel.fileno())
        for rotator in list(self._open):
            while self._turn(rotator):
                pass
        self._open.clear()


_CHUNK = 256 * 1024
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


class Rotator:
    """Fills a log file from a pipe, and rotates the file before it grows beyond the limit.

    No line is split: a line ends in the file in which it began, even if it is longer than the limit. A file that cannot
    be rotated goes on to grow: a log that is too long is better than a worker that fails for it. ``file`` is open with
    O_APPEND; it and ``reader``, the end of the pipe, are closed by `close`. Rotated files of earlier runs count.
    """

    def __init__(self, path: str, bounds: Bounds, file: int, reader: int, compressor: Compressor | None = None) -> None:
        self._path = path
        self._limit, self._keep, _compress = bounds
        self._compressor = compressor
        self._file, self.reader = file, reader
        os.set_blocking(reader, False)
        self._kept = dict.fromkeys(numbers(path))  # the numbers of the rotated files, the oldest first
        self._number = max(self._kept, default=0) + 1
        self._size = os.fstat(file).st_size
        self._mid_line = self._size > 0 and files.read(path, 1, self._size - 1, links=files.OWN_LINKS) != b"\n"
        self._torn = False  # whether the file may end within a line whose rest is lost
        self.refused = 0
        """The errno of the latest write that failed: the disk is full. What it was to write is lost."""
        self.copy: Callable[[bytes], None] | None = None
        """Called with what was read, if set."""

    def turn(self) -> int:
        """Read one chunk from the pipe, and write it to the file, or drop what the file does not take. Raises OSError.

        Returns the number of bytes; 0 if the pipe is empty, -1 at EOF.
        """
        try:
            data = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""  # no process has the terminal open
        if self.copy is not None:
            self.copy(data)
        try:
            self._write(b"\n" + data if self._torn and data else data)
            self._torn = False
        except OSError as error:
            self.refused = error.errno or errno.EIO
            self._size = os.fstat(self._file).st_size
            self._torn = self._mid_line = self._size > 0
        return len(data) or -1

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        for fd in (self._file, self.reader):
            if fd >= 0:
                os.close(fd)
        self._file = self.reader = -1

    def _write(self, data: bytes) -> None:
        while data:
            cut = self._cut(data)
            if cut:
                self._append(data[:cut])
            if cut < len(data):
                try:
                    self._rotate()
                except OSError:  # no descriptor, no folder: try again after another ``limit`` bytes
                    self._size = 0
            data = data[cut:]

    def _cut(self, data: bytes) -> int:
        """Return how many bytes of ``data`` still go into this file."""
        room = self._limit - self._size
        if len(data) <= room:
            return len(data)
        cut = data.rfind(b"\n", 0, max(room, 0)) + 1
        if cut or (self._size and not self._mid_line):
            return cut
        return data.find(b"\n") + 1 or len(data)  # up to the end of the line that began in this file

    def _append(self, data: bytes) -> None:
        self._mid_line = not data.endswith(b"\n")
        self._size += len(data)
        files.write_all(self._file, data)

    def _rotate(self) -> None:
        """Rotate the file. ``path`` always exists meanwhile: a follower finds the old file or the new one.

        On a file system without hard links (FAT, many of FUSE), it is renamed, and for a moment ``path`` is missing.
        """
        fresh = f"{self._path}.new"
        file = files.opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._give_number()
            os.replace(fresh, self._path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._size, self._mid_line = file, 0, False
        number, self._number = self._number, self._number + 1
        self._kept[number] = None
        self._remove_oldest()
        if self._compressor is not None:
            kept = self._kept
            self._compressor.add(f"{self._path}.{number}", lambda: number in kept)

    def _remove_oldest(self) -> None:
        while self._keep and len(self._kept) > self._keep:
            oldest = next(iter(self._kept))
            del self._kept[oldest]  # first: the compressor asks whether it is still wanted
            for name in (f"{self._path}.{oldest}", f"{self._path}.{oldest}{GZIP_SUFFIX}"):
                try:
                    os.unlink(name)
                except OSError:  # only one of the two exists; or somebody has removed it already
                    pass

    def _give_number(self) -> None:
        """Link the file under its number, or rename it. Raises OSError."""
        while True:
            numbered = f"{self._path}.{self._number}"
            try:
                os.link(self._path, numbered, follow_symlinks=False)
            except FileExistsError:  # somebody else's file
                self._number += 1
                continue
            except OSError as error:
                if error.errno not in _NO_LINKS or os.path.exists(numbered):
                    raise
                os.rename(self._path, numbered)
            return


_GZIP = 31  # wbits of zlib: 15, the largest window; and 16, for gzip's head and tail
_PATIENCE = 1.0  # seconds in which a chunk is read, compressed and written, unless the disk does not answer
_UNFINISHED = ".gz.new"
_write = files.write_all


class Compressor:
    """Compresses rotated files in a thread, which runs only while there is something to do.

    A compressed file has the name and the form that `_logs.rotated` describes. It is complete before it gets that name,
    and the plain file is removed after that: a reader finds one or the other. An error (a full disk) leaves the plain
    file.
    """

    def __init__(self) -> None:
        self._gate = allocate_lock()
        self._busy = allocate_lock()  # held by the thread, from its start to its end
        self._jobs: deque[tuple[str, Callable[[], bool]]] = deque()
        self._at_work = self._over = False

    def add(self, path: str, wanted: Callable[[], bool]) -> None:
        """Queue a file that will not be written to again. It is skipped if ``wanted`` returns False by its turn."""
        with self._gate:
            self._jobs.append((path, wanted))
            if self._at_work or self._over:
                return
            self._at_work = True
            self._busy.acquire()
        try:
            start_new_thread(self._work, ())
        except RuntimeError:  # no thread can be started: the next file may get one
            self._at_work = False
            self._busy.release()

    def stop(self) -> None:
        """Drop the queue and the file that is being compressed. Returns when the thread has ended: within a second."""
        self._over = True
        if self._busy.acquire(timeout=_PATIENCE):
            self._busy.release()

    def _work(self) -> None:
        try:
            while True:
                with self._gate:
                    if self._over or not self._jobs:
                        self._at_work = False
                        return
                    path, wanted = self._jobs.popleft()
                if wanted():
                    try:
                        self._compress(path, wanted)
                    except (OSError, MemoryError, ImportError):
                        pass
        finally:
            self._busy.release()

    def _compress(self, path: str, wanted: Callable[[], bool]) -> None:
        """Replace ``path`` by ``path.gz``, with its mode and time. Raises OSError, with nothing changed."""
        source = files.opened(path)
        try:
            found = os.fstat(source)
            if found.st_nlink > 1:  # a rotation that failed half-way: it may still grow under another name
                return
            unfinished, packed = path + _UNFINISHED, path + GZIP_SUFFIX
            try:
                os.unlink(unfinished)  # left by a log writer that was killed; or by somebody else
            except FileNotFoundError:
                pass
            file = files.opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                try:
                    self._copy(source, file)
                    os.fchmod(file, found.st_mode & 0o7777)
                    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
                    os.fsync(file)  # else a power cut could leave neither
                finally:
                    os.close(file)
                os.rename(unfinished, packed)
            except BaseException:
                os.unlink(unfinished)
                raise
            try:
                os.unlink(path)
                gone = not wanted()
            except FileNotFoundError:
                gone = True
            if gone:  # no longer wanted: the plain file was removed when this one had no name yet
                os.unlink(packed)
        finally:
            os.close(source)

    def _copy(self, source: int, file: int) -> None:
        """Compress a file into another. Raises OSError; InterruptedError after `stop`."""
        import zlib

        packing = zlib.compressobj(wbits=_GZIP)
        while data := os.read(source, _CHUNK):
            if self._over:
                raise InterruptedError
            _write(file, packing.compress(data))
        _write(file, packing.flush())


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
            ours, theirs = channels.pair()
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    serve(channels.Channel(theirs), notes)
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
        refused = 0 < code < _FAILED  # else an errno
        if code:
            self.incomplete = os.strerror(code) if refused else f"the process that wrote them was lost ({code})"
        return 0 if refused else code

    def abandon(self) -> None:
        """Leave the log writer to itself."""
        self.incomplete = f"process {self.pid} still writes them"
