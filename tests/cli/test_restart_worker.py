"""`phalanx run --restart worker`: each worker is started again by itself, and the others run on undisturbed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.test_log_options import feed_until, fold_patiently
from tests.cli.test_run import LIMIT, Launcher, Place, read_until, refused, terminal
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, let_a_request_pass, wait_gone
from tests.support.screen import Emulator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


WORKER = ("--restart", "worker")
HEAD = """
    import os, signal, sys, time
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    """


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def script(place: Place, body: str) -> str:
    return place.write(HEAD + body)


def start(place: Place, *argv: object, **settings: Any) -> Launcher:
    return place.start(*WORKER, *argv, **settings)


def record(place: Place) -> dict[str, Any]:
    (path,) = place.logs.glob("*/run.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def when_recorded(place: Place, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the record says so: it is written aside, as soon as something has happened."""
    while True:
        run = record(place)
        if holds(run):
            return run


def states(run: dict[str, Any]) -> list[dict[int, str]]:
    """The states of the ranks in each attempt."""
    return [{rank["rank"]: rank["state"] for rank in one["ranks"]} for one in run["attempts"]]


# --- restarts


@pytest.mark.long
def test_the_worker_that_failed_is_started_again_and_no_other(place: Place, ready: Ready, gate: Gate) -> None:
    """Ranks 0 and 2 wait until rank 1 is in its third attempt."""
    body = f"""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_PORT TORCHELASTIC_MAX_RESTARTS".split()
    facts = [os.getpid(), rank, attempt, *(os.environ[name] for name in names)]
    {ready.python("' '.join(map(str, facts))")}
    if rank == 1 and attempt < 2:
        sys.exit(3)
    {gate.python()}
    print("bye", rank, attempt)
    """
    with start(place, "--nproc-per-node", 3, "--max-restarts", 2, script(place, body)) as launcher:
        told = [line.split() for line in ready.wait(5)]
        assert all(alive(int(line[0])) for line in told if line[1] != "1")
        gate.open(3)
        done = launcher.end()
    assert done.status == 0, done
    assert sorted((line[1], line[2]) for line in told) == [("0", "0"), ("1", "0"), ("1", "1"), ("1", "2"), ("2", "0")]
    assert {(line[3], line[4]) for line in told} == {(rank, rank) for rank in "012"}
    assert {(line[5], line[6], line[8]) for line in told} == {("3", "3", "2")}
    assert len({line[7] for line in told}) == 1, "the others have MASTER_PORT: it stays"
    assert sorted(done.out.splitlines()) == ["[0] bye 0 0", "[1] bye 1 2", "[2] bye 2 0"]
    lines = done.err.splitlines()
    failed = "exited with code 3; no error was recorded"
    for number in (0, 1):
        (line,) = (line for line in lines if line.startswith(f"phalanx: rank 1: attempt {number} failed after "))
        assert line.endswith(f": {failed}; attempt {number + 1} follows (restart {number + 1} of at most 2)")
    assert re.fullmatch(rf"phalanx: rank 1: attempts 0 to 1, .* to .*: {failed}", lines[-2])
    assert lines[-1] == "phalanx: rank 1: attempt 2 has succeeded"
    run = record(place)
    assert (run["state"], run["exit_code"], run["restart"], run["nprocs"]) == ("succeeded", 0, "worker", 3)
    assert states(run) == [
        {0: "succeeded", 1: "failed", 2: "succeeded"},
        {1: "failed"},
        {1: "succeeded"},
    ]
    assert run["attempts"][1]["ranks"][0]["cause"] == f"rank 1: attempt 1: {failed}"
    pids = {(rank["rank"], one["number"]): rank["pid"] for one in run["attempts"] for rank in one["ranks"]}
    assert pids == {(int(line[1]), int(line[2])): int(line[0]) for line in told}
    (folder,) = place.logs.glob("2*")
    assert sorted(path.parent.name for path in folder.glob("attempt_1/*/stdout.log")) == ["1"]


