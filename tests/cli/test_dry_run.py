"""`phalanx run --dry-run`: what it says of each rank is what a run gives it, and nothing is started or made."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import sys
from typing import Any

import pytest

from tests.support.command import Place, refused

pytestmark = pytest.mark.slow

SHOW = """
    import json, os
    with open("/proc/self/cmdline") as file:
        argv = file.read().split("\\0")[:-1]
    env = {name: value for name, value in os.environ.items() if name != "LC_CTYPE"}  # Python's own addition
    print(json.dumps([argv, env, sorted(os.sched_getaffinity(0)), os.nice(0)]))
    """


def told(place: Place, *argv: object) -> list[dict[str, Any]]:
    done = place.run("--dry-run", "--log-format", "json", *argv)
    assert (done.status, done.err) == (0, ""), done
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--no-python",),
        ("-m",),
        ("--notice", "USR1:60", "--master-port", "29511", "--master-addr", "host"),
        ("--virtual-local-rank", "--cpu-bind", "core", "--nice", "3", "--max-restarts", "2", "--role", "a b"),
    ],
    ids=" ".join,
)
def test_a_rank_gets_what_was_told(place: Place, options: tuple[str, ...]) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        place.env.pop(name, None)
    script = place.write(SHOW)
    program = [sys.executable, script] if "--no-python" in options else ["script" if "-m" in options else script]
    argv = ("--nproc-per-node", 2, "--run-id", "night/1", *options, *program, "a b", "")
    before = sorted(os.listdir(place.folder))
    ranks = told(place, *argv)
    assert sorted(os.listdir(place.folder)) == before
    done = place.run("--log-format", "json", "-t", "1", *argv)
    found = [json.loads(json.loads(line)["text"]) for line in done.out.splitlines()]
    assert len(found) == len(ranks) == 2, done
    for facts in ranks:
        (real,) = (each for each in found if each[1]["RANK"] == facts["environment"]["RANK"])
        command, env, cpus, nice = real
        assert (facts["argv"], facts["cpus"], facts["nice"]) == (command, cpus, nice - os.nice(0))
        differing = {name: value for name, value in env.items() if place.env.get(name) != value}
        assert facts["environment"].keys() == differing.keys()
        for name, value in facts["environment"].items():
            if value is None:  # known at the start alone
                assert name in ("MASTER_PORT", "PHALANX_GROUP", "PHALANX_TIMERS", "PHALANX_STOP_FLAG")
            elif name == "TORCHELASTIC_ERROR_FILE":
                assert fnmatch.fnmatch(differing[name], value)
                assert value.startswith(f"{place.logs}/night_1_*/")
            else:
                assert differing[name] == value, name


def test_a_fork_that_has_preloaded(place: Place) -> None:
    options = ("--preload", "json,decimal", place.write(""), "-x")
    (rank,) = told(place, *options)
    assert rank["argv"] == [sys.executable, "-u", options[2], "-x"]
    assert rank["preloaded"] == ["json", "decimal"]
    said = "(a fork of an interpreter that has imported json, decimal)"
    assert said in place.run("--dry-run", *options).out


def test_where_output_would_go(place: Place) -> None:
    """As the table of streams says: in files, on the console, in both or nowhere."""
    script = place.write("")
    ranks = told(place, "--nproc-per-node", 3, "-r", "0:1,2:3", "-t", "1:3", "--local-ranks-filter", "0,1,2",
                 "--local-ranks-filter", "0", "--run-id", "night", "-t", "0:1,1:1,2:1", script)  # fmt: skip
    for rank, facts in enumerate(ranks):
        assert facts["rank"] == rank
        path = facts["stdout"]["file"]
        assert path == f"{place.logs}/night_*/attempt_0/{rank}/stdout.log"
        assert facts["stdout"]["console"] is True
    assert ranks[0]["stderr"] == {"file": None, "console": True}
    assert ranks[2]["stderr"] == {"file": f"{place.logs}/night_*/attempt_0/2/stderr.log", "console": False}
    done = place.run("--dry-run", "--log-dir", "/dev/null", "-r", "1", script, logs=False)
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "stdout /dev/null" in lines
    assert "stderr the console" in lines


def test_limits_and_commands(place: Place) -> None:
    script, limits = place.write(""), ("--rlimit", "nofile=64:128,core=0")
    (rank,) = told(place, *limits, script)
    assert rank["limits"] == {"nofile": [64, 128], "core": [0, 0]}
    done = place.run("--dry-run", *limits, "--nice", 2, "--on-event", "failed,hung", "mail -s 'a b' ada", script)
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert {"limit nofile 64 : 128", "core 0", "nice +2"} <= set(lines)
    assert any(line.startswith("on failed, hung: ") for line in lines)


def test_what_a_person_reads(place: Place) -> None:
    """What all ranks have is told once; what a terminal would obey is shown; what has to be said is on stderr."""
    script = place.write("")
    place.write('[env]\nNAME = "a\\u001b[2J b"\n', "job.toml")
    del place.env["OMP_NUM_THREADS"]
    done = place.run("--dry-run", "--nproc-per-node", 2, "-f", "job.toml", script, "a b")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[:2] == ["2 workers would be started", "ranks 0-1:"]
    assert re.search(rf"script\.py'? {re.escape(script)} 'a b'$", lines[2])
    for line in (r"NAME='a\x1b[2J b'", "WORLD_SIZE=2", "MASTER_PORT: chosen at the start", "rank 0:", "RANK=1"):
        assert lines.count(line) == 1 or lines.count(f"environment {line}") == 1, line
    assert "phalanx: OMP_NUM_THREADS=" in done.err
    assert "logs in" not in done.err
    done = place.run("--dry-run", script)
    assert done.out.splitlines()[:2] == ["1 worker would be started", "rank 0:"]


@pytest.mark.long
def test_no_folder_is_made_and_one_that_cannot_be_is_refused(place: Place) -> None:
    script = place.write("")
    home, state = place.folder / "home", place.folder / "state"
    for variable, folder in (
        (str(state), state / "phalanx/runs"),
        ("relative", home / ".local/state/phalanx/runs"),  # to be ignored, says the standard
        ("", home / ".local/state/phalanx/runs"),
    ):
        place.env |= {"HOME": str(home), "XDG_STATE_HOME": variable}
        assert f"{folder}/" in place.run("--dry-run", script, logs=False).out
    assert sorted(os.listdir(place.folder)) == ["script.py"]
    below = f"{script}/logs"
    for options in (("--dry-run",), ()):
        done = place.run(*options, "--log-dir", below, script, logs=False)
        assert (done.status, "Traceback" in done.err) == (1, False)
        assert "Error: --log-dir: " in done.err
    refused(place.run("--dry-run", "--log-dir", script, script, logs=False), "--log-dir")


def test_variables_of_what_a_run_has_beside_its_workers(place: Place) -> None:
    script = place.write("")
    place.env |= {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_HEALTH_CHECK_PORT": "8099"}
    lines = [" ".join(line.split()) for line in place.run("--dry-run", script).out.splitlines()]
    assert "TORCHELASTIC_TIMER_FILE: chosen at the start" in lines
    assert "TORCHELASTIC_HEALTH_CHECK_PORT=''" in lines
    place.env["TORCHELASTIC_TIMER_FILE"] = str(place.folder / "timer")
    assert "TORCHELASTIC_TIMER_FILE: chosen" not in place.run("--dry-run", script).out
