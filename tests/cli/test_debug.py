"""`breakpoint()` in a rank, `phalanx debug` at another terminal, and `phalanx run --post-mortem`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.support.command import LIMIT, Done, Launcher, Place, Shell, read_until
from tests.support.forks import code_of_fork
from tests.support.helpers import PYTHON, interpreter, wait_gone

pytestmark = [pytest.mark.slow, pytest.mark.each_python]

DEBUG = (sys.executable, "-m", "phalanx", "debug")
STOPPED = " stopped at "

STEPS = """
    import os, time
    rank = int(os.environ["RANK"])
    began = time.monotonic()
    loss = 40
    if rank == 2:
        breakpoint()
        loss += 1
        loss += 1
    print("loss", loss)
    """


class Client:
    """A `phalanx debug` whose stdin is a pipe."""

    def __init__(self, place: Place, *argv: str) -> None:
        self.process = subprocess.Popen(
            [*DEBUG, "--log-dir", str(place.logs), *argv], cwd=place.folder, env=place.env, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        with self.process:
            pass

    def ask(self, line: str, end: str) -> str:
        """What comes after a line, up to `end`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        return read_until(self.process.stdout.fileno(), end)

    def end(self, rest: str = "") -> Done:
        out, err = self.process.communicate(rest.encode(), timeout=LIMIT)
        return Done(self.process.returncode, out.decode(), err.decode())


def debug(place: Place, commands: str, *argv: str) -> Done:
    """A `phalanx debug` with these commands, and how it ended."""
    with Client(place, *argv) as client:
        return client.end("".join(f"{line}\n" for line in commands.split("; ")))


def stopped(run: Launcher) -> str:
    """Wait until a rank stands. Returns the line that says so."""
    return run.read_until(STOPPED).splitlines()[-1]


def sockets(place: Place) -> list[Path]:
    return sorted(place.logs.glob("*/attempt_0/*/error.json.debug.*"))


@contextlib.contextmanager
def linked(path: Path) -> Iterator[socket.socket]:
    """A client of our own, which has been greeted."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(LIMIT)
        folder = os.open(path.parent, os.O_PATH)
        try:
            link.connect(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        with link.makefile("rb", buffering=0) as lines:
            assert json.loads(lines.readline())["pid"]
        yield link


def closed(link: socket.socket) -> bool:
    """Whether the other end closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        while link.recv(1 << 16):
            pass
    return True


# --- stop, look, go on


def test_a_rank_is_stepped_while_the_timers_of_all_rest(place: Place) -> None:
    script = place.write("""
        import os, time
        import phalanx.timer
        rank = int(os.environ["RANK"])
        phalanx.timer.beat()
        began = time.monotonic()
        loss = 40
        if rank == 2:
            breakpoint()
            loss += 1
            loss += 1
            open("on", "w").close()
        while not os.path.exists("on"):
            os.sched_yield()
        phalanx.timer.beat()
        print("loss", loss)
        """)
    with place.start("--nproc-per-node", 4, "--hang-timeout", 3, script) as run:
        said = re.fullmatch(r"phalanx: rank 2 stopped at script.py:(\d+): phalanx debug (\S+) --rank 2", stopped(run))
        assert said is not None
        assert said[2] == str(next(place.logs.iterdir()))
        with Client(place) as client:
            assert client.ask("p loss", "40\n").startswith("> ")
            while "True" not in client.ask("p 'later', time.monotonic() - began > 5", ")\n"):
                pass  # by the clock of the rank, longer than the hang timeout
            for _ in range(1 + (sys.version_info >= (3, 13))):  # which stops at breakpoint() itself
                client.ask("n", "-> loss += 1\n")
            assert "41\n" in client.ask("p loss", "41\n")
            shown = place.program(sys.executable, "-m", "phalanx", "status", "--log-dir", place.logs).out
            assert f"script.py:{int(said[1]) + 1 + (sys.version_info >= (3, 13))}\n" in shown
            done = client.end("c\n")
        assert (done.status, done.err) == (0, "")
        assert sorted(run.end().out.split("\n")) == [
            "",
            *(f"[{rank}] loss 40" for rank in (0, 1)),
            "[2] loss 42",
            "[3] loss 40",
        ]


