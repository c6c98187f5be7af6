"""``phalanx stack``: where the ranks of a live run are, now.

Owns the options, whose process is whose, and what is shown. Asking is `_stacks.collect`'s business; of the ranks of
other machines, `phalanx._run.control_socket`'s.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from phalanx._base.process import Process
from phalanx._base.text import name_ranks
from phalanx._base.tty import printable, use_colour
from phalanx._run.control_socket import NotAnsweredError, RefusedError, ask
from phalanx._runs.catalog import RunDir
from phalanx._runs.record import Rank, Run
from phalanx._stacks.collect import AT_ONCE, Collection
from phalanx._stacks.dump import (
    EXITED,
    NO_STACK,
    alike,
    describe,
    group_equal,
    location,
    parse,
    sum_up_locations,
)
from phalanx._stacks.py_spy import preload
from phalanx._stacks.request import Target, working_process
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._options import Whole, live_run, run_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._rendezvous.stack_report import JobStacks

_PATIENCE = 0.3
"""Seconds that a person waits for the ranks of a look, at the most, and `_EACH` for every rank: py-spy takes 10 ms."""

_EACH = 0.012
_NATIVE_PATIENCE = 15.0  # py-spy reads the symbols of every library first
_STYLES: dict[str, dict[str, Any]] = {
    "heading": {"fg": "cyan", "bold": True},
    "state": {"fg": "yellow"},
    "thread": {"bold": True},
    "library": {"dim": True},
    "text": {},
}


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--rank", "ranks", type=Whole(min=0), multiple=True, metavar="N",
              help="Only this rank; may be given several times.")  # fmt: skip
@click.option("--native", is_flag=True, help="The frames of C code as well; of this machine's ranks alone.")
@click.option("--local", is_flag=True, help="Of a job of many machines, this machine's ranks alone.")
@run_argument(state="running")
def stack(run: str | None, *, ranks: tuple[int, ...], native: bool, local: bool, log_dir: str | None) -> None:
    """Show where the ranks of RUN are now, by their stacks.

    \b
    phalanx stack                        the latest run that runs
    phalanx stack --rank 3               its rank 3 alone
    phalanx stack 20261120-1030 --native

    Those are of all Python threads, the innermost call first. The run goes on unharmed: py-spy reads the memory of each
    rank, which is paused for some milliseconds. Where that is not allowed, a rank is asked by a signal for the stack of
    its main thread, and it is said. RUN is as for phalanx logs; another user's is for root alone, by its name, and is
    only looked at from outside. The exit code is 0 if there was any stack to show.

    Of a job of many machines, the ranks of all are shown, on each of them: their agents are asked. One that does not
    answer within 5 s is named; if they cannot be asked, this machine's ranks are shown, and it is said.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    found = live_run(log_dir, run)
    assert found.run is not None
    if not found.run.attempts or not found.run.attempts[-1].ranks:
        raise click.ClickException(f"{found.name} has no workers yet")
    owner = None if found.is_ours else found.owner
    told = None if local or native else _ask(found, set(ranks))
    if told is None:
        folder = os.path.join(found.path, f"attempt_{found.run.attempts[-1].number}")
        texts = _collect(folder, _ranks(found.run, set(ranks)), native=native, owner=owner)
    else:
        _check_known(set(ranks), told.texts, "run")
        texts = {rank: text for rank, text in told.texts.items() if not ranks or rank in ranks}
    name = name_ranks if told is None else told.ranks.name
    _show(texts, found.run.cwd, name, [] if told is None else told.notes)
    if not any(map(functools.cache(parse), texts.values())):
        sys.exit(1)


def _show(texts: dict[int, str], cwd: str, name: Callable[[Iterable[int]], str], notes: list[str]) -> None:
    """Show where ranks are, which are called what ``name`` returns."""
    colour = use_colour(sys.stdout)
    where = {text: location(text) for text in set(texts.values())}
    summary = sum_up_locations({rank: where[text] for rank, text in texts.items()}, None, name)
    click.secho(printable(summary), color=colour, bold=True)
    for group, text in group_equal(texts, functools.cache(alike)):
        click.echo()
        for kind, line in describe(name(group), text, cwd):
            click.secho(printable(line), color=colour, reset=bool(_STYLES[kind]), **_STYLES[kind])
    if notes:
        click.echo()
    for note in notes:
        click.secho(printable(note), color=colour, fg="yellow")


