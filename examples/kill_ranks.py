"""Train `digits_ddp.py` twice, once undisturbed and once with ranks killed over and over: are the weights the same?

    python examples/kill_ranks.py
    python examples/kill_ranks.py --launcher torchrun

A random rank gets a random signal at a random moment, and the launcher restarts all of them, until that has happened
20 times. The training goes on from its checkpoint each time, and ends with the weights of the undisturbed one, bit for
bit.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits_ddp.py")
CHANCE = random.Random()  # noqa: S311 - no secret
SIGNALS = ("KILL", "TERM", "INT", "HUP", "QUIT", "SEGV", "ABRT", "BUS", "FPE", "ILL")
# Checkpoints that an attempt may reach: it is killed then, so that no machine is too fast for all the restarts.
MOST = 8
EARLY = 0.25  # of the kills come while the ranks start
STEPS = 60  # per restart: more than that many checkpoints, of five steps each
LOOK = 0.005  # seconds from one look at the processes to the next
PATIENCE = 60.0  # seconds until a signal is sent again: a program may survive some of them


def command(options: argparse.Namespace, folder: Path, steps: int, restarts: int) -> list[str]:
    """Return the command line of a launcher. What both of them call the same is written once."""
    ours = ["phalanx", "run", *(["--preload", options.preload] if options.preload else [])]
    start = ours if options.launcher == "phalanx" else ["torch.distributed.run", "--standalone"]
    group = ["--nproc-per-node", options.ranks, "--max-restarts", restarts]
    output = ["--redirects", 3, "--log-dir", folder / "logs"]
    script = [SCRIPT, "--steps", steps, "--checkpoint", checkpoint(folder)]
    return [sys.executable, "-m", *map(str, (*start, *group, *output, *script))]


def checkpoint(folder: Path) -> Path:
    """Return where the training is to save its state."""
    return folder / "checkpoint.pt"


def logs(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files that the workers' output is redirected to, by attempt and rank: attempt_N/RANK/stdout.log."""
    found = folder.glob("logs/**/attempt_*/*/stdout.log")
    return {(int(log.parts[-3].partition("_")[2]), int(log.parts[-2])): log for log in found}


