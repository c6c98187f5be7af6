"""The start of one process, with everything in place before its first instruction.

Owns what lies between a keeper's decision and a worker's code: session, signals, standard streams, environment,
descriptors, and the exec or the fork itself. Knows nothing of groups.
"""

from __future__ import annotations

import errno
import gc
import os

from phalanx._core import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms

Spec = tuple[int, bytes, list[bytes], dict[bytes, bytes], "str | None", "str | None", list[int]]
"""A worker to be: rank, file to execute, argv, environment on top of the group's, stdout file, stderr file (None: the
launcher's), and which of the given descriptors it inherits. When it inherits any, their numbers follow its argv."""

_MODE_FILE = 0o666  # the umask is the caller's
_QUIET = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "STKFLT", "IO", "PWR", "VTALRM", "PROF")


def execute(spec: Spec, base: dict[bytes, bytes], outputs: Outputs, given: list[int], ignored: list[int]) -> int:
    """Execute a file in a new process, which inherits the descriptors ``given``. Returns its pid. Raises OSError.

    posix_spawn(3) lets the child borrow our memory until its exec, which takes two thirds of the time of a fork and an
    exec, and it reports the errno of a failed exec.
    """
    _rank, path, argv, env, _stdout, _stderr, _which = spec
    for fd in given:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawn(
            path,
            [*argv, ",".join(map(str, given)).encode()] if given else argv,
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

    Without ``call``, the fork serves as a function worker. Raises OSError.
    """
    parent = os.getpid()
    # A SIGTERM from now on has to wait until it is the worker's to take: our own handlers would swallow it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if pid:
        return pid
    try:
        linux.die_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        _fresh_signals()
        for target, fd in outputs.fds:
            os.dup2(fd, target)
        outputs.close()
        for fd in private:
            os.close(fd)
        environ = {**base, **spec[3]}
        for name in list(os.environb):
            if name not in environ:
                del os.environb[name]
        os.environb.update(environ)
        gc.unfreeze()
        gc.enable()
        from phalanx._core.worker import serve

        (call or serve)(spec[0], given)
    finally:
        os._exit(70)  # the callable leaves by itself: EX_SOFTWARE is a mistake of ours (sysexits.h)


def close_all_but(wanted: Iterable[int]) -> None:
    """Close every descriptor but 0, 1, 2 and those ``wanted``: pipes of others would never come to their end."""
    kept = {0, 1, 2, *wanted}
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in kept:
            try:
                os.close(fd)
            except OSError:  # that of the listing itself
                pass


class Outputs:
    """The descriptors that become a worker's 0, 1 and 2: a context that closes what it opened."""

    def __init__(self, null: int, stdout: str | None, stderr: str | None) -> None:
        self.fds = [(0, null)]
        self._opened: list[int] = []
        try:
            for target, path in ((1, stdout), (2, stderr)):
                if path is not None:
                    # Appending, so that a file that is cut short while it is written grows from its new end.
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    fd = os.open(path, flags, _MODE_FILE)
                    self._opened.append(fd)
                    self.fds.append((target, fd))
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Outputs:  # noqa: PYI034 - typing.Self would be an import on the keeper's start
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened."""
        for fd in self._opened:
            os.close(fd)
        self._opened = []


def ignore(_number: int, _frame: object) -> None:
    """Have the signal interrupt, and do nothing. Unlike SIG_IGN, this does not outlive an exec."""


def turn_deaf() -> None:
    """Let no signal but SIGKILL and the stop signals end us: what is meant for the group goes to its launcher."""
    for name in _QUIET:
        signal.signal(getattr(signal, "SIG" + name), ignore)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a launcher that ignores it hands that down; nothing could be reaped
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def ignored_signals() -> list[int]:
    """The signals that are ignored here, by Python or from whoever started the launcher (nohup, a shell's ``&``)."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]


def _fresh_signals() -> None:
    """Dispositions and mask as a new Python interpreter has them."""
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except OSError as error:  # those that the C library keeps for itself
                if error.errno != errno.EINVAL:
                    raise
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def fill_standard_descriptors() -> None:
    """Open /dev/null on each of 0, 1, 2 that the launcher had closed, for the workers to inherit."""
    for fd in linux.occupy_standard_descriptors():
        os.set_inheritable(fd, True)
