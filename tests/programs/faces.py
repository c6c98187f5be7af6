"""The faces of a program: which library starts its workers. Nothing but the module's name differs between a pair.

The first argument on the command line is the face, the second the start method:

- ``torch-spawn`` and ``spawn``: `torch.multiprocessing` and `phalanx.spawn`, which call ``fn(i, *args)``;
- ``torch-elastic`` and ``elastic``: `torch.distributed.elastic.multiprocessing` and `phalanx.multiprocessing`, where
  the arguments of each rank are ``(rank, *args)``, and what the function returns comes back.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.context import BaseContext

MODULES = {
    "torch-spawn": "torch.multiprocessing",
    "spawn": "phalanx.spawn",
    "torch-elastic": "torch.distributed.elastic.multiprocessing",
    "elastic": "phalanx.multiprocessing",
}


class FailedError(Exception):
    """A group of an elastic face has failed; the spawn faces raise exceptions of their own."""


def method() -> str:
    """The start method that was asked for."""
    return sys.argv[2]


def is_elastic() -> bool:
    """Whether values are returned."""
    return sys.argv[1].endswith("elastic")


def context() -> BaseContext:
    """The `multiprocessing` context of the start method, for the queues and locks that workers get."""
    if sys.argv[1].startswith("torch"):
        # It saves each worker the seconds of importing torch, and changes nothing that it sees.
        multiprocessing.set_forkserver_preload([MODULES["torch-elastic"]])
    return multiprocessing.get_context(method())


def run(
    fn: Callable[..., Any], args: Iterable[Any] = (), nprocs: int = 2, meanwhile: Callable[[], None] | None = None
) -> dict[int, Any] | None:
    """Start the workers, call ``meanwhile``, and wait until all have ended. Returns what they returned, or None."""
    context()
    library = importlib.import_module(MODULES[sys.argv[1]])
    options: dict[str, Any] = {"start_method": method()}
    if sys.argv[1] in ("spawn", "elastic") and method() == "forkserver" and "torch" in sys.modules:
        options["preload"] = ["torch"]  # as above
    sys.stdout.flush()
    if not is_elastic():
        processes = library.start_processes(fn, tuple(args), nprocs, join=False, **options)
        if meanwhile is not None:
            meanwhile()
        while not processes.join():
            pass
        return None
    everybody = {rank: (rank, *args) for rank in range(nprocs)}
    nothing: dict[int, dict[str, str]] = {rank: {} for rank in range(nprocs)}
    group = library.start_processes("program", fn, everybody, nothing, library.DefaultLogsSpecs(), **options)
    if meanwhile is not None:
        meanwhile()
    result = group.wait(period=0.02)
    if result.failures:
        raise FailedError(*(_failure(rank, each) for rank, each in sorted(result.failures.items())))
    return dict(sorted(result.return_values.items()))


def _failure(rank: int, failure: Any) -> str:
    message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    # That there was no exception is said in other words, with an address of torch's.
    last = [] if failure.exitcode > 1 else message.strip().splitlines()[-1:]
    return f"rank {rank}, exit code {failure.exitcode}, signal {failure.signal_name()}, {last}"


def outcome(fn: Callable[..., Any], args: Iterable[Any] = (), nprocs: int = 2) -> str:
    """Run it, and say in a line what became of it."""
    try:
        returned = run(fn, args, nprocs)
    except FailedError as error:
        return f"failed: {'; '.join(error.args)}"
    except Exception as error:
        if not hasattr(error, "error_index"):
            raise
        code = getattr(error, "exit_code", None)
        number = getattr(error, "signal_name", None)
        last = str(error).strip().splitlines()[-1]
        return f"{type(error).__name__}: index {error.error_index}, exit code {code}, signal {number}, {last!r}"
    return f"ended well, returned {returned}"


def drained(queue: Any, count: int) -> list[Any]:
    """The first so many objects of a queue, in order of what they are: workers put them in any."""
    return sorted(queue.get() for _ in range(count))