def place(pid: int) -> tuple[int, int] | None:
    """Return attempt and rank of a process that writes to a worker's log, else nothing.

    The environment of one that was forked from a preloaded one is not in /proc/PID/environ.
    """
    try:
        found = re.search(r"/attempt_(\d+)/(\d+)/stdout\.log$", os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:  # it has gone, or it is of another user
        return None
    return (int(found[1]), int(found[2])) if found else None


def workers(launcher: int) -> dict[tuple[int, int], int]:
    """Return the pids of the workers below a launcher, by attempt and rank."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {}
    for pid, parent in parents.items():
        above = pid
        while above in parents and above != launcher:
            above = parents[above]
        where = place(pid) if above == launcher else None
        if where and place(parent) != where:  # else it is a process that a worker has started
            found[where] = pid
    return found


def kill(pid: int, where: tuple[int, int], name: str) -> bool:
    """Send a signal, and tell whether it was sent: not to a process that has got the pid since (pidfd_open(2))."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if place(pid) != where:
            return False
        signal.pidfd_send_signal(handle, signal.Signals[f"SIG{name}"])
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


class Saves:
    """Counts how often a file is replaced, as far as one who looks now and then can see."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._look()
        self.count = 0

    def _look(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def look(self) -> int:
        """Return how many replacements have been seen."""
        now = self._look()
        self.count += now != self._seen
        self._seen = now
        return self.count


def disturb(program: subprocess.Popen[bytes], folder: Path, restarts: int, ranks: int, interval: float) -> None:
    """Kill a rank of each attempt until there have been so many restarts; stop when the launcher has ended."""
    attempt, signalled = 0, 0.0
    while program.poll() is None:
        found = workers(program.pid)
        latest = max((number for number, _ in found), default=-1)
        if latest >= restarts:
            return
        there = {where: pid for where, pid in found.items() if where[0] == latest}
        fresh = latest >= attempt
        if len(there) < ranks or not (fresh or time.monotonic() > signalled + PATIENCE):
            time.sleep(LOOK)
            continue
        moment = wait(program, Saves(checkpoint(folder)), interval)
        where = CHANCE.choice(sorted(there))
        name = CHANCE.choice(SIGNALS)
        if kill(there[where], where, name):
            print(f"attempt {latest}: SIG{name} to rank {where[1]}, {moment}", flush=True)
        attempt, signalled = latest + 1, time.monotonic()


def wait(program: subprocess.Popen[bytes], saves: Saves, interval: float) -> str:
    """Return at the moment to kill, and say which it was: while the attempt starts, or once it has saved its state."""
    starting = CHANCE.random() < EARLY
    delay = CHANCE.uniform(0, interval)
    until = time.monotonic() + delay if starting else None
    while program.poll() is None and (until is None or time.monotonic() < until) and saves.look() < MOST:
        if until is None and saves.count:
            until = time.monotonic() + delay
        time.sleep(LOOK)
    return f"{saves.count} checkpoints on"


def outcome(folder: Path, ranks: int) -> tuple[int, str, list[int]]:
    """Return the last attempt's number, the hash of the weights of all its ranks, and where attempts went on."""
    texts = {where: log.read_text() for where, log in logs(folder).items()}
    last = max(number for number, _ in texts)
    hashes = {"".join(re.findall(r"done, weights (\w+)", texts[last, rank])) for rank in range(ranks)}
    assert len(hashes) == 1, f"the ranks ended with different weights: {hashes}"
    resumed = [re.search(r"goes on at step (\d+)", text) for (_, rank), text in sorted(texts.items()) if rank == 0]
    return last, hashes.pop(), [int(found[1]) for found in resumed if found]


def train(options: argparse.Namespace, folder: Path, steps: int, restarts: int) -> str:
    """Train under a launcher, with so many restarts; return the hash of the weights."""
    folder.mkdir()
    began = time.monotonic()
    # torch 2.13's torchrun keeps one store for all attempts, in which gloo then finds the addresses of ranks that are
    # dead ("Gloo connectFullMesh failed"); with this, rank 0 of each attempt has a store of its own.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(command(options, folder, steps, restarts), env=env) as program:
        try:
            disturb(program, folder, restarts, options.ranks, options.interval)
            program.wait()
        finally:
            program.terminate()  # where we were interrupted: it stops its workers
    if program.returncode:
        sys.exit(f"the launcher ended with {program.returncode}")
    seen, weights, resumed = outcome(folder, options.ranks)
    took = time.monotonic() - began
    went_on = ["that went on at steps", resumed] if resumed else []
    print(f"{options.launcher}: {seen} restarts in {took:.1f} s", *went_on)
    print(f"weights {weights}", flush=True)
    if seen < restarts:
        sys.exit(f"the training ended after {seen} restarts: it needs more --steps")
    return weights


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description="Kill ranks of a training that is restarted; compare its weights.")
    parser.add_argument("--launcher", choices=("phalanx", "torchrun"), default="phalanx")
    parser.add_argument("--ranks", type=int, default=4, help="default: 4")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS} for each restart")
    parser.add_argument("--interval", type=float, default=0.3, help="most seconds until a kill (default: 0.3)")
    parser.add_argument("--seed", type=int, default=CHANCE.randrange(10**6), help="of ranks, signals and moments")
    parser.add_argument("--preload", default="", help="modules for phalanx run --preload: restarts need no imports")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    CHANCE.seed(options.seed)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some of these signals would leave core files
    steps = options.steps or STEPS * options.restarts
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = train(options, Path(folder, "undisturbed"), steps, 0)
        disturbed = train(options, Path(folder, "disturbed"), steps, options.restarts)
    if disturbed != undisturbed:
        sys.exit("the weights differ")
    print(f"the same weights after {options.restarts} restarts", flush=True)


if __name__ == "__main__":
    main()
