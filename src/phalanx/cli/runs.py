"""``phalanx runs``: the runs that there are, newest first.

Owns the table, for people, for pipes and as JSON. What a run is, and what its state is by now, `_runs` says. Rich is
loaded when there is a terminal to draw on.
"""

from __future__ import annotations

import errno
import shlex
import sys
import time

import click

from phalanx._core.harmless import escape_json
from phalanx._core.terminal import coloured, printable
from phalanx.cli._command import SETTINGS, Command
from phalanx.cli._place import default_place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.multiprocessing._runs import RunDir

_HEADS = ("RUN", "STATE", "STARTED", "TIME", "RANKS", "EXIT", "COMMAND", "CAUSE")
_RIGHT = ("TIME", "RANKS", "EXIT")  # numbers
_COLOURS = {
    "running": "cyan",
    "succeeded": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "lost": "bold magenta",
    "unreadable": "magenta",
    "unknown": "dim",
}


@click.command(cls=Command, context_settings=SETTINGS)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False),
    envvar=["PHALANX_LOG_DIR", "PET_LOG_DIR"],
    help="Folder of the runs. Default: ~/.local/state/phalanx/runs, as for phalanx run.",
)
@click.option("-n", "--number", type=click.IntRange(min=1), metavar="N", help="No more than N runs, the newest.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON for each run.")
def runs(log_dir: str | None, number: int | None, *, as_json: bool) -> None:
    """List the runs, newest first.

    A run is running, succeeded, failed, stopped (by a signal to the launcher), or lost: its launcher was killed.
    Unknown is one without a run.json, unreadable one with a damaged file.
    """
    from phalanx.multiprocessing._runs import find

    place = log_dir or default_place()
    try:
        found = find(place)[:number]
    except OSError as error:
        msg = f"--log-dir: {error}"
        raise click.ClickException(msg) from None
    try:
        _show(found, place, as_json=as_json)
    except OSError as error:
        if error.errno == errno.EPIPE:  # | head, which is click's to end
            raise
        msg = f"stdout: {error.strerror}"
        raise click.ClickException(msg) from None


def _show(found: list[RunDir], place: str, *, as_json: bool) -> None:
    if as_json:
        from phalanx.multiprocessing._runs import look

        for run in found:
            click.echo(escape_json(look(run.path).to_json()))
    elif not found:
        click.echo(f"no runs in {printable(place)}")
    elif sys.stdout is not None and sys.stdout.isatty():
        _draw(found)
    else:
        now = time.time()
        rows = [_HEADS, *(_row(run, now, "%Y-%m-%dT%H:%M:%S") for run in found)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        colour = coloured(sys.stdout)
        for row in rows:
            cells = [_pad(*cell) for cell in zip(_HEADS, row, widths, strict=True)]
            if colour:
                cells[1] = _painted(row[1], cells[1])
            click.echo("  ".join(cells).rstrip(), color=colour)


def _row(run: RunDir, now: float, moment: str) -> tuple[str, ...]:
    """What the columns say of a run: never a tab or a line's end, never empty but for the last two."""
    record = run.run
    if record is None:
        return printable(run.name), run.state, _moment(run.started, moment), "-", "-", "-", "-", printable(run.problem)
    ended = now if run.state == "running" else record.ended
    return (
        printable(run.name),
        run.state,
        _moment(record.started, moment),
        "-" if ended is None else duration(ended - record.started),
        str(record.nprocs),
        "-" if record.exit_code is None else str(record.exit_code),
        printable(shlex.join(record.command)),
        printable(record.cause),
    )


def _draw(found: list[RunDir]) -> None:
    """The table on a terminal: a cause has a line of its own, below, and what is too wide is cut, not wrapped."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    colour = coloured(sys.stdout)
    console = Console(highlight=False, no_color=not colour, color_system="standard" if colour else None)
    overflow = "ellipsis" if console.encoding.startswith("utf") else "crop"

    def show(text: Text) -> None:
        text.truncate(console.width, overflow=overflow)  # type: ignore[arg-type]  # rich wants a literal
        console.print(text, no_wrap=True, crop=False, overflow="ignore")

    now = time.time()
    rows = [_HEADS, *(_row(run, now, _recent(run.started, now)) for run in found)]
    rows, causes = [row[:-1] for row in rows], [row[-1] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row, cause in zip(rows, causes, strict=True):
        line = Text()
        for head, cell, width in zip(_HEADS, row, widths, strict=False):
            style = "bold" if row[0] == _HEADS[0] else _COLOURS.get(cell, "") if head == "STATE" else ""
            line.append(_pad(head, cell, width - cell_len(cell) + len(cell)), style if colour else "")
            line.append("  ")
        line.rstrip()
        show(line)
        if cause and row is not rows[0]:
            show(Text(f"  {cause}", "dim" if colour else ""))


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


def duration(seconds: float) -> str:
    """A duration in one word.

    >>> duration(2.14), duration(725), duration(3725), duration(273600)
    ('2.1s', '12m05s', '1h02m', '3d04h')
    >>> duration(59.99), duration(-1)
    ('1m00s', '0.0s')
    """
    seconds = max(0.0, seconds)
    whole = round(seconds)
    if round(seconds, 1) < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{seconds:.1f}s"
    for size, unit, below, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // below:02}{part}"
    raise AssertionError
