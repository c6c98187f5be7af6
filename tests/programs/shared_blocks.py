# faces: elastic
# methods: spawn forkserver
# why: names come back as return values; with fork each worker has a resource tracker of its own, which removes the
# why: blocks of a worker that has ended at a moment that nobody knows
"""Shared memory that workers make and the launcher reads after their end, and a block that the launcher made."""

from __future__ import annotations

from multiprocessing.shared_memory import ShareableList, SharedMemory
from typing import Any

import faces


def content(block: SharedMemory) -> memoryview:
    assert block.buf is not None
    return block.buf


def make(rank: int, common: SharedMemory) -> str:
    content(common)[rank] = 65 + rank
    mine = SharedMemory(create=True, size=16)
    content(mine)[:5] = f"from{rank}".encode()
    mine.close()
    return mine.name


def make_list(rank: int) -> str:
    values: Any = ShareableList([rank, "text", 2.5, None])
    values.shm.close()
    name: str = values.shm.name
    return name


def main() -> None:
    common = SharedMemory(create=True, size=8)
    returned = faces.run(make, (common,)) or {}
    print(bytes(content(common)[:3]))
    common.close()
    common.unlink()
    for rank, name in returned.items():
        block = SharedMemory(name)
        print(rank, bytes(content(block)[:5]))
        block.close()
        block.unlink()
    for name in (faces.run(make_list, (), 1) or {}).values():
        values: Any = ShareableList(name=name)
        print(list(values))
        values.shm.close()
        values.shm.unlink()


if __name__ == "__main__":
    main()
