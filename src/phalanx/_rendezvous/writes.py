"""What an agent has asked of its store, and has no answer to: one thing of each kind at a time. Pure."""

from __future__ import annotations

from phalanx._store.store import Done, Fetched

AGAIN = 1.0
"""Seconds after which a write is tried again that was not made, if nothing has told why by then."""

TOLD = ("lead", "stop")
"""Writes of which a watch tells: that they were made is not enough, for it may come first."""


class Writes:
    """The requests that are under way."""

    def __init__(self) -> None:
        self._ticket = 0
        self._open: dict[str, int] = {}
        self._closed: dict[str, float] = {}

    def begin(self, what: str) -> int:
        """Note that something is being asked. Returns the ticket."""
        self._ticket += 1
        self._open[what] = self._ticket
        return self._ticket

    def is_open(self, what: str) -> bool:
        """Whether something has been asked, and not been answered."""
        return what in self._open

    def drop(self, what: str) -> None:
        """Heed no answer to what has been asked."""
        self._open.pop(what, None)

    def end(self, event: Done | Fetched, now: float) -> str:
        """Note an answer. Returns to what it is one; "": to nothing that is asked any more."""
        what = next((what for what, ticket in self._open.items() if ticket == event.ticket), "")
        if what:
            del self._open[what]
            in_vain = not event.made if isinstance(event, Done) else event.entries is None
            if in_vain or what in TOLD:
                self._closed[what] = now + AGAIN
        return what

    def closed_until(self, what: str) -> float:
        """Return until when it is not to be asked again: it was not made, and why is not told yet."""
        return self._closed.get(what, 0.0)

    def reopen(self) -> None:
        """Let all be asked again: something has changed."""
        self._closed.clear()
