"""`phalanx run --max-restarts`: real attempts, what the console says of them, run.json, signals and exit codes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx._run.run_team import _one_by_one
from tests.support.command import RUN, Done, Place, refused
from tests.support.helpers import Gate, Ready, wait_gone

FAILS = """
    import os, sys
    from phalanx.timer import progress
    attempt, rank, fails, steps = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"], *sys.argv[1:3]
    progress(int(steps.split(",")[attempt]))
    if attempt < int(fails) and rank == "1":
        sys.exit("no luck")
    print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
    """


def record(place: Place) -> dict[str, Any]:
    (path,) = place.logs.glob("*/run.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_a_run_that_fails_twice_and_then_succeeds(place: Place) -> None:
    done = place.run("--nproc-per-node", 2, "--max-restarts", 3, place.write(FAILS), 2, "10,10,30")
    assert done.status == 0, done
    assert done.out.count("attempt 2 of 3\n") == 2
    lines = [line for line in done.err.splitlines() if line.startswith("phalanx: attempt")]
    first, second, third = lines
    assert first.startswith("phalanx: attempt 0 failed after ")
    assert ": rank 1, exited with code 1; stderr ends with: no luck, step 10; attempt 1" in first
    assert first.endswith("; attempt 1 follows (restart 1 of at most 3)")
    assert second.startswith("phalanx: attempt 1 failed after ")
    assert second.endswith(", step 10, same step as attempt 0; attempt 2 follows (restart 2 of at most 3)")
    assert third.startswith("phalanx: attempt 2 has succeeded, after ")
    assert "FAILED" not in done.err
    assert done.err.count("logs in") == 1
    run = record(place)
    assert (run["state"], run["exit_code"], run["cause"]) == ("succeeded", 0, "")
    assert [one["number"] for one in run["attempts"]] == [0, 1, 2]
    assert [one["step"] for one in run["attempts"]] == [10, 10, 30]
    assert run["attempts"][1]["cause"].startswith("attempt 1: rank 1, exited with code 1")
    assert all(one["ended"] >= one["started"] for one in run["attempts"])
    pids = [rank["pid"] for one in run["attempts"][1:] for rank in one["ranks"]]
    assert len(set(pids)) == len(pids) == 4


@pytest.mark.slow
def test_a_run_that_uses_its_restarts_up(place: Place) -> None:
    done = place.run("--nproc-per-node", 2, "--max-restarts", "2/1h", place.write(FAILS), 9, "10,20,30")
    assert done.status == 1
    assert "step 30; giving up: 2 of 2 restarts within 1h00m used\n" in done.err
    assert done.err.count("FAILED") == 1
    earlier = done.err.partition("Earlier Attempts:\n")[2].splitlines()
    assert earlier[0].startswith("  attempts 0 to 1, ")
    assert earlier[0].endswith(": rank 1, exited with code 1; stderr ends with: no luck, steps 10, 20")
    assert "/attempt_2/1/" in done.err
    run = record(place)
    assert (run["state"], run["exit_code"]) == ("failed", 1)
    assert run["cause"].startswith("attempt 2: rank 1: exited with code 1")
    assert len(run["attempts"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options,attempts,why",
    [
        (("--max-no-progress", 2), 3, "no progress in 2 attempts: step 20 was not passed"),
        (("--min-uptime", "1h:2"), 2, "failing on start: 2 attempts ended within 1h00m"),
        (("--never-restart-on", 1), 1, "exit code 1 is one after which nothing is restarted"),
    ],
    ids=["progress", "on start", "never"],
)
def test_a_run_that_gives_up_early(place: Place, options: tuple[object, ...], attempts: int, why: str) -> None:
    done = place.run("--nproc-per-node", 2, "--max-restarts", 9, *options, place.write(FAILS), 9, "20,10,5,1")
    assert done.status == 1
    assert f"; giving up: {why}\n" in done.err
    assert done.err.count(" follows (restart ") == attempts - 1
    assert len(record(place)["attempts"]) == attempts


@pytest.mark.slow
def test_a_code_that_always_restarts_counts_for_nothing(place: Place) -> None:
    """Attempts that ended alike have one line of the report."""
    script = place.write("""
        import os, sys
        sys.exit((75, 75, 3, 0)[int(os.environ["TORCHELASTIC_RESTART_COUNT"])])
        """)
    done = place.run("--max-restarts", 1, "--always-restart-on", 75, script)
    assert done.status == 0
    assert done.err.count(" follows (not counted as a restart)") == 2
    assert "; attempt 3 follows (restart 1 of at most 1)\n" in done.err
    done = place.run("--max-restarts", 3, "--no-python", "/bin/sh", "-c", "kill -9 $$$$")
    assert done.status == 137
    (earlier,) = (line for line in done.err.splitlines() if line.startswith("  attempt"))
    assert earlier.startswith("  attempts 0 to 2, ")
    assert earlier.endswith(": rank 0, Signal 9 (SIGKILL) received by PID …")


DELAYED = ("--max-restarts", 3, "--backoff", "1h:1h", "--backoff-jitter", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_in_the_delay_before_a_restart(place: Place, number: signal.Signals) -> None:
    with place.start(*DELAYED, place.write("raise ValueError('bad batch')")) as launcher:
        launcher.read_until("; attempt 1 follows in 1h00m")
        while not [*place.logs.glob("*/run.json")] or not record(place)["attempts"][0]["cause"]:
            pass  # it is written aside
        launcher.send(number)
        done = launcher.end()
    if number == signal.SIGKILL:
        assert wait_gone([record(place)["attempts"][0]["ranks"][0]["pid"]]) == set()
        shown = place.program(*RUN[:-1], "runs", "--log-dir", place.logs)
        assert " lost " in shown.out
        assert "attempt 0: rank 0, ValueError: bad batch" in shown.out
        return
    assert done.status == 128 + number
    assert f"phalanx: {number.name}: no other attempt is started\n" in done.err
    assert "error     : ValueError: bad batch" in done.err
    run = record(place)
    assert (run["state"], run["exit_code"]) == ("stopped", 128 + number)
    assert run["cause"] == f"{number.name}, after attempt 0: rank 0, ValueError: bad batch"


def stopped_while_ending(
    place: Place, ready: Ready, gate: Gate, number: signal.Signals, *options: object, settles: bool
) -> Done:
    """Stop a run whose rank 0 has failed, while rank 1 is being ended, or before that: in the settle window."""
    script = place.write(f"""
        import os, signal, sys
        if os.environ["RANK"] == "0":
            {ready.python("f'0 {os.getpid()}'")}
            {gate.python()}
            sys.exit(3)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        {ready.python("f'1 {os.getpid()}'")}
        signal.sigwait([signal.SIGTERM])
        {ready.python("'asked to end'")}
        while True:
            signal.pause()
        """)
    with place.start("--nproc-per-node", 2, "--grace", 600, *options, script) as launcher:
        pids = {int(rank): int(pid) for rank, pid in map(str.split, ready.wait(2))}
        gate.open()
        assert wait_gone([pids[0]]) == set()
        if not settles:
            assert ready.wait() == ["asked to end"]
        launcher.send(number)
        launcher.read_until(f"phalanx: {number.name}: stopping the workers")
        if settles:
            assert ready.wait() == ["asked to end"]
        with contextlib.suppress(ProcessLookupError):  # of SIGHUP and SIGINT, it dies by itself
            os.kill(pids[1], signal.SIGKILL)
        return launcher.end()


@pytest.mark.slow
@pytest.mark.parametrize("number, settles", [(signal.SIGINT, False), (signal.SIGQUIT, False), (signal.SIGTERM, True)])
def test_a_stop_after_a_failure_with_restarts_left_ends_the_run(
    place: Place, ready: Ready, gate: Gate, number: signal.Signals, settles: bool
) -> None:
    settle = ("--settle", 600) if settles else ()
    done = stopped_while_ending(place, ready, gate, number, "--max-restarts", 1, *settle, settles=settles)
    assert done.status == 128 + number, done
    assert "phalanx: attempt 0 failed after " in done.err
    assert "; it is stopped, and no other attempt follows\n" in done.err
    assert "error     : exited with code 3; no error was recorded" in done.err, "the report lists it"
    cause = f"{number.name}, after attempt 0: rank 0, exited with code 3; no error was recorded"
    assert done.err.endswith(f"phalanx: stopped by {cause}\n")
    run = record(place)
    assert (run["state"], run["exit_code"], run["cause"]) == ("stopped", 128 + number, cause)


@pytest.mark.slow
def test_a_last_failure_before_a_stop_ends_the_run(place: Place, ready: Ready, gate: Gate) -> None:
    options = ("--max-restarts", 1, "--never-restart-on", 3)
    done = stopped_while_ending(place, ready, gate, signal.SIGTERM, *options, settles=False)
    assert done.status == 3, done
    assert "giving up: exit code 3 is one after which nothing is restarted" in done.err
    assert record(place)["state"] == "failed"


@pytest.mark.slow
def test_a_stop_between_two_attempts_ends_the_run(place: Place) -> None:
    """With a worker that fails at once; what is chosen at random is when the signal comes."""
    script = place.write("raise SystemExit(3)")
    for number in [signal.SIGTERM, signal.SIGHUP] * int(os.environ.get("PHALANX_ROUNDS", "2")):
        moment = random.uniform(0, 0.2)  # noqa: S311 - no secret
        with place.start("--max-restarts", 1000, script) as launcher:
            launcher.read_until("attempt 1 follows")
            select.select([], [], [], moment)
            launcher.send(number)
            done = launcher.end()
        assert done.status == 128 + number, (moment, done)
        assert f"phalanx: stopped by {number.name}" in done.err, "and earlier failures are listed above it"


@pytest.mark.slow
def test_forwarded_signals_reach_every_worker(place: Place, ready: Ready) -> None:
    """With SIGUSR1 and SIGUSR2 that is so without any option; and unless none is to be forwarded."""
    script = place.write(f"""
        import signal
        caught = {{signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH}}
        signal.pthread_sigmask(signal.SIG_BLOCK, caught)
        {ready.python()}
        assert signal.sigwait(caught) == signal.SIGUSR1
        {ready.python("'first'")}
        print(signal.sigwait(caught).name)
        """)
    for options, second in (((), signal.SIGUSR2), (("--signals-forward", "USR1,winch"), signal.SIGWINCH)):
        with place.start("--nproc-per-node", 2, *options, script) as launcher:
            ready.wait(2)
            launcher.send(signal.SIGUSR1)
            ready.wait(2)
            launcher.send(second)
            done = launcher.end()
        assert done.status == 0, done
        assert done.out.count(second.name) == 2
    with place.start("--signals-forward", "none", script) as launcher:
        pids = ready.pids()
        launcher.send(signal.SIGUSR1)
        assert launcher.end().status == -signal.SIGUSR1
    assert wait_gone(pids) == set()


@pytest.mark.slow
def test_a_signal_reaches_a_worker_that_has_started_just_now(place: Place, tmp_path: Path) -> None:
    """It asks for the signal itself, before the launcher knows of its start."""
    script = tmp_path / "asks.sh"
    script.write_text("trap 'exit 7' USR1\nkill -USR1 $(cat pid)\nwhile :; do sleep 0.05; done\n")
    command = f'echo $$ >pid; exec "{sys.executable}" -m phalanx run --no-python /bin/sh asks.sh'
    for _ in range(int(os.environ.get("PHALANX_ROUNDS", "5"))):
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=tmp_path, env=place.env, check=False, capture_output=True, timeout=60
        )
        assert done.returncode == 7, done


@pytest.mark.slow
def test_a_forwarded_signal_does_not_change_the_exit_code(place: Place, ready: Ready) -> None:
    """However late it comes: they come until the launcher is gone."""
    script = place.write(f"""
        import signal
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        {ready.python()}
        """)
    with place.start(script) as launcher:
        ready.wait()
        while launcher.process.poll() is None:
            launcher.send(signal.SIGUSR1)
        done = launcher.end()
    assert done.status == 0, done


def test_signals_during_one_that_is_passed_on_follow_it() -> None:
    passed: list[int] = []

    def call(number: int) -> None:
        passed.append(number)
        if passed == [10]:
            for other in (10, 12, 10, 12):
                handle(other, None)
            assert passed == [10], "none interrupts it"
        if number == 15:
            handle(10, None)
            raise KeyboardInterrupt

    handle = _one_by_one(call)
    handle(10, None)
    assert passed == [10, 10, 12]
    with pytest.raises(KeyboardInterrupt):
        handle(15, None)
    handle(12, None)
    assert passed == [10, 10, 12, 15, 12]


def test_a_program_has_its_handlers_back_after_a_run(place: Place) -> None:
    """It may have started the run on another thread, too, where no handler can be set; and some are not Python's."""
    place.write("", "nothing.py")
    script = place.write("""
        import faulthandler, signal, threading
        from phalanx.cli.run import main
        def run():
            codes.append(main(["--log-dir", "/dev/null", "nothing.py"]))
        codes = []
        faulthandler.register(signal.SIGUSR2)
        run()
        print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        print(codes)
        """)
    done = place.program(sys.executable, script)
    assert (done.status, done.out) == (0, "True\n[None, None]\n"), done


