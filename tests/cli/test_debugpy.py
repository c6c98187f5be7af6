"""`phalanx run --debugpy`: an editor attaches to each rank, by the file in the run's folder."""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from tests.cli.test_debug import debug, stopped
from tests.support.command import Launcher, Place, refused
from tests.support.debug_client import Session
from tests.support.helpers import TIMEOUT

pytest.importorskip("debugpy", reason="debugpy is not installed")
pytestmark = [pytest.mark.long, pytest.mark.each_python]

SCRIPT = """
    import os, time
    import phalanx.timer
    phalanx.timer.beat()
    began = time.monotonic()
    loss = 40 + int(os.environ["RANK"])
    loss += 1
    assert "PHALANX_DEBUGPY_LISTEN" not in os.environ
    phalanx.timer.beat()
    print("loss", loss)
    """
LINE = 7


class Editor:
    """Attaches to a rank as VS Code does, with a breakpoint."""

    def __init__(self, configuration: dict[str, Any], file: str, line: int) -> None:
        self._file, self._line = file, line
        self._stops: queue.Queue[dict[str, Any]] = queue.Queue()
        where = configuration["connect"]
        self._socket = socket.create_connection((where["host"], where["port"]), TIMEOUT)
        self._socket.settimeout(None)
        self.session = Session(self, self._socket.makefile("rb"), self._socket.makefile("wb"))
        self.session.begin("attach", configuration)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.session.request("disconnect")
        with suppress(OSError):  # the rank has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self.session.thread.join()
        self.session.close()
        self._socket.close()

    def on_event(self, session: Session, event: str, body: dict[str, Any]) -> None:
        if event == "initialized":
            session.request("setBreakpoints", source={"path": self._file}, breakpoints=[{"line": self._line}])
            session.request("configurationDone")
        elif event == "stopped":
            self._stops.put(body)

    def stop(self) -> tuple[int, int, int]:
        """Wait until the rank is held. Returns the thread, the line and the frame."""
        thread = self._stops.get(timeout=TIMEOUT)["threadId"]
        frame = self.session.ask("stackTrace", threadId=thread)["stackFrames"][0]
        assert frame["source"]["path"] == self._file
        return thread, frame["line"], frame["id"]

    def value(self, frame: int, expression: str) -> str:
        return str(self.session.ask("evaluate", expression=expression, frameId=frame)["result"])


def configurations(run: Launcher) -> list[dict[str, Any]]:
    """What the file has, whose path the console has."""
    said = run.read_until("launch.json").splitlines()[-1]
    content = json.loads(Path(said.rpartition(": ")[2]).read_text())
    for _ in content["configurations"] if "waits" in said else ():
        run.read_until("waits for an editor at 127.0.0.1:")
    assert content["compounds"][0]["configurations"] == [each["name"] for each in content["configurations"]]
    found: list[dict[str, Any]] = content["configurations"]
    return found


@pytest.mark.parametrize("how", [(), ("--preload", "json")])
def test_an_editor_holds_each_rank_while_timers_rest(place: Place, how: tuple[str, ...]) -> None:
    script = place.write(SCRIPT)
    options = ("--nproc-per-node", 2, "--debugpy", 0, "--debugpy-wait", "--hang-timeout", 1)
    with place.start(*options, *how, script) as run:
        for number, configuration in enumerate(configurations(run)):
            assert configuration["name"] == f"rank {number}"
            with Editor(configuration, script, LINE) as editor:
                thread, line, frame = editor.stop()
                assert (line, editor.value(frame, "loss")) == (LINE, str(40 + number))
                while editor.value(frame, "time.monotonic() - began > 3") != "True":
                    pass  # by the clock of the rank, longer than the hang timeout
                editor.session.ask("next", threadId=thread)
                thread, line, frame = editor.stop()
                assert (line, editor.value(frame, "loss")) == (LINE + 1, str(41 + number))
                editor.session.ask("continue", threadId=thread)
        done = run.end()
        assert (done.status, sorted(done.out.splitlines())) == (0, ["[0] loss 41", "[1] loss 42"])


def test_without_an_editor_a_breakpoint_is_that_of_pdb(place: Place) -> None:
    with place.start("--debugpy", 0, place.write("breakpoint()\nprint('went on')\n")) as run:
        configurations(run)
        stopped(run)
        assert debug(place, "c").status == 0
        assert run.end().out == "[0] went on\n"


def test_with_an_editor_a_breakpoint_stops_there(place: Place) -> None:
    script = place.write("x = 41\nbreakpoint()\nprint('went on')\n")
    with place.start("--debugpy", 0, "--debugpy-wait", script) as run:
        (configuration,) = configurations(run)
        with Editor(configuration, script, 1) as editor:
            thread, line, _ = editor.stop()
            assert line == 1
            editor.session.ask("continue", threadId=thread)
            thread, line, frame = editor.stop()
            assert (line in (2, 3), editor.value(frame, "x")) == (True, "41")
            editor.session.ask("continue", threadId=thread)
        assert run.end().out == "[0] went on\n"


def test_a_port_that_is_taken_is_named_by_its_rank(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = place.run("--debugpy", taken.getsockname()[1], place.write("print('runs')"))
    assert (done.status, done.out) == (0, "[0] runs\n")
    assert "--debugpy: no editor can attach to pid" in done.err


def test_a_python_without_debugpy_is_refused_or_runs(place: Place) -> None:
    place.env["PYTHONPATH"] = os.pathsep.join([str(place.folder), *filter(None, [place.env.get("PYTHONPATH")])])
    hides = "u.find_spec = lambda name, find=u.find_spec: None if name == 'debugpy' else find(name)"
    site, script = (
        place.write(f"import importlib.util as u\n{hides}\n", "sitecustomize.py"),
        place.write("print('runs')"),
    )
    refused(place.run("--debugpy", 0, script), f"{sys.executable} has no debugpy; pip install debugpy")
    os.unlink(site)
    place.write("raise ImportError('none here')", "debugpy.py")
    done = place.run("--debugpy", 0, script)
    assert done.out == "[0] runs\n"
    assert "--debugpy: no editor can attach to pid" in done.err
    assert "ImportError: none here" in done.err
