"""Jobs of three hosts, and who has no part in them: the secret is wrong, a certificate has expired, strangers come.

``PHALANX_TEST_SECONDS`` says for how long strangers throw bytes at all ports.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import strangers
from tests.support.etcd import Etcd, make_certificates
from tests.support.jobs import BACKENDS, SECRET, SOON, Job, everyone

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.hosts import Hosts
    from tests.support.jobs import Agent

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("PHALANX_TEST_SECONDS", "4"))
STORE = 4
PORTS = {"static": 29501, "c10d": 29400}
"""Where the agent of host 1 listens."""
DESCRIPTORS = 256
"""That an agent may have: fewer than there are strangers."""
MOST_GROWTH = 32 << 10
"""KiB of memory by which an agent may grow, whatever comes."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_three_hosts_one_has_another_secret(hosted_job: Callable[..., Job], backend: str) -> None:
    one = hosted_job("3", backend)
    agents = one.start(1, 2)
    agents[0].wait_for("phalanx: ", 0)
    agents[1].wait_for("answers again|phalanx: ", 0)
    stranger = one.start(3, PHALANX_JOB_SECRET=SECRET[::-1])[0]
    assert stranger.end() == 1
    where = f"10.77.0.1:{PORTS[backend]}"
    assert f"Error: this node is not taken: the job's secret is not the one of {where}\n" in stranger.said
    assert "nodes (" not in agents[0].said + agents[1].said
    agents[0].wait_for("phalanx: the agent at 10.77.0.3 is refused: it does not know the job's secret\n")
    agents += one.start(3)
    everyone(agents, 0, 6)
    one.finish(*agents)
    for path in one.folder.rglob("*"):  # consoles, logs, records, events
        assert not path.is_file() or SECRET not in path.read_text(errors="replace"), path


THREE = """
import sys
import grpc
raised, cleared = b"\\x08\\x01\\x18\\x01", b"\\x08\\x02\\x18\\x01"  # an alarm: no space
with grpc.insecure_channel(sys.argv[1]) as channel:
    for path, body in (("Maintenance/Alarm", raised), ("Auth/AuthDisable", b""), ("Maintenance/Alarm", cleared)):
        call = channel.unary_unary(f"/etcdserverpb.{path}")
        try:
            call(body, timeout=2)
        except grpc.RpcError as error:
            print(error.code().name, flush=True)
    try:
        print(channel.unary_unary("/etcdserverpb.KV/Range")(b"\\n\\x01\\0\\x12\\x01\\0", timeout=2))
    except grpc.RpcError as error:
        print(error.code().name)
"""
"""Takes an etcd over that has a password: with its space used up, it forgets to check who asks. Then reads all keys."""


def test_three_messages_that_take_an_etcd_over_change_nothing(hosted_job: Callable[..., Job]) -> None:
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("the extra `etcd` is not installed")
    one = hosted_job("2", "c10d")
    agents = one.start(1, 2, options=["--max-restarts", "1"])
    everyone(agents, 0, 4)
    command = [*one.hosts.on(3), sys.executable, "-c", THREE, f"{one.hosts.address(1)}:{PORTS['c10d']}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN"}, done
    assert len(done.stdout.split()) == 4
    told = "phalanx: what has come from 10.77.0.3 is no agent, and is turned away: it speaks HTTP/2, as a client of an"
    agents[0].wait_for(told)
    one.fail(1, 0)  # what follows is decided as ever
    everyone(agents, 1, 4)
    one.finish(*agents)
    assert "does not answer" not in agents[1].said.split("nodes (", 1)[1]


