"""Jobs of three hosts to which things happen at random, by a seed; and what must hold of them whatever it is.

`python -m tests.support.shaken_jobs 0 100` plays the seeds from 0 to 99, and names the rules that were broken; with
``--show``, all consoles of a seed. What happens: agents are killed, and started again, with the store that one of them
has; they, their keepers and their guards are stopped, or killed; hosts are cut off; somebody sends a signal; workers
fail. The machine is a real one, so a seed is about the same story each time, and not exactly.

A rank must not run twice at a time, but for as long as an agent may be stopped or cut off; those whom nothing happened
to must agree on how the job has ended; an exit code of 0 must be true; and nothing may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import hosts as hosts_of
from tests.support.etcd import Etcd
from tests.support.hosts import Hosts
from tests.support.jobs import STORE, UNKNOWN, Agent, EtcdJob, Job

AWAY, GRACE, TTL = 4.0, 1.0, 2.0
"""Seconds that an agent may be away or stopped; that workers have to end; of a lease."""

SLACK = 1.5
"""Seconds that this machine may take to do what is due, beside its other work."""

LONGEST = 90.0
"""Seconds within which all has ended, whatever happens."""

SECRET = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of the tests

WORKER = """
import os, sys, time
folder, lasts, fails = sys.argv[1], float(sys.argv[2]), sys.argv[3].split(",")
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
path = f"{folder}/{os.uname().nodename}.{os.environ['PHALANX_SHAKEN']}.{attempt}.{rank}.{os.getpid()}"
with open(path, "w") as file:
    file.write(str(time.monotonic()))
until = time.monotonic() + lasts
while time.monotonic() < until:
    time.sleep(0.05)
    os.utime(path)
    if f"{rank}@{attempt}" in fails and time.monotonic() > until - lasts / 2:
        sys.exit(10 + int(rank))
