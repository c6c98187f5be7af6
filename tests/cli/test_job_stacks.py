"""The socket by which `phalanx stack` asks an agent: who may, what is answered, and what becomes of the others."""

from __future__ import annotations

import os
import socket
import stat
import time
from typing import TYPE_CHECKING

import pytest

from phalanx._rendezvous import stack_report
from phalanx._rendezvous.life import Found
from phalanx._rendezvous.records import Job, Member
from phalanx._run import job_stacks
from phalanx._run.job_stacks import MOST_CALLERS, NAME, SEEN, NotToldError, StackDoor, ask
from phalanx._runs import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from phalanx._runs.record import Run


JOB = Job(3, "running", 2, 2, (Member("a", "host-a", 2, "x"), Member("b", "host-b", 1, "x")))
HERE = 'Thread 0x01 (most recent call first):\n  File "t.py", line 4 in all_reduce\n'
NOBODY = 65534
SOON = 20.0


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class Agent:
    """A door, and those who ask there. They are told when the test says so, or at once, what is ``found``."""

    def __init__(self, folder: Path, found: Found | None = None) -> None:
        self.folder = folder
        self.asked: list[Callable[[Found], None]] = []
        self.warned: list[str] = []
        self.door = StackDoor(self.asked.append if found is None else lambda tell: tell(found), self.warned.append)
        self.door.open(str(folder))
        until(lambda: self.warned or self.door._listener is not None)

    def connect(self) -> socket.socket:
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(SOON)
        job_stacks._connect(one, str(self.folder))
        return one

    def run(self, **wrong: int) -> Run:
        """The record of a run of this process."""
        made = record.begin(run_id="x", name="x", command=[], started=1.0, nprocs=1, ranks=[], nodes=2)
        record.write(str(self.folder), made.replace(**wrong))
        return record.read(str(self.folder))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Makes an agent, in a folder whose path is longer than that of a socket may be."""
    agents: list[Agent] = []
    folder = tmp_path / ("a folder of a long name " * 8)
    folder.mkdir()

    def make(found: Found | None = None) -> Agent:
        agents.append(Agent(folder, found))
        return agents[-1]

    yield make
    for agent in agents:
        agent.door.close()
    assert not (folder / NAME).exists()


def test_who_asks_is_told(made: Callable[..., Agent]) -> None:
    found = Found(JOB, {"a": stack_report.write({0: HERE, 1: HERE}, 0, 2)}, "its agent sleeps")
    agent = made(found)
    assert stat.S_IMODE(os.stat(agent.folder / NAME).st_mode) == 0o600
    told = ask(str(agent.folder), agent.run(), os.geteuid())
    assert told.texts == {0: HERE, 1: HERE, 2: "# no Python stack: its agent sleeps\n"}
    assert (told.why, told.notes) == ("", [])
    assert told.ranks.name([0, 1]) == "ranks 0-1 on host host-a"


def test_nobody_is_told_what_is_not_known(made: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    agent = made(Found(None, {}, "no attempt of the job runs now"))
    with pytest.raises(NotToldError, match="no attempt of the job runs now"):
        ask(str(agent.folder), agent.run(), os.geteuid())
    with pytest.raises(NotToldError, match="another process than its launcher answers"):
        ask(str(agent.folder), agent.run(pid=1), os.geteuid())
    with pytest.raises(NotToldError, match=rf"there is no {NAME}"):
        ask(str(agent.folder.parent), agent.run(), os.geteuid())
    monkeypatch.setattr(job_stacks, "peer", lambda _: (os.getpid(), NOBODY))
    with pytest.raises(NotToldError, match="another process than its launcher answers"):
        ask(str(agent.folder), agent.run(), os.geteuid())


def test_an_agent_that_is_stopped_or_sends_nonsense(
    made: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_stacks, "SOON", 0.1)
    agent = made()
    run = agent.run()
    agent.door.close()
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(agent.folder)
        try:
            listener.bind(NAME)
        finally:
            os.chdir(here)
        with pytest.raises(NotToldError, match="its agent cannot be asked: Connection refused"):
            ask(str(agent.folder), run, os.geteuid())
        listener.listen(1)
        with pytest.raises(NotToldError, match=r"has not answered within 0.1 s"):
            ask(str(agent.folder), run, os.geteuid())
        monkeypatch.setattr(job_stacks, "peer", lambda one: _say(one, listener))
        with pytest.raises(NotToldError, match="what its agent has answered cannot be read: Expected `object`"):
            ask(str(agent.folder), run, os.geteuid())
    monkeypatch.undo()
    with made().connect() as one:  # what is left there is nobody's
        assert one.recv(1) == SEEN


def _say(_: socket.socket, listener: socket.socket) -> tuple[int, int]:
    listener.accept()[0].close()  # of who has waited in vain
    there = listener.accept()[0]
    there.send(SEEN + b"[]")
    there.close()
    return os.getpid(), os.geteuid()


def test_no_more_than_some_may_ask_and_who_goes_is_forgotten(made: Callable[..., Agent]) -> None:
    agent = made()
    those = [agent.connect() for _ in range(MOST_CALLERS)]
    assert {one.recv(1) for one in those} == {SEEN}
    with agent.connect() as beyond:
        assert beyond.recv(1) == b""
    with pytest.raises(NotToldError, match="it ends, or too many ask at once"):
        ask(str(agent.folder), agent.run(), os.geteuid())
    those.pop().close()
    with those.pop() as noisy:
        noisy.send(b"GET / HTTP/1.1")  # nothing is to be said
        with pytest.raises(ConnectionResetError):
            noisy.recv(1)
    until(lambda: len(agent.door.connections) == len(those))
    with agent.connect() as another:
        assert another.recv(1) == SEEN
        until(lambda: len(agent.asked) == MOST_CALLERS + 1)
        for tell in agent.asked:
            tell(Found(JOB, {}, "x" * 10_000))  # also to those who have gone
        agent.asked.clear()
        assert b"its agent" not in another.recv(1 << 20)
    for one in those:
        one.close()


def test_the_end_of_an_agent_ends_the_wait(made: Callable[..., Agent]) -> None:
    agent = made()
    with agent.connect() as one:
        assert one.recv(1) == SEEN
        agent.door.close()
        assert one.recv(1) == b""


def test_a_folder_that_takes_no_socket_is_told_of(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("somebody's")
    agent = Agent(tmp_path)
    until(lambda: agent.warned)
    assert agent.warned == [
        "phalanx stack cannot show the ranks of other machines here: [Errno 98] Address already in use"
    ]
    agent.door.close()
    assert (tmp_path / NAME).read_text() == "somebody's"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process takes root")
def test_another_user_learns_nothing(made: Callable[..., Agent]) -> None:
    agent = made(Found(JOB, {}, "secret"))
    inside = os.open(agent.folder, os.O_PATH)
    refused, nothing = 3, 4

    def as_nobody() -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                with socket.socket(socket.AF_UNIX) as one:
                    one.settimeout(SOON)
                    one.connect(f"/proc/self/fd/{inside}/{NAME}")
                    code = nothing if one.recv(100) == b"" else 5
            except PermissionError:
                code = refused
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    try:
        os.chmod(agent.folder, 0o755)  # noqa: S103 - as a shared folder of logs may be
        assert as_nobody() == refused  # by the file's mode
        os.chmod(agent.folder / NAME, 0o666)  # noqa: S103 - what is behind that is tried
        assert as_nobody() == nothing  # by what the kernel says of the other end
    finally:
        os.close(inside)
