"""What each store does for an agent: one in an agent of the job, and a real etcd."""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._store.hub.addresses import HubSettings, Place
from phalanx._store.hub.hub_store import HubStore
from phalanx._store.hub.server import HubServer
from phalanx._store.store import (
    JOB,
    KEPT,
    OWN,
    Absent,
    Away,
    Back,
    Changed,
    Created,
    Delete,
    Done,
    Entry,
    Put,
    Snapshot,
    Transaction,
    Unchanged,
)
from tests.support.etcd import Etcd
from tests.support.stores import SOON, Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from phalanx._store.store import Store


HAS_GRPC = importlib.util.find_spec("grpc") is not None

pytestmark = [pytest.mark.usefixtures("etcd")] * HAS_GRPC


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    """An etcd; grpc's own thread and descriptors are there as long, and are no leak of a test."""
    from tests.store.test_etcd import client

    with Etcd() as it, client(it.endpoints, "/phalanx/up/") as one:
        one.next(Back)
        yield it


class Hub:
    """A store in an agent of the job."""

    def __init__(self, server: HubServer) -> None:
        self.settings = HubSettings("127.0.0.1", server.port, "run", b"secret", 2)

    @contextmanager
    def client(self) -> Iterator[Client]:
        one = Client(HubStore(self.settings))
        try:
            yield one
        finally:
            one.store.close(5.0)

    def nowhere(self) -> Store:
        """A store that is not there."""
        return HubStore(self.settings._replace(port=1))

    @property
    def code(self) -> str:
        """What makes the store in another process."""
        made = f"hub_store.HubStore(addresses.HubSettings{tuple(self.settings)})"
        return f"from phalanx._store.hub import addresses, hub_store\nstore = {made}\n"