def test_a_rank_stands_for_the_next_who_attaches(place: Place) -> None:
    with place.start("--nproc-per-node", 3, place.write(STEPS)) as run:
        stopped(run)
        for expression, value in (("loss", 40), ("loss + 1", 41)):
            done = debug(place, f"p {expression}")
            assert done.out.endswith(f"(Pdb) p {expression}\n{value}\n")
            assert "rank 2 stands on; come back: phalanx debug" in done.err
        with Client(place, "--rank", "2") as client:
            client.ask("p loss", "40\n")
            done = debug(place, "p loss")
            assert (done.status, done.out) == (1, "")
            assert f"rank 2: pid {client.process.pid} is attached" in done.err
            client.process.kill()
        assert "p loss\n40\n" in debug(place, "p loss").out
        done = debug(place, "q")
        assert "rank 2 has ended: BdbQuit" in done.err
        assert "BdbQuit" in run.end().err


def test_a_rank_with_its_own_terminal_stands_as_others(place: Place) -> None:
    script = place.write("""
        import os
        x = 41
        if not os.fork():
            breakpoint()
            os._exit(0)
        os.wait()
        breakpoint()
        print("went on")
        """)
    with place.start("--pty", "0", script) as run:
        for _ in range(2):
            stopped(run)
            assert debug(place, "p x; c", "--rank", "0").out.endswith("(Pdb) p x\n41\n(Pdb) c\n")
        assert "went on" in run.end().out


def test_the_next_client_can_end_a_command_of_the_last(place: Place) -> None:
    with place.start("--nproc-per-node", 3, place.write(STEPS)) as run:
        stopped(run)
        (path,) = sockets(place)
        with linked(path) as link:
            link.sendall(b'{"attach": true}\n{"line": "os.write(2, b\'sleeps\') and time.sleep(1000)"}\n')
            run.read_until("sleeps")
            link.shutdown(socket.SHUT_WR)
            assert closed(link)
        with linked(path) as link, link.makefile("rb", buffering=0) as lines:
            link.sendall(b'{"attach": true}\n')
            assert b"a command of the client before still runs" in lines.readline()
            link.sendall(b'{"interrupt": true}\n')
            assert next(line for line in lines if b'"prompt"' in line)
            link.shutdown(socket.SHUT_WR)
            assert closed(link)
        done = debug(place, "interact; p loss; c")
        assert "*** interact does not work at a socket" in done.out
        assert "p loss\n40\n" in done.out
        assert run.end().status == 0


def test_ranks_that_stand_are_listed_or_asked_at_once(place: Place) -> None:
    """Each process of a rank, and one that does not know its rank. One that does not answer is named."""
    script = place.write("""
        import os
        rank = int(os.environ["RANK"])
        if rank == 3:
            del os.environ["RANK"]
        child = os.fork() if rank == 2 else 1
        if rank:
            breakpoint()
        if rank == 2 and child:
            os.waitpid(child, 0)
        """)
    with place.start("--nproc-per-node", 4, script) as run:
        for _ in range(4):
            stopped(run)
        paths = {path.parent.name: path for path in sockets(place)}
        listed = debug(place, "")
        assert [line.split("  ")[0] for line in listed.out.splitlines()] == ["rank 1", "rank 2", "rank 2", "rank 3"]
        assert debug(place, "", "--all", "p rank // 2").out == "rank 1:\n  0\nranks 2-3:\n  1\n"
        assert debug(place, "", "--all", "p child > 1").out == "ranks 1-3:\n  False\nrank 2:\n  True\n"
        assert debug(place, "", "--rank", "0").status == 1  # it has ended
        alone = f"process {paths['3'].suffix[1:]}"
        assert debug(place, "", "--all", "c", str(paths["3"])).out == f"{alone}:\n  (goes on)\n"
        pid = int(paths["1"].suffix[1:])
        os.kill(pid, signal.SIGSTOP)
        done = debug(place, "", "--all", "c")
        assert done.out == "rank 2:\n  (goes on)\n"
        assert "rank 1 does not answer: paused or stopped (phalanx resume)" in done.err
        os.kill(pid, signal.SIGCONT)
        assert debug(place, "", "--all", "c").out == "rank 1:\n  (goes on)\n"
        assert run.end().status == 0
    done = debug(place, "", str(paths["1"]))
    assert (done.status, f"{paths['1']}: its process has ended" in done.err) == (1, True)


