# faces: spawn elastic
# methods: spawn forkserver fork
"""Every primitive of `multiprocessing` as an argument: the workers meet, count and wait for the launcher."""

from __future__ import annotations

from typing import Any

import faces


def work(rank: int, tools: dict[str, Any], queue: Any) -> None:
    tools["event"].wait()
    for _ in range(100):
        with tools["total"].get_lock():
            tools["total"].value += 1
        with tools["lock"]:
            tools["raw"][0] += 1
    tools["places"][rank] = rank + 0.5
    with tools["rlock"], tools["rlock"]:
        tools["letters"].value += b"x"
    turn = tools["barrier"].wait()
    with tools["condition"]:
        while tools["turn"].value != rank:
            tools["condition"].wait()
        queue.put((rank, tools["total"].value, tools["raw"][0]))
        tools["turn"].value += 1
        tools["condition"].notify_all()
    took = tools["semaphore"].acquire(block=False)
    tools["barrier"].wait()
    queue.put((10 + turn,))
    queue.put((20, took) if took else (21, took))


def main() -> None:
    context = faces.context()
    queue = context.Queue()
    tools: dict[str, Any] = {
        "event": context.Event(),
        "lock": context.Lock(),
        "rlock": context.RLock(),
        "barrier": context.Barrier(2),
        "condition": context.Condition(),
        "semaphore": context.BoundedSemaphore(1),
        "total": context.Value("i", 0),
        "turn": context.Value("i", 0),
        "places": context.Array("d", 2),
        "letters": context.Array("c", 8),
        "raw": context.RawArray("i", 1),
    }
    returned = faces.run(work, (tools, queue), 2, tools["event"].set)
    print(returned)
    print(faces.drained(queue, 6))
    print(tools["total"].value, tools["raw"][0], list(tools["places"]), tools["letters"].value)
    print(tools["semaphore"].acquire(block=False), tools["event"].is_set())


if __name__ == "__main__":
    main()