def test_of_each_worker_the_folders_of_its_first_start_and_of_its_last_ones_are_kept(place: Place) -> None:
    body = """
    print("attempt", attempt)
    sys.exit(attempt < (5 if rank == 0 else 1))
    """
    options = ("--nproc-per-node", 2, "--max-restarts", 5, "--backoff", "0.01", "--keep-attempts", 2)
    done = place.run(*WORKER, *options, script(place, body))
    assert done.status == 0, done
    (run_dir,) = place.logs.iterdir()
    kept = {str(path.parent.relative_to(run_dir)) for path in run_dir.glob("attempt_*/*/stdout.log")}
    assert kept == {"attempt_0/0", "attempt_4/0", "attempt_5/0", "attempt_0/1", "attempt_1/1"}
    assert sorted(path.name for path in run_dir.glob("attempt_*")) == [f"attempt_{n}" for n in (0, 1, 4, 5)]


@pytest.mark.long
def test_one_gives_up_and_the_others_go_on_to_their_end(place: Place, ready: Ready, gate: Gate) -> None:
    """The exit code is that of the first that gave up, whatever comes after."""
    body = f"""
    if rank == 1:
        raise ValueError("bad batch")
    {ready.python()}
    {gate.python()}
    if rank == 2 and attempt < 2:
        sys.exit(7 if attempt else 6)
    if rank == 3:
        print("to the end")
    """
    path = script(place, body)
    with start(place, "--nproc-per-node", 4, "--max-restarts", 1, path) as launcher:
        shown = launcher.read_until("; giving up: 1 restart, and no more")
        assert "rank 1: attempt 1 failed after " in shown
        assert all(map(alive, ready.pids(3)))
        gate.open(4)
        done = launcher.end()
    assert done.status == 1, done
    assert "[3] to the end\n" in done.out
    report = done.err[done.err.index("=====") :]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "error     : ValueError: bad batch" in report
    assert report.index("rank 2:") > report.index("Other Failures:")
    assert "exitcode  : 7 " in report
    assert "ranks 0, 3: succeeded" in report
    earlier = report.partition("Earlier Attempts:\n")[2].splitlines()
    assert re.match(r"  rank 1: attempt 0, .*: ValueError: bad batch$", earlier[0])
    assert re.match(r"  rank 2: attempt 0, .*: exited with code 6; no error was recorded$", earlier[1])
    assert earlier[2] == "  gave up   : ranks 1-2: 1 restart, and no more"
    run = record(place)
    assert (run["state"], run["exit_code"]) == ("failed", 1)
    assert run["cause"] == "rank 1: attempt 1: ValueError: bad batch"


@pytest.mark.long
def test_equal_restarts_are_told_in_one_line(place: Place) -> None:
    done = place.run(*WORKER, "--nproc-per-node", 3, "--max-restarts", 1, script(place, "sys.exit(not attempt)"))
    assert done.status == 0, done
    first, second = done.err.splitlines()[-2:]
    assert re.fullmatch(r"phalanx: ranks 0-2: attempt 0, .*: exited with code 1; no error was recorded", first)
    assert second == "phalanx: ranks 0-2: attempt 1 has succeeded"


def test_without_restarts_a_failure_stops_no_other(place: Place) -> None:
    done = place.run(*WORKER, "--nproc-per-node", 2, script(place, "sys.exit(9) if rank else print('alone')"))
    assert (done.status, done.out) == (9, "[0] alone\n"), done
    assert "phalanx: rank 1: attempt 0 failed after " in done.err
    assert "no error was recorded; giving up\n" in done.err


def test_what_the_first_start_raises_ends_all(place: Place) -> None:
    broken = place.folder / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    done = place.run(*WORKER, "--nproc-per-node", 3, "--max-restarts", 3, "--no-python", broken)
    assert done.status == 1
    assert "Exec format error" in done.err
    assert " follows" not in done.err
    assert record(place)["state"] == "failed"


