"""The control socket of a run: who may ask there, what is answered, and what becomes of the others."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx._base import channels
from phalanx._run import control_socket
from phalanx._runs import record
from tests.support.helpers import refusal_of_another_user

NOBODY = 65534
SOON = 20.0
QUESTION = b'{"version": 1, "ask": "status"}\n'


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class Launcher:
    """A control socket, whose questions are answered when the test does so, or at once with ``answer``."""

    def __init__(self, folder: Path, answer: bytes = b"") -> None:
        self.folder = folder
        self.questions: list[control_socket.Question] = []
        self.replies: list[control_socket.Reply] = []
        self.warned: list[str] = []
        self._answer = answer
        self.socket = control_socket.ControlSocket(self._take, self.warned.append)
        self.socket.open(str(folder))
        until(lambda: self.warned or self._listens())

    def _listens(self) -> bool:
        try:
            self.connect().close()
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        until(lambda: not self.socket.connections)
        return True

    def _take(self, question: control_socket.Question, reply: control_socket.Reply) -> None:
        if question.name == "nonsense":
            raise control_socket.RefusedError("no such question")
        if question.name == "fault":
            raise ValueError("a fault")
        self.questions.append(question)
        self.replies.append(reply)
        if self._answer:
            reply(self._answer)

    def connect(self, question: bytes = b"") -> socket.socket:
        inside = os.open(self.folder, os.O_PATH)
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(SOON)
        try:
            one.connect(f"/proc/self/fd/{inside}/{control_socket.NAME}")
        except OSError:
            one.close()
            raise
        finally:
            os.close(inside)
        if question:
            assert one.recv(1) == control_socket.ACCEPTED
            one.sendall(question)
        return one

    def run(self, **wrong: int) -> record.Run:
        """The record of a run of this process."""
        made = record.begin(run_id="x", name="x", command=[], started=1.0, nprocs=1, ranks=[], nodes=2)
        record.write(str(self.folder), made.replace(**wrong))
        return record.read(str(self.folder))

    def ask(self, name: str = "status", **wrong: int) -> bytes:
        return control_socket.ask(str(self.folder), self.run(**wrong), os.geteuid(), name, ranks=[1])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Makes a launcher, in a folder whose path is longer than that of a socket may be."""
    launchers: list[Launcher] = []
    folder = tmp_path / ("a folder of a long name " * 8)
    folder.mkdir()

    def make(answer: bytes = b"") -> Launcher:
        launchers.append(Launcher(folder, answer))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.socket.close()
    assert not (folder / control_socket.NAME).exists()


def test_a_question_is_answered(made: Callable[..., Launcher]) -> None:
    """An answer of many bytes comes whole."""
    answer = json.dumps({"version": 1, "text": "x" * (5 << 20)}).encode()
    launcher = made(answer)
    assert stat.S_IMODE(os.stat(launcher.folder / control_socket.NAME).st_mode) == 0o600
    assert launcher.ask() == answer + b"\n"
    (question,) = launcher.questions
    assert (question.name, question.arguments["ranks"]) == ("status", [1])
    assert question.asker == (os.getpid(), os.geteuid(), "")
    for name, why in (("nonsense", "no such question"), ("fault", "its launcher could not answer: a fault")):
        with pytest.raises(control_socket.RefusedError, match=why):
            control_socket.ask_for(str(launcher.folder), launcher.run(), os.geteuid(), name)
    assert not launcher.warned


