"""The rendezvous of many machines: who is who in each generation, what ends one, and what ends the job."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.agent import RestartPolicy
from phalanx.rendezvous import (
    ManyMachinesRendezvous,
    OneMachineRendezvous,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from phalanx.rendezvous._many_machines import machines_of
from tests.store.test_etcd import client, etcd, grpc_is_up  # noqa: F401 - fixtures
from tests.support import leaks
from tests.support.disks import until
from tests.support.etcd import Etcd, free_port, grpc_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SOON = 20.0
"""Seconds that anything may take; spent only by a test that fails."""

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {"last_call_timeout": 0, "rejoin_delay": 0, "lease_ttl": 2}


@contextmanager
def shut_down(*handlers: Any) -> Iterator[None]:
    """Shut them down at the end, all at once: one that hosts the store waits for the others."""
    try:
        yield
    finally:
        with ThreadPoolExecutor(len(handlers)) as threads:
            list(threads.map(lambda handler: handler.shutdown(), handlers))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what these return, or the RendezvousError that they raise. Each has a thread of its own."""

    def call(one: Callable[[], Any]) -> Any:
        try:
            return one()
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return [done.result(SOON) for done in [threads.submit(call, one) for one in calls]]


def met(*handlers: Any) -> list[RendezvousInfo]:
    """Have them meet."""
    infos = at_once(*(handler.next_rendezvous for handler in handlers))
    for info in infos:
        assert isinstance(info, RendezvousInfo), repr(info)
    return infos


def met_after(ended: threading.Event, handler: ManyMachinesRendezvous) -> RendezvousInfo:
    """Have it meet the others once the generation is over for it, too."""
    hear(ended)
    return handler.next_rendezvous()


def noted(handler: ManyMachinesRendezvous) -> threading.Event:
    """An event that is set when the generation of a handler is ended."""
    event = threading.Event()
    handler.when_ended(event.set)
    return event


def hear(*events: threading.Event) -> None:
    for event in events:
        assert event.wait(SOON)
        event.clear()


class Place:
    """Makes handlers of ranks that are given by hand, on this machine."""

    def __init__(self) -> None:
        self.port = free_port()

    def __call__(self, rank: int, nodes: int = 2, *, nproc: int = 1, **config: Any) -> ManyMachinesRendezvous:
        where = f"127.0.0.1:{self.port}"
        config = {"agent_port": self.port, "rank": rank, **config}
        return ManyMachinesRendezvous(
            RendezvousParameters("static", where, "job", nodes, nodes, **config), nproc=nproc, role="trainer"
        )


@pytest.fixture
def place() -> Place:
    return Place()


# --- ranks that are given


def test_all_meet_again_after_a_failure_and_succeed_together(place: Place) -> None:
    two, one, zero = place(2, 3), place(1, 3, nproc=4), place(0, 3)
    with shut_down(zero, one, two):
        before = threading.active_count()
        infos = met(two, one, zero)
        assert [(info.rank, info.world_size, info.store) for info in infos] == [
            (2, 3, None),
            (1, 3, None),
            (0, 3, None),
        ]
        assert {(it.bootstrap_store_info.master_addr, it.bootstrap_store_info.master_port) for it in infos} == {  # type: ignore[union-attr] # it is there
            ("127.0.0.1", place.port)
        }
        assert [(nproc, role) for _, nproc, role in two.members] == [(1, "trainer"), (4, "trainer"), (1, "trainer")]
        assert (two.get_backend(), two.get_run_id(), two.generation, two.use_agent_store) == ("static", "job", 0, False)
        assert not any(it.num_nodes_waiting() or it.is_closed() for it in (zero, one, two))
        assert threading.active_count() > before
        ended = [noted(it) for it in (zero, one, two)]
        two.tell_failure("ValueError: bad batch", rank=5, exitcode=1)
        hear(*ended)
        assert [it.num_nodes_waiting() for it in (zero, one, two)] == [1, 1, 1]
        infos = met(zero, one, two)
        assert ([info.rank for info in infos], zero.generation, zero.num_nodes_waiting()) == ([0, 1, 2], 1, 0)
        # The next failure is told by the next call alone.
        again = at_once(one.next_rendezvous, lambda: met_after(ended[0], zero), lambda: met_after(ended[2], two))
        assert [info.rank for info in again] == [1, 0, 2]
        assert one.generation == 2
        assert at_once(zero.tell_success, one.tell_success, two.tell_success) == [True, True, True]
        assert all(it.is_closed() for it in (zero, one, two))
        with pytest.raises(RendezvousClosedError, match="the job is over: succeeded"):
            zero.next_rendezvous()
    assert zero.shutdown()
    assert one.shutdown()


