"""``phalanx runs``: the runs that there are, newest first; ``phalanx rerun``: one of them once more.

Owns the table, for people, for pipes and as JSON. What a run is, and what its state is by now, `_runs` says. Rich is
loaded when there is a terminal to draw on. A run is started again with the options that it had: its `job.toml`, read by
``phalanx run``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from phalanx._base import clock, files
from phalanx._base.clock import format_duration
from phalanx._base.stderr import say
from phalanx._base.text import format_size, how_many, parse_duration, parse_size
from phalanx._base.tty import escape_json, printable, use_colour
from phalanx._run.config import MANY
from phalanx._runs.catalog import RunDir, find, look
from phalanx._runs.record import CONFIG, is_here
from phalanx.cli._commands import SETTINGS, Command, Group, meant
from phalanx.cli._declare import ignore_environment, reading
from phalanx.cli._options import LOG_DIR, Whole, places, resolved, run_argument

_HEADS = ("RUN", "STATE", "STARTED", "TIME", "RANKS", "EXIT", "PID", "ATTEMPT", "STEP", "COMMAND", "CAUSE")
_RIGHT = ("TIME", "RANKS", "EXIT", "PID", "ATTEMPT", "STEP", "AGE", "SIZE")  # numbers
_SAY_NOTHING = {"PID": {"-"}, "ATTEMPT": {"-", "0"}, "STEP": {"-"}}  # columns that a terminal has not if they say that
_SPARED = ("STARTED", "ATTEMPT", "PID", "STEP")  # columns that a terminal that is too narrow has not, in this order
_ASKED = 16  # launchers that are asked for their steps, at most
_ANSWER_WITHIN = 0.2  # seconds
_ELSEWHERE = {"rm": "prune", "remove": "prune", "delete": "prune", "clean": "prune", "gc": "prune"}
_COLOURS = {
    "running": "cyan",
    "succeeded": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "lost": "bold magenta",
    "unreadable": "magenta",
    "unknown": "dim",
}


def _states(text: str) -> set[str]:
    states = {part.strip() for part in text.split(",")}
    unknown = states - _COLOURS.keys()
    if unknown:
        hint = meant(min(unknown), _COLOURS) or f"; there are {', '.join(_COLOURS)}"
        raise ValueError(f"{text!r}: there is no state {min(unknown)!r}{hint}")
    return states


def _with_unit(read: Callable[[str], Any], like: str) -> Callable[[str], Any]:
    """What goes for ever is no place to guess: somebody who says 30 may mean seconds, or days."""

    def check(text: str) -> Any:
        value = read(text)
        if value and text.strip()[-1].isdecimal():
            raise ValueError(f"{text!r}: of what? Give a unit, like {text.strip()}{like}")
        return value

    return check


class _Runs(Group):
    """The list, which people take for a command, and what is below it."""

    def hint(self, ctx: click.Context, name: str) -> str:
        """See `Group`."""
        if name in _COLOURS:
            return f"; did you mean '--state {name}'?"
        known = name in self.elsewhere or meant(name, self.list_commands(ctx))
        return super().hint(ctx, name) if known else "; phalanx runs lists all, phalanx logs RUN shows one"


_MOST_SCRIPT = 30  # columns that a script's name is given room for
_LEAST_NAME = 15  # columns of a run's name: date and time

_LARGE = 10 << 30
"""Bytes of which a person is told, for which so many files are looked at, and no more:"""

_LOOKED_AT = 20_000


@click.group(cls=_Runs, context_settings=SETTINGS, invoke_without_command=True, elsewhere=_ELSEWHERE)
@click.option("--log-dir", **LOG_DIR)
@click.option("-n", "--number", "--limit", type=Whole(min=1), metavar="N",
              help="No more than N runs, the newest.")  # fmt: skip
@click.option("--state", "states", callback=reading(_states), metavar="STATE,...",
              help="Only runs in one of these states, like failed,lost.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One line of JSON for each run.")
@click.pass_context
def runs(
    ctx: click.Context, log_dir: str | None, number: int | None, states: set[str] | None, *, as_json: bool
) -> None:
    """List the runs, newest first.

    A run is running, succeeded, failed, stopped (by a signal to the launcher), or lost: its launcher was killed.
    Unknown is one without a run.json, unreadable one with a damaged file.
    """
    if ctx.invoked_subcommand is not None:
        for param in ctx.command.params:
            if param.name != "log_dir" and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
                msg = f"{param.opts[-1]} is for the list alone, not for {ctx.invoked_subcommand}"
                raise click.UsageError(msg)
        return
    where = places(log_dir)
    there = find(where)
    found = [run for run in there if states is None or run.state in states][:number]
    try:
        nothing = f"no {'such ' * (states is not None)}runs in {' or '.join(where)}"
        _show(found, nothing, [run.name for run in there], as_json=as_json)
        if found and not as_json and sys.stdout is not None and sys.stdout.isatty():
            _hint(there)
    except BrokenPipeError:  # | head
        raise
    except OSError as error:
        raise click.ClickException(f"stdout: {error.strerror}") from None


@runs.command(cls=Command, context_settings=SETTINGS)
@click.option("--older", callback=reading(_with_unit(parse_duration, "d")), metavar="TIME",
              help="Runs in which nothing has changed for so long: 12h, 30d, 8w.")  # fmt: skip
@click.option("--keep", type=Whole(min=0), metavar="N", help="All but the newest N.")
@click.option("--larger", callback=reading(_with_unit(parse_size, "GiB")), metavar="SIZE",
              help="The oldest, until the rest takes no more than that: 500MB, 10GiB.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--log-dir", **{**LOG_DIR, "envvar": None})  # what the environment says, `runs` has read
@click.pass_context
def prune(
    ctx: click.Context, *, older: float | None, keep: int | None, larger: int | None, dry_run: bool, yes: bool,
    log_dir: str | None,
) -> None:  # fmt: skip
    """Remove old runs, and say before what would be freed.

    \b
    phalanx runs prune --older 30d
    phalanx runs prune --keep 50 --yes
    phalanx runs prune --larger 10GiB --dry-run

    With several rules, a run goes that any of them names. Runs that still run are not removed, nobody else's are, and
    no folder without a run.json. --older also removes the temporary folders (/tmp/phalanx_*) that ended programs of
    yours have left, unless --log-dir is given. Where there is no terminal to ask at, give --yes.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    import tempfile

    from phalanx._runs.prune import choose, find_temporary, half_removed, measure, remove

    if older is None and keep is None and larger is None:
        raise click.UsageError("which runs? Give --older, --keep or --larger")
    assert ctx.parent is not None
    where = places(log_dir or ctx.parent.params["log_dir"])
    stored = [measure(run) for run in find(where)]
    chosen = choose(stored, time.time(), older=older, keep=keep, larger=larger)
    taken = sum(it.size for it in stored)
    is_elsewhere = log_dir or ctx.parent.get_parameter_source("log_dir") is ParameterSource.COMMANDLINE
    if older is not None and not is_elsewhere:
        temporary = choose(find_temporary(tempfile.gettempdir()), time.time(), older=older)
        where = (*where, tempfile.gettempdir())
        chosen, stored, taken = [*temporary, *chosen], [*temporary, *stored], taken + sum(it.size for it in temporary)
    begun, freed = half_removed(where), sum(it.size for it in chosen)
    if not chosen and not begun:
        there = printable(" or ".join(where))
        click.echo(f"nothing to remove: {how_many(len(stored), 'run')}, {format_size(taken)}, in {there}")
        return
    now = time.time()
    rows = [("RUN", "STATE", "AGE", "SIZE")]
    rows += [
        (printable(it.run.name), it.run.state, format_duration(now - it.changed), format_size(it.size)) for it in chosen
    ]
    for cells in _cells(rows) if chosen else ():
        click.echo("  ".join(cells).rstrip())
    rest = f"kept: {how_many(len(stored) - len(chosen), 'run')}, {format_size(taken - freed)}"
    click.echo(f"to be removed: {how_many(len(chosen), 'run')}, {format_size(freed)}; {rest}")
    if begun:
        click.echo(f"and what is left of {how_many(len(begun), 'run')} whose removal was interrupted")
    if dry_run:
        return
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise click.ClickException("nothing was removed: there is no terminal to ask at; give --yes")
        click.confirm("Remove them?", abort=True)
    number, freed, failed = remove(begun, chosen)
    click.echo(f"removed {how_many(number, 'run')}, {format_size(freed)}")
    if failed:
        raise click.ClickException("\n".join(["could not be removed:", *map(printable, failed)]))


