"""What the pages list is what there is: variables of workers, variables that are read, names, completion, buffers."""

from __future__ import annotations

import ast
import fcntl
import importlib
import json
import multiprocessing
import os
import re
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from phalanx._runs.record import Attempt, Rank, Run
from phalanx._runs.record import Leftover as Left
from phalanx.cli import logs as cli_logs
from phalanx.cli import run as cli_run
from phalanx.cli._commands import cli
from phalanx.multiprocessing import Placement, start_processes
from phalanx.timer import TimerSpecs
from tests.support.command import Place
from tests.support.helpers import Gate, descendants, until
from tests.support.timer_workers import wait_asleep

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PAGES = "".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("environment.md", "install.md", "reference/index.md")
)
NAME = re.compile(r"`([A-Za-z_]\w*)`")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of these pages, without its head."""
    below = PAGES.partition(f"\n{heading}\n")[2]
    found = re.search(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    assert found, heading
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[0].splitlines()[2:]]


def in_environment(when: str = "") -> set[str]:
    """The variables that the page promises to a worker: of a group of Python code, that it has ``when``."""
    rows = table("## Variables of a worker")
    return {name for row in rows if not when or row[1] == when for name in NAME.findall(row[0])}


def environment() -> dict[str, str]:
    return dict(os.environ)


@pytest.mark.parametrize("options", [(), ("--no-python",), ("--preload", "json")], ids=" ".join)
def test_the_table_has_what_a_worker_finds(place: Place, options: tuple[str, ...]) -> None:
    del place.env["OMP_NUM_THREADS"]
    for name in ("CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NO_COLOR", "FORCE_COLOR", "PYTHON_COLORS"):
        place.env.pop(name, None)
    place.env.pop("TTY_INTERACTIVE", None)
    show = place.write("""
        import json, os
        print(json.dumps(dict(os.environ)))
        """)
    script = (sys.executable, show) if "--no-python" in options else (show,)
    asked = ("--virtual-local-rank", "--notice", "USR1:60", "-t", 3, "--color", "always")
    done = place.run("--nproc-per-node", 2, *asked, *options, *script)
    assert done.status == 0, done
    found = json.loads(place.log(1))
    # The C library's locale is Python's own addition, in the launcher and in the worker.
    assert {name for name, value in found.items() if place.env.get(name) != value} - {"LC_CTYPE"} == in_environment()


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_the_table_has_what_a_function_finds(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in in_environment():
        monkeypatch.delenv(name, raising=False)
    options: dict[str, dict[str, Any]] = {"": {}, "with `timers=`": {"timers": TimerSpecs()}}
    options["with `Placement(virtual_local_rank=True)`"] = {"placement": Placement(virtual_local_rank=True)}
    for when, more in options.items():
        with start_processes("look", environment, (), nprocs=2, start_method=method, **more) as group:
            found = group.wait().return_values[1]
        expected = in_environment("always") | (in_environment(when) if when else set())
        expected |= {"LOCAL_RANK"} if "placement" in more else set()
        assert found.keys() - os.environ.keys() - {"LC_CTYPE"} == expected


# --- variables that are read

UNNAMED = {
    "tty.py: name": {"LINES", "COLUMNS"},
    "devices.py: name": {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"},
    "config.py: name": {"NO_COLOR", "FORCE_COLOR", "PYTHON_COLORS"},
    "torchrun_shim.py: variable": set[str](),  # those of options, by torchrun's names
    "_declare.py: name": set[str](),  # those of options
    "detach.py: name": set[str](),  # that of its option, which its run has no use for any more
    "_job_file.py: name": set[str](),  # secrets that a run's job file leaves out: of the workers, and documented below
    "placement.py: name": {
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"),
        *("MUSA_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES"),
    },
    "api.py: name": {"GRPC_VERBOSITY", "GRPC_ENABLE_FORK_SUPPORT"},
    "api.py: _name": set[str](),  # the same
    "services.py: name": set[str](),  # those of the ports, one of which is an option's
    "_dry_run.py: name": set[str](),  # those of workers, to leave out what they have anyway
    "start_process.py: name": set[str](),  # all: a fork takes over the environment of its group
}
"""Where the source reads variables without naming them there, and which these are."""

OTHERWISE = {
    "TMPDIR", "TEMP", "TMP",  # by tempfile
    "_PHALANX_COMPLETE",  # by click
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RANK",  # in envs
    "PHALANX_SHIM_PYTHON",  # by a shell script
    "PHALANX_ETCD_PASSWORD", "PHALANX_JOB_SECRET",  # in a mapping that a function is given
}  # fmt: skip
"""Variables that the table has, and no look at the environment in the source."""


def environ_keys(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions by which a module reads the environment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func) == "os.getenv":
                yield node.args[0]
            if ast.unparse(node.func.value) == "os.environ" and node.func.attr in ("get", "pop", "setdefault"):
                yield node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "os.environb", "environb"):
            yield node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            yield node.left


def constants(path: Path) -> dict[str, str]:
    """The names of a module that are given a text once and for all."""
    return {
        node.targets[0].id: node.value.value
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


@pytest.mark.long
def test_the_table_has_what_phalanx_reads() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    modules = {path.stem: constants(path) for path in paths}
    everywhere = {name: text for names in modules.values() for name, text in names.items() if name.endswith("_ENV")}
    found, unnamed = set(), set()
    for path in paths:
        for key in environ_keys(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(key)
            module, _, name = text.rpartition(".")
            known = (modules[module] if module else everywhere | constants(path)).get(name)
            if isinstance(key, ast.Constant):
                found.add(str(key.value))
            elif known is not None:
                found.add(known)
            else:
                unnamed.add(f"{path.name}: {text}")
    assert unnamed == UNNAMED.keys()
    found |= set().union(*UNNAMED.values()) | OTHERWISE
    of_options = {name for param in cli_run.run.params for name in param.envvar or ()}
    found |= {name for name in of_options if not name.startswith(("PHALANX_", "PET_"))}
    listed = {name for row in table("## Variables that Phalanx reads") for name in NAME.findall(row[0])}
    assert listed == found


def set_by_environment(command: click.Command) -> set[str]:
    """The options of a command that a variable can set."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return {param.opts[0] for param in command.params if param.envvar}.union(*map(set_by_environment, below))


