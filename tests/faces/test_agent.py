"""`phalanx.agent`: the workers of one machine, started again when they fail; agents of people's own."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._base import procfs
from phalanx.agent import (
    LocalElasticAgent,
    RestartPolicy,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from phalanx.multiprocessing import DefaultLogsSpecs, KeeperLostError, SignalException, Std
from phalanx.rendezvous import (
    OneMachineRendezvous,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from phalanx.timer import LocalTimerClient, LocalTimerServer, TimerSpecs
from tests.support import agent_workers
from tests.support.agent_workers import Meeting, PopenAgent
from tests.support.helpers import TIMEOUT, alive, let_a_request_pass

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.helpers import Gate, Ready

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

METHODS = ("spawn", "forkserver", "fork")


def spec(entrypoint: Any, *args: Any, size: int = 2, **options: Any) -> WorkerSpec:
    handler = options.pop("rdzv_handler", None)
    return WorkerSpec("trainer", size, handler, entrypoint=entrypoint, args=args, **options)


def local(entrypoint: Any, *args: Any, **options: Any) -> LocalElasticAgent:
    """An agent whose workers are forks of this process, which is the quickest way, unless said otherwise."""
    own = {
        name: options.pop(name) for name in ("start_method", "policy", "timers", "shutdown_timeout") if name in options
    }
    logs = options.pop("logs_specs", None) or DefaultLogsSpecs()
    return LocalElasticAgent(spec(entrypoint, *args, **options), logs, **{"start_method": "fork", **own})


# --- what the workers are


@pytest.mark.parametrize(
    "argument, value, error, says",
    [
        ("role", 5, TypeError, "role: expected a string, got 5"),
        ("local_world_size", 0, ValueError, "local_world_size: expected a whole number, 1 or more, got 0"),
        ("rdzv_handler", "c10d", TypeError, "rdzv_handler: expected a RendezvousHandler, or None, got 'c10d'"),
        ("entrypoint", None, TypeError, "entrypoint: expected a callable, or a program's name, got None"),
        ("args", "abc", TypeError, "args: expected a tuple of arguments, got 'abc'"),
        ("max_restarts", -1, ValueError, "max_restarts: expected a whole number, 0 or more, got -1"),
        ("monitor_interval", 0, ValueError, "monitor_interval: expected more than 0 seconds, got 0"),
        ("master_port", 65536, ValueError, "master_port: expected a port, 0 to 65535, got 65536"),
        ("master_addr", 1, TypeError, "master_addr: expected a string, got 1"),
        ("event_log_handler", None, TypeError, "event_log_handler: expected a string, got None"),
        ("numa_options", "node", TypeError, "numa_options: expected a Placement, got 'node'"),
        ("duplicate_stdout_filters", "abc", TypeError, "duplicate_stdout_filters: expected a list of strings"),
        ("duplicate_stderr_filters", [""], ValueError, "duplicate_stderr_filters: an empty string is in every line"),
    ],
)
def test_a_spec_refuses_bad_input(argument: str, value: Any, error: type[Exception], says: str) -> None:
    arguments = {"role": "trainer", "local_world_size": 1, "rdzv_handler": None, "entrypoint": print, argument: value}
    with pytest.raises(error) as info:
        WorkerSpec(**arguments)
    assert str(info.value).startswith(says)


def test_the_entrypoint_has_an_older_name_and_a_name_of_its_own() -> None:
    with pytest.warns(DeprecationWarning, match="fn: deprecated"):
        assert WorkerSpec("r", 1, None, print).entrypoint is print
    with pytest.raises(ValueError, match="fn, entrypoint: expected one of them"):
        WorkerSpec("r", 1, None, print, len)
    names = [spec(each).get_entrypoint_name() for each in ("echo", agent_workers.fails_until, functools.partial(print))]
    assert (names[:2], "partial" in names[2]) == (["echo", "fails_until"], True)


@pytest.mark.parametrize(
    "options, error, says",
    [
        ({"logs_specs": "/tmp"}, TypeError, "logs_specs: expected"),
        ({"start_method": "threads"}, ValueError, "start_method: expected one of"),
        ({"exit_barrier_timeout": "1"}, TypeError, "exit_barrier_timeout: expected seconds"),
        ({"shutdown_timeout": -1}, ValueError, "shutdown_timeout: expected 0 seconds or more"),
        ({"log_line_prefix_template": "${host_name}"}, ValueError, r"log_line_prefix_template: there is no \$"),
        ({"policy": 3}, TypeError, "policy: expected a"),
        ({"timers": 3}, TypeError, "timers: expected a TimerSpecs"),
        ({"settle": -1}, ValueError, "settle: expected 0 seconds or more"),
        ({"preload": ["json"]}, ValueError, "preload, warm: only forks"),
    ],
)
def test_an_agent_refuses_bad_input(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        LocalElasticAgent(spec(print), **{"logs_specs": DefaultLogsSpecs(), **options})
    with pytest.raises(TypeError, match="spec: expected a"):
        LocalElasticAgent(print, DefaultLogsSpecs())  # type: ignore[arg-type]  # what is refused


# --- the agent of this machine


@pytest.mark.parametrize("method", METHODS)
def test_a_group_that_fails_twice_is_started_three_times(method: str) -> None:
    """In each attempt, the machines meet anew. An agent can run again."""
    handler = Meeting()
    agent = local(agent_workers.fails_until, 2, start_method=method, max_restarts=2, rdzv_handler=handler)
    group = agent.get_worker_group()
    assert [(worker.global_rank, worker.id) for worker in group.workers] == [(-1, None)] * 2
    for calls in (3, 6) if method == "fork" else (3,):
        assert agent.run() == RunResult(WorkerState.SUCCEEDED, {0: (2, 0), 1: (2, 1)})
        assert (handler.calls, group.master_port) == (calls, 4000 + calls)
        assert group.state == WorkerState.SUCCEEDED
        assert all(isinstance(worker.id, int) and not alive(worker.id) for worker in group.workers)


def test_only_who_failed_by_itself_is_in_the_result() -> None:
    agent = local(agent_workers.one_fails, 1, policy=RestartPolicy(5, never_on=[3]))
    assert {rank: failure.exitcode for rank, failure in agent.run().failures.items()} == {1: 3}
    assert agent._attempt == 0


def test_the_last_failures_are_the_result(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    result = local(agent_workers.fails_until, 9, max_restarts=1, size=1).run()
    assert result.is_failed()
    assert result.failures[0].message == "ValueError: rank 0, attempt 1"
    err = capfd.readouterr().err
    told = [line for line in err.splitlines() if line.startswith("phalanx: attempt")]
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == len(logged) == err.count("Traceback") == 2
    assert logged[1].startswith("the group 'trainer' has failed: rank 0, ValueError: rank 0, attempt 1; ")
    assert told[0].startswith("phalanx: attempt 0 failed after ")
    assert told[0].endswith(": rank 0, ValueError: rank 0, attempt 0; attempt 1 follows (restart 1 of at most 1)")
    assert told[1].endswith("giving up: 1 of 1 restart used")


def test_a_program(tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    agent = local("sh", "-c", 'echo ${local_rank} $RANK $ROLE_NAME $$$$; exit "$((TORCHELASTIC_RESTART_COUNT < 1))"',
                  logs_specs=logs, max_restarts=1)  # fmt: skip
    assert agent.run() == RunResult(WorkerState.SUCCEEDED, {0: None, 1: None})
    assert logs.run_log_dir is not None
    for attempt in (0, 1):
        with open(f"{logs.run_log_dir}/attempt_{attempt}/1/stdout.log") as stream:
            words = stream.read().split()
        assert words[:3] == ["1", "1", "trainer"]
        assert words[3].isdecimal()


def test_what_workers_find_in_their_environment() -> None:
    names = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
             "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_NAME": "trainer", "ROLE_WORLD_SIZE": "2",
             "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4001", "TORCHELASTIC_RUN_ID": "own run",
             "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3",
             "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # fmt: skip
    found = local(agent_workers.environment, rdzv_handler=Meeting()).run().return_values[1]
    assert {name: found.get(name) for name in names} == names
    found = (
        local(agent_workers.environment, master_addr="a", master_port=5, virtual_local_rank=True).run().return_values
    )
    assert [found[1][name] for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")] == ["a", "5", "0"]
    assert [found[rank]["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["0", "1"]


def test_a_machine_that_waits_has_the_group_restarted(gate: Gate, capfd: pytest.CaptureFixture[str]) -> None:
    handler = Meeting(waiting=1)
    gate.open(2)
    agent = local(agent_workers.passes, gate.address, rdzv_handler=handler, monitor_interval=0.01)
    gate_of_the_next = threading.Thread(target=lambda: gate.open(2))
    gate_of_the_next.start()
    assert agent.run().return_values == {0: 0, 1: 1}
    gate_of_the_next.join()
    assert handler.calls in (1, 2)  # the group may have been through before it was asked
    assert ("another machine waits" in capfd.readouterr().err) == (handler.calls == 2)


def test_the_prefix_of_lines(capfd: pytest.CaptureFixture[str]) -> None:
    agent = LocalElasticAgent(spec("echo", "hello", size=1), DefaultLogsSpecs(tee=Std.ALL),
                              log_line_prefix_template="<${role_name}:${rank}> ")  # fmt: skip
    agent.run()
    assert capfd.readouterr().out == "<trainer:0> hello\n"


def test_an_agent_in_a_worker_of_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = local(agent_workers.runs_an_agent, start_method="spawn").run()
    inner = ("SUCCEEDED", {0: (1, 0), 1: (1, 1)})
    assert result.return_values == {0: inner, 1: inner}


def test_what_is_preloaded_is_imported_once_for_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted.py").write_text(f"with open({str(tmp_path / 'imports')!r}, 'a') as out: out.write('once ')\n")
    monkeypatch.syspath_prepend(tmp_path)
    agent = LocalElasticAgent(spec(agent_workers.fails_until, 2), DefaultLogsSpecs(), "forkserver", preload=["counted"])
    assert agent.run().return_values == {0: (2, 0), 1: (2, 1)}
    assert (tmp_path / "imports").read_text() == "once "
    assert agent.run().return_values == {0: (2, 0), 1: (2, 1)}
    assert (tmp_path / "imports").read_text() == "once once "


def test_a_start_that_fails_is_raised_or_tried_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        local("no-such-program").run()
    closed = OneMachineRendezvous()
    closed.set_closed()
    with pytest.raises(RendezvousClosedError):
        local(print, rdzv_handler=closed).run()
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nrm "$0"\nexit 1\n')
    program.chmod(0o755)
    with pytest.raises(FileNotFoundError, match="program"):
        local(str(program), size=1, max_restarts=2).run()
    assert "attempt 1 not started after" in capfd.readouterr().err


# --- the end that somebody asks for


def until(condition: Callable[[], bool]) -> None:
    """Look again and again: for what no descriptor tells."""
    pause = threading.Event()
    for _ in range(int(TIMEOUT * 100)):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("it has not come to that")


def test_a_signal_ends_the_workers_and_is_raised(ready: Ready) -> None:
    agent = local(agent_workers.says_and_waits, ready.address, shutdown_timeout=0.1)
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(ready.pids(4))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException) as info:
        agent.run()
    thread.join()
    assert info.value.sigval == signal.SIGINT
    assert not any(map(alive, pids))
    assert agent.get_worker_group().state == WorkerState.STOPPED
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("how", ["signal", "stop"])
def test_an_end_in_a_delay(how: str) -> None:
    agent = local(agent_workers.one_fails, 0, policy=RestartPolicy(1, backoff=600))

    def end() -> None:
        until(lambda: agent._attempts is not None and agent._attempts.state == "WAITING")
        if how == "stop":
            agent.stop()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    with contextlib.nullcontext() if how == "stop" else pytest.raises(SignalException):
        assert agent.run() == RunResult(WorkerState.STOPPED)
    thread.join()


@pytest.mark.parametrize("restarts", [1, 0])
def test_a_keeper_that_is_killed_ends_an_attempt(ready: Ready, restarts: int) -> None:
    agent = local(agent_workers.waits_in_the_first_attempt, ready.address, size=1, max_restarts=restarts)

    def lose_the_keeper() -> None:
        ready.wait()
        until(lambda: agent.get_worker_group().state == WorkerState.HEALTHY)  # else it would be a start that failed
        group = agent._groups.group
        assert group is not None
        assert group._supervisor is not None
        [keeper] = procfs.children(group._supervisor._keeper._guard)
        os.kill(keeper, signal.SIGKILL)

    thread = threading.Thread(target=lose_the_keeper)
    thread.start()
    with contextlib.nullcontext() if restarts else pytest.raises(KeeperLostError):
        assert agent.run() == RunResult(WorkerState.SUCCEEDED, {0: 1})
    thread.join()


def test_a_signal_during_a_start_leaves_workers_their_time(ready: Ready) -> None:
    class Signalled(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            ids = super()._start_workers(worker_group)
            ready.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            return ids

    with pytest.raises(SignalException):
        Signalled(spec(agent_workers.ends_at_sigterm, ready.address, size=1), DefaultLogsSpecs(), "fork").run()
    assert ready.wait() == ["has had its time"]


def test_a_second_signal_kills(ready: Ready) -> None:
    agent = local(agent_workers.outlives_sigterm, ready.address, size=1, shutdown_timeout=600)

    def interrupt() -> None:
        for _ in range(2):  # when it waits, and when it has had the first
            ready.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            let_a_request_pass()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException):
        agent.run()
    thread.join()
    assert not alive(agent.get_worker_group().workers[0].id)


def test_an_agent_in_a_thread_can_be_stopped(ready: Ready) -> None:
    agent = local(agent_workers.says_and_waits, ready.address)
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(agent.run()))
    thread.start()
    pids = ready.pids(4)
    with pytest.raises(RuntimeError, match="runs already"):
        agent.run()
    agent.stop(signal.SIGTERM, timeout=0.1)
    thread.join(TIMEOUT)
    assert results == [RunResult(WorkerState.STOPPED)]
    assert not any(map(alive, pids))
    agent.stop()  # nothing runs


# --- timers


@pytest.mark.parametrize("server", ["group", "agent", "local"])
def test_an_expired_timer_kills_its_worker_and_restarts(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    with contextlib.ExitStack() as held:
        if server == "agent":
            monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
            agent = local(agent_workers.overruns_by_environment, max_restarts=1)
        elif server == "group":  # neither server nor client is needed
            agent = local(agent_workers.overruns, None, max_restarts=1, timers=TimerSpecs())
        else:  # the server runs in the launcher
            held.enter_context(LocalTimerServer(queue, max_interval=0.01))
            agent = local(agent_workers.overruns, LocalTimerClient(queue), start_method="spawn", max_restarts=1)
        assert agent.run() == RunResult(WorkerState.SUCCEEDED, {0: 1, 1: 1})
    queue.close()
    queue.join_thread()


def test_the_environment_names_the_agents_timer_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timers"
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(path))
    assert local(agent_workers.environment, size=1).run().return_values[0]["TORCHELASTIC_TIMER_FILE"] == str(path)
    assert not path.exists()
    path.write_text("not a pipe")
    with pytest.raises(OSError, match="timers"):
        local(print).run()


# --- agents that people write


def popen(code: str, **options: Any) -> PopenAgent:
    own = {name: options.pop(name) for name in ("shutdown_timeout",) if name in options}
    return PopenAgent(spec(sys.executable, "-c", code, monitor_interval=0.01, **options), **own)


def test_hooks_of_an_agent_of_ones_own(ready: Ready) -> None:
    agent = popen("import os, sys; sys.exit(os.environ['ATTEMPT'] == '0' and os.environ['RANK'] == '1')")
    assert agent.run() == RunResult(WorkerState.SUCCEEDED, {0: None, 1: None})
    assert agent.calls == ["start", "monitor", "stop", "start", "monitor", "shutdown SIGTERM 30"]
    pids = [agent.processes[rank].pid for rank in (0, 1)]
    assert [worker.id for worker in agent.get_worker_group().workers] == pids
    agent = popen("import os, sys; sys.exit(int(os.environ['RANK']))", max_restarts=0)
    result = agent.run()  # it gives up
    assert (result.state, list(result.failures)) == (WorkerState.FAILED, [1])
    assert agent.calls == ["start", "monitor", "stop", "shutdown SIGTERM 30"]
    agent = popen(f"{ready.python()}; import signal; signal.pause()", shutdown_timeout=7)

    def interrupt() -> None:
        ready.pids(2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException):
        agent.run()
    thread.join()
    assert agent.calls == ["start", "monitor", "shutdown SIGTERM 7"]


class Scripted(SimpleElasticAgent):
    """Its workers are nothing; what `_monitor_workers` returns or raises is given."""

    def __init__(self, *script: Any, raising: str = "", rdzv_handler: RendezvousHandler | None = None) -> None:
        super().__init__(spec(print, max_restarts=1, monitor_interval=0.001, rdzv_handler=rdzv_handler))
        self.script = list(script)
        self.raising = raising
        self.calls: list[str] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.raising:
            raise OSError(call)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._note(f"start {worker_group.state.value}")
        return {}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._note(f"stop {worker_group.state.value}")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002 - as it is called
        found = self.script.pop(0)
        if isinstance(found, BaseException):
            raise found
        return RunResult(found) if isinstance(found, WorkerState) else found

    def _shutdown(self, *_: Any, **_options: Any) -> None:
        self._note("shutdown")


def test_an_unhealthy_group_is_restarted() -> None:
    agent = Scripted(WorkerState.HEALTHY, WorkerState.UNHEALTHY, WorkerState.HEALTHY, WorkerState.UNHEALTHY)
    assert agent.run().state == WorkerState.UNHEALTHY
    assert agent.calls == ["start INIT", "stop UNHEALTHY", "start STOPPED", "stop UNHEALTHY", "shutdown"]
    assert agent.get_worker_group().state == WorkerState.FAILED


@pytest.mark.parametrize(
    "found, error, says",
    [
        (ZeroDivisionError("boom"), ZeroDivisionError, "boom"),
        (KeyboardInterrupt("ctrl"), KeyboardInterrupt, "ctrl"),
        (None, TypeError, "_monitor_workers: expected a RunResult, got None"),
        (WorkerState.UNKNOWN, RuntimeError, "cannot be UNKNOWN"),
        (WorkerState.STOPPED, RuntimeError, "cannot be STOPPED"),
    ],
)
def test_a_monitor_that_raises_ends_it(found: Any, error: type[BaseException], says: str) -> None:
    agent = Scripted(WorkerState.HEALTHY, found)
    with pytest.raises(error, match=says):
        agent.run()
    assert agent.calls == ["start INIT", "shutdown"]
    agent.script = [WorkerState.SUCCEEDED]
    assert agent.run().state == WorkerState.SUCCEEDED


@pytest.mark.parametrize(
    "raising, calls",
    [
        ("start INIT", ["start INIT", "shutdown"]),
        ("stop FAILED", ["start INIT", "stop FAILED", "shutdown"]),
        ("start STOPPED", ["start INIT", "stop FAILED", "start STOPPED", "shutdown"]),
        ("shutdown", ["start INIT", "stop FAILED", "start STOPPED", "shutdown"]),
    ],
)
def test_a_hook_that_raises_ends_it(raising: str, calls: list[str]) -> None:
    agent = Scripted(WorkerState.FAILED, WorkerState.SUCCEEDED, raising=raising)
    with pytest.raises(OSError, match=raising):
        agent.run()
    assert agent.calls == calls


class Ended(Meeting):
    """Raises at the first rendezvous, or the second one."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__()
        self.error, self.after = error, after

    def next_rendezvous(self) -> RendezvousInfo:
        if self.calls == self.after:
            raise self.error
        return super().next_rendezvous()


