"""Where the store of a job listens, and by which address machines reach each other: misleading names, forwarders."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.jobs import BACKENDS, UNKNOWN, Job, at, everyone

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.hosts import Hosts

pytestmark = pytest.mark.long

FORWARDER = """
import socket, sys, threading
host, port = sys.argv[3], int(sys.argv[4])
def pump(source, to):
    while data := source.recv(65536):
        to.sendall(data)
    to.shutdown(socket.SHUT_WR)
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    print("ready", flush=True)
    while True:
        here, _ = listener.accept()
        try:
            there = socket.create_connection((host, port))
        except OSError:
            here.close()
            continue
        for ends in ((here, there), (there, here)):
            threading.Thread(target=pump, args=ends, daemon=True).start()
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_hosts_whose_own_name_is_loopback_meet(hosted_job: Callable[..., Job], backend: str) -> None:
    """As on Debian, Ubuntu, and images of theirs."""
    one = hosted_job("2", at(backend, "head"), h1="127.0.1.1 head\n", h2="10.77.0.1 head\n")
    agents = one.start(1)
    agents[0].wait_for("the store listens")
    agents += one.start(2)
    everyone(agents, 0, 4)
    port = 29400 + (backend == "static")
    where = f"head is 127.0.1.1 on this machine: the store listens at all addresses of this machine, port {port}"
    assert where in agents[0].said
    told = "; others reach this machine by the address by which they reach the store (--local-addr ADDRESS chooses"
    assert (told in agents[0].said) == (backend == "c10d")
    assert "the store listens" not in agents[1].said
    master = "head" if backend == "static" else r"10\.77\.0\.1"
    agents[1].wait_for(rf"worker \d 4 \d {master} ", 2)
    one.finish(*agents)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hosts_meet_at_a_name_of_which_they_know_one_address(
    hosted_job: Callable[..., Job], hosts: Hosts, backend: str
) -> None:
    hosts.give(1, "fd77::1/64")
    one = hosted_job("2", at(backend, "head"), h1="fd77::1 head\n10.77.0.1 head\n", h2="10.77.0.1 head\n")
    port = 29400 + (backend == "static")
    agents = one.start(1)
    agents[0].wait_for(rf"the store listens at 10\.77\.0\.1:{port} and \[fd77::1\]:{port}")
    agents += one.start(2)
    everyone(agents, 0, 4)
    master = "head" if backend == "static" else r"10\.77\.0\.1"
    agents[1].wait_for(rf"worker \d 4 \d {master} ", 2)
    one.finish(*agents)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_bound", [False, True])
def test_hosts_meet_by_an_endpoint_that_forwards(
    hosted_job: Callable[..., Job], hosts: Hosts, backend: str, *, is_bound: bool
) -> None:
    """As a service, a load balancer and a port of a container that is published do."""
    port = 29400 + (backend == "static")
    to = 4444 if is_bound else port
    command = [*hosts.on(3), sys.executable, "-c", FORWARDER, hosts.address(3), str(port), hosts.address(1), str(to)]
    forwarder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert forwarder.stdout is not None
    try:
        assert forwarder.stdout.readline() == b"ready\n"
        one = hosted_job("2", at(backend, hosts.address(3)))
        one.conf += [f"bind={hosts.address(1)}:{to}"] * is_bound
        conf = list(one.conf)
        one.conf += ["is_host=yes"] * (backend == "c10d")
        agents = one.start(1)
        one.conf = conf + ["is_host=no"] * (backend == "c10d")
        agents += one.start(2)
        everyone(agents, 0, 4)
        where = "all addresses of this machine, port " if not is_bound else "10.77.0.1:"
        assert f"the store listens at {where}{to}" in agents[0].said
        if not is_bound:
            assert "phalanx: 10.77.0.3 is no address of this machine: the store" in agents[0].said
        one.finish(*agents)
    finally:
        forwarder.kill()
        forwarder.wait()
        forwarder.stdout.close()


def test_loopback_on_two_hosts_is_said_at_once(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("2", at("c10d", "127.0.0.1"))
    one.conf = ["lease_ttl=2", "join_timeout=4"]
    agents = one.start(1, 2)
    for agent in agents:
        agent.wait_for("the store listens at 127.0.0.1:29400, which agents of this machine alone reach\n")
    assert [agent.end() for agent in agents] == [1, 1]


def test_of_two_agents_at_the_endpoint_the_first_has_the_store(hosted_job: Callable[..., Job]) -> None:
    """The first of them has it; when that is gone, the other one says what became of it."""
    one = hosted_job("3", at("c10d", "head"), h1="127.0.1.1 head\n", h2="10.77.0.1 head\n")
    one.conf.append("away_timeout=1")
    agents = one.start(1)
    agents[0].wait_for("the store listens at all")
    agents += one.start(1, 2)
    everyone(agents, 0, 6)
    assert "the store listens" not in agents[1].said
    agents[0].process.kill()
    agents[0].process.wait()
    for agent in agents[1:]:
        assert agent.end() == UNKNOWN
        why = (
            r"its store has not answered for 1\.0s; the agent at head:29400 does not answer \(.+\): a store ends with "
            r"the agent that has it, an etcd of your own does not \(--rdzv-backend etcd\)"
        )
        assert re.search(f"Error: how the job ends is not known here: {why}\n", agent.said), agent.said
