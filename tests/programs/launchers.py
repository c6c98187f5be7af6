"""Jobs that `elastic_launch` runs, as people write them for torch. Only the imports depend on the library.

The command line names it. What it prints on stdout must not depend on it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.argv[1] != "torch":
    from phalanx import metrics
    from phalanx.errors import ChildFailedError
    from phalanx.launcher import LaunchConfig, elastic_launch, launch_agent
    from phalanx.multiprocessing import DefaultLogsSpecs, SignalException, Std
else:
    from torch.distributed.elastic import metrics
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch
    from torch.distributed.launcher.api import launch_agent

VARIABLES = ("RANK", "WORLD_SIZE", "ROLE_NAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
             "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_SIGNALS_TO_HANDLE")  # fmt: skip


def product(factor: int) -> int:
    return factor * int(os.environ["RANK"])


def variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


def fails_twice(message: str) -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2" and os.environ["RANK"] == "1":
        raise ValueError(message)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def fails() -> None:
    sys.exit(3)


def ends_its_launcher() -> None:
    import signal
    import time

    launcher = os.getppid() if sys.argv[1] == "torch" else int(os.environ["LAUNCHER"])
    # A signal that finds torch's launcher still within its fork is lost: Python prints and drops what a handler raises
    # there. By then it is through, or the next signal ends it.
    while True:
        time.sleep(1)
        os.kill(launcher, signal.SIGTERM)
        time.sleep(15)


def config(**changes: Any) -> LaunchConfig:
    base = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="run", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0,
        logs_specs=DefaultLogsSpecs(tempfile.gettempdir(), redirects=Std.ERR), start_method="fork",
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


class Totals(metrics.MetricHandler):
    def emit(self, metric_data: Any) -> None:
        if ".run_" in metric_data.name or metric_data.name.endswith(".flakiness"):
            print(metric_data.group_name, metric_data.name, metric_data.value)


def show(title: str, entrypoint: Any, *args: Any, **changes: Any) -> None:
    try:
        print(title, sorted(elastic_launch(config(**changes), entrypoint)(*args).items()))
    except ChildFailedError as error:
        print(title, error.name, [(rank, failure.exitcode) for rank, failure in sorted(error.failures.items())])
    except (ValueError, KeyError, TypeError, AssertionError, AttributeError, SignalException) as error:
        print(title, "refused" if not isinstance(error, SignalException) else error.sigval.name)


def main() -> None:
    metrics.configure(Totals())
    os.environ["LAUNCHER"] = str(os.getpid())
    print(LaunchConfig(1, 1, 1).rdzv_configs, LaunchConfig(1, 1, 1, rdzv_timeout=7, rdzv_configs={"a": 1}).rdzv_configs)
    print(LaunchConfig(1, 1, 1).shutdown_timeout, LaunchConfig(1, 1, 1).logs_specs is not None)
    show("values", product, 3)
    show("static", product, 2, rdzv_backend="static", rdzv_endpoint="127.0.0.1:29511", rdzv_configs={"rank": 0})
    show("variables", variables, max_restarts=1, signals_to_handle="SIGTERM", role="trainer")
    show("restarts", fails_twice, "no", max_restarts=2, event_log_handler="console")
    show("too few", fails_twice, "no", max_restarts=1, event_log_handler="console")
    show("program", "/bin/sh", "-c", "exit $RANK", event_log_handler="console")
    # One rank: of two that fail by themselves within milliseconds, the second may be stopped before it has.
    show("python", sys.executable, "-u", "/not/there.py", nproc_per_node=1)
    show("exits", fails, nproc_per_node=1)
    print("list", sorted(launch_agent(config(), product, [4]).items()))
    for changes in ({"min_nodes": 2}, {"nproc_per_node": 0}, {"max_nodes": 0}, {"rdzv_backend": "nothing"},
                    {"event_log_handler": "nothing"}, {"start_method": "threads"}):  # fmt: skip
        show(f"{changes}", product, 1, **changes)
    show("nothing", None)
    show("a list", ["/bin/echo"])
    show("signal", ends_its_launcher, nproc_per_node=1)


if __name__ == "__main__":
    main()
