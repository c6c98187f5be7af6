"""`phalanx run --pty`, and `phalanx attach` at another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.command import LIMIT, Done, Launcher, Place, Shell, logs, read_until, whole
from tests.support.disks import until
from tests.support.forks import code_of_fork
from tests.support.helpers import Gate, Ready, descendants, wait_gone

pytestmark = pytest.mark.slow

ATTACH = (sys.executable, "-m", "phalanx", "attach")
LEAVE = "\x1d"
ASKING = """
    import os, sys
    name = input("name? ")
    with open("/dev/tty", "w") as terminal:
        print("hello", name, [os.isatty(fd) for fd in range(3)], os.tcgetpgrp(0) == os.getpgrp(), file=terminal)
    """


class Attached:
    """A `phalanx attach` at a terminal of its own, of which the test holds both ends."""

    def __init__(self, place: Place, *argv: str, rows: int = 30, columns: int = 100) -> None:
        self.ours, self.theirs = os.openpty()
        termios.tcsetwinsize(self.theirs, (rows, columns))
        self.modes = termios.tcgetattr(self.theirs)
        argv = (*ATTACH, "--log-dir", str(place.logs), *argv)
        self.process = subprocess.Popen(  # what a session opens first is its terminal
            ["sh", "-c", f'exec "$@" <>{os.ttyname(self.theirs)} >&0 2>&0', "sh", *argv],
            cwd=place.folder, env=place.env, start_new_session=True,
        )  # fmt: skip
        self._rest = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def until(self, text: str) -> str:
        """What comes up to `text`; what has come behind it is there for the next call."""
        seen = self._rest if text in self._rest else self._rest + read_until(self.ours, text)
        before, found, self._rest = seen.partition(text)
        assert found, seen
        return before

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def end(self, *codes: int) -> str:
        """Wait for its end, with one of these codes. Returns what else it has printed; the terminal is as it was."""
        shown = self._rest
        with open(os.pidfd_open(self.process.pid)) as gone:
            while (ready := select.select([self.ours, gone.fileno()], [], [], LIMIT)[0]) and self.ours in ready:
                shown += os.read(self.ours, 65536).decode()
        assert ready, shown
        assert self.process.wait() in codes, shown
        assert termios.tcgetattr(self.theirs) == self.modes
        return shown

    @property
    def is_raw(self) -> bool:
        return not termios.tcgetattr(self.theirs)[3] & termios.ICANON

    def until_raw(self) -> None:
        until(lambda: self.is_raw)


@contextlib.contextmanager
def running(place: Place, *argv: object, attempt: int = 0, **settings: Any) -> Iterator[Launcher]:
    """A run that can be attached to."""
    with place.start(*argv, **settings) as run:
        recorded(place, attempt)
        yield run


def recorded(place: Place, attempt: int) -> None:
    def is_recorded() -> bool:
        for path in place.logs.glob("*/run.json"):
            with contextlib.suppress(ValueError):
                attempts = json.loads(path.read_text())["attempts"]
                return bool(attempts) and attempts[-1]["number"] == attempt
        return False

    until(is_recorded)


def attach(place: Place, *argv: str) -> Done:
    """A `phalanx attach` without a terminal."""
    return place.program(*ATTACH, "--log-dir", place.logs, *argv)


@contextlib.contextmanager
def linked(place: Place, rank: int = 0) -> Iterator[socket.socket]:
    """A client of our own."""
    (path,) = place.logs.glob(f"*/attempt_0/{rank}/terminal.sock")
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(LIMIT)
        folder = os.open(path.parent, os.O_PATH)
        try:
            link.connect(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        yield link


def frame(kind: bytes, data: bytes = b"") -> bytes:
    return kind + len(data).to_bytes(4, "big") + data


def is_closed(link: socket.socket) -> bool:
    """Whether the other end closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        while link.recv(1 << 16):
            pass
    return True


# --- what a rank finds


