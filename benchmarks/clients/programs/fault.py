"""What goes wrong in a client, beside all of them: its first argument is the case, and its working directory its own.

Rank 1 fails in step 3. In the case ``restart`` it does so once. The moments of that, and of each rank's first step, are
in the file ``moments``: a word, and the seconds of CLOCK_MONOTONIC, which is one for all processes.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path

STEPS = 6
FAILS_IN = 3
MOMENTS = Path("moments")


def note(what: str) -> None:
    """Append what happens now to the file of moments."""
    with MOMENTS.open("a", encoding="utf-8") as file:
        file.write(f"{what} {time.monotonic()}\n")


@functools.cache
def begin() -> None:
    """Note the first step of this process, in whichever attempt."""
    note("step")


def strike(rank: int, step: int) -> None:
    """Fail as the case wants it, if this is the rank and the step."""
    begin()
    case = sys.argv[1]
    if (rank, step) != (1, FAILS_IN) or case == "run":
        return
    if case == "restart" and "fault" in MOMENTS.read_text(encoding="utf-8"):
        return
    if case == "wedge":
        threading.Thread(target=time.sleep, args=(3600,)).start()  # no daemon: the interpreter waits for it
    note("fault")
    if case == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("loss is nan in step 3")


def resumed(step: int) -> None:
    """Print where training goes on, if this is not its beginning."""
    if step:
        print(f"resumed at step {step}", flush=True)


def finished(rank: int) -> None:
    """Print that this rank has done all steps. To be called last.

    Threads of gloo outlive their process group for a moment, and torch 2.13 aborts when one of them drops the last
    tensor while the interpreter ends: that is no launcher's doing, so it is waited for here.
    """
    print(f"rank {rank} has finished", flush=True)
    time.sleep(0.5)
