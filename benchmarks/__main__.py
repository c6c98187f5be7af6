"""``python -m benchmarks [CASE...]``: run the cases, print medians (least..most), ratios and verdicts.

``python -m benchmarks clients`` is another program: the table of ``benchmarks.clients``.

The exit code is 1 when a target was missed or Phalanx failed to deliver, 2 for a bad argument, 0 otherwise; a peer
that is absent or fails is said to be, and is nobody's fault.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import machine, peer, report
from benchmarks.case import FLOOR, PEER, PHALANX
from benchmarks.cases import NAMES, load
from benchmarks.clients import table
from benchmarks.runner import ROOT, run_case


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_positive.__name__ = "positive whole number"  # argparse names the type in its error


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Phalanx, its peer and the floor, measured in turn.",
        epilog="`python -m benchmarks clients --help`: real programs and their faults, beside torchrun.",
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"which cases to run: {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="say what each case measures, and its targets")
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help="measured rounds (default: as each case asks for)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure seen to FILE, too")
    parser.add_argument("--no-peer", action="store_true", help="leave the peer (torch) out")
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="interpreter for Phalanx and the floor"
    )
    options = parser.parse_args(argv)
    if unknown := [name for name in options.cases if name not in NAMES]:
        parser.error(f"no such case: {', '.join(unknown)} (there are {', '.join(NAMES)})")
    if not shutil.which(options.python):
        parser.error(f"argument --python: {options.python} is no program")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"argument --json: {options.json.parent} is no folder")
    return options


def _list(names: list[str]) -> None:
    for case in map(load, names):
        targets = "; ".join(case.targets_text()) or "none"
        print(f"{case.name}: {case.measures}\n    targets: {targets}")


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["clients"]:
        return table.main(words[1:])
    options = _parse(words)
    names = options.cases or list(NAMES)
    if options.list:
        _list(names)
        return 0
    interpreters = {PHALANX: options.python, FLOOR: options.python}
    if not options.no_peer:
        try:
            interpreters[PEER] = peer.find_or_make()
        except peer.PeerError as error:
            print(f"NO PEER: {error}")
    # As pip leaves an installed package, the peer's too: nobody's figures include the compiling of their modules.
    compiled = [options.python, "-m", "compileall", "-q", str(ROOT / "src"), str(ROOT / "benchmarks")]
    subprocess.run(compiled, check=True)
    facts = machine.describe(interpreters)
    print("; ".join(f"{name}: {fact}" for name, fact in facts.items()))
    results = []
    for name in names:
        results.append(run_case(load(name), interpreters, options.rounds))
        print(f"\n{report.table(results[-1])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(facts, results), indent=1) + "\n")
    return int(any(result.missed() for result in results))


if __name__ == "__main__":
    sys.exit(main())
