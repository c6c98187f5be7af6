# faces: spawn elastic
# methods: spawn forkserver fork
# arguments: file-1 file-2 --rate 0.25 -v
"""The command line, read at the top of the script, and the modules beside it: each worker finds them again."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import beside
import faces

parser = argparse.ArgumentParser()
parser.add_argument("face")
parser.add_argument("method")
parser.add_argument("files", nargs="*")
parser.add_argument("--rate", type=float, default=1.0)
parser.add_argument("-v", "--verbose", action="store_true")
options = parser.parse_args()
sys.path.append("/no/such/folder")


def work(rank: int, tool: beside.Tool, queue: Any) -> None:
    main = sys.modules["__main__"]
    queue.put((rank, "options", sorted(vars(options).items())[1:]))
    queue.put((rank, "argv", os.path.basename(sys.argv[0]), sys.argv[2:]))
    queue.put((rank, "path", os.path.basename(sys.path[0]), sys.path.count("/no/such/folder")))
    queue.put((rank, "file", os.path.basename(__file__), main.__file__ == __file__, os.path.isabs(__file__)))
    queue.put((rank, "names", __name__, main.__name__, __package__, main.__doc__ == __doc__))
    queue.put((rank, "module", beside.imported_as, tool.use(rank), type(tool) is beside.Tool))
    same = sys.executable == tool.python  # type: ignore[attr-defined]  # set below the guard
    queue.put((rank, "flags", sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions, same))


def main() -> None:
    queue = faces.context().SimpleQueue()
    tool = beside.Tool(3)
    tool.python = sys.executable  # type: ignore[attr-defined]  # a module takes any attribute
    faces.run(work, (tool, queue))
    for line in faces.drained(queue, 14):
        print(*line)


if __name__ == "__main__":
    main()
