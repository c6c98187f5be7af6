"""``python -m benchmarks profile CASE``: where the time of one contender goes: a flame graph, and its system calls.

The flame graph is py-spy's, of the contender's interpreter and all Python processes below it; the table of system
calls is strace's. Each is of a run of its own, for neither leaves the other's figures alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from benchmarks import launchers, peers, procfs
from benchmarks.case import PHALANX
from benchmarks.cases import NAMES, load
from benchmarks.runner import ROOT, command_of, environment


def main(argv: list[str]) -> int:
    """Write the profiles. Return 1 if one of them could not be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks profile", description="Where the time of a case goes.")
    parser.add_argument("case", choices=NAMES, metavar="CASE")
    parser.add_argument("--size", type=int, help="of a case that has sizes (default: its second)")
    parser.add_argument("--contender", default=PHALANX, metavar="NAME", help=f"(default: {PHALANX})")
    parser.add_argument("--to", type=Path, default=Path(), metavar="FOLDER", help="where the files go (default: here)")
    options = parser.parse_args(argv)
    case = load(options.case)
    size = options.size or (case.sizes[min(1, len(case.sizes) - 1)] if case.sizes else 0)
    if options.contender not in case.contenders:
        parser.error(f"argument --contender: {case.name} has {', '.join(case.contenders)}")
    whose = case.interpreter or options.contender
    if why := next(filter(None, map(launchers.missing, (options.contender, whose))), ""):
        parser.error(f"argument --contender: {options.contender} cannot take part: {why}")
    command = command_of(case, options.contender, peers.python(whose), size)
    stem = options.to / f"{case.name}{f'-{size}' if size else ''}-{options.contender}"
    flames, calls = stem.with_suffix(".svg"), stem.with_suffix(".strace.txt")
    made = [
        _run("py-spy", ["record", "--subprocesses", "--rate", "250", "--output", str(flames), "--"], command),
        _run("strace", ["-f", "-c", "-S", "calls", "-o", str(calls)], command),
    ]
    for path, is_made in zip((flames, calls), made, strict=True):
        print(f"{path}: {'written' if is_made else 'NOT written'}")
    return int(not all(made))


def _run(tool: str, options: list[str], command: list[str]) -> bool:
    """Run the measurement under a tool. Returns whether both did all they should; else what they printed is shown."""
    found = shutil.which(tool) or shutil.which(str(Path(sys.executable).with_name(tool)))
    if found is None:
        print(f"there is no {tool} here", file=sys.stderr)
        return False
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        try:
            done = subprocess.run(
                [found, *options, *command], cwd=ROOT, env=environment(mark, folder), capture_output=True, text=True,
                check=False,
            )  # fmt: skip
        finally:
            procfs.sweep(mark)
    # py-spy ends with 0 when the program that it ran did not.
    is_whole = done.returncode == 0 and done.stdout.rpartition("\n{")[2].startswith('"figures"')
    if not is_whole:
        sys.stderr.write(done.stderr)
    return is_whole
