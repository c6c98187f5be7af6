"""The workers of a node, as its job asks for them: their imports before there is a part for them, and their stacks.

`phalanx run` and `LocalElasticAgent` use this alike. It starts and ends no worker.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable

from phalanx._base import interrupts
from phalanx._base.text import one_line
from phalanx._base.threads import Latch, SerialExecutor
from phalanx._engine import host_signals
from phalanx._group.context import PContext
from phalanx._group.warm import Warm
from phalanx._rendezvous import questions, stack_report
from phalanx._run.control import Control
from phalanx._run.group_team import GroupTeam
from phalanx._run.job_run import JobRun
from phalanx._stacks.dump import EXITED, NO_STACK
from phalanx.multiprocessing import PreloadError

LOOK = 3.0
"""Seconds by which the end of the workers is put off, at the most, as a rank of another node hangs."""

_STACKS = 2.0  # seconds in which workers have to give their stacks
_NOT_STARTED = f"{NO_STACK}it has not been started\n"
_LONGEST_WAIT = 1e6  # seconds that poll(2) can wait
_IMPORTS_END = 5.0  # seconds for the thread to end once the process has, which takes none


class LastLook:
    """The last look at the workers of a node, as a rank of another node hangs; their end waits for it, but not long.

    At most one look at a time. Used by one thread, which waits for nothing here.

    Attributes:
        end_at: When the end of the workers waits no longer (seconds, monotonic); None: it does not wait.
    """

    def __init__(self) -> None:
        self.end_at: float | None = None
        self._taken: Latch | None = None  # opened when the stacks are there; None: nobody has asked for them

    def begin(self, group: PContext, wake: Callable[[], None]) -> None:
        """Have the stacks of a group's workers taken and written. ``wake`` is called when they are, on any thread."""
        taken = self._taken = Latch()

        def note() -> None:
            taken.open()
            wake()

        group.take_stacks(_STACKS, note)

    @property
    def is_under_way(self) -> bool:
        """Whether the stacks are asked for, and not there yet."""
        return self._taken is not None and not self._taken

    def puts_off(self, now: float) -> bool:
        """Whether an end of the workers that is ordered now has to wait, until `is_over`."""
        if not self.is_under_way:
            return False
        self.end_at = now + LOOK
        return True

    def is_over(self, now: float) -> bool:
        """Whether an end that was put off has waited enough."""
        return self.end_at is not None and (bool(self._taken) or now >= self.end_at)

    def wait(self) -> None:
        """Return when the stacks are there, after `LOOK` at the latest; a signal may interrupt it."""
        if self._taken is not None:
            with host_signals.delivering():
                self._taken.wait(LOOK)

    def hurry(self, group: PContext | None) -> None:
        """Wait for no stacks any more: the workers are to be ended at once."""
        report = None if group is None else group.hang_report
        if self.is_under_way and report is not None:
            report.hurry()
        self.drop()

    def drop(self) -> None:
        """Wait no longer: the workers are being ended."""
        self.end_at = self._taken = None


