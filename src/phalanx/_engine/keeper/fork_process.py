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
from phalanx._engine.keeper import dispositions, start_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable, Iterable
    from typing import NoReturn

    from phalanx._engine.keeper.start_process import Outputs
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
        dispositions.set_python_signals()
        if call is None:
            dispositions.preloaded.set()
        for target, fd in outputs.fds:
            os.dup2(fd, target)
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
        signal.pthread_sigmask(signal.SIG_SETMASK, dispositions.preloaded.mask if call is None else ())
        if spec.argv:
            serve_script(spec.argv, given)
        (call or serve)(spec.rank, given)
    finally:
        os._exit(70)  # the callable leaves by itself: EX_SOFTWARE is a mistake of ours (sysexits.h)


def execute(spec: Spec, base: dict[bytes, bytes], outputs: Outputs, given: list[int]) -> int:
    """Execute a file in a fork that places itself first. Returns its pid. Raises NotStartedError, OSError."""
    environment = start_process.environment_of(spec, base, given)
    parent = os.getpid()
    setup = _Setup(spec.placement)
    pid = _split(setup)
    if pid:
        return setup.wait(pid, spec.path)
    try:
        linux.die_with_parent(parent)
        os.setsid()
        dispositions.set_default_signals()
        for target, fd in outputs.fds:
            os.dup2(fd, target)
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