@pytest.mark.parametrize("preload", [(), ("--preload", "pdb")])
def test_pdb_itself_stops_the_rank(place: Place, preload: tuple[str, ...]) -> None:
    script = place.write("""
        import importlib.util, io, pickle, sys
        importlib.util.find_spec("pdb")
        import pdb
        pickle.dumps(pdb.__spec__)
        x = 41
        pdb.set_trace()
        importlib.reload(pdb)
        class Own(pdb.Pdb):
            pass
        Own().set_trace()
        pdb.Pdb(stdin=open("commands"), stdout=sys.stdout).set_trace()
        sys.stdin = io.StringIO("c\\n")
        pdb.set_trace()
        print("went on")
        """)
    place.write("c\n", "commands")
    with place.start(*preload, script) as run:
        stopped(run)
        done = debug(place, "p x; c; p x + 1; c")
        assert "p x\n41\n" in done.out
        assert "\n42\n" in done.out
        assert run.end().out.endswith("went on\n")


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed in this environment")
def test_a_breakpoint_of_torch_stops_one_rank(place: Place) -> None:
    script = place.write("""
        import time, phalanx.timer, torch.distributed as dist
        dist.init_process_group("gloo")
        phalanx.timer.beat()
        x, began = dist.get_rank() + 40, time.monotonic()
        dist.breakpoint(1)
        phalanx.timer.beat()
        print("past", x)
        dist.destroy_process_group()
        """)
    with place.start("--nproc-per-node", 2, "--hang-timeout", 3, script) as run:
        assert "rank 1 stopped at" in stopped(run)
        with Client(place) as client:
            client.ask("up", "dist.breakpoint(1)\n")
            while "True" not in client.ask("p 'later', time.monotonic() - began > 5", ")\n"):
                pass
            assert client.end("p x\nc\n").out.startswith("(Pdb) p x\n41\n")
        assert {"[0] past 40", "[1] past 41"} <= set(run.end().out.splitlines())


def test_a_rank_stands_after_the_commands_of_a_breakpoint(place: Place) -> None:
    script = place.write("""
        breakpoint()
        for i in range(4):
            loss = i
        print("loss", loss)
        """)
    line = Path(script).read_text().splitlines().index("    loss = i") + 1
    with place.start(script) as run:
        stopped(run)
        with Client(place) as client:
            for typed in (f"b {line}", "commands 1", "p 'i is', i", "end"):
                client.ask(typed, f"{typed}\n")
            assert "('i is', 0)\n> " in client.ask("c\np i + 70", "\n70\n")
        assert " p i + 80\n80\n" in debug(place, "p i + 80").out
        done = debug(place, "commands 1; p 'i is', i; c; end; c; p i")  # at which it does not stand
        assert [f"('i is', {i})\n" in done.out for i in range(4)] == [False, True, True, True]
        assert run.end().out == "[0] loss 3\n"


