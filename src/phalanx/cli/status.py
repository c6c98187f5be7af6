"""``phalanx status``: a run as it is now, a line for each rank.

Owns also which run is meant, how its launcher is asked, and the table, which ``phalanx top`` draws as well. What an
answer holds is `_run.status`'s business.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import click

from phalanx._base.clock import format_duration
from phalanx._base.text import format_size, how_many
from phalanx._base.tty import escape_json, printable, size, use_colour
from phalanx._runs.catalog import RunDir, look
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._options import live_run, resolved, run_argument

Answer = dict[str, Any]
"""What a launcher has answered."""

NONE = "-"
"""What stands for a figure that is not known."""

BUSY = 5.0
"""Per cent of a CPU from which on a rank counts as busy."""

LATE = 10.0
"""Seconds after which a heartbeat counts as late."""

COLOURS = {
    "busy": "green", "idle": "cyan", "breakpoint": "yellow", "paused": "yellow", "late": "bold magenta",
    "slow": "magenta", "failed": "bold red", "succeeded": "dim", "ended": "dim",
}  # fmt: skip
"""How a rank is coloured, by what `Row.looks` returns."""

_OPTIONAL = ("UPTIME", "CPU%", "MEM", "GPU%", "GPUMEM", "BEAT", "STEP", "STEP/S", "LAST LINE")
"""Columns that are left out if no row says anything there."""

_SPARED = ("UPTIME", "PID")  # columns that are left out, in this order, if else the last lines have less than:
_ROOM = 20
_LEFT = ("HOST", "STATE", "LAST LINE")


class Row(NamedTuple):
    """What is shown of a rank; None: it is not known. ``facts`` is what its launcher has answered of it.

    They have also the number of the ``attempt``, and the pid of the ``launcher``.
    """

    rank: int
    host: str
    state: str
    uptime: float | None
    cpu: float | None
    memory: int | None
    beat: float | None
    step: int | None
    rate: float | None
    slow: float | None
    line: str
    facts: dict[str, Any]

    def looks(self) -> str:
        """Return which of `COLOURS` it has."""
        if self.facts["exitcode"] is not None or self.facts["state"] != "running":
            return {"succeeded": "succeeded", "failed": "failed"}.get(self.facts["state"], "ended")
        if self.state in ("breakpoint", "paused"):
            return self.state
        if self.beat is not None and self.beat >= LATE:
            return "late"
        if self.slow is not None:
            return "slow"
        return "busy" if (self.cpu or 0.0) >= BUSY else "idle"

    def cells(self) -> dict[str, str]:
        """Return the cells of its line, by the heads of the columns."""
        return {
            "RANK": str(self.rank),
            "HOST": printable(self.host),
            "PID": str(self.facts["pid"] or NONE),
            "STATE": self.state if self.slow is None else f"slow {self.slow:.1f}x",
            "UPTIME": _shown(self.uptime, format_duration),
            "CPU%": _shown(self.cpu, "{:.0f}".format),
            "MEM": _shown(self.memory, _size),
            "GPU%": _shown(self.facts.get("gpu"), "{:.0f}".format),
            "GPUMEM": _shown(self.facts.get("gpu_memory"), _size),
            "BEAT": _shown(self.beat, lambda beat: f"{beat:.1f}s" if beat < LATE else format_duration(beat)),
            "STEP": _shown(self.step, str),
            "STEP/S": _shown(self.rate, lambda rate: f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"),  # noqa: PLR2004 - three digits
            "LAST LINE": printable(self.line),
        }  # fmt: skip


def _shown(value: Any, form: Any) -> str:
    return NONE if value is None else form(value)


def _size(size: int) -> str:
    return format_size(size).replace(" ", "").removesuffix("iB")


def rows_of(answer: Answer, before: Answer | None = None) -> list[Row]:
    """Return the ranks of an answer, in their order.

    CPU and steps per second are those since the answer ``before``; without one, or of a rank that it does not have,
    since the rank was started.
    """
    earlier = {
        (node["host"], rank["pid"], rank["started"]): (node["time"], rank)
        for node in ([] if before is None else before["nodes"])
        for rank in node["ranks"]
    }
    rows = []
    slow = {rank: ratio for node in answer["nodes"] for rank, ratio in node.get("slow", {}).items()}
    for node in answer["nodes"]:
        for rank in node["ranks"]:
            then, old = earlier.get((node["host"], rank["pid"], rank["started"]), (rank["started"], {}))
            lives = rank["exitcode"] is None and rank["state"] == "running"
            seconds = node["time"] - then if lives and then else 0.0
            state = _state(rank, paused=node["paused"])
            line = f"at {rank['breakpoint']}" if state == "breakpoint" else rank.get("line") or ""
            cpu = _rate(rank.get("cpu"), old.get("cpu"), seconds)
            rows.append(Row(
                rank["rank"], node["host"], state,
                node["time"] - rank["started"] if lives and rank["started"] else None,
                None if cpu is None else 100 * cpu, rank.get("memory"), rank["beat"] if lives else None, rank["step"],
                _rate(rank["step"], old.get("step"), seconds),
                slow.get(str(rank["rank"])) if state == "running" else None, line,
                rank | {"attempt": node.get("attempt"), "launcher": node.get("pid")},
            ))  # fmt: skip
    return sorted(rows, key=lambda row: row.rank)


def _rate(now: float | None, before: float | None, seconds: float) -> float | None:
    return None if now is None or seconds <= 0 else max(0.0, now - (before or 0)) / seconds


def _state(rank: dict[str, Any], *, paused: bool) -> str:
    """Return the state of a rank in a word, or how it has exited."""
    code = rank["exitcode"]
    if rank["state"] == "failed" and code is not None:
        try:
            return signal.Signals(-code).name if code < 0 else f"exit {code}"
        except ValueError:
            return f"signal {-code}"
    if rank["state"] != "running":
        return str(rank["state"])
    return "breakpoint" if rank["breakpoint"] else "paused" if paused else "running"


def table(rows: Iterable[Row], width: int = 0) -> tuple[list[str], list[list[str]]]:
    """Return the heads of the columns, and the cells of each row, as wide as their columns but for the last.

    ``width``: the columns of a terminal, for which some are left out; 0: there is none.
    """
    cells = [row.cells() for row in rows]
    several = len({row["HOST"] for row in cells}) > 1
    heads = [
        head for head in (cells[0] if cells else ())
        if (several if head == "HOST" else head not in _OPTIONAL or any(row[head] not in ("", NONE) for row in cells))
    ]  # fmt: skip
    widths = {head: max(len(head), *(len(row[head]) for row in cells)) for head in heads}
    for head in _SPARED:
        if heads and width and sum(widths[each] + 2 for each in heads[:-1]) + _ROOM > width:
            heads.remove(head)
    named = dict(zip(heads, heads, strict=True))
    lines = [[_padded(row[head], head, widths[head]) for head in heads] for row in (named, *cells)]
    return lines[0] if lines else [], lines[1:]


def _padded(cell: str, head: str, width: int) -> str:
    if head == "LAST LINE":
        return cell
    return cell.ljust(width) if head in _LEFT else cell.rjust(width)


def heading(found: RunDir, answer: Answer) -> list[str]:
    """Return the lines above the table of a run that goes on."""
    nodes, run = answer["nodes"], found.run
    assert run is not None
    spent = format_duration(time.time() - found.started)
    if not nodes:
        return [printable(f"{found.name}: running for {spent}; no node has answered")]
    first = nodes[0]
    restarts = f", {first['restarts']} of {how_many(first['max_restarts'], 'restart')}" * bool(first["max_restarts"])
    attempt = "" if first["attempt"] is None else f", attempt {first['attempt']}"
    paused = ", paused" * any(node["paused"] for node in nodes)
    count = sum(len(node["ranks"]) for node in nodes)
    hosts = sorted({node["host"] for node in nodes})
    where = ", ".join(hosts[:3]) + f" and {len(hosts) - 3} more" * (len(hosts) > 3)  # noqa: PLR2004 - hosts in a line
    return [
        printable(f"{found.name}: {first['state'].lower()}{paused} for {spent}{attempt}{restarts}"),
        printable(f"{how_many(count, 'rank')} on {where}, launcher {run.pid}: {first['name']}"),  # a path may be cut
    ]


def unanswered(answer: Answer) -> list[str]:
    """Return a line on each node that has not answered."""
    return [printable(f"host {host}: {why}") for host, why in sorted(answer.get("why", {}).items())]


def verdict(found: RunDir) -> list[str]:
    """Return the lines on a run that has ended, or is lost."""
    run = found.run
    assert run is not None
    if found.state == "lost":
        why = f"its launcher, process {run.pid} on {run.host}, was killed, or the machine went down"
        return [printable(f"{found.name}: lost: {why}")]
    code = f" with exit code {run.exit_code}" if run.exit_code else ""
    spent = f" after {format_duration(run.ended - run.started)}" if run.ended is not None else ""
    cause = [run.cause] if run.cause else []
    return [printable(line) for line in (f"{found.name}: {found.state}{code}{spent}", *cause)]


def recorded(found: RunDir) -> Answer:
    """Return what the record of a run says of its latest attempt, as an answer of its launcher."""
    run = found.run
    assert run is not None
    last = run.attempts[-1] if run.attempts else None
    lost = {"state": "lost"} if found.state == "lost" else {}
    ranks = [
        {
            "rank": rank.rank, "local_rank": rank.local_rank, "pid": rank.pid, "state": rank.state,
            "exitcode": rank.exitcode, "started": None, "step": None, "beat": None, "breakpoint": None,
        } | (lost if rank.state == "running" else {})
        for rank in ([] if last is None else last.ranks)
    ]  # fmt: skip
    return {"nodes": [{"host": run.host, "time": 0.0, "paused": False, "ranks": ranks}]}


def show(found: RunDir, answer: Answer | None, before: Answer | None = None, *, ends: bool = False) -> None:
    """Print the table of a run; on a terminal, its lines are cut if they are too wide.

    ``answer``: None if it does not run. ``before``: see `rows_of`. ``ends``: Whether how it has ended is printed below.
    """
    stream = sys.stdout
    width = size(stream.fileno())[0] if stream is not None and stream.isatty() else 0
    colour = use_colour(stream)
    head = [(line, "bold" if not index else "") for index, line in enumerate(verdict(found) if answer is None else [])]
    lines = [(cut(line, width), style) for line, style in _lines(found, answer, before, width)]
    for line, style in [*lines, ("", ""), *head] if ends else [*head, *lines]:
        *bold, name = style.split(" ")
        looks: dict[str, Any] = {"fg": None if name in ("", "bold", "dim") else name, "dim": name == "dim" or None}
        looks = {"bold": True if bold or name == "bold" else None, **looks} if style else {}
        click.secho(line, color=colour, reset=bool(style), **looks)


def _lines(found: RunDir, answer: Answer | None, before: Answer | None, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table, and how each is coloured."""
    if answer is not None:
        yield from ((line, "bold" if not index else "") for index, line in enumerate(heading(found, answer)))
    rows = rows_of(recorded(found) if answer is None else answer, before)
    heads, cells = table(rows, width)
    if cells:
        yield "", ""
        yield "  ".join(heads).rstrip(), "bold"
    for row, line in zip(rows, cells, strict=True):
        yield "  ".join(line).rstrip(), COLOURS[row.looks()]
    if answer is not None:
        yield from ((line, "yellow") for line in unanswered(answer))