def test_success_of_one_is_not_that_of_all(place: Place) -> None:
    one, zero = place(1), place(0)
    with shut_down(zero, one):
        met(zero, one)
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(one.tell_success)
            zero.tell_failure("late", exitcode=-9)
            assert done.result(SOON) is False
        met(zero, one)
        assert at_once(zero.tell_success, one.tell_success) == [True, True]


def test_who_closes_it_ends_it_for_all(place: Place) -> None:
    one, zero = place(1), place(0)
    with shut_down(zero, one):
        met(zero, one)
        ended = noted(zero)
        one.set_closed()
        assert one.is_closed()
        hear(ended)
        assert (zero.num_nodes_waiting(), zero.is_closed()) == (1, True)
        for each in at_once(zero.next_rendezvous, one.next_rendezvous):
            assert type(each) is RendezvousClosedError, repr(each)
            assert "the job is over: stopped" in str(each)


@pytest.mark.slow
def test_who_is_missing_is_logged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    zero = place(0, join_timeout=8)
    with shut_down(zero), pytest.raises(RendezvousTimeoutError):
        zero.next_rendezvous()
    (record,) = (record for record in caplog.records if "waiting" in record.getMessage())
    assert (record.name, record.levelname) == ("phalanx.rendezvous", "WARNING")
    assert re.fullmatch(
        r"waiting at most \d\.\ds more: 1 of 2 nodes has come: 0 \(.*\); node 1 is missing", record.getMessage()
    )


def test_too_few_come_and_nobody_listens(place: Place) -> None:
    zero = place(0, join_timeout=0.3)
    why = r"within 0\.3s, 1 of 2 nodes has come: 0 \(.*\); node 1 is missing"
    with shut_down(zero), pytest.raises(RendezvousTimeoutError, match=why):
        zero.next_rendezvous()
    one = place(1, timeout="0.3")
    with shut_down(one), pytest.raises(RendezvousConnectionError, match=r"has not answered in time: .*refused"):
        one.next_rendezvous()


def test_who_does_not_know_the_secret_is_not_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_JOB_SECRET", "0123456789abcdef")
    zero = place(0)
    monkeypatch.setenv("PHALANX_JOB_SECRET", "fedcba9876543210")
    one = place(1)
    with ThreadPoolExecutor(1) as thread, shut_down(zero, one):
        waits = thread.submit(zero.next_rendezvous)
        with pytest.raises(RendezvousConnectionError, match="this machine is not taken"):
            one.next_rendezvous()
        zero.shutdown()
        with pytest.raises(RendezvousClosedError, match="'job' is closed"):
            waits.result(SOON)


def test_a_port_that_is_taken(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.port)):
        zero = place(0)
        with shut_down(zero), pytest.raises(RendezvousConnectionError, match=f"static: .*{place.port}: .*in use"):
            zero.next_rendezvous()


def test_more_nodes_than_files_may_be_open_are_refused(place: Place) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    zero = place(0, 1000)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1063, hard))
        says = r"each of 1000 nodes, and needs 1064 open files: it may have 1063 \(ulimit -n\)"
        with shut_down(zero), pytest.raises(RendezvousConnectionError, match=says):
            zero.next_rendezvous()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_is_left_and_no_handler_is_set(place: Place) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    unused = place(0)
    assert not unused.is_closed()
    assert unused.shutdown()
    assert unused.is_closed()
    with pytest.raises(RendezvousClosedError):
        unused.next_rendezvous()
    one, zero = place(1), place(0)
    with shut_down(zero, one):
        met(zero, one)
        assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
        ended = noted(zero)
        assert one.shutdown()
        hear(ended)
        assert zero.num_nodes_waiting() == 1
        assert not zero.is_closed()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_fork_has_no_part_in_it(place: Place) -> None:
    one, zero = place(1), place(0)
    with shut_down(zero, one):
        met(zero, one)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                one.next_rendezvous()
            except RendezvousStateError:
                one.set_closed()
                one.tell_failure("of the child")
                code = 7 if one.shutdown() and one.is_closed() and not one.num_nodes_waiting() else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert (zero.num_nodes_waiting(), one.num_nodes_waiting()) == (0, 0)
        assert at_once(zero.tell_success, one.tell_success) == [True, True]