@pytest.mark.long
def test_a_hang_is_that_of_one_worker(place: Place) -> None:
    body = """
    from phalanx.timer import beat
    beat()
    while rank == 1 and attempt == 0:
        signal.pause()
    """
    options = ("--nproc-per-node", 2, "--max-restarts", 1, "--hang-timeout", 1)
    done = place.run(*WORKER, *options, script(place, body))
    assert done.status == 0, done
    assert "phalanx: rank 1: no heartbeat for 1 s" in done.err
    assert "phalanx: rank 1: attempt 0 failed after " in done.err
    assert "rank 0: attempt" not in done.err


@pytest.mark.slow
def test_what_preloads_serves_all_workers_and_attempts(place: Place) -> None:
    body = """
    print("forked", os.getppid() != 1, "decimal" in sys.modules)
    sys.exit(rank == 1 and not attempt)
    """
    options = ("--nproc-per-node", 3, "--max-restarts", 1, "--preload", "decimal")
    done = place.run(*WORKER, *options, script(place, body))
    assert done.status == 0, done
    assert done.out.count("forked True True") == 4


@pytest.mark.long
def test_workers_are_placed_as_of_the_whole_run(place: Place) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("it takes two CPUs")
    lists = ";".join(map(str, (*cpus, cpus[0])))
    body = """
    print(os.sched_getaffinity(0), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"])
    """
    place.env["CUDA_VISIBLE_DEVICES"] = "4,5,7"
    options = ("--nproc-per-node", 3, "--cpu-bind", lists, "--virtual-local-rank")
    done = place.run(*WORKER, *options, script(place, body))
    assert sorted(done.out.splitlines()) == [
        f"[{rank}] {{{cpu}}} {device} 0" for rank, (cpu, device) in enumerate(zip((*cpus, cpus[0]), "457", strict=True))
    ]


@pytest.mark.parametrize(
    "options,words",
    [
        (("--restart", "workers"), ("--restart", "'workers' is not one of 'gang', 'worker'")),
        ((*WORKER, "--settle", 1), ("--settle and --restart worker exclude each other",)),
    ],
)
def test_what_is_refused(place: Place, options: tuple[object, ...], words: tuple[str, ...]) -> None:
    refused(place.run(*options, place.write("")), *words)


@pytest.mark.long
def test_more_workers_than_descriptors(place: Place) -> None:
    """The soft limit is raised, for this process alone; the hard one cannot be."""
    code = "import os, sys; from resource import *; hard = getrlimit(RLIMIT_NOFILE)[1] if sys.argv[2] == '-' else 200\n"
    code += "setrlimit(RLIMIT_NOFILE, (min(200, hard), hard)); os.execv(sys.argv[1], [sys.argv[1], *sys.argv[3:]])"
    limited = place.write(code, "limited.py")
    worker = place.write("from resource import *; print(*getrlimit(RLIMIT_NOFILE))", "worker.py")
    run = (sys.executable, limited, sys.executable)
    rest = ("-m", "phalanx", "run", *WORKER, "--log-dir", place.logs, "--nproc-per-node", 6, worker)
    done = place.program(*run, "-", *rest)
    assert done.status == 0, done
    assert {line.split()[1] for line in done.out.splitlines()} == {"200"}
    refused(place.program(*run, "200", *rest), "6 workers take 224 open files, and the limit is 200 (ulimit -Hn)")


