"""The one declaration of each option, and what is made of it: the command line, defaults, torchrun's names."""

from __future__ import annotations

import dataclasses
import importlib
import math
import signal
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner

from phalanx._group.arguments import GRACE, SETTLE
from phalanx._run.config import RunConfig
from phalanx.cli._declare import Declared, Flag, Maybe, Option, Pairs, as_job_file, click_options, declarations
from phalanx.cli._run_config import RunOptions
from phalanx.cli.run import run
from phalanx.cli.torchrun_shim import torchrun_name
from phalanx.launcher import LaunchConfig
from phalanx.multiprocessing import Std
from tests.support.torch_names import torch_version

EVERY = {declared.name: declared for declared in declarations(RunOptions)}


def parsed(*argv: str) -> dict[str, Any]:
    return run.make_context("phalanx run", [*argv, "x.py"]).params


def test_the_command_line_has_what_is_declared_and_what_asks() -> None:
    options = {param.name for param in run.params if isinstance(param, click.Option)}
    assert options == EVERY.keys() | {"job_file", "print_config", "dry_run", "print_completion"}


def test_defaults_are_those_that_are_declared() -> None:
    values = parsed()
    assert {name: declared.default_value() for name, declared in EVERY.items()} == {
        name: values[name] for name in EVERY
    }


def test_each_name_is_there_once() -> None:
    names = [name for declared in EVERY.values() for name in (declared.long, *declared.names)]
    assert len(set(names)) == len(names)
    variables = [name for declared in EVERY.values() for name in declared.variables]
    assert len(set(variables)) == len(variables)
    assert all(declared.sentence.endswith(".") for declared in EVERY.values())


def test_a_class_of_options_makes_a_command() -> None:
    class Few(Declared):
        size = Option(int, "-s", section="Workers", sentence="How many.", default="3")
        place = Maybe(str, section="Workers", sentence="Where.")
        loud = Flag(section="Workers", sentence="Whether.")

    @click.command()
    @click_options(Few)
    def command(**values: Any) -> None:
        print(dict(sorted(values.items())))  # noqa: T201 - what the runner looks at

    runner = CliRunner()
    assert runner.invoke(command, []).output == "{'loud': False, 'place': None, 'size': 3}\n"
    assert runner.invoke(command, ["-s", "4", "--loud"], env={"PET_PLACE": "x"}).output == (
        "{'loud': True, 'place': 'x', 'size': 4}\n"
    )
    assert "Invalid value for '-s' / '--size'" in runner.invoke(command, ["-s", "x"]).output


def test_defaults_are_those_of_the_library() -> None:
    assert (RunOptions.grace.default_value(), RunOptions.settle.default_value()) == (GRACE, SETTLE)


# --- each option, from each source


class Setting(NamedTuple):
    text: str
    other: str
    value: object
    as_other: object