@pytest.mark.parametrize("how", ["script", "function"])
def test_threads_forks_and_functions_stop_as_well(place: Place, how: str) -> None:
    script = place.write("""
        import os, sys, threading
        def work(rank, how):
            loss = 41
            breakpoint()
            print("went on", how)
        if sys.argv[1] == "script":
            thread = threading.Thread(target=work, args=(0, "thread"))
            thread.start()
            thread.join()
            if not (pid := os.fork()):
                work(0, "fork")
                os._exit(0)
            os.waitpid(pid, 0)
        elif __name__ == "__main__":
            from phalanx.spawn import spawn
            spawn(work, ("function",), nprocs=1)
        """)
    each = ("thread", "fork") if how == "script" else ("function",)
    with place.start(script, how) as run:
        for _ in each:
            where = re.findall("phalanx debug (.*)", run.read_until("phalanx debug "))[0]
            assert where.endswith("--rank 0") == (how == "script")  # a function's group is no run, and has a socket
            assert "p loss\n41\n" in debug(place, "p loss; c", *shlex.split(where)).out
        shown = run.end().out
        assert all(f"went on {name}" in shown for name in each)


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.8", "3.11", "3.12", "3.13", "3.14"])
def test_a_python_without_phalanx_stops_as_well(place: Place, version: str) -> None:
    path = interpreter(version)
    if path is None:
        pytest.skip(f"this machine has no Python {version}")
    wrapper = place.write(f'#!/bin/sh\nunset PYTHONPATH\nexec "{path}" "$@"\n', "python")
    os.chmod(wrapper, 0o700)
    place.env["PYTHON_EXEC"] = wrapper
    with place.start("--nproc-per-node", 3, place.write(STEPS)) as run:
        assert stopped(run).endswith(" --rank 2")  # by the launcher: the timers of all rest
        assert "p loss\n40\n" in debug(place, "p loss; n; c").out
        assert run.end().status == 0


def test_where_it_cannot_stop_it_is_said(place: Place) -> None:
    """Another hook, another module called pdb, and a process without its folder."""
    place.env["PYTHONBREAKPOINT"] = "0"
    assert place.run(place.write("breakpoint(); print('no stop')")).out == "[0] no stop\n"
    del place.env["PYTHONBREAKPOINT"]
    done = place.run(place.write("import os\ndel os.environ['TORCHELASTIC_ERROR_FILE']\nbreakpoint()\nprint()"))
    assert "the debugger reads stdin here: this process has no TORCHELASTIC_ERROR_FILE" in done.err
    assert "BdbQuit" in done.err
    place.write("def parse(): return 'protein'", "pdb.py")
    done = place.run(place.write("import pdb\nprint(pdb.parse())\nbreakpoint()"))
    assert (done.status, done.out) == (0, "[0] protein\n")
    assert "breakpoint() does not stop: a pdb.py or bdb.py hides that of Python" in done.err


def test_without_a_thread_it_is_said(place: Place) -> None:
    done = place.run("--nproc-per-node", 2, place.write("""
        import os, threading
        folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
        def start(*args, **options):
            assert any("debug" in name for name in os.listdir(folder))
            raise RuntimeError("can't start new thread")
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if hasattr(threading, name):
                setattr(threading, name, start)
        try:
            breakpoint()
            print()
        finally:
            print("left:", [name for name in os.listdir(folder) if "debug" in name])
        """))  # fmt: skip
    assert "the debugger reads stdin here: can't start new thread" in done.err
    assert "BdbQuit" in done.err
    assert "left: []" in done.out


def test_a_breakpoint_that_nobody_visits_is_a_hang(place: Place) -> None:
    done = place.run("--nproc-per-node", 3, "--breakpoint-timeout", 0.3, "--grace", 1, place.write(STEPS))
    assert done.status != 0
    assert "breakpoint" in done.err[done.err.index("FAILED") :]


# --- after an exception


FAILING = """
    import os
    def step(rank):
        loss = rank + 40
        while rank != 1 and not os.path.exists("../post-mortem.lock"):
            os.sched_yield()
        raise ValueError("loss is nan")
    os.chdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
    step(int(os.environ["RANK"]))
    """


