"""Tools that call torchrun's module, within ``phalanx torchrun-shim``; and torch's own parser and configuration."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.run import get_args_parser, run
from tests.support.command import Done, Place
from tests.support.torch_names import torch_version

pytestmark = pytest.mark.torch

BIN = Path(sys.executable).parent
ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
FABRIC = ("fabric", "run", "--accelerator", "cpu", "--devices", 2, "--strategy", "ddp")
SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:])
if os.environ["RANK"] == sys.argv[1]:
    raise ValueError("loss is nan")
"""


def shim(place: Place, *command: object) -> Done:
    place.env["PATH"] = f"{BIN}{os.pathsep}{place.env['PATH']}"
    place.env |= {"XDG_STATE_HOME": str(place.folder / "state"), "TMPDIR": str(place.folder)}
    return place.program(sys.executable, "-m", "phalanx", "torchrun-shim", "--", *command)


@pytest.mark.parametrize(
    "tool", [ACCELERATE, FABRIC, (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2), ("torchrun",)]
)
def test_a_tool_runs_phalanx(place: Place, tool: tuple[object, ...]) -> None:
    needs = {"accelerate": "accelerate", "fabric": "lightning_fabric"}.get(str(tool[0]), "torch")
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed in this environment")
    script = place.write(SCRIPT)
    n = 1 if tool == ("torchrun",) else 2
    done = shim(place, *tool, script, "none")
    assert done.status == 0, done
    for rank in range(n):
        assert f"[{rank}] rank {rank} of {n} ['none']\n" in done.out
    done = shim(place, *tool, script, n - 1)
    assert done.status == 1
    assert done.err.count("Root Cause (first observed failure)") == 1, "the report is printed once"
    assert "error     : ValueError: loss is nan" in done.err
    if tool in (ACCELERATE, FABRIC):  # they let the exception end them
        assert done.err.endswith(
            f"ChildFailedError: {script}: rank 1: ValueError: loss is nan (the report stands above)\n"
        )


def test_the_parser_is_as_torchs() -> None:
    from torch.distributed.run import get_args_parser as theirs

    def options(parser: Any) -> dict[str, tuple[object, ...]]:
        return {
            each.dest: (sorted(each.option_strings), each.default, each.nargs, each.required)
            for each in parser._actions
        }  # fmt: skip

    here, there = options(get_args_parser()), options(theirs())
    there.pop("print_completion", None)  # since 2.14: the command's
    newer = {"log_line_prefix_template": ""} if torch_version() < (2, 14) else {}
    assert {name: option for name, option in here.items() if name not in newer} == there
    for line in (
        "train.py",
        "--nnodes 1:4 --nproc_per_node gpu --rdzv-id 7 --max-restarts 3 -m train --lr 1",
        "--standalone -r 1:3 --tee 3 --monitor-interval 0.5 --duplicate-stdout-filters a,b train.py -- --x",
        "--node_rank 1 --master_port 29500 --no-python --run-path --virtual-local-rank ./a.out",
    ):
        read = [vars(parser().parse_args(line.split())) for parser in (get_args_parser, theirs)]
        read[1].pop("print_completion", None)
        assert read[0] == read[1] | newer


def test_what_torchs_parser_has_read_is_run(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.run import get_args_parser as theirs

    script = place.write(SCRIPT)
    run(theirs().parse_args(["--nproc-per-node=2", "--log-dir", str(place.logs), script, "none"]))
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{rank}] rank {rank} of 2 ['none']" for rank in (0, 1)]


def _rank(of: str) -> str:
    return f"{os.environ['RANK']} of {of}"


def test_torchs_own_configuration_is_launched(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    from phalanx.launcher import elastic_launch

    logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects={0: Std.ALL, 1: Std.OUT}, tee=Std.NONE)
    options = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "theirs", "max_restarts": 0}
    config = LaunchConfig(1, 1, 2, logs_specs=logs, **options)
    assert elastic_launch(config, _rank)("two") == {0: "0 of two", 1: "1 of two"}
    files = {str(path.relative_to(tmp_path)).split("/", 2)[2] for path in tmp_path.rglob("*.log")}
    assert files == {"attempt_0/0/stdout.log", "attempt_0/0/stderr.log", "attempt_0/1/stdout.log"}

    class Own(DefaultLogsSpecs):  # type: ignore[misc]  # torch is not looked into
        """It may name other files, in a form that is torch's."""

    config.logs_specs = Own(log_dir=str(tmp_path))
    with pytest.raises(TypeError, match=r"logs_specs: expected a LogsSpecs, or None, got DefaultLogsSpecs"):
        elastic_launch(config, _rank)("two")
