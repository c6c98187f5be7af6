"""The files that a run is made into: the page, a trace for Perfetto, and an archive of the page and the logs.

Owns what is in an archive, and how much. A page is written by whoever has asked for it: `phalanx report`, or the end of
a run.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from phalanx._base import disk, files
from phalanx._base.secrets import shown_arguments
from phalanx._base.text import format_size, how_many
from phalanx._base.threads import SerialExecutor
from phalanx._page.facts import Facts, gather
from phalanx._page.page import render
from phalanx._runs.catalog import RunDir, look
from phalanx._runs.record import CONFIG, FILE, to_object, write_file

PAGE = "report.html"
"""The name of the page in a run's folder;"""

BUNDLE = "report.tar.gz"
"""that of the archive;"""

TRACE = "trace.json"
"""and that of the trace."""

PATIENCE = 5.0
"""Seconds that the end of a run waits for its page: of 256 ranks, it takes about one."""

MOST_BUNDLED = 256 << 20
"""Bytes of files in an archive, before they are compressed."""

MOST_MARKED = 64
"""Ranks of one moment that a trace marks one by one; a moment of more is one of the run."""

_LEFT_OUT = "LEFT_OUT.txt"
_NOT_BUNDLED = (PAGE, BUNDLE, TRACE, FILE, CONFIG)  # made anew, or with the command line, which may hold secrets
_LOGS = (".log", ".gz")


def make_page(found: RunDir) -> bytes:
    """Return the page of a run."""
    return render(gather(found)).encode("utf-8", "backslashreplace")


def write_page(found: RunDir) -> str:
    """Write the page of a run into its folder, in one step. Returns its path. Raises OSError."""
    return write_beside(found, PAGE, make_page(found))


def write_beside(found: RunDir, name: str, data: bytes) -> str:
    """Write a file into a run's folder, in one step; a link there is replaced. Returns its path. Raises OSError."""
    write_file(found.path, name, data)
    return os.path.join(found.path, name)


def page_at_end(folder: str) -> str:
    """Write the page of a run that has ended, in `PATIENCE` seconds at most. Returns the line that says where it is.

    Or why there is none; "": the run has no record, for no worker was to be started. Never raises: the exit code of a
    run is not to depend on its page.
    """
    lines: list[str] = []
    if not os.path.lexists(os.path.join(folder, FILE)):
        return ""

    def write() -> None:
        try:
            lines.append(f"page: {write_page(look(folder))}")
        except ImportError as error:
            lines.append(f"the page of the run needs {error.name}, which is not installed")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is one line
            why = disk.in_words(error, folder) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            lines.append(f"the page of the run cannot be written: {why}")

    executor = SerialExecutor("phalanx-page")
    if executor.submit(write) and executor.drain(PATIENCE):
        return lines[0]
    return f"the page of the run was not written within {PATIENCE:g} s; phalanx report --html writes it"


def write_product(path: str, data: bytes) -> None:
    """Write a file in one step; what is no regular file, as /dev/stdout, is written to as it is. Raises OSError."""
    path = files.target(path)
    folder, name = os.path.split(path)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as special:
            special.write(data)
        return
    write_file(folder or os.curdir, name, data)


def make_trace(found: RunDir) -> bytes:
    """Return the timeline of a run as Chrome's trace events, which ui.perfetto.dev and chrome://tracing open.

    A process is the run, a thread is a rank, a slice is its time in an attempt, and each moment is an instant event.
    Format: "Trace Event Format", JSON object format, times in microseconds.
    """
    facts = gather(found, log_bytes=0)
    return json.dumps({"traceEvents": [*_trace(facts)], "displayTimeUnit": "ms"}).encode()


