"""The store in a real etcd: what it promises, and what becomes of it when the etcd is killed, stopped or strange."""

from __future__ import annotations

import asyncio
import base64
import gc
import importlib.util
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if importlib.util.find_spec("grpc") is None:  # not imported: what it reads in the environment is read once
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from phalanx._store.etcd.api import end_of
from phalanx._store.etcd.etcd_store import EtcdStore
from phalanx._store.etcd.settings import EtcdSettings
from phalanx._store.store import JOB, OWN, Away, Back, Changed, Done, LeaseLost, Put, Refused, Snapshot, Transaction
from tests.support import leaks
from tests.support.disks import until
from tests.support.etcd import Etcd, grpc_sockets, make_certificates
from tests.support.stores import SOON, Client

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("grpc_is_up")

T = TypeVar("T")

SECRET = "open sesame"  # noqa: S105 - of the tests' own etcd
ROOT = {"user": "root", "password": SECRET}
"""Who may do all, in an etcd that asks."""


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    """An etcd for the tests that leave it as it is."""
    with Etcd() as it:
        yield it


@pytest.fixture(scope="module")
def grpc_is_up(etcd: Etcd) -> Iterator[None]:
    """Let grpc's own thread and descriptors be there, which it keeps."""
    with client(etcd.endpoints, "/phalanx/up/") as one:
        one.next(Back)
        yield


class EtcdClient(Client):
    """A store in an etcd, and what it has told."""

    store: EtcdStore

    def on_its_thread(self, what: Coroutine[Any, Any, T]) -> T:
        """Have the store's thread carry something out."""
        assert self.store._loop is not None
        return asyncio.run_coroutine_threadsafe(what, self.store._loop).result(SOON)


@contextmanager
def client(endpoints: str, prefix: str, kind: type[EtcdClient] = EtcdClient, /, **more: Any) -> Iterator[EtcdClient]:
    before = grpc_sockets()
    it = kind(EtcdStore(EtcdSettings(tuple(endpoints.split(",")), prefix, **{"ttl": 2, **more})))
    try:
        yield it
    finally:
        it.store.close(5.0)
        gc.collect()
        # grpc closes the socket of a channel late: when it has something to do again, see the test of their number.
        leaks.kept |= grpc_sockets() - before
        assert len(it.threads) <= 1  # on one thread, whatever it tells


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Keys of the test's own."""
    return f"/phalanx/{tmp_path.name}/"


def test_watches_that_begin_while_keys_are_written(etcd: Etcd, prefix: str) -> None:
    prefixes = [f"{number}/" for number in range(10)]
    puts = tuple(Put(f"{each}a", b"", JOB) for each in prefixes)
    patient = {"ttl": 60, "timeout": SOON}  # a session that breaks would lose what is under way
    with client(etcd.endpoints, prefix, **patient) as one, client(etcd.endpoints, prefix, **patient) as other:
        one.next(Back)
        other.next(Back)
        for each in prefixes:
            for ticket in range(20):
                one.store.submit(ticket, Transaction((), puts))
            other.store.watch(each)
        made = [one.next(Done).revision for _ in range(200)]
        left, snapshots = set(prefixes), {}
        told: dict[str, list[int]] = {each: [] for each in prefixes}
        while left:
            event = other.told.get(timeout=SOON)
            if isinstance(event, Snapshot):
                snapshots[event.prefix] = event
            else:
                told[event.prefix].append(event.revision)
            if event.revision >= made[-1]:
                left.discard(event.prefix)
        for each, snapshot in snapshots.items():
            written = max((revision for revision in made if revision <= snapshot.revision), default=0)
            assert [entry.modified for entry in snapshot.entries] == [written] * bool(written)
            assert told[each] == [revision for revision in made if revision > snapshot.revision]


def test_an_etcd_that_is_killed_and_starts_again(prefix: str) -> None:
    with Etcd() as own, client(own.endpoints, prefix) as one:
        one.watch("job/")
        one.make(Put("job/a", b"1", JOB), Put("job/mine", b"", OWN))
        own.members[0].kill()
        assert own.endpoints in one.next(Away).why
        assert one.make(Put("job/a", b"2", JOB)).made is None
        own.start()
        one.next(Back)
        done = one.make(Put("job/a", b"3", JOB))
        assert done.made
        assert sorted(one.below("job/")) == ["job/a", "job/mine"]  # a lease begins anew


