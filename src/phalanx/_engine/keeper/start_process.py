"""The start of one process by posix_spawn(3): its session, signals, standard streams and descriptors are set first.

Owns what is opened for one worker (`Outputs`, `DescriptorLimit`) and the exec. What needs a fork is in `fork_process`.
Knows nothing of groups.
"""

from __future__ import annotations

import errno

from phalanx._base import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable
    from typing import Any

    from phalanx._engine.protocol import Spec
    from phalanx._logs.rotated import Bounds

    AddRotated = Callable[[str, Bounds, int, int, bool], None]
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

DESCRIPTORS_ROTATING = 1 + 2 * 2
"""How many descriptors of a worker with rotated log files are open, in the keeper and in its log writer: its pidfd, and
for each stream a file and the end of a pipe."""

DESCRIPTORS_TERMINAL = 3
"""The same of one with a terminal, in its log writer, which has the most: its file, the terminal, and a socket."""

_UNBOUNDED: Bounds = (1 << 62, 0, False)
_ROWS, _COLUMNS = 24, 80  # of a terminal, until somebody attaches
_IUTF8 = 0x4000  # of termios(3): a letter of several bytes is erased as one
_NO_TERMINAL = "opening its pseudo-terminal (of which /proc/sys/kernel/pty has the most and the number)"

_DESCRIPTORS_ENV = b"PHALANX_DESCRIPTORS"  # as `_evidence.sent` has it, which a keeper does not load


def ignored_signals() -> list[int]:
    """The signals that are ignored here, by Python or from whoever started the launcher (nohup, a shell's ``&``)."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]


def environment_of(spec: Spec, base: dict[bytes, bytes], given: list[int]) -> dict[bytes, bytes]:
    """The environment of a command, with the numbers of the descriptors that it inherits, if there are any."""
    numbers = {_DESCRIPTORS_ENV: b",".join(b"%d" % fd for fd in given)} if given else {}
    return {**base, **spec.env, **numbers}


def execute(spec: Spec, base: dict[bytes, bytes], outputs: Outputs, given: list[int], ignored: list[int]) -> int:
    """Execute a file in a new process, which inherits the descriptors ``given``. Returns its pid. Raises OSError.

    posix_spawn(3) lets the child borrow our memory until its exec, which takes two thirds of the time of a fork and an
    exec, and it reports the errno of a failed exec. It cannot bind a worker to CPUs or limit it: where there is a
    placement, `fork_process` does it.
    """
    for fd in given:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawn(
            spec.path,
            spec.argv,
            environment_of(spec, base, given),
            file_actions=outputs.actions(),
            setsid=True,
            setsigmask=(),
            setsigdef=ignored,
        )
    finally:
        for fd in given:
            os.set_inheritable(fd, False)


class Outputs:
    """Opens the descriptors that become a worker's 0, 1 and 2. A context that closes them.

    Args:
        stdin: A descriptor, which stays open.
        stdout, stderr: The paths of its log files; None: the keeper's own stream.
        bounds: With a bound on its size, a regular file is filled by the log writer, and the worker writes to a pipe. A
            terminal or a FIFO does not rotate; and one that nobody reads would hold up all logs.
        terminal: Whether a new pseudo-terminal is all three; the log writer fills ``stdout`` from its other end.
    """

    def __init__(
        self, stdin: int, stdout: str | None, stderr: str | None, bounds: Bounds, *, terminal: bool = False
    ) -> None:
        self.fds = [(0, stdin)]
        self._terminal = ""
        self._opened: list[int] = []
        self.rotated: list[tuple[str, Bounds, int, int, bool]] = []
        """What the log writer is to fill from pipes: path, bounds, file, the end of the pipe that is read, and whether
        that is a terminal's."""
        try:
            if terminal:
                assert stdout is not None
                self._open_terminal(stdout, bounds)
                return
            for target, path in ((1, stdout), (2, stderr)):
                if path is None:
                    continue
                # Appending, so that a file that is cut short while it is written grows from its new end.
                fd = files.opened_log(path)
                self._opened.append(fd)
                if bounds[0] and files.is_regular(fd):
                    file = fd
                    reader, fd = os.pipe2(os.O_CLOEXEC)
                    self._opened += (reader, fd)
                    self.rotated.append((path, bounds, file, reader, False))
                self.fds.append((target, fd))
        except OSError:
            self.close()
            raise

    def _open_terminal(self, path: str, bounds: Bounds) -> None:
        """Open a pseudo-terminal, and its log file. Our end of the worker's keeps it alive until the worker has it."""
        file = files.opened_log(path)
        self._opened.append(file)
        try:
            from termios import TCSANOW, tcgetattr, tcsetattr, tcsetwinsize

            master, slave = os.openpty()
            self._opened += (master, slave)
            tcsetwinsize(slave, (_ROWS, _COLUMNS))
            modes = tcgetattr(slave)
            modes[0] |= _IUTF8
            tcsetattr(slave, TCSANOW, modes)
            self._terminal = os.ttyname(slave)
        except OSError as error:
            error.doing = _NO_TERMINAL  # type: ignore[attr-defined]  # as that of `NotStartedError`
            raise
        self.rotated.append((path, bounds if bounds[0] else _UNBOUNDED, file, master, True))

    def actions(self) -> list[tuple[Any, ...]]:
        """What posix_spawn(3) does with them in a child that leads a session."""
        if not self._terminal:
            return [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in self.fds]
        # Without O_NOCTTY: it becomes the controlling terminal of the session.
        opened = (os.POSIX_SPAWN_OPEN, 0, self._terminal, os.O_RDWR, 0)
        return [opened, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]

    def redirect(self) -> None:
        """Do the same in a fork that leads a session. Raises OSError."""
        if self._terminal:
            fd = os.open(self._terminal, os.O_RDWR | os.O_CLOEXEC)
            self._opened.append(fd)
            self.fds = [(target, fd) for target in range(3)]
        for target, fd in self.fds:
            os.dup2(fd, target)

    def __enter__(self) -> Outputs:  # noqa: PYI034 - typing.Self would be an import on the keeper's start
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        while self._opened:
            os.close(self._opened.pop())