class Two(Meeting):
    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(None, 0, 2, None)


class Older(Scripted):
    """Has a hook as it was before there was a ``timeout``."""

    def _shutdown(self, death_sig: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - as it was
        self._note("shutdown")


def test_ends_that_a_rendezvous_brings() -> None:
    agent = Older(rdzv_handler=Ended(RendezvousGracefulExitError(), after=0))  # it is not needed
    assert agent.run() == RunResult(WorkerState.STOPPED)
    assert agent.calls == ["shutdown"]
    with pytest.raises(RendezvousClosedError):
        Scripted(WorkerState.FAILED, rdzv_handler=Ended(RendezvousClosedError(), after=1)).run()
    with pytest.raises(RuntimeError, match="rdzv_handler: it has brought 2 machines together"):
        Scripted(rdzv_handler=Two()).run()


class Looking(LocalElasticAgent):
    """Looks at its workers itself: it is asked again and again."""

    looks = 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.looks += 1
        if self.looks == 3 and self._attempt == 0:
            return RunResult(WorkerState.UNHEALTHY)
        return super()._monitor_workers(worker_group)


def _unhealthy_at_first() -> int:
    if agent_workers.attempt() == 0:
        signal.pause()
    return agent_workers.attempt()


def test_an_agent_with_a_look_of_its_own() -> None:
    agent = Looking(spec(_unhealthy_at_first, monitor_interval=0.01), DefaultLogsSpecs(), "fork")
    assert agent.run() == RunResult(WorkerState.SUCCEEDED, {0: 1, 1: 1})
    assert agent.looks > 3


# --- the rendezvous of one machine


def test_the_rendezvous_of_one_machine() -> None:
    handler = OneMachineRendezvous("run", "10.1.1.1", 5)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size, info.store) == (0, 1, None)
    assert info.bootstrap_store_info == RendezvousStoreInfo("10.1.1.1", 5)
    assert (handler.get_run_id(), handler.get_backend(), handler.num_nodes_waiting()) == ("run", "one-machine", 0)
    assert not handler.use_agent_store
    assert OneMachineRendezvous().get_run_id()
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="'run'"):
        handler.next_rendezvous()


