"""`phalanx run --detach`: when the command returns, with which exit code, and what goes on without it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_status import phalanx, until_answered
from tests.support.command import RUN, Done, Place, Shell, logs
from tests.support.etcd import free_port
from tests.support.helpers import TIMEOUT, Gate, Ready, descendants, wait_gone

pytestmark = pytest.mark.long

NOBODY = (
    *("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "127.0.0.1:1"),
    *("--rdzv-conf", "join_timeout=0.2", "--rdzv-id", "x", "--insecure"),
)
"""Options of a job with whose store nobody can meet."""


LISTENS = "the store listens at"


def of_two() -> list[str]:
    """Options of a job of two nodes."""
    where = f"127.0.0.1:{free_port()}"
    return ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-id", "x", "--insecure"]


def launcher_of(text: str) -> int:
    found = re.search(r"launcher pid (\d+)", text)
    assert found, text
    return int(found[1])


@contextlib.contextmanager
def detached(place: Place, *argv: object) -> Iterator[tuple[int, Done]]:
    """The launcher of a run that has left its command, and that command. It must have ended by the end."""
    done = place.run("--detach", *argv)
    assert done.status == 0, done
    launcher = launcher_of(done.err)
    yield launcher, done
    assert not wait_gone([launcher])


def wait_end(pid: int) -> None:
    """Wait for the end of a process that is not ours."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            assert select.select([pidfd], [], [], TIMEOUT)[0]
        finally:
            os.close(pidfd)


def console(place: Place) -> str:
    (path,) = place.logs.glob("*/console.log")
    return path.read_text()


def waiting(ready: Ready, gate: Gate) -> str:
    return f"import os; print('line of', os.environ['RANK'], flush=True)\n{ready.python()}\n{gate.python()}\n"


def test_the_command_returns_and_the_run_goes_on(place: Place, ready: Ready, gate: Gate) -> None:
    """That its stdout and stderr have come to their end shows that nobody holds them any more."""
    with detached(place, "--nproc-per-node", 2, place.write(waiting(ready, gate))) as (launcher, done):
        assert done.out == ""
        name = next(place.logs.iterdir())
        assert "2 workers up; the run goes on in the background" in done.err
        assert f"to follow it: phalanx logs -f {name}\n" in done.err
        assert f"to stop it: phalanx stop {name}\n" in done.err
        assert done.err == console(place)
        assert "running for" in phalanx(place, "status").out  # at once: it can be found, and answers
        ready.wait(2)
        assert os.getsid(launcher) == os.getpgid(launcher) == launcher
        words = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()
        assert words[4] == "0"  # its terminal
        assert os.readlink(f"/proc/{launcher}/cwd") == str(place.folder)
        assert os.readlink(f"/proc/{launcher}/fd/0") == os.devnull
        gate.open(2)
        wait_end(launcher)
    assert sorted(logs(place).out.splitlines()) == ["[0] line of 0", "[1] line of 1"]
    assert "line of" not in console(place)
    assert ": succeeded after " in phalanx(place, "report").out


def test_a_terminal_that_is_closed_does_not_end_it(place: Place, ready: Ready, gate: Gate) -> None:
    with Shell(place) as shell:
        shell.run("--detach", place.write(waiting(ready, gate)))
        launcher = launcher_of(shell.until("code 0"))
        ready.wait()
    gate.open()  # the terminal is closed, and the shell has ended
    wait_end(launcher)
    assert ": succeeded after " in phalanx(place, "report").out


def test_a_rank_that_fails_was_up_before(place: Place) -> None:
    with detached(place, "--no-python", "sh", "-c", "exit 7") as (launcher, _):
        wait_end(launcher)
    assert ": failed with exit code 7 after " in phalanx(place, "report").out
    assert "exitcode  : 7 " in console(place)


@pytest.mark.parametrize(
    "options",
    [
        ["missing.py"],
        ["--max-restarts", "many", "script.py"],
        ["--no-python", "./no-program"],
        ["--node-check", "exit 3", "script.py"],
        [*NOBODY, "script.py"],
        ["--master-port", "-1", "script.py"],
    ],
)  # fmt: skip
def test_a_start_that_fails_ends_as_without_it(place: Place, options: list[str]) -> None:
    place.write("")
    place.write("#!/no/interpreter", "no-program")
    (place.folder / "no-program").chmod(0o700)
    in_the_terminal, done = place.run(*options), place.run("--detach", *options)
    assert done.status == in_the_terminal.status != 0

    def told(text: str) -> str:
        return re.sub(r"\d\d:\d\d:\d\d|\d{8}-\w+|pid: \d+|\d+(\.\d+)? ?m?s", "", text)

    assert told(done.err) == told(in_the_terminal.err)
    assert list(place.logs.glob("*")) == [] or options[0] not in NOBODY, "no folder is left"


