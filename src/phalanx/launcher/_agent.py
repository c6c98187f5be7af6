"""The agent of a launched job: its end is that of the job."""

from __future__ import annotations

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
        own = result.failures
        report = self.report(name)
        if report is not None:
            for rank in own.keys() & report.failures.keys():  # the others are not sent the data of error files
                report.failures[rank] = report.failures[rank].replace(error_file_data=own[rank].error_file_data)
            return report
        found = {} if self._groups.result is None else self._groups.result.outcomes
        outcomes = {self._global_rank(rank): one for rank, one in found.items()}
        return ChildFailedError(name, own, outcomes=outcomes, log_dir=self._log_dir())

    def report(self, name: str) -> ChildFailedError | None:
        """Make the report of all machines on a job that has failed; None: it is about this one, or has not failed."""
        return self._machines.report(name)