def test_an_ended_stream_of_leases_is_opened_again(prefix: str) -> None:
    with Etcd() as own, client(own.endpoints, prefix) as one:
        one.next(Back)
        assert one.store._session is not None
        assert one.on_its_thread(one.store._session.keep(one.store._lease))
        own.members[0].kill()  # nothing is watched: the stream alone can tell
        assert own.endpoints in one.next(Away).why
        own.start()
        one.next(Back)
        assert one.make(Put("job/a", b"", JOB)).made


def test_a_lease_may_be_kept_by_two_tasks_at_once(etcd: Etcd, prefix: str) -> None:
    async def both() -> list[bool]:
        session, lease = one.store._session, one.store._lease
        assert session is not None
        return await asyncio.gather(*(session.keep(each) for each in (lease, 1, lease, 1)))

    with client(etcd.endpoints, prefix) as one:
        one.next(Back)
        assert one.on_its_thread(both()) == [True, False, True, False]


def test_an_etcd_that_has_lost_what_it_held_is_none(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Etcd() as own, client(own.endpoints, prefix) as one:
        one.next(Back)
        for _ in range(3):
            one.make(Put("job/a", b"", JOB))
        own.members[0].kill()
        own.members[0].wipe()
        own.start()
        while "it has lost what it held: it was at revision 4, and is before that" not in one.next(Away).why:
            pass
        told, looks = len(one.all), queue.SimpleQueue[int]()
        check = one.store._keys.check

        async def look(session: Any, revision: int = 0) -> None:
            looks.put(revision)
            await check(session, revision)

        monkeypatch.setattr(one.store._keys, "check", look)
        assert looks.get(timeout=SOON) == 1
        call(own, "kv/put", key="eA==", value="")
        while looks.get(timeout=SOON) != 2:
            pass
        looks.get(timeout=SOON)
        assert not any(isinstance(event, Away | Back) for event in one.all[told:])  # it was said, once


def test_a_lost_etcd_is_noticed_after_others_have_written(prefix: str) -> None:
    with Etcd() as own, client(own.endpoints, prefix) as one:
        one.watch("job/")
        last = one.make(Put("job/a", b"", JOB))
        if not any(isinstance(event, Changed) for event in one.all):  # it may come after the answer
            one.next(Changed)
        told = len(one.all)
        begin_anew(own, last.revision + 5)
        while f"it has not written {prefix}job/a at revision {last.revision}" not in one.next(Away, never=Back).why:
            pass
        one.store.close(5.0)
        assert not any(isinstance(event, LeaseLost | Changed) for event in one.all[told:])


def test_a_lost_etcds_keys_are_gone_after_a_compaction(prefix: str) -> None:
    with Etcd() as own, client(own.endpoints, prefix) as one:
        one.watch("job/")
        last = one.make(Put("job/a", b"", JOB))
        begin_anew(own, last.revision + 5)
        call(own, "kv/compaction", revision=str(last.revision + 5))
        one.next(Back)
        assert one.next(Snapshot).entries == ()


def begin_anew(own: Etcd, revision: int) -> None:
    """Have an etcd lose its data, and somebody else write into it until it is at a revision."""
    own.members[0].kill()
    own.members[0].wipe()
    own.start()
    while int(call(own, "kv/put", key="eA==", value="")["header"]["revision"]) < revision:
        pass


def test_a_lease_that_etcd_has_ended_is_made_anew_at_once(etcd: Etcd, prefix: str) -> None:
    """Etcd before 3.5.13 does so where its leader was stopped for longer than the ttl, and goes on."""
    with client(etcd.endpoints, prefix, ttl=60) as one:  # it is kept alive after 20 s only
        one.next(Back)
        for number in range(3):
            one.make(Put("nodes/a", b"%d" % number, OWN), Put("job/a", b"", JOB))
            call(etcd, "kv/lease/revoke", ID=str(one.store._lease))
            one.next(LeaseLost)
        assert one.below("") == ["job/a"]
        assert one.make(Put("nodes/a", b"", OWN)).made
        one.store.close(5.0)
        assert sum(isinstance(event, LeaseLost) for event in one.all) == 3  # not with the end of its own
        assert not any(isinstance(event, Away) for event in one.all)


def test_what_was_compacted_is_read_anew(prefix: str) -> None:
    with Etcd() as own, client(own.endpoints, prefix) as one, client(own.endpoints, prefix) as other:
        other.next(Back)
        first = one.watch("job/")
        last = [other.make(Put("job/a", b"%d" % number, JOB)) for number in range(5)][-1]
        call(own, "kv/compaction", revision=str(last.revision))
        late = EtcdStore(EtcdSettings((own.endpoints,), prefix, ttl=2))
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        watched = _watched_from(late, "job/", first.revision)
        late.open(told.put)
        try:
            while not isinstance(event := told.get(timeout=SOON), Snapshot):
                pass
        finally:
            late.close(5.0)
        assert (event.prefix, [entry.value for entry in event.entries]) == (watched, [b"4"])


def test_more_changes_than_one_message_may_have_are_read_anew(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx._store.etcd.session.MOST_BYTES", 1 << 20)
    with client(etcd.endpoints, prefix) as one, client(etcd.endpoints, prefix) as other:
        other.next(Back)
        revision = other.make(Put("job/a", b"", JOB)).revision
        for _ in range(9):
            other.make(Put("job/a", bytes(200 << 10), JOB))
        assert one.store._loop is not None
        assert one.store._session is not None
        one.store._loop.call_soon_threadsafe(_watched_from, one.store, "job/", revision)
        one.store._loop.call_soon_threadsafe(one.store._session.end, TimeoutError())
        one.next(Away)
        assert [entry.modified for entry in one.next(Snapshot).entries] == [revision + 9]
        assert sum(isinstance(event, Away) for event in one.all) == 1


def test_keys_beyond_a_messages_limit_are_read_again_later(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx._store.etcd.session.MOST_BYTES", 1 << 20)
    with client(etcd.endpoints, prefix) as one:
        one.next(Back)
        for name in "ab":
            assert one.make(Put(f"job/{name}", bytes(600 << 10), JOB)).made
        one.store.watch("job/")
        assert "larger than max" in one.next(Away).why


class Deaf(EtcdClient):
    """One that raises where it is told that a transaction was made, or that the store does not answer."""

    def _take(self, event: Any) -> None:
        super()._take(event)
        if type(event) in (Done, Away):
            msg = "nobody hears it"
            raise RuntimeError(msg)


def test_what_cannot_be_told_ends_the_store_and_is_no_silence(etcd: Etcd, prefix: str) -> None:
    """A mistake of ours on the store's thread: the agent must not wait for ever for what does not come."""
    for endpoints in ("127.0.0.1:1", etcd.endpoints):
        with client(endpoints, prefix, Deaf) as one:
            if endpoints == etcd.endpoints:
                one.next(Back)
                one.store.submit(1, Transaction((), ()))
            assert one.next(Refused).why == "the store has ended: RuntimeError: nobody hears it"


def _watched_from(store: EtcdStore, prefix: str, revision: int) -> str:
    """Have a store watch a prefix as if it had told all up to a revision."""
    from phalanx._store.etcd.session import Watched

    watched = store._watched[prefix] = Watched(prefix)
    watched.revision = revision
    return prefix


@pytest.mark.long
def test_a_member_that_stops_answering_costs_no_lease(prefix: str) -> None:
    with Etcd(3) as own:
        first = next(member for member in own.members if member is not own.leader())
        rest = [member.endpoint for member in own.members if member is not first]
        with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
            where = [first.endpoint, f"127.0.0.1:{silent.getsockname()[1]}", *rest]
            with client(",".join(where), prefix, ttl=6, timeout=60.0) as one:
                one.next(Back)
                first.signal(signal.SIGSTOP)
                assert "no answer in time" in one.next(Away).why
                one.next(Back)
                first.signal(signal.SIGCONT)
        assert not any(isinstance(event, LeaseLost) for event in one.all)


def test_members_that_are_dead_silent_or_strange_are_passed_over(etcd: Etcd, prefix: str) -> None:
    def babble() -> None:
        with suppress(OSError):
            while True:
                talker, _ = strange.accept()
                talker.sendall(os.urandom(4096))
                talker.close()

    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as strange:
        thread = threading.Thread(target=babble)
        thread.start()
        hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, strange)]
        try:
            with client(",".join(["127.0.0.1:1", *hosts, etcd.endpoints]), prefix, timeout=0.5) as one:
                one.next(Back)
                assert one.make(Put("a", b"", JOB)).made
        finally:
            strange.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for TLS on this machine."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "127.0.0.1")
    return folder


@pytest.mark.long
def test_tls(prefix: str, tmp_path: Path, certificates: Path) -> None:
    files = {name: str(certificates / f"{name}.pem") for name in ("ca", "other", "cert", "key", "expired")}
    secure = ("--cert-file", files["cert"], "--key-file", files["key"], "--trusted-ca-file", files["ca"],
              "--client-cert-auth")  # fmt: skip
    own = Etcd(
        options=[f"{name}={value}" for name, value in zip(secure[:6:2], secure[1:6:2], strict=True)]
        + ["--client-cert-auth"]
    )
    with own:
        mine = {"cert": files["cert"], "key": files["key"]}
        with client(own.endpoints, prefix, ca=files["ca"], **mine) as one:
            one.next(Back)
            assert one.make(Put("a", b"", JOB)).made
        for wrong, said in (
            ({"ca": files["other"], **mine}, f"no authority in {files['other']} has signed its certificate"),
            (mine, "no authority that this machine knows has signed its certificate: ca=PATH names one"),
            ({"ca": files["ca"]}, "it wants a certificate of ours: cert=PATH,key=PATH"),
            (
                {"ca": files["ca"], "cert": files["expired"], "key": files["key"]},
                f"; the certificate in {files['expired']} has expired on",
            ),
        ):
            with client(own.endpoints, prefix, timeout=1.0, **wrong) as one:
                why = one.next(Away).why
                assert (why.startswith(f"{own.endpoints}: "), said in why) == (True, True), why
                assert one.make(Put("a", b"", JOB)).made is None
        mine["cert"] = shutil.copy(files["expired"], str(tmp_path))
        with client(own.endpoints, prefix, ca=files["ca"], **mine) as one:
            one.next(Away)
            shutil.copy(files["cert"], mine["cert"])  # it is renewed
            one.next(Back)
        with client(own.endpoints, prefix, timeout=1.0) as one:
            assert one.next(Away).why == f"{own.endpoints}: Socket closed, as an etcd does that wants TLS (ca=PATH)"


@pytest.mark.long
def test_an_etcd_whose_certificate_is_not_its_own(prefix: str, etcd: Etcd, certificates: Path) -> None:
    files = {name: str(certificates / f"{name}.pem") for name in ("ca", "foreign", "key", "expired")}
    for cert, said in (
        ("expired", "its certificate has expired, or that of its authority (CERTIFICATE_VERIFY_FAILED)"),
        ("foreign", "its certificate is not for 127.0.0.1"),
    ):
        with Etcd(options=[f"--cert-file={files[cert]}", f"--key-file={files['key']}"]) as own, \
             client(own.endpoints, prefix, timeout=1.0, ca=files["ca"]) as one:  # fmt: skip
            assert one.next(Away).why == f"{own.endpoints}: {said}"
    with client(etcd.endpoints, prefix, timeout=1.0, ca=files["ca"]) as one:
        assert "as an etcd without TLS does" in one.next(Away).why


@pytest.mark.long
def test_tls_files_that_cannot_be_used_are_named_at_once(prefix: str, certificates: Path) -> None:
    """Grpc would abort the process, where there is a key without a certificate, or say nothing of use."""
    names = ("ca.pem", "cert.pem", "key.pem", "other.key", "encrypted.key")
    ca, cert, key, other, encrypted = (str(certificates / name) for name in names)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ca": "/nowhere"}, "nowhere"),
        ({"ca": ca, "cert": cert}, "belong together"),
        ({"ca": ca, "key": key}, "belong together"),
        ({"ca": key}, "^ca: .*key.pem holds no certificate"),
        ({"ca": ca, "cert": key, "key": key}, "^cert: .*key.pem holds no certificate"),
        ({"ca": ca, "cert": cert, "key": cert}, "^key: .*cert.pem holds no private key"),
        ({"ca": ca, "cert": cert, "key": other}, "^key: .*other.key is not the key of the certificate in .*cert.pem"),
        ({"ca": ca, "cert": cert, "key": encrypted}, "^key: .*encrypted.key is encrypted"),
    )
    for wrong, said in cases:
        with pytest.raises((OSError, ValueError), match=said):
            EtcdStore(EtcdSettings(("127.0.0.1:1",), prefix, **wrong)).open(lambda _: None)