class InEtcd:
    """A store in an etcd, with keys of the test's own."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd, self._prefix = etcd, prefix

    def client(self) -> AbstractContextManager[Client]:
        from tests.store.test_etcd import client

        return client(self._etcd.endpoints, self._prefix)

    def nowhere(self) -> Store:
        """A store that is not there."""
        from phalanx._store.etcd.etcd_store import EtcdStore
        from phalanx._store.etcd.settings import EtcdSettings

        return EtcdStore(EtcdSettings(("127.0.0.1:1",), self._prefix, ttl=2))

    @property
    def code(self) -> str:
        """What makes the store in another process."""
        made = f"etcd_store.EtcdStore(settings.EtcdSettings(({self._etcd.endpoints!r},), {self._prefix!r}, ttl=2))"
        return f"from phalanx._store.etcd import etcd_store, settings\nstore = {made}\n"


@pytest.fixture(params=["hub", pytest.param("etcd", marks=pytest.mark.skipif(not HAS_GRPC, reason="no grpc"))])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub | InEtcd]:
    if request.param == "etcd":
        yield InEtcd(request.getfixturevalue("etcd"), f"/phalanx/{tmp_path.name}/")
        return
    with HubServer(Place(0, ("127.0.0.1",)), run_id="run", secret=b"secret", ttl=2, warn=print) as server:
        yield Hub(server)


def test_transactions_and_their_conditions(place: Hub | InEtcd) -> None:
    with place.client() as one:
        one.next(Back)
        first = one.make(Put("a", b"1", JOB), Put("b", b"1", JOB), given=(Absent("a"),))
        assert first.made
        assert one.make(Put("a", b"2", JOB), given=(Absent("a"),)).made is False
        assert one.make(Put("a", b"2", JOB), given=(Unchanged("a", first.revision),)).made
        assert one.make(Put("a", b"3", JOB), given=(Unchanged("a", first.revision),)).made is False
        assert one.make(Put("a", b"3", JOB), given=(Created("a", first.revision), Absent("c"))).made
        assert one.make(Delete("a"), Delete("nothing")).made
        assert one.make(Put("a", b"4", JOB), given=(Created("a", first.revision),)).made is False
        assert one.below("") == ["b"]
        assert one.make(*(Put(key, b"", KEPT) for key in ("c", "c/1", "c/2/x", "d/1"))).made
        assert one.make(Delete("c/", below=True), Delete("d", below=False), Put("c", b"5", JOB)).made
        assert one.below("") == ["b", "c", "d/1"]


def test_a_watch_tells_all_once_and_in_order(place: Hub | InEtcd) -> None:
    with place.client() as one, place.client() as other:
        one.next(Back)
        made = one.make(Put("job/a", b"0", JOB), Put("else/x", b"0", JOB))
        assert other.watch("job/").entries == (Entry("job/a", b"0", made.revision, made.revision),)
        revisions = [one.make(Put("job/a", b"%d" % number, JOB)).revision for number in range(20)]
        one.make(Put("else/x", b"1", JOB))
        last = one.make(Delete("job/a"), Put("job/b", b"x", JOB))
        told = [other.next(Changed) for _ in range(21)]
        assert [event.revision for event in told] == [*revisions, last.revision]
        assert [event.written[0].value for event in told[:20]] == [b"%d" % number for number in range(20)]
        assert (told[20].deleted, [entry.key for entry in told[20].written]) == (("job/a",), ["job/b"])
        other.store.watch("job/")  # once more
        other.next(Snapshot)
        one.make(Delete("job/b"))
        one.make(Put("job/b", b"x", JOB))
        assert [other.next(Changed).revision for _ in range(2)] == [last.revision + 1, last.revision + 2]
        other.store.unwatch("job/")
        assert other.below("job/") == ["job/b"]
        one.make(Put("job/b", b"y", JOB))
        assert other.told.empty()


def test_the_leases(place: Hub | InEtcd) -> None:
    with place.client() as one:
        with place.client() as other:
            other.next(Back)
            other.make(Put("nodes/b", b"", OWN), Put("job/b", b"", JOB))
            assert sorted(entry.key for entry in one.watch("").entries) == ["job/b", "nodes/b"]
        assert one.next(Changed).deleted == ("nodes/b",)  # at once: it has given its lease back
        one.make(Put("kept/a", b"", JOB))
        one.store.submit(7, Transaction((), (Put("job/c", b"", JOB), Put("kept/a", b"", KEPT))))
        one.store.close(5.0, ends_job=True)
        assert one.next(Done).made  # what was submitted is made before
        with place.client() as third:
            assert [entry.key for entry in third.watch("").entries] == ["kept/a"]
            assert third.make(Delete("", below=True)).made


def test_an_agent_that_is_stopped_for_longer_than_its_lease(place: Hub | InEtcd) -> None:
    script = (
        "import sys\n"
        "from phalanx._store.store import *\n"
        f"{place.code}"
        "def take(event):\n"
        "    print(type(event).__name__, flush=True)\n"
        "    if isinstance(event, (Back, LeaseLost)): store.submit(1, Transaction((), (Put('nodes/b', b'', OWN),)))\n"
        "store.open(take)\n"
        "sys.stdin.read()\n"
        "store.close(5)\n"
    )
    with place.client() as one:
        one.watch("nodes/")
        command = [sys.executable, "-c", script]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        assert [entry.key for entry in one.next(Changed).written] == ["nodes/b"]
        child.send_signal(signal.SIGSTOP)
        assert one.next(Changed).deleted == ("nodes/b",)
        child.send_signal(signal.SIGCONT)
        assert [entry.key for entry in one.next(Changed).written] == ["nodes/b"]
        child.stdin.close()
        assert "LeaseLost" in child.stdout.read().split()
        child.stdout.close()
        assert child.wait() == 0


def test_a_fork_of_the_process_has_no_part_in_it(place: Hub | InEtcd) -> None:
    with place.client() as one:
        one.next(Back)
        one.make(Put("mine", b"", OWN))
        pid = os.fork()
        if pid == 0:
            one.store.submit(99, Transaction((), (Put("child", b"", JOB),)))
            one.store.close(1.0, ends_job=True)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert one.make(Put("a", b"", JOB)).made
        assert one.below("") == ["a", "mine"]


def test_closing_twice_or_before_it_was_reached(place: Hub | InEtcd) -> None:
    store, told = place.nowhere(), queue.SimpleQueue[Any]()
    store.open(told.put)
    assert isinstance(told.get(timeout=SOON), Away)
    store.close(1.0)
    store.close(1.0)
    store.submit(1, Transaction((), ()))
    assert told.empty()
    place.nowhere().close(1.0)


@pytest.mark.long
def test_close_again_after_a_signal_between_its_lines(place: Hub | InEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with place.client() as one, place.client() as other:
        one.next(Back)
        one.make(Put("mine", b"", OWN))
        other.watch("")
        with monkeypatch.context() as patch:
            patch.setattr(one.store, "_call", interrupt)
            with pytest.raises(KeyboardInterrupt):
                one.store.close(5.0)
        one.store.close(5.0)
        assert other.next(Changed).deleted == ("mine",)
