"""`phalanx report` and `phalanx rerun`: what is in a run's folder of its end, and how it is started once more."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent import LocalElasticAgent, RunResult, WorkerGroup, WorkerSpec, WorkerState
from phalanx.launcher import LaunchConfig, elastic_launch
from phalanx.multiprocessing import DefaultLogsSpecs, start_processes
from phalanx.multiprocessing.errors import ChildFailedError
from tests.runs.test_runs import wait_for_record
from tests.support.command import Done, Place, refused
from tests.support.helpers import TIMEOUT, Gate, Ready, wait_gone

pytestmark = pytest.mark.slow

RULE = "=" * 72
FAILS = """
    import os
    if os.environ["RANK"] == "1":
        raise ValueError("loss is nan")
    """


def phalanx(place: Place, *argv: object) -> Done:
    """Call a command in the place."""
    return place.program(sys.executable, "-m", "phalanx", *argv)


def report(place: Place, *argv: object) -> str:
    """What `phalanx report` shows."""
    done = phalanx(place, "report", "--log-dir", place.logs, *argv)
    assert done[::2] == (0, ""), done
    return done.out


def folder(place: Place) -> Path:
    """The folder of the latest run."""
    return max(place.logs.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def wait_for_exit(place: Place) -> None:
    """Wait until the run's events tell of an exit."""
    path, until = folder(place) / "events.jsonl", time.monotonic() + TIMEOUT
    while '"worker.exited"' not in path.read_text():
        assert time.monotonic() < until
        os.sched_yield()


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "run.json").read_text())
    return found


# --- the report


def test_the_report_is_kept_as_it_was_printed_but_for_colours(place: Place) -> None:
    place.env["FORCE_COLOR"] = "1"
    done = place.run("--nproc-per-node", 2, "-r", 3, place.write(FAILS))
    assert "\x1b[" in done.err
    printed = re.sub(r"\x1b\[[0-9;]*m", "", done.err)
    printed, _, page = printed[printed.index(RULE) :].partition("phalanx: page: ")
    assert page == f"{folder(place)}/report.html\n"
    assert (folder(place) / "report.txt").read_text() == printed
    first, *fields = report(place)[: -len(printed)].splitlines()
    assert re.fullmatch(rf"{folder(place).name}: failed with exit code 1 after [\d.]+m?s", first)
    command = f"phalanx run --log-dir {place.logs} --nproc-per-node 2 -r 3 {place.folder}/script.py"
    assert fields[:2] == [f"  command   : {command}", f"  folder    : {place.folder}"]
    assert report(place).endswith(printed)
    assert record(folder(place))["argv"] == command.split()


def test_a_report_on_a_success_has_all_attempts_and_steps(place: Place) -> None:
    script = place.write("""
        import os, phalanx.timer
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        phalanx.timer.progress(100 + attempt)
        if attempt < 2: raise [ValueError("bad batch"), OSError("no shard")][attempt]
        """)
    assert place.run("--max-restarts", 2, script).status == 0
    shown = report(place)
    assert f"{script} SUCCEEDED\n" in shown
    assert "rank 0: succeeded\n" in shown
    earlier = shown.partition("Earlier Attempts:\n")[2].splitlines()
    assert [re.sub(r"^  attempt \d, \S+ after \S+: ", "", line) for line in earlier] == [
        "rank 0, ValueError: bad batch, step 100",
        "rank 0, OSError: no shard, step 101",
        RULE,
    ]
    assert [one["step"] for one in record(folder(place))["attempts"]] == [100, 101, 102]