def test_the_first_rank_that_raises_stands_there(place: Place) -> None:
    with place.start("--nproc-per-node", 3, "--post-mortem", place.write(FAILING)) as run:
        assert "rank 1 stopped at" in stopped(run)
        done = debug(place, "p loss; up; p __name__; q")
        assert "ValueError: loss is nan\n> " in done.out
        assert "p loss\n41\n" in done.out
        assert "rank 1 has ended: ValueError: loss is nan" in done.err
        ended = run.end()
        assert ended.status == 1
        assert ended.err.count(STOPPED) == 0
        assert "rank      : 1 (local_rank: 1)" in ended.err
        assert "error     : ValueError: loss is nan" in ended.err


@pytest.mark.parametrize(
    "number, script, options", [(signal.SIGTERM, STEPS, []), (signal.SIGINT, FAILING, ["--post-mortem"])]
)
def test_a_stop_ends_a_rank_that_stands(place: Place, number: signal.Signals, script: str, options: list[str]) -> None:
    with place.start("--nproc-per-node", 3, "--grace", 1000, *options, place.write(script)) as run:
        stopped(run)
        with Client(place) as client:
            client.ask("p rank", "\n")
            run.send(number)
            done = run.end()
            client.process.wait(LIMIT)  # though its stdin stays open
            assert "has ended" in client.end().err
        assert done.status == (1 if options else 128 + number)
        assert ("error     : ValueError: loss is nan" in done.err) == bool(options)


@pytest.mark.parametrize("how", ["!", "p "])
def test_a_stop_ends_a_rank_in_which_a_command_runs(place: Place, how: str) -> None:
    with place.start("--nproc-per-node", 3, "--grace", 1000, place.write(STEPS)) as run:
        stopped(run)
        with Client(place) as client:
            client.ask(f"{how}os.write(2, b'sleeps') and time.sleep(1000)", "1000)\n")
            run.read_until("sleeps")
            run.send(signal.SIGINT)
            assert run.end().status == 128 + signal.SIGINT
            assert "has ended" in client.end().err


# --- the other side


def test_what_is_no_message_costs_its_own_connection(place: Place) -> None:
    with place.start("--nproc-per-node", 3, place.write(STEPS)) as run:
        stopped(run)
        (path,) = sockets(place)
        assert path.stat().st_mode & 0o777 == 0o600
        attach = b'{"attach": true}\n'
        for data in (
            os.urandom(1 << 12) + b"\n",
            b"x" * (1 << 20),
            b"[" * 60000 + b"\n",
            attach + b'{"line": 3}\n',
            attach + b'{"complete": ["a", "b", "c", "d"]}\n',
            attach + b'{"line": "p 1"}\n' * 1000,
        ):
            with linked(path) as link:
                with contextlib.suppress(ConnectionError):
                    link.sendall(data)
                assert closed(link)
        with contextlib.ExitStack() as held:
            for _ in range(15):
                held.enter_context(linked(path)).sendall(b" ")
            done = debug(place, "p loss")
            assert "p loss\n40\n" in done.out
        assert "p 1 + 1\n2\n" in debug(place, "p 1 + 1; c").out
        assert run.end().status == 0