def test_one_thread_at_a_time(place: Place) -> None:
    zero = place(0)
    with ThreadPoolExecutor(1) as thread, shut_down(zero):
        waits = thread.submit(zero.next_rendezvous)
        until(zero._one.locked)
        with pytest.raises(RuntimeError, match="another thread waits"):
            zero.next_rendezvous()
        zero.shutdown()
        assert isinstance(waits.exception(SOON), RendezvousClosedError)


# --- who makes handlers


def test_what_is_built_in() -> None:
    for backend in ("static", "c10d", "etcd", "etcd-v2", "etcd-v3"):
        params = RendezvousParameters(backend, "127.0.0.1:29500", "job", 2, 2, rank=1)
        handler = rendezvous_handler_registry.create_handler(params)
        assert (type(handler), handler.get_backend()) == (ManyMachinesRendezvous, backend)
        assert handler.shutdown()
        alone = rendezvous_handler_registry.create_handler(RendezvousParameters(backend, "", "job", 1, 1))
        assert (type(alone), alone.get_backend()) == (OneMachineRendezvous, backend)


def test_workers_of_one_machine_meet_at_a_static_endpoint() -> None:
    params = RendezvousParameters("static", "localhost:29517", "job", 1, 1, rank=0)
    where = rendezvous_handler_registry.create_handler(params).next_rendezvous().bootstrap_store_info
    assert where == RendezvousStoreInfo("localhost", 29517)


@pytest.mark.parametrize(
    "arguments, config, says",
    [
        (("static", "127.0.0.1:1", "job", 2, 2), {}, "rank: expected the rank of this machine, 0 to 1"),
        (("static", "127.0.0.1:1", "job", 2, 2), {"rank": 2}, "rank: expected .* 0 to 1, got 2"),
        (
            ("static", "127.0.0.1:1", "job", 1, 2),
            {"rank": 0},
            "max_nodes: 1:2: with the backend static, a fixed number of machines takes part",
        ),
        (("etcd", "a:1", "x" * 1001, 2, 2), {}, "run_id: expected 1000 characters or less, got 1001"),
        (("etcd", "a:1", "job", 2, 2, "x" * 256), {}, "local_addr: expected 255 characters or less, got 256"),
        (("etcd", "a:1", "job", 2, 65537), {}, "max_nodes: expected a whole number, 1 to 65536, got 65537"),
        (("c10d", "127.0.0.1:1", "job", 2, 2), {"bind": "a:x"}, "bind: expected a port, 0 to 65535"),
        (("etcd", "a:1", "job", 2, 2), {"bind": "a:1"}, "bind: it is for a store that one of this job's agents has"),
        (("static", "192.0.2.1:1", "job", 2, 2), {"rank": 1}, "endpoint: .* set PHALANX_JOB_SECRET"),
        (("static", "127.0.0.1:65535", "job", 2, 2), {"rank": 1}, "agent_port=PORT is needed"),
        (("c10d", "", "job", 2, 2), {}, "endpoint: expected where the machine is that has the store"),
        (("c10d", "a:1,b:1", "job", 2, 2), {}, "endpoint: expected one machine, which has the store; got 2"),
        (("c10d", "127.0.0.1:x", "job", 2, 2), {}, "endpoint: expected a port"),
        (("c10d", "127.0.0.1:1", "job", 2, 2), {"is_host": "perhaps"}, "is_host: expected yes or no"),
        (("etcd", "a:1", "", 2, 2), {}, "run_id: the machines of a job find each other by it"),
        (("etcd", "a:1", "job", 2, 2), {"user": "x"}, "user and password_file belong together"),
        (("etcd", "a:1", "job", 2, 2), {"rejoin_delay": "soon"}, "rejoin_delay: 'soon': expected a time, 0 or more"),
        (("etcd", "a:1", "job", 2, 2), {"exclude_after": -1}, "exclude_after: expected a whole number"),
        (
            ("c10d", "127.0.0.1:1", "job", 2, 2),
            {"keep": "yes"},
            "keep: one of this job's agents has the store, which ends with the job",
        ),
        (("etcd", "a:1", "job", 2, 2), {"keep": "perhaps"}, "keep: expected yes or no"),
        (("nomad", "a:1", "job", 2, 2), {}, "backend: there is no 'nomad'; there are 'static', 'c10d', 'etcd'"),
    ],
)
def test_parameters_that_will_not_do(arguments: Any, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rendezvous_handler_registry.create_handler(RendezvousParameters(*arguments, **config))


def test_what_the_other_machines_would_not_read_is_refused() -> None:
    handler = ManyMachinesRendezvous(RendezvousParameters("static", "127.0.0.1:29500", "job", 2, 2, rank=0))
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: handler.announce(role="x" * 2001), "role: expected 2000 characters or less, got 2001"),
        (lambda: handler.announce(nproc=(1 << 20) + 1), "nproc: expected a whole number, 1 to 1048576, got 1048577"),
        (lambda: handler.tell_failure("", exitcode=1 << 31), "exitcode: expected a whole number, -2147483647 to "),
        (lambda: handler.tell_failure("", rank=-1), "rank: expected a whole number, 0 to 2147483647, got -1"),
    ]
    for call, says in refused:
        with pytest.raises(ValueError, match=f"^{says}"):
            call()