class NodeWorkers:
    """The workers of a node.

    Args:
        groups: Their groups.
        nproc: How many they are.
        warn: Prints a line. Any thread may call it; it does not wait.
        warm: What imports for all attempts, from the moment on at which the node comes; None: nothing.
        imported: Called by the node's thread as an import has ended: with its error, or None. By default, errors are
            printed.
        control: Answers those who ask from outside; None: one of its own.
    """

    def __init__(
        self, groups: GroupTeam, nproc: int, warn: Callable[[str], None], warm: Warm | None,
        imported: Callable[[PreloadError | None], object] | None = None, control: Control | None = None,
    ) -> None:  # fmt: skip
        self._control = control or Control(groups, warn)
        self._groups, self._nproc, self._warn, self._warm = groups, nproc, warn, warm
        self._announce = imported
        self.generation, self._first = -1, 0
        """The generation of the attempt that has begun last; the rank of its first worker."""
        self._expected = 0.0  # what `expect` was called with last
        self._run: JobRun  # once the node has come
        self._lock = allocate_lock()  # of the next one
        self._is_closed = False
        self._stacks = SerialExecutor("phalanx-look", 1)
        self.last_look = LastLook()
        self.modules = "" if warm is None else ", ".join(warm.preload)
        """What is imported; "": nothing is."""
        self._imports = SerialExecutor("phalanx-preload")
        self._import_timeout: float | None = None  # in seconds; None: the node has not come
        self._is_importing = False
        self._error: PreloadError | None = None
        self._imported = Latch()  # opened, and replaced by another one, when an import has ended

    # --- the node's thread

    def come(self, run: JobRun, patience: float) -> None:
        """Begin what the workers need and what asks for no part in the job. Raises OSError.

        Args:
            run: What decides: any thread may ask it.
            patience: Seconds after which an import has failed.
        """
        with self._lock:
            if self._is_closed:  # the agent's run has ended before the node came
                return
            self._control.job, self._control.restart = run, run.ask_restart
            self._run, self._import_timeout = run, min(patience, _LONGEST_WAIT)
            self.preload()

    def preload(self, *, tells: bool = True) -> None:
        """Begin to import; anew where it has failed, or the process has gone. ``tells``: the node learns of the end.

        Raises OSError: nothing can be started.
        """
        if self._warm is None or self._import_timeout is None or self._is_importing or self._warm.is_ready:
            return
        with interrupts.deferred():
            self._error = None
            self._warm.begin()
            self._is_importing = True
            if not self._imports.submit(lambda: self._import(tells=tells)):
                self._is_importing = False
                raise OSError("no thread can be started")

    def _import(self, *, tells: bool) -> None:
        assert self._warm is not None
        assert self._import_timeout is not None
        try:
            self._warm.wait(self._import_timeout)
        except PreloadError as error:
            self._error = error
        except RuntimeError:  # it was closed before this thread came to it
            pass
        finally:
            self._is_importing = False
            imported, self._imported = self._imported, Latch()
            imported.open()
            if tells and not self._is_closed:
                self._run.imported(self._why_not_imported)

    def are_imported(self) -> bool:
        """Whether all is imported; False: it is under way. Raises PreloadError: it cannot be."""
        if self._error is not None and not self._is_importing:
            raise self._error
        return not self._is_importing

    def _why_not_imported(self) -> str:
        """Return why no worker can be started here; "": some can be."""
        error = None if self._is_importing else self._error
        if self._announce is not None:
            self._announce(error)
        elif error is not None:
            self._warn(str(error))
        return "" if error is None else one_line(error)

    def expect(self, seconds: float) -> None:
        """Have the workers ended, unless this is called again within so many seconds."""
        self._expected = seconds
        if self._groups.group is not None:
            self._groups.group.expect(seconds)

    def answer(self, what: str, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:
        """Answer what other nodes ask, see `NodeTeam.answer`."""
        if what == questions.STACKS:
            self._take_stacks(generation, nodes, then)
        else:
            self._control.answer_node(what, then)

    def _take_stacks(self, generation: int, nodes: int, then: Callable[[bytes], None]) -> None:
        first, group = self._first, self._groups.group if self.generation == generation else None

        def take() -> None:
            if group is None:
                then(stack_report.write({}, 0, why="no worker of this attempt has been started there"))
                return
            try:
                from phalanx._stacks import collect

                pids = group.pids()
                texts = {rank: EXITED if rank in pids else _NOT_STARTED for rank in range(self._nproc)}
                texts |= collect.take(lambda: group.alive, group.error_files, _STACKS)
                then(stack_report.write(texts, first, nodes))
            except Exception as error:  # noqa: BLE001 - no descriptor is left, say: who asks is to know
                then(stack_report.write({}, 0, why=one_line(f"its workers could not be looked at: {error}")))

        if self._is_closed:
            then(stack_report.write({}, 0, why=stack_report.NONE_SHOWN))
        elif not self._stacks.submit(take):
            then(stack_report.write({}, 0, why="its agent has no thread left to look at its workers"))

    def hangs_elsewhere(self, wake: Callable[[], None] = lambda: None) -> None:
        """Have the stacks of the workers written, for a rank of another node hangs. Their end follows."""
        if self._groups.group is not None:
            self.last_look.begin(self._groups.group, wake)

    # --- the thread of the groups

    def begin(self, generation: int, first_rank: int) -> None:
        """Begin the attempt of a generation."""
        self.last_look.drop()
        self.generation, self._first = generation, first_rank
        self._control.first_rank = first_rank

    def started(self, folder: str) -> None:
        """Have the group watched that has been started. ``folder``: where people ask for it; "": nowhere."""
        if self._expected:
            self.expect(self._expected)
        self._control.open(folder)

    def wait_for_imports(self) -> Warm | None:
        """Return what has imported, once it has; None: there is nothing to import. Raises PreloadError."""
        if self._warm is None or self._import_timeout is None:
            return None
        self.preload(tells=False)  # again, if the process has gone
        while True:
            imported = self._imported
            if self.are_imported():
                return self._warm
            with host_signals.delivering():
                imported.wait()

    def close_door(self) -> None:
        """Answer nobody any more."""
        self._control.close()

    def close(self) -> None:
        """Give back what is held; no worker is left. Waits for stacks that are collected, but not for long."""
        with self._lock:
            self._is_closed = True
        self.close_door()
        self._stacks.drain(_STACKS)
        if self._warm is not None:
            self._warm.close()
        self._imports.drain(_IMPORTS_END)
