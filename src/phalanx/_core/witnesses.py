"""The stacks of all ranks of a group, taken at the moment when one of them hangs.

Owns how long that may last, and the files that they go to. How a process is asked for its stacks is the business of
`stacks`. Nothing that goes wrong here keeps what hangs from being ended. Used by one thread, which waits.
"""

from __future__ import annotations

import contextlib
import os

from phalanx._core import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx._core.frames import Frame

WAIT = 0.3
"""Seconds in which the ranks have to give their stacks: as `stacks.BOUND`, whose import may fail."""

_FRESH = 1.0  # seconds for which they serve for what hangs next, too
_SPIES = 8  # that are sent out at most: each is a process, and all of them have `WAIT` seconds


class Witnesses:
    """Takes stacks.

    Args:
        error_files: Each rank's. Its folder takes the rank's stacks.

    Attributes:
        texts: What each rank had to say last.
        files: Where that has been written, as far as it could be.
    """

    def __init__(self, error_files: Mapping[int, str]) -> None:
        self.texts: dict[int, str] = {}
        self.files: dict[int, str] = {}
        self._error_files = error_files
        self._places: dict[int, Frame | str] = {}  # that the texts tell: each is read once, however many ranks hang
        self._apart: set[int] | None = None
        self._taken = -_FRESH

    def get_ready(self) -> None:
        """Import what is needed once something hangs: then there is no time."""
        with contextlib.suppress(Exception):  # no descriptor is left, say; see the top
            import json

            from phalanx._core import frames, stacks

            del json, frames, stacks

    def hear(self, alive: Mapping[int, int], hung: Mapping[int, int], since: float) -> contextlib.ExitStack:
        """Take the stacks of all ranks that are ``alive``; at the latest after `WAIT` seconds it is over.

        Those that were taken a moment ago will do, if the block that hangs had been entered before: ``since`` is when.
        Of the ranks that are ``hung``, the process that hangs is asked: the worker, or one below it. Its native frames
        are taken as well, if py-spy is there: for some 50 ms.

        Returns what is to be closed once nobody waits any more: it takes its time.
        """
        afterwards = contextlib.ExitStack()
        if self._taken >= max(since, clock.now() - _FRESH):
            return afterwards
        texts: dict[int, str] = {}
        spied = sorted(hung)[:_SPIES]
        try:
            from phalanx._core import stacks

            collection = stacks.Collection(
                stacks.Target(rank, hung.get(rank, pid), self._error_files[rank], native=rank in spied)
                for rank, pid in alive.items()
            )
            afterwards.callback(collection.close)
            collection.begin()
            collection.wait(WAIT)
            texts = collection.finish()
        except Exception:  # noqa: BLE001, S110 - no descriptor is left, say; see the top
            pass
        self.texts, self.files, self._places, self._apart = texts, {}, {}, None
        self._taken = clock.now()
        return afterwards

    def write(self) -> None:
        """Put each rank's stacks into its folder, as ``stacks-<n>.txt``. Once; what cannot be written is left out."""
        for rank, text in self.texts.items():
            if rank not in self.files:
                self.files[rank] = ""
                with contextlib.suppress(Exception):  # the disk is full, say, or no descriptor is left
                    from phalanx._core import stacks

                    self.files[rank] = stacks.write(os.path.dirname(self._error_files[rank]), text)

    def sum_up(self, rank: int, thread: int) -> str:
        """Where a rank stands (its ``thread``), and where the others do."""
        try:
            from phalanx._core import frames

            if not self._places:
                self._places = {each: frames.place(text) for each, text in self.texts.items()}
            if thread and rank in self.texts:
                return frames.put_together({**self._places, rank: frames.place(self.texts[rank], thread)}, rank)
            return frames.put_together(self._places, rank)
        except Exception as error:  # noqa: BLE001 - see the top
            return f"its stacks make no sense: {error!r}"

    def apart(self) -> set[int]:
        """The ranks that are elsewhere than most."""
        if self._apart is None:
            self._apart = set()
            with contextlib.suppress(Exception):  # see the top
                from phalanx._core import frames

                self._apart = frames.apart(self.texts)
        return self._apart
