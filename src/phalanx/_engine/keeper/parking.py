"""What the workers of a standby wait on: a pipe of which each reads one byte before its program begins.

EOF, when the keeper has died, means that they never begin.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
else:
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

STANDBY_ENV = b"PHALANX_STANDBY"
"""The environment variable that holds the descriptor. A worker removes it before its program begins."""


class Parking:
    """The pipe of one group. Raises OSError."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._reader, True)
        os.set_inheritable(self._reader, True)  # until `all_started`: nothing but workers is started meanwhile

    def environment(self) -> dict[bytes, bytes]:
        """What tells a worker that it is to wait, and on which descriptor."""
        return {STANDBY_ENV: b"%d" % self._reader}

    def all_started(self) -> None:
        """Close the workers' end."""
        os.close(self._reader)

    def release(self, count: int) -> None:
        """Let ``count`` workers begin."""
        try:
            os.write(self._writer, b"." * count)
        except BrokenPipeError:  # no worker is left, of which there will be news
            pass
        os.close(self._writer)

    def descriptors(self) -> list[int]:
        """Return the open descriptor."""
        return [self._writer]
