"""Which streams the options of lines reach: those that go through files. Owns what is said of others, and refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from phalanx._base.rank_ranges import name_ranks
from phalanx.multiprocessing import ConsoleSpecs, Std, to_map

BOUNDS = {
    "max_size": "--log-max-size", "keep": "--log-keep", "compress": "--log-compress", "mode": "--log-mode",
    "keep_attempts": "--keep-attempts", "keep_runs": "--keep-runs",
}  # fmt: skip
"""What is said of log files, and the options that say it."""

_NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}


def check_streams(
    nproc: int,
    redirects: Std | Mapping[int, Std],
    tee: Std | Mapping[int, Std],
    shown: set[int] | None,
    console: ConsoleSpecs,
    filters: Mapping[str, list[str] | None],
) -> list[str]:
    """What is to be said of options that a stream does not heed, because it is the launcher's own and in no file.

    ``shown`` are the local ranks that the console shows (None: all), and ``filters`` by stream the texts that select
    lines for the file of all ranks. Raises UsageError where an option would have no effect at all, or where lines of
    JSON would be mixed with others.
    """
    redirected, teed = to_map(redirects, nproc), to_map(tee, nproc)
    notes = []
    for stream, name in _NAMES.items():
        bare = [rank for rank in range(nproc) if not stream & (redirected[rank] | teed[rank])]
        on_console = [rank for rank in bare if shown is None or rank in shown]
        if console.format == "json" and stream is Std.OUT and on_console:
            msg = f"--log-format json: {name} of {name_ranks(on_console)} would be among it as it is; add -t 1, or -r 1"
            raise click.UsageError(msg)
        unheeded = list(_chosen(console)) if on_console else []
        if unheeded:
            notes.append(
                f"{name} of {name_ranks(on_console)} is the console's own and does not heed {', '.join(unheeded)}; "
                f"with -t {stream.value} it would"
            )
        if not filters.get(name) or not bare:
            continue
        option = f"--duplicate-{name}-filters"
        text = f"{name} of {name_ranks(bare)} goes to no file; add -t {stream.value}, or -r {stream.value}"
        if len(bare) == nproc:
            msg = f"{option}: {text}"
            raise click.UsageError(msg)
        notes.append(f"{option}: {text}")
    return notes


def check_no_logs(console: ConsoleSpecs, filters: Mapping[str, list[str] | None], bounds: Mapping[str, object]) -> None:
    """Refuse options that need the logs, where none are kept. Raises UsageError."""
    options = list(_chosen(console))
    options += [f"--duplicate-{name}-filters" for name, texts in filters.items() if texts]
    options += [BOUNDS[name] for name, value in bounds.items() if value]
    if options:
        msg = f"--log-dir /dev/null: no logs are kept; {', '.join(options)} would have nothing to be about"
        raise click.UsageError(msg)


def _chosen(console: ConsoleSpecs) -> Iterator[str]:
    """The options of lines that have been given."""
    if console.ranks is not None:
        yield "--ranks"
    if console.grep:
        yield "--grep"
    if console.exclude:
        yield "--exclude"
    if console.fold:
        yield "--fold"
    if console.timestamps:
        yield "--timestamps" if console.timestamps == "iso" else "--elapsed"
    if console.format == "json":
        yield "--log-format json"
    if console.template is not None:
        yield "--log-line-prefix-template"
