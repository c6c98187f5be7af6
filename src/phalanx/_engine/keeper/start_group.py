"""The start of all workers of one group, in the order of their ranks. Runs in the keeper, once.

Owns the order of the steps: the log files of each worker are opened, then it is started and watched. How one process is
started is in `start_process`. Imported while the launcher still prepares the order to start.
"""

from __future__ import annotations

import errno
import gc
import sys

from phalanx._base import files, linux
from phalanx._engine import protocol
from phalanx._engine.keeper import start_process
from phalanx._engine.keeper.children import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Any

    from phalanx._base.loop import Loop
    from phalanx._engine.keeper.children import Children
    from phalanx._engine.keeper.log_writer import RotatedLogs
    from phalanx._timers.escalation import Escalation
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

_SPARE_DESCRIPTORS = 64  # beside those that are kept of each worker
_OWN_DESCRIPTORS = 16  # of the keeper and of its log writer themselves
_TOGETHER = 32  # workers that are started before it is asked again whether to go on
_ERROR_FILE = b"TORCHELASTIC_ERROR_FILE"


def _has_writer(spec: protocol.Spec) -> bool:
    """Whether the log writer fills the log files of a worker."""
    return bool(spec.bounds[0]) or spec.terminal


def _descriptors(spec: protocol.Spec) -> int:
    """How many descriptors of a worker are open."""
    if spec.terminal:
        return start_process.DESCRIPTORS_TERMINAL
    return start_process.DESCRIPTORS_ROTATING if _has_writer(spec) else 1


