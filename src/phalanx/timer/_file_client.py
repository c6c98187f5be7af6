r"""`FileTimerClient`, which sends timer requests through a named pipe; the pipe, and the format of a request.

A write of up to PIPE_BUF (4096) bytes to a pipe is atomic (pipe(7)): lines of that length never mix, however many
workers write. A server holds the FIFO open for reading and writing, so it never sees the end of file when the last
client closes it. Its lock is flock(2)'s, which the kernel releases when the process ends. A FIFO that a killed server
left is taken over as it is, so clients that hold it open continue, and what they had written is still read.

A request is one line of JSON. A client in another language writes it in one piece, newline included, at most 4096
bytes, to the FIFO::

    {"version": 1, "pid": 4242, "scope_id": "all_reduce", "expiration_time": 1795184205.5, "signal": 9}

``expiration_time`` is Unix time in seconds, negative to release. Three more keys are ours, and optional: ``monotonic``,
the same moment on CLOCK_MONOTONIC, which the server prefers; ``taken``, when the line was written, on the same clock;
and ``born``, field 22 of /proc/PID/stat of the process ``pid``, so that the timer is never taken for that of a later
process with the same pid.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import select
import signal as signals
import stat

from phalanx._base import clock
from phalanx.timer._requests import SHORT_SCOPE, PipeTimerClient, TimerRequest, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
_quoted = json.encoder.encode_basestring_ascii  # what json.dumps() makes of a string

LINE_LIMIT = select.PIPE_BUF
"""The most bytes of a line, its newline included."""

_SIZE = 1 << 20  # the default of fs.pipe-max-size
_MODE = 0o600
_RETRY = 0.05  # seconds from one attempt to open a pipe to the next, while its server is waited for

_FULL_PATIENCE = 10.0
_ABSENT_PATIENCE = 5.0
_SCOPE_LIMIT = 3800  # bytes of JSON; the rest of the line takes less than 250


class FileTimerRequest(TimerRequest):
    """A timer that a process sets, or releases, as it is sent through the pipe.

    Args:
        worker_pid: The process.
        scope_id: What the timer is for.
        expiration_time: When it expires: Unix time, in seconds. Negative: the timer is released.
        signal: The signal that the process is sent then. 0 or less: none, it is only reported.

    Attributes:
        version: The version of the form, 1.

    >>> request = FileTimerRequest(4242, "all_reduce", 1795184205.5, 9)
    >>> request
    FileTimerRequest(worker_pid=4242, scope_id='all_reduce', expiration_time=1795184205.5, signal=9)
    >>> request == FileTimerRequest(4242, "all_reduce", 1795184205.5, 15)
    False
    >>> print(request.to_json())
    {"version": 1, "pid": 4242, "scope_id": "all_reduce", "expiration_time": 1795184205.5, "signal": 9}
    >>> FileTimerRequest.from_json(request.to_json()) == request
    True
    """

    __slots__ = ("_sent", "signal", "version")

    _sent: float  # the expiration as it was sent, in Unix time: the server converts the other

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = VERSION
        self.signal = signal
        self._sent = expiration_time

    @property
    def worker_pid(self) -> int:
        """The process: another name for ``worker_id``."""
        pid: int = self.worker_id
        return pid

    def _key(self) -> tuple[Any, ...]:
        return self.worker_id, self.scope_id, self.expiration_time, self.version, self.signal

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTimerRequest) and self._key() == other._key()

    __hash__ = TimerRequest.__hash__

    def __repr__(self) -> str:
        fields = {"worker_pid": self.worker_id, "scope_id": self.scope_id, "expiration_time": self.expiration_time}
        text = ", ".join(f"{name}={value!r}" for name, value in (fields | {"signal": self.signal}).items())
        return f"{type(self).__name__}({text})"

    def to_json(self) -> str:
        """Return one line of JSON, without the newline, in ASCII."""
        # Every timer costs its worker two of these: json.dumps() takes twice as long.
        text = (
            f'{{"version": {self.version}, "pid": {int(self.worker_id)}, "scope_id": {_quoted(self.scope_id)},'
            f' "expiration_time": {float(self.expiration_time)!r}, "signal": {int(self.signal)}'
        )
        if self._deadline is not None:
            text += f', "monotonic": {self._deadline!r}'
        if self._taken is not None:
            text += f', "taken": {self._taken!r}'
        if self._born is not None:
            text += f', "born": {self._born}'
        return text + "}"

    @classmethod
    def from_json(cls, line: str | bytes) -> FileTimerRequest:
        """Read the ``line`` that `to_json`, or a client in another language, wrote.

        Raises:
            ValueError: It is no request; the message gives the reason.
        """
        try:
            fields = json.loads(
                line if isinstance(line, str) else line.decode("utf-8", "surrogatepass")
            )  # of bytes, it guesses
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"not JSON ({exc})") from None
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")  # noqa: TRY004 - the type of the content, not of the argument
        if fields.get("version", VERSION) != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        scope = fields.get("scope_id")
        if not isinstance(scope, str):
            raise ValueError("scope_id is not a string")  # noqa: TRY004 - as above, of the content
        expiration = _real(fields, "expiration_time")
        if expiration is None:
            raise ValueError("expiration_time is missing")
        number = _whole(fields, "signal", -(1 << 31), signals.NSIG - 1)
        pid = _whole(fields, "pid", -(1 << 31), (1 << 31) - 1)
        if pid is None or number is None:
            raise ValueError("pid or signal is missing")
        request = cls(pid, scope, expiration, number)
        request._deadline = _real(fields, "monotonic")
        request._taken = _real(fields, "taken")
        request._born = _whole(fields, "born", 0, 1 << 64)
        return request


class FileTimerClient(PipeTimerClient):
    """Sets timers at a `FileTimerServer` on the same host, through its named pipe.

    The pipe is opened by the first request and kept open. Any thread may use the client, and so may a
    forked child: its requests are its own. It can be pickled. A request is a single write; it never gets lost, and
    never raises BlockingIOError. When the pipe is full the client waits up to 10 s for the server to read; when no
    server is there, 5 s for one to come (back).

    A scope whose name takes more than 3800 bytes as JSON is shortened, always in the same way, to its two ends and a
    checksum of the whole.

    Args:
        file_path: The server's path.
        signal: What the server sends this process when a timer expires. 0 or less: nothing, it reports only.

    Raises:
        ValueError: ``signal`` is no signal.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        super().__init__()
        if not int(signal) < signals.NSIG:
            raise ValueError(f"signal: expected a number below {signals.NSIG}, got {signal!r}")
        self._file_path = os.path.abspath(file_path)
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer on ``scope_id`` that expires at ``expiration_time`` (Unix time, seconds).

        Converted to CLOCK_MONOTONIC here and now: a later step of the wall clock does not move it.

        Raises:
            TimeoutError: The pipe was full, and the server read nothing for 10 s.
            BrokenPipeError: No server was there for 5 s.
            OSError: The pipe cannot be opened.
            ValueError: ``expiration_time`` is not finite.
            TypeError: ``scope_id`` is not a string.
        """
        self._send(scope_id, expiration_time, clock.from_wall(expiration_time))

    def close(self) -> None:
        """Close the pipe; another request opens it again. Not while other threads use the client. Idempotent."""
        self._close()

    def _send(self, scope: str, expiration: float, deadline: float | None) -> None:
        if not isinstance(scope, str):
            raise TypeError(f"scope_id: expected a string, got {scope!r}")
        if not math.isfinite(expiration):
            raise ValueError(f"expiration_time: expected a moment, got {expiration!r}")
        if len(scope) > SHORT_SCOPE and len(_quoted(scope)) > _SCOPE_LIMIT:
            scope = shortened(scope)
        request = FileTimerRequest(os.getpid(), scope, expiration, self.signal if deadline is not None else 0)
        self._stamp(request, deadline)
        self._send_request(request)

    def _send_request(self, request: FileTimerRequest) -> None:
        line = f"{request.to_json()}\n".encode("ascii")
        if len(line) > LINE_LIMIT:  # never from `acquire`, which shortens
            raise ValueError(f"a request takes at most {LINE_LIMIT} bytes, this one has {len(line)}")
        fd = self._fd()
        while True:
            try:
                self._write(line, _FULL_PATIENCE)
            except BrokenPipeError:  # the server has ended; perhaps another one runs, or will
                fresh = self._open()
                # dup2 replaces the file in one step: other threads write to one or the other.
                os.dup2(fresh, fd, inheritable=False)
                os.close(fresh)
            else:
                return

    def _open(self) -> int:
        return open_for_writing(self._file_path, _ABSENT_PATIENCE)

    def _full(self) -> TimeoutError:
        return TimeoutError(
            110,
            f"the timer server has read nothing for {_FULL_PATIENCE:g} s and the pipe is full: see whether"
            " the process of FileTimerServer is stopped, or has no time to run",
            self._file_path,
        )


def _real(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{name} is not a finite number")


def _whole(fields: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is None or (type(value) is int and least <= value <= most):
        return value
    raise ValueError(f"{name} is not a whole number from {least} to {most}")


# --- the pipe


class PipeRefusedError(OSError):
    """The pipe cannot be at this path: what is there is not ours, or another server serves it (``is_served``)."""

    is_served = False


def create_pipe(path: str) -> tuple[int, bool]:
    """Create the FIFO, or take over the one that a server before left there.

    Returns:
        A locked descriptor that reads and writes without blocking, and whether the FIFO was taken over: the first line
        may lack its beginning then, which the server before had read. The lock lasts as long as it is open.

    Raises:
        PipeRefusedError: There is another kind of file, or another user's, or a live server has it.
        OSError: The FIFO cannot be created.
    """
    while True:
        found = False
        try:
            os.mkfifo(path, _MODE)
        except FileExistsError:
            found = True
        fd = _take_over(path)
        if fd is not None:
            return fd, found


def _take_over(path: str) -> int | None:
    """Open and lock what is there; None if it was removed or replaced meanwhile."""
    try:
        # Checked before it is opened: to open a device can have effects.
        _examine(path, os.lstat(path))
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        return None
    try:
        mine = os.fstat(fd)
        _examine(path, mine)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "another timer server serves this pipe: stop it, or choose another path"
            refused = PipeRefusedError(message, path)
            refused.is_served = True
            raise refused from None
        if not is_at(path, mine):  # its server removed it between our opening and our locking
            os.close(fd)
            return None
        size = _SIZE
        while size > LINE_LIMIT:
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
                break
            except OSError:  # EPERM beyond fs.pipe-max-size, or when the user's pipes hold too much already
                size //= 2
    except BaseException:
        os.close(fd)
        raise
    return fd


def _examine(path: str, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise PipeRefusedError("it is a symbolic link: anyone who can write there could lead the pipe elsewhere", path)
    if not stat.S_ISFIFO(found.st_mode):
        raise PipeRefusedError("it exists and is not a named pipe: remove it, or choose another path", path)
    if found.st_uid != os.geteuid():
        raise PipeRefusedError(f"it belongs to another user (uid {found.st_uid})", path)
    if stat.S_IMODE(found.st_mode) & ~_MODE:
        mode = stat.S_IMODE(found.st_mode)
        raise PipeRefusedError(f"others may use it (mode {mode:04o}, expected 0600): remove it", path)


def is_at(path: str, mine: os.stat_result) -> bool:
    """Whether ``path`` still leads to the file that ``mine`` describes."""
    try:
        there = os.lstat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def open_for_writing(path: str, patience: float) -> int:
    """Open a server's FIFO, and wait up to ``patience`` seconds for a server to be there.

    Raises:
        BrokenPipeError: There was none all that time.
        OSError: The FIFO cannot be opened for another reason.
    """
    deadline = clock.now() + patience
    while (fd := _attempt(path)) is None:
        left = deadline - clock.now()
        if left <= 0:
            raise BrokenPipeError(
                errno.EPIPE,
                f"no timer server has served this pipe for {patience:g} s: start FileTimerServer with this path before"
                " the workers, and keep it running (or start it again) as long as they take timers",
                path,
            )
        # Only inotify(7) reports that a server opens a FIFO, and a user's inotify instances are few.
        select.poll().poll(min(left, _RETRY) * 1000)
    return fd


def _attempt(path: str) -> int | None:
    """Open the FIFO if a server is at its other end; None if not."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENXIO):  # ENXIO: nobody has it open for reading
            return None
        raise
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise PipeRefusedError("it is not a named pipe", path)
