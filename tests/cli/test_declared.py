"""The one declaration of each option, and what is made of it: the command line, defaults, torchrun's names."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import click
import pytest
from click.testing import CliRunner

from phalanx._group.arguments import GRACE, SETTLE
from phalanx.cli._declare import Declared, Flag, Maybe, Option, click_options, declarations
from phalanx.cli._run_config import RunConfig
from phalanx.cli.run import run
from phalanx.launcher import LaunchConfig
from tests.support.torch_names import torch_version

EVERY = {declared.name: declared for declared in declarations(RunConfig)}


def parsed(*argv: str) -> dict[str, Any]:
    return run.make_context("phalanx run", [*argv, "x.py"]).params


def config(*argv: str) -> RunConfig:
    values = parsed(*argv)
    return RunConfig("x.py", (), {}, **{name: values[name] for name in EVERY})


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


def test_a_value_is_typed_frozen_and_compared_by_what_it_says() -> None:
    one = config("--nproc-per-node", "2", "--grace", "5")
    nprocs: int = one.nproc_per_node
    grace: float = one.grace
    assert (nprocs, grace, one.script) == (2, 5.0, "x.py")
    assert RunConfig.grace.long == "--grace"
    assert one == config("--nproc-per-node", "2", "--shutdown-timeout", "5.0")
    assert one != config("--nproc-per-node", "2")
    assert "grace=5.0" in repr(one)
    with pytest.raises(AttributeError, match="RunConfig is frozen: 'grace' cannot be set"):
        one.grace = 3.0
    with pytest.raises(TypeError, match="RunConfig: expected nproc_per_node, "):
        RunConfig("x.py", (), {}, grace=3)


def test_a_class_of_options_makes_a_command() -> None:
    class Few(Declared):
        size = Option(int, "-s", section="Workers", sentence="How many.", default="3")
        place = Maybe(str, section="Workers", sentence="Where.")
        loud = Flag(section="Workers", sentence="Whether.")

    @click.command()
    @click_options(Few)
    def command(**values: Any) -> None:
        print(Few(**values))  # noqa: T201 - what the runner looks at

    runner = CliRunner()
    assert runner.invoke(command, []).output == "Few(size=3, place=None, loud=False)\n"
    assert runner.invoke(command, ["-s", "4", "--loud"], env={"PET_PLACE": "x"}).output == (
        "Few(size=4, place='x', loud=True)\n"
    )
    assert "Invalid value for '-s' / '--size'" in runner.invoke(command, ["-s", "x"]).output


def test_defaults_are_those_of_the_library() -> None:
    assert (RunConfig.grace.default_value(), RunConfig.settle.default_value()) == (GRACE, SETTLE)


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
    declared = {each.torchrun: each for each in EVERY.values() if each.torchrun}
    if torch_version() < (2, 14):
        del declared["--log-line-prefix-template"]
    assert declared.keys() == there.keys()
    for name, each in declared.items():
        letters = {text for text in there[name].option_strings if not text.startswith("--")}
        assert letters <= set(each.names), name
        assert name in each.longs
        assert isinstance(each, Flag) == (there[name].nargs == 0), name
        assert f"PET_{there[name].dest.upper()}" in each.variables, name
