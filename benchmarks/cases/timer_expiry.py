"""How long a worker lives on after the deadline of its timer."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from benchmarks import chatter, timers
from benchmarks.case import PHALANX, TORCH, Case, Sample, Target
from benchmarks.group import start
from benchmarks.timers import FILE, KINDS, LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

TIMES = {PHALANX: 50, TORCH: 5}
INTERVAL = {PHALANX: 60.0, TORCH: 0.1}
"""``max_interval`` of the servers. The peer's looks so often: with 60 s a worker would live for a minute more."""

AFTER = 0.25
"""Seconds until the timer expires. The peer's server looks when it is told of it, and each interval after that: a
multiple of that would be its best, and this is its mean."""

FAR, FAR_TIMES = 3.0, 3
"""The same for a timer that is far off, and how often. The kernel may end a wait late by a thousandth of its length."""

# A process of its own: in the launcher it would wait for the interpreter's lock, which the one that reaps holds. It
# has the pidfd open before it says so; that is readable from the moment when the process has ended (pidfd_open(2)).
_OBSERVER = """
import os, select, sys, time
for line in sys.stdin:
    pidfd = os.pidfd_open(int(line))
    print("open", flush=True)
    select.select([pidfd], [], [])
    print(time.monotonic_ns(), flush=True)
    os.close(pidfd)
"""


class _Observer:
    """Notes when processes end."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-E", "-c", _OBSERVER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.communicate()

    def watch(self, pid: int) -> None:
        """Return when the process's end will be noted."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{pid}\n")
        self._process.stdin.flush()
        self._line()

    def end(self) -> int:
        """Wait for the end and return the moment (CLOCK_MONOTONIC, ns)."""
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class _Sent:
    """Notes when this process, in whatever thread, has sent SIGKILL by one of the two calls that there are.

    A group's SIGKILL comes from its keeper, which says when.
    """

    def __init__(self) -> None:
        self.moments: list[int] = []
        c_half = importlib.import_module("_signal")  # of `signal`: where ours looks the call up
        self._real: dict[tuple[Any, str], Callable[..., None]] = {
            (os, "kill"): os.kill,
            (c_half, "pidfd_send_signal"): c_half.pidfd_send_signal,
        }

    def __enter__(self) -> Self:
        for (module, name), send in self._real.items():
            setattr(module, name, partial(self._send, send))
        return self

    def __exit__(self, *_exception: object) -> None:
        for (module, name), send in self._real.items():
            setattr(module, name, send)

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event of a group."""
        if event["name"] == "worker.reaped":
            self.moments.append(event["monotonic_ns"])

    def _send(self, send: Callable[..., None], who: int, number: int, *more: Any) -> None:
        if send is self._real[os, "kill"] and who == os.getpid():
            return  # the peer's file server ends its own process, too: there would be one figure
        send(who, number, *more)
        if number == signal.SIGKILL:
            self.moments.append(monotonic_ns())


def _reap(
    contender: str, kind: str, handle: Any, observer: _Observer, sent: _Sent, after: float = AFTER
) -> tuple[float, float]:
    """Return the milliseconds from the deadline of a worker until it has been sent SIGKILL, and until it was dead."""
    with chatter.Meeting(1) as meeting:
        args = (contender, kind, handle, meeting.paths[0], after)
        context = start(contender, timers.hang, [args], **timers.options(kind, sent.hear))
        (deadline,) = meeting.hear()
        sent.moments.clear()
        observer.watch(context.pids()[0])
        end = observer.end()
        context.wait()
        context.close()
    killed = min(sent.moments)
    if not deadline <= killed:
        raise RuntimeError(f"{kind}: killed {(deadline - killed) / 1e6} ms too soon")
    return (killed - deadline) / 1e6, (end - deadline) / 1e6


def _measure(contender: str, kinds: Sequence[str]) -> Sample:
    figures: dict[str, list[float]] = {}
    for kind in kinds:
        with timers.watching(contender, kind, INTERVAL[contender]) as handle, _Observer() as observer, _Sent() as sent:
            seen = [_reap(contender, kind, handle, observer, sent) for _ in range(TIMES[contender])]
            if contender == PHALANX:
                far = [_reap(contender, kind, handle, observer, sent, FAR)[0] for _ in range(FAR_TIMES)]
                figures[f"{kind}, far, sent"] = far
        figures[f"{kind}, sent"], figures[f"{kind}, dead"] = map(list, zip(*seen, strict=True))
    return Sample(figures)


CASE = Case(
    name="timer_expiry",
    measures=f"a worker that sleeps in a block of {AFTER:g} s, {TIMES[PHALANX]} times for each way of watching, with"
    f" max_interval={INTERVAL[PHALANX]:g} (the peer: {TIMES[TORCH]} times, with {INTERVAL[TORCH]:g}; its default for a"
    f" queue is 60): from the deadline until SIGKILL has been sent, and until the worker is dead;"
    f" far: a block of {FAR:g} s, {FAR_TIMES} times",
    units={f"{kind}, {name}": "ms" for kind in KINDS for name in ("sent", "dead", "far, sent")},
    targets=tuple(Target(f"{kind}, {name}", "<", 2) for kind in KINDS for name in ("sent", "far, sent")),
    contenders={PHALANX: partial(_measure, PHALANX, KINDS), TORCH: partial(_measure, TORCH, (FILE, LOCAL))},
    rounds=1,
    warm_up=False,
    limit=300.0,
)
