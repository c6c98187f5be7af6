"""The start of one process, with everything in place before its first instruction.

Owns what lies between a keeper's decision and a worker's code: session, signals, standard streams, environment,
descriptors, and the exec or the fork itself. Knows nothing of groups.
"""

from __future__ import annotations

import errno
import gc
import select
import sys

from phalanx._base import channels, files, linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import os
    import signal
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn

    from phalanx._engine.rotation.log_writer import Bounds, LogWriter
    from phalanx._placement.placement import WorkerBounds
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

Spec = tuple[
    int, bytes, list[bytes], dict[bytes, bytes], "str | None", "str | None", list[int], "Bounds", "WorkerBounds | None"
]
"""A worker to be: rank, file to execute, argv, environment on top of the group's, stdout file, stderr file (None: the
launcher's), which of the given descriptors it inherits, the bounds of its files, and its placement. When it inherits
any descriptors, their numbers follow its argv."""

DESCRIPTORS_ROTATING = 1 + 2 * 2
"""What is open of a worker whose log files are rotated, in the keeper and in its log writer: its pidfd, and for each
stream the end of a pipe and a file."""

_EXECUTING = "starting it"
_NAMED = 16  # CPUs in the message of an error, at most
_IGNORED = ("PIPE", "XFSZ")  # an errno says as much


class NotStartedError(OSError):
    """A child could not become a worker. ``doing`` is what failed, on ``path`` if it is one."""

    def __init__(self, number: int, doing: str, path: bytes | None = None) -> None:
        super().__init__(number, os.strerror(number), path)
        self.doing = doing


def page(keeper: int, rank: int) -> str:
    """The name of the page that a forked worker maps: what it forks, and does not exec, shows it in /proc/PID/maps."""
    return f"phalanx-{keeper}-{rank}-"


def load(modules: Sequence[tuple[str, str]]) -> None:
    """Load what forks of this process would each load for themselves: once, and shared by all of them.

    Each comes with the folder from which the launcher has it: ours are looked through first, and those need not be.
    """
    ours = list(sys.path)
    sys.path += dict.fromkeys(folder for _name, folder in modules if folder and folder not in ours)
    try:
        for name, _folder in modules:
            __import__(name)
    except Exception:  # noqa: BLE001 - it is not there, or no descriptor is left: a worker says so itself
        return
    finally:
        sys.path[:] = ours
    if modules:
        gc.freeze()


def execute(spec: Spec, base: dict[bytes, bytes], outputs: Outputs, given: list[int], ignored: list[int]) -> int:
    """Execute a file in a new process, which inherits the descriptors ``given``. Returns its pid. Raises OSError.

    posix_spawn(3) lets the child borrow our memory until its exec, which takes two thirds of the time of a fork and an
    exec, and it reports the errno of a failed exec. What it cannot do is to place a worker.
    """
    _rank, path, argv, env, _stdout, _stderr, _which, _bounds, placement = spec
    if given:
        argv = [*argv, ",".join(map(str, given)).encode()]
    for fd in given:
        os.set_inheritable(fd, True)
    try:
        if placement is not None:
            return _execute_placed(path, argv, {**base, **env}, outputs, placement)
        return os.posix_spawn(
            path,
            argv,
            {**base, **env},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in outputs.fds],
            setsid=True,
            setsigmask=(),
            setsigdef=ignored,
        )
    finally:
        for fd in given:
            os.set_inheritable(fd, False)


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
    word = _Word(spec[8])
    pid = _split(word)
    if pid:
        return word.hear(pid)
    try:
        linux.die_with_parent(parent)
        os.setsid()
        _fresh_signals()
        if call is None:
            _preloaded.set()
        for target, fd in outputs.fds:
            os.dup2(fd, target)
        outputs.close()
        for fd in private:
            os.close(fd)
        try:
            linux.map_name(page(parent, spec[0]))
        except OSError:  # no memory, or no descriptor, is left: then it is not known whose what it leaves is
            pass
        environ = {**base, **spec[3]}
        from os import environb  # what forks has it

        for name in list(environb):
            if name not in environ:
                del environb[name]
        environb.update(environ)
        if call is None:  # else the callable knows whether its launcher collects
            gc.enable()  # what is preloaded stays frozen: it is shared for longer if no collection looks at it
        from phalanx._engine.worker.function import serve, serve_script

        word.keep()
        signal.pthread_sigmask(signal.SIG_SETMASK, _preloaded.mask if call is None else ())
        if spec[2]:
            serve_script(spec[2])
        (call or serve)(spec[0], given)
    finally:
        os._exit(70)  # the callable leaves by itself: EX_SOFTWARE is a mistake of ours (sysexits.h)


