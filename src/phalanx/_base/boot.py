"""What an interpreter of ours runs: its first argument, as ``-c`` would. What is of this file is taken back first.

`-c` itself imports `linecache` before the code runs, from Python 3.13 on, and would find one in the working directory.
Knows nothing of what it runs, and imports nothing that could be there.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path[0] = ""  # what -c has there, in the place of our own folder
    sys.argv[0] = "-c"
    globals().update(__doc__=None, __loader__=sys.__loader__)
    globals().pop("__cached__", None)
    del __file__
    exec(compile(sys.argv.pop(1), "<string>", "exec"))  # noqa: S102 - it is our launcher's