def _ask(found: RunDir, ranks: set[int]) -> JobStacks | None:
    """Ask for the ranks of the whole job. None: these are all of this machine; or nobody tells, which is said."""
    run = found.run
    assert run is not None
    last = run.attempts[-1]
    if last.nodes < 2 or (ranks and ranks.issubset(rank.rank for rank in last.ranks)):  # noqa: PLR2004 - machines
        return None
    from phalanx._rendezvous.records import DamagedError
    from phalanx._rendezvous.stack_report import JobStacks

    try:
        stacks = JobStacks(ask(found.path, run, found.owner, "stacks"))
    except (NotAnsweredError, RefusedError) as error:
        why = str(error)
    except DamagedError as error:
        why = f"what its agent has answered cannot be read: {error}"
    else:
        if not stacks.why:
            return stacks
        why = stacks.why
    click.echo(printable(f"phalanx: these are the ranks of this machine alone: {why}"), err=True)
    return None


def _check_known(ranks: set[int], known: Iterable[int], what: str) -> None:
    """Raise UsageError for ranks that there are not."""
    unknown = sorted(ranks.difference(known))
    if unknown:
        raise click.UsageError(f"--rank: this {what} has no rank {', '.join(map(str, unknown))}")


def _ranks(run: Run, wanted: set[int]) -> list[Rank]:
    """Return the ranks that are meant, of the latest attempt. Raises UsageError."""
    attempt = run.attempts[-1]
    known = {rank.rank: rank for rank in attempt.ranks}
    _check_known(wanted, known, "machine" if attempt.nodes > 1 else "run")
    return [known[rank] for rank in sorted(known) if not wanted or rank in wanted]


def _collect(folder: str, ranks: list[Rank], *, native: bool, owner: int | None) -> dict[int, str]:
    """Return the stacks of the ranks that live. With an ``owner``, whose run it is, only those of that user's."""
    preload()
    texts: dict[int, str] = {}
    for first in range(0, len(ranks), AT_ONCE):
        texts |= _look(folder, ranks[first : first + AT_ONCE], native=native, owner=owner)
    return texts


def _look(folder: str, ranks: list[Rank], *, native: bool, owner: int | None) -> dict[int, str]:
    """A process is looked at only while it is held by a pidfd, and is the one.

    With an ``owner``, nobody is sent a signal: what the run's files say of that is another user's word.
    """
    texts: dict[int, str] = {}
    with contextlib.ExitStack() as held:
        targets = []
        for rank in ranks:
            try:
                process = _hold(rank, held, owner)
            except ProcessLookupError:
                texts[rank.rank] = EXITED
            except OSError as error:
                texts[rank.rank] = f"{NO_STACK}it could not be asked: {error.strerror}\n"
            else:
                beside = os.path.join(folder, str(rank.local_rank), "error.json")
                error_file = "" if owner is not None else beside
                pid = working_process(rank.pid)
                known = process if pid == rank.pid else None
                targets.append(Target(rank.rank, pid, error_file, native=native, process=known))
        seconds = _NATIVE_PATIENCE if native else _PATIENCE + _EACH * len(targets)
        collection = held.enter_context(Collection(targets, seconds))
        collection.begin()
        collection.wait()
        found = collection.finish()
        return texts | {rank.rank: found[rank.rank] for rank in ranks if rank.rank in found}


def _hold(rank: Rank, held: contextlib.ExitStack, owner: int | None) -> Process:
    """Take hold of a rank's process. Raises ProcessLookupError when it is no more; OSError, also of another owner's."""
    process = held.enter_context(Process(rank.pid, start=rank.pid_started))
    if owner is not None and os.stat(f"/proc/{rank.pid}").st_uid != owner:
        raise PermissionError(errno.EPERM, f"process {rank.pid} is not that of uid {owner}, whose run this is")
    return process
