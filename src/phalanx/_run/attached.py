"""A live run of another process, as an object: `phalanx.attach`, and what the commands do with a run."""

from __future__ import annotations

from collections.abc import Iterable
from signal import Signals
from typing import Any

from phalanx._base import clock
from phalanx._base.process import Process
from phalanx._group.arguments import check_signal
from phalanx._run.control_socket import NotAnsweredError, RefusedError, ask_for
from phalanx._runs import catalog
from phalanx._runs.catalog import RunDir
from phalanx._runs.paths import search_folders

_LONGEST_WAIT = 1e6  # seconds that poll(2) can wait
_ENDS_WITHIN = 1.0  # seconds in which a launcher ends that answers nobody any more


class AttachedRun:
    """A run whose launcher is another process of this machine. `attach` returns it; it holds nothing open.

    Each method asks the launcher, and waits for its answer. Of a job of many machines, the agents of all nodes answer.

    Attributes:
        name: The name of the run's folder.
        path: The folder.
        missing: By host, why a node has not answered the latest question; empty: all have.

    Each method raises RuntimeError: the launcher does not answer, or refuses. The message says why.
    """

    def __init__(self, found: RunDir) -> None:
        assert found.run is not None
        self.name, self.path = found.name, found.path
        self.missing: dict[str, str] = {}
        self._run, self._owner = found.run, found.owner

    def status(self) -> list[dict[str, Any]]:
        """Return how the run is, a dict for each node: what ``phalanx status --json`` prints below ``nodes``."""
        return self._ask("status")

    def stop(self, *, now: bool = False) -> None:
        """Stop the run, as a signal to its launcher does: notice, SIGTERM, the grace period, SIGKILL.

        Returns when the launcher has begun to: see `wait`. A job of many machines is stopped on all. A further stop
        kills the workers, as a further signal does; within 0.3 s of the first one, it counts as that.

        Args:
            now: Whether the workers are killed at once.
        """
        try:
            self._ask("stop", now=now)
        except RuntimeError:
            if self.wait(_ENDS_WITHIN) is None:  # else it was about to end
                raise

    def restart(self) -> None:
        """End the workers within the grace period, and start all of them again. It counts as no restart of a failure.

        Returns when the launcher has begun to. Raises RuntimeError also if it is being stopped.
        """
        self._ask("restart")

    def signal(self, number: Signals | int, ranks: Iterable[int] | None = None) -> list[int]:
        """Send workers a signal. Returns the ranks that were sent it, in order.

        Args:
            number: The signal.
            ranks: Global ranks; those that do not run, or that are not there, are left out. None: all that run.

        Raises ValueError: ``number`` is no signal.
        """
        number = int(check_signal("number", number))
        return self._ranks("signal", number=number, ranks=None if ranks is None else sorted(map(int, ranks)))

    def pause(self) -> list[int]:
        """Stop the processes of all workers (SIGSTOP) until `resume`. Returns the ranks. Timers rest meanwhile."""
        return self._ranks("pause")

    def resume(self) -> list[int]:
        """Continue the processes that `pause` has stopped. Returns the ranks."""
        return self._ranks("resume")

    def wait(self, timeout: float | None = None) -> str | None:
        """Wait until the launcher has ended. Returns the state of the run: "succeeded", "failed", "stopped", "lost".

        Args:
            timeout: Seconds; None: without limit.

        Returns None if it has not ended by then.
        """
        until = clock.now() + (float("inf") if timeout is None else timeout)
        try:
            with Process(self._run.pid, start=self._run.pid_started) as launcher:
                while not launcher.wait(max(0.0, min(_LONGEST_WAIT, until - clock.now()))):
                    if clock.now() >= until:
                        return None
        except ProcessLookupError:
            pass
        return catalog.look(self.path).state

    def _ranks(self, question: str, **arguments: Any) -> list[int]:
        return sorted(rank for node in self._ask(question, **arguments) for rank in node["ranks"])

    def _ask(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        try:
            answer = ask_for(self.path, self._run, self._owner, question, **arguments)
        except (NotAnsweredError, RefusedError) as error:
            msg = f"{self.name}: {error}"
            raise RuntimeError(msg) from None
        self.missing = answer.get("why", {})
        nodes: list[dict[str, Any]] = answer["nodes"]
        return nodes

    def __repr__(self) -> str:
        return f"<AttachedRun {self.name}>"


def attach(run: str | None = None, *, log_dir: str | None = None) -> AttachedRun:
    """Return a run of another process of this machine, to see it and to have a hand on it.

    Args:
        run: The name of its folder, the beginning of that, its run id, or a path; None: the latest that runs.
        log_dir: The folder of the runs; None: as for ``phalanx run``.

    Raises LookupError: there is no such run; or it has ended, runs on another machine, or is another user's.

    >>> attach("no-such-run")
    Traceback (most recent call last):
    phalanx._runs.catalog.UnknownRunError: there is no run 'no-such-run' in ...
    """
    return AttachedRun(catalog.live(search_folders() if log_dir is None else (log_dir,), run))