def test_of_three_hosts_one_has_a_certificate_that_has_expired(tmp_path: Path, hosts: Hosts) -> None:
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("the extra `etcd` is not installed")
    make_certificates(tmp_path, hosts.address(STORE))
    ca, cert, key, expired = (str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key", "expired"))
    options = ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth"]
    with Etcd(1, hosts.address(STORE), hosts.on(STORE), options) as etcd:
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints, "--run-id", "night7"]
        one = Job(tmp_path, hosts, "2:3", lambda _: where)
        conf = [*one.conf, f"ca={ca}", f"key={key}"]
        try:
            one.conf = [*conf, f"cert={cert}"]
            agents = one.start(1, 2)
            one.conf = [*conf, f"cert={expired}"]
            late = one.start(3)[0]
            assert late.end() == 2
            said = rf"Error: --rdzv-conf: cert: the certificate in {re.escape(expired)} has expired on \S+ \S+ UTC\n"
            assert re.search(said, late.said), late.said
            one.conf = [*one.conf[:2], "join_timeout=1", f"ca={ca}"]
            nobody = one.start(3)[0]
            assert nobody.end() == 1
            assert "it wants a certificate of ours: cert=PATH,key=PATH" in nobody.said
            everyone(agents, 0, 4)
            one.finish(*agents)
        finally:
            one.close()


def listening(agent: Agent) -> list[tuple[str, int]]:
    """Where something listens on the host of an agent, as a stranger there reaches it."""
    found = []
    for line in Path(f"/proc/{agent.launcher()}/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":  # LISTEN
            number, port = local.split(":")
            address = ".".join(str(part) for part in bytes.fromhex(number)[::-1])
            found.append((address.replace("0.0.0.0", "127.0.0.1"), int(port, 16)))  # noqa: S104 - nothing is bound
    return found


def usage(agent: Agent) -> tuple[int, int]:
    """The memory that an agent has, in KiB, and how many descriptors."""
    status = Path(f"/proc/{agent.launcher()}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]), len(os.listdir(f"/proc/{agent.launcher()}/fd"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strangers_at_every_port_disturb_nobody(hosted_job: Callable[..., Job], backend: str) -> None:
    one = hosted_job("3", backend)
    one.env["TORCHELASTIC_HEALTH_CHECK_PORT"] = "0.0.0.0:8080"
    agents = one.start(1, 2, 3, options=["--max-restarts", "2"])
    for agent in agents:
        hard = resource.prlimit(agent.launcher(), resource.RLIMIT_NOFILE)[1]
        resource.prlimit(agent.launcher(), resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    everyone(agents, 0, 6)
    before = [usage(agent) for agent in agents]
    throwers = []
    try:
        for agent in agents:
            ports = sorted(listening(agent), key=lambda port: port[1] != PORTS[backend])
            assert 8080 in {port for _, port in ports}
            assert (ports[0] == ("10.77.0.1", PORTS[backend])) == (agent.number == 1)
            secret = SECRET if agent.number == 1 else ""
            command = [
                sys.executable,
                strangers.__file__,
                str(SECONDS),
                secret,
                *(f"{host}:{at}" for host, at in ports),
            ]
            command = [*one.hosts.on(agent.number), *command]
            throwers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for attempt in (1, 2):
            time.sleep(SECONDS / 4)  # until all connections are there that may be
            one.fail(attempt, attempt - 1)
            everyone(agents, attempt, 6)
        for thrower in throwers:
            thrown = json.loads(thrower.communicate(timeout=SECONDS + SOON)[0])
            assert all(count > 100 for count in thrown.values()), thrown
        until = time.monotonic() + SOON
        while any(now[1] > was[1] + 8 for now, was in zip(map(usage, agents), before, strict=True)):
            assert time.monotonic() < until, (before, [usage(agent) for agent in agents])
            time.sleep(0.1)
        for (now, _), (was, _) in zip(map(usage, agents), before, strict=True):
            assert now < was + MOST_GROWTH
    finally:
        for thrower in throwers:
            thrower.kill()
            thrower.communicate()
    one.finish(*agents)
    for agent in agents:
        assert "Too many open files" not in agent.said
        assert "does not answer" not in agent.said.split("nodes (", 1)[1]
        assert agent.said.count("is refused") <= 2, agent.said
