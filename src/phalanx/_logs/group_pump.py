"""Makes the pump of a group: which log files are followed, and the views in which their lines are shown.

Owns what `ConsoleSpecs` mean on an output of a kind: a terminal, a pipe or a stream object; with prefixes, colours,
filters and dedup.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from phalanx._base import tty
from phalanx._logs import display
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.dedup import Dedup
from phalanx._logs.follower import Follower
from phalanx._logs.layout import LogsDest
from phalanx._logs.lines import Source
from phalanx._logs.prefixes import Prefixes
from phalanx._logs.pump import Pump
from phalanx._logs.render import Json, Text, View
from phalanx._logs.search import Only, readable
from phalanx._logs.sink import Sink
from phalanx._logs.stream import Stream
from phalanx._logs.terminal import PlainOutput, TerminalOutput
from phalanx._logs.timeline import TimelineWriter

_CACHED = 64  # sets of ranks whose shared prefix is kept


def open_view(
    target: Any, console: ConsoleSpecs, prefixes: Prefixes, counts: dict[str, int], *, live: bool = False
) -> tuple[View, bool]:
    """Open a view. Returns it, and whether prefixes are coloured there.

    Args:
        target: A descriptor, or an object with ``write``: see `target_of`.
        console: How the lines are shown.
        prefixes: Makes the prefix of a line that several ranks wrote.
        counts: The number of sources of each stream that the view will have; it may change later.
        live: Whether the lines are shown as they are written. Then equal tracebacks of several ranks are shown once.
    """
    text = console.format == "text"
    fd = target if isinstance(target, int) else None
    kind = TerminalOutput if tty.obeys_controls(fd) else PlainOutput
    # One output for all groups: of two that write to one terminal, each would cut the other's lines and erase its bars.
    # The descriptor is a duplicate: by the time of a write, the host may have closed its own.
    output = display.shared_output(
        identity(target), lambda: kind(Sink(os.dup(target), own=True) if fd is not None else Sink(target))
    )
    colour = text and tty.use_colour(fd, console.color)
    sanitise = not console.raw and tty.is_terminal(target)
    view = View(output, Text() if text else Json(prefixes.host), console.search(), sanitise=sanitise)
    if console.fold or (live and text):
        shared = lru_cache(_CACHED)(partial(prefixes.shared, colour=colour))

        def emit(sources: list[Source], text: bytes) -> None:
            first = sources[0]
            prefix = first.prefix if len(sources) == 1 else shared(frozenset([source.rank for source in sources]))
            prefix = prefix if isinstance(prefix, bytes) else prefix(dedup.time)
            output.write(first, prefix, text[:-1].replace(b"\n", b"\n" + prefix) + b"\n")

        now = lambda: view.time()  # noqa: E731, PLW0108 - `View.replay` replaces `time`
        dedup = Dedup(emit, counts, time=now, by_rank=not console.fold)
        if console.fold:
            view.dedup_lines_with(dedup)
        else:
            view.dedup_tracebacks_with(dedup)
    return view, colour


def target_of(stream: Any) -> Any:
    """Return the descriptor of a stream; or the stream itself, if it has none or is not one of Python's own files.

    A notebook's stdout writes into the cell. The descriptor that it names is the kernel's former stdout.
    """
    try:
        stream.flush()
        fd = stream.fileno()
    except Exception:  # noqa: BLE001 - the host's own object: an error in writing to it is reported then
        return stream
    known = isinstance(stream, (io.TextIOWrapper, io.BufferedIOBase, io.RawIOBase))
    return fd if known and isinstance(fd, int) else stream


def identity(target: Any) -> object:
    """Return what two targets have in common that write to one terminal, one pipe or one file."""
    if not isinstance(target, int):
        return id(target)
    found = os.fstat(target)  # a file that was opened twice counts as one: two writers would overwrite each other
    return found.st_dev, found.st_ino, found.st_rdev


def make_pump(
    logs: LogsDest,
    envs: Mapping[int, Mapping[str, str]],
    prefixes: Mapping[int, str] | None,
    console: ConsoleSpecs,
    filters: Mapping[str, list[str] | None],
    on_reader_gone: Callable[[str], None] | None = None,
) -> Pump:
    """Make what follows the files of a group.

    Args:
        logs: The files.
        envs: The workers' environments, by local rank.
        prefixes: The caller's own prefixes, by local rank.
        console: How the console shows the lines.
        filters: By stream, the strings of which a line must contain one to be copied into the file of all ranks.
        on_reader_gone: See `PContext`.
    """
    views = _Views(envs, prefixes, console)
    try:
        streams, copies = _streams(views, logs, console, filters)
        timeline = TimelineWriter(logs.timeline) if logs.timeline else None
    except BaseException:
        for view in views.all:
            view.output.sink.close()
        raise
    for stream in streams:
        for view, source in stream.views:
            if view not in copies:
                views.counts[source.stream] += 1
    pump = Pump(streams, [*views.all, *copies], timeline, message_view=views.message_view(), drain=console.drain)
    if on_reader_gone is not None:
        pump.readers = {sink: partial(on_reader_gone, name) for sink, name in views.names.items()}
    return pump


def _streams(
    views: _Views, logs: LogsDest, console: ConsoleSpecs, filters: Mapping[str, list[str] | None]
) -> tuple[list[Stream], list[View]]:
    """Return every log file of a group, with the views that show it; and the views that copy some of the lines."""
    streams, copies = [], []
    for number, (name, paths, shown, hidden) in enumerate(
        (
            ("stdout", logs.stdouts, logs.tee_stdouts, logs.hidden_stdouts),
            ("stderr", logs.stderrs, logs.tee_stderrs, logs.hidden_stderrs),
        )
    ):
        filtered = _filtered(logs.filtered_stdout if name == "stdout" else logs.filtered_stderr, filters.get(name))
        copies += [] if filtered is None else [filtered]
        for rank, path in sorted(paths.items()):
            if not path or path == os.devnull:
                continue
            viewed = []
            hidden_in = None
            if rank in shown or rank in hidden:
                view = views.console(name)
                if view is not None:
                    hidden_in = (view, views.source(rank, name, view))
                    if rank in shown and (console.ranks is None or views.global_rank(rank) in console.ranks):
                        viewed.append(hidden_in)
                        hidden_in = None
            rotates = bool(logs.max_size)
            number_ = 2 * rank + number
            streams.append(Stream(Follower(path, rotates=rotates), viewed, number=number_, hidden_in=hidden_in))
            if filtered is not None:  # a stream of its own: it does not wait for the console
                source = views.source(rank, name, filtered)
                streams.append(Stream(Follower(path, rotates=rotates), [(filtered, source)]))
    return streams, copies


class _Views:
    """The views on the console. Each is opened when the first stream needs it."""

    def __init__(
        self,
        envs: Mapping[int, Mapping[str, str]],
        prefixes: Mapping[int, str] | None,
        console: ConsoleSpecs,
    ) -> None:
        self._envs = envs
        self._console = console
        self._prefixes = Prefixes(envs, prefixes, template=console.template, timestamps=console.timestamps)
        self._by_output: dict[object, View | None] = {}
        self._coloured: set[View] = set()
        self.counts = {"stdout": 0, "stderr": 0}
        """How many sources of each stream are shown."""
        self.all: list[View] = []
        self.names: dict[Sink, str] = {}
        """What each of their sinks is: "stdout" or "stderr"."""

    def global_rank(self, rank: int) -> int:
        return int(self._envs.get(rank, {}).get("RANK") or rank)

    def source(self, rank: int, name: str, view: View) -> Source:
        """Make the source of a stream of a local rank in a view."""
        return Source(self.global_rank(rank), name, self._prefixes.of(rank, colour=view in self._coloured))

    def console(self, name: str) -> View | None:
        """Return the view of a stream on the launcher's stream of that name. If both streams are one, so are the views.

        None if the launcher has no such stream.
        """
        stream = sys.stdout if name == "stdout" or self._console.format == "json" else sys.stderr
        if stream is None:
            return None
        target = target_of(stream)
        output = identity(target)
        if output not in self._by_output:
            view, coloured = open_view(target, self._console, self._prefixes, self.counts, live=True)
            if coloured:
                self._coloured.add(view)
            self.all.append(view)
            self.names[view.output.sink] = "stdout" if stream is sys.stdout else "stderr"
            self._by_output[output] = view
        return self._by_output[output]

    def message_view(self) -> View | None:
        """Return the view for our own messages: that on stderr. None if that has none, or if the format is JSON."""
        if sys.stderr is None or self._console.format == "json" or not self._by_output:
            return None
        return self._by_output.get(identity(target_of(sys.stderr)))


def _filtered(path: str, needles: list[str] | None) -> View | None:
    """Make the view on the file for lines of all ranks that contain one of ``needles``; None without needles."""
    if not needles:
        return None
    wanted = [os.fsencode(needle) for needle in needles]

    def select(block: bytes) -> bytes:
        text = readable(block)  # with the same lines
        if not any(needle in text for needle in wanted):
            return b""
        lines = zip(block[:-1].split(b"\n"), text[:-1].split(b"\n"), strict=True)
        return b"".join([line + b"\n" for line, read in lines if any(needle in read for needle in wanted)])

    return View(PlainOutput(Sink(path)), Text(), Only(select))