@pytest.mark.each_python
@pytest.mark.parametrize(
    "options",
    [
        "", "--nice 1", "--nice 1 --preload json",
        *(f"--run-path --start-method {method}" for method in ("spawn", "forkserver", "fork")),
    ],
)  # fmt: skip
def test_a_rank_has_a_terminal_however_it_is_started(place: Place, options: str) -> None:
    with (
        running(place, "--pty", 0, *options.split(), place.write(ASKING)) as run,
        Attached(place) as attached,
    ):
        attached.until("name? ")
        attached.type("Zoë\r")
        assert "hello Zoë [True, True, True] True" in attached.end(0)
        assert run.end().status == 0
    assert place.log(0).splitlines() == ["name? Zoë", "hello Zoë [True, True, True] True"]


def test_a_module_and_a_binary_have_a_terminal(place: Place) -> None:
    place.write(ASKING, "package/ask.py")
    for argv in (("-m", "package.ask"), ("--no-python", sys.executable, "package/ask.py")):
        place.logs = place.folder / argv[0]
        with running(place, "--pty", "all", *argv), Attached(place, "--rank", "0") as attached:
            attached.until("name? ")
            attached.type("you\r")
            assert "hello you [True, True, True] True" in attached.end(0)


@pytest.mark.parametrize("term,found", [("xterm-kitty", "xterm-kitty"), ("dumb", "xterm-256color")])
def test_the_terminal_of_a_rank_has_a_type_and_a_size(place: Place, term: str, found: str) -> None:
    place.env["TERM"] = term
    script = "test $RANK = 0 || { stty size; echo $TERM; echo error >&2; }"
    done = place.run("--nproc-per-node", 2, "--pty", "1", "--no-python", "sh", "-c", script)
    assert done.status == 0
    assert [line.rstrip("\r") for line in done.out.splitlines()] == ["[1] 24 80", f"[1] {found}", "[1] error"]
    (path,) = place.logs.glob("*/attempt_0/1/stdout.log")
    assert path.read_bytes() == f"24 80\r\n{found}\r\nerror\r\n".encode()
    assert [each.name for each in path.parent.iterdir()] == ["stdout.log"]


def test_the_log_has_all_bytes_and_the_console_what_it_may(place: Place) -> None:
    script = r"printf '\033[32mgreen\033[0m\n'; for n in 1 2 3; do printf '\r%s0%%' $n; done; echo"
    argv = ("--nproc-per-node", 2, "--pty", "all", "-r", "1:3", "--color", "never", "--no-python", "sh", "-c", script)
    done = place.run(*argv)
    for rank in range(2):
        (path,) = place.logs.glob(f"*/attempt_0/{rank}/stdout.log")
        assert path.read_bytes() == b"\033[32mgreen\033[0m\r\n\r10%\r20%\r30%\r\n"
    assert "[0] 30%" in done.out
    assert "10%" not in done.out
    assert "[1]" not in done.out
    assert "30%" in logs(place).out


def test_a_rank_that_fails_is_reported_with_its_last_lines(place: Place) -> None:
    done = place.run("--pty", "0", place.write("raise ValueError('wrong')"))
    assert done.status == 1
    assert "ValueError: wrong" in done.err
    done = place.run("--pty", "0", "--no-python", "sh", "-c", "echo no data; exit 3")
    assert "exited with code 3; its output ends with: no data\n  last lines of its output:\n    no data\n" in done.err


# --- at a terminal


def test_a_shell_is_typed_into_and_left(place: Place) -> None:
    place.env |= {"PS1": "$ ", "TERM": "xterm"}
    argv = ("--pty", "1", "--nproc-per-node", 2, "--no-python", "sh", "-c")
    with (
        running(place, *argv, "test $RANK = 0 && exec sleep 1000; exec bash --norc --noprofile -i") as run,
        Attached(place) as attached,
    ):
        attached.until("$ ")
        assert attached.is_raw
        attached.type("stty size\r")
        attached.until("30 100")
        termios.tcsetwinsize(attached.ours, (40, 120))
        attached.type("trap 'echo sized $(stty size)' WINCH; sh -c 'echo $((6 * 7)); exec cat'\r")
        attached.until("42\r\n")  # it has the foreground
        attached.type("\x03")
        attached.until("^C")
        attached.until("$ ")  # until then, it might still be cat who reads
        attached.type("stty size\r")
        attached.until("40 120")
        attached.type(LEAVE)
        assert "phalanx: rank 1 goes on" in attached.end(0)
        with Attached(place, "--rank", "1") as again:
            again.until("40 120")  # what it wrote last
            again.type("exit 7\r")
            assert "phalanx: rank 1 has failed (exit code 7)" in again.end(7)
        assert run.end().status == 7


