"""What people type: paths, times, programs, variables, names of other tools. Each is heard, or named."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import stat
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import phalanx
from phalanx.cli._commands import cli
from phalanx.cli.run import run
from tests.support.command import Place, refused

PHALANX = (sys.executable, "-m", "phalanx")
ROOT = Path(__file__).parents[2]


def parsed(*argv: object) -> dict[str, Any]:
    return run.make_context("phalanx run", list(map(str, argv))).params


# --- paths of job files


@pytest.mark.slow
def test_a_home_folder_and_variables_in_the_paths_of_a_job_file(place: Place) -> None:
    place.env |= {"HOME": str(place.folder / "home"), "WHERE": str(place.folder / "a$b")}
    place.write("print('ok')", "a$b/train_0.py")
    place.write('script = "$WHERE/train_${local_rank}.py"\nlog-dir = "~/x/$$y"', "job.toml")
    done = place.run("-f", "job.toml", logs=False)
    assert (done.status, done.out) == (0, "[0] ok\n"), done
    assert len(list((place.folder / "home" / "x" / "$y").iterdir())) == 1
    assert not (place.folder / "~").exists()
    printed = place.run("-f", "job.toml", "--print-config", logs=False).out
    place.write(printed, "again.toml")
    again = place.run("-f", "again.toml", "--print-config", logs=False).out
    assert tomllib.loads(again) == tomllib.loads(printed)


def test_the_files_of_rdzv_conf_are_paths_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a$b")
    monkeypatch.setenv("USER_FILE", "/k")
    job = tmp_path / "job.toml"
    job.write_text('rdzv-conf = ["timeout=60", "ca = ~/ca.pem", "key=${USER_FILE}.pem", "user=$USER"]')
    assert parsed("-f", job, "x.py")["rdzv_conf"] == {
        "timeout": "60", "ca": "/home/a$b/ca.pem", "key": "/k.pem", "user": "$USER",
    }  # fmt: skip


# --- a folder that is not there any more


@pytest.mark.slow
def test_a_current_folder_that_has_been_removed(place: Place) -> None:
    script = place.write("print('ok')")

    def type_there(*argv: object) -> Any:
        command = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
        return place.program("sh", "-c", command, "sh", *PHALANX, *argv)

    logs = ("--log-dir", place.logs)
    for options in ((), ("--run-path",), ("--preload", "json")):
        done = type_there("run", *logs, *options, script)
        assert (done.status, done.out) == (0, "[0] ok\n"), done
    assert type_there("run", *logs, "--no-python", "true").status == 0
    for argv in (
        ("run", *logs, "script.py"),
        ("run", *logs, "-m", "json.tool"),
        ("run", *logs, "--no-python", "./x"),
        ("run", "--log-dir", "x", script),
        ("run", "-f", "job.toml"),
        ("runs", "--log-dir", "x"),
        ("logs", "--log-dir", "x"),
    ):
        refused(type_there(*argv), "the current folder has been removed")
    assert type_there("runs", *logs).out.count("succeeded") == 4
    assert type_there("logs", *logs, "-n", 1).status == 0
    assert "is running" in type_there("stack", *logs).err


# --- programs that are no Python


@pytest.mark.parametrize(
    "text,name,words",
    [
        ("\x7fELF\2\1\1", "program", "is a binary (ELF), and no Python: give --no-python"),
        ("#!/bin/sh\necho hi\n", "program", "is a program for '/bin/sh', and no Python: give --no-python"),
        ("#! /usr/bin/env -S perl -w", "program", "is a program for '/usr/bin/env -S perl -w', and no Python"),
        ("#!/bin/\x1b[2J\xff/sh\n./x", "program", r"is a program for '/bin/\x1b[2J"),
        ("#!/usr/bin/env python3\nprint('ok')", "program", ""),
        ("#!/usr/bin/env -S uv run --script\nprint('ok')", "program", ""),
        ("#!/bin/sh\n'''exec' /no/python \"$0\" \"$@\"\n' '''\nprint('ok')", "program", ""),  # as pip writes it
        ('#!/bin/sh\n# -*- mode: python -*-\n\n""":"\nexec python3 "$0"\n"""\nprint(\'ok\')', "program", ""),
        ("#!/usr/bin/env -S phalanx run --nproc-per-node 2\nprint('ok')", "program", ""),
        ("#!/bin/sh\nprint('ok')", "program.py", ""),
        ("#!/bin/sh\nexit 3\n", "zip file", ""),
    ],
)  # fmt: skip
def test_a_program_in_another_language_is_refused(place: Place, text: str, name: str, words: str) -> None:
    script = place.folder / name
    if name == "zip file":
        with zipfile.ZipFile(script, "w") as file:
            file.writestr("__main__.py", "print('ok')")
    script.write_bytes(text.encode() + (script.read_bytes() if name == "zip file" else b""))
    for options in ((), ("--run-path",)) if words else (("--dry-run",),):
        done = CliRunner().invoke(cli, ["run", *options, str(script)])
        assert (done.exit_code, words in done.output) == (2 if words else 0, True), done.output
    script.chmod(stat.S_IRWXU)
    if words:
        assert CliRunner().invoke(cli, ["run", "--no-python", "--dry-run", str(script)]).exit_code == 0
    elif "exec" in text or "zip" in name:
        assert place.run(script).out == "[0] ok\n"


