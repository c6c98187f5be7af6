# faces: elastic spawn
# methods: spawn forkserver fork
"""Classes of the script that are known by identity: what goes out and comes back is of the same class."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cached_property, lru_cache, singledispatch
from typing import Any, NamedTuple, NewType

import faces

Meters = NewType("Meters", float)
_NOTHING = object()


class Point(NamedTuple):
    x: int
    y: int = 0


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Access(Flag):
    READ = auto()
    WRITE = auto()


@dataclass(frozen=True, slots=True)
class Shape:
    color: Color
    corners: tuple[Point, ...]
    access: Access = Access.READ


class Circle:
    made = 0

    def __init__(self, radius: float) -> None:
        self.radius = radius

    @cached_property
    def area(self) -> float:
        Circle.made += 1
        return 3 * self.radius**2


class Lonely:
    """There is one."""

    def __reduce__(self) -> str:
        return "the_one"


the_one = Lonely()


@lru_cache
def slow(x: int) -> int:
    return x + 100


@singledispatch
def describe(thing: object) -> str:
    return f"a thing, {thing}"


@describe.register
def _(thing: Point) -> str:
    return f"a point at {thing.x}, {thing.y}"


@describe.register
def _(thing: Shape) -> str:
    return f"a {thing.color.value} shape"


def work(rank: int, shape: Shape, circle: Circle, one: Lonely, length: Any, default: Any, queue: Any) -> Any:
    slow(rank)
    slow(rank)
    facts = [
        type(shape) is Shape,
        shape.color is Color.RED,
        type(shape.corners[0]) is Point,
        Access.WRITE in shape.access,
        one is the_one,
        default is _NOTHING,
        describe(shape),
        describe(shape.corners[0]),
        describe(length),
        slow.cache_info().hits,
        (circle.area, circle.area, Circle.made),
    ]
    answer = [Shape(Color.BLUE, (Point(rank),), Access.READ | Access.WRITE), circle, the_one, Color, slow, Circle]
    queue.put((rank, facts, pickle.dumps(answer)))
    return answer


def check(rank: int, answer: list[Any]) -> None:
    shape, circle, one, color, function, kind = answer
    print(rank, shape, isinstance(shape, Shape), shape.color is Color.BLUE, shape.corners[0] == Point(rank))
    print(rank, type(circle) is Circle, circle.__dict__, one is the_one, color is Color, function is slow)
    print(rank, kind is Circle, describe(shape), Circle.made)


def main() -> None:
    queue = faces.context().SimpleQueue()
    shape = Shape(Color.RED, (Point(1), Point(2, 3)), Access.READ | Access.WRITE)
    returned = faces.run(work, (shape, Circle(2), the_one, Meters(1.5), _NOTHING, queue))
    for rank, facts, pickled in faces.drained(queue, 2):
        print(rank, *facts)
        check(rank, pickle.loads(pickled))
    for rank, answer in (returned or {}).items():
        check(rank, answer)
    print(slow.cache_info().misses)


if __name__ == "__main__":
    main()
