"""``python -m benchmarks [CASE...]``: run the cases, print medians (least..most), ratios and verdicts.

Other programs, by the first word: ``compare`` (two results of this one), ``profile`` (a case), ``page`` (a result as
pictures and text in the documentation), ``clients`` (real programs and their faults).

The exit code is 1 when a target was missed or Phalanx failed to deliver, 2 for a bad argument, 0 otherwise; a peer
that is absent or fails is said to be, and is nobody's fault.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import launchers, machine, peers, report
from benchmarks.case import FLOOR, PHALANX, positive, sizes
from benchmarks.cases import NAMES, SMOKE, load
from benchmarks.runner import ROOT, run_case

if TYPE_CHECKING:
    from collections.abc import Iterable

PROGRAMS = {
    "clients": "benchmarks.clients.table",
    "compare": "benchmarks.compare",
    "page": "benchmarks.page",
    "profile": "benchmarks.profiles",
}

PEERS = tuple(dict.fromkeys(peer for name in NAMES for peer in load(name).peers()))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Phalanx, its peers and the floor, measured in turn.",
        epilog=f"Other programs: {', '.join(f'`python -m benchmarks {name} --help`' for name in PROGRAMS)}.",
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"which cases to run: {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="say what each case measures, and its targets")
    parser.add_argument("--rounds", type=positive, metavar="N", help="measured rounds (default: as each case asks for)")
    parser.add_argument(
        "--sizes", type=sizes, metavar="N,N", help="of the cases that have sizes, only these (default: all of each)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure seen to FILE, too")
    parser.add_argument(
        "--peers", metavar="NAME,NAME", help=f"which peers take part: none, or of {', '.join(PEERS)} (default: all)"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="whether it all works: the cases that take seconds, at 8, one round, no peers; only what is lost, torn, "
        "wrong or left behind is judged, and no time",
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="interpreter for Phalanx and the floor"
    )
    options = parser.parse_args(argv)
    if unknown := [name for name in options.cases if name not in NAMES]:
        parser.error(f"no such case: {', '.join(unknown)} (there are {', '.join(NAMES)})")
    if options.sizes and (why := _nobodys(options.cases, set(options.sizes))):
        parser.error(f"argument --sizes: {why}")
    if options.smoke:
        options.cases = options.cases or list(SMOKE)
        options.rounds, options.sizes, options.peers = (
            options.rounds or 1,
            options.sizes or [8],
            options.peers or "none",
        )
    options.peers = PEERS if options.peers is None else [name for name in options.peers.split(",") if name != "none"]
    if unknown := [name for name in options.peers if name not in PEERS]:
        parser.error(f"argument --peers: no such peer: {', '.join(unknown)} (there are {', '.join(PEERS)})")
    if not shutil.which(options.python):
        parser.error(f"argument --python: {options.python} is no program")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"argument --json: {options.json.parent} is no folder")
    if options.json and options.json.exists() and not options.json.is_file():
        parser.error(f"argument --json: {options.json} is no file")
    return options


def _nobodys(names: list[str], sizes: set[int]) -> str:
    """Return why with these sizes one would run nothing of a case that was named, or have a size that no case has."""
    cases = [load(name) for name in names or NAMES]
    for case in cases if names else []:
        if case.sizes and not sizes.intersection(case.sizes):
            return f"{case.name} has {', '.join(map(str, case.sizes))}"
    strange = sizes.difference(*(case.sizes for case in cases))
    return f"no case that is asked for has {', '.join(map(str, sorted(strange)))}" if strange else ""


def _list(names: list[str]) -> None:
    for case in map(load, names):
        targets = "; ".join(case.targets_text()) or "none"
        sizes = f"\n    sizes: {', '.join(map(str, case.sizes))}" if case.sizes else ""
        others = f"\n    peers: {', '.join(case.peers()) or 'none'}"
        print(f"{case.name}: {case.measures}{sizes}{others}\n    targets: {targets}")


def find(names: Iterable[str], python: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the interpreter of each contender that can take part, and why which of them cannot."""
    interpreters, absent = {PHALANX: python, FLOOR: python}, {}
    for name in names:
        if why := launchers.missing(name):
            absent[name] = why
        else:
            interpreters[name] = peers.python(name, python)
    return interpreters, absent


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] and words[0] in PROGRAMS:
        return int(importlib.import_module(PROGRAMS[words[0]]).main(words[1:]))
    options = _parse(words)
    names = options.cases or list(NAMES)
    if options.list:
        _list(names)
        return 0
    wanted = {peer for name in names for peer in load(name).peers()}
    interpreters, absent = find([peer for peer in options.peers if peer in wanted], options.python)
    for name, why in absent.items():
        print(f"NO {name}: {why}")
    # As pip leaves an installed package, the peers' too: nobody's figures include the compiling of their modules.
    compiled = [options.python, "-m", "compileall", "-qq", str(ROOT / "src"), str(ROOT / "benchmarks")]
    if subprocess.run(compiled, stdout=subprocess.DEVNULL, check=False).returncode:
        print("NO byte code is kept of some modules: their imports compile them anew, each time")
    facts = machine.describe(interpreters)
    print("; ".join(f"{name}: {fact}" for name, fact in facts.items()))
    cases, written = [], True
    for case in map(load, names):
        sizes = [size for size in case.sizes if not options.sizes or size in options.sizes] if case.sizes else [0]
        results = [run_case(case, interpreters, options.rounds, size) for size in sizes]
        results = [result.only_counts() for result in results] if options.smoke else results
        if results:
            cases.append(results)
            print(f"\n{report.table(results)}", flush=True)
            if options.json:  # after each: a run that is ended has what it saw
                try:
                    report.write(options.json, report.as_json(facts, absent, cases))
                    written = True
                except OSError as error:
                    print(f"NOT WRITTEN: {error}", file=sys.stderr)
                    written = False
    missed = any(result.missed(unmeasured=options.smoke) for results in cases for result in results)
    return int(missed or not written)


def _end(number: int, _frame: object) -> None:
    """End as an interrupt does: what was started is ended, what was made is removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # else whoever started it, nohup say, wants it ignored
            signal.signal(number, _end)
    sys.exit(main())
