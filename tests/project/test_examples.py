"""The examples, run as a user runs them: whole programs, real data, real processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LIMIT = 90.0  # seconds; each takes a few, unless something hangs

# What a launcher above us (or a developer's shell) may have set, and the examples read.
RENDEZVOUS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@pytest.fixture(autouse=True)
def temporary_folder(
    no_leaks: None,  # noqa: ARG001 - it is to look at the folder of before
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let temporary files be the test's own: torch leaves a cache in TMPDIR, which is no leak of ours."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))


def start(*argv: object) -> subprocess.Popen[str]:
    """Start `python argv…` in the root of the repository, with its output in pipes."""
    env = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    return subprocess.Popen(
        [sys.executable, *map(str, argv)],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*programs: subprocess.Popen[str], limit: float = LIMIT) -> list[str]:
    """Return what each program wrote to its stdout, once all have ended well."""
    try:
        # These programs write little: none can fill its pipe while another is being read.
        outputs = [program.communicate(timeout=limit) for program in programs]
    finally:
        for program in programs:
            with program:  # closes the pipes and reaps
                program.kill()
    for program, (stdout, stderr) in zip(programs, outputs, strict=True):
        assert program.returncode == 0, f"{program.args!r} ended with {program.returncode}\n{stdout}\n{stderr}"
    return [stdout for stdout, _ in outputs]


def phalanx_run(log_dir: Path, nproc: int, script: Path) -> str:
    """Return the console output of `phalanx run`."""
    program = start("-m", "phalanx", "run", "--log-dir", log_dir, "--nproc-per-node", nproc, script)
    (output,) = finish(program)
    return output


def accuracy(output: str, ranks: int) -> float:
    """Return the accuracy that rank 0 printed."""
    (found,) = re.findall(rf"test accuracy (\d\.\d+) over 360 digits, {ranks} ranks", output)
    return float(found)


@pytest.mark.long
def test_digits_learns_on_four_ranks(tmp_path: Path) -> None:
    output = phalanx_run(tmp_path, 4, EXAMPLES / "digits.py")
    assert accuracy(output, ranks=4) > 0.93
    losses = dict(re.findall(r"\[(\d+)\].*epoch 1 loss (\d\.\d+)", output))
    assert sorted(losses) == ["0", "1", "2", "3"]
    assert len(set(losses.values())) > 1, "the ranks saw the same data"
    done = dict(re.findall(r"rank (\d) of 4 done, weights ([0-9a-f]{8})", output))
    assert sorted(done) == ["0", "1", "2", "3"]
    assert len(set(done.values())) == 1, "the ranks ended with different weights"


@pytest.mark.long
def test_digits_learns_the_same_alone() -> None:
    (output,) = finish(start(EXAMPLES / "digits.py"))
    assert accuracy(output, ranks=1) > 0.93


@pytest.mark.torch
def test_digits_ddp_learns_on_two_ranks(tmp_path: Path) -> None:
    output = phalanx_run(tmp_path, 2, EXAMPLES / "digits_ddp.py")
    assert accuracy(output, ranks=2) > 0.93
    assert set(re.findall(r"rank (\d) of 2 done", output)) == {"0", "1"}


@pytest.mark.torch
def test_digits_ddp_runs_under_torchrun(tmp_path: Path) -> None:
    options = ("--nproc-per-node", 2, "--log-dir", tmp_path, "--master-port", free_port())
    (output,) = finish(start("-m", "torch.distributed.run", *options, EXAMPLES / "digits_ddp.py"))
    assert accuracy(output, ranks=2) > 0.93


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "ranks, restarts, options",
    [
        pytest.param(4, 5, ("--preload", "torch,torch._dynamo,sklearn.datasets"), id="preload"),
        pytest.param(2, 2, (), id="cold"),
    ],
)
def test_digits_ddp_has_the_same_weights_after_kills(ranks: int, restarts: int, options: tuple[str, ...]) -> None:
    # By this seed, the first two kills come once the attempt has saved a checkpoint.
    words = ("--ranks", ranks, "--restarts", restarts, "--seed", 88, *options)
    (output,) = finish(start(EXAMPLES / "kill_ranks.py", *words), limit=300.0)
    assert f"the same weights after {restarts} restarts" in output
    assert len(re.findall(r"^attempt \d: SIG\w+ to rank \d", output, re.MULTILINE)) >= restarts
    assert len(re.findall(r"^attempt [01]: .* [1-9]\d* checkpoints on$", output, re.MULTILINE)) >= 2
    assert "that went on at steps" in output


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def slopes(ranks: int, init_method: str) -> list[list[tuple[str, ...]]]:
    """What the ranks of two launchers that meet so have printed: rank, number of ranks, slope, sum of the ranks."""
    script = EXAMPLES / "launch_slowfast_style.py"
    shards = ["--num-shards", 2, "--num-proc", ranks, "--init-method", init_method, "--backend", "gloo"]
    outputs = finish(*(start(script, "--shard-id", shard, *shards) for shard in (0, 1)))
    return [sorted(re.findall(r"rank (\d) of (\d): slope (\S+), sum of ranks (\d+)", text)) for text in outputs]


@pytest.mark.torch
def test_two_launchers_of_two_processes_form_one_group() -> None:
    assert slopes(2, f"tcp://127.0.0.1:{free_port()}") == [
        [("0", "4", "3.00", "6"), ("1", "4", "3.00", "6")],
        [("2", "4", "3.00", "6"), ("3", "4", "3.00", "6")],
    ]


@pytest.mark.torch
def test_two_launchers_meet_by_a_file(tmp_path: Path) -> None:
    found = slopes(1, f"file://{tmp_path / 'meeting'}")
    assert found == [[("0", "2", "3.00", "1")], [("1", "2", "3.00", "1")]]