# --- options after the script


@pytest.mark.slow
@pytest.mark.parametrize(
    "before,after,said",
    [
        ((), ("--nproc-per-node", "2"), "--nproc-per-node after SCRIPT: it goes to"),
        ((), ("--nproc_per_node=2", "--rdzv-id", "x"), "--nproc_per_node, --rdzv-id after SCRIPT: they go to"),
        (("--max-restarts", "1"), ("--max-restarts", "2"), ""),
        ((), ("--help", "--log-dir", "x", "--master-port", "1", "--nproc", "3", "--nnodesx", "--", "--nnodes"), ""),
    ],
)
def test_an_option_of_a_launcher_after_the_script_is_the_scripts(
    place: Place, before: tuple[str, ...], after: tuple[str, ...], said: str
) -> None:
    done = place.run(*before, place.write("import sys; print(sys.argv[1:])"), *after)
    assert done.out == f"[0] {list(after)}\n"
    assert ("after SCRIPT" in done.err) is bool(said)
    assert f"phalanx: {said}" in done.err


# --- times


@pytest.mark.parametrize(
    "text,seconds",
    [
        ("90", 90),
        ("0.5", 0.5),
        ("1e2", 100),
        ("250ms", 0.25),
        ("90s", 90),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("2w", 1209600),
    ],
)
def test_a_time_is_the_same_everywhere(tmp_path: Path, text: str, seconds: float) -> None:
    job = tmp_path / "job.toml"
    names = ["grace", "settle", "linger", "drain", "orphan_grace", "hang_timeout", "rejoin_delay",
             "exit_barrier_timeout", "monitor_interval"]  # fmt: skip
    job.write_text("\n".join(f'{name} = "{text}"' for name in names))
    options = [f"--{name.replace('_', '-')}={text}" for name in names]
    further = [f"--notice=USR1:{text}", f"--on-expiry=report,kill:{text}", f"--backoff={text}:{text}",
               f"--min-uptime={text}:5", f"--max-restarts=3/{text}", f"--rdzv-conf=timeout={text}"]  # fmt: skip
    typed, written = parsed(*options, *further, "x.py"), parsed("-f", job, "x.py")
    assert [typed[name] for name in names] == [written[name] for name in names] == [seconds] * len(names)
    assert typed["notice"] == (signal.SIGUSR1, seconds)
    assert typed["on_expiry"] == (("report", 0.0), ("kill", seconds))
    assert typed["backoff"] == (seconds, seconds)
    assert typed["min_uptime"] == (seconds, 5)
    assert typed["max_restarts"] == (3, seconds)


def test_times_of_a_rendezvous_have_units(place: Place) -> None:
    script = place.write("")
    conf = "join_timeout=10m,last_call_timeout=1m,lease_ttl=5s,away_timeout=1h"
    meet = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    assert place.run(*meet, "--rdzv-conf", conf, "--dry-run", script).status == 0


# --- what was typed


