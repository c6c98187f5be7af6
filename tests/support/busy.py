"""Programs whose threads never stand still, and must survive being looked at.

Run by path: with a kind, a socket, and for how many seconds the main thread naps, again and again.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator

TREE = ast.parse("\n".join(f"def f{n}(a, b={{'k': [1, (3, 'x' * {n})]}}): return a + b['k'][{n}]" for n in range(200)))


def deep(n: int = 110) -> int:
    return 0 if n == 0 else 1 + deep(n - 1)


def recurse() -> None:
    while True:
        deep()


def unparse() -> None:
    while True:
        ast.unparse(TREE)


def count_down(n: int) -> Iterator[int]:
    if n:
        yield from count_down(n - 1)
    yield n


def generate() -> None:
    while True:
        sum(count_down(50))


def fail(n: int) -> None:
    if not n:
        raise ValueError
    fail(n - 1)


def catch() -> None:
    while True:
        with contextlib.suppress(ValueError):
            fail(60)


def spawn_threads() -> None:
    while True:
        thread = threading.Thread(target=deep)
        thread.start()
        thread.join()


def evaluate() -> None:
    while True:
        exec(compile("def f(x):\n return [y for y in range(x)]\nf(10)", "<made>", "exec"), {})  # noqa: S102 - code objects that come and go


def match() -> None:
    while True:
        re.compile("(a|b)*c" + str(time.monotonic())).match("ab" * 20)
        re.purge()


def dump() -> None:
    value = {"a": [1, 2, {"b": "c" * 100}] * 50}
    while True:
        json.loads(json.dumps(value, indent=1))


def sort() -> None:
    while True:
        sorted(range(1000), key=lambda x: -x)


async def nest(n: int) -> None:
    if n:
        await nest(n - 1)
    await asyncio.sleep(0)


async def gather() -> None:
    while True:
        await asyncio.gather(*(nest(20) for _ in range(20)))


def run_tasks() -> None:
    asyncio.run(gather())


KINDS = (recurse, unparse, generate, catch, spawn_threads, evaluate, match, dump, sort, run_tasks)


def main() -> None:
    kind = KINDS[int(sys.argv[1])]
    for _ in range(2):
        threading.Thread(target=kind, daemon=True).start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"here", sys.argv[2])
    while True:
        deep(20)
        time.sleep(float(sys.argv[3]))


if __name__ == "__main__":
    main()