# --- signals


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_those_that_run_and_those_in_a_delay(place: Place, ready: Ready, number: signal.Signals) -> None:
    body = f"""
    if rank == 1:
        sys.exit(3)
    {ready.python()}
    while True:
        time.sleep(0.1)
    """
    options = ("--nproc-per-node", 3, "--max-restarts", 3, "--backoff", "1h:1h", "--backoff-jitter", 0)
    with start(place, *options, script(place, body)) as launcher:
        pids = ready.pids(2)
        launcher.read_until("; attempt 1 follows in 1h00m")
        launcher.send(number)
        done = launcher.end()
    assert done.status == 128 + number
    assert wait_gone(pids) == set()
    assert f"phalanx: {number.name}: stopping the workers (at most 30 s; once more to kill them)\n" in done.err
    assert f"phalanx: {number.name}: rank 1: no other attempt is started\n" in done.err
    run = record(place)
    assert (run["state"], run["exit_code"], run["cause"]) == ("stopped", 128 + number, number.name)
    assert states(run) == [{0: "stopped", 1: "failed", 2: "stopped"}]


@pytest.mark.long
def test_a_second_signal_kills_all(place: Place, ready: Ready) -> None:
    body = f"""
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"no\\n"))
    {ready.python()}
    while True:
        time.sleep(0.1)
    """
    with start(place, "--nproc-per-node", 3, "--grace", 600, script(place, body)) as launcher:
        pids = ready.pids(3)
        launcher.send(signal.SIGTERM)
        shown = ""
        while shown.count("no\n") < 3:
            shown += launcher.read_until("no\n", "stdout")
        let_a_request_pass()
        launcher.send(signal.SIGINT)
        done = launcher.end()
    assert done.status == 143
    assert wait_gone(pids) == set()
    assert "phalanx: SIGKILL: killing the workers\n" in done.err


@pytest.mark.long
def test_a_notice_and_forwarded_signals_reach_all(place: Place, ready: Ready) -> None:
    body = f"""
    import phalanx
    come, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.set_wakeup_fd(bell)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    {ready.python()}
    assert os.read(come, 1)[0] == signal.SIGUSR1
    {ready.python()}
    assert os.read(come, 1)[0] == signal.SIGUSR2
    print("stop", phalanx.should_stop())
    """
    with start(place, "--nproc-per-node", 3, "--notice", "USR2:60", script(place, body)) as launcher:
        ready.wait(3)
        launcher.send(signal.SIGUSR1)
        ready.wait(3)
        launcher.send(signal.SIGTERM)
        done = launcher.end()
    assert done.status == 143
    assert sorted(done.out.splitlines()) == [f"[{rank}] stop True" for rank in range(3)]
    assert "giving the workers notice of a stop by SIGUSR2" in done.err


@pytest.mark.parametrize("grace", [0, 30])
def test_a_launcher_that_is_killed_leaves_nobody(place: Place, ready: Ready, grace: int) -> None:
    """With a grace, each worker has it: it may write what it has."""
    body = f"""
    import subprocess
    child = subprocess.Popen(["setsid", "sleep", "600"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
    {ready.python("f'{os.getpid()} {child.pid}'")}
    signal.sigwait({{signal.SIGTERM}})
    {ready.python("'saved'")}
    """
    with start(place, "--nproc-per-node", 3, "--orphan-grace", grace, script(place, body)) as launcher:
        pids = {int(pid) for line in ready.wait(3) for pid in line.split()}
        when_recorded(place, lambda run: states(run) == [dict.fromkeys(range(3), "running")])
        launcher.send(signal.SIGKILL)
        launcher.end()
        if grace:
            assert ready.wait(3) == ["saved"] * 3
        assert wait_gone(pids) == set()
    shown = place.program(sys.executable, "-m", "phalanx", "runs", "--log-dir", place.logs)
    assert " lost " in shown.out


# --- lines


@pytest.mark.long
def test_lines_of_an_attempt_come_before_those_of_the_next(place: Place) -> None:
    """Also what stands between them, and lines without an end."""
    body = """
    for number in range(500):
        print(attempt, number)
    print("end of", attempt, end="", flush=True)
    sys.exit(attempt < 2)
    """
    done = place.run(*WORKER, "--nproc-per-node", 2, "--max-restarts", 2, script(place, body), stderr=-2)
    for rank in range(2):
        lines = [line for line in done.out.splitlines() if line.startswith((f"[{rank}]", f"phalanx: rank {rank}: a"))]
        expected = []
        for attempt in range(3):
            expected += [f"[{rank}] {attempt} {number}" for number in range(500)] + [f"[{rank}] end of {attempt}"]
            expected += [f"phalanx: rank {rank}: attempt {attempt}"] * (attempt < 2)
        lines = [line.partition(" failed ")[0] for line in lines]
        assert lines[: len(expected)] == expected


