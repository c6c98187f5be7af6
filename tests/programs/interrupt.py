# faces: spawn elastic
# methods: spawn forkserver fork
# not: elastic-fork
# why: the launcher of the original hands its own handler of SIGINT down to its forks, which raises in the function
"""A function that is sent SIGINT and handles it."""

from __future__ import annotations

import os
import signal
from typing import Any

import faces


def handle(rank: int, queue: Any) -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        queue.put((rank, "handled", signal.getsignal(signal.SIGINT) is signal.default_int_handler))


def main() -> None:
    queue = faces.context().SimpleQueue()
    print(faces.outcome(handle, (queue,), 1))
    print(faces.drained(queue, 1))


if __name__ == "__main__":
    main()