os.rename(path, path + ".well")
"""


class Span(NamedTuple):
    """When a worker ran (monotonic seconds), of which agent, in which attempt."""

    agent: str
    attempt: int
    rank: int
    began: float
    ended: float
    is_well: bool


class Plan(NamedTuple):
    """What a seed is."""

    backend: str
    nodes: str
    options: list[str]
    lasts: float
    fails: str
    orphan_grace: int
    troubles: list[tuple[float, str, int, float]]
    """When which thing happens to which host, for how long."""


TROUBLES = ("kill", "return", "stop", "cut", "interrupt", "terminate", "keeper", "guard", "worker", "stop keeper")


def plan_of(seed: int) -> Plan:
    """Return what a seed is."""
    chance = random.Random(seed)  # noqa: S311 - of tests
    backend = chance.choice(["static", "c10d", "etcd"])
    nodes = chance.choice(["3", "3", "3" if backend == "static" else "2:3", "3" if backend == "static" else "1:3"])
    orphan_grace = chance.choice([0, 0, 2])
    options = ["--max-restarts", str(chance.choice([0, 1, 3])), "--grace", f"{GRACE:g}"]
    options += ["--orphan-grace", str(orphan_grace)] if orphan_grace else []
    fails = ",".join(f"{chance.randrange(6)}@{attempt}" for attempt in range(2) if chance.random() < 0.25)
    troubles = [
        (chance.uniform(0.5, 7), chance.choice(TROUBLES), chance.randint(1, 3), chance.choice([0.5, 1.5, 3, 6, 9]))
        for _ in range(chance.randint(1, 3))
    ]
    return Plan(backend, nodes, options, chance.uniform(2, 6), fails or "-", orphan_grace, sorted(troubles))


class Shaken:
    """A job to which things happen."""

    def __init__(self, plan: Plan, hosts: Hosts, folder: Path, stack: ExitStack) -> None:
        self.plan, self.hosts, self.folder = plan, hosts, folder
        self.job = self._make(stack)
        self.job.conf = [f"lease_ttl={TTL:g}", "last_call_timeout=1", "join_timeout=10", f"away_timeout={AWAY:g}"]
        (folder / "train.py").write_text(WORKER)
        self.spans_in = folder / "spans"
        self.spans_in.mkdir()
        self.job.command = [str(folder / "train.py"), str(self.spans_in), f"{plan.lasts}", plan.fails]
        self.agents: list[Agent] = []  # the one of each host, in the end
        self.all: list[Agent] = []
        self.names: dict[int, str] = {}  # of agents, by pid: what their workers know them by
        self.hit: set[int] = set()  # agents to which something happened that they could not see coming, by pid
        self.signals: set[int] = set()
        self.was_away = False  # whether one was stopped, or cut off
        self.store_ended = False  # whether the agent that has the store was killed

    def _make(self, stack: ExitStack) -> Job:
        plan, hosts = self.plan, self.hosts
        if plan.backend == "etcd":
            etcd = stack.enter_context(_etcd(hosts))
            return EtcdJob(self.folder, hosts, etcd, plan.nodes)
        first = hosts.address(1)
        static = ["--master-addr", first, "--master-port", "29500"]
        c10d = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29400"]
        meeting = {"static": lambda number: ["--node-rank", str(number - 1), *static], "c10d": lambda _: c10d}
        job = Job(self.folder, hosts, plan.nodes, meeting[plan.backend])
        job.env = {"PHALANX_JOB_SECRET": SECRET}
        return job

    def start(self, number: int) -> Agent:
        """Start an agent on a host."""
        name = f"a{len(self.all)}"
        [agent] = self.job.start(number, options=self.plan.options, PHALANX_SHAKEN=name)
        self.all.append(agent)
        self.names[agent.launcher()] = name
        return agent

    def run(self) -> list[str]:
        """Let it happen. Returns which rules were broken."""
        self.agents = [self.start(number) for number in (1, 2, 3)]
        began = time.monotonic()
        due = list(self.plan.troubles)
        later: list[tuple[float, Callable[[], object]]] = []
        while True:
            now = time.monotonic() - began
            while due and due[0][0] <= now:
                _, what, number, span = due.pop(0)
                later += [(now + span, then) for then in self.trouble(what, number)]
            for moment, then in list(later):
                if moment <= now:
                    later.remove((moment, then))
                    then()
            if not due and not later and all(agent.process.poll() is not None for agent in self.agents):
                break
            if now > LONGEST:
                return [f"not ended: {[agent.number for agent in self.agents if agent.process.poll() is None]}"]
            time.sleep(0.02)
        return [*self.overlaps(), *self.lies(), *self.leftovers()]

    # --- what happens

    def trouble(self, what: str, number: int) -> Iterator[Callable[[], object]]:
        """Have something happen. Yields what follows later."""
        agent = self.agents[number - 1]
        pid = agent.launcher()
        if agent.process.poll() is not None:
            return
        if what in ("kill", "return"):
            self.hit.add(pid)
            self.store_ended |= number == 1 and self.plan.backend != "etcd"
            self.send(pid, signal.SIGKILL)
            agent.process.wait()
            if what == "return":
                yield lambda: self.agents.__setitem__(number - 1, self.start(number))
        elif what in ("stop", "stop keeper"):
            target = pid if what == "stop" else self.below(pid, 2)
            self.hit.add(pid)
            self.was_away = True
            self.send(target, signal.SIGSTOP)
            yield partial(self.send, target, signal.SIGCONT)
        elif what == "cut":
            self.hit.add(pid)
            self.was_away = True
            self.store_ended |= number == 1 and self.plan.backend != "etcd"
            self.hosts.silence(number)
            yield lambda: self.hosts.heal(number)
        elif what in ("interrupt", "terminate"):
            number_of = signal.SIGINT if what == "interrupt" else signal.SIGTERM
            self.signals.add(128 + number_of)
            self.send(pid, number_of)
        else:
            self.send(self.below(pid, {"guard": 1, "keeper": 2, "worker": 3}[what]), signal.SIGKILL)

    @staticmethod
    def send(pid: int, number: int) -> None:
        """Send a signal to a process, if it is there."""
        with suppress(ProcessLookupError):
            if pid > 0:
                os.kill(pid, number)

    @staticmethod
    def below(pid: int, depth: int) -> int:
        """Return a process so far below another: its guard, the keeper, a worker; 0: there is none."""
        for _ in range(depth):
            try:
                found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            except OSError:
                return 0
            if not found:
                return 0
            pid = int(found[0])
        return pid

    # --- what must hold

    def spans(self) -> list[Span]:
        """Return when which workers ran."""
        found = []
        for path in self.spans_in.iterdir():
            _host, agent, attempt, rank, _pid, *well = path.name.split(".")
            text = path.read_text()
            if text:
                last = path.stat().st_mtime - time.time() + time.monotonic()
                found.append(Span(agent, int(attempt), int(rank), float(text), last, bool(well)))
        return sorted(found, key=lambda span: span.began)

    def overlaps(self) -> Iterator[str]:
        """Name the ranks that ran twice at a time, for longer than they may."""
        most = SLACK + (AWAY + GRACE if self.was_away else 0.0)
        spans = self.spans()
        for index, one in enumerate(spans):
            for other in spans[index + 1 :]:
                both = min(one.ended, other.ended) - max(one.began, other.began)
                if one.rank == other.rank and both > most:
                    yield f"rank {one.rank} ran twice for {both:.1f} s: {one}, {other}"

    def lies(self) -> Iterator[str]:
        """Name the exit codes that cannot be true, or do not agree."""
        codes = {agent: agent.process.returncode for agent in self.all}
        plain = {agent: code for agent, code in codes.items() if agent.launcher() not in self.hit}
        for agent, code in codes.items():
            mine = [span for span in self.spans() if span.agent == self.names[agent.launcher()]]
            last = [span for span in mine if span.attempt == max(each.attempt for each in mine)]
            if code == 0 and not all(span.is_well for span in last):
                yield f"the agent of host {agent.number} exits with 0, and its workers have not succeeded: {last}"
            early = {128 - known for known in self.signals}  # its signals were not handled yet
            if code not in (-9, 0, 1, 2, UNKNOWN, 130, 143, 137, *range(10, 16), *early):
                yield f"the agent of host {agent.number} exits with {code}"
            if code == 130 and 130 not in self.signals and 143 not in self.signals:
                yield f"the agent of host {agent.number} exits with {code}, and nobody has sent a signal"
            if re.search("^Traceback", agent.said, re.MULTILINE):  # a worker's has a prefix
                yield f"the agent of host {agent.number} shows a traceback"
        # An agent that was started again may have come too late; one that SIGTERM reached may have left.
        first = {agent: code for agent, code in plain.items() if agent in self.all[:3] and code not in (UNKNOWN, 143)}
        if not self.store_ended and len(set(first.values())) > 1 and not self.signals:
            yield f"those to whom nothing happened exit with {[(a.number, code) for a, code in first.items()]}"
        if 0 in first.values() and set(first.values()) - {0, 130}:
            yield f"some exit with 0, and others with {set(first.values())}"

    def leftovers(self) -> Iterator[str]:
        """Name what is left of it."""
        until = time.monotonic() + self.plan.orphan_grace + GRACE + 5
        while left := [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._is_its(pid)]:
            if time.monotonic() > until:
                yield f"left: {[Path(f'/proc/{pid}/cmdline').read_bytes()[:200] for pid in left]}"
                for pid in left:
                    self.send(pid, signal.SIGKILL)
                return
            time.sleep(0.1)

    def tell(self, agent: Agent) -> str:
        """Return what became of an agent, and what it said."""
        name, code = self.names[agent.launcher()], agent.process.returncode
        return f"--- {name} on h{agent.number}, exit code {code}\n{agent.said}"

    def _is_its(self, pid: int) -> bool:
        try:
            return f"XDG_STATE_HOME={self.folder}/".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


def _etcd(hosts: Hosts) -> Etcd:
    return Etcd(1, hosts.address(STORE), hosts.on(STORE))


def play(seed: int, hosts: Hosts, folder: Path) -> tuple[list[str], str]:
    """Play a seed. Returns which rules were broken, and what the consoles say."""
    with ExitStack() as stack:
        shaken = Shaken(plan_of(seed), hosts, folder, stack)
        stack.callback(shaken.job.close)
        try:
            broken = shaken.run()
        finally:
            for number in hosts.numbers:
                hosts.heal(number)
        said = "".join(map(shaken.tell, shaken.all))
        spans = "".join(f"{span}\n" for span in shaken.spans())
        return broken, f"{said}--- workers\n{spans}"


def main(args: list[str] | None = None) -> int:
    """Play seeds, and say which were bad."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.shaken_jobs", description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="the one after the last")
    parser.add_argument("--show", action="store_true", help="show all consoles")
    asked = parser.parse_args(args)
    try:
        hosts_of.check()
    except pytest.skip.Exception as why:
        sys.stdout.write(f"nothing was played: {why}\n")
        return 0
    bad = 0
    with Hosts(4) as hosts:
        for seed in range(asked.first, asked.last):
            with tempfile.TemporaryDirectory(prefix="shaken-") as folder:
                broken, said = play(seed, hosts, Path(folder))
            bad += bool(broken)
            if broken or asked.show:
                sys.stdout.write(f"seed {seed}: {plan_of(seed)}\n{said}\n")
            for line in broken:
                sys.stdout.write(f"seed {seed}: {line}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{bad} of {asked.last - asked.first} runs broke a rule\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
