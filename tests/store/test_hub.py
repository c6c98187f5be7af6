"""The store in rank 0's agent: what it promises, and what becomes of it among the slow, the strange and the dead."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._rendezvous.settings import Machines
from phalanx._store.etcd.settings import EtcdSettings
from phalanx._store.hub import link, messages, server, wire
from phalanx._store.hub.addresses import HubSettings, Place, is_taken, listen
from phalanx._store.hub.hub_store import HubStore
from phalanx._store.hub.server import HubServer
from phalanx._store.store import (
    JOB,
    OWN,
    Away,
    Back,
    Changed,
    Delete,
    Done,
    Entry,
    Fetched,
    LeaseLost,
    Put,
    Refused,
    Snapshot,
    Transaction,
)
from tests.support.hub import Between, HubProcess, Impostor, Stranger
from tests.support.stores import SOON, Client

if TYPE_CHECKING:
    from collections.abc import Iterator


NEVER = (Away, LeaseLost, Refused)


class Hub:
    """A store in this process, and what it has warned of."""

    def __init__(self, ttl: int = 2, secret: bytes = b"secret", host: str = "127.0.0.1") -> None:
        self.warned: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.server = HubServer(Place(0, (host,)), run_id="run", secret=secret, ttl=ttl, warn=self.warned.put)
        self.server.start()
        self.settings = HubSettings(host, self.server.port, "run", secret, ttl)

    @contextmanager
    def client(self, **more: Any) -> Iterator[Client]:
        with client(self.settings._replace(**more)) as one:
            yield one


@contextmanager
def client(settings: HubSettings) -> Iterator[Client]:
    one = Client(HubStore(settings))
    try:
        yield one
    finally:
        one.store.close(5.0)
        assert len(one.threads) <= 1  # on one thread, whatever it tells


@pytest.fixture
def hub() -> Iterator[Hub]:
    it = Hub()
    yield it
    it.server.close(0.0)


def test_a_fork_closes_the_sockets_of_the_store(hub: Hub) -> None:
    with hub.client() as one:
        one.next(Back)
        pid = os.fork()
        if pid == 0:
            hub.server.close(5.0)
            sockets = [name for name in os.listdir("/proc/self/fd") if _is_socket(name)]
            os._exit(len(sockets))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == _sockets() - 3  # its listener, and both ends
        assert one.make(Put("b", b"", JOB)).made


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except OSError:
        return False


def _sockets() -> int:
    return sum(_is_socket(name) for name in os.listdir("/proc/self/fd"))


def test_a_watch_that_begins_again_has_its_own_snapshot() -> None:
    def told(number: int, revision: int) -> bytes:
        return messages.write(messages.Read(number, revision, (), more=False))

    def changes(revision: int) -> bytes:
        return messages.write(messages.Changes("job/", revision, (Entry("job/a", b"", 1, revision),), ()))

    with Impostor(b"secret") as store, client(store.settings) as one:
        store.let_in()
        one.next(Back)
        for action in (one.store.watch, one.store.unwatch, one.store.watch):
            action("job/")
        assert [type(messages.read_request(store.read())).__name__ for _ in range(3)] == ["Watch", "Unwatch", "Watch"]
        for body in (told(1, 1), changes(2), told(2, 3), changes(4)):
            store.say(body)
        first, second = one.told.get(timeout=SOON), one.told.get(timeout=SOON)
        assert (type(first), first.revision, type(second), second.revision) == (Snapshot, 3, Changed, 4)
        store.sock.close()


@pytest.mark.slow
def test_many_large_values(hub: Hub) -> None:
    with hub.client() as one, hub.client() as other:
        one.next(Back)
        for number in range(256):
            one.store.submit(number, Transaction((), (Put(f"evidence/{number:03}", bytes(128 << 10), JOB),)))
        assert [one.next(Done).made for _ in range(256)] == [True] * 256
        other.store.fetch(1, "evidence/")
        found = other.next(Fetched, never=NEVER)
        assert found.entries is not None
        assert [len(entry.value) for entry in found.entries] == [128 << 10] * 256
        assert [entry.key for entry in found.entries] == [f"evidence/{number:03}" for number in range(256)]
        assert one.make(Put("a", bytes((32 << 20) + 1), JOB)).made is None
        assert one.make(Put("\udcff", b"", JOB)).made is None
        assert one.make(Put("a", b"", JOB)).made
        assert one.told.empty()


def test_an_agent_that_comes_back_soon_goes_on(hub: Hub) -> None:
    with Between(hub.settings.port) as between, hub.client() as one, hub.client(port=between.port) as other:
        one.watch("")
        other.watch("")
        other.make(Put("nodes/b", b"", OWN))
        one.next(Changed)
        between.cut()
        assert other.next(Away).why == "the connection was closed"
        assert other.make(Put("nodes/b", b"", OWN)).made is None
        made = one.make(Put("job/a", b"", JOB))
        between.is_cut = False
        other.next(Back, never=NEVER)
        snapshot = other.next(Snapshot)
        assert (snapshot.revision, [entry.key for entry in snapshot.entries]) == (made.revision, ["job/a", "nodes/b"])
        made = one.make(Put("job/a", b"2", JOB))
        assert other.next(Changed).revision == made.revision


@pytest.mark.slow
def test_an_agent_that_comes_back_late_has_lost_its_lease() -> None:
    hub = Hub(ttl=1)
    try:
        with Between(hub.settings.port) as between, hub.client() as one, hub.client(port=between.port) as other:
            one.watch("")
            other.next(Back)
            other.make(Put("nodes/b", b"", OWN), Put("nodes/c", b"", OWN), Put("job/b", b"", JOB))
            one.next(Changed)
            between.cut()
            cut = time.monotonic()
            assert one.next(Changed, never=NEVER).deleted == ("nodes/b", "nodes/c")
            assert 0.5 < time.monotonic() - cut < 5
            between.is_cut = False
            other.next(LeaseLost, never=Back)
            other.next(Back)
            assert other.make(Put("nodes/b", b"", OWN)).made
            assert other.below("") == ["job/b", "nodes/b"]
    finally:
        hub.server.close(0.0)


def test_a_taken_over_connection_leaves_nothing_of_the_old(hub: Hub) -> None:
    """What was on its way in the old one is not made after what the new one makes."""
    with Stranger(hub.settings) as old:
        old.greet()
        session = messages.read_welcome(old.read()).session
        with Stranger(hub.settings) as new:
            new.greet(session)
            assert messages.read_welcome(new.read()).session == session
            assert old.read() == b""


@pytest.mark.slow
def test_a_store_that_is_killed_and_starts_again() -> None:
    with HubProcess() as hub, client(hub.settings()) as one:
        one.watch("job/")
        one.make(Put("job/a", b"1", JOB), Put("job/mine", b"", OWN))
        first = next(event.store for event in one.all if isinstance(event, Back))
        hub.kill()
        assert one.next(Away).why
        assert one.make(Put("job/a", b"2", JOB)).made is None
        hub.start()
        one.next(LeaseLost, never=Back)
        assert one.next(Back).store != first  # its revisions begin anew
        assert one.next(Snapshot).entries == ()
        assert one.make(Put("job/a", b"3", JOB)).revision == 2


@pytest.mark.slow
def test_a_stopped_store_is_missed_in_time_and_loses_nobody() -> None:
    with HubProcess(ttl=1) as hub, client(hub.settings()) as one, client(hub.settings()) as other:
        one.watch("")
        other.next(Back)
        other.make(Put("nodes/b", b"", OWN))
        one.next(Changed)
        hub.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, hub.process.pid, os.WSTOPPED | os.WNOWAIT)  # until then, it may answer
        stopped = time.monotonic()
        other.store.submit(77, Transaction((), (Put("nodes/c", b"", OWN),)))
        assert "no answer within 0.6 s" in one.next(Away).why
        assert other.next(Done).made is None
        assert time.monotonic() - stopped < 3
        threading.Event().wait(stopped + 1.5 - time.monotonic())  # longer than the ttl
        hub.process.send_signal(signal.SIGCONT)
        one.next(Back, never=LeaseLost)
        other.next(Back, never=LeaseLost)
        assert "nodes/b" in one.below("nodes/")


@pytest.mark.slow
def test_a_stopped_agent_reads_all_before_it_judges() -> None:
    gate = threading.Event()

    class Stopped(Client):
        def _take(self, event: Any) -> None:
            super()._take(event)
            if isinstance(event, Snapshot):
                gate.wait(SOON)

    with Impostor(b"") as store:
        one = Stopped(HubStore(store.settings._replace(timeout=0.2)))
        store.let_in()
        one.next(Back)
        one.store.watch("job/")
        one.store.submit(1, Transaction((), ()))
        store.read()
        store.read()
        store.say(messages.write(messages.Read(1, 1, (), more=False)))
        one.next(Snapshot)
        store.say(messages.write(messages.Made(2, made=True, revision=1)))
        threading.Event().wait(0.4)  # longer than an answer may take
        gate.set()
        assert one.next(Done, never=Away).made
        one.store.close(0.0)


def test_a_client_without_the_secret_is_refused_and_logged_once(hub: Hub) -> None:
    where = f"127.0.0.1:{hub.settings.port}"
    for more, why in (
        ({"secret": b"wrong"}, f"the job's secret is not the one of {where}"),
        ({"secret": b""}, f"the job's secret is not the one of {where}"),
        ({"run_id": "other"}, f"{where} serves the job 'run'; this agent is of the job 'other'"),
    ):
        with hub.client(**more) as one:
            assert one.next(Refused, never=(Away, Back)).why == why
            assert one.make(Put("a", b"", JOB)).made is None
    for why in ("it does not know the job's secret", "it is of the job 'other'; the one here is 'run'"):
        assert hub.warned.get(timeout=SOON) == f"the agent at 127.0.0.1 is refused: {why}"
    assert hub.warned.empty()


def test_no_secret_is_a_secret_of_its_own() -> None:
    hub = Hub(secret=b"", host="::1")
    try:
        with hub.client() as one, hub.client(secret=b"x") as other:
            assert one.watch("").entries == ()
            assert (
                other.next(Refused, never=Back).why == f"the job's secret is not the one of [::1]:{hub.settings.port}"
            )
    finally:
        hub.server.close(0.0)


def test_a_store_that_does_not_know_the_secret_is_found_out() -> None:
    """One that lets everybody in, to hear what they say."""
    with Impostor(b"guess") as store, client(store.settings._replace(secret=b"secret")) as one:
        store.let_in()
        why = one.next(Refused, never=(Away, Back)).why
        assert why == f"{store.settings.where} does not know the job's secret"


def test_what_is_put_into_a_connection_to_an_agent_is_not_told() -> None:
    body = messages.write(messages.Read(1, 1, (), more=False))
    with Impostor(b"") as store, client(store.settings) as one:
        for seal in (wire.checksum, wire.Seal(b"guess")):
            store.let_in()
            one.next(Back, never=LeaseLost)
            one.store.watch("job/")
            store.read()
            store.sock.sendall(wire.frame(body, seal))
            assert "a message is not authentic" in one.next(Away, never=(Snapshot, Refused)).why
            store.sock.close()


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.6\r\n", wire.frame(b"\xc1", wire.checksum), bytes(36)], ids=["ssh", "damaged", "zeros"]
)
def test_what_answers_is_no_store(said: bytes) -> None:
    with Impostor(b"") as store, client(store.settings) as one:
        store.accept()
        store.sock.sendall(said)
        why = one.next(Away, never=(Back, Refused)).why
        spoken = ", it speaks SSH" if said.startswith(b"SSH") else ""
        assert why == f"what answers there is no agent{spoken}: another port is needed"
        store.sock.close()
        store.let_in()
        one.next(Back, never=LeaseLost)
        store.sock.close()


@pytest.mark.parametrize("how", ["repeated", "changed", "plain", "swapped", "too long"])
def test_nothing_can_be_put_into_a_connection(hub: Hub, how: str) -> None:
    beat = messages.write(messages.Beat())
    with hub.client() as one, Stranger(hub.settings) as agent:
        one.watch("")
        agent.greet()
        agent.read()
        put = messages.write(messages.Submit(1, Transaction((), (Put("a", b"x" * 100, JOB),))))
        frame, after = wire.frame(put, agent.seal), wire.frame(beat, agent.seal)
        if how == "repeated":
            said = frame + frame
        elif how == "changed":
            said = frame + after.replace(b"beat", b"bear")
        elif how == "plain":
            said = frame + wire.frame(beat, wire.checksum)
        elif how == "swapped":
            said = after + frame
        else:
            said = frame + ((64 << 20) + 1).to_bytes(4, "big") + bytes(32)
        agent.sock.sendall(said)
        heard = [agent.read()]
        while heard[-1]:
            heard.append(agent.read())
        assert len(heard) == (1 if how == "swapped" else 2)
        assert len(one.below("")) == (0 if how == "swapped" else 1)


def test_bytes_changed_on_their_way_end_the_connection_only(hub: Hub) -> None:
    with Between(hub.settings.port) as between, hub.client(port=between.port) as one:
        one.next(Back)
        between.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        one.store.submit(1, Transaction((), (Put("a", b"1", JOB),)))
        one.next(Away, never=Refused)
        between.change = bytes
        one.next(Back, never=LeaseLost)
        assert one.make(Put("b", b"", JOB)).made
        assert one.below("") == ["b"]


@pytest.mark.slow
def test_strangers_disturb_nobody(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WITHIN", 0.3)
    hello = wire.frame(b"x" * 1024, wire.checksum)
    with hub.client() as one:
        one.next(Back)
        before = _sockets()
        said = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), bytes(4000), b"\xff" * 36]
        said += [hello, hello[:500], bytes(4) + wire.checksum(b"")]
        strangers = []
        for number in range(300):
            stranger = Stranger(hub.settings)
            strangers.append(stranger)
            stranger.sock.send(said[number % len(said)])
            if number % 3 == 0:  # an end by RST
                stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stranger.sock.close()
        assert one.make(Put("a", b"", JOB)).made
        with hub.client() as other:
            other.next(Back, never=NEVER)
        for number, stranger in enumerate(strangers):
            if number % 3:
                assert stranger.read() == b""
            stranger.sock.close()
        one.watch("")  # the server has come so far: its sockets are closed
        assert _sockets() == before
        assert one.told.empty()
        assert hub.warned.get(timeout=SOON).startswith("what has come from 127.0.0.1 is no agent, and is turned away")
        assert hub.warned.empty()


def test_among_too_many_strangers_the_oldest_goes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_NEWCOMERS", 8)
    monkeypatch.setattr(server, "WITHIN", 100.0)
    strangers = [Stranger(hub.settings) for _ in range(20)]
    with hub.client() as one:
        one.next(Back, never=NEVER)
        assert [stranger.read() for stranger in strangers[:11]] == [b""] * 11
        strangers[-1].greet()
        assert messages.read_welcome(strangers[-1].read()).ttl == 2
        assert one.below("") == []
    for stranger in strangers:
        stranger.sock.close()


@pytest.mark.slow
def test_who_does_not_read_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MOST_QUEUED", 8 << 20)
    with hub.client() as one, Stranger(hub.settings) as slow:
        one.next(Back)
        slow.greet()
        slow.say(messages.write(messages.Watch(1, "")))
        heard = 0
        for number in range(30):  # beyond what the kernel takes for it
            assert one.make(Put("a", os.urandom(1 << 20), JOB)).made, number
        while slow.read():
            heard += 1
        assert heard < 30
        assert one.below("") == ["a"]


@pytest.mark.slow
def test_no_descriptor_is_left_for_another_connection() -> None:
    with HubProcess() as hub, client(hub.settings()) as one:
        one.next(Back)
        limits = resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE)
        most = max(map(int, os.listdir(f"/proc/{hub.process.pid}/fd")))
        resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE, (most + 1, limits[1]))
        before = hub.ticks
        with client(hub.settings(timeout=0.7)) as other:
            assert other.next(Away).why.startswith("what listens there is silent")
            assert hub.ticks - before < 0.3
            assert one.make(Put("a", b"", JOB)).made
            resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE, limits)
            other.next(Back)
            assert other.below("") == ["a"]


def test_the_store_may_come_later_than_its_agents() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    with client(HubSettings("localhost", port, "run", b"", 2)) as one:
        one.store.watch("")
        assert one.next(Away).why == "nobody listens there: Connection refused"
        with HubServer(Place(port, ("127.0.0.1",)), run_id="run", secret=b"", ttl=2, warn=print):
            one.next(Back, never=Away)
            assert one.next(Snapshot).entries == ()
            one.store.close(5.0)


def test_a_port_that_is_taken(hub: Hub) -> None:
    port = hub.settings.port
    server = HubServer(Place(port, ("127.0.0.1",)), run_id="run", secret=b"", ttl=2, warn=print)
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: Address already in use$"):
        server.start()
    server.close(1.0)
    with pytest.raises(OSError, match=r"192\.0\.2\.1:1: Cannot assign requested address$"):
        HubServer(Place(1, ("192.0.2.1",)), run_id="run", secret=b"", ttl=2, warn=print).start()


def test_of_several_addresses_the_first_tells_who_has_the_store() -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(OSError, match=rf"127\.0\.0\.2:{port}: Address already in use$") as caught:
            listen(Place(port, ("127.0.0.1", "127.0.0.2")))
        assert not is_taken(caught.value)
        with pytest.raises(OSError, match=rf"127\.0\.0\.2:{port}: Address already in use$") as caught:
            listen(Place(port, ("127.0.0.2", "127.0.0.3")))
        assert is_taken(caught.value)


def test_the_end_waits_for_agents_that_are_still_there(hub: Hub) -> None:
    with hub.client() as one, hub.client() as other:
        one.next(Back)
        other.watch("job/")
        one.make(Put("job/state", b"over", JOB))
        one.store.close(5.0)
        ends = threading.Thread(target=hub.server.close, args=(SOON,))
        ends.start()
        assert other.next(Changed).written[0].value == b"over"
        while True:  # the thread may not have begun to close
            with hub.client() as early:
                if isinstance(early.told.get(timeout=SOON), Away):
                    break
        with hub.client() as late, hub.client(run_id="next") as following:  # not refused: another store will be here
            assert "what listens there closes the connection: " in late.next(Away, never=Refused).why
            assert following.next(Away, never=Refused)
            assert other.make(Put("job/a", b"", JOB)).made
            other.store.close(5.0)
            ends.join(SOON)
            assert not ends.is_alive()
    hub.server.close(1.0)


@pytest.mark.slow
def test_the_end_waits_no_longer_than_it_may(hub: Hub) -> None:
    with hub.client() as one:
        one.next(Back)
        began = time.monotonic()
        hub.server.close(0.2)
        assert 0.1 < time.monotonic() - began < 5
        one.next(Away)


@pytest.mark.slow
def test_a_resolver_that_takes_its_time_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = socket.getaddrinfo

    def slow(host: str, *args: Any, **more: Any) -> Any:
        if host == "slow.invalid" and "flags" not in more:
            gate.wait(SOON)
        return real(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with client(HubSettings("slow.invalid", 1, "run", b"", 2, timeout=0.2)) as one:
        assert one.next(Away).why == "its name was not resolved within 0.2 s"
        assert one.make(Put("a", b"", JOB)).made is None
        one.store.close(5.0)
        gate.set()


def test_settings_do_not_show_the_secret() -> None:
    assert "hidden" not in repr(HubSettings("h", 1, "run", b"hidden", 2))
    assert "hidden" not in repr(EtcdSettings(("h:1",), "/", user="root", password="hidden"))  # noqa: S106 - no secret
    assert "hidden" not in repr(Machines(1, 2, "static", ("h:1",), "", secret=b"hidden", password="hidden"))  # noqa: S106 - as above


# --- encryption

can_encrypt = pytest.mark.skipif(not wire.can_encrypt(), reason="this Python cannot encrypt: it is older than 3.13")


@can_encrypt
@pytest.mark.parametrize("encrypt", ["auto", "no"])
def test_what_is_said_is_encrypted_where_both_can(hub: Hub, encrypt: str) -> None:
    seen: list[bytes] = []

    def note(data: bytes) -> bytes:
        seen.append(data)
        return data

    with Between(hub.settings.port) as between:
        between.change = note
        told: list[str] = []
        settings = hub.settings._replace(port=between.port, encrypt=encrypt)  # type: ignore[arg-type]  # one of them
        one = Client(HubStore(settings, told.append))
        try:
            one.watch("")
            for number in range(20):
                assert one.make(Put(f"job/{number}", b"a value that is told" * 5000, JOB)).made
            assert len(one.below("job/")) == 20
        finally:
            one.store.close(5.0)
    assert (b"a value that is told" in b"".join(seen)) == (encrypt == "no")
    needs = "what the agents say to each other is authenticated, but not encrypted: Python 3.13 or later is needed at"
    assert told == ([f"{needs} both ends, and not encrypt=no"] if encrypt == "no" else [])


@can_encrypt
def test_who_cannot_encrypt_is_refused_where_that_is_required() -> None:
    told: list[str] = []
    place = Place(0, ("127.0.0.1",))
    server = HubServer(place, run_id="run", secret=b"secret", ttl=2, warn=told.append, encrypt="require")
    with server:
        settings = HubSettings("127.0.0.1", server.port, "run", b"secret", 2)
        with client(settings._replace(encrypt="no")) as one:
            why = "wants what is said to be encrypted (encrypt=require): encrypt=no was given here"
            assert one.next(Refused).why == f"127.0.0.1:{server.port} {why}"
        with client(settings._replace(encrypt="require")) as one:
            one.next(Back)
    there = "Python 3.13 or later is needed there, and not encrypt=no"
    why = f"nothing would be encrypted, which encrypt=require asks for: {there}"
    assert told == [f"the agent at 127.0.0.1 is refused: {why}"]
    server = HubServer(place, run_id="run", secret=b"s", ttl=2, warn=print, encrypt="no")
    with server, client(HubSettings("127.0.0.1", server.port, "run", b"s", 2, encrypt="require")) as one:
        why = f"does not encrypt, which encrypt=require asks for: {there}"
        assert one.next(Refused, never=Back).why == f"127.0.0.1:{server.port} {why}"


@can_encrypt
def test_who_answers_without_the_key_is_told_nothing(tmp_path: Path) -> None:
    """Somebody on the way passes on how an agent enters, and has a certificate from then on: TLS 1.3 allows that."""
    import ssl

    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=store", "-keyout", "key"]
    subprocess.run([*openssl, "-out", "cert"], check=True, capture_output=True, cwd=tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = context.wrap_bio(incoming, outgoing, server_side=True)
    ours = wire.Cipher(b"k" * 32, is_store=False)

    def agree() -> None:
        for _ in range(3):
            incoming.write(ours.take())
            with contextlib.suppress(ssl.SSLWantReadError):
                theirs.do_handshake()
            ours.feed(outgoing.read())

    with pytest.raises(wire.CipherError, match="CERTIFICATE"):
        agree()
    assert not ours.is_up


@can_encrypt
def test_bytes_behind_the_welcome_end_a_connection_only(hub: Hub) -> None:
    """The agent connects again, and has its watch again."""
    seen: list[bytes] = []

    def spoil(data: bytes) -> bytes:
        seen.append(data)  # what the store says first, and then its welcome
        return data + b"0123456789abcde" if len(seen) == 2 else data

    with Between(hub.settings.port) as between:
        between.change_back = spoil
        with hub.client(port=between.port) as one:
            assert one.watch("").entries == ()
            assert any(isinstance(event, Away) for event in one.all)
            assert one.make(Put("a", b"", JOB)).made
            assert not any(isinstance(event, Refused) for event in one.all)


@can_encrypt
def test_a_large_value_leaves_no_large_buffers() -> None:
    """OpenSSL's are as large as the largest piece that they have had: that is small."""
    ends = [wire.Cipher(b"k" * 32, is_store=is_store) for is_store in (False, True)]
    for _ in range(2):
        ends[1].feed(ends[0].take())
        ends[0].feed(ends[1].take())
    assert all(end.is_up for end in ends)
    with HubProcess(ttl=60) as hub, client(hub.settings(timeout=SOON)) as one, client(hub.settings()) as other:
        other.watch("")
        one.next(Back)
        for _ in range(2):
            assert one.make(Put("a", bytes(30 << 20), JOB)).made
        assert len(other.next(Changed).written[0].value) == 30 << 20
        assert one.make(Delete("a")).made
        assert other.next(Changed).written
        assert other.next(Changed).deleted == ("a",)
        status = Path(f"/proc/{hub.process.pid}/status").read_text()
        assert int(status.partition("VmRSS:")[2].split()[0]) < 120 << 10
