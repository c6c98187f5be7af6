# faces: spawn elastic
# methods: spawn forkserver fork
"""What may be called in a worker: a partial function, methods of an object and of a class, and an object."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import faces

if TYPE_CHECKING:
    from collections.abc import Callable


def scale(rank: int, queue: Any, *, factor: int = 1) -> int:
    queue.put(("partial", rank + factor, factor))
    return rank + factor


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def inner(rank: int, queue: Any) -> Any:
        queue.put(("decorated", rank, function.__name__))
        return function(rank, queue)

    return inner


@logged
def decorated(rank: int, _queue: Any) -> str:
    return f"decorated {rank}"


class Trainer:
    kinds = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0

    def train(self, rank: int, queue: Any) -> str:
        self.steps += rank + 1
        queue.put(("method", self.name, self.steps))
        return self.name

    @classmethod
    def make(cls, rank: int, queue: Any) -> str:
        cls.kinds += 1
        queue.put(("class method", cls.__name__, cls.kinds, rank))
        return cls.__name__

    def __call__(self, rank: int, queue: Any) -> Any:
        queue.put(("object", self.name, rank))
        return self


def main() -> None:
    queue = faces.context().SimpleQueue()
    trainer = Trainer("own")
    for function in (partial(scale, factor=3), trainer.train, Trainer.make, decorated):
        print(faces.run(function, (queue,), 1))
        print(faces.drained(queue, 1))
    returned = faces.run(trainer, (queue,), 1)
    print(returned and (type(returned[0]) is Trainer, returned[0].name, returned[0] is trainer))
    print(faces.drained(queue, 1), trainer.steps, Trainer.kinds)


if __name__ == "__main__":
    main()