SETTINGS = {
    "nproc_per_node": Setting("3", "2", 3, 2),
    "run_id": Setting("night", "day", "night", "day"),
    "role": Setting("a", "b", "a", "b"),
    "log_dir": Setting("/tmp/a", "/tmp/b", "/tmp/a", "/tmp/b"),
    "redirects": Setting("1", "0:3,12:1", Std.OUT, {0: Std.ALL, 12: Std.OUT}),
    "tee": Setting("0:3,12:1", "2", {0: Std.ALL, 12: Std.OUT}, Std.ERR),
    "local_ranks_filter": Setting("0,2", "1", [0, 2], [1]),
    "ranks": Setting("0,2-3", "1", [0, 2, 3], [1]),
    "preload": Setting("json,numpy", "json", ["json", "numpy"], ["json"]),
    "stdin": Setting("0", "none", 0, -1),
    "pty": Setting("0,2-3", "1", [0, 2, 3], [1]),
    "grep": Setting("loss is", "^a", ["loss is"], ["^a"]),
    "exclude": Setting("a b", "^a", ["a b"], ["^a"]),
    "after_context": Setting("2", "0", 2, 0),
    "before_context": Setting("2", "0", 2, 0),
    "context": Setting("2", "0", 2, 0),
    "log_format": Setting("json", "text", "json", "text"),
    "log_line_prefix_template": Setting("${rank} ", "${host} ", "${rank} ", "${host} "),
    "color": Setting("never", "always", "never", "always"),
    "drain": Setting("1.5", "0", 1.5, 0.0),
    "log_max_size": Setting("100MB", "1KiB", 100_000_000, 1024),
    "log_keep": Setting("3", "1", 3, 1),
    "log_mode": Setting("750", "2755", 0o750, 0o2755),
    "keep_attempts": Setting("7", "5", 7, 5),
    "keep_runs": Setting("3", "1", 3, 1),
    "on_report": Setting("never", "always", "never", "always"),
    "sample": Setting("2", "7", 2.0, 7.0),
    "duplicate_stdout_filters": Setting("loss,acc", "a", ["loss", "acc"], ["a"]),
    "duplicate_stderr_filters": Setting("warning", "a", ["warning"], ["a"]),
    "cpu_bind": Setting("core", "0-3;4-7", "core", "0-3;4-7"),
    "nice": Setting("-5", "19", -5, 19),
    "rlimit": Setting("nofile=64,as=8GiB", "core=0:1", {"nofile": "64", "as": "8GiB"}, {"core": ("0", "1")}),
    "grace": Setting("1.5", "0", 1.5, 0.0),
    "settle": Setting("1.5", "0", 1.5, 0.0),
    "linger": Setting("1.5", "0", 1.5, 0.0),
    "notice": Setting("USR1:60", "SIGUSR2:0.5", (10, 60.0), (12, 0.5)),
    "orphan_grace": Setting("1.5", "0", 1.5, 0.0),
    "hang_timeout": Setting("1.5", "600", 1.5, 600.0),
    "breakpoint_timeout": Setting("1.5", "10m", 1.5, 600.0),
    "on_expiry": Setting("report,kill:30", "dump", (("report", 0.0), ("kill", 30.0)), (("dump", 0.0),)),
    "nnodes": Setting("1:4", "2", (1, 4), (2, 2)),
    "node_rank": Setting("1", "0", 1, 0),
    "rejoin_delay": Setting("5", "0.5", 5.0, 0.5),
    "on_sigterm": Setting("leave", "stop", "leave", "stop"),
    "exclude_after": Setting("3", "1", 3, 1),
    "node_check": Setting("true", "nvidia-smi -L", "true", "nvidia-smi -L"),
    "on_event": Setting(
        "failed,hung mail -s 'a b' ada",
        "Started true",
        [(("failed", "hung"), "mail -s 'a b' ada")],
        [(("started",), "true")],
    ),
    "exit_barrier_timeout": Setting("60", "inf", 60.0, math.inf),
    "max_restarts": Setting("3", "5/1h", (3, None), (5, 3600.0)),
    "backoff": Setting("1", "0.5:1m", (1.0, None), (0.5, 60.0)),
    "backoff_jitter": Setting("0.5", "1", 0.5, 1.0),
    "min_uptime": Setting("30", "1m:5", (30.0, 3), (60.0, 5)),
    "max_no_progress": Setting("3", "1", 3, 1),
    "never_restart_on": Setting("2,SIGILL", "3", [2, -4], [3]),
    "always_restart_on": Setting("75", "kill", [75], [-9]),
    "signals_forward": Setting("USR1,WINCH", "none", [signal.SIGUSR1, signal.SIGWINCH], []),
    "monitor_interval": Setting("0.1", "5", 0.1, 5.0),
    "start_method": Setting("fork", "forkserver", "fork", "forkserver"),
    "master_addr": Setting("host", "other", "host", "other"),
    "master_port": Setting("29500", "1", 29500, 1),
    "local_addr": Setting("127.0.0.1", "localhost", "127.0.0.1", "localhost"),
    "rdzv_id": Setting("night", "7", "night", "7"),
    "rdzv_backend": Setting("c10d", "etcd-v2", "c10d", "etcd-v2"),
    "rdzv_endpoint": Setting("localhost:0", "[::1]:29500,b", [("localhost", 0)], [("::1", 29500), ("b", 0)]),
    "rdzv_conf": Setting("timeout=60,is_host=1", "a=b", {"timeout": "60", "is_host": "1"}, {"a": "b"}),
    "signals_to_handle": Setting("SIGTERM,usr1", "none", [signal.SIGTERM, signal.SIGUSR1], []),
    "debugpy": Setting("5678", "0", 5678, 0),
    "numa_binding": Setting("node", "core-complex", "node", "core-complex"),
    "logs_specs": Setting("mine", "yours", "mine", "yours"),
    "event_log_handler": Setting("console", "mine", "console", "mine"),
    "metrics_port": Setting("9100", "[::1]:9100", ("127.0.0.1", 9100), ("::1", 9100)),
}
FLAGS = [name for name, declared in EVERY.items() if isinstance(declared, Flag)]


def test_every_option_is_among_these() -> None:
    assert len(FLAGS) == 17
    assert {*SETTINGS, *FLAGS} == EVERY.keys()


