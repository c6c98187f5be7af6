"""What `spawn` starts, and returns with ``join=False``: the group, a handle on each process, and the context of both.

The group leaves signals to the host, and runs on without a reference. Owns the end of such groups at the interpreter's
exit, and the sentinels of their processes.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress

from phalanx._base.text import seconds
from phalanx._base.unpatched import loaded
from phalanx._engine.start_errors import KeeperLostError
from phalanx._group.arguments import GRACE
from phalanx._group.ending import EndFd
from phalanx.multiprocessing import MultiprocessContext
from phalanx.spawn._exceptions import ProcessException, exited, failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from multiprocessing.util import Finalize
    from typing import Any

    from phalanx._engine.supervisor import Supervisor

_kept: set[SpawnGroup] = set()
"""The groups that were started without a join, and have neither been joined since nor succeeded."""

_FIRST = 20
"""The priority of our finalizer in a child of `multiprocessing`: it runs before all others. The processes may need what
those end: pools (15), the threads that feed queues (10), managers and named semaphores (0)."""

_at_end: Finalize[None] | None = None
"""Our finalizer, in a child of `multiprocessing`."""


class SpawnGroup(MultiprocessContext):
    """A group of function workers that leaves signals to the host, and may run on without a reference."""

    _prints_failures = False  # `ProcessContext.join` raises them, with their tracebacks

    def __init__(self, *args: Any, daemon: bool, **options: Any) -> None:
        super().__init__(*args, signals=False, numbered=True, daemon=daemon, **options)
        self._grace: float = options.get("grace", GRACE)

    @property
    def supervisor(self) -> Supervisor:
        """What supervises its processes, once it has been started."""
        return self._started()

    def set_grace(self, grace: float) -> None:
        """Set the grace period."""
        self._grace = grace
        self.supervisor.set_grace(grace)

    def stop(self, number: int) -> None:
        """Begin to stop the processes: a signal, the grace period, SIGKILL."""
        self.supervisor.stop(number, self._grace)

    def end(self, number: int) -> None:
        """Stop the processes, and return when they have ended. Their error files are read before they are removed."""
        if self._supervisor is None:
            return
        self.stop(number)
        with suppress(RuntimeError):  # KeeperLostError; or the start had failed
            self.wait()
        self.close()

    def interrupt(self) -> None:
        """Stop the processes by SIGINT; kill them if another SIGINT comes meanwhile."""
        try:
            self.end(signal.SIGINT)
        except KeyboardInterrupt:
            self.close(signal.SIGKILL)

    def close(self, death_sig: int | None = None, timeout: float = GRACE) -> None:
        """See `PContext.close`. The exit reports no failure of the group afterwards."""
        super().close(death_sig, timeout)
        _kept.discard(self)

    def keep(self) -> None:
        """Hold a reference until the group succeeds or is closed, and end it at the interpreter's exit."""
        _kept.add(self)
        self.supervisor.done.then(self._on_done)
        atexit.unregister(_at_exit)  # it must run once
        atexit.register(_at_exit)
        _register_finalizer()

    def _on_done(self) -> None:
        workers = self.supervisor.mirror.workers.values()
        if all(worker.exit is not None and worker.exit.ok for worker in workers):
            _kept.discard(self)

    def error(self, *, own: bool = False) -> ProcessException | None:
        """Make the exception of a group that has ended, or None. With ``own``, only for a failure of its own."""
        result = self.wait(0)
        assert result is not None
        if result.root_cause is not None:
            return failed(result)
        for outcome in () if own else result.outcomes.values():
            if outcome.state == "abandoned":
                msg = f"process {outcome.local_rank} {outcome.describe()}"
                return ProcessException(msg, outcome.local_rank, outcome.pid)
            if outcome.exitcode:
                return exited(outcome.local_rank, outcome.pid, outcome.exitcode)
        return None


def _register_finalizer() -> None:
    """Register `_at_exit` in a child of `multiprocessing` too, which may end by os._exit without atexit."""
    global _at_end  # noqa: PLW0603 - as atexit's own list is one for the process
    processes = loaded("multiprocessing.process")
    if processes is None or processes.parent_process() is None:
        return
    from multiprocessing.util import Finalize

    if _at_end is not None:
        _at_end.cancel()
    _at_end = Finalize(None, _at_exit, exitpriority=_FIRST)


def _at_exit() -> None:
    """Do what `multiprocessing` does at the exit: stop the daemons, wait for the others; after a Ctrl-C, stop all."""
    groups = [group for group in list(_kept) if group.supervisor.owner == os.getpid()]  # a copy: others change it
    # An interpreter has printed its exception by now, and stored it. That of a child of multiprocessing is still being
    # handled; from Python 3.13 on nothing of it is left here: such a child waits, until another Ctrl-C.
    interrupted = issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt)
    interrupted = interrupted or isinstance(sys.exception(), KeyboardInterrupt)
    for group in groups:
        if group.daemon or interrupted:
            group.stop(signal.SIGINT if interrupted else signal.SIGTERM)
    for group in groups:
        try:
            group.wait()
            error = group.error(own=True)
        except KeyboardInterrupt:
            group.interrupt()
        except KeeperLostError as lost:
            sys.excepthook(type(lost), lost, None)
        else:
            if error is not None:
                sys.excepthook(type(error), error, None)
        group.close()