@pytest.mark.long
def test_filters_are_those_of_one_console(place: Place) -> None:
    body = """
    print("own", rank)
    print("same")
    """
    options = ("--nproc-per-node", 11, "--ranks", "0-9", "--exclude", "same", "--duplicate-stdout-filters", "same")
    done = place.run(*WORKER, *options, script(place, body))
    assert done.status == 0, done
    assert sorted(done.out.splitlines()) == [f" [{rank}] own {rank}" for rank in range(10)]
    (path,) = place.logs.glob("*/attempt_0/filtered_stdout.log")
    assert sorted(path.read_text().splitlines()) == sorted(f"{f'[{rank}]':>4} same" for rank in range(11))


@pytest.mark.long
@pytest.mark.parametrize("options", [("--fold",), ()], ids=["fold", "tracebacks"])
def test_equal_lines_of_all_workers_are_one(place: Place, options: tuple[str, ...]) -> None:
    """Of groups that end at different times, in each attempt anew."""
    fold_patiently(place)
    body = """
    if attempt < 2:
        raise ValueError("all alike")
    """
    done = place.run(*WORKER, "--nproc-per-node", 4, "--max-restarts", 1, *options, script(place, body))
    assert done.status == 1
    shown = done.err.partition("=====")[0].splitlines()
    assert [line for line in shown if line.endswith("] ValueError: all alike")] == ["[0-3] ValueError: all alike"] * 2
    assert sum(" follows (restart " in line for line in shown) == 4


