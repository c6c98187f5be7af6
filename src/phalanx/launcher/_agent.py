"""The agent of a launched job: its end is that of the job."""

from __future__ import annotations

import os

from phalanx.agent import LocalElasticAgent
from phalanx.errors import ChildFailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent import RunResult


class LaunchedAgent(LocalElasticAgent):
    """Tells of its own end by an event, too; and makes the error of a job that has failed."""

    _is_launched = True

    def error(self, name: str, result: RunResult) -> ChildFailedError:
        """Make the error of a run that has failed: with what became of every worker, and where its logs are."""
        groups, folder = self._groups, getattr(self._logs_specs, "run_log_dir", None) or ""
        found = {} if groups.result is None else groups.result.outcomes
        outcomes = {self._global_rank(rank): one for rank, one in found.items()}
        files = [] if groups.group is None else [*groups.group.error_files.values()]
        if not (os.path.isdir(folder) and all(file.startswith(os.path.join(folder, "")) for file in files)):
            folder = ""  # of another job, with the same config
        return ChildFailedError(name, result.failures, outcomes=outcomes, log_dir=folder)
