"""The objects that `spawn` returns with ``join=False``: the context, and a handle on each process."""

from __future__ import annotations

import signal

from phalanx._base.text import seconds
from phalanx._engine.start_errors import KeeperLostError
from phalanx.spawn._spawn_group import Sentinel, SpawnGroup


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
        self._worker = group.worker(index)
        self._sentinel: Sentinel | None = None
        self.pid = self.ident = self._worker.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, ``-n`` for signal n; None while it runs, or when it outlived even SIGKILL."""
        if not self._worker.ended:
            return None
        if self._worker.exit is None:
            return -signal.SIGKILL if self._group.is_lost else None
        return self._worker.exit.returncode

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process has ended, for `multiprocessing.connection.wait`.

        `exitcode` is known by then. The descriptor is not a pidfd. It stays open until the process has ended and this
        object and its context are gone.
        """
        if self._sentinel is None:
            self._sentinel = Sentinel(self._worker.ended)
        return self._sentinel.fd

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for at most ``timeout`` seconds. Its failure is raised by `ProcessContext.join`."""
        self._worker.ended.wait(-1 if timeout is None else max(0, timeout))

    def terminate(self) -> None:
        """Send SIGTERM to it, if it runs. If it ends by that, it has failed, and the others are stopped."""
        self._group.send(self._index, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. See `terminate`."""
        self._group.send(self._index, signal.SIGKILL)

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
