# faces: spawn elastic
# methods: spawn forkserver fork
"""What runs when a worker ends well or is left by sys.exit: handlers, finalizers, threads, buffers, `finally`."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from multiprocessing import current_process, get_start_method, util

import faces


def note(text: str) -> None:
    with open(f"{current_process().name}.txt", "a", encoding="utf-8") as stream:
        stream.write(f"{text}\n")


class Resource:
    def __enter__(self) -> None:
        note("resource taken")

    def __exit__(self, *_: object) -> None:
        note("resource given back")


kept = open("kept.txt", "a", encoding="utf-8")  # noqa: SIM115 - closed by nobody, which is the point
gate = threading.Event()


def last() -> None:
    gate.wait(10)
    note("thread ended")


def open_gate() -> None:
    note("finalizer 5")
    gate.set()


def work(rank: int, *, leave: bool = False) -> int:
    if get_start_method() == "spawn":  # in a fork, multiprocessing runs none
        atexit.register(note, "atexit of the worker")
    util.Finalize(None, note, ("finalizer 10",), exitpriority=10)
    util.Finalize(None, open_gate, exitpriority=5)
    threading.Thread(target=last).start()
    kept.write(f"unflushed {rank}\n")
    sys.stdout.write(f"unflushed in stdout, rank {rank}\n")
    try:
        with Resource():
            if leave:
                sys.exit(0)
            return rank
    finally:
        note("finally")


def leave(rank: int) -> int:
    return work(rank, leave=True)


def main() -> None:
    atexit.register(print, "atexit of the launcher")
    print(faces.run(work, (), 1))
    if not faces.is_elastic():  # which would wait for what sys.exit(0) does not return
        print(faces.outcome(leave, (), 1))
    for name in sorted(os.listdir()):
        if name.endswith(".txt"):
            with open(name, encoding="utf-8") as stream:
                print(name, stream.read().splitlines())


if __name__ == "__main__":
    main()