@pytest.mark.slow
def test_an_extra_that_is_not_there_is_named_by_what_installs_it(place: Place) -> None:
    """``pip install 'phalanx[etcd]'`` finds nothing before a release."""
    place.write("raise ImportError('no grpc')", "without/grpc.py")
    place.env["PYTHONPATH"] = f"{place.folder / 'without'}{os.pathsep}{place.env.get('PYTHONPATH', '')}"
    meet = ("--nnodes", 2, "--rdzv-backend", "etcd", "--rdzv-endpoint", "127.0.0.1:1", "--run-id", "x")
    done = place.run(*meet, place.write(""))
    assert (done.status, done.err) == (1, "Error: --rdzv-backend etcd: no grpc; pip install grpcio protobuf\n")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    assert not [page for page in pages if "phalanx[etcd]" in page.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--master-port", "--rdzv-endpoint", "agent_port"])
def test_a_port_that_is_taken_is_named_as_it_was_typed(place: Place, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        typed = {
            "--master-port": ("--master-addr", "127.0.0.1", "--master-port", port - 1),
            "--rdzv-endpoint": ("--rdzv-endpoint", f"127.0.0.1:{port - 1}"),
            "agent_port": ("--master-addr", "127.0.0.1", "--rdzv-conf", f"agent_port={port}"),
        }[option]
        done = place.run("--nnodes", 2, "--node-rank", 0, *typed, place.write(""))
    assert done.status == 1
    (error,) = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert error.startswith(
        f"Error: {f'--rdzv-conf {typed[-1]}' if option == 'agent_port' else f'{option} {typed[-1]}'}: "
    )
    assert f"127.0.0.1:{port}: Address already in use" in error
    assert "static" not in error


@pytest.mark.slow
def test_many_commands_are_runs_of_their_own(place: Place) -> None:
    """As the recipe has it."""
    recipe = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## Many commands\n")[2]
    found = re.search(r"```sh\n(xargs .*)\n", recipe)
    assert found is not None
    place.write("echo one\nexit 7\necho 'th  ree'\n", "commands.txt")
    line = found[1].replace("phalanx run", shlex.join([*map(str, PHALANX), "run", "--log-dir", str(place.logs)]), 1)
    done = place.program("sh", "-c", line)
    assert (done.status, sorted(done.out.splitlines())) == (123, ["[0] one", "[0] th  ree"]), done
    assert done.err.count("attempt 2 ") > 0, "each is tried again"
    assert len(list(place.logs.iterdir())) == 3


# --- help


def test_help_is_a_command_too() -> None:
    for names in ([], ["run"], ["runs"], ["runs", "prune"]):
        asked, shown = (CliRunner().invoke(cli, argv) for argv in (["help", *names], [*names, "--help"]))
        assert (asked.exit_code, asked.output.replace("cli", "")) == (0, shown.output.replace("cli", ""))
    for names, answer in (
        (["rnu"], "there is no command 'rnu'; did you mean 'run'?"),
        (["run", "x"], "phalanx run has no"),
    ):
        asked = CliRunner().invoke(cli, ["help", *names])
        assert asked.exit_code == 2
        assert answer in asked.output
    assert CliRunner().invoke(cli, ["-V"]).output == f"phalanx, version {phalanx.__version__}\n"


# --- variables


@pytest.mark.slow
def test_variables_that_set_nothing_are_named(place: Place) -> None:
    place.env |= {
        "PHALANX_NPROC": "4", "PET_NPROC": "4", "PHALANX_XYZ": "1", "PET_RANK": "1", "PHALANX_EMPTY": "",
        "PHALANX_SERVICE_HOST": "x", "PHALANX_HUB_PORT_80_TCP_ADDR": "x", "PHALANX_JOB_SECRET": "s" * 16,
        "PHALANX_MASTER_PORT": "tcp://10.0.0.1:80",  # as Kubernetes has it for a service phalanx-master
    }  # fmt: skip
    nested = f"import subprocess; subprocess.run({[*PHALANX, 'run', '--log-dir', str(place.logs)]} + [%r])"
    done = place.run(place.write(nested % place.write("print('ok')", "inner.py")))
    assert done.status == 0
    assert "[0] ok\n" in done.out
    (line,) = [line for line in done.err.splitlines() if "unknown" in line]
    assert line == (
        "phalanx: set in the environment, and unknown: PHALANX_NPROC (did you mean PHALANX_NPROC_PER_NODE?), "
        "PHALANX_XYZ"
    )


def test_every_variable_of_ours_is_known(place: Place) -> None:
    """All that the source names, and that tests and benchmarks read."""
    names = {"PHALANX_TEST_X"}
    for path in (ROOT / "src").rglob("*.py"):
        names |= set(re.findall(r"\"(PHALANX_[A-Z_]+[A-Z])\"", path.read_text(encoding="utf-8")))
    for folder in ("tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            read = r"environ(?:\.get\(|\.pop\(|\[)\"(PHALANX_[A-Z_]+)\""
            names |= set(re.findall(read, path.read_text(encoding="utf-8")))
    assert {"PHALANX_TRACEBACKS", "PHALANX_STEP", "PHALANX_CUTS", "PHALANX_ROUNDS"} <= names
    options = {name for param in run.params for name in param.envvar or ()}
    place.env |= dict.fromkeys(names - options - {"PHALANX_GROUP"}, "1")
    done = place.run("--dry-run", place.write(""))
    assert done.status == 0, done
    assert "unknown" not in done.err


# --- the cause


@pytest.mark.slow
def test_the_cause_of_a_program_is_the_last_line_of_its_stderr(place: Place) -> None:
    place.write(
        "printf ' 10%%\\r 20%%\\n\\033[31mmake: *** \\033]0;x\\007Error 2\\033[0m\\n \\n' >&2; exit 2\n", "fails.sh"
    )
    for options in ((), ("-r", 3)):
        done = place.run(*options, "--no-python", "sh", "fails.sh")
        cause = "exited with code 2; stderr ends with: make: *** Error 2"
        assert done.status == 2
        assert f"  error     : {cause}\n" in done.err
        assert f"rank 0: {cause}\n" in place.program(*PHALANX, "runs", "-n", 1, "--log-dir", place.logs).out
    place.write("printf 'x%0600d' 0 >&2; exit 2\n", "long.sh")
    long = place.run("--no-python", "sh", "long.sh").err
    assert re.search(r"  error     : exited with code 2; stderr ends with: x0{398}…\n", long)
    place.write("exit 2\n", "silent.sh")
    assert (
        "  error     : exited with code 2; no error was recorded\n" in place.run("--no-python", "sh", "silent.sh").err
    )
    shown = place.run("-t", 1, "--no-python", "sh", "fails.sh").err  # stderr is the launcher's own: nobody has it
    assert "  error     : exited with code 2; no error was recorded\n" in shown


# --- prefixes, devices


@pytest.mark.slow
@pytest.mark.parametrize(
    "given,seen",
    [
        ({"HIP_VISIBLE_DEVICES": "4,5"}, {"CUDA": ["4", "5"], "HIP": ["4", "5"], "ROCR": ["", ""], "ZE": ["", ""]}),
        (
            {"HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "1,0", "ROCR_VISIBLE_DEVICES": "2,3"},
            {"CUDA": ["1", "0"], "HIP": ["1", "0"], "ROCR": ["2,3", "2,3"], "ZE": ["", ""]},
        ),
        (
            {"ZE_AFFINITY_MASK": "0.1, 1.0"},
            {"CUDA": ["0", "1"], "HIP": ["", ""], "ROCR": ["", ""], "ZE": ["0.1", "1.0"]},
        ),
    ],
)
def test_each_rank_sees_one_device_of_any_maker(
    place: Place, given: dict[str, str], seen: dict[str, list[str]]
) -> None:
    names = {"CUDA": "CUDA_VISIBLE_DEVICES", "HIP": "HIP_VISIBLE_DEVICES", "ROCR": "ROCR_VISIBLE_DEVICES",
             "ZE": "ZE_AFFINITY_MASK"}  # fmt: skip
    for name in names.values():
        place.env.pop(name, None)
    place.env |= given
    script = place.write(f"import os; print(*(os.environ.get(name, '') for name in {[*names.values()]}), sep=';')")
    done = place.run("--virtual-local-rank", "--nproc-per-node", 2, "-r", 3, script)
    assert done.status == 0, done
    assert [place.log(rank).strip().split(";") for rank in (0, 1)] == [
        [*values] for values in zip(*seen.values(), strict=True)
    ]
    refused(place.run("--virtual-local-rank", "--nproc-per-node", 3, script), "rank 2 has no device: ")
