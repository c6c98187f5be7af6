"""The timers that a server holds, by process and scope; bounded for each process."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Timers = dict[tuple[int, str], Any]
else:
    Timers = dict

MOST = 10_000
"""The most timers of one process at a time: a client that sets them without end must not fill the server's memory."""


class Held(Timers):
    """Timers by (process, scope). Counts those of each process; `room` checks the bound.

    >>> held = Held()
    >>> held[42, "step"] = held[42, "step"] = held[42, "load"] = None
    >>> held.pop((42, "step"), None), held.pop((42, "step"), None), held.counts
    (None, None, {42: 1})
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}

    def room(self, key: tuple[int, str]) -> bool:
        """Whether a timer may be added: it replaces one, or its process has fewer than `MOST`."""
        return key in self or self.counts.get(key[0], 0) < MOST

    def __setitem__(self, key: tuple[int, str], timer: Any) -> None:
        if key not in self:
            self.counts[key[0]] = self.counts.get(key[0], 0) + 1
        super().__setitem__(key, timer)

    def __delitem__(self, key: tuple[int, str]) -> None:
        super().__delitem__(key)
        self.counts[key[0]] -= 1
        if not self.counts[key[0]]:
            del self.counts[key[0]]

    def pop(self, key: tuple[int, str], default: Any = None) -> Any:
        """Remove and return a timer; ``default`` if it is not there."""
        if key not in self:
            return default
        timer = self[key]
        del self[key]
        return timer

    def clear(self) -> None:
        """Remove all timers."""
        super().clear()
        self.counts.clear()