def _hint(found: list[RunDir]) -> None:
    """Say to a person that much is kept, if that is so."""
    from phalanx._runs.prune import total

    taken, is_all = total(found, _LOOKED_AT)
    if taken >= _LARGE or len(found) > MANY:
        more = "" if is_all else " or more"
        click.echo(
            f"{how_many(len(found), 'run')}, {format_size(taken)}{more}; phalanx runs prune removes old ones",
            err=True,
        )


def _show(found: list[RunDir], nothing: str, names: list[str], *, as_json: bool) -> None:
    if as_json:
        for run in found:
            click.echo(escape_json(look(run.path).to_json()))
    elif not found:
        click.echo(printable(nothing))
    elif sys.stdout is not None and sys.stdout.isatty():
        _draw(found, names)
    else:
        now = time.time()
        colour = use_colour(sys.stdout)
        steps = _steps(found)
        for cells in _cells([_HEADS, *(_row(run, now, "%Y-%m-%dT%H:%M:%S", steps) for run in found)]):
            if colour:
                cells[1] = _painted(cells[1].rstrip(), cells[1])
            click.echo("  ".join(cells).rstrip(), color=colour)


def _cells(rows: Sequence[tuple[str, ...]]) -> Iterator[list[str]]:
    """Yield the cells of each row of a table, as wide as their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ([_pad(*cell) for cell in zip(rows[0], row, widths, strict=True)] for row in rows)


def _steps(found: list[RunDir]) -> dict[str, int]:
    """Ask the launchers of the newest live runs for their highest steps. Returns what they answer soon, by folder."""
    may_ask = os.geteuid() == files.ROOT
    live = [run for run in found if run.state == "running" and run.run is not None and is_here(run.run)]
    live = [run for run in live if run.is_ours or may_ask][:_ASKED]
    if not live:
        return {}
    from phalanx._base.threads import SerialExecutor
    from phalanx._run.attached import AttachedRun

    steps: dict[str, int] = {}

    def ask(run: RunDir) -> None:
        with contextlib.suppress(RuntimeError):
            known = [rank["step"] for node in AttachedRun(run).status() for rank in node["ranks"]]
            steps.update({run.path: max(known)} if known and None not in known else {})

    executors = [SerialExecutor("phalanx-asking") for _ in live]
    for executor, run in zip(executors, live, strict=True):
        executor.submit(functools.partial(ask, run))
    until = clock.now() + _ANSWER_WITHIN
    for executor in executors:
        executor.drain(max(0.0, until - clock.now()))
    return steps.copy()


def _row(run: RunDir, now: float, moment: str, steps: Mapping[str, int]) -> tuple[str, ...]:
    """What the columns say of a run: never a tab or a line's end, never empty but for the last two."""
    record = run.run
    if record is None:
        return printable(run.name), run.state, _moment(run.started, moment), *["-"] * 7, printable(run.problem)
    lives = run.state == "running"
    ended = now if lives else record.ended
    last = record.attempts[-1] if record.attempts else None
    step = steps.get(run.path, None if last is None else last.step)
    return (
        printable(run.name),
        run.state,
        _moment(record.started, moment),
        "-" if ended is None else format_duration(ended - record.started),
        str(record.nprocs),
        "-" if record.exit_code is None else str(record.exit_code),
        str(record.pid) if lives else "-",
        "-" if last is None else str(last.number),
        "-" if step is None else str(step),
        printable(shlex.join(record.command)),
        printable(record.cause),
    )


