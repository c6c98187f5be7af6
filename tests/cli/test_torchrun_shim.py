"""``phalanx torchrun-shim``: a command, and what it starts, with Phalanx in the place of torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.run import get_args_parser, run
from tests.support.command import Done, Launcher, Place

SHIM = (sys.executable, "-P", "-m", "phalanx", "torchrun-shim")  # -P: as the command, it imports nothing from here


def shim(place: Place, *command: object) -> Done:
    return place.program(*SHIM, *command)


@pytest.mark.slow
def test_the_torchrun_on_the_path_is_phalanx(place: Place) -> None:
    place.write("import os; print('rank', os.environ['RANK'], os.environ['WORLD_SIZE']); os.environ['WRONG']", "it.py")
    script = place.write(f"torchrun --nproc_per_node=2 --log-dir '{place.logs}' it.py 'a b'; echo $?", "launch.sh")
    done = shim(place, "--", "sh", script)
    assert done.status == 0, done
    assert "[1] rank 1 2\n" in done.out
    assert done.out.endswith("\n1\n")
    assert done.err.count("Root Cause") == 1
    assert "KeyError: 'WRONG'" in done.err
    assert "unknown" not in done.err, "a variable of ours"


def test_the_command_takes_the_place_of_the_process(place: Place) -> None:
    done = shim(place, "sh", "-c", 'echo $$ "$0" "$@"; exit 7', "--help", "-x")
    assert done.out.endswith(" --help -x\n")
    assert done.status == 7
    with Launcher([*SHIM, "--", "sh", "-c", "echo $$"], cwd=place.folder, env=place.env) as launcher:
        assert launcher.end().out == f"{launcher.process.pid}\n"


def test_what_cannot_be_started(place: Place) -> None:
    assert "Missing argument 'COMMAND'" in shim(place).err
    done = shim(place, "--", "no-such-tool")
    assert (done.status, done.err) == (127, "phalanx torchrun-shim: no-such-tool: No such file or directory\n")
    place.write("", "not-executable")
    done = shim(place, "./not-executable")
    assert (done.status, done.err) == (126, "phalanx torchrun-shim: ./not-executable: Permission denied\n")


def _torch(place: Place) -> None:
    """A torch that has nothing but its name."""
    for name in ("torch", "torch/distributed"):
        place.write("", f"{name}/__init__.py")
    place.write("print('the module of torch')", "torch/distributed/run.py")
    place.write("elastic_launch = 'of torch'", "torch/distributed/launcher.py")


LOOK = """\
import sys
import torch.distributed.run
from torch.distributed.launcher import elastic_launch
print(getattr(torch.distributed.run.main, "__module__", ""), elastic_launch)
"""


@pytest.mark.each_python
def test_the_modules_of_torch_are_those_of_phalanx(place: Place) -> None:
    _torch(place)
    place.env["PYTHONPATH"] = str(place.folder)
    place.write(LOOK, "look.py")
    done = shim(place, sys.executable, "look.py")
    assert done.out == "phalanx.cli.run <class 'phalanx.launcher.elastic_launch'>\n", done
    done = shim(place, sys.executable, "-m", "torch.distributed.run", "--log-dir", place.logs, "--no-python", "true")
    assert (done.status, done.out) == (0, ""), done


def test_the_users_own_sitecustomize_is_run(place: Place) -> None:
    _torch(place)
    place.write("print('mine', __name__); FLAG = 'of mine'", "sitecustomize.py")
    place.env["PYTHONPATH"] = str(place.folder)
    show = "import sitecustomize; print(sitecustomize.FLAG)"
    # Once in the Python of the command itself, which ends then.
    assert shim(place, sys.executable, "-c", show).out == "mine sitecustomize\n" * 2 + "of mine\n"
    # One within another, of another installation.
    (place.folder / "other").symlink_to(Path(phalanx.__file__).parent, target_is_directory=True)
    place.env["PYTHONPATH"] = f"{place.folder}/other/cli/_shim:{place.folder}"
    done = shim(place, sys.executable, "-c", show + "; import torch.distributed.run as it; print(it.main.__module__)")
    assert (done.out, done.err) == ("mine sitecustomize\n" * 2 + "of mine\nphalanx.cli.run\n", "")


def test_another_module_called_phalanx_is_no_phalanx(place: Place) -> None:
    _torch(place)
    place.write("", "phalanx/__init__.py")
    done = shim(place, sys.executable, "-c", "import torch.distributed.run")
    assert (done.out, done.err) == ("the module of torch\n", "")


@pytest.mark.slow
def test_what_lies_in_the_working_directory_is_not_imported(place: Place) -> None:
    place.write("raise SystemExit('of the user')", "click.py")
    script = place.write("print('runs')", "scripts/it.py")
    assert "[0] runs\n" in shim(place, "torchrun", "--log-dir", place.logs, script).out


def test_a_python_without_phalanx_is_left_alone(place: Place) -> None:
    _torch(place)
    place.env["PYTHONPATH"] = str(place.folder)
    done = shim(place, sys.executable, "-S", "-c", "import sitecustomize\n" + LOOK.replace(".main", ""))
    assert "the module of torch" in done.out, done
    assert done.out.endswith(" of torch\n")
    assert done.err == ""


def test_torch_distributed_launch_needs_use_env() -> None:
    args = get_args_parser().parse_args(["it.py"])
    args.use_env = False
    with pytest.raises(SystemExit, match=r"add --use-env, and let the script read LOCAL_RANK"):
        run(args)


@pytest.mark.slow
def test_what_a_tool_has_chosen_goes_before_variables(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = place.write("import os; print('of', os.environ['WORLD_SIZE'])")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    for typed, size in (((), 2), (("--nproc-per-node", "1"), 1)):
        run(get_args_parser().parse_args([*typed, "--log-dir", str(place.logs), script]))
        assert capfd.readouterr().out.count(f"of {size}\n") == size


@pytest.mark.slow
def test_a_namespace_is_run(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    script = place.write("import sys; print(sys.argv[1:]); print('loss 1'); print('5 or 1')")
    filters = ("--duplicate-stdout-filters", "loss,no")
    args = get_args_parser().parse_args(
        ["--nproc_per_node", "2", *filters, "-t", "1", "--log-dir", str(place.logs), script, "-x", "--"]
    )
    args.of_the_tool = object()  # accelerate's namespace has much of its own
    run(args)
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in sorted(lines) if "-x" in line] == ["[0] ['-x', '--']", "[1] ['-x', '--']"]
    (filtered,) = place.logs.glob("*/attempt_0/filtered_stdout.log")
    assert sorted(filtered.read_text().splitlines()) == ["[0] loss 1", "[1] loss 1"]
    args.duplicate_stdout_filters = (
        get_args_parser().parse_args([*filters[:1], "1,,5", "it.py"]).duplicate_stdout_filters
    )
    with pytest.raises(SystemExit, match=r"--duplicate-stdout-filters: .* got \['1,5'\]"):
        run(args)


def test_variables_are_defaults_of_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    args = get_args_parser().parse_args(["train.py"])
    assert (args.nproc_per_node, args.node_rank, args.no_python, args.module) == ("3", 1, True, False)
    assert os.environ["PET_NODE_RANK"] == "1"
