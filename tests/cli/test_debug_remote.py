"""`phalanx debug --rank N` of a rank that stands at no breakpoint, which Python 3.14 and later can be stopped at."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.test_debug import Client, debug, sockets
from tests.support.command import LIMIT, Launcher, Place
from tests.support.helpers import Gate, Ready, interpreter

NEW = sys.executable if sys.version_info >= (3, 14) else interpreter("3.14") or interpreter("3.15")

pytestmark = [pytest.mark.slow, pytest.mark.each_python]
needs_new = pytest.mark.skipif(NEW is None, reason="a rank without a breakpoint needs Python 3.14 or later")

LOOP = """
    import os, time
    {ready}
    steps = 0
    def train():
        global steps
        while not os.access("on", os.F_OK):
            steps += 1
            {body}
    train()
    print("ended")
    """


@pytest.fixture
def new(place: Place) -> Place:
    """A place whose ranks run a Python that can be stopped anywhere."""
    if NEW is not None and sys.executable != NEW:
        place.env["PYTHON_EXEC"] = NEW
    return place


def started(place: Place, ready: Ready, body: str, *options: object, nprocs: int = 1) -> Launcher:
    script = place.write(LOOP.format(ready=ready.python().replace("\n", "\n    "), body=body))
    run = place.start("--nproc-per-node", nprocs, *options, script)
    ready.wait(nprocs)
    return run


def go_on(place: Place) -> None:
    (place.folder / "on").touch()


@needs_new
@pytest.mark.parametrize("body", ["pass", "time.sleep(0.001)"])
def test_a_rank_is_stopped_where_it_is(new: Place, ready: Ready, body: str) -> None:
    with started(new, ready, body, "--hang-timeout", 5, nprocs=2) as run:
        with Client(new, "--rank", "1") as client:
            assert "train()\n" in client.ask("p 'steps', steps > 0", "('steps', True)\n")
            for _ in range(5):
                client.ask("n", "-> ")
            (path,) = sockets(new)
            assert path.parent.name == "1"
            assert client.end("w\nc\n").out.count("(Pdb) ") >= 2
        assert debug(new, "p 'steps', steps > 0", "--rank", "1").out.endswith("('steps', True)\n")
        assert debug(new, "c").status == 0
        go_on(new)
        done = run.end()
        assert (done.status, sorted(done.out.splitlines())) == (0, ["[0] ended", "[1] ended"])


@needs_new
def test_a_sleep_is_interrupted_and_goes_on(new: Place, ready: Ready) -> None:
    with started(new, ready, "time.sleep(3)") as run:
        assert "-> time.sleep(3)\n" in debug(new, "p steps; c", "--rank", "0").out
        go_on(new)
        assert run.end() == (0, "[0] ended\n", run.end().err)


@needs_new
def test_a_breakpoint_is_set_from_outside(new: Place, ready: Ready) -> None:
    with started(new, ready, "time.sleep(0.001)") as run:
        done = debug(
            new, "b train, steps % 7 == 0; b 9, steps % 7 == 0; c; p 'rest', steps % 7; cl 1 2; c", "--rank", "0"
        )
        assert "('rest', 0)\n" in done.out
        go_on(new)
        assert run.end().status == 0


@needs_new
def test_quit_ends_a_rank_that_was_stopped(new: Place, ready: Ready) -> None:
    with started(new, ready, "time.sleep(0.001)") as run:
        assert debug(new, "q", "--rank", "0").status == 0
        done = run.end()
        assert (done.status, "BdbQuit" in done.err) == (1, True)


@needs_new
def test_a_rank_that_handles_the_quit_is_left(new: Place, ready: Ready) -> None:
    body = """
            try:
                time.sleep(0.001)
            except Exception:
                pass"""
    with started(new, ready, body) as run:
        done = debug(new, "q", "--rank", "0")
        assert (done.status, "rank 0 has not ended within 5 s" in done.err) == (0, True)
        go_on(new)
        assert run.end().status == 0


@needs_new
def test_a_rank_in_c_code_stops_for_nobody_later(new: Place, ready: Ready, gate: Gate) -> None:
    script = new.write(f"{ready.python()}\n{gate.python()}\nprint('ended')\n")
    with new.start(script) as run:
        ready.wait()
        done = debug(new, "p 1", "--rank", "0", "--wait", "0.5")
        assert (done.status, done.out) == (1, "")
        assert "it has not come to a line of Python within 0.5 s, and goes on" in done.err
        gate.open()
        assert run.end().out == "[0] ended\n"
        assert not sockets(new)


@needs_new
def test_a_client_that_is_killed_leaves_the_rank_running(new: Place, ready: Ready, gate: Gate) -> None:
    script = new.write(f"{ready.python()}\n{gate.python()}\nprint('ended')\n")
    with new.start(script) as run:
        (pid,) = map(int, ready.wait())
        with Client(new, "--rank", "0", "--wait", "1000") as client:
            while f"@phalanx-debug-{pid}\n" not in Path("/proc/net/unix").read_text():
                os.sched_yield()
            err = debug(new, "", "--rank", "0").err
            assert "another phalanx debug" in err
            assert err.endswith(" is about to stop it\n")
            client.process.kill()
            client.process.wait(LIMIT)
        gate.open()
        assert run.end().out == "[0] ended\n"
        assert not sockets(new)


@needs_new
def test_a_client_that_goes_too_soon_ends_no_rank(new: Place, ready: Ready, gate: Gate) -> None:
    script = new.write(f"""
        import os, signal, sys, time
        class Finder:
            def find_spec(name, *_):
                if name == "pdb":
                    os.write(1, b"asked\\n")
                    {gate.python()}
        {ready.python().replace(chr(10), chr(10) + " " * 8)}
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.meta_path.insert(0, Finder)
        while not os.access("on", os.F_OK):
            time.sleep(0.001)
        print("ended")
        """)
    with new.start(script) as run:
        ready.wait()
        with Client(new, "--rank", "0") as client:
            run.read_until("asked", "stdout")
            client.process.kill()
            client.process.wait(LIMIT)
        go_on(new)
        gate.open()
        done = run.end()
        assert (done.status, done.out) == (0, "[0] ended\n")


@needs_new
def test_a_client_ends_with_the_rank_that_it_waits_for(new: Place, ready: Ready, gate: Gate) -> None:
    script = new.write(f"{ready.python()}\n{gate.python()}\n")
    with new.start(script) as run:
        (pid,) = map(int, ready.wait())
        with Client(new, "--rank", "0", "--wait", "1000") as client:
            while f"@phalanx-debug-{pid}\n" not in Path("/proc/net/unix").read_text():
                os.sched_yield()
            os.kill(pid, signal.SIGKILL)
            done = client.end()
            assert (done.status, done.err) == (1, "Error: rank 0 has ended\n")
        run.end()


@needs_new
@pytest.mark.parametrize(
    "why", ["its Python forbids it", "it is paused or stopped (phalanx resume)", "only 3.14 and later"]
)
def test_a_rank_that_cannot_be_stopped_is_refused(new: Place, ready: Ready, gate: Gate, why: str) -> None:
    if why == "its Python forbids it":
        new.env["PYTHON_DISABLE_REMOTE_DEBUG"] = "1"
    elif why == "only 3.14 and later":
        old = sys.executable if sys.version_info < (3, 14) else interpreter("3.11") or interpreter("3.13")
        if old is None:
            pytest.skip("there is no Python below 3.14")
        new.env["PYTHON_EXEC"] = old
    with new.start(new.write(f"{ready.python()}\n{gate.python()}\n")) as run:
        (pid,) = map(int, ready.wait())
        if why.startswith("it is paused"):
            os.kill(pid, signal.SIGSTOP)
        done = debug(new, "", "--rank", "0")
        assert (done.status, done.out) == (1, "")
        assert why in done.err
        os.kill(pid, signal.SIGCONT)
        gate.open()
        assert run.end().status == 0


def test_a_rank_that_is_no_python_is_refused(place: Place, gate: Gate) -> None:
    with place.start("--no-python", "sh", "-c", f"echo up; head -c1 {gate.address} >/dev/null; true") as run:
        run.read_until("up", "stdout")
        done = debug(place, "")
        assert (done.status, "no rank of" in done.err) == (1, True)
        assert "and no Python" in debug(place, "", "--rank", "0").err
        assert "this machine has no rank 1" in debug(place, "", "--rank", "1").err
        gate.open()
        assert run.end().status == 0


@needs_new
def test_a_python_without_our_start_is_refused(new: Place, ready: Ready) -> None:
    assert NEW is not None
    script = new.write(LOOP.format(ready=ready.python().replace("\n", "\n    "), body="time.sleep(0.001)"))
    with new.start("--no-python", NEW, script) as run:
        ready.wait()
        assert "it runs no program that Phalanx has started" in debug(new, "", "--rank", "0").err
        go_on(new)
        assert run.end().status == 0