def test_one_types_and_the_others_watch(place: Place) -> None:
    """The next of them types once it has gone, also by a signal."""
    with running(place, "--pty", "0", "--no-python", "cat") as run, contextlib.ExitStack() as held:
        first = held.enter_context(Attached(place))
        first.until("typed")
        first.type("one\r")
        first.until("one\r\none")
        watcher = held.enter_context(Attached(place, "--watch"))
        watcher.until("one\r\none")
        second = held.enter_context(Attached(place))
        second.until("types; you watch")
        second.type("lost\r")
        watcher.type("lost\r")
        first.type("two\r")
        for each in (watcher, second):
            assert "lost" not in each.until("two\r\ntwo")
        first.process.kill()
        second.until("you type from now on")
        second.type("three\r")
        watcher.until("three\r\nthree")
        watcher.type("\x03")
        watcher.end(0)
        second.type("\x04")
        assert "has succeeded (exit code 0)" in second.end(0)
        assert run.end().status == 0


def test_modes_keys_colours_and_characters_are_restored(place: Place) -> None:
    script = r"printf '\033[?1049h\033[?25l\033[?2004h\033[>4;2m\033[>1u\033[5 q\033[31m\033(0up'; cat"
    with running(place, "--pty", "0", "--no-python", "sh", "-c", script), Attached(place) as attached:
        attached.until("up")
        attached.type(LEAVE)
        shown = attached.end(0)
        assert all(text in shown for text in ("\033[<1u", "\033[0 q", "\033[>4m"))
        assert all(f"\033[?{mode}" in shown for mode in ("1049l", "2004l", "25h"))
        assert shown.index("\033[0m\033(B\x0f") < shown.index("phalanx: rank 0 goes on")