def test_the_report_on_a_run_that_runs_and_that_is_stopped(place: Place, ready: Ready) -> None:
    script = place.write(f"""
        import os, time
        {ready.python()}
        if os.environ["RANK"] == "1":
            raise SystemExit(0)
        while True: time.sleep(0.1)
        """)
    with place.start("--nproc-per-node", 3, script) as launcher:
        ready.pids(3)
        wait_for_record(place)
        wait_for_exit(place)
        shown = report(place)
        launcher.send(signal.SIGINT)
        assert launcher.end().status == 130
    name = folder(place).name
    assert re.match(rf"{name}: running for [\d.]+m?s\n", shown)
    assert f"{script} RUNNING\n" in shown
    assert "ranks 0, 2: running\nrank 1: succeeded\n" in shown
    assert shown.endswith(f"phalanx stack {name} shows where its ranks are, phalanx logs -f {name} what they write\n")
    shown = report(place, name[:-2])
    assert re.match(rf"{name}: stopped with exit code 130 after [\d.]+m?s\n", shown)
    assert re.search(r"STOPPED\n-+\n  cause     : SIGINT\n", shown)
    assert "ranks 0, 2: stopped by us (SIGINT)\nrank 1: succeeded\n" in shown


def test_the_report_after_the_launcher_was_killed(place: Place, ready: Ready) -> None:
    """Of a rank that had failed by then, the evidence is there."""
    script = place.write(f"""
        import os, signal
        {ready.python()}
        if os.environ["RANK"] == "1":
            raise ValueError("no luck \\x1b[2J")
        signal.pause()
        """)
    with place.start("--nproc-per-node", 2, "--settle", 600, script) as launcher:
        pids = ready.pids(2)
        wait_for_record(place)
        wait_for_exit(place)
        launcher.process.kill()
        launcher.process.wait(TIMEOUT)
    wait_gone(pids)
    shown = report(place)
    assert shown.startswith(f"{folder(place).name}: lost\n")
    assert "\nthe end is not recorded: the launcher (pid " in shown
    assert "\nrank 0: the end was not seen\n" in shown
    assert "  rank      : 1 (local_rank: 1)\n" in shown
    assert "  error     : ValueError: no luck \n" in shown
    assert "\x1b" not in shown


def test_a_lost_runs_report_has_the_error_that_was_left(place: Place, ready: Ready) -> None:
    script = place.write(f"""
        import atexit, signal
        def leave():
            {ready.python()}
            signal.pause()
        atexit.register(leave)
        raise ValueError("no luck")
        """)
    with place.start(script) as launcher:
        pids = ready.pids(1)
        wait_for_record(place)
        launcher.process.kill()
        launcher.process.wait(TIMEOUT)
    wait_gone(pids)
    shown = report(place)
    assert f"{script} LOST\n" in shown
    assert re.search(
        r"  cause     : the end is not recorded: .*\n  detail    : rank 0 had left an error: .*no luck\n", shown
    )
    assert "\nrank 0: the end was not seen\n" in shown


def test_a_report_that_cannot_be_written_fails_no_run(place: Place) -> None:
    script = place.write("""
        import os
        os.mkdir(os.environ["TORCHELASTIC_ERROR_FILE"].partition("attempt_")[0] + "report.txt")
        print("here", file=__import__("sys").stderr)
        raise ValueError("loss is nan")
        """)
    done = place.run(script)
    assert done.status == 1
    assert done.err.count("cannot be written") == 1
    assert re.search(r"phalanx: report.txt cannot be written: .*Is a directory", done.err)
    assert record(folder(place))["state"] == "failed"
    assert report(place).endswith(done.err[done.err.index(RULE) :].partition("phalanx: page: ")[0])


def test_a_failure_without_evidence_has_its_records_time(place: Place) -> None:
    script = place.write("""
        import os
        os.mkdir(os.environ["TORCHELASTIC_ERROR_FILE"].partition("attempt_")[0] + "report.txt")
        os._exit(3)
        """)
    assert place.run(script).status == 3
    facts = record(folder(place))
    facts["attempts"][-1]["ranks"][0]["ended"] = 1e9
    (folder(place) / "run.json").write_text(json.dumps(facts))
    shown = report(place)
    assert f"  time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(1e9))}\n" in shown
    assert "  error     : exited with code 3" in shown


def test_a_report_of_others_does_not_act_on_a_terminal(place: Place) -> None:
    place.run(place.write(""))
    (folder(place) / "report.txt").write_bytes(b"a\x1b[2J\xff\n")
    assert report(place).endswith("a\\x1b[2J\\xff\n")


