# faces: spawn elastic
# methods: spawn forkserver fork
"""A manager's dictionary, list and namespace, and a manager of the script's own class, used by both ranks."""

from __future__ import annotations

import os
from multiprocessing.managers import BaseManager
from typing import Any

import faces


class Account:
    def __init__(self, start: int) -> None:
        self._value = start

    def add(self, amount: int) -> int:
        self._value += amount
        return self._value

    def value(self) -> int:
        return self._value


class Bank(BaseManager):
    pass


Bank.register("Account", Account)


def work(rank: int, table: Any, names: Any, space: Any, account: Any, lock: Any) -> None:
    table[rank] = {"rank": rank, "square": rank**2}
    names.append(f"rank {rank}")
    with lock:
        space.total += rank + 1
        space.pids = {*space.pids, os.getpid()}
    for _ in range(10):
        account.add(rank + 1)


def main() -> None:
    context = faces.context()
    with context.Manager() as manager, Bank(ctx=context) as bank:
        table, names, space, lock = manager.dict(), manager.list(), manager.Namespace(), manager.Lock()
        space.total, space.pids = 0, {os.getpid()}
        account = bank.Account(5)  # type: ignore[attr-defined]  # registered above
        print(faces.run(work, (table, names, space, account, lock)))
        print(sorted(table.items()), sorted(names), space.total, len(space.pids), account.value())


if __name__ == "__main__":
    main()
