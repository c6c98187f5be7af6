"""Workers that report steps, and return between which bounds the time of the steps is (seconds), by their own clock."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

from phalanx import timer
from tests.support.forks import code_of_fork

NAP = 0.05

Bounds = tuple[float, float]


class Stopwatch:
    """The shortest and the longest that a time can be which began in `start`, and ends now."""

    def __init__(self, step: int = 1) -> None:
        self._first = time.monotonic()
        timer.progress(step)
        self._last = time.monotonic()

    def end(self, step: int = 2, *, without: float = 0.0) -> Bounds:
        least = time.monotonic() - self._last
        timer.progress(step)
        return least - without, time.monotonic() - self._first - without


def nap() -> float:
    """Returns for how long, at least."""
    before = time.monotonic()
    time.sleep(NAP)
    return time.monotonic() - before


def a_step() -> Bounds:
    watch = Stopwatch()
    nap()
    return watch.end()


def a_jump_of_four() -> Bounds:
    watch = Stopwatch(10)
    nap()
    least, most = watch.end(14)
    return least / 4, most / 4


def a_step_with_beats() -> Bounds:
    """Other beats, also of the same step, end no step."""
    watch = Stopwatch()
    timer.beat()
    nap()
    timer.progress(1)
    with timer.expires(60):
        nap()
    return watch.end()


def a_wait() -> Bounds:
    watch = Stopwatch()
    with timer.waiting():
        spent = nap()
    return 0.0, watch.end(without=spent)[1]


def waits_in_each_other() -> Bounds:
    watch = Stopwatch()
    block = timer.waiting()
    before = time.monotonic()
    with block, timer.waiting(), block:
        nap()
    return 0.0, watch.end(without=time.monotonic() - before - 0.01)[1]


def a_wait_of_another_thread_that_is_not_over() -> Bounds:
    """Each of the two steps has its part of the wait."""
    waits, over = threading.Event(), threading.Event()

    def wait() -> None:
        with timer.waiting():
            waits.set()
            over.wait()

    watch = Stopwatch()
    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    spent = nap()
    _, first = watch.end(2, without=spent)
    last = time.monotonic()
    spent = nap()
    over.set()
    thread.join()
    timer.progress(3)
    return 0.0, max(first, time.monotonic() - last - spent + 0.01)


def a_rest() -> Bounds:
    watch = Stopwatch()
    with timer.rest():
        spent = nap()
    return 0.0, watch.end(without=spent)[1]


def a_wait_in_a_rest() -> Bounds:
    watch = Stopwatch()
    with timer.rest():
        spent = nap()
        with timer.waiting():
            spent += nap()
    least, most = watch.end(without=spent)
    return max(0.0, least - 0.01), most


def a_rest_that_a_step_ends() -> None:
    timer.progress(1)
    timer.rest()
    nap()
    timer.progress(2)


def a_step_and_a_beat() -> None:
    timer.progress(41)
    timer.beat()


def a_lower_step() -> None:
    timer.progress(9)
    nap()
    timer.progress(1)


def the_first_step() -> None:
    with timer.waiting():  # there is no step yet
        nap()
    timer.progress(1_000_000)


def a_fork() -> Bounds:
    """It leaves the block of its parent, and reports a step: neither is its parent's."""
    watch = Stopwatch()
    with ExitStack() as held:
        held.enter_context(timer.waiting())

        def child() -> None:
            held.close()
            timer.progress(7)
            nap()

        code_of_fork(child)
        held.pop_all()  # it was never left here: so all that follows does not count
    return 0.0, watch.end()[1] - NAP


def a_child_that_has_ended() -> Bounds:
    """It has reported steps, which took longer."""
    timer.progress(1)

    def child() -> None:
        for step in range(1, 4):
            timer.progress(step)
            nap()

    code_of_fork(child)
    timer.rest()
    watch = Stopwatch(2)
    return 0.0, watch.end(3)[1]


def many_steps() -> Bounds:
    """Long ones first, which are not among the latest."""
    for step in range(1, 4):
        timer.progress(step)
        nap()
    before = time.monotonic()
    for step in range(4, 70):
        timer.progress(step)
    return 0.0, min(NAP, time.monotonic() - before)


class Index:
    """A number that is no int, as that of an array library."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def odd_numbers() -> None:
    """Steps at the ends of 64 bits, below 0, and of another type."""
    steps: list[Any] = [Index(3), Index(4), (1 << 63) - 1, -(1 << 63), -5, -4, (1 << 63) - 1, 0, 1]
    for step in steps:
        timer.progress(step)
