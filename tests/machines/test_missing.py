"""What consoles say while a job waits for machines: who is missing, what to type there, what is at the endpoint."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.helpers import wait_gone
from tests.support.jobs import BACKENDS, SECRET, Job, at, everyone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.hosts import Hosts

pytestmark = pytest.mark.long

HEAD = "10.77.0.1"
SERVICE = """
import itertools, socket, sys
host, port, first, then = sys.argv[1:]
with socket.create_server((host, int(port))) as it:
    print(flush=True)
    for number in itertools.count():
        one, _ = it.accept()
        what = first if number < 6 else then
        if what == "silent":
            sys.stdin.read()
        one.recv(1024)
        if what == "http":
            one.sendall(b"HTTP/1.1 400 Bad Request\\r\\nServer: nginx\\r\\nConnection: close\\r\\n\\r\\n")
        one.close()
"""
SAYS = {
    "http": r"what answers there is no agent, it speaks HTTP: another port is needed",
    "closes": r"what listens there closes the connection: another service, torchrun's store perhaps, or .* that ends",
    "silent": r"what listens there is silent: another service, torchrun's store perhaps, or an agent that is stopped",
}


PAGE = Path(__file__).resolve().parents[2] / "docs/machines.md"


def told_on_page(said: str) -> set[str]:
    """What the lines of a console are about that the page has, too: with its names of hosts, paths and times."""
    said = said.replace("(h1)", "(host0)").replace("(h2)", "(host1)").replace("h1, h2", "host0, host1")
    said = said.replace("come: h1;", "come: host0;").replace(HEAD, "host0")
    said = re.sub(r"--rdzv-endpoint host0:29400 --rdzv-conf.* /\S+/train.py \S+", "--master-addr host0 train.py", said)
    time = re.compile(r"at most \S+ more")
    page = time.sub("", PAGE.read_text())
    said = said.replace(", with PET_MONITOR_INTERVAL as here", "")
    return {line.split(" at most")[0].split(":")[1].strip() for line in said.splitlines() if time.sub("", line) in page}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_console_says_who_is_missing_and_what_to_type_there(hosted_job: Callable[..., Job], backend: str) -> None:
    one = hosted_job("3", at(backend, HEAD))
    one.env["PET_MONITOR_INTERVAL"] = "1"
    agents = one.start(1)
    is_static, line = backend == "static", ""
    first = "1 of 3 nodes has come: " + (r"0 \(h1\); nodes 1-2 are missing" if is_static else "h1; 2 more are needed")
    agents[0].wait_for(rf"phalanx: waiting at most 5\d\.\ds more: {first}\n")
    agents += one.start(2)
    agents[1].wait_for("have come")
    then = r"0 \(h1\), 1 \(h2\); node 2 is missing" if is_static else r"h\d, h\d; 1 more is needed"
    for agent in agents:
        agent.wait_for(rf"phalanx: waiting at most [45]\d\.\ds more: 2 of 3 nodes have come: {then}\n")
        where = "on the machine of node 2" if is_static else "on a machine that is missing"
        *_, line = agent.wait_for(rf"phalanx: {where}, with PET_MONITOR_INTERVAL as here: (\S.*)\n")
        assert ("--node-rank 2 " in line) == is_static
    if is_static:
        assert agents[0].said.count("on the machine of node") == 2  # once for each
        assert told_on_page(agents[0].said) >= {"waiting", "on the machine of node 2"}
    # What was said is typed there: with this Python, for what was typed here names none.
    env = ["env", f"PHALANX_JOB_SECRET={SECRET}", f"HOME={one.folder}", "PET_MONITOR_INTERVAL=1"]
    words = shlex.split(line)
    command = [*one.hosts.on(3), *env, sys.executable, "-m", "phalanx", *words[words.index("run") :]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as third:
        try:
            for agent in agents:
                agent.workers(0, 6)
            one.finish(*agents)
            said = third.communicate(timeout=40)[0]
            assert third.returncode == 0, said
            assert "waiting at most" not in said
        finally:
            third.kill()
    assert not wait_gone([third.pid])


def test_a_job_that_has_waited_in_vain_names_who_is_missing(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("3", at("static", HEAD))
    one.conf = ["lease_ttl=2", "join_timeout=3.5"]
    agents = one.start(1, 2)
    assert [agent.end() for agent in agents] == [1, 1]
    who = r"0 \(h1\), 1 \(h2\); node 2 is missing"
    for agent in agents:
        assert re.search(rf"^phalanx: Error: within 3\.5s, 2 of 3 nodes have come: {who}$", agent.said, re.MULTILINE), (
            agent.said
        )


def test_one_node_and_one_worker_are_in_the_singular(hosted_job: Callable[..., Job]) -> None:
    one = hosted_job("1:2", at("c10d", HEAD))
    agents = one.start(1, options=["--nproc-per-node", "1"])
    agents[0].wait_for(r"phalanx: 1 node \(h1\), 1 worker; this is node 0, with rank 0\n")
    one.finish(*agents)


@contextmanager
def serving(hosts: Hosts, service: str, then: str = "") -> Iterator[None]:
    """Have another service at the endpoint; ``then``: and yet another one after some connections."""
    command = [*hosts.on(1), sys.executable, "-c", SERVICE, HEAD, "29400", service, then or service]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            yield
        finally:
            other.kill()


@pytest.mark.parametrize("service", SAYS)
def test_another_service_at_the_endpoint_is_named(hosted_job: Callable[..., Job], hosts: Hosts, service: str) -> None:
    one = hosted_job("2", at("c10d", HEAD))
    one.conf = ["lease_ttl=2", "join_timeout=4"]
    with serving(hosts, service):
        agents = one.start(1, 2)
        assert [agent.end() for agent in agents] == [1, 1]
    here, there = (agent.said for agent in agents)
    in_use = f"{HEAD}:29400 is in use on this machine, and not by an agent of this job"
    assert re.search(rf"phalanx: {in_use} \({SAYS[service]}\); it is tried again\n", here)
    assert re.search(rf"Error: --rdzv-backend c10d: {in_use}: {SAYS[service]}\n", here)
    where = f"the agent at {HEAD}:29400"
    assert re.search(rf"phalanx: {where} does not answer \({SAYS[service]}\); it is tried", there)
    assert re.search(rf"Error: {where} has not answered in time: {SAYS[service]}\n", there)


@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_the_error_names_the_latest_reason_of_silence(
    hosted_job: Callable[..., Job], hosts: Hosts, backend: str
) -> None:
    """Nobody listens there; what listens closes the connection; it speaks HTTP."""
    one = hosted_job("2", at(backend, HEAD))
    one.conf = ["lease_ttl=2", "join_timeout=8"]
    agents = one.start(2, options=["--run-id", "reasons"])
    agents[0].wait_for(r"does not answer \(.*Connection refused\); it is tried again\n")
    with serving(hosts, "closes", "http"):
        agents += one.start(1, options=["--run-id", "reasons"])
        latest = SAYS["http"] if backend == "c10d" else SAYS["http"].replace("agent", "etcd")
        closes = SAYS["closes"] if backend == "c10d" else "Connection reset by peer|Socket closed"
        for agent in agents:
            agent.wait_for(rf"\((\S+: )?({closes}).*\); it is tried again\n")
            agent.wait_for(rf"\((\S+: )?{latest}\); it is tried again\n")
        assert [agent.end() for agent in agents] == [1, 1]
    for agent in agents:
        assert re.search(rf"Error: .*: {latest}\n", agent.said), agent.said


def test_a_port_that_is_free_later_is_taken(hosted_job: Callable[..., Job], hosts: Hosts) -> None:
    """It was that of the run before, which was ending."""
    one = hosted_job("2", at("c10d", HEAD))
    with serving(hosts, "closes"):
        agents = one.start(1, 2)
        agents[0].wait_for(f"{HEAD}:29400 is in use on this machine, and not by an agent of this job")
    everyone(agents, 0, 4)
    one.finish(*agents)


def test_why_an_endpoint_cannot_be_reached_is_said(hosted_job: Callable[..., Job]) -> None:
    """Nobody is there yet; there is no machine; its name is not known."""
    for where, conf, why in (
        (HEAD, "", r"nobody listens there: Connection refused"),
        (
            f"{HEAD[:-1]}99",
            "",
            "(No route to host: is the address right|no answer within 1.2 s: is the machine up), and does",
        ),
        (
            "nobody.invalid",
            "is_host=no",
            "'nobody.invalid': (Temporary failure in name resolution|Name or service not known)",
        ),
    ):
        one = hosted_job("2", at("c10d", where))
        one.conf = ["lease_ttl=2", "join_timeout=4", *filter(None, [conf])]
        (agent,) = one.start(2)
        assert agent.end() == 1
        assert re.search(why, agent.said), agent.said


def test_who_speaks_another_protocol_is_told_of(hosted_job: Callable[..., Job], hosts: Hosts) -> None:
    one = hosted_job("2", at("c10d", HEAD))
    agents = one.start(1)
    agents[0].wait_for("has come: h1")
    script = (
        "import socket, sys\n"
        "with socket.create_connection((sys.argv[1], 29400)) as it:\n"
        "    it.sendall(eval(sys.argv[2]))\n"
        "    assert it.recv(1) == b''\n"
    )
    for number, said in ((2, b"\x00\xce\xf7\x85\x3c\x09\x00\x00\x00"), (3, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")):
        subprocess.run([*hosts.on(number), sys.executable, "-c", script, HEAD, repr(said)], check=True)
    told = "phalanx: what has come from 10.77.0.{} is no agent, and is turned away: it speaks {}\n"
    agents[0].wait_for(re.escape(told.format(2, "the protocol of torch's store")))
    agents[0].wait_for(re.escape(told.format(3, "HTTP/2, as a client of an etcd does")))
    agents += one.start(2)
    everyone(agents, 0, 4)
    one.finish(*agents)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dry_run_says_what_is_at_the_endpoint(hosted_job: Callable[..., Job], backend: str) -> None:
    one = hosted_job("2", at(backend, HEAD))
    port = 29400 + (backend == "static")
    the_agent = f"the agent{' of node 0' if backend == 'static' else ''} at {HEAD}:{port}"
    for number, said in (
        (1, f"the store would be here: it can listen at {HEAD}:{port}"),
        (2, f"{the_agent} does not answer: nobody listens there: Connection refused"),
    ):
        (agent,) = one.start(number, options=["--dry-run"])
        assert agent.end() == 0
        assert f"phalanx: {said}\n" in agent.said
    agents = one.start(1)
    agents[0].wait_for("has come: ")
    for more, said in (
        ({}, f"{the_agent} answers"),
        ({"PHALANX_JOB_SECRET": SECRET[::-1]}, "this node is not taken: the job's"),
    ):
        (agent,) = one.start(2, options=["--dry-run"], **more)
        assert agent.end() == 0
        assert f"phalanx: {said}" in agent.said
    agents += one.start(2)
    everyone(agents, 0, 4)
    one.finish(*agents)
