# faces: spawn elastic
# methods: spawn forkserver fork
"""Consumers of a joinable queue of the script's objects, which answer on another, and one large object."""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty
from typing import Any

import faces


@dataclass(frozen=True, order=True)
class Task:
    left: int
    right: int

    def __call__(self) -> Answer:
        return Answer(self, self.left * self.right)


@dataclass(frozen=True, order=True)
class Answer:
    task: Task
    value: int


class StopWork:
    """Tells a consumer to end."""


def consume(rank: int, tasks: Any, answers: Any) -> str:
    while True:
        task = tasks.get()
        if isinstance(task, StopWork):
            tasks.task_done()
            break
        answers.put(task())
        tasks.task_done()
    if rank == 0:
        answers.put("x" * 1_000_000)  # more than a pipe holds
    return "done"


def main() -> None:
    context = faces.context()
    tasks, answers = context.JoinableQueue(), context.Queue()
    for number in range(6):
        tasks.put(Task(number, number + 1))

    def collect() -> None:
        tasks.join()
        for _ in range(2):
            tasks.put(StopWork())
        got = [answers.get() for _ in range(7)]
        for answer in sorted(each for each in got if isinstance(each, Answer)):
            print(answer, type(answer.task) is Task)
        print("large", [len(each) for each in got if isinstance(each, str)])

    print(faces.run(consume, (tasks, answers), 2, collect))
    tasks.join()
    try:
        answers.get(timeout=0.05)
    except Empty:
        print("nothing more")


if __name__ == "__main__":
    main()