def test_keys_and_signals_leave_it_with_modes_restored(place: Place) -> None:
    """Ctrl-] in its several forms, which terminals send; each signal that ends a program."""
    with running(place, "--pty", "0", "--no-python", "cat"):
        for key in ("\033[93;5:1u", "\033[93;133u", "\033[27;69;93~"):
            with Attached(place) as attached:
                attached.until("typed")
                attached.type(key)
                assert "goes on" in attached.end(0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            with Attached(place) as attached:
                attached.until("typed")
                attached.until_raw()
                attached.process.send_signal(number)
                attached.end(128 + number)


def test_what_was_drawn_is_shown_again_without_questions(place: Place) -> None:
    """Ctrl-] that is pressed twice is typed."""
    questions = (
        "[6n", "[?6n", "[c", "[>c", "[=0c", "[?2026$p", "[?u", "[14t", "[21t", "[>q", "]11;?\a", "]4;1;?\033\\\\",
        "P$qm\033\\\\", "P+q544e\033\\\\",
    )  # fmt: skip
    asks = "".join(f"<\\033{each}>" for each in questions)
    script = rf"""
        printf '\033[?1049h\033[?1h\033=\033[?2004h\033[?1000h\033[?25l\033[?7l'
        for n in $(seq 9000); do printf '\033[H full screen %s' $n; done
        stty raw -echo; printf '{asks}\005\033[22;0t\033[?2004lup'; head -c 3 | od -An -c; cat"""
    with running(place, "--pty", "0", "--no-python", "sh", "-c", script), Attached(place) as attached:
        attached.until("up")
        with Attached(place, "--watch") as again:
            again.until("Ctrl-C\r\n")
            shown = again.until("up")
        modes = "\033[?1049h\033[?1h\033=\033[?2004h\033[?1000h\033[?25l\033[?7l"
        assert shown.startswith(f"{modes}\033[H full screen ")
        assert shown.endswith("screen 9000" + "<>" * len(questions) + "\033[22;0t\033[?2004l")
        attached.type(f"a{LEAVE}{LEAVE}b")
        attached.until("a 035   b")


def test_a_terminal_that_takes_nothing_holds_up_no_end(place: Place) -> None:
    with running(place, "--pty", "0", "--no-python", "yes"), Attached(place) as attached:
        attached.until("y\r\ny")
        attached.until_raw()
        until(lambda: not select.select([], [attached.theirs], [], 0)[1])  # nobody reads what it writes
        attached.process.send_signal(signal.SIGTERM)
        assert attached.process.wait(LIMIT) == 128 + signal.SIGTERM
        assert not attached.is_raw


def test_it_is_stopped_and_continued_with_modes_restored(place: Place) -> None:
    with running(place, "--pty", "0", "--no-python", "cat"), Attached(place) as attached:
        attached.until("typed")
        attached.until_raw()
        attached.process.send_signal(signal.SIGTSTP)
        os.waitid(os.P_PID, attached.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not attached.is_raw
        attached.process.send_signal(signal.SIGCONT)
        attached.until_raw()
        attached.type("on\r")
        attached.until("on\r\non")
        attached.type(LEAVE)
        attached.end(0)


def test_a_shell_stops_and_continues_it(place: Place, shell: Shell) -> None:
    with running(place, "--pty", "0", "--no-python", "cat"):
        shell.type(f"{shlex.join([*ATTACH, '--log-dir', str(place.logs)])}; echo code $?\n")
        shell.until("typed\r")
        until(lambda: not shell.has_terminal)
        pid = os.tcgetpgrp(shell.terminal)
        shell.type("one\r")
        shell.until("one\r\none")
        os.kill(pid, signal.SIGTSTP)
        shell.until("Stopped")
        shell.until("$ ")
        shell.type("bg\n")
        shell.until("Stopped")
        shell.type("fg\n")
        until(lambda: os.tcgetpgrp(shell.terminal) == pid)
        until(lambda: not termios.tcgetattr(shell.terminal)[3] & termios.ICANON)
        shell.type("two\r")
        shell.until("two\r\ntwo")
        shell.type(LEAVE)
        shell.until("goes on")
        until(lambda: shell.has_terminal)


def test_without_a_terminal_it_only_watches(place: Place, gate: Gate) -> None:
    script = f"echo one; head -c 1 <{gate.address} >/dev/null; echo two; exit 3"
    argv = [*ATTACH, "--log-dir", str(place.logs)]
    with (
        running(place, "--pty", "0", "--no-python", "sh", "-c", script),
        Launcher(argv, cwd=place.folder, env=place.env) as watcher,
    ):
        assert "one" in watcher.read_until("one", "stdout")
        gate.open()
        done = watcher.end()
        assert (done.status, done.out) == (3, "two\r\n")
        assert done.err == "phalanx: rank 0 has failed (exit code 3)\n"


def test_what_cannot_be_attached_to_is_named(place: Place) -> None:
    with running(place, "--nproc-per-node", 4, "--pty", "1-2", "--no-python", "cat"):
        until(lambda: len(list(place.logs.glob("*/*/*/terminal.sock"))) == 2)
        for argv, words in (
            ((), "ranks 1-2 have a terminal: --rank N attaches to one of them"),
            (("--rank", "3"), "rank 3 has no terminal: phalanx run --pty 3 gives it one; ranks 1-2 have one"),
            (("--rank", "9"), "there is no rank 9 here"),
        ):
            done = attach(place, *argv)
            assert done.status == 1
            assert words in done.err
    place.logs = place.folder / "others"
    with running(place, "--no-python", "sleep", "1000"):
        assert "no rank has a terminal here: phalanx run --pty RANK,... gives them one" in attach(place).err


# --- ends


@pytest.mark.each_python
@pytest.mark.parametrize("who", ["launcher", "guard", "keeper", "log writer", "worker"])
def test_whoever_is_killed_nobody_is_left_and_modes_are(place: Place, who: str) -> None:
    script = "import os; print('worker', os.getpid()); input()"
    with running(place, "--pty", "0", place.write(script)) as run, Attached(place) as attached:
        attached.until("worker ")
        worker = int(attached.until("\r\n"))
        family = descendants(run.process.pid)
        guard = next(pid for pid in family if parent(pid) == run.process.pid)
        keeper = parent(worker)
        (writer,) = [pid for pid in family if parent(pid) == keeper and pid != worker]
        pids = {"launcher": run.process.pid, "guard": guard, "keeper": keeper, "log writer": writer, "worker": worker}
        assert len(set(pids.values())) == 5
        os.kill(pids[who], signal.SIGKILL)
        codes = {"launcher": (1,), "log writer": (128 + signal.SIGHUP, 137)}.get(who, (137,))
        assert "rank 0 has " in attached.end(*codes)
        assert not wait_gone(family)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_each_attempt_has_a_terminal_that_holds_up_no_end(place: Place) -> None:
    script = "(trap '' HUP TERM; sleep 1000) & echo attempt $TORCHELASTIC_RESTART_COUNT; read x; exit $x"
    options = ("--pty", "0", "--max-restarts", 1, "--linger", "0")
    with running(place, *options, "--no-python", "sh", "-c", script) as run:
        for attempt, code in (0, 5), (1, 0):
            recorded(place, attempt)
            with Attached(place) as attached:
                attached.until(f"attempt {attempt}")
                attached.type(f"{code}\r")
                assert f"(exit code {code})" in attached.end(code)
        assert run.end().status == 0


def test_a_program_that_closes_its_terminal_lives_on(place: Place, ready: Ready, gate: Gate) -> None:
    """If Phalanx closed its end, the kernel would send the program SIGHUP."""
    code = f"""
        import os
        for fd in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        {ready.python()}
        {gate.python()}
        with open("/dev/tty", "w") as terminal:
            terminal.write("once more")
        {ready.python()}
        {gate.python()}
        """
    with running(place, "--pty", "0", place.write(code)) as run:
        ready.wait()
        with Attached(place) as attached:
            assert "rank 0 goes on; it has closed its terminal" in attached.end(0)
        gate.open()
        ready.wait()
        gate.open()
        assert run.end().status == 0
    assert place.log(0) == "once more"


def test_a_program_may_close_its_terminal_for_a_moment(place: Place, gate: Gate) -> None:
    script = f"""
        read x; exec 0<&- 1>&- 2>&-; head -c 1 <{gate.address} >/dev/null
        exec 0<>/dev/tty 1>&0 2>&0; echo once more; read x; exit $x"""
    with running(place, "--pty", "0", "--no-python", "sh", "-c", script), Attached(place) as attached:
        attached.until("typed")
        with linked(place) as link:
            link.sendall(frame(b"A"))
            attached.type("on\r")
            received = b""
            while frame(b"H") not in received:
                received += link.recv(4096)
        gate.open()
        attached.until("once more")
        attached.type("7\r")
        attached.end(7)


# --- those who do not behave


FLOOD = "import os\nfor n in range({count}): os.write(1, b'%09d\\n' % n)\n"


@pytest.mark.long
def test_a_stopped_client_holds_up_nothing(place: Place) -> None:
    count = 1_000_000
    script = place.write(f"input()\n{FLOOD.format(count=count)}print('over')\ninput()")
    with (
        running(place, "--pty", "0", "-r", "3", "--log-max-size", "1MB", script) as run,
        contextlib.ExitStack() as held,
    ):
        stopped = held.enter_context(Attached(place))
        stopped.until("typed")
        other = held.enter_context(Attached(place))
        other.until("you watch")
        stopped.until_raw()
        stopped.process.send_signal(signal.SIGSTOP)
        with linked(place) as link:
            link.sendall(frame(b"A"))  # it never reads
            stopped.type("\r")
            stopped.process.send_signal(signal.SIGCONT)
            stopped.until("000000")
            stopped.process.send_signal(signal.SIGSTOP)
            other.until("over")  # it has lost nothing of the end
        stopped.process.kill()
        other.until("you type from now on")
        other.type("\r")
        other.end(0)
        assert run.end().status == 0
    (path,) = place.logs.glob("*/attempt_0/0/stdout.log")
    lines = whole(path).splitlines()
    assert lines[1 : count + 1] == [b"%09d" % number for number in range(count)]
    assert len(list(path.parent.glob("stdout.log.*"))) > 5


@pytest.mark.long
def test_a_worker_that_does_not_read_can_be_left(place: Place) -> None:
    script = "import time, tty; tty.setraw(0); print('up', flush=True)\nwhile True: time.sleep(1000)"
    with running(place, "--pty", "0", place.write(script)), Attached(place) as attached:
        attached.until("up")
        os.set_blocking(attached.ours, False)
        left, began = 10 << 20, time.monotonic()
        while left:
            assert time.monotonic() < began + LIMIT
            if select.select([], [attached.ours], [], LIMIT)[1]:
                with contextlib.suppress(BlockingIOError):
                    left -= os.write(attached.ours, b"x" * min(left, 65536))
        os.set_blocking(attached.ours, True)
        attached.until("rank 0 does not read: what you type is dropped")
        attached.type(LEAVE)
        assert "goes on" in attached.end(0)


@pytest.mark.long
def test_a_long_paste_arrives_whole(place: Place) -> None:
    count = 3 << 20
    script = f"stty raw -echo; echo up; head -c {count} | cksum"
    with running(place, "--pty", "0", "--no-python", "sh", "-c", script), Attached(place) as attached:
        attached.until("up")
        data = bytes(1 + n % 24 for n in range(count))  # no Ctrl-]
        left = memoryview(data)
        while left:
            left = left[os.write(attached.ours, left[:4096]) :]
        expected = subprocess.run(["cksum"], input=data, stdout=subprocess.PIPE, check=True).stdout.split()[0].decode()
        assert expected in attached.end(0)


def test_who_sends_anything_else_harms_its_own_connection(place: Place) -> None:
    with running(place, "--pty", "0", "--no-python", "cat"), Attached(place) as attached:
        attached.until("typed")
        for sent in (
            b"\xff" * 65536, b"GET / HTTP/1.0\r\n\r\n", frame(b"K", b"x"), frame(b"S", bytes(4)), frame(b"A", b"x"),
            frame(b"A") * 2, frame(b"A") + frame(b"K", b"x"), frame(b"A", bytes(4)) + frame(b"S"),
            b"K\xff\xff\xff\xff", frame(b"A") + frame(b"\x00", bytes(60000)), b"",
        ):  # fmt: skip
            with linked(place) as link:
                link.sendall(sent)
                assert is_closed(link), sent
        attached.type("on\r")
        attached.until("on\r\non")


def test_many_watch_and_one_too_many_is_refused(place: Place) -> None:
    with running(place, "--pty", "0", "--no-python", "cat"), contextlib.ExitStack() as held:
        attached = held.enter_context(Attached(place))
        attached.until("typed")
        links = [held.enter_context(linked(place)) for _ in range(31)]
        for link in links:
            link.sendall(frame(b"A"))
            assert link.recv(65536)
        assert "is not attached to: 32 are attached to it already" in attach(place).err
        attached.type("all\r")
        for link in links:
            read_until(link.fileno(), "all")  # the echo and the answer may be two frames


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_does_not_reach_a_terminal(place: Place) -> None:
    with running(place, "--pty", "0", "--no-python", "cat"):
        until(lambda: any(place.logs.glob("*/*/*/terminal.sock")))
        (path,) = place.logs.glob("*/*/*/terminal.sock")
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o666)  # as if the mode alone kept others out
        folder = os.open(path.parent, os.O_PATH)

        def is_served() -> bool:
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(f"/proc/self/fd/{folder}/{path.name}")
                with contextlib.suppress(OSError):
                    link.sendall(frame(b"A"))
                    return bool(link.recv(100))
                return False

        assert code_of_fork(is_served) == 1  # it was not
        os.close(folder)


@pytest.mark.long
def test_many_ranks_with_few_descriptors_have_terminals(place: Place) -> None:
    head = ("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")
    done = place.run("--nproc-per-node", 64, "--pty", "all", "--no-python", "sh", "-c", "tty; ulimit -n", head=head)
    assert done.status == 0
    assert done.out.count("/dev/pts/") == 64
    assert done.out.count("1024") == 64


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_rank_for_which_no_terminal_is_left_is_named(place: Place) -> None:
    options = "newinstance,max=2,ptmxmode=666"
    mounts = f"mount -t devpts -o {options} devpts /dev/pts && mount --bind /dev/pts/ptmx /dev/ptmx"
    head = ("unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh")
    done = place.run("--nproc-per-node", 4, "--pty", "all", "--no-python", "cat", head=head)
    assert done.status == 1
    assert "worker 2 was not started; opening its pseudo-terminal" in done.err
    assert "No space left on device" in done.err
