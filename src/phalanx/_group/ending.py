"""What the end of a group brings: the line that it has failed, the descriptor that becomes readable, what is released.

A failure is logged once, whether anybody asks for the result or not. The logger's handlers are the host's, and may take
any time: they are called on the thread of the group's own lines, which supervises nothing. A fork of the host has no
such thread, and logs nothing.
"""

from __future__ import annotations

import contextlib
import os
from _thread import RLock, allocate_lock
from functools import partial

from phalanx._base import stderr
from phalanx._base.text import one_line
from phalanx._base.tty import sanitise
from phalanx._engine import host_signals
from phalanx._evidence.cleanup import remove_empty, remove_old
from phalanx._logs.specs import DefaultLogsSpecs, FolderLogsSpecs
from phalanx._outcomes.result import collect, failures_of, first_of, verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx._base.threads import Latch
    from phalanx._engine.group_events import GroupEvents
    from phalanx._engine.mirror import WorkerRecord
    from phalanx._engine.supervisor import Supervisor
    from phalanx._group.plan import GroupOptions
    from phalanx._group.warm import Warm
    from phalanx._logs.layout import LogsDest
    from phalanx._logs.specs import LogsSpecs
    from phalanx._outcomes.failure import ProcessFailure
    from phalanx._outcomes.result import RunProcsResult

TIDY = 5.0
"""Seconds that `close` waits for the removal of files: a disk may not answer."""

_LOG_WAIT = 2.0  # seconds for which `wait` waits for the log, when the launcher itself has found the failure


class FirstFailure:
    """The first failure of one group, and its result.

    Attributes:
        folder: Where the logs of the group are; "": none are kept.
        is_temporary: Whether that is a temporary folder.
    """

    def __init__(
        self,
        name: str,
        supervisor: Supervisor,
        logs: LogsDest,
        envs: Mapping[int, Mapping[str, str]],
        options: GroupOptions,
    ) -> None:
        specs = options.logs_specs
        self._name, self._supervisor, self._logs, self._envs = name, supervisor, logs, envs
        self.folder = _folder_of(logs, specs) if getattr(specs, "is_kept", True) else ""
        self.is_temporary = isinstance(specs, DefaultLogsSpecs) and specs.root_log_dir is None
        self.announces = options.announces
        self._one, self._looking = allocate_lock(), RLock()
        self._found: dict[int, ProcessFailure | None] | None = None
        self._is_announced = self._has_failed = False
        self._result: RunProcsResult | None = None
        self._values: dict[int, Any] = {}
        self._judging = RLock()  # an object that is unpickled, or a signal handler, may call `PContext.wait` again

    @property
    def all_succeeded(self) -> bool:
        """Whether every worker has succeeded, as far as anybody has found out."""
        workers = [*self._supervisor.mirror.workers.values()]
        return bool(workers) and not self._has_failed and all(worker.ended_well for worker in workers)

    def found(self) -> dict[int, ProcessFailure | None]:
        """Return the failures of a group that is gone, see `failures_of`. Their files are read once."""
        with self._looking:
            if self._found is None:
                self._found = failures_of(self._supervisor.mirror.workers.values(), self._logs, self._envs)
            return self._found

    def judge(self, value: Callable[[WorkerRecord], Any], events: GroupEvents | None) -> RunProcsResult:
        """Return the result of a group that is gone, which is collected, and emitted, once for all threads that wait.

        If a signal interrupts this, the next call goes on. ``value`` returns that of a worker that has succeeded.
        """
        supervisor = self._supervisor
        # In a fork of the launcher no other thread exists that could release a lock.
        is_ours = supervisor.owner == os.getpid()
        with self._judging if is_ours else contextlib.nullcontext():
            result = self._result
            if result is None:
                mirror = supervisor.mirror
                workers = mirror.workers.values()
                found = self.found() if is_ours else failures_of(workers, self._logs, self._envs)
                result = collect(
                    workers, self._logs, found, partial(self._value_once, value), mirror.leftovers, mirror.began_ns,
                    name=self._name, log_dir=self.folder,
                )  # fmt: skip
                result = self._result = self._result or result
                if events is not None:
                    events.ended(result.state, *verdict(result), result, supervisor.link.lost)
                for worker in workers:
                    worker.received_fds.close()  # of workers that failed after they had returned
                if is_ours:
                    self._note(result)
            return result

    def _value_once(self, value: Callable[[WorkerRecord], Any], worker: WorkerRecord) -> Any:
        if worker.rank not in self._values:
            self._values[worker.rank] = value(worker)
        return self._values[worker.rank]

    def announce(self) -> None:
        """Log the first failure as far as it is known: of a worker, or why the group was killed. At most once."""
        supervisor = self._supervisor
        lost = supervisor.link.lost
        workers = [*supervisor.mirror.workers.values()]
        is_over = supervisor.mirror.state == "ENDED"
        found = self.found() if is_over else failures_of(workers, self._logs, self._envs)
        failure = first_of(workers, found)
        if failure is not None or lost is not None:
            more = "" if lost is None else one_line(lost)
            self._log("; ".join(filter(None, ("" if failure is None else _cause(failure), more))))
        elif left := next((worker for worker in workers if worker.abandoned), None):
            self._log(f"rank {left.rank}, pid {left.pid}: {left.abandoned}")

    def _note(self, result: RunProcsResult) -> None:
        """Log a failure that only the launcher has found: a value that cannot be unpickled there. At most once."""
        failure = result.root_cause
        self._has_failed = failure is not None
        if failure is not None and self.announces and not self._supervisor.has_reported:
            self._supervisor.lines.call_after_lines(lambda: self._log(_cause(failure)), 0.0, _LOG_WAIT)

    def _log(self, cause: str) -> None:
        with self._one:
            if self._is_announced:
                return
            self._is_announced = True
        text = f"the group {self._name!r} has failed: {cause}"
        if self.folder and (not self.is_temporary or self._holds_something()):
            text += f"; its files are in {self.folder}"
        stderr.warn(sanitise(text), "ERROR")

    def _holds_something(self) -> bool:
        """Whether there is a file in the temporary folder, which is removed with the group otherwise."""
        for path in self._logs.error_files.values():
            try:
                if os.listdir(os.path.dirname(path)):
                    return True
            except OSError:
                continue
        return False