def test_insecure_and_what_is_passed_over() -> None:
    params = RendezvousParameters("c10d", "192.0.2.1", "job", 2, 2, read_timeout=60, is_host=False)
    with pytest.raises(ValueError, match="PHALANX_JOB_SECRET"):
        ManyMachinesRendezvous(params)
    assert ManyMachinesRendezvous(params, insecure=True).shutdown()
    with pytest.raises(ValueError, match="nproc: expected"):
        ManyMachinesRendezvous(params, insecure=True, nproc=0)


@pytest.mark.parametrize("keep", [True, "yes", False, None])
def test_what_the_job_was_is_kept_if_that_is_wanted(keep: object) -> None:
    machines = machines_of(RendezvousParameters("etcd", "a:1", "job", 2, 2, keep=keep))
    assert machines.rules(RestartPolicy(0), 1.0, 0.0).keep is bool(keep)


def make_alone(params: RendezvousParameters) -> OneMachineRendezvous:
    return OneMachineRendezvous(params.run_id, backend=params.backend)


def test_a_registry() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", make_alone)
    registry.register("mine", make_alone)
    with pytest.raises(ValueError, match="'mine' is taken: <function make_alone"):
        registry.register("mine", OneMachineRendezvous)  # type: ignore[arg-type] # it is refused
    with pytest.raises(ValueError, match="backend: expected the name"):
        registry.register("", make_alone)
    with pytest.raises(TypeError, match="creator: expected a callable"):
        registry.register("none", None)  # type: ignore[arg-type] # it is refused
    assert registry.create_handler(RendezvousParameters("mine", "", "job", 1, 1)).get_run_id() == "job"
    registry.register("other", lambda _: OneMachineRendezvous(backend="mine"))
    with pytest.raises(RuntimeError, match="for the backend 'other' calls itself 'mine'"):
        registry.create_handler(RendezvousParameters("other", "", "job", 1, 1))
    with pytest.raises(ValueError, match="there is no 'static'; there are 'mine', 'other'"):
        registry.create_handler(RendezvousParameters("static", "", "job", 1, 1))
    with pytest.raises(ValueError, match=r"there is no 'static'; none is registered$"):
        RendezvousHandlerRegistry().create_handler(RendezvousParameters("static", "", "job", 1, 1))


PLUG_IN = """
class Handler:
    def __init__(self, params): self.params = params
    def get_backend(self): return self.params.backend
def make(): return Handler
def make_nothing(): return None
"""


