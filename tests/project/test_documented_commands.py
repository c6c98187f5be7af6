"""Each command of the pages' `sh` blocks, and each `python` block, is run; what is not stands in a table, with why.

A command is typed in a folder where what it names is there: a script, a module, a program, earlier runs. A block of
Python is a script of a worker, below what it takes for granted; the launcher only reports what takes too long.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.project.test_docs import PAGES, ROOT, blocks, name_of, tool
from tests.support.command import Place

pytestmark = pytest.mark.long


NOT_RUN = {
    "make demo": "makes an environment; tests/project/test_examples.py runs examples/digits.py as it does",
    "make quick": "runs tests, as this one is",
    "make test": "is what runs this",
    "make bench": "takes minutes, and figures of a busy machine mean nothing",
    "make bench ARGS='functions --peers torch,loky --sizes 8,64 --rounds 5'":
        "as above; tests/project/test_benchmarks.py runs the cases briefly",
    "make bench-smoke": "tests/project/test_benchmarks.py runs it",
    "python -m benchmarks --peers none --json result.json": "as above",
    "python -m benchmarks compare before.json after.json": "tests/project/test_benchmarks.py runs it",
    "python -m benchmarks compare --trees A B launch --sizes 8 --rounds 12": "as above",
    "python -m benchmarks profile functions --size 64": "needs py-spy and strace, and takes a while",
    "python -m benchmarks page result.json": "writes into this project's own pages, from figures that took an hour",
    "phalanx torchrun-shim -- accelerate launch --multi_gpu --num_processes 8 train.py":
        "needs accelerate; tests/cli/test_torchrun_shim_torch.py runs it",
    "phalanx torchrun-shim -- ./launch.sh": "tests/cli/test_torchrun_shim.py runs such a script",
    "python -m benchmarks clients": "takes minutes, and torch; tests/project/test_clients.py runs a row",
    "python -m benchmarks clients trainer --case kill --consoles seen": "as above",
    "python -m benchmarks clients --page docs/compatibility.md": "as above",
    "python -m benchmarks clients --times": "as above",
    "python3 -m venv .venv && . .venv/bin/activate": "makes an environment; `make package` does so, and installs there",
    "python -m pip install .": "as above",
    "python -m pip install '.[etcd]'": "as above",
    "python -m pip install '.[re2]'": "as above",
    "python -m pip install '.[gpu]'": "as above",
    "python -m pip install '.[metrics]'": "as above",
    "python -m pip install '.[web]'": "as above",
    "phalanx debug": "needs a rank that stands; the transcript `debug` is of it",
    "phalanx run --nproc-per-node 2 --debugpy 5678 --debugpy-wait train.py":
        "waits for an editor; tests/cli/test_debugpy.py runs its like",
    "phalanx run --detach --nproc-per-node 8 train.py": "leaves a run behind; tests/cli/test_detach.py runs its like",
    "OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 phalanx run --event-log-handler spans train.py":
        "needs opentelemetry-sdk, and a collector",
    "phalanx report": "needs a run that has ended; the transcript `report` is of it",
    "phalanx report --html": "needs a run that has ended; tests/page/test_products.py runs its like",
    "phalanx report 20261120-1446 --html -o night.html": "as above",
    "phalanx report --html -o - | ssh me@desk 'cat > night.html'": "as above",
    "phalanx report --bundle -o night.tar.gz": "as above",
    "phalanx report --perfetto": "as above",
    "phalanx serve": "serves until somebody ends it; tests/page/test_serve.py runs it",
    "phalanx serve logs --port 9000": "as above",
    "phalanx serve --allow-control": "as above",
    "phalanx top": "needs a run that lasts; tests/cli/test_top.py runs it",
    "phalanx status": "needs a run that lasts; tests/cli/test_status.py runs it",
    "py-spy dump --pid 32397 --locals": "needs a process that lasts; tests/stacks runs py-spy",
    "py-spy record --pid 32397 --duration 30 --output rank0.svg": "as above",
    "phalanx stack": "needs a run that lasts; the transcript `stack` is of it",
    "phalanx run --nproc-per-node gpu train.py": "needs a GPU; tests/placement has devices",
    "phalanx run --nproc-per-node gpu --virtual-local-rank train.py": "as above",
    "phalanx run --nproc-per-node gpu --numa-binding node train.py": "as above",
    "phalanx run --nproc-per-node 8 --preload torch,numpy train.py":
        "needs torch; tests/engine/test_warm_scripts.py runs its like",
    "phalanx run --nproc-per-node 4 examples/digits.py": "tests/project/test_examples.py runs it",
    "phalanx run --nproc-per-node 2 examples/digits_ddp.py": "tests/project/test_examples.py runs it, where torch is",
    "python examples/kill_ranks.py --preload torch,sklearn.datasets":
        "takes a minute; tests/project/test_examples.py runs it with fewer restarts, where torch is",
    "python examples/kill_ranks.py --launcher torchrun": "takes minutes",
    "python examples/launch_slowfast_style.py --shard-id 0 --num-shards 2 --init-method tcp://127.0.0.1:29400 &":
        "tests/project/test_examples.py runs it on a free port, where torch is",
    "python examples/launch_slowfast_style.py --shard-id 1 --num-shards 2 --init-method tcp://127.0.0.1:29400":
        "as above",
    "phalanx run --nnodes 2 --rdzv-backend etcd --rdzv-endpoint store:2379 --run-id night7 --nproc-per-node 8 train.py":
        "needs an etcd; tests/machines runs its like on three hosts",
    "phalanx run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 --nproc-per-node 8 train.py":
        "needs two machines; tests/machines/test_hosted.py runs its like",
    "phalanx run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29400 --nproc-per-node 8 train.py": "as above",
    "srun --nodes 3 --ntasks-per-node 1 phalanx run --nproc-per-node 8 train.py":
        "needs a Slurm; tests/machines/test_slurm.py runs the batch script of the page in one",
    "srun bash -c 'phalanx run --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID --master-addr 10.0.0.7 "
    "--master-port 29500 train.py'":
        "as above",
    'kubectl create secret generic train --from-literal=job-secret="$(openssl rand -hex 32)"':
        "needs a Kubernetes",
    'mpirun --hostfile hosts --map-by ppr:1:node -x PHALANX_JOB_SECRET phalanx run --master-addr "$(head -n 1 hosts)" '
    "--nproc-per-node 8 train.py":
        "needs an Open MPI on several machines",
}  # fmt: skip
"""Commands that are not run here, and why."""

NO_SCRIPTS = {
    "# train.py": "fails: the transcript `session` is of it",
    "# same.py": "starts workers of its own: `test_the_programs_of_the_readme_run`",
    "# squares.py": "as above: `test_the_programs_of_the_readme_run`",
    "# steps.sh": "the transcript `buffers` is of it",
    "# fail.py": "fails: the transcript `tutorial-fail` is of it",
    "# resume.py": "the transcript `tutorial-restart` is of it",
    "run = phalanx.attach()": "needs a run that lasts: the transcript `stop` is of one",
    "# run_spans.py": "needs opentelemetry-sdk",
    "# hang.py": "hangs: the transcript `tutorial-hang` is of it",
}
"""Blocks that are files, by their first line, and where they are run, or what they need."""

GRANTED = """
import phalanx
import phalanx.spawn as mp
from phalanx import timer
from types import SimpleNamespace
batches, model, step, rank, first, last = [1, 2], None, 0, 0, 0, 2
torch = SimpleNamespace(tensor=float)
def nothing(*_): return []
read_batch = all_reduce = save = train = evaluate = train_one_epoch = upload = nothing
dist = SimpleNamespace(all_reduce=nothing, ReduceOp=SimpleNamespace(MAX=0))
"""
"""What the blocks of Python take for granted."""


def commands() -> dict[str, list[str]]:
    """The commands of each page's `sh` blocks, without their comments."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for _, source in blocks(page, "sh"):
            if source.split("\n")[0] not in NO_SCRIPTS:
                found.setdefault(name_of(page), []).extend(
                    command for line in source.splitlines() if (command := line.partition(" #")[0].strip())
                )
    return found


