"""The workers of a `LocalElasticAgent` as a node of a job has them: where they are, and what is imported for them."""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable

from phalanx._base import interrupts
from phalanx._base.text import one_line
from phalanx._base.threads import Latch
from phalanx._engine import host_signals
from phalanx._group.restart_policy import AttemptEnd
from phalanx._group.warm import Warm
from phalanx._outcomes.result import RunProcsResult
from phalanx._run.attempt_groups import Preloading
from phalanx._run.group_team import GroupTeam
from phalanx._run.job_run import JobRun
from phalanx._run.job_stacks import LastLook, NodeLooks, StackDoor
from phalanx._run.node_thread import Owner
from phalanx._timers.hang_reporter import HangReporter
from phalanx.multiprocessing import PreloadError
from phalanx.rendezvous import ManyMachinesRendezvous


class NodeWorkers(Owner):
    """The workers of an agent, for a node of a job. Methods of `Owner` are called by its thread, the others by `run`.

    Args:
        handler: What has entered the job.
        groups: The groups of the agent.
        nproc: How many workers it has.
        warn: Shows a line to the user. By any thread; it does not wait.
        warm: What is to import for all attempts, from the moment on at which the node comes; None: nothing.
    """

    def __init__(
        self, handler: ManyMachinesRendezvous, groups: GroupTeam, nproc: int, warn: Callable[[str], None],
        warm: Warm | None,
    ) -> None:  # fmt: skip
        self._handler = handler
        self._groups = groups
        self._nproc = nproc
        self._warn = warn
        self._warm = warm
        self._part = -1, 0  # the generation of the attempt that has begun last, and the rank of its first worker
        self._expected = 0.0  # what `expect` was told last
        self._lock = allocate_lock()
        self._early = -1  # the attempt whose failures may be reported before it has ended; -1: none
        self._is_closed = False
        self._looks, self._last_look = NodeLooks(), LastLook()
        self._door: StackDoor | None = None
        self._preloading: Preloading | None = None
        self._imported = Latch()  # opened, and replaced by another one, when an import has ended

    # --- the node's thread

    def come(self, run: JobRun, later: Callable[[Callable[[], str]], None], patience: float) -> None:
        """See `Owner`."""
        with self._lock:
            if self._is_closed:  # the agent's run has ended before the node came
                return
            self._door = StackDoor(run.ask_look, self._warn)
            if self._warm is not None:
                self._preloading = Preloading(self._warm, patience)
                self._preloading.begin(lambda: self._see_imported(later))

    def _see_imported(self, later: Callable[[Callable[[], str]], None]) -> None:
        imported, self._imported = self._imported, Latch()
        imported.open()
        later(self._why_not_imported)

    def _why_not_imported(self) -> str:
        """Return why no worker can be started here; "": some can be."""
        assert self._preloading is not None
        try:
            self._preloading.is_ready()
        except PreloadError as error:
            self._warn(str(error))
            return one_line(error)
        return ""

    def expect(self, seconds: float) -> None:
        """See `Owner`."""
        self._expected = seconds
        group = self._groups.group
        if group is not None:
            group.expect(seconds)

    def take_stacks(self, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:
        """See `Owner`."""
        own, first = self._part
        if self._is_closed:
            super().take_stacks(generation, nodes, then)
            return
        self._looks.look(self._groups.group if own == generation else None, first, self._nproc, nodes, then)

    def hangs_elsewhere(self) -> None:
        """See `Owner`."""
        group = self._groups.group
        if group is not None:
            self._last_look.begin(group, lambda: None)

    # --- the agent's

    def begin(self, attempt: int, first_rank: int) -> None:
        """Begin an attempt, in the generation of which the handler has told."""
        self._last_look.drop()
        self._early, self._part = attempt, (self._handler.generation, first_rank)

    def started(self, folder: str) -> None:
        """Have the group watched that has been started. ``folder``: where `phalanx stack` asks for it; "": nowhere."""
        if self._expected:
            self.expect(self._expected)
        if self._door is not None and folder:
            self._door.open(folder)

    def report_failure(self, end: AttemptEnd, *, is_hang: bool, attempt: int | None = None) -> None:
        """Tell the other machines that workers here have failed. Any thread.

        ``attempt``: of an observer, which is early and knows less: it is not heeded once another one has begun, or the
        end of that one was told. None: that of the attempt that has ended.
        """
        with interrupts.deferred(), self._lock:
            if attempt is None:
                self._early = -1
            if attempt is None or (attempt == self._early and self._part[0] == self._handler.generation):
                self._handler.tell_failure(end.error, rank=end.rank, exitcode=end.exitcode, is_hang=is_hang)

    def report_outcomes(self, result: RunProcsResult, log_dir: str, hangs: HangReporter | None) -> None:
        """Tell them what became of the workers here, none of which is left: before their end is told."""
        with interrupts.deferred(), self._lock:
            self._early = -1
        self._handler.tell_outcomes(result, log_dir=log_dir, hangs=hangs)

    def wait_for_stacks(self) -> None:
        """Return when the stacks are written that a hang elsewhere has asked for; a signal may interrupt it."""
        self._last_look.wait()

    def hurry(self) -> None:
        """Wait for no stacks any more: the workers are being ended."""
        self._last_look.hurry(self._groups.group)

    def wait_for_imports(self) -> Warm | None:
        """Return what has imported, once it has; None: there is nothing to import. Raises PreloadError."""
        preloading = self._preloading
        if preloading is None:
            return None
        preloading.begin(lambda: self._see_imported(lambda _: None))  # again, if the process has gone
        while True:
            imported = self._imported
            if preloading.is_ready():
                return self._warm
            with host_signals.delivering():
                imported.wait()

    def close(self) -> None:
        """Give back what is held; no worker is left."""
        with self._lock:
            self._is_closed = True
        if self._door is not None:
            self._door.close()
        self._looks.close()
        if self._preloading is not None:
            self._preloading.close()
