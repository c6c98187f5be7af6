"""Runs an agent by itself, of torch's or of ours, and prints its events and metrics."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

LIBRARY, WHICH = sys.argv[1:3]
if LIBRARY == "torch":
    from torch.distributed.elastic import events, metrics
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.events import handlers
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
else:
    from phalanx import events, metrics
    from phalanx.agent import LocalElasticAgent, WorkerSpec
    from phalanx.multiprocessing import DefaultLogsSpecs


class Printed(logging.Handler):
    """Prints each event as one line."""

    def emit(self, record: logging.LogRecord) -> None:
        told = json.loads(record.getMessage())
        facts = told["metadata"]
        more = json.loads(facts["metadata"])
        more["worker_pid"] = [pid is not None for pid in more.get("worker_pid", [])]
        kept = {name: facts[name] for name in ("global_rank", "group_rank", "role", "state", "agent_restarts")}
        given = {name: facts[name] is not None for name in ("worker_id", "raw_error", "duration_ms", "run_id")}
        os.write(1, ("event " + json.dumps([told["name"], told["source"], kept, given, more]) + "\n").encode())


class Names(metrics.MetricHandler):  # type: ignore[misc]  # of either library
    """Prints the name of each metric, and the value of those that are no time."""

    def emit(self, metric_data: Any) -> None:
        value = "" if metric_data.name.endswith(".ms") else metric_data.value
        os.write(1, f"metric {metric_data.group_name} {metric_data.name} {value}\n".encode())


def succeed() -> int:
    return 1


def fail_once() -> int:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
    return 2


def fail() -> None:
    sys.exit(3)


def main() -> None:
    metrics.configure(Names())
    if LIBRARY == "torch":
        handlers._log_handlers["printed"] = Printed()
        parameters = RendezvousParameters("c10d", "localhost:0", "r", 1, 1, is_host="true", use_libuv=False)
        handler = registry.get_rendezvous_handler(parameters)
    else:
        events.register_logging_handler("printed", Printed())
        handler = None
    spec = WorkerSpec(
        "trainer", 1, handler, entrypoint=globals()[WHICH], max_restarts=1, monitor_interval=0.1,
        event_log_handler="printed",
    )  # fmt: skip
    LocalElasticAgent(spec, DefaultLogsSpecs()).run()


if __name__ == "__main__":
    main()