def _draw(found: list[RunDir], names: list[str]) -> None:
    """Draw the table on a terminal: what is too wide is cut; names of runs first, to beginnings that no other has."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    colour = use_colour(sys.stdout)
    console = Console(highlight=False, no_color=not colour, color_system="standard" if colour else None)
    overflow = "ellipsis" if console.encoding.startswith("utf") else "crop"

    def show(text: Text) -> None:
        text.truncate(console.width, overflow=overflow)  # type: ignore[arg-type]  # rich wants a literal
        console.print(text, no_wrap=True, crop=False, overflow="ignore")

    now = time.time()
    steps = _steps(found)
    rows = [_HEADS, *(_row(run, now, _recent(run.started, now), steps) for run in found)]
    rows, causes = [row[:-1] for row in rows], [row[-1] for row in rows]
    commands = list(map(_command, found))
    wanted = min(max(columns for _command, columns in commands), _MOST_SCRIPT)
    for head, nothing in _SAY_NOTHING.items():
        at = rows[0].index(head)
        if nothing.issuperset(row[at] for row in rows[1:]):
            rows = _without(rows, at)
    short = _beginnings(names)
    shortened = [rows[0], *((printable(short[run.name]), *row[1:]) for run, row in zip(found, rows[1:], strict=True))]
    tables = [rows, shortened]
    for head in _SPARED:
        if head in rows[0]:
            tables.append(_without(tables[-1], tables[-1][0].index(head)))
    table = next((table for table in tables if _before_last(table) + wanted <= console.width), tables[-1])
    widths, before = _widths(table), _before_last(table)
    for row, cause, (command, _columns) in zip(table, causes, [("", 0), *commands], strict=True):
        if command and before + cell_len(row[-1]) > console.width:
            row = (*row[:-1], command)  # noqa: PLW2901 - it is cut, so the folder of the script goes first
        line = Text()
        for head, cell, width in zip(table[0], row, widths, strict=True):
            style = "bold" if row[0] == _HEADS[0] else _COLOURS.get(cell, "") if head == "STATE" else ""
            line.append(_pad(head, cell, width - cell_len(cell) + len(cell)), style if colour else "")
            line.append("  ")
        line.rstrip()
        show(line)
        if cause and row is not table[0]:
            show(Text(f"  {cause}", "dim" if colour else ""))


def _without(table: list[tuple[str, ...]], column: int) -> list[tuple[str, ...]]:
    return [row[:column] + row[column + 1 :] for row in table]


def _widths(table: list[tuple[str, ...]]) -> list[int]:
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(*table, strict=True)]


def _before_last(table: list[tuple[str, ...]]) -> int:
    """How many columns of a terminal stand before the last column of a table."""
    return sum(width + 2 for width in _widths(table)[:-1])


def _command(run: RunDir) -> tuple[str, int]:
    """The command of a run without its script's folder, and how many columns the script's name takes of it."""
    from rich.cells import cell_len

    words = [] if run.run is None else list(run.run.command)
    if words and words[0] != "-m":
        words[0] = os.path.basename(words[0]) or words[0]
    name = words[: 2 if words[:1] == ["-m"] else 1]
    return printable(shlex.join(words)), cell_len(printable(shlex.join(name)))


def _beginnings(names: list[str]) -> dict[str, str]:
    """By the name of each run the beginning that no other has, by which `phalanx logs` finds it.

    >>> _beginnings(["20260101-101010_aaaa", "b", "20260101-101010_abcd", "20260101-101011_aaaa"]).values()
    dict_values(['20260101-101010_aa', '20260101-101010_ab', '20260101-101011', 'b'])
    """
    ordered = sorted(names)
    alike = [
        sum(1 for _ in itertools.takewhile(lambda letters: letters[0] == letters[1], zip(*pair, strict=False)))
        for pair in itertools.pairwise(ordered)
    ]
    return {
        name: name[: max(left + 1, right + 1, _LEAST_NAME)]
        for name, left, right in zip(ordered, [0, *alike], [*alike, 0], strict=True)
    }


def _pad(head: str, cell: str, width: int) -> str:
    return cell.rjust(width) if head in _RIGHT else cell.ljust(width)


def _painted(state: str, cell: str) -> str:
    *bold, colour = _COLOURS.get(state, "").split(" ")
    return click.style(cell, colour, bold="bold" in bold) if colour else cell


def _recent(moment: float, now: float) -> str:
    """The form in which a person reads a moment at a glance."""
    if _moment(moment, "%Y%j") == _moment(now, "%Y%j"):
        return "%H:%M:%S"
    return "%b %d %H:%M" if _moment(moment, "%Y") == _moment(now, "%Y") else "%Y-%m-%d"


def _moment(moment: float, form: str) -> str:
    """A moment in local time."""
    try:
        return time.strftime(form, time.localtime(moment))
    except (OverflowError, ValueError, OSError):  # a file system's idea of a date
        return "-"


@click.command(cls=Command, context_settings=SETTINGS)
@run_argument()
@click.option("--here", is_flag=True, help="In the current folder, though the run was started in another one.")
@click.pass_context
def rerun(ctx: click.Context, run: str | None, *, log_dir: str | None, here: bool) -> None:
    """Start RUN again, with the same script, arguments and options.

    \b
    phalanx rerun                        the latest run
    phalanx rerun 20261120-1030

    It is phalanx run -f with the job.toml in the run's folder; environment variables set no option. Secrets are not in
    that file: they are taken from the environment, and nothing starts if one is not there. RUN is as for phalanx logs.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    found = resolved(log_dir, run)
    path = os.path.join(found.path, CONFIG)
    if not found.is_ours:
        msg = f"{found.name} belongs to uid {found.owner}: look at {path} before you run it, by phalanx run -f"
        raise click.ClickException(msg)
    if found.state == "running":
        raise click.ClickException(f"{found.name} still runs; a second one beside it: phalanx run -f {path}")
    _check_file(found, path)
    if not here:
        _check_folder(found)
    command = [] if found.run is None else found.run.argv or found.run.command
    ignore_environment(ctx)
    from phalanx.cli.run import run as command_run

    with command_run.make_context("run", ["-f", path], parent=ctx.parent) as inner:
        say(f"{found.name} again: {shlex.join(command)}" if command else f"{found.name} again")
        command_run.invoke(inner)


def _check_file(found: RunDir, path: str) -> None:
    """Refuse a run that has no job file, or another user's. Raises ClickException."""
    try:
        files.read(path, 1, owners={os.geteuid(), files.ROOT})
    except FileNotFoundError:
        msg = (
            f"{found.name} has no {CONFIG}: phalanx run has not started it, or an older version has, or with arguments "
            "that are not UTF-8, or the file could not be written"
        )
        raise click.ClickException(msg) from None


def _check_folder(found: RunDir) -> None:
    """Refuse another current folder than the run's. Raises ClickException."""
    was = "" if found.run is None else found.run.cwd
    try:
        is_same = bool(was) and os.path.samefile(was, os.curdir)
    except OSError:
        is_same = False
    if not is_same:
        where = f"was started in {was}" if was else "does not say in which folder it was started"
        msg = f"{found.name} {where}: go there, or give --here to start it in the current folder"
        raise click.ClickException(msg)
