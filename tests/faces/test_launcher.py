"""`phalanx.launcher`: jobs on one machine, by a config."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from phalanx import events, metrics
from phalanx.errors import ChildFailedError
from phalanx.launcher import LaunchConfig, elastic_launch, launch_agent
from phalanx.multiprocessing import DefaultLogsSpecs, SignalException, Std
from phalanx.rendezvous import (
    OneMachineRendezvous,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from tests.support.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_temporary_folder", "own_signals")

STANDALONE = LaunchConfig(
    1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork"
)


@pytest.fixture
def own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch sets this variable for the process."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")


def config(**changes: Any) -> LaunchConfig:
    return dataclasses.replace(STANDALONE, logs_specs=None, **changes)


def product(factor: int) -> int:
    return factor * int(os.environ["RANK"])


def fails_twice() -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] < "2" and os.environ["RANK"] == "1":
        sys.exit(5)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def where() -> tuple[str, str]:
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def test_the_same_config_again_in_a_thread() -> None:
    own = config()
    before = dict(vars(own))
    assert [elastic_launch(own, product)(factor) for factor in (2, 3)] == [{0: 0, 1: 2}, {0: 0, 1: 3}]
    found: list[dict[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(launch_agent(own, product, [4])))
    thread.start()
    thread.join()
    assert found == [{0: 0, 1: 4}]
    assert vars(own) == before


def test_restarts() -> None:
    assert elastic_launch(config(max_restarts=2), fails_twice)() == {0: "2", 1: "2"}
    with pytest.raises(ChildFailedError) as info:
        elastic_launch(config(max_restarts=1), fails_twice)()
    assert info.value.name == "fails_twice"
    assert {rank: failure.exitcode for rank, failure in info.value.failures.items()} == {1: 5}
    assert {rank: outcome.state for rank, outcome in info.value.outcomes.items() if rank == 1} == {1: "failed"}
    assert "fails_twice FAILED" in str(info.value)


@pytest.mark.parametrize(
    "entrypoint, args, name",
    [
        ("sh", ("-c", "exit 3"), "sh"),
        (sys.executable, ("-u", "-S", "/not/there.py", "x"), "/not/there.py"),
        (sys.executable, ("-Q",), sys.executable),
    ],
)
def test_programs_that_fail(entrypoint: str, args: tuple[str, ...], name: str, tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    with pytest.raises(ChildFailedError) as info:
        elastic_launch(dataclasses.replace(config(nproc_per_node=1), logs_specs=logs), entrypoint)(*args)
    assert info.value.name == name
    assert os.path.dirname(info.value.log_dir) == str(tmp_path)


def test_programs(capfd: pytest.CaptureFixture[str]) -> None:
    assert elastic_launch(config(), "echo")("rank", "${local_rank}") == {0: None, 1: None}
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0", "rank 1"]


@pytest.mark.slow
def test_functions_of_main() -> None:
    """Those of a program that comes by stdin, as a notebook's cells do, and a lambda."""
    program = """
from phalanx.launcher import LaunchConfig, elastic_launch

def double(x):
    return 2 * x

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 1, max_restarts=0)
    print(elastic_launch(config, double)(2), elastic_launch(config, lambda: 5)())
"""
    env, command = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}, [sys.executable, "-"]
    done = subprocess.run(command, input=program, env=env, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "{0: 4} {0: 5}\n"


@pytest.mark.parametrize("backend", ["static", "etcd-v2"])
def test_endpoints_of_this_machine(backend: str) -> None:
    for endpoint in ("", "localhost:0", "[::1]:0", os.uname().nodename):
        own = config(nproc_per_node=1, rdzv_backend=backend, rdzv_endpoint=endpoint)
        host, port = elastic_launch(own, where)()[0]
        expected = endpoint.removesuffix(":0").strip("[]") if backend == "static" else ""
        assert (host, int(port) > 0) == (expected or "127.0.0.1", True)


def test_a_static_endpoint_is_where_workers_meet() -> None:
    for backend, expected in (("c10d", "127.0.0.3"), ("static", "localhost")):
        own = config(nproc_per_node=1, rdzv_backend=backend, local_addr="127.0.0.3")
        assert elastic_launch(own, where)()[0][0] == expected
    own = config(rdzv_backend="static", rdzv_endpoint="localhost:29511", rdzv_configs={"rank": 0}, nproc_per_node=1)
    assert elastic_launch(own, where)() == {0: ("localhost", "29511")}


@pytest.mark.parametrize(
    "changes, error, says",
    [
        ({"nproc_per_node": 0}, ValueError, "nproc_per_node: expected a whole number, 1 or more, got 0"),
        ({"min_nodes": True}, TypeError, "min_nodes: expected a whole number"),
        ({"min_nodes": 2}, ValueError, "max_nodes: expected min_nodes (2) or more, got 1"),
        ({"max_nodes": 2, "rdzv_backend": "static"}, ValueError, "max_nodes: 1:2: with the backend"),
        ({"max_nodes": 2, "rdzv_backend": "etcd"}, ValueError, "run_id: the machines of a job find"),
        ({"max_nodes": 2, "rdzv_configs": {"timeout": -1}}, ValueError, "rdzv_configs: timeout: '-1': expected a time"),
        ({"rdzv_backend": "zeus"}, ValueError, "rdzv_backend: there is no 'zeus'; there are 'static', 'c10d', 'etcd'"),
        ({"rdzv_backend": None}, TypeError, "rdzv_backend: expected a string, got None"),
        ({"rdzv_endpoint": "192.0.2.1:29400"}, ValueError, "rdzv_endpoint: expected an address of this machine"),
        ({"rdzv_endpoint": "localhost:x"}, ValueError, "rdzv_endpoint: expected a port, 0 to 65535, after"),
        ({"rdzv_configs": {"rank": 1}}, ValueError, "rdzv_configs: expected the rank 0, got 1"),
        ({"rdzv_configs": None}, TypeError, "rdzv_configs: expected a dict, got None"),
        ({"metrics_cfg": "x"}, TypeError, "metrics_cfg: expected a dict, got 'x'"),
        ({"signals_to_handle": "SIGTERM,TERM"}, ValueError, "signals_to_handle: expected names of signals"),
        ({"signals_to_handle": "SIGKILL"}, ValueError, "signals_to_handle: expected names of signals"),
        ({"event_log_handler": "consle"}, KeyError, "event_log_handler: there is no event handler 'consle'"),
        ({"shutdown_timeout": -1}, ValueError, "shutdown_timeout: expected 0 seconds or more"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    changes: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_spawn", None)
    monkeypatch.setattr(os, "fork", None)
    with pytest.raises(error) as info:
        elastic_launch(config(**changes), product)(1)
    assert str(info.value).startswith(says)
    assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM"


def test_what_is_no_config_and_no_entrypoint() -> None:
    for entrypoint in (None, ["/bin/echo"]):
        with pytest.raises(TypeError, match="entrypoint: expected a callable, or a program's name, got"):
            elastic_launch(config(), entrypoint)()  # type: ignore[arg-type]  # what is refused
    with pytest.raises(TypeError, match=r"config: expected a phalanx\.launcher\.LaunchConfig, got 3"):
        elastic_launch(3, product)(1)  # type: ignore[arg-type]  # as above
    own = config()
    own.logs_specs = "/tmp"  # type: ignore[assignment]  # as above
    with pytest.raises(TypeError, match="logs_specs: expected a LogsSpecs, or None, got '/tmp'"):
        launch_agent(own, product, [1])


def test_what_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"timeout": 3, "other": 1}
    assert LaunchConfig(1, 1, 1).rdzv_configs == {"timeout": 900}
    assert LaunchConfig(1, 1, 1, rdzv_configs=given).rdzv_configs == given
    assert LaunchConfig(1, 1, 1, rdzv_configs=given, rdzv_timeout=7).rdzv_configs == {"timeout": 7, "other": 1}
    assert given["timeout"] == 3
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "12")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 12
    assert LaunchConfig(1, 1, 1, shutdown_timeout=0).shutdown_timeout == 0
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT: expected whole seconds, got 'soon'"):
        LaunchConfig(1, 1, 1)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.getMessage()))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    events.register_logging_handler("kept", handler)
    yield handler
    events.register_logging_handler("kept", logging.NullHandler())


