# faces: spawn elastic
# methods: spawn forkserver fork
"""A worker that starts processes, a pool and an executor of its own, with the default method and with this one."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import faces


class Job:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def child(parent: int, queue: Any) -> None:
    me, above = multiprocessing.current_process(), multiprocessing.parent_process()
    assert above is not None
    queue.put((me.name, me._identity, me.daemon, above.name, above.pid == parent == os.getppid()))


def follow(job: Job) -> Job:
    return Job(job.number + 1)


def pool_worker(_: object) -> tuple[str, bool, str]:
    me = multiprocessing.current_process()
    return me.name, me.daemon, type(me).__name__


def work(rank: int, method: str, queue: Any) -> None:
    answers: Any = multiprocessing.SimpleQueue()
    contexts: list[Any] = [multiprocessing, multiprocessing.get_context(method)]
    for context in contexts:
        process = context.Process(target=child, args=(os.getpid(), answers), name=f"own-{rank}" if rank else None)
        process.start()
        process.join()
        queue.put((rank, "child", answers.get(), process.exitcode))
    with multiprocessing.Pool(1) as pool:
        jobs = pool.map(follow, [Job(number) for number in range(3)])
        queue.put((rank, "pool", jobs == [Job(1), Job(2), Job(3)], pool.apply(pool_worker, (0,))))
    with ProcessPoolExecutor(1) as executor:
        jobs = list(executor.map(follow, [Job(5)]))
        queue.put((rank, "executor", jobs == [Job(6)], executor.submit(pool_worker, 0).result()))
    queue.put((rank, "left", multiprocessing.active_children()))


def main() -> None:
    queue = faces.context().SimpleQueue()
    faces.run(work, (faces.method(), queue))
    for line in faces.drained(queue, 10):
        print(*line)


if __name__ == "__main__":
    main()