def test_a_run_that_was_never_started_and_one_that_is_not_there(place: Place) -> None:
    assert "there are no runs in" in phalanx(place, "report", "--log-dir", place.logs).err
    (place.logs / "old" / "attempt_0").mkdir(parents=True)
    done = phalanx(place, "report", "--log-dir", place.logs)
    assert done == (1, "", f"Error: {place.logs}/old/run.json: there is no such file\n")


def work(fails: bool) -> None:
    if fails and os.environ["RANK"] == "1":
        raise ValueError("bad")


@pytest.mark.parametrize("fails", [False, True])
def test_groups_and_agents_leave_a_report(place: Place, fails: bool) -> None:
    envs = {rank: {"RANK": str(rank)} for rank in range(2)}
    logs = DefaultLogsSpecs(str(place.logs))
    with start_processes("group", work, (fails,), envs, nprocs=2, record=True, logs_specs=logs) as group:
        group.wait(TIMEOUT)
    assert ("group FAILED\n" if fails else "group SUCCEEDED\n") in report(place)
    assert ("  error     : ValueError: bad\n" in report(place)) is fails
    done = phalanx(place, "rerun", "--log-dir", place.logs)
    assert (done.status, "has no job.toml: phalanx run has not started it" in done.err) == (1, True)

    config = LaunchConfig(1, 1, 2, max_restarts=1, logs_specs=DefaultLogsSpecs(str(place.logs / "launched")))
    error = None
    try:
        elastic_launch(config, work)(fails)
    except ChildFailedError as raised:
        error = raised
    shown = phalanx(place, "report", "--log-dir", place.logs / "launched").out
    if error is None:
        assert "work SUCCEEDED\n" in shown
    else:
        assert shown.endswith(f"{error.format_msg()}\n")
        assert re.search(r"Earlier Attempts:\n  attempt .*: rank 1, ValueError: bad\n", shown)


