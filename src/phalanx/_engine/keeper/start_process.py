"""The start of one process by posix_spawn(3), or by fork(2): workers that are forks, and commands with a placement.

Owns what is opened for one worker (`Outputs`, `DescriptorLimit`), what the child does before it is a worker (session,
signals, streams, CPUs, limits), and how the keeper learns that one of these steps failed. Knows nothing of groups.
"""

from __future__ import annotations

import errno
import gc
import select

from phalanx._base import files, linux
from phalanx._engine import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

    from phalanx._engine.protocol import Spec
    from phalanx._logs.rotated import Bounds
    from phalanx._placement.placement import WorkerBounds

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

_EXECUTING = "starting it"
_NAMED = 16  # CPUs in the message of an error, at most
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
    placement, `execute_in_fork` does it.
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


class NotStartedError(OSError):
    """A child could not become a worker. ``doing`` is the step that failed, on ``path`` where it concerns a file."""

    def __init__(self, number: int, doing: str, path: bytes | None = None) -> None:
        super().__init__(number, os.strerror(number), path)
        self.doing = doing


def fork(
    spec: Spec,
    base: dict[bytes, bytes],
    outputs: Outputs,
    given: list[int],
    private: Iterable[int],
    call: Callable[[int, list[int]], None] | None,
) -> int:
    """Run ``call(rank, given)`` in a fork of this process, which closes what is ``private``. Returns its pid.

    Without ``call``, the fork serves as a function worker; as a script where it has an argv. Raises OSError.
    """
    parent = os.getpid()
    setup = _Setup(spec.placement)
    pid = _split(setup)
    if pid:
        return setup.wait(pid)
    try:
        linux.die_with_parent(parent)
        os.setsid()
        set_python_signals()
        if call is None:
            preloaded.set()
        outputs.redirect()
        outputs.close()
        for fd in private:
            os.close(fd)
        try:
            linux.map_name(protocol.worker_page(parent, spec.rank))
        except OSError:  # no memory or descriptor is left: the rank of its orphans stays unknown
            pass
        environ = {**base, **spec.env}
        from os import environb  # what forks has it

        for name in list(environb):
            if name not in environ:
                del environb[name]
        environb.update(environ)
        if call is None:  # else the callable knows whether its launcher collects
            gc.enable()  # what is preloaded stays frozen: it is shared for longer if no collection looks at it
        from phalanx._engine.worker.forked import serve, serve_script

        setup.place()
        signal.pthread_sigmask(signal.SIG_SETMASK, preloaded.mask if call is None else ())
        if spec.argv:
            serve_script(spec.argv, given)
        (call or serve)(spec.rank, given)
    finally:
        os._exit(70)  # the callable leaves by itself: EX_SOFTWARE is a mistake of ours (sysexits.h)


def execute_in_fork(spec: Spec, base: dict[bytes, bytes], outputs: Outputs, given: list[int]) -> int:
    """Execute a file in a fork that places itself first. Returns its pid. Raises NotStartedError, OSError."""
    environment = environment_of(spec, base, given)
    parent = os.getpid()
    setup = _Setup(spec.placement)
    pid = _split(setup)
    if pid:
        return setup.wait(pid, spec.path)
    try:
        linux.die_with_parent(parent)
        os.setsid()
        set_default_signals()
        outputs.redirect()
        for fd in given:
            os.set_inheritable(fd, True)
        setup.place(until_exec=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            os.execve(spec.path, spec.argv, environment)
        except OSError as error:
            setup.fail(error.errno or 0, _EXECUTING)
        except MemoryError:  # a limit on it leaves too little even for this
            setup.fail(errno.ENOMEM, _EXECUTING)
    finally:
        os._exit(70)


def _split(setup: _Setup) -> int:
    """Fork. Returns as os.fork() does; in the child with every signal blocked. Raises OSError."""
    # The keeper ignores SIGTERM: one sent from now on would be dropped. Blocked, it stays pending for the worker.
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, ours)
            if pid < 0:
                setup.close()
    return pid


