"""The console side of a group: which files are followed, to which of the launcher's streams, and how that looks.

Owns the choices that a person has about the console, and what they mean in views, lanes and prefixes.
"""

from __future__ import annotations

import io
import os
import sys
from functools import lru_cache, partial
from operator import index

from phalanx._base import tty
from phalanx._base.durations import seconds
from phalanx._base.frozen import Value
from phalanx._logs.prefixes import Prefixes, checked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from phalanx._logs.pump import Pump, Stream
    from phalanx._logs.render import Lane, View
    from phalanx._logs.search import Search
    from phalanx._logs.sink import Sink
    from phalanx._logs.specs import LogsDest

DRAIN = 10.0
_KNOWN = 64  # sets of ranks whose shared prefix is kept


class ConsoleSpecs(Value):
    r"""How the console shows what the workers write. The files are the same whatever is chosen here.

    It is of streams that are teed: one that is neither redirected nor teed is the launcher's own, and as it is.

    Args:
        color: "always", "never" or "auto": not if ``NO_COLOR`` is set, else if ``FORCE_COLOR`` is, else on a terminal
            that is not dumb (``TERM``).
        timestamps: None, "iso" (local time with milliseconds and its offset from UTC, ISO 8601) or "elapsed" (seconds
            since the start). It is the time at which the line was seen, a fraction of a millisecond after it was
            written.
        template: What stands before each line, with ``${role_name}``, ``${rank}``, ``${local_rank}``, ``${host}`` and
            ``${time}``; None for ``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``, or ``[rank] ``.
        ranks: The global ranks whose lines are shown; None for all. Of one that fails, the last are shown regardless.
        grep: A regular expression (RE2's), or several; only lines in which one of them is found are shown.
        exclude: The same; lines in which one of them is found are not shown, and are no context either.
        ignore_case: Whether ``grep`` and ``exclude`` take large letters for small ones.
        before: How many lines (>= 0) of the same stream are shown before each line that ``grep`` finds.
        after: How many lines (>= 0) of the same stream are shown after it.
        fold: Whether lines that are equal across ranks within 0.2 s are shown once, as ``[0-7] …``.
        format: "text", or "json": JSON Lines with ``time``, ``rank``, ``stream`` and ``text``, all on stdout.
        drain: Seconds (>= 0) that the end waits, at most, for a console that reads slowly.
        raw: Whether a terminal is sent lines as they are. Else, what it would obey but colours is shown as escapes
            (``\x1b``); JSON has escapes of its own. Pipes, files and other streams get lines as they are.

    Raises:
        ValueError, TypeError: A value that is none of these; the message names the field.
    """

    __slots__ = (  # noqa: RUF023 - what belongs together stands together
        "color", "timestamps", "template", "ranks", "grep", "exclude", "ignore_case", "before", "after", "fold",
        "format", "drain", "raw",
    )  # fmt: skip

    color: str
    timestamps: str | None
    template: str | None
    ranks: frozenset[int] | None
    grep: tuple[str, ...]
    exclude: tuple[str, ...]
    ignore_case: bool
    before: int
    after: int
    fold: bool
    format: str
    drain: float
    raw: bool

    def __init__(
        self,
        *,
        color: str = "auto",
        timestamps: str | None = None,
        template: str | None = None,
        ranks: Iterable[int] | None = None,
        grep: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        ignore_case: bool = False,
        before: int = 0,
        after: int = 0,
        fold: bool = False,
        format: str = "text",  # noqa: A002 - what it is called on the command line
        drain: float = DRAIN,
        raw: bool = False,
    ) -> None:
        choices = {
            "color": (color, ("auto", "always", "never")),
            "timestamps": (timestamps, (None, "iso", "elapsed")),
            "format": (format, ("text", "json")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                msg = f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}"
                raise ValueError(msg)
        if fold and format == "json":
            raise ValueError("fold, format: machines are given every line; 'json' cannot be folded")
        self._store(
            color=color,
            timestamps=timestamps,
            template=checked(template),
            ranks=None if ranks is None else _ranks(ranks),
            grep=_patterns("grep", grep),
            exclude=_patterns("exclude", exclude),
            ignore_case=ignore_case,
            before=_count("before", before),
            after=_count("after", after),
            fold=fold,
            format=format,
            drain=seconds("drain", drain),
            raw=raw,
        )
        _search(self)  # what is no pattern is to be said now
        if (before or after) and not self.grep:
            msg = f"{'before' if before else 'after'}: there is no grep, around whose lines these would be"
            raise ValueError(msg)
        if ignore_case and not self.grep and not self.exclude:
            raise ValueError("ignore_case: there is no grep and no exclude that it would be of")


def pump(
    logs: LogsDest,
    envs: Mapping[int, Mapping[str, str]],
    prefixes: Mapping[int, str] | None,
    console: ConsoleSpecs,
    filters: Mapping[str, list[str] | None],
) -> Pump | None:
    """What follows the files of a group, or None when there is nothing to follow.

    ``filters`` are by stream the strings that select lines for the file of all ranks.
    """
    if not any((*logs.stdouts.values(), *logs.stderrs.values())):
        return None
    from phalanx._logs.pump import Pump
    from phalanx._logs.write_index import Timeline

    views = _Views(logs, envs, prefixes, console)
    try:
        streams = _streams(views, logs, console, filters)
    except BaseException:
        views.close()
        raise
    rotated = {it.number: it.follower.path for it in streams if it.follower.rotates and it.number >= 0}
    timeline = Timeline(logs.timeline, rotated) if logs.timeline else None
    return Pump(streams, views.all, timeline, voice=views.voice(), drain=console.drain)


def _streams(
    views: _Views, logs: LogsDest, console: ConsoleSpecs, filters: Mapping[str, list[str] | None]
) -> list[Stream]:
    """Every file of a group, with the views that it goes to."""
    from phalanx._logs.follower import Follower
    from phalanx._logs.pump import Stream

    streams = []
    for number, (name, paths, shown, hidden) in enumerate(
        (
            ("stdout", logs.stdouts, logs.tee_stdouts, logs.hidden_stdouts),
            ("stderr", logs.stderrs, logs.tee_stderrs, logs.hidden_stderrs),
        )
    ):
        extract = views.extract(name, filters.get(name))
        for rank, path in sorted(paths.items()):
            if not path or path == os.devnull:
                continue
            lanes = []
            spare = None
            if rank in shown or rank in hidden:
                view = views.console(name)
                if view is not None:
                    spare = (view, views.lane(rank, name, view))
                    if rank in shown and (console.ranks is None or views.global_rank(rank) in console.ranks):
                        lanes.append(spare)
                        views.count(name)
                        spare = None
            rotates = bool(logs.max_size)
            streams.append(Stream(Follower(path, rotates=rotates), lanes, number=2 * rank + number, spare=spare))
            if extract is not None:  # on its own: it waits for no console
                lane = views.lane(rank, name, extract)
                streams.append(Stream(Follower(path, rotates=rotates), [(extract, lane)]))
    return streams


class _Views:
    """The views of one group, made as they are asked for."""

    def __init__(
        self,
        logs: LogsDest,
        envs: Mapping[int, Mapping[str, str]],
        prefixes: Mapping[int, str] | None,
        console: ConsoleSpecs,
    ) -> None:
        self._logs = logs
        self._envs = envs
        self._console = console
        self._prefix = Prefixes(envs, prefixes, console)
        self._by_place: dict[object, View | None] = {}
        self._colored: set[View] = set()
        self._counts = {"stdout": 0, "stderr": 0}
        self.all: list[View] = []

    def global_rank(self, rank: int) -> int:
        return int(self._envs.get(rank, {}).get("RANK") or rank)

    def lane(self, rank: int, name: str, view: View) -> Lane:
        from phalanx._logs.render import Lane

        return Lane(self.global_rank(rank), name, self._prefix.of(rank, colour=view in self._colored))

    def count(self, name: str) -> None:
        """One more lane of a stream is shown."""
        self._counts[name] += 1

    def console(self, name: str) -> View | None:
        """The view of a stream, on the launcher's stream of that name; one for both if that is one and the same."""
        stream = sys.stdout if name == "stdout" or self._console.format == "json" else sys.stderr
        if stream is None:
            return None
        found = target(stream)
        place = _place(found)
        if place not in self._by_place:
            self._by_place[place] = self._make(found)
        return self._by_place[place]

    def _make(self, target: Any) -> View:
        view, colour = make_view(target, self._console, self._prefix, self._counts, live=True)
        if colour:
            self._colored.add(view)
        self.all.append(view)
        return view

    def extract(self, name: str, needles: list[str] | None) -> View | None:
        """The file for the lines of all ranks that hold one of ``needles``."""
        if not needles:
            return None
        from phalanx._logs.render import Text, View
        from phalanx._logs.search import Only
        from phalanx._logs.sink import Sink
        from phalanx._logs.terminal import Paper

        path = self._logs.filtered_stdout if name == "stdout" else self._logs.filtered_stderr
        wanted = [os.fsencode(needle) for needle in needles]

        def select(block: bytes) -> bytes:
            if not any(needle in block for needle in wanted):
                return b""
            return _joined(line for line in block[:-1].split(b"\n") if any(needle in line for needle in wanted))

        view = View(Paper(Sink(path)), Text(), Only(select))
        self.all.append(view)
        return view

    def voice(self) -> View | None:
        """Where we may speak: the view on stderr. A machine that reads JSON, or a file of chosen lines, is not told."""
        if sys.stderr is None or self._console.format == "json":
            return None
        return self._by_place.get(_place(target(sys.stderr)))

    def close(self) -> None:
        """There will be no pump: let go of what it would have written to."""
        for view in self.all:
            view.surface.sink.close()


def make_view(
    target: Any, console: ConsoleSpecs, prefixes: Prefixes, counts: dict[str, int], *, live: bool = False
) -> tuple[View, bool]:
    """A view on a descriptor, a stream or a sink, and whether prefixes are coloured there.

    ``counts`` says how many lanes of each stream it will have. On what is ``live``, equal tracebacks are shown once.
    """
    from phalanx._logs import display
    from phalanx._logs.dedup import Fold
    from phalanx._logs.render import Json, Text, View
    from phalanx._logs.terminal import Paper, Screen

    text = console.format == "text"
    fd = target if isinstance(target, int) else None
    kind = Screen if tty.obeys_controls(fd) else Paper
    # One for all groups: of two that write to one terminal, each would cut the other's lines, and erase its bars.
    # Its descriptor is of its own: by the time that it is written to, the host may have closed this one.
    surface = display.shared(_place(target), lambda: kind(_sink(target)))
    colour = text and tty.use_colour(fd, console.color)
    tame = not console.raw and tty.is_terminal(target)
    view = View(surface, Text() if text else Json(prefixes.host), _search(console), harmless=tame)
    if console.fold or (live and text):
        shared = lru_cache(_KNOWN)(partial(prefixes.shared, colour=colour))

        def emit(lanes: list[Lane], line: bytes) -> None:
            prefix = lanes[0].prefix if len(lanes) == 1 else shared(frozenset([lane.rank for lane in lanes]))
            prefix = prefix if isinstance(prefix, bytes) else prefix(fold.time)
            surface.write(lanes[0], prefix, line[:-1].replace(b"\n", b"\n" + prefix) + b"\n")

        now = lambda: view.time()  # noqa: E731, PLW0108 - it is replaced where history is shown
        fold = Fold(emit, counts, time=now, by_rank=not console.fold)
        if console.fold:
            view.fold_into(fold)
        else:
            view.fold_tracebacks(fold)
    return view, colour


def target(stream: Any) -> Any:
    """The descriptor of a stream; the stream itself where it has none (a test's), or is none of Python's own files.

    A notebook's stdout writes into the cell. The descriptor that it names is what the kernel's stdout was before.
    """
    try:
        stream.flush()
        fd = stream.fileno()
    except Exception:  # noqa: BLE001 - the host's own object: if it cannot be written to either, that is said then
        return stream
    known = isinstance(stream, (io.TextIOWrapper, io.BufferedIOBase, io.RawIOBase))
    return fd if known and isinstance(fd, int) else stream


def _sink(target: Any) -> Sink:
    from phalanx._logs.sink import Sink

    return Sink(os.dup(target), own=True) if isinstance(target, int) else Sink(target)


def _place(target: Any) -> object:
    """What is the same for two descriptors whose readers see one stream: one terminal, one pipe."""
    if not isinstance(target, int):
        return id(target)
    found = os.fstat(target)  # a file that was opened twice is one, too: two writers would overwrite each other
    return found.st_dev, found.st_ino, found.st_rdev


def _joined(lines: Iterable[bytes]) -> bytes:
    chosen = list(lines)
    return b"\n".join(chosen) + b"\n" if chosen else b""


def _patterns(name: str, given: str | Iterable[Any] | None) -> tuple[str, ...]:
    single = isinstance(given, (str, bytes)) or not hasattr(given, "__iter__")
    patterns = () if given is None else (given,) if single else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            msg = f"{name}: expected a regular expression, or several, each a str, got {pattern!r}"
            raise TypeError(msg)
    return patterns


def _ranks(given: Any) -> frozenset[int]:
    ranks = tuple(given) if hasattr(given, "__iter__") and not isinstance(given, bytes) else (None,)
    if not all(_is_whole(rank) for rank in ranks):
        msg = f"ranks: expected the numbers of ranks, like [0, 2], got {given!r}"
        raise TypeError(msg)
    numbers = frozenset(index(rank) for rank in ranks)
    if min(numbers, default=0) < 0:
        msg = f"ranks: expected numbers that are 0 or more, got {given!r}"
        raise ValueError(msg)
    return numbers


def _count(name: str, value: Any) -> int:
    if not _is_whole(value) or value < 0:
        msg = f"{name}: expected a number of lines, 0 or more, got {value!r}"
        raise ValueError(msg)
    return index(value)


def _is_whole(value: Any) -> bool:
    """Whether this is a whole number: Python's, or another library's."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and not hasattr(value, "__len__")


def _search(console: ConsoleSpecs) -> Search | None:
    """What chooses the lines; None for all. Raises ValueError."""
    if not console.grep and not console.exclude:
        return None
    from phalanx._logs.search import Search

    return Search(
        console.grep,
        console.exclude,
        ignore_case=console.ignore_case,
        before=console.before,
        after=console.after,
        separator=b"--\n" if console.format == "text" else b"",
    )