class Shelf(dict[str, bytes]):
    """A store."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]  # as stores have it
        return self[key]


class Unreadable(Shelf):
    """A store that cannot read what it holds."""

    def get(self, key: str) -> bytes:  # type: ignore[override]  # as stores have it
        raise ValueError(key)


def test_where_workers_meet_is_told_through_a_store() -> None:
    store = Shelf()
    chosen = RendezvousStoreInfo.build(0, store, "10.2.2.2", 7)
    assert chosen == RendezvousStoreInfo.build(1, store, None) == RendezvousStoreInfo("10.2.2.2", 7)
    free = RendezvousStoreInfo.build(0, None, None)
    assert (free.master_addr, free.master_port > 0) == (os.uname().nodename, True)
    for wrong in (Shelf(store, MASTER_PORT=b"none"), Unreadable()):
        with pytest.raises(RendezvousStateError, match="no address"):
            RendezvousStoreInfo.build(1, wrong, None)


def test_parameters_of_a_rendezvous() -> None:
    it = RendezvousParameters("etcd", "host:1", "run", 1, 2, on="Yes", off="0", many="12", none=None, odd="maybe")
    assert [it.get_as_bool(key) for key in ("on", "off", "none", "absent")] == [True, False, None, None]
    assert (it.get("on"), it.get("absent", 4), it.get_as_bool("absent", True)) == ("Yes", 4, True)
    assert (it.get_as_int("many"), it.get_as_int("none"), it.get_as_int("absent", 9)) == (12, None, 9)
    for read in (it.get_as_bool, it.get_as_int):
        with pytest.raises(ValueError, match="odd: expected"):
            read("odd")
    for arguments, says in (
        (("", "e", "r", 1, 1), "backend"), (("b", "e", "r", 0, 1), "min_nodes"), (("b", "e", "r", 2, 1), "max_nodes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            RendezvousParameters(*arguments)