class Start:
    """One order to start, see `protocol.start` for the arguments. ``fds`` came beside it.

    Attributes:
        policy: See `protocol.start`.
        oom_counter: See `Children`.
        table: The descriptors of the timers' table; (): no timers.
        notice: What precedes a planned stop: a signal, seconds, and the descriptor of the page with the stop flag.
    """

    def __init__(
        self,
        forked: bool,  # noqa: FBT001 - as a message has it
        modules: list[tuple[str, str]],
        environment: dict[bytes, bytes],
        specs: list[tuple[Any, ...]],
        oom_counter: tuple[str, int],
        policy: tuple[float, float, float, float],
        timers: tuple[Any, ...] | None,
        notice: tuple[int, float, int] | None,
        fds: list[int],
    ) -> None:
        self.policy = policy
        self.oom_counter = oom_counter
        self.table: tuple[int, ...] = () if timers is None else (fds[timers[0]], fds[timers[1]])
        self.notice = None if notice is None else (*notice[:2], fds[notice[2]])
        self._timers = timers
        self._forked = forked
        self._modules = modules
        self._environment = environment
        self._specs = [protocol.Spec(*spec) for spec in specs]
        self._fds = fds
        self._doing = -1, ""  # the rank, and the step

    def prepare(
        self, loop: Loop, notes: int, send: Callable[[protocol.Message], object]
    ) -> tuple[Notice | None, RotatedLogs | None, protocol.Message]:
        """Start what fills log files of bounded size, and those of terminals, where it is needed.

        Returns what gives notice of a stop, that, and () or `protocol.start_failed`. ``notes`` is a pipe, see
        `Connection.open`; ``send`` sends the launcher a message.
        """
        notice = None if self.notice is None else Notice(*self.notice)
        if not any(_has_writer(spec) for spec in self._specs):
            return notice, None, ()
        try:
            from phalanx._engine.keeper.log_writer import RotatedLogs
        except (OSError, ImportError):  # no descriptor is left
            return notice, None, protocol.start_failed(-1, "starting what writes its log files", errno.EMFILE, "")
        logs = RotatedLogs()
        return notice, logs, logs.start(loop, notes, send)

    def run(
        self,
        children: Children,
        null: int,
        add_rotated: start_process.AddRotated | None,
        call: Callable[[int, list[int]], None] | None,
        *,
        own: Callable[[], list[int]],
        may_go_on: Callable[[bool], bool],
    ) -> protocol.Message:
        """Start the workers, as long as ``may_go_on``. Returns (), or `protocol.start_failed`.

        ``null`` is a descriptor of /dev/null; ``add_rotated`` has the log writer fill a file of bounded size; ``own``
        returns the descriptors that a fork must not have; ``may_go_on`` is called before the first worker, with False,
        and from time to time, with True.
        """
        self._import_shared()
        self._doing = -1, "raising the limit on open files"
        try:
            ignored = start_process.ignored_signals()
            limit = start_process.DescriptorLimit(sum(map(_descriptors, self._specs)) + _SPARE_DESCRIPTORS)
            self._check_room(limit.most)
            for number, spec in enumerate(self._specs):
                if number % _TOGETHER == 0 and not may_go_on(number > 0):
                    break
                self._doing = spec.rank, "opening its log files"
                stdin = null if spec.stdin is None else self._fds[spec.stdin]
                streams = start_process.Outputs(stdin, spec.stdout, spec.stderr, spec.bounds, terminal=spec.terminal)
                with streams as outputs:
                    self._doing = spec.rank, "starting it"
                    for rotated in outputs.rotated:
                        assert add_rotated is not None
                        add_rotated(*rotated)
                    with limit:
                        if self._forked or spec.placement is not None:
                            pid = self._start_by_fork(spec, outputs, call, own)
                        else:
                            given = [self._fds[index] for index in spec.fds]
                            pid = start_process.execute(spec, self._environment, outputs, given, ignored)
                    worker = children.add(spec.rank, pid, spec.env.get(_ERROR_FILE))
                self._doing = spec.rank, "watching it"
                # Watched from its start on, a worker's exit keeps its place in epoll's order.
                children.watch(worker, limit.put_away(os.pidfd_open(pid)))
        except (OSError, ImportError) as error:
            return self._failed(error)
        return ()

    def _check_room(self, most: int) -> None:
        """Raise OSError where the log writer could not hold the files of all workers: it would lose their output."""
        room = most - _OWN_DESCRIPTORS
        for spec in filter(_has_writer, self._specs):
            room -= _descriptors(spec)
            if room < 0:
                self._doing = spec.rank, "opening its log files"
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _start_by_fork(
        self,
        spec: protocol.Spec,
        outputs: start_process.Outputs,
        call: Callable[[int, list[int]], None] | None,
        own: Callable[[], list[int]],
    ) -> int:
        given = [self._fds[index] for index in spec.fds]
        if not self._forked:
            return start_process.execute_in_fork(spec, self._environment, outputs, given)
        private = {*own(), *self._fds}.difference(given)
        return start_process.fork(spec, self._environment, outputs, given, private, call)

    def _failed(self, error: OSError | ImportError) -> protocol.Message:
        rank, doing = self._doing
        doing = getattr(error, "doing", doing)  # the step that failed in a placed child
        if isinstance(error, ImportError):  # no descriptor is left to open its file
            return protocol.start_failed(rank, doing, errno.EMFILE, "")
        if isinstance(error, files.UnfitError):
            doing = f"{doing} ({error.strerror})"
        return protocol.start_failed(rank, doing, error.errno or 0, linux.path_of(error))

    def _import_shared(self) -> None:
        """Import once, before the forks, what each of them would import for itself.

        Each module comes with the folder from which the launcher has it: it is looked for there last.
        """
        if not self._modules:
            return
        own = list(sys.path)
        sys.path += dict.fromkeys(folder for _name, folder in self._modules if folder and folder not in own)
        try:
            for name, _folder in self._modules:
                __import__(name)
        except Exception:  # noqa: BLE001 - it is missing, or no descriptor is left: the worker fails by itself
            return
        finally:
            sys.path[:] = own
        gc.freeze()

    def close(self) -> None:
        """Close the descriptors that came with the order, but for those of memory that is shared with the workers."""
        kept = self.table if self.notice is None else (*self.table, self.notice[2])
        for fd in self._fds:
            if fd not in kept:
                os.close(fd)

    def watch_timers(
        self,
        loop: Loop,
        in_charge: Callable[[], dict[int, int]],
        strike: Callable[[int, int], None],
        send: Callable[[protocol.Message], object],
    ) -> Escalation | None:
        """Begin to watch the timers of these workers, see `Escalation`; or send why they are not watched."""
        assert self._timers is not None
        _table, _lock, seats, hang, steps = self._timers
        try:
            from phalanx._timers.escalation import Escalation
            from phalanx._timers.table import TimerTable

            table = TimerTable.from_descriptors(self.table, seats, hang)  # type: ignore[arg-type]  # two, as sent
            escalation = Escalation(table, steps, loop, in_charge, strike, lambda *message: send(message))
            escalation.open()
        except (OSError, ImportError) as error:
            send(("unwatched", str(error)))
            return None
        return escalation


def load_procfs() -> None:
    """Import what the first end takes, while the workers run: it is needed at once when one of them fails."""
    try:
        import phalanx._base.procfs  # noqa: F401 - see above
    except (OSError, ImportError):  # no descriptor is left: it is tried again when it is needed
        return
