"""The start of one process by fork(2): for workers that are forks, and for commands with a placement.

Owns what the child does before it is a worker (session, signals, streams, CPUs, limits), and how the keeper learns that
one of these steps failed. Loaded when a group needs it.
"""

from __future__ import annotations

import errno
import gc
import select

from phalanx._base import linux
from phalanx._engine import protocol
from phalanx._engine.keeper.start_group import environment_of, ignored_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

    from phalanx._engine.keeper.start_group import Outputs
    from phalanx._engine.protocol import Spec
    from phalanx._placement.placement import WorkerBounds
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_EXECUTING = "starting it"
_NAMED = 16  # CPUs in the message of an error, at most


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


def execute(spec: Spec, base: dict[bytes, bytes], outputs: Outputs, given: list[int]) -> int:
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
