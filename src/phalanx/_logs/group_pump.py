"""Makes the pump of a group: which log files are followed, and where their lines are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.follower import Follower
from phalanx._logs.layout import LogsDest
from phalanx._logs.line_state import Source
from phalanx._logs.prefixes import Prefixes
from phalanx._logs.pump import Pump
from phalanx._logs.render import View
from phalanx._logs.sink import Sink
from phalanx._logs.stream import Stream
from phalanx._logs.timeline_writer import TimelineWriter


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
        views.close()
        raise
    for stream in streams:
        for view, source in stream.views:
            if view not in copies:
                views.counts[source.stream] += 1
    pump = Pump(streams, [*views.all, *copies], timeline, message_view=views.message_view(), drain=console.drain)
    pump.readers = views.readers(on_reader_gone)
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
        self._names: dict[Sink, str] = {}

    def global_rank(self, rank: int) -> int:
        return int(self._envs.get(rank, {}).get("RANK") or rank)

    def source(self, rank: int, name: str, view: View) -> Source:
        """Make the source of a stream of a local rank in a view."""
        return Source(self.global_rank(rank), name, self._prefixes.of(rank, colour=view in self._coloured))

    def console(self, name: str) -> View | None:
        """Return the view of a stream on the launcher's stream of that name. If both streams are one, so are the views.

        None if the launcher has no such stream.
        """
        from phalanx._logs.console_view import identity, open_view, target_of

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
            self._names[view.output.sink] = "stdout" if stream is sys.stdout else "stderr"
            self._by_output[output] = view
        return self._by_output[output]

    def readers(self, call: Callable[[str], None] | None) -> dict[Sink, Callable[[], None]]:
        """Return what calls ``call`` with "stdout" or "stderr" when nobody reads that any more, see `Pump.readers`."""
        return {} if call is None else {sink: partial(call, name) for sink, name in self._names.items()}

    def message_view(self) -> View | None:
        """Return the view for our own messages: that on stderr. None if that has none, or if the format is JSON."""
        if sys.stderr is None or self._console.format == "json" or not self._by_output:
            return None
        from phalanx._logs.console_view import identity, target_of

        return self._by_output.get(identity(target_of(sys.stderr)))

    def close(self) -> None:
        """Close what was opened, if no pump will."""
        for view in self.all:
            view.output.sink.close()


def _filtered(path: str, needles: list[str] | None) -> View | None:
    """Make the view on the file for lines of all ranks that contain one of ``needles``; None without needles."""
    if not needles:
        return None
    from phalanx._logs.formats import Text
    from phalanx._logs.patterns import readable
    from phalanx._logs.search import Only
    from phalanx._logs.terminal import PlainOutput

    wanted = [os.fsencode(needle) for needle in needles]

    def select(block: bytes) -> bytes:
        text = readable(block)  # with the same lines
        if not any(needle in text for needle in wanted):
            return b""
        lines = zip(block[:-1].split(b"\n"), text[:-1].split(b"\n"), strict=True)
        return _joined(line for line, read in lines if any(needle in read for needle in wanted))

    return View(PlainOutput(Sink(path)), Text(), Only(select))


def _joined(lines: Iterable[bytes]) -> bytes:
    chosen = list(lines)
    return b"\n".join(chosen) + b"\n" if chosen else b""
