# faces: spawn elastic
# methods: spawn forkserver fork
"""What each worker has of the script's globals: its own copies, made by running the script or by a fork."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import faces

if TYPE_CHECKING:
    from collections.abc import Callable

seen: list[object] = ["top"]
registry: dict[str, Callable[[int], int]] = {}
counter = 0


def register(function: Callable[[int], int]) -> Callable[[int], int]:
    registry[function.__name__] = function
    return function


@register
def double(x: int) -> int:
    return 2 * x


@register
def square(x: int) -> int:
    return x**2


class Meter:
    """Counts in its class."""

    total = 0

    def __init__(self) -> None:
        type(self).total += 1


meter = Meter()


def work(rank: int, given: list[object], queue: Any) -> None:
    global counter  # noqa: PLW0603 - this is what is looked at
    counter += 1
    seen.append(rank)
    Meter()
    answers = {name: function(rank + 3) for name, function in sorted(registry.items())}
    queue.put((rank, "counter", counter))
    queue.put((rank, "seen", seen))
    queue.put((rank, "given is seen", given is seen, given))
    queue.put((rank, "registry", answers, registry["double"] is double))
    queue.put((rank, "meter", Meter.total, isinstance(meter, Meter)))
    queue.put((rank, "under the guard", globals().get("late", "absent")))
    queue.put((rank, "changed", globals().get("changed", "absent")))
    main, mp_main = sys.modules["__main__"], sys.modules.get("__mp_main__")
    queue.put((rank, "modules", main is mp_main, work.__module__))


changed = "at the top"

if __name__ == "__main__":
    late = "set under the guard"
    changed = "under the guard"
    counter += 10
    seen.append("guard")
    queue = faces.context().SimpleQueue()
    faces.run(work, (seen, queue))
    for line in faces.drained(queue, 16):
        print(*line)
    print("launcher", counter, seen, Meter.total)