def test_each_node_of_a_job_returns_once_its_ranks_are_up(place: Place, ready: Ready, gate: Gate) -> None:
    options = [*of_two(), place.write(waiting(ready, gate))]
    with place.start("--detach", *options) as first:
        first.read_until(LISTENS)  # the other one comes when this one waits
        with detached(place, *options) as (launcher, _):
            ready.wait(2)
            done = first.end()
            assert done.status == 0
            gate.open(2)
            wait_end(launcher_of(done.err))
            wait_end(launcher)


def test_a_full_disk_is_named_and_its_logs_are_elsewhere(place: Place, small_disk: Path) -> None:
    place.env["TMPDIR"] = str(place.folder)
    (small_disk / "file").write_bytes(bytes(60 << 10))
    done = place.run("--detach", "--log-dir", small_disk / "logs", "--no-python", "true", logs=False)
    assert done.status == 0
    assert f"the disk at {small_disk}; logs are kept in {place.folder}" in done.err
    wait_end(launcher_of(done.err))
    place.env["TMPDIR"] = str(small_disk)
    done = place.run("--detach", "--log-dir", small_disk / "logs", "--no-python", "true", logs=False)
    assert done.status == 1
    assert "no logs are kept" in done.err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)])
def test_a_signal_to_the_command_stops_the_run(place: Place, number: signal.Signals, code: int) -> None:
    with place.start("--detach", *of_two(), place.write("")) as command:
        command.read_until(LISTENS)
        pids = descendants(command.process.pid)
        assert pids
        command.send(number)
        assert command.end().status == code
        assert not wait_gone(pids)


def test_a_signal_that_comes_when_the_ranks_are_up_is_late(place: Place, ready: Ready, gate: Gate) -> None:
    """The command has not read yet that they are."""
    with place.start("--detach", place.write(waiting(ready, gate))) as command:
        command.read_until("logs in ")
        command.send(signal.SIGSTOP)
        ready.wait()
        until_answered(place, "line of 0")
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
            command.send(number)
        done = command.end()
    assert done.status == 0
    gate.open()
    wait_end(launcher_of(console(place)))
    assert ": succeeded after " in phalanx(place, "report").out


def test_a_rank_does_not_detach_what_it_starts(place: Place, gate: Gate) -> None:
    place.env["PHALANX_DETACH"] = "1"
    script = place.write(f"import os; print('PHALANX_DETACH' in os.environ, flush=True)\n{gate.python()}")
    done = place.program("sh", "-c", '"$@" 9>&1 | cat', "sh", *RUN, "--log-dir", place.logs, "-t", "3", script)
    until_answered(place, "False")  # the pipe has come to its end before: nobody holds what the shell had opened
    assert phalanx(place, "stop").status == 0
    wait_end(launcher_of(done.err))
    assert "[0] False\n" in console(place), "because of -t"
    assert "stopping the workers" in console(place)


def test_a_launcher_that_is_killed_before_ends_the_command(place: Place) -> None:
    with place.start("--detach", *of_two(), place.write("")) as command:
        command.read_until(LISTENS)
        (launcher,) = (pid for pid in descendants(command.process.pid) if os.getsid(pid) == pid)
        os.kill(launcher, signal.SIGKILL)
        done = command.end()
        assert done.status == 137
        assert "the launcher has ended by SIGKILL before all ranks were up" in done.err


def test_it_starts_with_next_to_no_environment_and_streams(place: Place, ready: Ready, gate: Gate) -> None:
    """As cron does it; and with all streams closed."""
    script = place.write(waiting(ready, gate))
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    argv = [*RUN, "--log-dir", str(place.logs), "--detach", script]
    for streams in "", "<&- >&- 2>&-":
        line = f'exec "$@" {streams}'
        code = subprocess.run(
            ["/bin/sh", "-c", line, "sh", *argv], cwd=place.folder, env=kept, stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=TIMEOUT, check=False,
        ).returncode  # fmt: skip
        assert code == 0
        (pid,) = ready.pids()
        gate.open()
        wait_end(pid)
    for path in place.logs.glob("*/console.log"):
        wait_end(launcher_of(path.read_text()))


def test_a_program_that_calls_main_is_refused(place: Place) -> None:
    code = f"from phalanx.run import main; main(['--detach', '--log-dir', {str(place.logs)!r}, 'x.py'])"
    done = place.program(sys.executable, "-c", code)
    assert done.status == 2
    assert "--detach: phalanx.run.main returns when the run has ended" in done.err
