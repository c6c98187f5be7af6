"""`ChildFailedError`, which a launcher raises when its workers failed. `phalanx._outcomes.report` makes its text."""

from __future__ import annotations

from phalanx._outcomes.failure import first_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from phalanx._outcomes.failure import Outcome, ProcessFailure


class ChildFailedError(Exception):
    """Workers of a group have failed. Its text is the report of `format_msg`; one line, if that has been printed.

    Args:
        name: What was run.
        failures: The failures by global rank, at least one, in the order of their exits.
        outcomes: The outcomes of all workers, by global rank, as far as they are known.
        log_dir: Where the logs of the run are, or ``""``.
        lost: The host that is lost, and a line on that, where the workers have failed of it; None: they have not.
        earlier: How the attempts before this one ended, a line each.
        gave_up: Why no other attempt follows, or ``""``.

    Attributes:
        is_reported: Whether the report has been printed, as `phalanx.run.main` does before it raises.

    Raises:
        ValueError: `failures` is empty.

    >>> from phalanx.errors import ProcessFailure
    >>> error = ChildFailedError("train.py", {3: ProcessFailure(3, 4242, 1, "<N/A>")})
    >>> rank, failure = error.get_first_failure()
    >>> rank, failure.message
    (3, 'exited with code 1; no error was recorded')
    """

    __module__ = "phalanx.errors"  # as people know it, in tracebacks and pickles

    def __init__(
        self,
        name: str,
        failures: Mapping[int, ProcessFailure],
        *,
        outcomes: Mapping[int, Outcome] | None = None,
        log_dir: str = "",
        lost: tuple[str, str] | None = None,
        earlier: Sequence[str] = (),
        gave_up: str = "",
    ) -> None:
        if not failures:
            raise ValueError("failures must hold at least one failure")
        super().__init__(name)
        self.name = name
        self.failures = dict(failures)
        self.outcomes = dict(outcomes or {})
        self.log_dir = log_dir
        self.lost = lost
        self.earlier = list(earlier)
        self.gave_up = gave_up
        self.is_reported = False

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the global rank and the failure of what failed first: by evidence, else by exit, else by timestamp."""
        return first_failure(self.failures)

    def format_msg(self) -> str:
        """Return the report: the root cause, the other failures, the workers that were stopped because of it."""
        from phalanx._outcomes.report import format_report

        return format_report(
            self.name, self.failures, outcomes=self.outcomes, log_dir=self.log_dir, lost=self.lost,
            earlier=self.earlier, gave_up=self.gave_up,
        )  # fmt: skip

    def __str__(self) -> str:
        if self.is_reported:
            rank, failure = self.get_first_failure()
            return f"{self.name}: rank {rank}: {failure.message.partition(chr(10))[0]} (the report stands above)"
        return "\n" + self.format_msg()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures), self.__dict__
