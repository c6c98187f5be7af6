"""Opens a view on one output: a terminal, a pipe or a stream object; with prefixes, colours, filters and dedup.

Owns what `ConsoleSpecs` mean on an output of a kind.
"""

from __future__ import annotations

import io
import os
from functools import lru_cache, partial
from typing import Any

from phalanx._base import tty
from phalanx._logs import display
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.dedup import Dedup
from phalanx._logs.formats import Json, Text
from phalanx._logs.line_state import Source
from phalanx._logs.prefixes import Prefixes
from phalanx._logs.render import View
from phalanx._logs.sink import Sink
from phalanx._logs.terminal import PlainOutput, TerminalOutput

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
    output = display.shared_output(identity(target), lambda: kind(_sink(target)))
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


def _sink(target: Any) -> Sink:
    return Sink(os.dup(target), own=True) if isinstance(target, int) else Sink(target)