@pytest.mark.slow
def test_lines_of_ours_stay_in_order_on_a_slow_console(place: Place, ready: Ready, gate: Gate) -> None:
    """Each stands between the lines of its attempt and those of the next: also if it was said before all are shown."""
    script = place.write(f"""
        import os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("begin", attempt)
        for number in range(3000):  # more than fits into a pipe
            print("-" * 90)
        print("end", attempt, flush=True)
        if attempt < "3":
            sys.exit(1)
        {ready.python()}
        {gate.python()}
        """)
    with place.start("--max-restarts", 3, script, stderr=subprocess.STDOUT) as launcher:
        ready.wait()
        shown = launcher.read_until("[0] end 3", "stdout")
        gate.open()
        assert launcher.end().status == 0
    found = re.findall(r"^(?:phalanx: attempt \d|\[0\] begin \d|\[0\] end \d)", shown, re.MULTILINE)
    expected = [(f"[0] begin {n}", f"[0] end {n}", f"phalanx: attempt {n}") for n in range(4)]
    assert found == [line for lines in expected for line in lines][:-1]


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, see proc_pid_status(5)."""
    with open(f"/proc/{pid}/status") as status:
        (mask,) = (line.split()[1] for line in status if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_signals_are_handled_until_the_end_is_recorded(place: Place, ready: Ready) -> None:
    """Else a signal that comes when the workers have ended kills the launcher, and the run counts as lost."""
    script = place.write(f"""
        import os, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1)
        {ready.python()}
        """)
    console, full = os.pipe()
    fcntl.fcntl(full, fcntl.F_SETPIPE_SZ, 4096)
    os.write(full, b"-" * 4096)  # from now on, each line of ours takes half a second
    try:
        with place.start("--max-restarts", 1, script, stderr=full) as launcher:
            ready.wait()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):  # it has ended
                while catches(launcher.process.pid, signal.SIGTERM):
                    pass
            assert record(place)["state"] == "succeeded"
            assert launcher.end().status == 0
    finally:
        os.close(console)
        os.close(full)


def test_attempts_that_cannot_be_started(place: Place) -> None:
    """The binary removes itself: each later attempt has its place in the record, and counts as a failure."""
    script = place.write('#!/bin/sh\nrm -- "$0"\nexit 3\n', "once.sh")
    os.chmod(script, 0o700)
    done = place.run("--max-restarts", 2, "--no-python", script)
    assert done.status == 1
    assert "phalanx: attempt 1 not started after " in done.err
    assert f"phalanx: Error: SCRIPT: no such binary: {script!r}\n" in done.err
    run = record(place)
    assert [one["number"] for one in run["attempts"]] == [0, 1, 2]
    assert [len(one["ranks"]) for one in run["attempts"]] == [1, 0, 0]
    first, second, _third = (one["cause"] for one in run["attempts"])
    assert first == "attempt 0: rank 0, exited with code 3; no error was recorded"
    assert second.startswith("attempt 1: entrypoint: no such binary: ")
    assert run["cause"].startswith("attempt 2: entrypoint: no such binary: ")


@pytest.mark.slow
def test_a_module_that_cannot_be_preloaded_again(place: Place) -> None:
    place.write(
        """
        import os
        open("imported", "x")  # fails the second time
        """,
        "once.py",
    )
    script = place.write("""
        import os, select, signal
        def parent(pid):
            with open(f"/proc/{pid}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])
        server = parent(parent(os.getppid()))  # the fork server, which has started guard and keeper
        died = os.pidfd_open(server)
        os.kill(server, signal.SIGKILL)
        select.select([died], [], [])  # before the next attempt, which would ask it for a fork
        os._exit(3)
        """)
    done = place.run("--max-restarts", 1, "--preload", "once", script)
    assert done.status == 1
    assert "not started after " in done.err
    error = done.err.partition("phalanx: Error: ")[2]
    assert error.startswith("preload: 'once' could not be imported\n")
    assert "FileExistsError" in error
    assert record(place)["cause"] == "attempt 1: preload: 'once' could not be imported"


@pytest.mark.slow
def test_long_messages_and_a_lost_folder_are_short_lines(place: Place) -> None:
    place.write(
        """
        import os, shutil
        folder = os.getcwd()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("x" * 9000)
        while os.path.isdir(folder):  # the run's record is in it, and is being written
            shutil.rmtree(folder, ignore_errors=True)
        raise ValueError("\\n\\n below")
        """,
        "job.py",
    )
    done = place.run("--max-restarts", 2, "--redirects", 3, "job.py")
    first, second, third = (line for line in done.err.splitlines() if line.startswith("phalanx: attempt"))
    assert len(first) < 700
    assert "rank 0, ValueError: xxxxx" in first
    assert first.endswith("xxxxx…; attempt 1 follows (restart 1 of at most 2)")
    assert ": rank 0, ValueError: below; attempt 2 follows" in second
    assert re.search(r"exited with code 1; stderr ends with: .*: can't find '__main__' module in 'job.py'", third)
    assert "[Errno 2] No such file or directory\n" not in done.err
    earlier = [line for line in done.err.splitlines() if line.startswith("  attempt 0, ")]
    assert [line[-1] for line in earlier] == ["…"]


def test_the_first_attempts_folder_and_the_last_ones_are_kept(place: Place) -> None:
    script = place.write("""
        import os, sys
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.exit(7)
        """)
    done = place.run("--nproc-per-node", 2, "--settle", 60, "--max-restarts", 7, "--keep-attempts", 5, script)
    assert done.status == 7, done
    (run_dir,) = place.logs.iterdir()
    assert sorted(path.name for path in run_dir.glob("attempt_*")) == [
        f"attempt_{number}" for number in (0, 3, 4, 5, 6, 7)
    ]
    assert len(list(run_dir.glob("attempt_*/*/stdout.log"))) == 12
    phalanx, where = (sys.executable, "-m", "phalanx"), ("--log-dir", place.logs)
    for attempt in (0, 3, 7):
        shown = place.program(*phalanx, "logs", *where, "--attempt", attempt)
        assert sorted(shown.out.splitlines()) == [f"[{rank}] attempt {attempt}" for rank in range(2)], shown
    for more in ((), ("-f",)):
        gone = place.program(*phalanx, "logs", *where, "--attempt", 1, *more)
        assert gone.err.endswith("the logs of attempt 1 are not kept; there are those of 0, 3, 4, 5, 6, 7\n"), gone
    assert "exited with code 7" in place.program(*phalanx, "report", *where).out


def test_a_job_files_restart_options_without_effect_are_named(place: Place) -> None:
    job = place.write('max-restarts = 3\nbackoff = "1s:1m"\nmin-uptime = 30\n', "job.toml")
    place.env["PHALANX_MAX_NO_PROGRESS"] = "3"
    said = "phalanx: without effect without --max-restarts: --backoff, --min-uptime, --max-no-progress\n"
    done = place.run("-f", job, "--max-restarts", 0, place.write(""))
    assert (done.status, done.err.count(said)) == (0, 1), done
    for heeded in ((), ("--max-restarts", 0, "--always-restart-on", 75)):
        done = place.run("-f", job, *heeded, place.write(""))
        assert (done.status, "without effect" in done.err) == (0, False), done
    done = place.run("-f", job, "--max-restarts", 0, "--backoff", 5, place.write(""))
    refused(done, "--backoff: nothing is restarted")
    assert place.run("--backoff", 0, place.write("")).status == 0, "that is what it is by default"
