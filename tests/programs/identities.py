# faces: spawn elastic
# methods: spawn forkserver fork
"""Who a worker is to `multiprocessing`: its name, its number, its parent and its key, in a first group and a second."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any

import faces


def tell(rank: int, launcher: int, key: bytes, queue: Any) -> None:
    me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    facts = {
        "class": type(me).__name__,
        "name": me.name,
        "identity": me._identity,
        "daemon": me.daemon,
        "pid is mine": me.pid == os.getpid() != launcher,
        "alive": me.is_alive(),
        "exit code": me.exitcode,
        "parent": parent and (parent.name, parent.pid == launcher, parent.is_alive()),
        "same key": bytes(me.authkey) == key,
        "method": multiprocessing.get_start_method(allow_none=True),
        "children": multiprocessing.active_children(),
        "thread": (threading.current_thread().name, threading.current_thread() is threading.main_thread()),
        "stdin": (sys.stdin.name == 0, sys.stdin.read()),
        "module": __name__,
        "function": (tell.__module__, tell.__qualname__),
    }
    queue.put((rank, list(facts.items())))


def main() -> None:
    queue = faces.context().SimpleQueue()
    me = multiprocessing.current_process()
    print(me.name, me._identity, multiprocessing.parent_process(), __name__)
    for nprocs in (2, 1):
        faces.run(tell, (os.getpid(), bytes(me.authkey), queue), nprocs)
        for rank, facts in faces.drained(queue, nprocs):
            for name, value in facts:
                print(nprocs, rank, name, value)
    print("children left", multiprocessing.active_children())


if __name__ == "__main__":
    main()
