# faces: spawn elastic
# methods: spawn forkserver fork
"""What a script sets up at its top: logging, seeds, warnings, the environment, the umask and the working directory."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from decimal import Decimal, getcontext
from multiprocessing import current_process
from typing import Any

import faces

FORMAT = "%(processName)s %(module)s.%(funcName)s %(levelname)s %(name)s: %(message)s"
log = logging.getLogger("work")
logging.basicConfig(filename=f"{current_process().name}.log", format=FORMAT, level=logging.INFO)
random.seed(7)
first = random.random()
own = random.Random(8)
warnings.simplefilter("error", DeprecationWarning)
getcontext().prec = 5
sys.setrecursionlimit(1234)
os.environ.setdefault("SET_AT_THE_TOP", current_process().name)


def work(rank: int, second: float, queue: Any) -> None:
    log.debug("not told")
    log.info("rank %s begins", rank)
    try:
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    except DeprecationWarning as error:
        log.warning("raised: %s", error)
    here = os.getcwd() == os.environ["LAUNCHED_IN"]
    mask = os.umask(0o22)
    os.environ["SET_BY_A_WORKER"] = "yes"
    queue.put((rank, "random", round(first, 6), round(own.random(), 6)))
    queue.put((rank, "second random", random.random() == second))  # a fork seeds the module's generator anew
    queue.put((rank, "decimal", str(Decimal(1) / Decimal(3)), sys.getrecursionlimit()))
    queue.put((rank, "environment", os.environ["SET_AT_THE_TOP"], os.environ["LATE"], here, oct(mask)))
    queue.put((rank, "logging", logging.getLogger().level, len(logging.getLogger().handlers), log.disabled))
    os.chdir("/")


def main() -> None:
    os.environ["LATE"] = "set by the launcher, later"
    os.environ["LAUNCHED_IN"] = os.getcwd()
    os.umask(0o27)
    queue = faces.context().SimpleQueue()
    second = random.Random(7)
    second.random()
    faces.run(work, (second.random(), queue))
    for line in faces.drained(queue, 10):
        print(*line)
    print(os.environ.get("SET_BY_A_WORKER"), os.getcwd() == os.environ["LAUNCHED_IN"], round(random.random(), 6))
    for name in sorted(os.listdir()):
        if name.endswith(".log"):
            with open(name, encoding="utf-8") as stream:
                print(name, sorted(stream.read().splitlines()))


if __name__ == "__main__":
    main()