class SpawnedProcess:
    """One process of a group, with the methods of a `multiprocessing.Process` that make sense after its start.

    `spawn` makes one for each ``index`` of its ``group``.

    Attributes:
        pid: Its process id.
        ident: The same.
        name: Like ``"SpawnProcess-1"``: what `multiprocessing.current_process` is called in it.
        daemon: As given to `spawn`.
    """

    def __init__(self, group: SpawnGroup, index: int) -> None:
        self.name = group.process_name(index)
        self.daemon = group.daemon
        self._group = group
        self._index = index
        self._worker = group.supervisor.mirror.workers[index]
        self._sentinel: EndFd | None = None
        self.pid = self.ident = self._worker.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, ``-n`` for signal n; None while it runs, or when it outlived even SIGKILL."""
        if not self._worker.ended:
            return None
        if self._worker.exit is None:
            return -signal.SIGKILL if self._group.supervisor.link.keeper_error is not None else None
        return self._worker.exit.returncode

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process has ended, for `multiprocessing.connection.wait`.

        `exitcode` is known by then. The descriptor is not a pidfd. It stays open until the process has ended and this
        object and its context are gone.
        """
        if self._sentinel is None:
            self._sentinel = EndFd()
            self._worker.ended.then(self._sentinel.ring)
        return self._sentinel.fileno()

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for at most ``timeout`` seconds. Its failure is raised by `ProcessContext.join`."""
        self._worker.ended.wait(-1 if timeout is None else max(0, timeout))

    def terminate(self) -> None:
        """Send SIGTERM to it, if it runs. If it ends by that, it has failed, and the others are stopped."""
        self._group.supervisor.send(self._index, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. See `terminate`."""
        self._group.supervisor.send(self._index, signal.SIGKILL)

    def __repr__(self) -> str:
        code = self.exitcode
        return f"<{type(self).__name__} {self.name!r} pid={self.pid} {'running' if code is None else f'ended {code}'}>"


class ProcessContext:
    """The processes that `spawn` has started. With ``join=False``, `spawn` returns it for its ``group``.

    Attributes:
        processes: A `SpawnedProcess` for each index.
        error_files: Where each process leaves its traceback, as JSON. The files go when the group has been joined.
    """

    def __init__(self, group: SpawnGroup) -> None:
        self._group = group
        self._joined: set[int] = set()
        self.processes = [SpawnedProcess(group, index) for index in range(group.nprocs)]
        self.error_files = [group.logs.error_files[index] for index in range(group.nprocs)]

    def pids(self) -> list[int]:
        """The process ids, by index."""
        return [process.pid for process in self.processes]

    @property
    def sentinels(self) -> dict[int, int]:
        """The sentinel of each process whose end no `join` has seen, and its index. See `SpawnedProcess.sentinel`."""
        return {p.sentinel: index for index, p in enumerate(self.processes) if index not in self._joined}

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all have ended; raise if one has failed.

        When one fails, the others have 0.1 s to leave evidence of their own. Then they get SIGTERM, and SIGKILL after
        the grace period, so this returns within a bounded time. A Ctrl-C stops the group before KeyboardInterrupt is
        raised: SIGINT, the grace period, SIGKILL. A second Ctrl-C kills it at once.

        Args:
            timeout: Seconds for the whole; None: until all have ended.
            grace_period: Seconds (>= 0) between SIGTERM and SIGKILL, from now on; None: as it was.

        Returns:
            True: all ended well. False: some still run.

        Raises:
            ProcessRaisedException: The first failure was an exception.
            ProcessExitedException: The first failure was a signal, also a SIGINT that we did not send, or an exit code.
            KeeperLostError: The group's helper process was killed, and with it the group.
        """
        group = self._group
        if timeout is not None:
            timeout = seconds("timeout", timeout, negative=True)
        if grace_period is not None:
            group.set_grace(seconds("grace_period", grace_period))
        try:
            ended = group.wait(timeout) is not None
        except KeyboardInterrupt:
            group.interrupt()
            raise
        except KeeperLostError:
            group.close()
            raise
        finally:
            self._joined.update(index for index, process in enumerate(self.processes) if not process.is_alive())
        if ended:
            group.close()
            if (error := group.error()) is not None:
                raise error
        return ended

    def __repr__(self) -> str:
        running = sum(process.is_alive() for process in self.processes)
        return f"<{type(self).__name__}: {running} of {len(self.processes)} processes run>"


class SpawnContext(ProcessContext):
    """The `ProcessContext` of start method ``"spawn"``."""