def test_events(kept: Kept) -> None:
    with pytest.raises(ChildFailedError):
        elastic_launch(config(max_restarts=1, event_log_handler="kept"), fails_twice)()
    assert events.flush(60)
    told = [
        (event["source"], event["metadata"]["state"], event["metadata"]["global_rank"]) for event in kept.events
    ]  # fmt: skip
    attempt: list[Any] = [("AGENT", "RENDEZVOUS", None), ("AGENT", "ASSIGN_WORKER_RANKS", None)]
    attempt += [("WORKER", "START", 0), ("WORKER", "START", 1)]
    end = [("WORKER", "TERMINATED", 0), ("WORKER", "FAILED", 1), ("AGENT", "SUCCEEDED", None)]
    assert told == [*attempt, *attempt, *end]
    failed = kept.events[-2]
    assert failed["name"] == "torchelastic.worker.status.FAILED"
    more = json.loads(failed["metadata"]["metadata"])
    assert (more["exit_code"], more["entry_point"]) == ([5], "fails_twice")
    assert failed["metadata"]["agent_restarts"] == 1


class Put(metrics.MetricHandler):
    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.values[metric_data.name] = metric_data.value


@pytest.mark.parametrize(
    "restarts, ended, flakiness", [(3, "run_success_with_retries", 50), (1, "run_failed_with_retries", 100)]
)
def test_metrics(restarts: int, ended: str, flakiness: int) -> None:
    handler = Put()
    metrics.configure(handler, "torchelastic")
    try:
        with suppress(ChildFailedError):
            elastic_launch(config(max_restarts=restarts, role="trainer"), fails_twice)()
    finally:
        metrics.configure(metrics.NullMetricHandler(), "torchelastic")
    of_workers = {name: value for name, value in handler.values.items() if name.startswith("workers.trainer.")}
    assert {name.removeprefix("workers.trainer."): value for name, value in of_workers.items() if value} == {
        "run_total": 1,
        ended: 1,
        "flakiness": flakiness,
        "healthy": 1,
        "failed": 1,
        **({"succeeded": 1, "remaining_restarts": 1} if "success" in ended else {}),
    }
    steps = ["_assign_worker_ranks", "_rendezvous", "_initialize_workers", "run"]
    names = [f"SimpleElasticAgent.{name}" for name in steps]
    names += [f"LocalElasticAgent.{name}" for name in ("_start_workers", "_stop_workers")]
    assert {name for name in handler.values if name not in of_workers} == {
        f"{name}.{what}" for name in names for what in ("success", "duration.ms")
    }