def call(own: Etcd, path: str, token: str = "", **body: Any) -> dict[str, Any]:
    """Call a method of an etcd by its gateway."""
    request = urllib.request.Request(f"http://{own.endpoints}/v3/{path}", data=json.dumps(body).encode())
    if token:
        request.add_header("Authorization", token)
    with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - the test's own etcd
        return dict(json.load(answer))


def want_passwords(own: Etcd) -> str:
    """Have an etcd ask who we are. Returns a token of root's."""
    call(own, "auth/user/add", name="root", password=SECRET)
    call(own, "auth/role/add", name="root")
    call(own, "auth/user/grant", user="root", role="root")
    call(own, "auth/enable")
    return str(call(own, "auth/authenticate", name="root", password=SECRET)["token"])


@pytest.mark.long
def test_user_and_password(prefix: str) -> None:
    with Etcd() as own:
        with client(own.endpoints, prefix) as nobody:
            nobody.next(Back)
            token = want_passwords(own)  # in the midst of a job
            assert nobody.make(Put("a", b"", JOB)).made is None
            assert "refuses this agent: " in nobody.next(Refused).why
        with client(own.endpoints, prefix, **ROOT) as one:
            one.next(Back)
            assert one.make(Put("a", b"", JOB)).made
            assert [entry.key for entry in one.watch("").entries] == ["a"]
        with client(own.endpoints, prefix, user="root", password=SECRET[1:]) as one:
            assert "refuses the user 'root': " in one.next(Refused).why
        with client(own.endpoints, prefix, user="root", password=SECRET + "\udce9") as one:
            assert one.next(Refused).why.endswith("user 'root' is not UTF-8")
        with client(own.endpoints, prefix) as one:
            assert "refuses this agent: " in one.next(Refused).why
        call(own, "auth/user/add", token, name="reader", password=SECRET)
        call(own, "auth/role/add", token, name="reader")
        first, end = (base64.b64encode(key).decode() for key in (prefix.encode(), end_of(prefix.encode())))
        call(own, "auth/role/grant", token, name="reader", perm={"permType": "READ", "key": first, "range_end": end})
        call(own, "auth/user/grant", token, user="reader", role="reader")
        with client(own.endpoints, prefix, user="reader", password=SECRET) as one:
            one.next(Back)
            assert one.make(Put("a", b"", JOB)).made is None
            assert "permission denied" in one.next(Refused).why