class _Setup:
    """Reports to the keeper, over a pipe, which step of a placed child's set-up failed. EOF means success.

    The child closes the pipe, or its exec does (O_CLOEXEC). Without a placement there is no pipe.
    """

    def __init__(self, placement: WorkerBounds | None) -> None:
        self._placement = placement
        if placement is not None:
            if placement[2]:  # imported before the child has a limit on open files
                try:
                    from resource import setrlimit
                except ImportError as error:  # no descriptor is left to open its file
                    raise OSError(errno.EMFILE, str(error)) from error
                self._set_limit = setrlimit
            self._reader, self._writer = os.pipe2(os.O_CLOEXEC)

    def close(self) -> None:
        """Close both ends."""
        if self._placement is not None:
            os.close(self._reader)
            os.close(self._writer)

    def wait(self, pid: int, path: bytes | None = None) -> int:
        """Wait for EOF, and return ``pid``. Raises NotStartedError if a step failed."""
        if self._placement is None:
            return pid
        os.close(self._writer)
        try:
            failure = os.read(self._reader, select.PIPE_BUF)
        finally:
            os.close(self._reader)
        if not failure:
            return pid
        os.waitpid(pid, 0)
        number, _, doing = failure.decode().partition(" ")
        raise NotStartedError(int(number), doing, path if doing == _EXECUTING else None)

    def fail(self, number: int, doing: str) -> NoReturn:
        """In the child: report the failed step, and exit."""
        try:
            os.write(self._writer, f"{number} {doing}".encode())
        finally:
            os._exit(70)

    def place(self, *, until_exec: bool = False) -> None:
        """In the child: set CPUs, nice value and limits, or exit."""
        if self._placement is None:
            return
        cpus, nice, limits = self._placement
        named = ",".join(map(str, cpus[:_NAMED])) + "…" * (len(cpus) > _NAMED)
        doing = f"binding it to CPU {named}"
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)
            doing = f"adding {nice} to its nice value"
            if nice:
                os.nice(nice)
            for name, number, soft, hard in limits:  # last: they hold for this code, too
                doing = f"setting its limit {name!r}"
                self._set_limit(number, (soft, hard))
        except OSError as error:
            self.fail(error.errno or 0, doing)
        except ValueError as error:  # setrlimit raises it for EPERM and EINVAL
            self.fail(errno.EPERM if "not allowed" in str(error) else errno.EINVAL, doing)
        if not until_exec:
            os.close(self._reader)
            os.close(self._writer)


_IGNORED = ("PIPE", "XFSZ")  # by every Python: a write returns an errno instead


def set_default_signals() -> None:
    """Set every disposition to SIG_DFL."""
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except OSError as error:  # those that the C library keeps for itself
                if error.errno != errno.EINVAL:
                    raise


def set_python_signals() -> None:
    """Set the dispositions that a new Python interpreter has."""
    set_default_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _IGNORED:
        signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)


class Handlers:
    """Notes the signal handlers that imported modules set, and sets them again in forks. A context around the imports.

    A handler is noted as Python has it, and as the kernel has it (sigaction(2)): Python does not know of those that C
    code has set, as `faulthandler` does.
    """

    def __init__(self) -> None:
        self.mask: set[int] = set()
        self._set: dict[int, tuple[Any, bytes]] = {}

    def __enter__(self) -> None:
        """Set the dispositions and the mask that a worker has which imports by itself."""
        for number in ignored_signals():
            if number not in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._set = _handlers()

    def __exit__(self, *_error: object) -> None:
        before = self._set
        self._set = {number: found for number, found in _handlers().items() if found != before.get(number)}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        for number, (handler, _action) in self._set.items():  # no code but ours runs here, and in keepers, after this
            if callable(handler):
                signal.signal(number, signal.SIG_DFL)

    def set(self) -> None:
        """Set the handlers of the modules, in a fork that has the dispositions of a new interpreter."""
        for number, (handler, action) in self._set.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            linux.set_sigaction(number, action)


preloaded = Handlers()
"""Those of the fork server's modules; in any other process, none."""


def _handlers() -> dict[int, tuple[Any, bytes]]:
    handlers: dict[int, tuple[Any, bytes]] = {}
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP):
            try:
                handlers[number] = signal.getsignal(number), linux.sigaction(number)
            except OSError:  # those that the C library keeps for itself
                continue
    return handlers
