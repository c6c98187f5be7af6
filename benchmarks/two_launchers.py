"""Two launchers of one job, as on two hosts: from the failure of a rank on one until the other's worker is told.

Each has one worker. They say by a FIFO how far they are; the one that is to fail waits at another one.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILS = "PHALANX_BENCHMARK_FAILS"
"""Environment variable of the launcher whose worker fails."""

UP = 60.0
"""Seconds within which both workers have to be there."""

RUNS = 2.0
"""Seconds for which both run before one fails, as in the midst of a job."""

CAP = 30.0
"""Seconds for which the end of the other worker is waited for."""

LEAVE = 10.0


class Seen(NamedTuple):
    """What was seen of a failure.

    ``took``: ms until the other worker was sent SIGTERM, or was dead, which may come first; `CAP` at most.
    ``ended``: whether it was.
    """

    took: float
    ended: bool


def fail(commands: Sequence[Sequence[str]], which: int, more: float = 0.0) -> Seen:
    """Run a launcher by each command; let the worker of that one fail after `RUNS` seconds and so many ``more``.

    The second is started once the first has come up to its rendezvous: it needs a store, which the first may hold.
    Raises RuntimeError: the workers do not come up.
    """
    folder = Path(tempfile.mkdtemp())
    said, gate = folder / "said", folder / "gate"
    os.mkfifo(said)
    os.mkfifo(gate)
    worker = [str(Path(__file__)), str(said), str(gate)]
    launchers = []
    pipe = os.open(said, os.O_RDWR)
    try:
        for number, command in enumerate(commands):
            env = os.environ | ({FAILS: "1"} if number == which else {})
            out = (folder / f"launcher-{number}").open("wb")
            with out:
                launchers.append(subprocess.Popen([*command, *worker], env=env, stdout=out, stderr=out))
        heard = _hear(pipe, 2, UP)
        if len(heard) < 2:
            texts = [(folder / f"launcher-{number}").read_text(errors="replace") for number in range(len(commands))]
            raise RuntimeError(f"{len(heard)} of 2 workers came up: {' | '.join(text[-500:] for text in texts)}")
        return _watch(pipe, gate, next(int(pid) for what, pid in heard if what == "up"), more)
    finally:
        os.close(pipe)
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            try:
                launcher.wait(LEAVE)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def _watch(pipe: int, gate: Path, other: int, more: float) -> Seen:
    """Let the one worker fail, and see when the other is told to end, or is dead."""
    pidfd = os.pidfd_open(other)
    try:
        sleep(RUNS + more)
        os.close(os.open(gate, os.O_WRONLY))
        (_, failed), *_ = _hear(pipe, 1, UP)
        ready, _, _ = select.select([pipe, pidfd], [], [], CAP)
        now = monotonic_ns()
        if not ready:
            return Seen(CAP * 1e3, ended=False)
        told = next((int(moment) for what, moment in _hear(pipe, 1, 0.0) if what == "told"), now)
        return Seen((told - int(failed)) / 1e6, ended=True)
    finally:
        os.close(pidfd)


def hear(pipe: int, lines: int, seconds: float) -> list[str]:
    """Return so many lines, or what has come of them by then."""
    until, data = monotonic() + seconds, b""
    while data.count(b"\n") < lines and select.select([pipe], [], [], max(0.0, until - monotonic()))[0]:
        data += os.read(pipe, 4096)
    return data.decode().splitlines()


def _hear(pipe: int, lines: int, seconds: float) -> list[tuple[str, str]]:
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in hear(pipe, lines, seconds)]


def _work(said: str, gate: str) -> None:
    """Be a worker."""
    out = os.open(said, os.O_WRONLY)

    def told(_number: int, _frame: object) -> None:
        os.write(out, b"told %d\n" % monotonic_ns())
        os._exit(0)

    if os.environ.get(FAILS):
        os.write(out, b"fails %d\n" % os.getpid())
        os.close(os.open(gate, os.O_RDONLY))
        os.write(out, b"failed %d\n" % monotonic_ns())
        os._exit(1)
    signal.signal(signal.SIGTERM, told)
    os.write(out, b"up %d\n" % os.getpid())
    while True:
        sleep(0.1)  # `signal.pause` misses a signal that comes just before it


if __name__ == "__main__":
    _work(*sys.argv[1:])