RUN = [(page, command) for page, each in commands().items() for command in each if command not in NOT_RUN]
PYTHON = [
    (f"{name_of(page)}:{line + 1}", source)
    for page in PAGES
    for line, source in blocks(page, "python")
    if source.split("\n")[0] not in NO_SCRIPTS
]


@pytest.fixture
def furnished(place: Place) -> Place:
    """A folder with what the commands name."""
    place.write("print('loss is nan, an error')", "train.py")
    place.write("", "package/train.py")
    place.write("true\n" * 8, "commands.txt")
    program = Path(place.write("#!/bin/sh\nexit 0\n", "a.out"))
    program.chmod(0o755)
    place.write(f'#!/bin/sh\nexec "{sys.executable}" -P -m phalanx "$@"\n', "bin/phalanx")
    place.write(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', "bin/python")
    for name in ("phalanx", "python"):
        (place.folder / "bin" / name).chmod(0o755)
    place.env |= {
        "PATH": f"{place.folder / 'bin'}:{place.env['PATH']}",
        "HOME": str(place.folder),
        "XDG_STATE_HOME": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(place.folder)]),
    }
    return place


@pytest.mark.parametrize("page,command", RUN, ids=[command for _, command in RUN])
def test_a_command_of_the_pages_works(furnished: Place, page: str, command: str) -> None:
    place = furnished
    if command.startswith("phalanx logs"):
        for options in ("--run-id 20261120-1446", "--log-dir logs --run-id night"):
            assert place.program("sh", "-c", f"phalanx run --nproc-per-node 4 {options} train.py").status == 0
        (night,) = (place.folder / "logs").glob("night_*")
        night.rename(place.folder / "logs" / "night_x1b2")
    where = ROOT if "benchmarks" in command else place.folder
    done = place.program("bash", "-c", f'cd "{where}" && {command}')
    assert done.status == 0, (page, done)