@pytest.mark.long
def test_bars_of_workers_that_start_again_are_live_lines(place: Place, ready: Ready, gate: Gate) -> None:
    body = f"""
    sys.stdout.write(f"bar {{rank}} {{attempt}}")
    sys.stdout.flush()
    {ready.python()}
    {gate.python()}
    sys.exit(rank == 1 and not attempt)
    """
    path = script(place, body)
    place.env |= {"TERM": "xterm", "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
    gates = [Gate(place.folder / f"gate{rank}") for rank in range(3)]
    path = script(place, body.replace(repr(gate.address), f"{str(place.folder / 'gate')!r} + str(rank)"))
    try:
        with terminal() as (ours, theirs):
            options = ("--nproc-per-node", 3, "--max-restarts", 1)
            with start(place, *options, path, stdout=theirs, stderr=theirs) as launcher:
                os.close(theirs)
                screen = Emulator(400)
                ready.wait(3)
                bars = [f"[{rank}] bar {rank} 0" for rank in range(3)]
                feed_until(screen, ours, lambda: screen.text()[-3:] == bars)
                gates[1].open()
                ready.wait()
                bars[1] = "[1] bar 1 1"
                feed_until(screen, ours, lambda: screen.text()[-3:] == bars)
                above = screen.text()[-5:-3]
                assert above[0] == "[1] bar 1 0"
                assert above[1].startswith("phalanx: rank 1: attempt 0 failed after ")
                for each in gates:
                    each.open()
                screen.feed(read_until(ours, "what never comes"))
                assert launcher.process.wait(LIMIT) == 0
        assert sorted(line for line in screen.text() if line.startswith("[")) == sorted([*bars, "[1] bar 1 0"])
    finally:
        for each in gates:
            each.close()


@pytest.mark.long
def test_a_console_that_nobody_reads_delays_no_restart(place: Place, ready: Ready) -> None:
    """Rank 1 fills the pipe, and is started again three times; rank 0 is started again, too."""
    body = f"""
    if rank == 1:
        sys.stdout.write("x" * 99 + "\\n")
        for _ in range(3000):
            print("-" * 99)
    sys.stdout.flush()
    {ready.python("f'{rank} {attempt}'")}
    sys.exit(attempt < 3)
    """
    with start(place, "--nproc-per-node", 2, "--max-restarts", 3, "--drain", 30, script(place, body)) as launcher:
        told = ready.wait(8)
        assert sorted(told) == [f"{rank} {attempt}" for rank in range(2) for attempt in range(4)]
        done = launcher.end()
    assert done.status == 0, done
    assert done.out.count("-" * 99) == 12000


@pytest.mark.long
def test_the_wait_for_a_console_is_no_part_of_an_attempt(place: Place, ready: Ready) -> None:
    """The fifth attempt waits until lines of the first are shown, or given up; it has failed on start all the same."""
    body = f"""
    sys.stdout.write("-" * 99 + "\\n")
    for _ in range(3000):
        print("-" * 99)
    sys.stdout.flush()
    {ready.python()}
    sys.exit(1)
    """
    options = ("--max-restarts", 9, "--min-uptime", "2.5:5", "--drain", 3)
    with start(place, *options, script(place, body)) as launcher:
        ready.wait(5)
        done = launcher.end()
    assert done.status == 1, done
    assert "giving up: failing on start: 5 attempts ended within 2.5s" in done.err
    run = record(place)
    assert len(run["attempts"]) == 5, "and no more"
    assert run["attempts"][4]["started"] - run["attempts"][0]["started"] > 3, "it has waited"


# --- the other commands


@pytest.mark.long
def test_logs_of_all_attempts_in_order(place: Place) -> None:
    body = """
    print("begin", attempt)
    print("end of", attempt, end="", flush=True)
    sys.exit(rank == 1 and attempt < 2)
    """
    place.run(*WORKER, "--nproc-per-node", 3, "--max-restarts", 2, script(place, body))
    logs = (sys.executable, "-m", "phalanx", "logs", "--log-dir", place.logs)
    lines = place.program(*logs).out.splitlines()
    own = [f"[1] {what} {attempt}" for attempt in range(3) for what in ("begin", "end of")]
    assert [line for line in lines if line.startswith("[1]")] == own
    assert sorted(lines) == sorted([*own, *(f"[{rank}] {what} 0" for rank in (0, 2) for what in ("begin", "end of"))])
    assert place.program(*logs, "--attempt", 1).out.splitlines() == ["[1] begin 1", "[1] end of 1"]
    assert place.program(*logs, "--ranks", 1, "-n", 2).out.splitlines() == own[-2:]


@pytest.mark.long
def test_logs_follow_and_stacks_of_the_latest_attempts(place: Place, ready: Ready, gate: Gate) -> None:
    body = f"""
    def waiting():
        {gate.python()}
    print("begin", attempt, flush=True)
    {ready.python()}
    if attempt < 2 and rank == 1:
        sys.exit(3)
    waiting()
    print("end", attempt)
    """
    path = script(place, body)
    with start(place, "--nproc-per-node", 3, "--max-restarts", 2, path) as launcher:
        ready.wait(5)
        when_recorded(place, lambda run: states(run)[-1:] == [{1: "running"}])
        command = [sys.executable, "-m", "phalanx"]
        with Launcher(
            [*command, "logs", "--log-dir", str(place.logs), "-f"], cwd=place.folder, env=place.env
        ) as reader:
            read_until(reader.process.stdout.fileno(), "[1] begin 2\n", TIMEOUT)  # type: ignore[union-attr]  # it is a pipe
            shown = place.program(*command, "stack", "--log-dir", place.logs)
            gate.open(3)
            done = reader.end()
        launcher.end()
    assert "all 3 ranks" in shown.out, shown
    assert "waiting" in shown.out
    assert done.status == 0
    assert sorted(line for line in done.out.splitlines() if "end" in line) == ["[0] end 0", "[1] end 2", "[2] end 0"]