def _trace(facts: Facts) -> Iterator[dict[str, Any]]:
    def at(moment: float) -> int:
        return round((moment - facts.began) * 1e6)

    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{facts.script} ({facts.name})"}}
    yield {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "all ranks"}}
    for rank in sorted({worker.rank for attempt in facts.attempts for worker in attempt.workers}):
        yield {"ph": "M", "pid": 1, "tid": rank + 1, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": 1, "tid": rank + 1, "name": "thread_sort_index", "args": {"sort_index": rank + 1}}
    for attempt in facts.attempts:
        named = {"attempt": attempt.number, "state": attempt.state, "cause": attempt.cause}
        yield {
            "ph": "X", "pid": 1, "tid": 0, "cat": "attempt", "name": f"attempt {attempt.number}",
            "ts": at(attempt.started), "dur": max(0, at(attempt.ended) - at(attempt.started)), "args": named,
        }  # fmt: skip
        for worker in attempt.workers:
            started = attempt.started if worker.started is None else worker.started
            ended = attempt.ended if worker.ended is None else worker.ended
            yield {
                "ph": "X", "pid": 1, "tid": worker.rank + 1, "cat": worker.state,
                "name": f"attempt {attempt.number}: {worker.state}", "ts": at(started),
                "dur": max(0, at(ended) - at(started)), "args": {"pid": worker.pid, "exit": worker.how},
            }  # fmt: skip
    for mark in facts.history.marks:
        is_of_ranks = 0 < len(mark.ranks) <= MOST_MARKED
        for rank in mark.ranks if is_of_ranks else (-1,):
            scope = "t" if is_of_ranks else "p"
            yield {
                "ph": "i", "s": scope, "pid": 1, "tid": rank + 1, "cat": mark.kind, "name": mark.text,
                "ts": at(mark.time), "args": {"attempt": mark.attempt},
            }  # fmt: skip


def make_bundle(found: RunDir, target: io.BufferedIOBase, warn: Callable[[str], object] = lambda _: None) -> None:
    """Write an archive (tar, gzip) of the page and of the files in a run's folder. Raises OSError.

    Args:
        found: The run.
        target: Where to.
        warn: Called with a line, if files were left out; the archive names each.
    """
    left, skipped = MOST_BUNDLED, []
    top = found.name or "run"
    with tarfile.open(fileobj=target, mode="w|gz", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, f"{top}/{PAGE}", make_page(found))
        if found.run is not None:
            run = found.run.replace(
                **{name: shown_arguments(getattr(found.run, name)) for name in ("argv", "command", "environ")}
            )
            _add(archive, f"{top}/{FILE}", json.dumps(to_object(run)).encode())
        for path in _bundled(found.path):
            name = os.path.relpath(path, found.path)
            try:
                data = b"" if os.path.getsize(path) > left else files.read(path, left, links=files.OWN_LINKS)
            except OSError as error:
                skipped.append(f"{name}: {error.strerror or error}")
                continue
            if not data and os.path.getsize(path):
                skipped.append(f"{name}: an archive has {format_size(MOST_BUNDLED)} of files at the most")
                continue
            left -= len(data)
            _add(archive, f"{top}/{name}", data, path)
        if skipped:
            text = "".join(f"{line}\n" for line in skipped).encode("utf-8", "backslashreplace")
            _add(archive, f"{top}/{_LEFT_OUT}", text)
            warn(f"{how_many(len(skipped), 'file')} left out, see {_LEFT_OUT} in the archive: {skipped[0]}")


def _add(archive: tarfile.TarFile, name: str, data: bytes, path: str = "") -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), int(time.time()), 0o644
    if path:
        with suppress(OSError):
            info.mtime = int(os.stat(path).st_mtime)
    archive.addfile(info, io.BytesIO(data))


def _bundled(folder: str) -> list[str]:
    """Return the files of a run: first what is not a log, then the logs, those of the last attempt first."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        found += [os.path.join(parent, name) for name in names if not name.startswith(".") and name not in _NOT_BUNDLED]
    found = [path for path in found if os.path.isfile(path)]
    return sorted(found, key=_order)


def _order(path: str) -> tuple[bool, int, str]:
    is_log = path.endswith(_LOGS) or ".log." in os.path.basename(path)
    parts = [part for part in path.split(os.sep) if part.startswith("attempt_")]
    number = parts[-1].removeprefix("attempt_") if parts else "0"
    return is_log, -int(number) if number.isdecimal() else 0, path