@pytest.mark.long
def test_a_token_that_has_expired_interrupts_nothing(prefix: str) -> None:
    def age() -> None:
        assert one.store._session is not None
        one.store._session._metadata = (("token", "expired"),)

    with Etcd() as own:
        want_passwords(own)
        # With a lease of 2 s, an etcd that does not answer for 0.7 s (a busy disk) would be an interruption.
        with client(own.endpoints, prefix, ttl=30, **ROOT) as one, \
             client(own.endpoints, prefix, ttl=30, **ROOT) as other:  # fmt: skip
            one.next(Back)
            other.watch("")
            for ask in (lambda: one.make(Put("a", b"", OWN)).made, lambda: one.below("") == ["a"],
                        lambda: one.watch("").entries):  # fmt: skip
                age()
                assert ask()
                until(lambda: own.watches() >= 2)  # the one of its lease's key is asked for meanwhile
            age()
            one.store.close(5.0)
            other.next(Changed)
            assert other.next(Changed).deleted == ("a",)  # its lease was given back
        assert [event.why for event in one.all if isinstance(event, Away)] == []


def test_a_value_that_etcd_does_not_take(etcd: Etcd, prefix: str) -> None:
    with client(etcd.endpoints, prefix) as one:
        one.next(Back)
        assert one.make(Put("a", bytes(3 << 20), JOB)).made is None
        assert "larger than max" in one.next(Away).why
        one.next(Back)
        assert one.make(Put("a", bytes(1 << 20), JOB)).made
        assert [len(entry.value) for entry in one.watch("").entries] == [1 << 20]