def test_no_other_process_than_the_launcher_is_believed(
    made: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = made(b"{}")
    with pytest.raises(control_socket.NotAnsweredError, match="another process than its launcher answers"):
        launcher.ask(pid=1)
    with pytest.raises(control_socket.NotAnsweredError, match=rf"there is no {control_socket.NAME} in its folder"):
        control_socket.ask(str(launcher.folder.parent), launcher.run(), os.geteuid(), "status")
    monkeypatch.setattr(channels, "peer", lambda _: (os.getpid(), NOBODY))
    with pytest.raises(control_socket.NotAnsweredError, match="another process than its launcher answers"):
        launcher.ask()


def test_a_launcher_that_is_stopped_or_sends_nonsense(
    made: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "SOON", 0.1)
    launcher = made()
    launcher.socket.close()
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(launcher.folder)
        try:
            listener.bind(control_socket.NAME)
        finally:
            os.chdir(here)
        with pytest.raises(control_socket.NotAnsweredError, match="its launcher cannot be asked: Connection refused"):
            launcher.ask()
        listener.listen(1)
        with pytest.raises(control_socket.NotAnsweredError, match=r"has not answered within 0.1 s"):
            launcher.ask()
        listener.accept()[0].close()
        there: list[socket.socket] = []
        monkeypatch.setattr(channels, "peer", lambda _: _answer(listener, there))
        with pytest.raises(control_socket.NotAnsweredError, match="what its launcher has answered is no answer"):
            control_socket.ask_for(str(launcher.folder), launcher.run(), os.geteuid(), "status")
        there[0].close()
    monkeypatch.undo()
    with made().connect() as one:  # what is left there is nobody's
        assert one.recv(1) == control_socket.ACCEPTED


def _answer(listener: socket.socket, there: list[socket.socket]) -> tuple[int, int]:
    there.append(listener.accept()[0])
    there[0].send(control_socket.ACCEPTED + b"[]\n")
    there[0].shutdown(socket.SHUT_WR)
    return os.getpid(), os.geteuid()


def test_what_is_no_question_is_refused(made: Callable[..., Launcher]) -> None:
    launcher = made()
    for said, why in (
        (b"GET / HTTP/1.1\r\n", "this is no question"),
        (b"\xff\xfe\n", "this is no question"),
        (b"[" * 10_000 + b"\n", "this is no question"),
        (b'{"ask": 3, "version": 1}\n', "this is no question"),
        (b'{"ask": "status", "version": 99}\n', "version 99; this launcher answers version 1"),
        (b'{"ask": "status"}\n', "version None; this launcher answers version 1"),
    ):
        with launcher.connect(said) as one:
            assert why in json.loads(one.recv(1 << 16))["error"]
            assert one.recv(1) == b""
    with launcher.connect(b"x" * control_socket.MOST_QUESTION) as one, pytest.raises(ConnectionError):
        one.sendall(b"x" * (4 << 20))
    with launcher.connect(QUESTION) as another:
        launcher.socket.close()  # the end of the launcher ends the wait
        assert another.recv(1) == b""


def test_callers_beyond_the_most_are_closed(made: Callable[..., Launcher]) -> None:
    launcher = made()
    those = [launcher.connect(QUESTION) for _ in range(control_socket.MOST_CALLERS)]
    until(lambda: len(launcher.questions) == control_socket.MOST_CALLERS)
    with launcher.connect() as beyond:
        assert beyond.recv(1) == b""
    with pytest.raises(control_socket.NotAnsweredError, match="it ends, or too many ask at once"):
        launcher.ask()
    those.pop().close()
    with those.pop() as noisy:
        noisy.send(b"one more thing")  # after the question, nothing is to come
        with pytest.raises(ConnectionResetError):
            noisy.recv(1)
    until(lambda: len(launcher.socket.connections) == len(those))
    with launcher.connect(QUESTION) as another:
        until(lambda: len(launcher.questions) == control_socket.MOST_CALLERS + 1)
        for reply in launcher.replies:
            reply(b"x" * 10_000)  # also to those who have gone
        launcher.replies.clear()
        assert another.recv(1 << 20).startswith(b"xxx")
    for one in those:
        one.close()


def test_a_folder_that_takes_no_socket_is_reported(tmp_path: Path) -> None:
    (tmp_path / control_socket.NAME).write_text("somebody's")
    launcher = Launcher(tmp_path)
    until(lambda: launcher.warned)
    assert launcher.warned == [
        "phalanx status, stop and the like cannot reach this run: control.sock: [Errno 98] Address already in use"
    ]
    launcher.socket.close()
    assert (tmp_path / control_socket.NAME).read_text() == "somebody's"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process takes root")
def test_another_user_learns_nothing(made: Callable[..., Launcher]) -> None:
    launcher = made(b"secret")
    inside = os.open(launcher.folder, os.O_PATH)

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(SOON)
            one.connect(f"/proc/self/fd/{inside}/{control_socket.NAME}")
            raise ValueError(one.recv(100))

    try:
        os.chmod(launcher.folder, 0o755)  # noqa: S103 - as a shared folder of logs may be
        assert "Permission denied" in refusal_of_another_user(connect)  # by the file's mode
        os.chmod(launcher.folder / control_socket.NAME, 0o666)  # noqa: S103 - what is behind that is tried
        assert refusal_of_another_user(connect) == "b''"  # by what the kernel says of the other end
        assert launcher.questions == []
    finally:
        os.close(inside)