@pytest.mark.parametrize("name,source", PYTHON, ids=[name for name, _ in PYTHON])
def test_a_block_of_python_runs(place: Place, name: str, source: str) -> None:
    script = place.write(GRANTED + source)
    done = place.run("--nproc-per-node", 2, "--on-expiry", "report", script)
    assert done.status == 0, (name, done)


def test_the_programs_of_the_readme_run(place: Place) -> None:
    """Each is saved as the file that it says, and run; it prints what the page shows."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert not blocks(readme, "pycon")  # a reader would save it, and have no guard
    programs = [source for _, source in blocks(readme, "python") if not source.startswith("# train.py")]
    assert len(programs) > 1
    place.env["TMPDIR"] = str(place.folder)  # the evidence of a group that has failed stays
    for source in programs:
        name = source.split("\n")[0].removeprefix("# ")
        done = place.program(sys.executable, place.write(source, name))
        assert done.status == 0, done
        assert f"`python {name}` prints\n\n```\n{done.out}```" in text or f"here `{done.out.strip()}`:" in text, done


def test_the_tables_have_no_stale_entries() -> None:
    there = {command for each in commands().values() for command in each}
    assert set(NOT_RUN) <= there
    firsts = {source.split("\n")[0] for page in PAGES for kind in ("sh", "python") for _, source in blocks(page, kind)}
    assert set(NO_SCRIPTS) <= firsts
    where = {*tool("transcripts").scenarios(), test_the_programs_of_the_readme_run.__name__}
    for why in NO_SCRIPTS.values():
        assert why.startswith("needs opentelemetry") or why.split("`")[1] in where
    for why in NOT_RUN.values():
        assert all((ROOT / word).exists() for word in why.replace(",", "").split() if word.startswith("tests/"))
