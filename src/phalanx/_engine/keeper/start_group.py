"""The start of all workers of one group, in the order of their ranks. Runs in the keeper, once.

Owns the order of the steps (the log files of each worker are opened, then it is started and watched), what is opened
for one worker (`Outputs`, `DescriptorLimit`), and its start by posix_spawn(3). What needs a fork is in `fork_process`.
Imported while the launcher still prepares the order to start.
"""

from __future__ import annotations

import errno
import gc
import sys

from phalanx._base import files, linux
from phalanx._engine import protocol
from phalanx._engine.keeper.children import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable
    from typing import Any

    from phalanx._base.loop import Loop
    from phalanx._engine.keeper.children import Children
    from phalanx._engine.keeper.log_writer import RotatedLogs
    from phalanx._engine.protocol import Spec
    from phalanx._logs.rotated import Bounds
    from phalanx._timers.escalation import Escalation

    AddRotated = Callable[[str, Bounds, int, int, bool], None]
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_SPARE_DESCRIPTORS = 64  # beside those that are kept of each worker
_OWN_DESCRIPTORS = 16  # of the keeper and of its log writer themselves
_TOGETHER = 32  # workers that are started before it is asked again whether to go on
_ERROR_FILE = b"TORCHELASTIC_ERROR_FILE"

_DESCRIPTORS_ROTATING = 1 + 2 * 2
"""How many descriptors of a worker with rotated log files are open, in the keeper and in its log writer: its pidfd, and
for each stream a file and the end of a pipe."""

_DESCRIPTORS_TERMINAL = 3
"""The same of one with a terminal, in its log writer, which has the most: its file, the terminal, and a socket."""

_UNBOUNDED: Bounds = (1 << 62, 0, False)
_ROWS, _COLUMNS = 24, 80  # of a terminal, until somebody attaches
_IUTF8 = 0x4000  # of termios(3): a letter of several bytes is erased as one
_NO_TERMINAL = "opening its pseudo-terminal (of which /proc/sys/kernel/pty has the most and the number)"

_DESCRIPTORS_ENV = b"PHALANX_DESCRIPTORS"  # as `_evidence.sent` has it, which a keeper does not load


def _has_writer(spec: Spec) -> bool:
    """Whether the log writer fills the log files of a worker."""
    return bool(spec.bounds[0]) or spec.terminal


def _descriptors(spec: Spec) -> int:
    """How many descriptors of a worker are open."""
    if spec.terminal:
        return _DESCRIPTORS_TERMINAL
    return _DESCRIPTORS_ROTATING if _has_writer(spec) else 1


