"""Runs one client, in one case, under one launcher, and reads from what that printed what it says has happened."""

from __future__ import annotations

import re
import subprocess
import tempfile
import uuid
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from benchmarks import procfs
from benchmarks.runner import environment

PROGRAMS = Path(__file__).parent / "programs"

CASES = {
    "run": "run",
    "exception": "exception",
    "kill": "SIGKILL",
    "wedge": "exception, and no exit",
    "restart": "restart",
}
"""What `fault.py` knows them by, and the table."""

TIMED = ("exception", "restart")
"""Those that are in the table of times, of a program that is ``timed``."""

STARTED = ("run", "exception", "kill", "wedge")
"""Those of a program that starts its workers itself, and does so once."""

LIMIT = 45.0
"""Seconds after which a run counts as hung, if no others are given; more than any of these options gives a worker."""

OPTIONS = ("--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "5")
"""Of both launchers; the last is 30 s without."""


class Launcher(NamedTuple):
    """What the workers are started by: a command, and what goes into its environment.

    ``spawn`` is the module whose `spawn` takes its place in a program that starts its workers itself, if any does.
    """

    name: str
    module: tuple[str, ...]
    variables: dict[str, str]
    spawn: str = ""

    def command(self, client: Client, case: str) -> list[str]:
        """Return the command line, from the module on."""
        path = str(PROGRAMS / f"{client.name}.py")
        if client.spawns:
            return [path, case, self.spawn]
        restarts = ("--max-restarts", "1") if case == "restart" else ()
        return ["-m", *self.module, *OPTIONS, *restarts, path, case]


TORCHRUN = Launcher("torchrun", ("torch.distributed.run",), {}, "torch.multiprocessing")
OWN_STORE = Launcher("torchrun, store of rank 0", TORCHRUN.module, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
PHALANX = Launcher("Phalanx", ("phalanx", "run"), {}, "phalanx.spawn")
LAUNCHERS = (TORCHRUN, OWN_STORE, PHALANX)


class Client(NamedTuple):
    """A program: what it imports that may not be there, whether it starts its workers itself, and its cases.

    ``timed``: whether it is in the table of times.
    """

    name: str
    needs: tuple[str, ...] = ("torch",)
    spawns: bool = False
    cases: tuple[str, ...] = tuple(CASES)
    timed: bool = False


CLIENTS = (
    Client("ddp_checkpoints", timed=True),
    Client("trainer", timed=True),
    Client("hydra_like"),
    Client("port_plus_one"),
    Client("jax_initialize", ("torch", "jax"), timed=True),
    Client("spawn_tutorial", spawns=True, cases=STARTED, timed=True),
    Client("late_reader", cases=("run",)),
)


class Came(NamedTuple):
    """What a run came to: exit code (``None``: it hung), what was named, and what was counted.

    ``seconds`` are from the fault to the end of the command; ``started`` are those from its start until all ranks were
    in their first step, and ``again`` those from the fault until they were in the first of the next attempt.
    """

    code: int | None
    rank: str = ""
    named: str = ""
    seconds: float | None = None
    finished: int = 0
    resumed: str = ""
    left: int = 0
    started: float | None = None
    again: float | None = None

    @property
    def went_on(self) -> bool:
        """Whether it has come to its end, for all that happened."""
        return self.code == 0 and self.finished == 2

    def __str__(self) -> str:
        """As a cell of the table.

        >>> str(Came(None)), str(Came(0, finished=2, resumed="2"))
        ('**hung**', 'finished, resumed at step 2')
        >>> str(Came(137, "1", "SIGKILL", 0.31, left=2)), str(Came(1))
        ('code 137, rank 1, SIGKILL, 0.3 s, **2 left behind**', 'code 1, no rank')
        """
        if self.code is None:
            return "**hung**"
        if self.went_on:
            words = ["finished"]
            if self.resumed:
                words.append(f"resumed at step {self.resumed}")
        else:
            words = [f"code {self.code}", f"rank {self.rank}" if self.rank else "no rank"]
            if self.named:
                words.append(self.named)
            if self.seconds is not None:
                words.append(f"{self.seconds:.1f} s")
        if self.left:
            words.append(f"**{self.left} left behind**")
        return ", ".join(words)


def named(text: str) -> tuple[str, str]:
    """Return the rank that a launcher has named as the cause, and the exception, signal or exit code of it.

    In a report, that is the root cause; of `spawn`, it is the exception that the program did not catch.

    >>> named('''Root Cause (first observed failure):
    ... [0]:
    ...   rank      : 1 (local_rank: 1)
    ...   exitcode  : -6 (pid: 4243)  (SIGABRT)
    ...   traceback : Traceback (most recent call last):
    ...     File "train.py", line 1, in main
    ...   torch.distributed.DistNetworkError: connection reset
    ... ============================================================
    ... ''')
    ('1', 'DistNetworkError')
    >>> named("...ProcessExitedException: process 1 terminated with signal SIGKILL")
    ('1', 'SIGKILL')
    >>> named("Segmentation fault")
    ('', '')
    """
    if block := re.search(r"^Root Cause .*?:\n(.*?)^(?:---|===)", text, re.MULTILINE | re.DOTALL):
        rank = re.search(r"^ *rank +: (\d+)", block[1], re.MULTILINE)
        code = re.search(r"^ *exitcode +: (-?\d+).*?(?:\((SIG\w+)\))? *$", block[1], re.MULTILINE)
        raised = _exceptions(block[1])
        ended = (code[2] or f"exit code {code[1]}") if code else ""
        return (rank[1] if rank else ""), raised[-1] if raised else ended
    spawned = re.search(r"^-- Process (\d+) terminated with the following error:\n(.*)", text, re.MULTILINE | re.DOTALL)
    if spawned:
        return spawned[1], next(iter(_exceptions(spawned[2])), "")
    if gone := re.search(r"process (\d+) terminated with (?:signal (\w+)|(exit code \d+))", text):
        return gone[1], gone[2] or gone[3]
    return "", ""


def _exceptions(text: str) -> list[str]:
    """Return the classes of the exceptions at the end of tracebacks, or behind the label `error`."""
    return re.findall(r"^ *(?:error +: )?(?:\w+\.)*(\w+(?:Error|Exception|Exit|Interrupt))(?::|$)", text, re.MULTILINE)


def run(
    client: Client, case: str, launcher: Launcher, python: str, limit: float = LIMIT, consoles: Path | None = None
) -> Came:
    """Run a client once. Its working directory and its temporary files are in a folder that is removed.

    What was printed is kept in the folder ``consoles``, if there is one.
    What is left of it a second after its end is counted and killed; all of it is, if it has not ended by the limit.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as folder:
        env = environment(mark, folder) | launcher.variables | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": folder}
        console = Path(consoles or folder, re.sub(r"\W+", "-", f"{client.name} {case} {launcher.name}") + ".txt")
        command = [python, *launcher.command(client, case)]
        code, began = None, monotonic()
        try:
            with console.open("wb") as file:
                code = subprocess.run(
                    command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=limit,
                    check=False,
                ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            pass
        finally:
            ended = monotonic()
            left = procfs.sweep(mark)
        text = console.read_text(encoding="utf-8", errors="replace")
        noted = Path(folder, "moments")
        started, fault, again = moments(noted.read_text(encoding="utf-8") if noted.exists() else "")
    hung = Came(None, started=started - began if started else None, again=again - fault if again and fault else None)
    if code is None:
        return hung
    rank, what = named(text)
    resumed = re.search(r"resumed at step (\d+)", text)
    return hung._replace(
        code=code, rank=rank, named=what, seconds=ended - fault if fault else None, left=left,
        finished=text.count("has finished"), resumed=resumed[1] if resumed else "",
    )  # fmt: skip


def moments(text: str) -> tuple[float | None, float | None, float | None]:
    r"""Return when both ranks were in their first step, when the fault was, and when both were in the next first step.

    >>> moments("step 1.0\nstep 2.0\nfault 3.0\nstep 4.0\n"), moments("")
    ((2.0, 3.0, None), (None, None, None))
    """
    before, _, after = text.partition("fault ")
    first, again = (sorted(map(float, re.findall(r"step (\S+)", part))) for part in (before, after))
    return (
        first[1] if len(first) > 1 else None,
        float(after.split()[0]) if after else None,
        again[1] if len(again) > 1 else None,
    )