def _execute_placed(
    path: bytes, argv: list[bytes], env: dict[bytes, bytes], outputs: Outputs, placement: WorkerBounds
) -> int:
    parent = os.getpid()
    word = _Word(placement)
    pid = _split(word)
    if pid:
        return word.hear(pid, path)
    try:
        linux.die_with_parent(parent)
        os.setsid()
        _default_signals()
        for target, fd in outputs.fds:
            os.dup2(fd, target)
        word.keep(until_exec=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            os.execve(path, argv, env)
        except OSError as error:
            word.say(error.errno or 0, _EXECUTING)
        except MemoryError:  # a limit on it leaves too little even for this
            word.say(errno.ENOMEM, _EXECUTING)
    finally:
        os._exit(70)


def _split(word: _Word) -> int:
    """Fork. Returns as os.fork() does; in the child with every signal blocked. Raises OSError."""
    # A SIGTERM from now on has to wait until it is the worker's to take: we ignore it, and it would be lost.
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, ours)
            if pid < 0:
                word.close()
    return pid


class _Word:
    """What a child that has to place itself says to the keeper: that it cannot. Its silence is its consent.

    A pipe, whose end comes when the child has closed it or has executed. Without a placement there is none.
    """

    def __init__(self, placement: WorkerBounds | None) -> None:
        self._placement = placement
        if placement is not None:
            if placement[2]:  # here, while no limit on open files is in the way
                try:
                    from resource import setrlimit
                except ImportError as error:  # it is a file, and there may be no descriptor left to open it
                    raise OSError(errno.EMFILE, str(error)) from error
                self._set_limit = setrlimit
            self._reader, self._writer = os.pipe2(os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of both ends."""
        if self._placement is not None:
            os.close(self._reader)
            os.close(self._writer)

    def hear(self, pid: int, path: bytes | None = None) -> int:
        """Wait for the end of the pipe, and return ``pid``. Raises NotStartedError if something was said."""
        if self._placement is None:
            return pid
        os.close(self._writer)
        try:
            said = os.read(self._reader, select.PIPE_BUF)
        finally:
            os.close(self._reader)
        if not said:
            return pid
        os.waitpid(pid, 0)
        number, _, doing = said.decode().partition(" ")
        raise NotStartedError(int(number), doing, path if doing == _EXECUTING else None)

    def say(self, number: int, doing: str) -> NoReturn:
        """In the child: say what failed, and leave."""
        try:
            os.write(self._writer, f"{number} {doing}".encode())
        finally:
            os._exit(70)

    def keep(self, *, until_exec: bool = False) -> None:
        """In the child: be placed, or leave."""
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
            for name, number, soft, hard in limits:  # last: they bind us, too
                doing = f"setting its limit {name!r}"
                self._set_limit(number, (soft, hard))
        except OSError as error:
            self.say(error.errno or 0, doing)
        except ValueError as error:  # what setrlimit makes of EPERM and EINVAL
            self.say(errno.EPERM if "not allowed" in str(error) else errno.EINVAL, doing)
        if not until_exec:
            os.close(self._reader)
            os.close(self._writer)


def open_launcher(sock: _socket.socket) -> int:
    """A pidfd of the process that made our end of a socket. Leaves if that has died: nobody would tell us any more."""
    parent = os.getppid()
    launcher = channels.peer(sock) or parent  # a wrapper may stand between
    try:
        fd = os.pidfd_open(launcher)
    except ProcessLookupError:
        os._exit(0)
    if launcher == parent != os.getppid():  # the pid may be another's by now
        os._exit(0)
    return fd


def close_all_but(wanted: Iterable[int]) -> None:
    """Close every descriptor but 0, 1, 2 and those ``wanted``: pipes of others would never come to their end."""
    kept = {0, 1, 2, *wanted}
    try:
        fds: Iterable[int] = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # /proc does not show us
        fds = range(os.sysconf("SC_OPEN_MAX"))
    for fd in fds:
        if fd not in kept:
            try:
                os.close(fd)
            except OSError:  # it is not open, as that of the listing itself
                pass


class Outputs:
    """The descriptors that become a worker's 0, 1 and 2: a context that closes what it opened.

    Args:
        null: A descriptor of /dev/null.
        stdout, stderr: The paths of its log files; None: what the keeper has.
        bounds: With one on its size, the worker has a pipe, and the file is filled by the log writer; unless it is no
            regular file, which the worker writes to as without bounds: one that is not read would hold up all logs.
    """

    def __init__(self, null: int, stdout: str | None, stderr: str | None, bounds: Bounds) -> None:
        self.fds = [(0, null)]
        self._bounds = bounds
        self._opened: list[int] = []
        self._rotated: list[tuple[str, int, int]] = []  # path, file, and the end of the pipe that is read
        try:
            for target, path in ((1, stdout), (2, stderr)):
                if path is None:
                    continue
                # Appending, so that a file that is cut short while it is written grows from its new end.
                fd = files.opened_log(path)
                self._opened.append(fd)
                if bounds[0] and files.is_regular(fd):  # a terminal or a FIFO does not rotate: it is the worker's own
                    file = fd
                    reader, fd = os.pipe2(os.O_CLOEXEC)
                    self._opened += (reader, fd)
                    self._rotated.append((path, file, reader))
                self.fds.append((target, fd))
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Outputs:  # noqa: PYI034 - typing.Self would be an import on the keeper's start
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def descriptors(self) -> list[int]:
        """What is open."""
        return self._opened

    def hand_over(self, log_writer: LogWriter) -> None:
        """Have the log writer fill the files that are bounded in size."""
        for path, file, reader in self._rotated:
            log_writer.add(path, self._bounds, file, reader)

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        while self._opened:
            os.close(self._opened.pop())


class DescriptorLimit:
    """Our soft limit on open files: as high as needed, but not within the context: there it is what workers inherit.

    Raises OSError when a module cannot be loaded: it is a file, and there may be no descriptor left to open it.
    """

    def __init__(self, wanted: int) -> None:
        self._set: Callable[[int], None] | None = None
        self._theirs = soft = os.sysconf("SC_OPEN_MAX")
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
        wanted += soft  # for what is put away
        self._ours = wanted if hard == RLIM_INFINITY else min(wanted, hard)
        self._set = lambda limit: setrlimit(RLIMIT_NOFILE, (limit, hard))
        self._set(self._ours)

    def put_away(self, fd: int) -> int:
        """Move a descriptor that stays open above the limit of the workers. Returns its number.

        posix_spawn(3) gives a child none above the limit that holds for us then; and those below are few.
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


def turn_deaf() -> None:
    """Let no signal but SIGKILL and SIGSTOP reach us: what is meant for the group goes to its launcher.

    A worker may send them faster than any handler could run. What is ignored, and not blocked, the kernel drops as it
    is sent: it takes none of our time, and no place in a queue. SIGCHLD is blocked, for a `linux.signalfd`; SIGCONT
    does its work as it is sent. A fault of our own (SIGSEGV) ends us all the same.
    """
    signal.set_wakeup_fd(-1)  # a fork of the launcher has its
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT):
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError as error:  # those that the C library keeps for itself
                if error.errno != errno.EINVAL:
                    raise
    for number in (signal.SIGCHLD, signal.SIGCONT):  # a launcher that ignores SIGCHLD hands that down: no one is reaped
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, (signal.SIGCHLD,))