def ends(launcher: int) -> None:
    os.kill(launcher, signal.SIGTERM)
    signal.pause()


def test_an_event_of_a_signal_and_of_an_error(kept: Kept) -> None:
    """It may come before the workers' events of a start have been told."""
    with pytest.raises(SignalException) as info:
        elastic_launch(config(nproc_per_node=1, event_log_handler="kept"), ends)(os.getpid())
    assert info.value.sigval == signal.SIGTERM
    said = ["SignalException"]
    with pytest.raises(FileNotFoundError):
        elastic_launch(config(event_log_handler="kept"), "/not/there")()
    said.append("no such binary: '/not/there'")
    assert events.flush(60)
    last = [event for event in kept.events if event["metadata"]["state"] == "FAILED"]
    assert [event["source"] for event in last] == ["AGENT"] * 2
    assert all(text in event["metadata"]["raw_error"] for text, event in zip(said, last, strict=True))


class Elsewhere(RendezvousHandler):
    """Somebody else's handler: it would end the job for all machines when it is shut down."""

    shut_down = 0

    def __init__(self, params: RendezvousParameters) -> None:
        self._alone = OneMachineRendezvous(params.run_id, backend="elsewhere")

    def get_backend(self) -> str:
        return "elsewhere"

    def next_rendezvous(self) -> RendezvousInfo:
        return self._alone.next_rendezvous()

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        self._alone.set_closed()

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._alone.get_run_id()

    def shutdown(self) -> bool:
        Elsewhere.shut_down += 1
        return self._alone.shutdown()


def test_a_signal_leaves_the_handler_of_somebody_else_open() -> None:
    """As torch's launcher does: other machines may go on with it."""
    rendezvous_handler_registry.register("elsewhere", Elsewhere)
    before = Elsewhere.shut_down
    with pytest.raises(SignalException):
        elastic_launch(config(nproc_per_node=1, rdzv_backend="elsewhere"), ends)(os.getpid())
    assert Elsewhere.shut_down == before
    elastic_launch(config(nproc_per_node=1, rdzv_backend="elsewhere"), "true")()
    assert Elsewhere.shut_down == before + 1
