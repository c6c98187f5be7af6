"""Logs that a group has failed, once, whether anybody asks for its result or not.

Owns that line, and when it is due. The logger's handlers are the host's, and may take any time: they are called on the
thread of the group's own lines, which supervises nothing. A fork of the host has no such thread, and logs nothing.
"""

from __future__ import annotations

import os
from _thread import RLock, allocate_lock

from phalanx._base.stderr import warn
from phalanx._base.text import one_line
from phalanx._base.tty import sanitise
from phalanx._logs.specs import DefaultLogsSpecs, FolderLogsSpecs
from phalanx._outcomes.result import failures_of, first_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx._engine.supervisor import Supervisor
    from phalanx._logs.layout import LogsDest
    from phalanx._logs.specs import LogsSpecs
    from phalanx._outcomes.failure import ProcessFailure
    from phalanx._outcomes.result import RunProcsResult

_PATIENCE = 2.0  # seconds for which `wait` waits for the log, when the launcher itself has found the failure


class FirstFailure:
    """The first failure of one group.

    Args:
        name: The group's name.
        supervisor: What is known of its workers.
        logs: Their files.
        specs: What has named these.
        envs: Their environments.
        announces: Whether it is to be logged.

    Attributes:
        folder: Where the logs of the group are; "": none are kept.
        is_temporary: Whether that is a temporary folder.
    """

    def __init__(
        self,
        name: str,
        supervisor: Supervisor,
        logs: LogsDest,
        specs: LogsSpecs,
        envs: Mapping[int, Mapping[str, str]],
        *,
        announces: bool,
    ) -> None:
        self._name, self._supervisor, self._logs, self._envs = name, supervisor, logs, envs
        self.folder = _folder_of(logs, specs) if getattr(specs, "is_kept", True) else ""
        self.is_temporary = isinstance(specs, DefaultLogsSpecs) and specs.root_log_dir is None
        self.announces = announces
        self._one, self._looking = allocate_lock(), RLock()
        self._found: dict[int, ProcessFailure | None] | None = None
        self._is_announced = self._has_failed = False

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

    def announce(self) -> None:
        """Log the first failure as far as it is known: of a worker, or why the group was killed. At most once."""
        supervisor = self._supervisor
        lost = None if supervisor.result_stands else supervisor.keeper_error
        workers = [*supervisor.mirror.workers.values()]
        is_over = supervisor.mirror.state == "ENDED"
        found = self.found() if is_over else failures_of(workers, self._logs, self._envs)
        failure = first_of(workers, found)
        if failure is not None or lost is not None:
            more = "" if lost is None else one_line(lost)
            self._log("; ".join(filter(None, ("" if failure is None else _cause(failure), more))))
        elif left := next((worker for worker in workers if worker.abandoned), None):
            self._log(f"rank {left.rank}, pid {left.pid}: {left.abandoned}")

    def note(self, result: RunProcsResult) -> None:
        """Log a failure that only the launcher has found: a value that cannot be unpickled there. At most once."""
        failure = result.root_cause
        self._has_failed = failure is not None
        if failure is not None and self.announces and not self._supervisor.has_reported:
            self._supervisor.call_after_lines(lambda: self._log(_cause(failure)), 0.0, _PATIENCE)

    def _log(self, cause: str) -> None:
        with self._one:
            if self._is_announced:
                return
            self._is_announced = True
        text = f"the group {self._name!r} has failed: {cause}"
        if self.folder and (not self.is_temporary or self._holds_something()):
            text += f"; its files are in {self.folder}"
        warn(sanitise(text), "ERROR")

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