class _Odd(LocalElasticAgent):
    """An agent of somebody's, whose failures are no `ProcessFailure`."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        super()._monitor_workers(worker_group)
        return RunResult(WorkerState.FAILED, failures={0: "no luck"})  # type: ignore[dict-item]  # which is the point


def test_a_report_that_cannot_be_made_fails_no_agent(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    spec = WorkerSpec("r", 1, None, entrypoint=work, args=(False,), max_restarts=0)
    result = _Odd(spec, DefaultLogsSpecs(str(place.logs))).run()
    assert result.is_failed()
    for thread in threading.enumerate():  # one that writes our lines to stderr
        if thread is not threading.main_thread():
            thread.join(TIMEOUT)
    assert capfd.readouterr().err.count("phalanx: no report can be made of this run's end: ") == 1


# --- once more


def test_a_run_is_started_again_with_the_same_options(place: Place) -> None:
    script = place.write("""
        import os, sys
        print(sys.argv[1:], os.environ["WORLD_SIZE"], os.environ["ROLE_NAME"], os.environ.get("PHALANX_ROLE"))
        sys.exit(7)
        """)
    place.env["PHALANX_ROLE"] = "first"
    typed = ("--nproc-per-node", 2, "--fold", "--settle", 60, "script.py", "--lr", "0 1")
    done = place.run(*typed)
    first = folder(place)
    assert (first / "job.toml").read_text() == place.run("--print-config", *typed).out
    assert done.status == 7
    assert tomllib.loads((first / "job.toml").read_text())["args"] == ["--lr", "0 1"]
    place.env |= {"PHALANX_ROLE": "second", "PHALANX_RESTART": "worker", "PET_GREP": "nothing"}
    again = phalanx(place, "rerun", "--log-dir", place.logs)
    assert again.status == 7
    assert (done.out, again.out) == (
        "[0-1] ['--lr', '0 1'] 2 first first\n",
        "[0-1] ['--lr', '0 1'] 2 first second\n",
    )
    assert again.err.startswith(f"phalanx: {first.name} again: phalanx run --log-dir {place.logs} --nproc-per-node 2 ")
    assert script.endswith("script.py")
    names = {path.name for path in place.logs.iterdir()}
    assert len(names) == 2
    ran = record(place.logs / (names - {first.name}).pop())
    assert ran["argv"] == ["phalanx", "rerun", "--log-dir", str(place.logs)]
    assert ran["command"] == record(first)["command"]


def test_a_rerun_is_in_the_runs_own_folder_or_here(place: Place) -> None:
    place.run(place.write("import os; print(os.getcwd())"))
    name = folder(place).name
    other = place.folder / "other"
    other.mkdir()
    was, place.folder = place.folder, other
    done = phalanx(place, "rerun", "--log-dir", place.logs)
    assert done == (
        1, "", f"Error: {name} was started in {was}: go there, or give --here to start it in the current folder\n",
    )  # fmt: skip
    assert phalanx(place, "rerun", name, "--here", "--log-dir", place.logs).out == f"[0] {other}\n"


def test_secrets_are_left_out_and_wanted_again(place: Place) -> None:
    place.write("import os; print(os.environ['HF_TOKEN'], os.environ['TOKENIZERS_PARALLELISM'])")
    secrets = {"HF_TOKEN": "hidden-1", "db_password": "hidden-2", "AWS_SECRET_ACCESS_KEY": "hidden-3"}
    secrets |= {"SMTP_PASS": "hidden-4", "GITHUB_PAT": "hidden-5", "STORE_URL": "redis://ada:hidden-6@store:6379/0"}
    env = "".join(f'{name} = "{text}"\n' for name, text in secrets.items())
    place.write(f'script = "script.py"\n[env]\nTOKENIZERS_PARALLELISM = "false"\n{env}', "job.toml")
    assert place.run("-f", "job.toml").out == "[0] hidden-1 false\n"
    kept = (folder(place) / "job.toml").read_text()
    assert not any(b"hidden-" in path.read_bytes() for path in folder(place).iterdir() if path.is_file())
    assert all(f"\n# left out, a secret: {name}\n" in kept for name in secrets)
    place.env |= {"db_password": "", "SMTP_PASS": "", "GITHUB_PAT": "", "STORE_URL": ""}
    done = phalanx(place, "rerun", "--log-dir", place.logs)
    refused(done, "job.toml: there was a secret in HF_TOKEN and in AWS_SECRET_ACCESS_KEY, which is left out: set it")
    assert "again: " not in done.err
    place.env |= {"HF_TOKEN": "another", "AWS_SECRET_ACCESS_KEY": ""}
    assert phalanx(place, "rerun", "--log-dir", place.logs).out == "[0] another false\n"
    del place.env["HF_TOKEN"]  # each rerun needs it
    latest = folder(place) / "job.toml"
    refused(phalanx(place, "rerun", "--log-dir", place.logs), "there was a secret in HF_TOKEN, which is left out")
    refused(place.run("-f", latest, "--grace", 5), "there was a secret in HF_TOKEN, which is left out")
    latest.write_text(latest.read_text().replace("[env]\n", '[env]\nHF_TOKEN = "written"\n'))
    assert place.run("-f", latest).out == "[0] written false\n"


def test_what_cannot_be_started_again(place: Place, ready: Ready, gate: Gate) -> None:
    with place.start(place.write(f"{ready.python()}; {gate.python()}")) as launcher:
        ready.pids(1)
        wait_for_record(place)
        done = phalanx(place, "rerun", "--log-dir", place.logs)
        gate.open(1)
        assert launcher.end().status == 0
    assert (done.status, "still runs; a second one beside it: phalanx run -f " in done.err) == (1, True)
    (folder(place) / "job.toml").write_text("script = 'script.py'\nnproc-per-node = true\n")
    refused(phalanx(place, "rerun", "--log-dir", place.logs), "job.toml, line 2: nproc-per-node")
    assert place.run("--no-python", "sh", "-c", "exit 0", os.fsdecode(b"\xff")).status == 0
    assert not (folder(place) / "job.toml").exists()
    assert "with arguments that are not UTF-8" in phalanx(place, "rerun", "--log-dir", place.logs).err
