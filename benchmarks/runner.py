"""Runs a case: the contenders in turn, A B C A B C …, each time in a fresh interpreter.

Owns the interpreters it starts, and whatever they leave behind. Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import procfs
from benchmarks.case import FLOOR, PHALANX, Case, Sample, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.case import Figures

ROOT = Path(__file__).resolve().parent.parent

_SHOWN = 5
"""Lines of a launcher's standard error that are shown when it failed."""


class RunError(Exception):
    """A contender did not deliver figures."""


class Result(NamedTuple):
    """What a case came to, at one of its sizes (0: it has none).

    ``seen``: contender -> figure -> the values of each measured round.
    ``notes`` and ``errors``: contender -> text. ``took``: contender -> the seconds of all its rounds.
    """

    case: Case
    rounds: int
    seen: dict[str, dict[str, list[list[float]]]]
    notes: dict[str, tuple[str, ...]]
    errors: dict[str, str]
    size: int = 0
    took: Mapping[str, float] = MappingProxyType({})

    @property
    def figures(self) -> Figures:
        """Contender -> figure -> every value seen in the measured rounds; nothing of one that failed in any of them."""
        return {
            contender: {figure: [value for values in rounds for value in values] for figure, rounds in figures.items()}
            for contender, figures in self.seen.items()
            if contender not in self.errors
        }

    def verdicts(self) -> list[Verdict]:
        """Judge every target of the case at this size."""
        return self.case.judge(self.figures, self.size)

    def missed(self, *, unmeasured: bool = False) -> bool:
        """Tell whether a target was missed, or Phalanx failed to deliver; if asked, whether one was not measured."""
        misses = (False, None) if unmeasured else (False,)
        return PHALANX in self.errors or any(verdict.met in misses for verdict in self.verdicts())

    def only_counts(self) -> Result:
        """Return the same with those targets alone that are counts: no time is judged."""
        targets = tuple(target for target in self.case.targets if target.is_count)
        return self._replace(case=self.case._replace(targets=targets))


def run_case(case: Case, interpreters: Mapping[str, str], rounds: int | None = None, size: int = 0) -> Result:
    """Run a case, in as many rounds as it asks for or as are given here; one with sizes at one of them.

    ``interpreters`` maps the contenders that take part to their Python. One that fails once is left out from then on.
    """
    rounds = rounds or case.rounds
    took: dict[str, float] = {}
    result = Result(case, rounds, {}, {}, {}, size, took)
    what = f"{case.name} of {size}" if size else case.name
    for turn in range(-1 if case.warm_up else 0, rounds):
        for contender in case.contenders:
            turns = rounds if contender in (PHALANX, FLOOR) else min(rounds, case.peer_rounds)
            whose = case.interpreter or contender
            absent = not {contender, whose} <= interpreters.keys()
            if absent or contender in result.errors or turn >= turns:
                continue
            sys.stderr.write(f"{what}: {f'round {turn + 1}/{rounds}' if turn >= 0 else 'warm-up'}: {contender}\n")
            began = time.monotonic()
            try:
                sample = run_contender(case, contender, interpreters[whose], size)
            except RunError as error:
                result.errors[contender] = str(error)
                continue
            finally:
                took[contender] = took.get(contender, 0.0) + time.monotonic() - began
            if turn >= 0:
                result.notes[contender] = sample.notes
                for figure, values in sample.figures.items():
                    result.seen.setdefault(contender, {}).setdefault(figure, []).append(values)
    return result


def run_contender(case: Case, contender: str, python: str, size: int = 0, tree: Path = ROOT) -> Sample:
    """Run one contender once, within ``case.limit`` seconds; raise ``RunError`` when it fails.

    Whatever it leaves behind is killed, and noted; of Phalanx it is a failure. Its output goes to files and not to
    pipes: a worker that outlives it would hold a pipe open. ``tree``: of which checkout the library is.
    """
    mark = uuid.uuid4().hex
    command = command_of(case, contender, python, size)
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        try:
            with out.open("wb") as stdout, err.open("wb") as stderr:
                env = environment(mark, folder, tree)
                code = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    timeout=case.limit,
                    check=False,
                ).returncode
        except subprocess.TimeoutExpired:
            raise RunError(f"not done after {case.limit:g} s") from None
        finally:
            left = procfs.sweep(mark)
        if code:
            raise RunError(f"exit code {code}: {_why(err.read_text(errors='replace'))}")
        found = json.loads(out.read_text(errors="replace").splitlines()[-1])
    if not left:
        return Sample(found["figures"], tuple(found["notes"]))
    if contender == PHALANX:
        raise RunError(f"left {left} processes behind")
    return Sample(found["figures"], (*found["notes"], f"left {left} processes behind"))


def _why(stderr: str) -> str:
    """Return the error that ended a contender, and what the launcher that it measures had printed before that."""
    before, _, raised = f"\n{stderr}".rpartition("\nTraceback (most recent call last):\n")
    error = (raised.strip().splitlines() or ["it said nothing"])[-1]
    return " / ".join([error, *(line.strip() for line in before.splitlines()[-_SHOWN:] if line.strip())])


def command_of(case: Case, contender: str, python: str, size: int = 0) -> list[str]:
    """Return the command that measures one contender once, see `benchmarks.contender`."""
    return [python, "-m", "benchmarks.contender", case.name, contender, *([str(size)] if size else [])]


def environment(mark: str, folder: str, tree: Path = ROOT) -> dict[str, str]:
    """Return the environment of what is measured.

    The checkout comes first on the path; byte code may be kept, else each import would compile anew; and temporary
    files go where they are removed.
    """
    path = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": folder, procfs.MARK: mark}
