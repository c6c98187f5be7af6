"""Agents, as people write them for torch. Only the imports depend on the library, which the command line names.

What it prints on stdout must not depend on it. The second argument is the part to be run.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.argv[1] != "torch":
    from phalanx.agent import (
        LocalElasticAgent,
        RunResult,
        SimpleElasticAgent,
        Worker,
        WorkerGroup,
        WorkerSpec,
        WorkerState,
    )  # fmt: skip
    from phalanx.multiprocessing import DefaultLogsSpecs, ProcessFailure, SignalException, Std
    from phalanx.rendezvous import (
        RendezvousClosedError,
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
    )  # fmt: skip

    class Store(dict[str, bytes]):
        def set(self, key: str, value: bytes) -> None:
            self[key] = value

else:
    from torch.distributed import HashStore as Store
    from torch.distributed.elastic.agent.server import (
        RunResult,
        SimpleElasticAgent,
        Worker,
        WorkerGroup,
        WorkerSpec,
        WorkerState,
    )
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
    )  # fmt: skip


VARIABLES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
             "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
             "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
             "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")  # fmt: skip


class Handler(RendezvousHandler):
    def __init__(self) -> None:
        self.calls = self.waiting = 0

    def get_backend(self) -> str:
        return "own"

    def next_rendezvous(self) -> RendezvousInfo:
        self.calls += 1
        return RendezvousInfo(Store(), 0, 1, RendezvousStoreInfo("10.0.0.1", 4000 + self.calls))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        print("closed")

    def num_nodes_waiting(self) -> int:
        waiting, self.waiting = self.waiting, 0
        return waiting

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        print("shut down")
        return True


def spec(entrypoint: Any, *args: Any, **options: Any) -> WorkerSpec:
    handler = options.pop("rdzv_handler", None) or Handler()
    return WorkerSpec("trainer", 2, handler, entrypoint=entrypoint, args=args, **{"monitor_interval": 0.01, **options})


class Scripted(SimpleElasticAgent):
    """Prints which of its hooks are called, and how the group is then."""

    script: list[Any]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [(worker.local_rank, worker.global_rank, worker.role_rank) for worker in worker_group.workers]
        sizes = [(worker.world_size, worker.role_world_size) for worker in worker_group.workers]
        place = worker_group.group_rank, worker_group.group_world_size
        meet = worker_group.master_addr, worker_group.master_port
        print("start", worker_group.state, ranks, sizes, place, meet, self._remaining_restarts)
        return {worker.local_rank: f"worker {worker.local_rank}" for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup, *more: Any, **options: Any) -> None:
        print("stop", worker_group.state, more, options)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        found = self.script.pop(0)
        print("monitor", worker_group.state, [worker.id for worker in worker_group.workers])
        if callable(found):
            found = found(worker_group)
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, RunResult)
        return found

    def _shutdown(self, *more: Any, **options: Any) -> None:
        print("shutdown", more, {name: float(value) for name, value in options.items()})


def play(title: str, *script: Any, **options: Any) -> None:
    print("#", title)
    agent = Scripted(spec(print, max_restarts=1, **options))
    agent.script = list(script)
    try:
        result = agent.run()
        print(result.state, result.return_values, {rank: each.exitcode for rank, each in result.failures.items()})
    except Exception as error:  # noqa: BLE001 - which it is, is compared
        print(type(error).__name__, error)
    print(len(agent.script), "left")


def hooks() -> None:
    healthy, unhealthy = RunResult(WorkerState.HEALTHY), RunResult(WorkerState.UNHEALTHY)
    succeeded = RunResult(WorkerState.SUCCEEDED, return_values={0: "a", 1: "b"})
    failed = RunResult(WorkerState.FAILED, failures={1: ProcessFailure(1, 4242, 7, "<N/A>")})
    play("succeeds", healthy, succeeded)
    play("fails once", healthy, failed, healthy, succeeded)
    play("fails twice", failed, failed, succeeded)
    play("is unhealthy", unhealthy, unhealthy)
    play("raises", ZeroDivisionError("boom"))
    play("a signal", SignalException("came", signal.SIGUSR1))
    play("closed", RendezvousClosedError("over"))

    def another_waits(group: WorkerGroup) -> RunResult:
        setattr(group.spec.rdzv_handler, "waiting", 1)  # noqa: B010 - it is ours
        return healthy

    play("another machine waits", another_waits, succeeded)


def look() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


def fail_until(attempt: int) -> int:
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < attempt:
        raise ValueError("too early")
    return 10 * int(os.environ["RANK"])


def one_exits() -> None:
    if os.environ["RANK"] == "1":
        sys.exit(7)
    threading.Event().wait()


def echo(*values: Any) -> tuple[Any, ...]:
    return values


def wait(up: str) -> None:
    open(f"{up}.{os.environ['RANK']}", "x").close()
    threading.Event().wait()


def signal_when_up(agent: LocalElasticAgent, up: str) -> None:
    """Signal this process once the workers are in their function.

    torch can lose a signal that comes while it starts them; and one that is passed on to a fork before it has begun
    raises in it, which runs the rest of this program then, too.
    """
    pause = threading.Event()
    while agent.get_worker_group().state != WorkerState.HEALTHY or not all(map(os.path.exists, (f"{up}.0", f"{up}.1"))):
        pause.wait(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def run(title: str, it: WorkerSpec, *, signalled: str = "", **options: Any) -> None:
    print("#", title)
    agent = LocalElasticAgent(it, DefaultLogsSpecs(tee=options.pop("tee", Std.NONE)), start_method="fork", **options)
    if signalled:
        threading.Thread(target=signal_when_up, args=(agent, signalled)).start()
    try:
        result = agent.run()
        print(result.state, result.is_failed(), sorted(result.return_values.items()))
        print({rank: (each.local_rank, each.exitcode, each.signal_name()) for rank, each in result.failures.items()})
    except Exception as error:  # noqa: BLE001 - which it is, is compared
        print(type(error).__name__, getattr(error, "sigval", ""))
    print([(worker.local_rank, worker.global_rank) for worker in agent.get_worker_group().workers])


def groups() -> None:
    run("environment", spec(look))
    run("an address", spec(look, master_addr="a.b", master_port=77))
    run("one device", spec(look, virtual_local_rank=True))
    run("restarts", spec(fail_until, 2, max_restarts=2))
    run("gives up", spec(one_exits, max_restarts=0))
    run("arguments", spec(echo, "${local_rank}", 5, "cuda:${local_rank}", ("${local_rank}",)))
    run("a program", spec("sh", "-c", "exit $((RANK * ${local_rank} * 3))", max_restarts=0))
    run("another program", spec("sh", "-c", "exit $((TORCHELASTIC_RESTART_COUNT == 0))"))
    with tempfile.TemporaryDirectory() as folder:
        up = os.path.join(folder, "up")
        run("a signal", spec(wait, up), signalled=up)
    run("no such program", spec("there-is-no-such-program"))
    prefix = "<${role_name} ${rank} ${local_rank}> "
    run("prefixes", spec("sh", "-c", "test $RANK = 0 || echo hello"), tee=Std.ALL, log_line_prefix_template=prefix)


def values() -> None:
    print([(str(state), state.value, WorkerState.is_running(state)) for state in WorkerState])
    print(RunResult(WorkerState.FAILED), RunResult(WorkerState.FAILED).is_failed(), RunResult(WorkerState.HEALTHY))
    group = WorkerGroup(spec("echo"))
    print(group.state, group.store, group.group_rank, group.group_world_size, group.master_addr, group.master_port)
    worker = Worker(3)
    print(worker.id, worker.global_rank, worker.role_rank, worker.world_size, worker.role_world_size)
    print(spec("echo").get_entrypoint_name(), spec(look).get_entrypoint_name(), spec("echo").max_restarts)
    found = RendezvousParameters("b", "host:1", "run", 1, 2, a="1", b="Yes", c="no", d="maybe", e=True, f=12, g=None)
    print(found.backend, found.endpoint, found.run_id, found.min_nodes, found.max_nodes, found.local_addr, found.config)
    for key in "abcdefgh":
        for read in (found.get, found.get_as_bool, found.get_as_int):
            try:
                print(key, read(key))
            except ValueError:
                print(key, "ValueError")
    store = Store()
    print(RendezvousStoreInfo.build(0, store, "10.0.0.2", 99) == RendezvousStoreInfo.build(1, store, None))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a text stream; workers are forks
    {"values": values, "hooks": hooks, "groups": groups}[sys.argv[2]]()
    sys.stdout.flush()
    os._exit(0)  # after a start that fails, torch leaves threads behind for which an exit would wait
