"""Who reads the stdin of `phalanx run`: pipes, files, and terminals with a shell that has job control."""

from __future__ import annotations

import os
import shlex
import signal
import time

import pytest

from phalanx._base import procfs
from tests.support.command import RUN, Done, Place, Shell, refused
from tests.support.disks import until
from tests.support.helpers import PYTHON, Ready, wait_gone

NOTE = "phalanx: stdin has input that no worker reads; --stdin 0 gives it to rank 0"


def piped(place: Place, data: bytes, *argv: object) -> Done:
    """A run whose stdin is a pipe with these bytes and nothing behind them."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with open(reader, "rb") as stdin:
        return place.run(*argv, stdin=stdin)


# --- pipes and files


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "", "--preload json", "--nice 1",
        *(f"--run-path --start-method {method}" for method in ("forkserver", "fork")),
    ],
)  # fmt: skip
def test_a_worker_reads_a_pipe_however_it_is_started(place: Place, options: str) -> None:
    script = place.write("print('got', input())")
    done = piped(place, b"hello\n", *options.split(), script)
    assert (done.status, done.out) == (0, "[0] got hello\n")


@pytest.mark.slow
def test_the_rank_that_is_named_reads_a_pipe_and_no_other(place: Place) -> None:
    """The next attempt reads what the last has left."""
    shell = 'read line; echo "$line"; test $RANK != 1 || test "$line" = b'
    options = ("--nproc-per-node", 3, "--stdin", 1, "--max-restarts", 3, "--settle", 60, "--no-python")
    done = piped(place, b"a\nb\nc\n", *options, "sh", "-c", shell)
    assert done.status == 0
    assert sorted(done.out.splitlines()) == ["[0] ", "[0] ", "[1] a", "[1] b", "[2] ", "[2] "]
    assert "stdin" not in done.err


@pytest.mark.slow
def test_a_run_in_a_loop_over_lines_reads_the_rest_of_them(place: Place) -> None:
    """As every program does that reads stdin; `--stdin none` leaves it to the loop."""
    file = place.write("a\nb\nc\n", "lines")
    for more, seen in ("", "a\n[0] b\n[0] c\n"), ("--stdin none", "a\nb\nc\n"):
        command = shlex.join([*RUN, "--log-dir", str(place.logs), *more.split(), "--no-python", "cat"])
        done = place.program("bash", "-c", f'while read line; do echo "$line"; {command}; done < {file}')
        assert (done.status, done.out) == (0, seen)


@pytest.mark.slow
def test_input_that_no_worker_reads_is_named_once(place: Place) -> None:
    two = ("--nproc-per-node", 2, "--no-python", "cat")
    assert piped(place, b"a\n", *two).err.count(NOTE) == 1
    assert "stdin" not in piped(place, b"a\n", "--stdin", "none", *two).err
    assert "stdin" not in piped(place, b"", *two).err
    assert "stdin" not in place.run(*two).err
    idle, writer = os.pipe()  # as a build server leaves open
    assert "stdin" not in place.run(*two, stdin=idle).err
    os.close(idle)
    os.close(writer)


@pytest.mark.slow
def test_the_commands_of_a_shell_are_no_input(place: Place) -> None:
    """As of `ssh host bash -s < job.sh`."""
    run = shlex.join([*RUN, "--log-dir", str(place.logs), "--nproc-per-node", "2", "--no-python", "true"])
    file = place.write(f"{run}\necho end\n", "job.sh")
    for shell, noted in ("bash -s x < {}", 0), ("cat {} | bash -eu", 0), ("cat {} | bash {}", 1):
        done = place.program("sh", "-c", shell.format(file, file))
        assert (done.out, done.err.count(NOTE)) == ("end\n", noted)


@pytest.mark.slow
def test_input_that_comes_later_is_named_at_the_end(place: Place, ready: Ready) -> None:
    reader, writer = os.pipe()
    script = place.write(f"{ready.python()}\nimport sys; sys.exit(3)")
    with open(reader, "rb") as stdin, place.start("--nproc-per-node", 2, script, stdin=stdin) as launcher:
        ready.wait()
        os.write(writer, b"late\n")
        done = launcher.end()
    os.close(writer)
    assert done.status == 3
    assert done.err.count(NOTE) == 1
    assert done.err.index("FAILED") < done.err.index(NOTE)


@pytest.mark.slow
def test_a_closed_stdin_is_nobodys(place: Place) -> None:
    """Descriptor 0 of the launcher may be any file of its own then."""
    run = shlex.join([*RUN, "--log-dir", str(place.logs)])
    done = place.program("sh", "-c", f"{run} --no-python wc -c <&-")
    assert (done.status, done.out) == (0, "[0] 0\n")
    refused(place.program("sh", "-c", f"{run} --stdin 0 --no-python cat <&-"), "stdin of phalanx run is closed")


# --- terminals


@pytest.mark.slow
def test_a_worker_reads_from_the_terminal_and_the_shell_after_it(shell: Shell, place: Place) -> None:
    shell.run(place.write("print('name?'); print('hello', input())"))
    shell.until("[0] name?")
    shell.type("AdX\x7fa\n")  # the terminal's own line editing: DEL takes the X back
    shell.until("[0] hello Ada")
    shell.until("code 0")
    shell.run("--no-python", "cat")
    shell.until("logs in")
    shell.type("one\n")
    shell.until("[0] one")
    shell.type("\x04")  # Ctrl-D
    shell.until("code 0")
    shell.run("--no-python", "sh", "-c", "echo up; exec sleep 1")
    shell.until("[0] up")
    shell.type("echo $((6 * 7)) ahead\n")  # which a run that reads nothing does not take
    shell.until("code 0")
    shell.until("42 ahead")
    shell.run("--no-python", "sh", "-c", "echo up; read line")
    shell.until("[0] up")
    shell.type("\x03")
    shell.until("code 130")


@pytest.mark.slow
def test_ctrl_z_gives_the_shell_the_terminal_and_fg_takes_it(shell: Shell) -> None:
    shell.run("--no-python", "cat")
    shell.until("logs in")
    shell.type("one\n")
    shell.until("[0] one")
    for line in ("two", "three"):
        shell.type("\x1a")
        shell.until("Stopped")
        shell.until("$ ")
        shell.type("echo is $((6 * 7))\n")
        shell.until("is 42")
        shell.until("$ ")
        shell.type("fg\n")
        shell.until("no-python cat")
        shell.type(f"{line}\n")
        shell.until(f"[0] {line}")
    shell.type("\x04")
    shell.until("$ ")


@pytest.mark.slow
def test_ctrl_z_that_repeats_stops_a_run_once(shell: Shell) -> None:
    """It takes some time until so many processes have stopped."""
    shell.type("stty noflsh\n")  # else each Ctrl-Z discards what nobody has read yet, the shell's "Stopped" as well
    shell.until("$ ")
    shell.run("--no-python", "sh", "-c", "for i in $(seq 100); do sleep 100 & done; echo up; read line; echo got $line")
    shell.until("[0] up")
    for _ in range(20):
        shell.type("\x1a")
        time.sleep(0.002)
    shell.until("Stopped")
    shell.type("fg\n")
    shell.until("no-python sh")
    shell.type("Ada\n")
    shell.until("[0] got Ada")


@pytest.mark.slow
def test_a_run_goes_on_after_bg_and_reads_after_fg(shell: Shell, place: Place, ready: Ready) -> None:
    script = place.write(f"""
        import signal
        signal.sigwait([signal.SIGUSR1])
        {ready.python("'goes on'")}
        signal.sigwait([signal.SIGUSR1])
        print("hello", input())
        """)
    signal_mask = place.write(
        f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); {ready.python()}\n"
        f"import runpy; runpy.run_path({script!r})",
        "masked.py",
    )
    shell.run(signal_mask)
    (pid,) = map(int, ready.wait())
    shell.type("\x1a")
    shell.until("Stopped")
    shell.until("$ ")
    os.kill(pid, signal.SIGUSR1)  # stopped, it cannot go on yet
    shell.type("bg\n")
    assert ready.wait() == ["goes on"]
    shell.type("echo is $((6 * 7))\n")
    shell.until("is 42")
    shell.type("fg\n")
    shell.until("masked.py")
    os.kill(pid, signal.SIGUSR1)
    shell.type("Ada\n")
    shell.until("[0] hello Ada")


@pytest.mark.slow
def test_a_run_started_in_the_background_has_no_terminal(shell: Shell, place: Place) -> None:
    line = "the run is in the background"
    for option, count in ("", 0), ("--stdin 0", 1):
        options = f"--log-dir {place.logs} --max-restarts 1 {option}"
        shell.type(f"{shlex.join(RUN)} {options} --no-python sh -c 'wc; false' &\n")
        assert shell.until("giving up").count(line) == count  # not once an attempt
        shell.until("Exit 1")


@pytest.mark.slow
def test_each_attempt_in_the_foreground_reads_the_terminal(shell: Shell, place: Place, ready: Ready) -> None:
    script = place.write(f"""
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            {ready.python()}
            signal.sigwait([signal.SIGUSR1])
            raise SystemExit(1)
        print("a terminal:", os.isatty(0))
        """)
    shell.type(f"{shlex.join(RUN)} --log-dir {place.logs} --max-restarts 1 {script} &\n")
    (pid,) = map(int, ready.wait())
    shell.type("fg\n")
    until(lambda: not shell.has_terminal)
    os.kill(pid, signal.SIGUSR1)
    shell.until("[0] a terminal: True")


@pytest.mark.slow
def test_a_debugger_after_an_exception_is_not_killed(shell: Shell, place: Place) -> None:
    script = place.write("""
        import pdb, sys, time
        def debug(kind, error, trace):
            time.sleep(0.5)  # longer than it takes to kill a rank that has failed and does not exit
            pdb.post_mortem(trace)
        sys.excepthook = debug
        loss = 41
        raise ValueError("loss is nan")
        """)
    shell.run("--settle", "0", "--grace", "0", script)
    shell.until("(Pdb)")
    shell.type("p loss + 1\n")
    shell.until("42")
    shell.type("q\n")
    assert "error     : ValueError: loss is nan" in shell.until("code 1")


@pytest.mark.slow
def test_the_terminals_modes_are_restored_after_a_kill(shell: Shell, place: Place) -> None:
    """As at a prompt for a password. A shell does so for its own processes."""
    shell.run(place.write("import os, signal, tty; tty.setraw(0); os.kill(os.getpid(), signal.SIGKILL)"))
    shell.until("code 137")
    place.write("import termios; print('canonical:', bool(termios.tcgetattr(0)[3] & termios.ICANON))", "modes.py")
    shell.type(f"{PYTHON} modes.py\n")
    shell.until("canonical: True")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--preload json"])
def test_a_stopped_run_whose_launcher_is_killed_leaves_nobody(
    shell: Shell, place: Place, ready: Ready, options: str
) -> None:
    shell.run(*options.split(), place.write(f"{ready.python()}\ninput()"))
    (pid,) = map(int, ready.wait())
    run = [pid]
    while (above := procfs.Stat(run[-1]).parent) != shell.pid:
        run.append(above)  # keeper, guard, fork server, launcher
    shell.type("\x1a")
    shell.until("Stopped")
    shell.until("$ ")
    shell.type("kill -9 %1\n")
    assert not wait_gone(run)


SAVES = """
    import os, signal, sys, time
    def save(number, frame):
        time.sleep(0.6)
        with open({saved!r}, "w") as file:
            file.write(signal.Signals(number).name)
        {ended}
        sys.exit(0)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, save)
    {ready}
    while True:
        time.sleep(0.1)
    """


@pytest.mark.slow
def test_workers_may_save_when_the_terminal_is_closed(place: Place, ready: Ready) -> None:
    """The shell sends SIGHUP to its jobs, and the kernel to the foreground, within a millisecond: that is one stop."""
    saved = str(place.folder / "saved")
    script = place.write(SAVES.format(saved=saved, ready=ready.python(), ended=ready.python("'saved'")))
    with Shell(place) as shell:
        shell.run(script)
        (pid,) = ready.pids()
    assert ready.wait() == ["saved"]
    assert not wait_gone([pid])
    assert (place.folder / "saved").read_text() == "SIGHUP"