def cut(line: str, width: int) -> str:
    """Cut a line to so many columns of a terminal; 0: not at all."""
    if not width or (len(line) <= width and line.isascii()):
        return line
    from rich.cells import set_cell_size

    return set_cell_size(line, width).rstrip()


def find(log_dir: str | None, name: str | None) -> RunDir:
    """Return the run that is meant: by default the latest that runs, or else the latest. Raises ClickException."""
    if name is None:
        with suppress(click.ClickException):  # none runs; or what `resolved` refuses as well
            return live_run(log_dir, None)
    found = resolved(log_dir, name)
    if found.run is None:
        raise click.ClickException(f"{found.name}: {found.problem}")
    return live_run(log_dir, found.path) if found.state == "running" else found


def ask(found: RunDir) -> Answer:
    """Ask the launcher of a run that goes on how it is. Raises NotAnsweredError, RefusedError."""
    from phalanx._run.control_socket import ask_for

    assert found.run is not None
    return ask_for(found.path, found.run, found.owner, "status")


def ask_once(found: RunDir) -> tuple[RunDir, Answer | None]:
    """Ask as `ask` does. Returns the run as it is then, and None if it has ended. Raises ClickException."""
    from phalanx._run.control_socket import NotAnsweredError, RefusedError

    try:
        return found, ask(found)
    except (NotAnsweredError, RefusedError) as error:
        found = look(found.path)
        if found.state == "running" or found.run is None:
            raise click.ClickException(f"{found.name}: {error}") from None
        return found, None


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@run_argument()
def status(run: str | None, *, as_json: bool, log_dir: str | None) -> None:
    """Show how RUN is now: its state, and a line for each rank.

    \b
    phalanx status                       the latest run that runs, or else the latest
    phalanx status 20261120-1030

    CPU% and STEP/S are averages since the rank was started; phalanx top shows those of the last seconds. MEM is the
    memory of the rank and of the processes that it has started; what they share counts once. GPU% and GPUMEM are what
    they use of GPUs, where nvidia-ml-py is installed. BEAT is the time since the last heartbeat. Of a job of many
    machines, the ranks of all are shown.

    Of a run that has ended, it is what its record says. The exit code is 1 if the launcher was killed, or has not
    answered. RUN is as for phalanx logs; another user's can be asked by root alone.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    found = find(log_dir, run)
    answer = None
    if found.state == "running":
        found, answer = ask_once(found)
    if as_json:
        known = json.loads(found.replace(run=None).to_json() if answer else found.to_json())
        click.echo(escape_json(json.dumps(known | (answer or {}), ensure_ascii=False)))
    else:
        show(found, answer)
    if found.state == "lost":
        sys.exit(1)
