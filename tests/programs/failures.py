# faces: spawn elastic
# methods: spawn forkserver fork
"""What a launcher learns of workers that fail: the exception or the failure, whose it was, its code and its signal."""

from __future__ import annotations

import os
import signal
import sys

import faces


class OwnError(Exception):
    """Of the script, with more to it than a text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def fail(rank: int, how: str, failing: int) -> None:
    if rank != failing:
        signal.pause()  # until the group is stopped
    if how == "raise":
        raise OwnError(7, "not this way")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    print("raise:", faces.outcome(fail, ("raise", 1), 2))
    for how in ("exit", "kill"):
        print(f"{how}:", faces.outcome(fail, (how, 0), 1))
    sys.exit(4)


if __name__ == "__main__":
    main()
