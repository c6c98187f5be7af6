"""Runs its first argument as ``python -c`` would, after undoing what running this file has set.

From Python 3.13 on, `-c` itself imports `linecache` before the code runs, and would find one in the working directory.
This file imports nothing that could be there.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path[0] = ""  # as -c has it, in place of our own folder
    sys.argv[0] = "-c"
    globals().update(__doc__=None, __loader__=sys.__loader__)
    globals().pop("__cached__", None)
    del __file__
    exec(compile(sys.argv.pop(1), "<string>", "exec"))  # noqa: S102 - it is our launcher's