def _cause(failure: ProcessFailure) -> str:
    rank = failure.local_rank if failure.rank is None else failure.rank
    detail = one_line(failure.detail)
    return f"rank {rank}, {one_line(failure.message).removesuffix(':')}{f' ({detail})' if detail else ''}"


def _folder_of(logs: LogsDest, specs: LogsSpecs) -> str:
    """Return the folder in which all files of a group are, with a folder for each rank in most layouts."""
    if logs.timeline:
        return os.path.dirname(logs.timeline)
    if isinstance(specs, FolderLogsSpecs):
        return os.path.abspath(specs.root_log_dir or "")
    try:
        return os.path.commonpath([os.path.dirname(path) for path in logs.error_files.values()])
    except ValueError:  # there are absolute and relative ones
        return ""


class EndFd:
    """An eventfd(2): `ring` makes it readable for good.

    >>> end = EndFd()
    >>> end.ring(); os.eventfd_read(end.fileno())
    1
    >>> end.close()
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Between a look at the descriptor and the write its number could become another file's. Reentrant, for a signal
        # handler that closes while its own thread rings.
        self._gate = RLock()

    def fileno(self) -> int:
        """Return the descriptor; -1 after `close`."""
        return self._fd

    def ring(self) -> None:
        """Make it readable."""
        with self._gate:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Close it. Idempotent."""
        with self._gate:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    __del__ = close


async def opened(latch: Latch) -> None:
    """Wait in a task of `asyncio` until a latch is open."""
    import asyncio

    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(over.set)

    latch.then(wake)
    try:
        await over.wait()
    finally:
        latch.forget(wake)


def release(
    supervisor: Supervisor,
    logs: LogsDest,
    specs: LogsSpecs,
    warm: Warm | None = None,
    events: GroupEvents | None = None,
    first: FirstFailure | None = None,
) -> None:
    """Release what a closed or dropped group holds in this process, and remove its temporary and empty files."""
    if supervisor.owner != os.getpid():  # this process is a fork of the owner, and exits
        return
    try:
        host_signals.release(supervisor)
    finally:  # a signal handler may raise in the first step
        if warm is not None:
            warm.close()
        if events is not None:
            supervisor.done.then(events.end)
    if supervisor.done:
        supervisor.last_chore(lambda: _remove(logs, specs, first), TIDY)
    stderr.finish()


def _remove(logs: LogsDest, specs: LogsSpecs, first: FirstFailure | None) -> None:
    if first is not None and first.is_temporary and first.all_succeeded:
        with contextlib.suppress(OSError):
            remove_old(logs.error_files.values())  # of exceptions that were handled
    else:
        for path in logs.error_files.values():
            remove_empty(path)
    specs.tidy(logs)