def test_backends_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found by entry points; a handler need not be one of ours, and is used as it is."""
    (tmp_path / "a_plug_in_of_the_tests.py").write_text(PLUG_IN)
    info = tmp_path / "plug_in-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[torchrun.handlers]\ntheirs = a_plug_in_of_the_tests:make\nboth = nowhere:make\nc10d = nowhere:make\n"
        "[phalanx.rendezvous]\nboth = a_plug_in_of_the_tests:make\nodd = a_plug_in_of_the_tests:make_nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("plug-in") == "1"
    for backend in ("theirs", "both"):
        params = RendezvousParameters(backend, "anywhere", "job", 1, 4, of="its own")
        handler: Any = rendezvous_handler_registry.create_handler(params)
        assert (type(handler).__module__, handler.params) == ("a_plug_in_of_the_tests", params)
    with pytest.raises(TypeError, match=r"'odd' of phalanx.rendezvous: expected a creator"):
        rendezvous_handler_registry.create_handler(RendezvousParameters("odd", "", "job", 1, 1))
    with pytest.raises(ValueError, match=r"there is no 'else'; .*'etcd-v3', .*'theirs'"):
        rendezvous_handler_registry.create_handler(RendezvousParameters("else", "", "job", 1, 1))


# --- an etcd


@pytest.fixture
def with_grpc() -> Iterator[None]:
    """Let grpc keep what it keeps: see the client of `tests.store.test_etcd`."""
    if importlib.util.find_spec("grpc") is None:  # not imported: what it reads in the environment is read once
        pytest.skip("the extra `etcd` is not installed")
    before = grpc_sockets()
    yield
    gc.collect()
    leaks.kept |= grpc_sockets() - before


@pytest.mark.usefixtures("grpc_is_up", "with_grpc")
def test_one_hosts_the_store_and_machines_come_and_go() -> None:
    where = f"127.0.0.1:{free_port()}"

    def make() -> Any:
        return rendezvous_handler_registry.create_handler(RendezvousParameters("c10d", where, "job", 1, 2, **QUICK))

    first, second, spare, late = (make() for _ in range(4))
    with ThreadPoolExecutor(2) as threads, shut_down(first, second, spare, late):
        met(first)
        ended = noted(first)
        comes = threads.submit(second.next_rendezvous)
        hear(ended)  # the newcomer ends the generation
        info = met(first)[0]
        assert (info.rank, info.world_size, comes.result(SOON).rank) == (0, 2, 1)
        waits = threads.submit(spare.next_rendezvous)
        until(lambda: spare._node.is_spare)
        assert second.shutdown()  # a departure is not a close
        hear(ended)
        assert [first.next_rendezvous().world_size, waits.result(SOON).rank] == [2, 1]
        waits = threads.submit(late.next_rendezvous)
        until(lambda: late._node.is_spare)
        assert at_once(first.tell_success, spare.tell_success) == [True, True]
        with pytest.raises(RendezvousGracefulExitError, match="the job has succeeded without this machine"):
            waits.result(SOON)


@pytest.mark.usefixtures("grpc_is_up", "with_grpc")
def test_an_etcd_that_is_there(etcd: Etcd) -> None:  # noqa: F811 - the fixture
    def make(least: int = 2) -> Any:
        config = {**QUICK, "join_timeout": 5}
        return rendezvous_handler_registry.create_handler(
            RendezvousParameters("etcd-v2", etcd.endpoints, f"job/{os.getpid()}", least, 2, **config)
        )

    one, other, odd = make(), make(), make(1)
    with shut_down(one, other, odd):
        infos = met(one, other)
        assert sorted(info.rank for info in infos) == [0, 1]
        (where,) = {info.bootstrap_store_info for info in infos}
        assert where is not None
        assert where.master_port > 0
        with pytest.raises(RendezvousConnectionError, match="the job is one of 2 nodes, and this node was told 1 to 2"):
            odd.next_rendezvous()
        ended = noted(one)
        other.set_closed()
        hear(ended)
        ends = at_once(one.next_rendezvous, other.next_rendezvous)
        assert [type(each) for each in ends] == [RendezvousClosedError] * 2, ends


@pytest.mark.usefixtures("grpc_is_up")
def test_a_program_that_takes_part_through_grpc_may_fork(etcd: Etcd) -> None:  # noqa: F811 - the fixture
    """Its children end by themselves, however they leave; what it holds in the store stays its own."""
    where = etcd.endpoints, f"forks/{os.getpid()}"
    forks = ("-W", "ignore:This process:DeprecationWarning")  # has threads: an error of it since Python 3.15
    command = [sys.executable, "-W", "error", *forks, "-m", "tests.support.forking_host", *where]
    program = subprocess.run(command, capture_output=True, text=True, timeout=3 * SOON, check=False)
    assert (program.returncode, program.stderr) == (0, "")
    assert program.stdout.splitlines() == [
        "only leaves 0",
        "drops 0",
        "meets 0",
        "shuts down 0",
        "of multiprocessing 0 [0, 2, 4]",
        "ended [0, 0]",
        "again [1, 1] [True, True]",
    ]


@pytest.mark.usefixtures("grpc_is_up", "with_grpc")
def test_the_first_machine_leaves_and_the_job_goes_on(etcd: Etcd) -> None:  # noqa: F811 - the fixture
    def make() -> ManyMachinesRendezvous:
        where = etcd.endpoints
        return ManyMachinesRendezvous(RendezvousParameters("etcd", where, f"left/{os.getpid()}", 1, 2, **QUICK))

    first, second = make(), make()
    with ThreadPoolExecutor(1) as thread, shut_down(first, second):
        met(first)
        ended = noted(first)
        comes = thread.submit(second.next_rendezvous)
        hear(ended)
        assert [met(first)[0].world_size, comes.result(SOON).rank] == [2, 1]
        ended = noted(second)
        leaves = thread.submit(first.shutdown)  # it leads
        hear(ended)
        info = second.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert leaves.result(SOON)
        assert second.why_ended == ""
        assert second.tell_success()
