"""The console side of a group: which files are followed, to which of the launcher's streams, under which prefix."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from phalanx._core.pump import Pump
    from phalanx.multiprocessing._logs import LogsDest

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # red is for errors


def pump(logs: LogsDest, prefixes: Mapping[int, str] | None) -> Pump | None:
    """What shows the teed streams of a group, or None when there are none."""
    if not logs.tee_stdouts and not logs.tee_stderrs:
        return None
    from phalanx._core.pump import Follower, Pump, Sink

    followers = []
    width = len(str(max(logs.stdouts, default=0)))
    for stream, paths in ((sys.stdout, logs.tee_stdouts), (sys.stderr, logs.tee_stderrs)):
        if stream is None:
            continue
        target = _target(stream)
        sink = Sink(target)
        colour = isinstance(target, int) and os.isatty(target) and not os.environ.get("NO_COLOR")
        for rank, path in sorted(paths.items()):
            prefix = _prefix(rank, width, colour=colour) if prefixes is None else prefixes.get(rank, "")
            followers.append(Follower(path, prefix.encode("utf-8", "surrogateescape"), sink))
    return Pump(followers)


def _target(stream: Any) -> Any:
    """The descriptor of a stream; the stream itself where it has none (a notebook's, a test's)."""
    try:
        stream.flush()
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream
    return fd if isinstance(fd, int) else stream


def _prefix(rank: int, width: int, *, colour: bool) -> str:
    text = f"[{rank}]".rjust(width + 2)
    return f"\033[{_COLOURS[rank % len(_COLOURS)]}m{text}\033[0m " if colour else f"{text} "
