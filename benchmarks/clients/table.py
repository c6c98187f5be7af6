"""``python -m benchmarks clients [PROGRAM...]``: run the clients, and print what came of each as a table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.case import TORCH
from benchmarks.clients.runs import CASES, CLIENTS, LAUNCHERS, Came, Client, run
from benchmarks.runner import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BEGIN, END = "<!-- clients -->", "<!-- end of the clients -->"

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


def lines(
    cases: Sequence[tuple[Client, str]], came: Mapping[tuple[str, str, str], Came], known: Mapping[str, str]
) -> str:
    """Return the table, with the versions above it."""
    facts = ", ".join(f"{name} {version}" for name, version in known.items())
    heads = ("program", "case", *(launcher.name for launcher in LAUNCHERS))
    rows = [heads, ("---",) * len(heads)]
    for client, case in cases:
        if lacks := lacking(client, known):
            cells = (f"not run: {lacks} is not installed", *("-" for _ in LAUNCHERS))
        else:
            cells = (CASES[case], *(str(came.get((client.name, case, each.name), "-")) for each in LAUNCHERS))
        rows.append((f"`{client.name}`", *cells))
    table = "\n".join(f"| {' | '.join(row)} |" for row in dict.fromkeys(rows))
    return f"With {facts}, on {len(os.sched_getaffinity(0))} cores:\n\n{table}\n"


def _parse(argv: list[str]) -> argparse.Namespace:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks clients", description="Clients and their faults, under torchrun and under Phalanx."
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be given again (default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many runs at a time (default: 1)")
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
        if case in (options.case or CASES)
    ]
    came: dict[tuple[str, str, str], Came] = {}
    pool = ThreadPoolExecutor(options.jobs)
    try:
        running = {
            (client.name, case, launcher.name): pool.submit(
                run, client, case, launcher, options.python, consoles=options.consoles
            )
            for client, case in cases
            if not lacking(client, known)
            for launcher in LAUNCHERS
            if launcher.spawn or not client.spawns
        }
        for key, future in running.items():
            came[key] = future.result()
            sys.stderr.write(f"{': '.join(key)}: {came[key]}\n")
    finally:
        pool.shutdown(cancel_futures=True)
    text = lines(cases, came, known)
    print(text)
    if options.page:
        before, rest = options.page.read_text(encoding="utf-8").split(BEGIN)
        after = rest.split(END)[1]
        options.page.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    return 0
