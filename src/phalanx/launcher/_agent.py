"""The agent of a launched job: its end is that of the job."""

from __future__ import annotations

from phalanx.agent import LocalElasticAgent, RunResult
from phalanx.errors import ChildFailedError


class LaunchedAgent(LocalElasticAgent):
    """Tells of its own end by an event, too; and makes the error of a job that has failed."""

    _is_launched = True

    def error(self, result: RunResult) -> ChildFailedError:
        """Make the error of a run that has failed: with what became of every worker, and where its logs are."""
        return self._failed(result)

    def report(self) -> ChildFailedError | None:
        """Make the report of all machines on a job that has failed; None: it is about this one, or has not failed."""
        return self._machines.report(self._report_name)