class Start:
    """One order to start, see `protocol.start` for the arguments. ``fds`` came beside it.

    Attributes:
        policy: See `protocol.start`.
        oom_counter: See `Children`.
        table: The descriptors of the timers' table; (): no timers.
        notice: What precedes a planned stop: a signal, seconds, and the descriptor of the page with the stop flag.
    """

    def __init__(
        self,
        forked: bool,  # noqa: FBT001 - as a message has it
        modules: list[tuple[str, str]],
        environment: dict[bytes, bytes],
        specs: list[tuple[Any, ...]],
        oom_counter: tuple[str, int],
        policy: tuple[float, float, float, float],
        timers: tuple[Any, ...] | None,
        notice: tuple[int, float, int] | None,
        fds: list[int],
    ) -> None:
        self.policy = policy
        self.oom_counter = oom_counter
        self.table: tuple[int, ...] = () if timers is None else (fds[timers[0]], fds[timers[1]])
        self.notice = None if notice is None else (*notice[:2], fds[notice[2]])
        self._timers = timers
        self._forked = forked
        self._modules = modules
        self._environment = environment
        self._specs = [protocol.Spec(*spec) for spec in specs]
        self._fds = fds
        self._doing = -1, ""  # the rank, and the step

    def prepare(
        self, loop: Loop, notes: int, send: Callable[[protocol.Message], object]
    ) -> tuple[Notice | None, RotatedLogs | None, protocol.Message]:
        """Start what fills log files of bounded size, and those of terminals, where it is needed.

        Returns what gives notice of a stop, that, and () or `protocol.start_failed`. ``notes`` is a pipe, see
        `Connection.open`; ``send`` sends the launcher a message.
        """
        notice = None if self.notice is None else Notice(*self.notice)
        if not any(_has_writer(spec) for spec in self._specs):
            return notice, None, ()
        try:
            from phalanx._engine.keeper.log_writer import RotatedLogs
        except (OSError, ImportError):  # no descriptor is left
            return notice, None, protocol.start_failed(-1, "starting what writes its log files", errno.EMFILE, "")
        logs = RotatedLogs()
        return notice, logs, logs.start(loop, notes, send)

    def run(
        self,
        children: Children,
        null: int,
        add_rotated: AddRotated | None,
        call: Callable[[int, list[int]], None] | None,
        *,
        own: Callable[[], list[int]],
        may_go_on: Callable[[bool], bool],
    ) -> protocol.Message:
        """Start the workers, as long as ``may_go_on``. Returns (), or `protocol.start_failed`.

        ``null`` is a descriptor of /dev/null; ``add_rotated`` has the log writer fill a file of bounded size; ``own``
        returns the descriptors that a fork must not have; ``may_go_on`` is called before the first worker, with False,
        and from time to time, with True.
        """
        self._import_shared()
        self._doing = -1, "raising the limit on open files"
        try:
            ignored = ignored_signals()
            limit = DescriptorLimit(sum(map(_descriptors, self._specs)) + _SPARE_DESCRIPTORS)
            self._import_fork()
            self._check_room(limit.most)
            for number, spec in enumerate(self._specs):
                if number % _TOGETHER == 0 and not may_go_on(number > 0):
                    break
                self._doing = spec.rank, "opening its log files"
                stdin = null if spec.stdin is None else self._fds[spec.stdin]
                streams = Outputs(stdin, spec.stdout, spec.stderr, spec.bounds, terminal=spec.terminal)
                with streams as outputs:
                    self._doing = spec.rank, "starting it"
                    for rotated in outputs.rotated:
                        assert add_rotated is not None
                        add_rotated(*rotated)
                    with limit:
                        if self._forked or spec.placement is not None:
                            pid = self._start_by_fork(spec, outputs, call, own)
                        else:
                            given = [self._fds[index] for index in spec.fds]
                            pid = execute(spec, self._environment, outputs, given, ignored)
                    worker = children.add(spec.rank, pid, spec.env.get(_ERROR_FILE))
                self._doing = spec.rank, "watching it"
                # Watched from its start on, a worker's exit keeps its place in epoll's order.
                children.watch(worker, limit.put_away(os.pidfd_open(pid)))
        except (OSError, ImportError) as error:
            return self._failed(error)
        return ()

    def _check_room(self, most: int) -> None:
        """Raise OSError where the log writer could not hold the files of all workers: it would lose their output."""
        room = most - _OWN_DESCRIPTORS
        for spec in filter(_has_writer, self._specs):
            room -= _descriptors(spec)
            if room < 0:
                self._doing = spec.rank, "opening its log files"
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _start_by_fork(
        self,
        spec: Spec,
        outputs: Outputs,
        call: Callable[[int, list[int]], None] | None,
        own: Callable[[], list[int]],
    ) -> int:
        from phalanx._engine.keeper import fork_process  # loaded by now

        given = [self._fds[index] for index in spec.fds]
        if not self._forked:
            return fork_process.execute(spec, self._environment, outputs, given)
        private = {*own(), *self._fds}.difference(given)
        return fork_process.fork(spec, self._environment, outputs, given, private, call)

    def _failed(self, error: OSError | ImportError) -> protocol.Message:
        rank, doing = self._doing
        doing = getattr(error, "doing", doing)  # the step that failed in a placed child
        if isinstance(error, ImportError):  # of `fork_process`: no descriptor is left to open its file
            return protocol.start_failed(rank, doing, errno.EMFILE, "")
        if isinstance(error, files.UnfitError):
            doing = f"{doing} ({error.strerror})"
        return protocol.start_failed(rank, doing, error.errno or 0, linux.path_of(error))

    def _import_shared(self) -> None:
        """Import once, before the forks, what each of them would import for itself.

        Each module comes with the folder from which the launcher has it: it is looked for there last.
        """
        if not self._modules:
            return
        own = list(sys.path)
        sys.path += dict.fromkeys(folder for _name, folder in self._modules if folder and folder not in own)
        try:
            for name, _folder in self._modules:
                __import__(name)
        except Exception:  # noqa: BLE001 - it is missing, or no descriptor is left: the worker fails by itself
            return
        finally:
            sys.path[:] = own
        gc.freeze()

    def _import_fork(self) -> None:
        """Import `fork_process`, if it is needed. Raises OSError, ImportError.

        The limit of the workers holds during a fork, and open log files may have all the numbers below it.
        """
        if self._forked or any(spec.placement is not None for spec in self._specs):
            self._doing = -1, "importing what forks them"
            import phalanx._engine.keeper.fork_process  # noqa: F401 - see above

    def close(self) -> None:
        """Close the descriptors that came with the order, but for those of memory that is shared with the workers."""
        kept = self.table if self.notice is None else (*self.table, self.notice[2])
        for fd in self._fds:
            if fd not in kept:
                os.close(fd)

    def watch_timers(
        self,
        loop: Loop,
        in_charge: Callable[[], dict[int, int]],
        strike: Callable[[int, int], None],
        send: Callable[[protocol.Message], object],
    ) -> Escalation | None:
        """Begin to watch the timers of these workers, see `Escalation`; or send why they are not watched."""
        assert self._timers is not None
        _table, _lock, seats, hang, steps = self._timers
        try:
            from phalanx._timers.escalation import Escalation
            from phalanx._timers.table import TimerTable

            table = TimerTable.from_descriptors(self.table, seats, hang)  # type: ignore[arg-type]  # two, as sent
            escalation = Escalation(table, steps, loop, in_charge, strike, lambda *message: send(message))
            escalation.open()
        except (OSError, ImportError) as error:
            send(("unwatched", str(error)))
            return None
        return escalation


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


def load_procfs() -> None:
    """Import what the first end takes, while the workers run: it is needed at once when one of them fails."""
    try:
        import phalanx._base.procfs  # noqa: F401 - see above
    except (OSError, ImportError):  # no descriptor is left: it is tried again when it is needed
        return