def source_of(text: str, key: str) -> str:
    """Where --print-config says that a setting comes from."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{key} = "))
    return line.rpartition(" # ")[2]


def printed(*argv: str) -> str:
    """What --print-config prints."""
    ctx = run.make_context("phalanx run", [*argv, "x.py"])
    config = RunConfig(script="x.py", args=(), env={}, **{name: ctx.params[name] for name in EVERY})
    return as_job_file(ctx, RunOptions, config)


def words(name: str, text: str) -> list[str]:
    """A setting as it is typed: of two words, or one."""
    return text.split(" ", 1) if isinstance(EVERY[name], Pairs) else [text]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_command_line_precedes_the_file_then_variables(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, other, value, as_other = SETTINGS[name]
    dashes, job = "--" + name.replace("_", "-"), tmp_path / "job.toml"
    from_file = ("-f", str(job))
    for spelling in (dashes, f"--{name}"):
        first, *more = words(name, text)
        assert parsed(spelling, first, *more)[name] == parsed(f"{spelling}={first}", *more)[name] == value
    monkeypatch.setenv(f"PET_{name.upper()}", text)
    assert parsed()[name] == value
    assert source_of(printed(), dashes[2:]) == f"PET_{name.upper()}"
    monkeypatch.setenv(f"PHALANX_{name.upper()}", other)
    assert parsed()[name] == as_other
    for key in (name, dashes[2:]):
        job.write_text(f'{key} = "{text}"' if str in EVERY[name].written else f"{key} = {text}")
        assert parsed(*from_file)[name] == value
        assert parsed(dashes, *words(name, other), *from_file)[name] == as_other
    job.write_text("")
    assert parsed(*from_file)[name] == as_other
    for typed in (text, other):  # what is printed is read back to the same
        shown, values = printed(dashes, *words(name, typed)), parsed(dashes, *words(name, typed))
        assert source_of(shown, dashes[2:]) == "command line"
        job.write_text(shown)
        again = parsed(*from_file)
        assert [name for name in EVERY if again[name] != values[name]] == []
        line = next(n for n, row in enumerate(shown.splitlines(), 1) if row.startswith(f"{dashes[2:]} = "))
        assert source_of(printed(*from_file), dashes[2:]) == f"{job}, line {line}"


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("prefix", ["PET", "PHALANX"])
def test_a_flag_comes_from_each_source(name: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, job = name.replace("_", "-"), tmp_path / "job.toml"
    assert (parsed()[name], parsed("--" + name)[name]) == (False, True)
    assert source_of(printed(), key) == "default"
    for text, value in (("1", True), ("0", False)):
        monkeypatch.setenv(f"{prefix}_{name.upper()}", text)
        assert parsed()[name] is value
        shown = printed()
        assert source_of(shown, key) == f"{prefix}_{name.upper()}"
        for written in (f"{name} = {str(not value).lower()}", shown):
            job.write_text(written)
            assert parsed("-f", str(job))[name] is (value if written == shown else not value)
            assert parsed("-f", str(job), f"--{name}")[name] is True


# --- the launcher

OTHER: dict[str, Any] = {
    "run_id": "", "role": "default_role", "max_restarts": 3, "monitor_interval": 0.1, "rdzv_backend": "etcd",
}  # fmt: skip
"""Fields of LaunchConfig that are called as an option is, and have another default: that of torch's LaunchConfig."""


def fields() -> dict[str, Any]:
    """The fields of LaunchConfig that are called as an option is, and have a default."""
    made = LaunchConfig(1, 1, 1)
    called = {"shutdown_timeout": "grace", "logs_specs": "(an object)"}
    return {
        called.get(field.name, field.name): getattr(made, field.name)
        for field in dataclasses.fields(LaunchConfig)
        if called.get(field.name, field.name) in EVERY and field.name != "nproc_per_node"
    }


def test_fields_of_a_launch_config_have_the_defaults_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    found = fields()
    assert {"start_method", "virtual_local_rank", "grace", "log_line_prefix_template"} <= found.keys() - OTHER.keys()
    for name, default in found.items():
        declared = EVERY[name]
        if name in OTHER:
            assert default == OTHER[name] != declared.default_value(), name
        else:
            assert default in (declared.default_value(), declared.default), name


@pytest.mark.torch
def test_defaults_that_are_other_are_torchs() -> None:
    launcher = importlib.import_module("torch.distributed.launcher")
    there = {field.name: field.default for field in dataclasses.fields(launcher.LaunchConfig)}
    assert {name: there[name] for name in OTHER} == OTHER


# --- torchrun


@pytest.mark.torch
def test_each_option_of_torchrun_is_declared() -> None:
    parser = importlib.import_module("torch.distributed.run").get_args_parser()
    there = {}
    for action in parser._actions:
        long = next((name for name in action.option_strings if name.startswith("--")), "").replace("_", "-")
        there[long] = action
    del there[""], there["--help"]
    assert ("--print-completion" in there) == (torch_version() >= (2, 14))
    there.pop("--print-completion", None)  # not declared, for it is none of a job: see `phalanx run`
    declared = {torchrun_name(each.longs): each for each in EVERY.values() if torchrun_name(each.longs)}
    if torch_version() < (2, 14):
        del declared["--log-line-prefix-template"]
    assert declared.keys() == there.keys()
    for name, each in declared.items():
        letters = {text for text in there[name].option_strings if not text.startswith("--")}
        assert letters <= set(each.names), name
        assert name in each.longs
        assert isinstance(each, Flag) == (there[name].nargs == 0), name
        assert f"PET_{there[name].dest.upper()}" in each.variables, name
