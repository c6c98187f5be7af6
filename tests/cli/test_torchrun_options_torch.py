"""One script under torchrun and under `phalanx run` with the same options observes the same."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import phalanx
from tests.support.command import Place

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = Path(__file__).parents[1] / "programs" / "observe.py"
BIN = Path(sys.executable).parent

OTHER = {
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_TIMER_FILE",
}  # fmt: skip
"""What is another each time, or is documented to be."""

ARGS = ["a${local_rank}", "$local_rank", "$$", "$$local_rank", "${HOME}", "$x", "$", "${", "${LOCAL_RANK}", "b c", ""]


def observed(place: Place, head: list[str], options: list[str], script: str, args: list[str]) -> dict[int, Any]:
    """What each rank has observed."""
    done = place.program(*head, "--nproc-per-node", 2, "--log-dir", "logs", "-r", 3, *options, script, *args)
    assert done.status == 0, done
    found = {}
    for rank in range(2):
        (path,) = (place.folder / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        one = found[rank] = json.loads(path.read_text())
        env = one["env"]
        for name in OTHER & env.keys():
            env[name] = "(another)"
        one["env"] = {name: value for name, value in env.items() if not name.startswith("PHALANX_")}
    shutil.rmtree(place.folder / "logs")
    return found


@pytest.mark.parametrize(
    "options",
    [
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=night", "--local-addr", "127.0.0.3"],
        ["--rdzv_backend", "static", "--rdzv_endpoint", "127.0.0.1:29871", "--rdzv_conf", "timeout=60,read_timeout=5"],
        ["--standalone", "--rdzv-endpoint=otherhost:4", "--nnodes=1:1", "--local-addr=127.0.0.1", "--node-rank=0"],
        ["--run-path", "--local-addr=127.0.0.1", "--signals-to-handle=SIGTERM,SIGUSR1", "--role", "trainer"],
        ["--run-path", "--no-python", "--local-addr=127.0.0.1", "--max-restarts=2", "--monitor-interval=0.1"],
        ["-m", "--local-addr=127.0.0.1", "--event-log-handler=null", "--shutdown-timeout=5"],
    ],
    ids=" ".join,
)
def test_a_script_observes_the_same(place: Place, options: list[str]) -> None:
    assert phalanx.__file__
    source = str(Path(phalanx.__file__).parents[1])
    place.env |= {"PYTHONPATH": source, "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    place.env.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    shutil.copy(PROGRAM, place.folder / "observe.py")
    (place.folder / "below").mkdir()
    script = "observe" if "-m" in options else os.path.join("below", "..", "observe.py")
    there = observed(place, [str(BIN / "torchrun")], options, script, ARGS)
    here = observed(place, [str(BIN / "phalanx"), "run"], options, script, ARGS)
    assert here == there
    assert here[1]["argv"][1:] == ["a1", "1", "$", "$local_rank", *ARGS[4:]]
    assert here[1]["__name__"] == "__main__"
    assert (here[1]["is main"], here[1]["pickles"]) == (True, True)
    assert here[1]["env"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert here[0]["env"]["TORCHELASTIC_TIMER_FILE"] == "(another)"


def test_arguments_of_a_binary(place: Place) -> None:
    for head in ([str(BIN / "torchrun")], [str(BIN / "phalanx"), "run"]):
        done = place.program(*head, "--log-dir", "logs", "-r", 1, "--no-python", "printf", "%s,", *ARGS)
        assert done.status == 0, done
        (path,) = (place.folder / "logs").glob("*/attempt_0/0/stdout.log")
        assert path.read_text() == "a0,0,$,$local_rank,${HOME},$x,$,${,${LOCAL_RANK},b c,,"
        shutil.rmtree(place.folder / "logs")


@pytest.mark.parametrize("typed", ["SCRIPT -- x", "SCRIPT -- -- x", "-- SCRIPT -- x", "SCRIPT a -- x", "-m train -- x"])
def test_the_separator_after_the_script(place: Place, typed: str) -> None:
    script = place.write("import sys; print(sys.argv[1:])", "train.py")
    argv = [str(script) if word == "SCRIPT" else word for word in typed.split()]
    found = []
    for head in ([str(BIN / "torchrun")], [str(BIN / "phalanx"), "run"]):
        done = place.program(*head, "--log-dir", "logs", "-r", 1, *argv)
        assert done.status == 0, done
        (path,) = (place.folder / "logs").glob("*/attempt_0/0/stdout.log")
        found.append(path.read_text())
        shutil.rmtree(place.folder / "logs")
    assert found[0] == found[1]


def test_the_name_of_a_script(place: Place) -> None:
    for name in ("of 0$.py", "of 1$.py"):
        place.write(f"print({name!r})", name)
    for head in ([str(BIN / "torchrun")], [str(BIN / "phalanx"), "run"]):
        done = place.program(*head, "--nproc-per-node", 2, "--log-dir", "logs", "-r", 1, "of ${local_rank}$$.py")
        assert done.status == 0, done
        found = {path.read_text() for path in (place.folder / "logs").glob("*/attempt_0/*/stdout.log")}
        assert found == {"of 0$.py\n", "of 1$.py\n"}
        shutil.rmtree(place.folder / "logs")
