"""Start a group of processes as one: the names of ``torch.distributed.elastic.multiprocessing``.

`start_processes` starts N copies of a function or of a binary and returns a `PContext`. The group stands or falls
as one: at the first failure the others are stopped, and the result names the failure that came first.

>>> from phalanx.multiprocessing import start_processes
>>> with start_processes("hello", pow, args={0: (2, 3), 1: (3, 2)}) as group:
...     result = group.wait()
>>> result.return_values
{0: 8, 1: 9}
"""

from __future__ import annotations

from phalanx._engine.forkserver import PreloadError
from phalanx._engine.host_signals import SignalException
from phalanx._engine.main_module import UnguardedMainError
from phalanx._engine.mirror import Leftover, RankStatus
from phalanx._engine.pickling.unpicklable import UnpicklableError
from phalanx._engine.start_errors import KeeperLostError
from phalanx._group.arguments import RanksError
from phalanx._group.command_group import ScriptContext, SubprocessContext
from phalanx._group.context import PContext
from phalanx._group.function_group import MultiprocessContext
from phalanx._group.warm import Warm as warm  # noqa: N813 - it is used as a verb
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.layout import LogsDest, Std, to_map
from phalanx._logs.specs import DefaultLogsSpecs, LogsSpecs
from phalanx._outcomes.failure import Outcome, ProcessFailure
from phalanx._outcomes.result import RunProcsResult
from phalanx._placement.placement import Placement
from phalanx.multiprocessing._start import start_processes

__all__ = [
    "ConsoleSpecs",
    "DefaultLogsSpecs",
    "KeeperLostError",
    "Leftover",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "Outcome",
    "PContext",
    "Placement",
    "PreloadError",
    "ProcessFailure",
    "RankStatus",
    "RanksError",
    "RunProcsResult",
    "ScriptContext",
    "SignalException",
    "Std",
    "SubprocessContext",
    "UnguardedMainError",
    "UnpicklableError",
    "start_processes",
    "to_map",
    "warm",
]
