# faces: elastic spawn
# methods: spawn forkserver fork
"""Both ends of pipes as arguments, objects of the script's classes through them, and a connection that is returned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import faces

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass
class Letter:
    text: str
    stamps: list[int] = field(default_factory=list)


def answer(rank: int, ends: list[Connection[Any, Any]], kept: list[Connection[Any, Any]]) -> Any:
    mine = ends[rank]
    letter = mine.recv()
    letter.stamps.append(rank)
    mine.send(letter)
    mine.send_bytes(type(letter).__name__.encode())
    mine.close()
    kept[rank].send(Letter(f"left by {rank}"))
    return kept[rank]


def main() -> None:
    context = faces.context()
    pairs = [context.Pipe() for _ in range(2)]
    kept = [context.Pipe() for _ in range(2)]

    def talk() -> None:
        for number, (here, _) in enumerate(pairs):
            here.send(Letter(f"to {number}", [number * 10]))
        for here, _ in pairs:
            letter = here.recv()
            print(letter, type(letter) is Letter, here.recv_bytes())

    returned = faces.run(answer, ([there for _, there in pairs], [there for _, there in kept]), 2, talk)
    for here, _ in kept:
        print(here.recv())
    if returned is not None:
        for rank, connection in returned.items():
            kept[rank][1].close()
            connection.send(Letter(f"through what {rank} returned"))
            connection.close()
            print(type(connection).__name__, kept[rank][0].recv())
            try:
                kept[rank][0].recv()
            except EOFError:
                print("nobody writes any more")


if __name__ == "__main__":
    main()
