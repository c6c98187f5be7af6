"""Pauses a run in every way that is no hang, for a while: nobody may be killed for it.

``python -m tests.support.pauses --minutes 20`` starts a run whose ranks take timers, beat, and step their wall clocks,
and at random: stops a rank (SIGSTOP) for less than its blocks may take, stops the launcher, and freezes them all
(cgroup.freeze) for less, or for much more, than a block may take. It prints what was done, and fails if a rank was
found to hang. Root is needed for the freezing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx._base import procfs

SPAN = 4.0  # seconds that a block may take, and a heartbeat may be away
BLOCK = 0.3  # that it takes at the most, of itself
STOPPED = 2.0  # that a rank is stopped for, at the most
FROZEN = 10.0  # and all of them
GROUPS = "/sys/fs/cgroup/unified", "/sys/fs/cgroup"

PROGRAM = f"""
import os, random, sys, time
from phalanx import timer
from phalanx._base import clock, procfs

chance, wall = random.Random(int(os.environ["RANK"])), clock.wall
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    step = chance.choice((-3600, 0, 3600))
    clock.wall = lambda: wall() + step
    with timer.expires({SPAN}, "block"):
        time.sleep(chance.uniform(0, {BLOCK}))
    timer.beat()
timer.rest()
"""


class Failed(Exception):  # noqa: N818 - a word of its own would tell no more
    """A rank was found to hang."""


@contextlib.contextmanager
def frozen_group() -> Iterator[Path | None]:
    """A cgroup of version 2 that can be frozen; None where there is none to be had."""
    folder = None
    for root in GROUPS:
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="phalanx-pauses-", dir=root))
            if (folder / "cgroup.freeze").exists():
                break
            folder.rmdir()
            folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            folder.rmdir()


def torment(run: subprocess.Popen[str], group: Path | None, until: float, chance: random.Random) -> dict[str, int]:
    """Pause the run, and what is below it, again and again. Returns how often in which way."""
    done = {"rank": 0, "launcher": 0, "all": 0}
    while time.monotonic() < until and run.poll() is None:
        time.sleep(chance.uniform(0, 0.5))
        ways = ["rank", "launcher", "all"] if group is not None else ["rank", "launcher"]
        way = chance.choice(ways)
        done[way] += 1
        if way == "all":
            assert group is not None
            (group / "cgroup.freeze").write_text("1")
            time.sleep(chance.choice((chance.uniform(0, SPAN), chance.uniform(0, FROZEN))))
            (group / "cgroup.freeze").write_text("0")
            continue
        ranks = [
            pid for pid in procfs.descendants([run.pid], 1000) if b"/train.py" in procfs.read(f"/proc/{pid}/cmdline")
        ]
        ranks = [pid for pid in ranks if pid != run.pid]
        pid = run.pid if way == "launcher" else chance.choice(ranks or [run.pid])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.uniform(0, STOPPED if pid != run.pid else FROZEN))
        os.kill(pid, signal.SIGCONT)
    return done


def pauses(seconds: float, ranks: int = 4, seed: int = 0) -> dict[str, int]:
    """Run it. Returns what was done. Raises Failed."""
    with tempfile.TemporaryDirectory() as folder, frozen_group() as group:
        script = Path(folder) / "train.py"
        script.write_text(PROGRAM)

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text("0")

        argv = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(ranks), "--log-dir", f"{folder}/logs"]
        argv += ["--hang-timeout", str(SPAN), str(script), str(seconds)]
        run = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, preexec_fn=enter)  # noqa: PLW1509 - no threads
        try:
            done = torment(run, group, time.monotonic() + seconds - SPAN, random.Random(seed))  # noqa: S311 - no secret
            said = run.communicate(timeout=seconds + 60)[1]
        finally:
            run.kill()
            run.wait()
        if run.returncode or "not left" in said or "no heartbeat" in said:
            raise Failed(f"after {done}: exit code {run.returncode}\n{said}")
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.stdout.write(f"{pauses(60 * given.minutes, given.ranks, given.seed)}\n")


if __name__ == "__main__":
    main()
