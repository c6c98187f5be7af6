"""A program that uses torch's timers needs another import, and no other change."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
from typing import Any

import pytest

HERE = "phalanx.timer"
THERE = "torch.distributed.elastic.timer"


def _hang_by_queue(module: str, queue: Any) -> None:
    timer = importlib.import_module(module)
    timer.configure(timer.LocalTimerClient(queue))
    with timer.expires(after=60, scope="quick"):
        pass
    with timer.expires(after=0.2):
        signal.pause()


def _exit_code(target: Any, *args: Any) -> int | None:
    worker = multiprocessing.get_context("spawn").Process(target=target, args=args)
    worker.start()
    worker.join()
    code = worker.exitcode
    worker.close()
    return code


@pytest.mark.slow
@pytest.mark.parametrize("module", [HERE, pytest.param(THERE, marks=pytest.mark.torch)])
def test_the_same_program_over_a_queue(module: str) -> None:
    timer = importlib.import_module(module)
    queue = multiprocessing.get_context("spawn").Queue()
    server = timer.LocalTimerServer(queue, max_interval=0.1)
    server.start()
    try:
        assert _exit_code(_hang_by_queue, module, queue) == -signal.SIGKILL
    finally:
        server.stop()
        queue.close()
        queue.join_thread()
