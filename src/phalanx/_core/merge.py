"""The files of one attempt, merged in the order of time. Owns that order; shows nothing."""

from __future__ import annotations

import os

from phalanx._core import timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from phalanx._core.follower import Follower

_CHUNK = 256 * 1024
_MOST_OPEN = 128  # descriptors; further files are opened anew


def merge(followers: Mapping[int, Follower], path: str) -> Iterator[tuple[float, int, bytes]]:
    """Read each file to its end, as the timeline in ``path`` says that they grew.

    Args:
        followers: By the timeline's numbers of streams.
        path: The timeline. Without one, or beyond its end, file follows file, by the times of their last change.

    Yields:
        The time (seconds since the epoch), the stream, and what it grew by then.
    """
    buffer = bytearray(_CHUNK)
    used: dict[Follower, None] = {}  # the latest last
    for time, stream, grown in timeline.read(path):
        follower = followers.get(stream)
        left = grown
        while left and follower is not None and (count := _read(follower, buffer, left)):
            left -= count
            yield time, stream, bytes(memoryview(buffer)[:count])
        if follower is not None:
            used.pop(follower, None)
            used[follower] = None
            if len(used) > _MOST_OPEN:
                oldest = next(iter(used))
                del used[oldest]
                oldest.close()
    rest = [(_changed(follower.path), stream) for stream, follower in followers.items()]
    for time, stream in sorted(rest):
        while count := _read(followers[stream], buffer, _CHUNK):
            yield time, stream, bytes(memoryview(buffer)[:count])
        followers[stream].close()


def _read(follower: Follower, buffer: bytearray, most: int) -> int:
    try:
        return follower.read(memoryview(buffer)[:most])
    except OSError:  # not there
        return 0


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