def test_an_etcd_without_space_says_so(prefix: str) -> None:
    with Etcd(options=["--quota-backend-bytes", "1000000"]) as own, client(own.endpoints, prefix) as one:
        one.next(Back)
        while one.make(Put("a", bytes(1 << 20), JOB)).made:
            pass
        assert "space exceeded" in one.next(Away).why


def test_an_answer_of_more_bytes_than_one_message_may_have(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx._store.etcd.session.MOST_BYTES", 4 << 20)
    with client(etcd.endpoints, prefix) as one:
        one.next(Back)
        for number in range(40):
            assert one.make(Put(f"a/{number:02}", bytes(120 << 10), JOB)).made
        last = one.make(Put("b", b"", JOB))
        assert one.below("a/") == [f"a/{number:02}" for number in range(40)]
        assert (one.watch("a/").revision, one.all[-1].prefix) == (last.revision, "a/")


def test_watches_that_are_ended_do_not_add_up(etcd: Etcd, prefix: str) -> None:
    with client(etcd.endpoints, prefix) as one:
        for number in range(5):
            one.watch(f"{number}/")
            one.store.unwatch(f"{number}/")
        assert one.below("") == []
        assert one.store._session is not None
        assert (len(one.store._session.followers), len(one.store._watched)) == (0, 0)


@pytest.mark.long
def test_sockets_do_not_add_up(etcd: Etcd, prefix: str) -> None:
    before = len(grpc_sockets())
    for _ in range(20):
        with client(etcd.endpoints, prefix) as one:
            one.watch("")
    assert len(grpc_sockets()) - before < 10


@pytest.mark.long
def test_one_store_after_another(etcd: Etcd, prefix: str) -> None:
    """What grpc has for the loop of the first finds it closed, and asyncio prints that: of 120 it were 8."""
    script = (
        "import queue, sys\n"
        "from phalanx._store.etcd.etcd_store import EtcdStore\n"
        "from phalanx._store.etcd.settings import EtcdSettings\n"
        "for _ in range(40):\n"
        "    told = queue.SimpleQueue()\n"
        "    store = EtcdStore(EtcdSettings((sys.argv[1],), sys.argv[2], ttl=2))\n"
        "    store.open(told.put)\n"
        "    told.get()\n"
        "    store.watch('')\n"
        "    told.get()\n"
        "    store.close(5)\n"
    )
    command = [sys.executable, "-c", script, etcd.endpoints, prefix]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.long
def test_the_environment_is_left_as_it_was() -> None:
    """But for what another thread has changed meanwhile: the import of grpc takes its time."""
    script = (
        "import os, sys\n"
        "class Meanwhile:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        os.environ['CHANGED'] = 'new'\n"
        "os.environ.update(GRPC_VERBOSITY='ERROR', CHANGED='old')\n"
        "sys.meta_path.insert(0, Meanwhile())\n"
        "import phalanx._store.etcd.api\n"
        "print(*(os.environ.get(name) for name in ('GRPC_VERBOSITY', 'GRPC_ENABLE_FORK_SUPPORT', 'CHANGED')))\n"
    )
    seen = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert (seen.stdout, seen.stderr) == ("ERROR None new\n", "")
