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

from phalanx._core.leftovers import Leftover
from phalanx._core.lost import KeeperLostError
from phalanx._core.main_module import UnguardedMainError
from phalanx._core.payload import UnpicklableError
from phalanx._core.zygote import PreloadError
from phalanx.errors import Outcome, ProcessFailure
from phalanx.multiprocessing._console import ConsoleSpecs
from phalanx.multiprocessing._context import MultiprocessContext, PContext, ScriptContext, SubprocessContext
from phalanx.multiprocessing._logs import DefaultLogsSpecs, LogsDest, LogsSpecs
from phalanx.multiprocessing._placement import Placement
from phalanx.multiprocessing._result import RunProcsResult
from phalanx.multiprocessing._signals import SignalException
from phalanx.multiprocessing._start import RanksError, start_processes
from phalanx.multiprocessing._std import Std, to_map
from phalanx.multiprocessing._warm import Warm as warm  # noqa: N813 - it is used as a verb

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