class DescriptorLimit:
    """Raises the keeper's soft limit on open files (RLIMIT_NOFILE). A context in which it is the one to be inherited.

    Raises OSError when a module cannot be imported because no descriptor is left.

    Attributes:
        most: How many files may be open, at the most.
    """

    def __init__(self, wanted: int) -> None:
        self._set: Callable[[int], None] | None = None
        self._theirs = self.most = soft = os.sysconf("SC_OPEN_MAX")
        if wanted <= soft:
            return
        try:
            from fcntl import F_DUPFD_CLOEXEC, fcntl
            from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit
        except ImportError as error:
            raise OSError(errno.EMFILE, str(error)) from error
        self._duplicate: Callable[[int], int] = lambda fd: fcntl(fd, F_DUPFD_CLOEXEC, soft)
        hard = getrlimit(RLIMIT_NOFILE)[1]
        if hard == soft:
            return
        wanted += soft  # `put_away` numbers descriptors from there
        self._ours = self.most = wanted if hard == RLIM_INFINITY else min(wanted, hard)
        self._set = lambda limit: setrlimit(RLIMIT_NOFILE, (limit, hard))
        self._set(self._ours)

    def put_away(self, fd: int) -> int:
        """Move a descriptor above the limit that workers have. Returns its new number.

        posix_spawn(3) passes none above the soft limit of that moment on to a child, so few are to be closed in it.
        """
        if self._set is None or fd >= self._theirs:
            return fd
        moved = self._duplicate(fd)
        os.close(fd)
        return moved

    def __enter__(self) -> None:
        if self._set is not None:
            self._set(self._theirs)

    def __exit__(self, *_error: object) -> None:
        if self._set is not None:
            self._set(self._ours)