def ignored_signals() -> list[int]:
    """The signals that are ignored here, by Python or from whoever started the launcher (nohup, a shell's ``&``)."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]


def _default_signals() -> None:
    """Take back every handler, and heed what was ignored."""
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except OSError as error:  # those that the C library keeps for itself
                if error.errno != errno.EINVAL:
                    raise


def _fresh_signals() -> None:
    """Dispositions as a new Python interpreter has them."""
    _default_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _IGNORED:
        signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)


class Handlers:
    """What imported modules have made of the signals of this process, to be had by its forks. A context: the imports.

    A handler is noted as Python has it, and as the kernel has it (sigaction(2)): of those that C code has set,
    `faulthandler` for one, Python knows nothing.
    """

    def __init__(self) -> None:
        self.mask: set[int] = set()
        self._set: dict[int, tuple[Any, bytes]] = {}

    def __enter__(self) -> None:
        """Heed what who has started us had ignored or blocked: a worker that imports by itself does."""
        for number in ignored_signals():
            if number not in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._set = _handlers()

    def __exit__(self, *_error: object) -> None:
        before = self._set
        self._set = {number: found for number, found in _handlers().items() if found != before.get(number)}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        for number, (handler, _action) in self._set.items():  # nobody else's code runs here, and in keepers, after this
            if callable(handler):
                signal.signal(number, signal.SIG_DFL)

    def set(self) -> None:
        """Handle signals as the modules want it, in a fork whose signals are fresh."""
        for number, (handler, action) in self._set.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            linux.set_sigaction(number, action)


_preloaded = Handlers()


def importing() -> Handlers:
    """A context in which modules are imported whose handlers the workers of our forks shall have."""
    return _preloaded


def _handlers() -> dict[int, tuple[Any, bytes]]:
    handlers: dict[int, tuple[Any, bytes]] = {}
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP):
            try:
                handlers[number] = signal.getsignal(number), linux.sigaction(number)
            except OSError:  # those that the C library keeps for itself
                continue
    return handlers


def fill_standard_descriptors() -> None:
    """Open /dev/null on each of 0, 1, 2 that the launcher had closed, for the workers to inherit."""
    for fd in linux.occupy_standard_descriptors():
        os.set_inheritable(fd, True)