def test_the_page_names_variables_of_other_commands() -> None:
    text = " ".join(PAGES.partition("## Variables that Phalanx reads")[2].partition("|")[0].split())
    assert "`phalanx logs` reads them for `--log-dir` and for all options that it shares with `run`" in text
    names = ("run", "logs", *OF_A_RUN, "serve", "torchrun-shim")
    commands = {name: cli.get_command(click.Context(cli), name) for name in names}
    assert set(names) == set(cli.list_commands(click.Context(cli)))
    found = {name: set_by_environment(command) for name, command in commands.items() if command is not None}
    assert found["logs"] == {param.opts[0] for param in cli_logs.logs.params} & found["run"]
    assert {"--grep", "--color"} <= found["logs"]
    assert "the commands for a run (`phalanx runs`, `status`, `stop` and so on) read them for `--log-dir` alone" in text
    assert "and `phalanx serve` for its folder" in text
    assert found["serve"] == {"folder"}
    assert [found[name] for name in OF_A_RUN] == [{"--log-dir"}] * len(OF_A_RUN)


OF_A_RUN = (
    "runs", "status", "top", "report", "rerun", "stack", "debug", "attach", "stop", "restart", "signal", "pause",
    "resume",
)  # fmt: skip


# --- records


def test_the_table_has_the_fields_of_a_record() -> None:
    page = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
    section = page.partition("### run.json")[2].partition("\n### ")[0]
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in section.splitlines()) if len(cells) > 2}
    own = {name for cell in rows if not cell.startswith("…") for name in NAME.findall(cell)}
    kinds: dict[str, Any] = {"`attempts`": Attempt, "… `ranks`": Rank, "… `leftovers`": Left}
    assert own == set(Run.__match_args__)
    for row, kind in kinds.items():
        assert set(kind.__match_args__) <= set(NAME.findall(rows[row][2])), row


# --- names


def exported(module: str) -> set[str]:
    return {name for name in importlib.import_module(module).__all__ if not name.startswith("__")}


def test_the_table_has_the_public_names() -> None:
    listed = {row[0].strip("`"): set(NAME.findall(row[1])) for row in table("## Where names are imported from")}
    standard = set(multiprocessing.__all__)
    listed["phalanx.spawn"].remove("multiprocessing")
    for module, names in listed.items():
        assert exported(module) - (standard if module == "phalanx.spawn" else set()) == names, module
        for name in names:
            assert getattr(importlib.import_module(module), name) is not None
    assert all(hasattr(importlib.import_module("phalanx.spawn"), name) for name in standard)


def test_every_public_module_is_in_the_table() -> None:
    listed = {row[0].strip("`") for row in table("## Where names are imported from")}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not any(part.startswith("_") for part in module.split(".")) and "cli" not in parts:
            assert module in listed


# --- the shell, and buffers


@pytest.mark.long
def test_bash_completes(place: Place) -> None:
    command = place.folder / "phalanx"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m phalanx "$@"\n')
    command.chmod(0o755)
    place.env["PATH"] = f"{place.folder}:{place.env['PATH']}"
    place.env["XDG_STATE_HOME"] = str(place.folder)
    (line,) = (row[2].strip("`") for row in table("## Shell completion") if row[0].startswith("bash"))
    ask = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _phalanx_completion phalanx; echo "${COMPREPLY[@]}"'
    done = place.program("bash", "-c", f"{line}; COMP_WORDS=(phalanx run --np); {ask}")
    assert done.out == "--nproc-per-node\n", done
    for shell in ("zsh", "fish"):  # which may not be here: what they are told is at least made
        assert "_phalanx_completion" in place.program("phalanx", "run", "--print-completion", shell).out


@pytest.mark.parametrize("by_line", [True, False])
def test_programs_keep_lines_that_go_to_a_file(place: Place, gate: Gate, by_line: bool) -> None:
    tool = "stdbuf -oL tr" if by_line else "tr"
    wait = f'"{sys.executable}" -c "{gate.python()}"'
    script = place.write(f"(echo one; echo said >&2; {wait}; echo two) | {tool} a-z A-Z\n", "steps.sh")
    with place.start("--no-python", "sh", script) as launcher:
        launcher.read_until("[0] said\n")
        if by_line:
            assert launcher.read_until("ONE\n", "stdout") == "[0] ONE\n"
        else:
            until(lambda: bool(find("tr", launcher.process.pid)))
            (reader,) = find("tr", launcher.process.pid)
            until(lambda: nothing_to_read(reader))
            wait_asleep(reader)  # it has dealt with that, and waits for more
            assert place.log(0) == ""
        gate.open()
        assert launcher.end().status == 0
    assert place.log(0) == "ONE\nTWO\n"


def called(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def find(name: str, ancestor: int) -> list[int]:
    return [pid for pid in descendants(ancestor) if called(pid) == name]


def nothing_to_read(pid: int) -> bool:
    """Whether a process has taken all that is in the pipe that is its stdin."""
    with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as pipe:
        return bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))) == bytes(4)
