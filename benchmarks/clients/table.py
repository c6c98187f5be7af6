"""``python -m benchmarks clients [PROGRAM...]``: run the clients, and print what came of each, or how long it took.

The times are a table of its own: each run of it is alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.case import TORCH
from benchmarks.clients.runs import CASES, CLIENTS, LAUNCHERS, LIMIT, PHALANX, TIMED, Came, Client, Launcher, run
from benchmarks.page import put
from benchmarks.report import ratio
from benchmarks.runner import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    All = Mapping[tuple[str, str, str], Sequence[Came]]
    """What came of each program, case and launcher, in its rounds."""

_VERSIONS = """
import importlib.metadata, importlib.util, json, platform, phalanx
found = {"Python": platform.python_version(), "phalanx": phalanx.__version__}
for name in ("torch", "jax"):
    if importlib.util.find_spec(name):
        found[name] = importlib.metadata.version(name)
print(json.dumps(found))
"""


def versions(python: str) -> dict[str, str]:
    """Return the versions of Python, phalanx and, where they are installed, torch and jax."""
    env = environment("", tempfile.gettempdir())
    found: dict[str, str] = json.loads(subprocess.check_output([python, "-c", _VERSIONS], env=env, text=True))
    return found


def lacking(client: Client, known: Mapping[str, str]) -> str:
    """Return what a client imports and has no version here, if anything."""
    return next((need for need in client.needs if need not in known), "")


FIGURES: tuple[tuple[str, tuple[str, ...], Callable[[Came], float | None]], ...] = (
    ("start to first step", TIMED, lambda came: came.started),
    ("exception to the end", ("exception",), lambda came: came.seconds),
    ("exception to the first step of the restart", ("restart",), lambda came: came.again),
)
"""The second table: what is timed, in which cases, and where a run has it."""


def times(cases: Sequence[tuple[Client, str]], came: All) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the second table: medians, and Phalanx's as a multiple of the better one of torchrun's."""
    names = [launcher.name for launcher in LAUNCHERS]
    yield ("program", "seconds", *names, "Phalanx / torchrun")
    for client in dict.fromkeys(client for client, _ in cases if client.timed):
        for what, of, figure in FIGURES:
            seen: dict[str, list[float]] = {}
            cells = []
            for name in names:
                runs = [one for case in of for one in came.get((client.name, case, name), ())]
                seen[name] = [value for one in runs if (value := figure(one)) is not None]
                shown = f"{median(seen[name]):.1f}" if seen[name] else "-"
                went_on = f", {sum(one.went_on for one in runs)} of {len(runs)} went on"
                cells.append(shown + (went_on if runs and of == ("restart",) else ""))
            if any(seen.values()):
                best = min(
                    (seen[name] for name in names if seen[name] and name != PHALANX.name), key=median, default=[]
                )
                yield (f"`{client.name}`", what, *cells, ratio(seen[PHALANX.name], best))


def _shown(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in dict.fromkeys((rows[0], ("---",) * len(rows[0]), *rows[1:])))


def outcomes(cases: Sequence[tuple[Client, str]], came: All, known: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the rows of the first table: what came of each program and case."""
    rows: list[tuple[str, ...]] = [("program", "case", *(launcher.name for launcher in LAUNCHERS))]
    for client, case in cases:
        if lacks := lacking(client, known):
            cells = (f"not run: {lacks} is not installed", *("-" for _ in LAUNCHERS))
        else:
            cells = (CASES[case], *(str(came.get((client.name, case, each.name), "-")[0]) for each in LAUNCHERS))
        rows.append((f"`{client.name}`", *cells))
    return rows


def _parse(argv: list[str]) -> argparse.Namespace:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks clients", description="Clients and their faults, under torchrun and under Phalanx."
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be given again (default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many runs at a time (default: 1)")
    parser.add_argument("--times", action="store_true", help="the table of times, of a few programs and cases")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each of these (default: 3)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help="after them a run has hung (default: %(default)g)"
    )
    parser.add_argument("--python", default=peers.python(TORCH), metavar="PATH", help="interpreter that has torch")
    parser.add_argument("--consoles", type=Path, metavar="FOLDER", help="keep there what each run has printed")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table between the marks of this page")
    options = parser.parse_args(argv)
    if unknown := set(options.programs) - set(names):
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    return options


def main(argv: list[str]) -> int:
    """Run what the command line asks for and print the table."""
    options = _parse(argv)
    try:
        known = versions(options.python)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"--python: {error}; nothing is fetched here")
    if options.consoles:
        options.consoles.mkdir(parents=True, exist_ok=True)
    cases = [
        (client, case)
        for client in CLIENTS
        if client.name in (options.programs or [client.name])
        for case in client.cases
        if case in (options.case or CASES) and (not options.times or (client.timed and case in TIMED))
    ]
    came: dict[tuple[str, str, str], list[Came]] = {}

    def add(client: Client, case: str, launcher: Launcher) -> None:
        key = (client.name, case, launcher.name)
        if all(one.code is not None for one in came.get(key, ())):  # what has hung would again
            one = run(client, case, launcher, options.python, options.limit, options.consoles)
            came.setdefault(key, []).append(one)
            sys.stderr.write(f"{': '.join(key)}: {one}\n")

    rows = [
        (client, case, launcher)
        for client, case in cases
        if not lacking(client, known)
        for launcher in LAUNCHERS
        if launcher.spawn or not client.spawns
    ]
    pool = ThreadPoolExecutor(1 if options.times else options.jobs)
    try:
        for future in [pool.submit(add, *row) for row in rows * (options.rounds if options.times else 1)]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
    facts = ", ".join(f"{name} {version}" for name, version in known.items())
    table = list(times(cases, came)) if options.times else outcomes(cases, came, known)
    where = f"on {len(os.sched_getaffinity(0))} cores"
    if options.times:
        where += f", load {os.getloadavg()[0]:.1f}, {options.rounds} rounds"
    text = f"With {facts}, {where}:\n\n{_shown(table)}\n"
    print(text)
    if options.page:
        put(options.page, "times of clients" if options.times else "clients", text)
    return 0