def test_a_client_that_does_not_read_is_dropped(place: Place) -> None:
    with place.start("--nproc-per-node", 3, place.write(STEPS)) as run:
        stopped(run)
        (path,) = sockets(place)
        with linked(path) as link:
            link.sendall(b'{"attach": true}\n{"line": "p \'x\' * (1 << 24)"}\n{"line": "p loss"}\n')
            while b"(Pdb)" not in link.recv(1 << 10):
                pass
            with Client(place) as client:
                client.process.wait(LIMIT)  # it is refused, while the other is attached
            while True:
                done = debug(place, "p loss")
                if done.status == 0:
                    break
        assert "p loss\n40\n" in done.out
        done = debug(place, "p 'x' * (1 << 21); c")
        assert len(done.out) < (1 << 20) + 1000
        assert "more characters are left out]" in done.out
        assert run.end().status == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_not_served(place: Place) -> None:
    with place.start("--nproc-per-node", 3, place.write(STEPS)) as run:
        stopped(run)
        (path,) = sockets(place)
        path.parent.chmod(0o755)
        path.chmod(0o666)  # as if the mode alone kept others out
        folder = os.open(path.parent, os.O_PATH)

        def is_served() -> bool:
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(f"/proc/self/fd/{folder}/{path.name}")
                return bool(link.recv(100))

        assert code_of_fork(is_served) == 1  # it was not
        os.close(folder)
        debug(place, "c")
        assert run.end().status == 0


# --- at a terminal


def debugger(shell: Shell, place: Place, *argv: str) -> None:
    shell.type(f"{shlex.join([*DEBUG, '--log-dir', str(place.logs), *argv])}; echo code $?\n")
    shell.until("code $?")
    shell.until("(Pdb) ")


def test_a_person_completes_interrupts_and_detaches(shell: Shell, place: Place) -> None:
    with place.start("--nproc-per-node", 3, place.write(STEPS)) as run:
        stopped(run)
        debugger(shell, place)
        shell.type("p lo\t + 1\n")
        shell.until("\n41")
        shell.until("(Pdb) ")
        shell.type("print('sleeps'); time.sleep(1000)\n")
        shell.until("\nsleeps")
        shell.type("\x03")
        shell.until("KeyboardInterrupt")
        shell.until("(Pdb) ")
        shell.type("p x\x03")
        shell.until("(Pdb) ")
        for _ in range(20):  # while the prompt checks whether the rank is there
            for number in (signal.SIGALRM, signal.SIGINT):
                os.kill(os.tcgetpgrp(shell.terminal), number)
            shell.until("(Pdb) ")
        shell.type("\x04")
        shell.until("rank 2 stands on")
        shell.until("code 0")
        debugger(shell, place)
        shell.type("c\n")
        shell.until("has ended")
        shell.until("code 0")
        assert run.end().status == 0


@pytest.mark.parametrize("victim", ["rank", "launcher", "client"])
def test_the_terminal_is_restored_whoever_is_killed(shell: Shell, place: Place, victim: str) -> None:
    with place.start("--nproc-per-node", 3, place.write(STEPS)) as run:
        stopped(run)
        (path,) = sockets(place)
        rank = int(path.suffix[1:])
        debugger(shell, place)
        shell.type("p 'half a li")  # raw, then
        shell.until("half a li")
        if victim == "client":
            client = os.tcgetpgrp(shell.terminal)
            os.kill(client, signal.SIGTERM)
        else:
            os.kill(rank if victim == "rank" else run.process.pid, signal.SIGKILL)
            shell.until("has ended")
        shell.until("code ")
        place.write("import termios; print('canonical:', bool(termios.tcgetattr(0)[3] & termios.ICANON))", "modes.py")
        shell.type(f"{PYTHON} modes.py\n")
        shell.until("canonical: True")
        if victim == "client":
            debug(place, "c")
        run.end()
        assert not wait_gone([rank])


def test_a_worker_with_the_terminal_stops_there(shell: Shell, place: Place) -> None:
    script = place.write("""
        import time
        import phalanx.timer
        phalanx.timer.beat()
        began = time.monotonic()
        breakpoint()
        phalanx.timer.beat()
        print("went on")
        """)
    shell.run("--hang-timeout", "2", script)
    shell.until("(Pdb) ")
    late = ""
    while "True" not in late:
        shell.type("p 'later', time.monotonic() - began > 3\n")
        late = shell.until("(Pdb) ")
    shell.type("c\n")
    seen = shell.until("code 0")
    assert "went on" in seen
    assert STOPPED not in late + seen
