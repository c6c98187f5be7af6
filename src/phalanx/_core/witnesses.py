"""The stacks of all ranks of a group, taken at the moment when one of them hangs.

Owns when they are taken, how long that may last, and the files that they go to. How a process is asked for its stacks
is the business of `stacks`. Nothing that goes wrong here keeps what hangs from being ended.
"""

from __future__ import annotations

import contextlib
import os

from phalanx._core import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx._core.deadlines import Deadline
    from phalanx._core.frames import Frame
    from phalanx._core.loop import Loop
    from phalanx._core.stacks import Collection as Stacks

WAIT = 0.3
"""Seconds in which the ranks have to give their stacks: as `stacks.BOUND`, whose import may fail."""

_FRESH = 1.0  # seconds for which they serve for what hangs next, too
_SPIES = 8  # that are sent out at most: each is a process, and all of them have `WAIT` seconds


class Witnesses:
    """Takes stacks in the group's thread.

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
        self._collection: Stacks | None = None
        self._spent: list[Stacks] = []  # those that have a descriptor left, and nothing more to say
        self._places: dict[int, Frame | str] = {}  # that the texts tell: each is read once, however many ranks hang
        self._apart: set[int] | None = None
        self._waiting: list[Callable[[], None]] = []
        self._taken = -_FRESH
        self._late: Deadline | None = None

    def open(self, loop: Loop, pids: Callable[[], dict[int, int]]) -> None:
        """Be ready. ``pids`` gives the live workers by rank."""
        self._loop, self._pids = loop, pids

    def get_ready(self) -> None:
        """Import what is needed once something hangs, when there is time: then there is none."""
        self._loop.when_idle(_import)

    def hear(self, hung: Mapping[int, int], since: float, then: Callable[[], None]) -> None:
        """Take the stacks of all ranks, and go on: when they are there, or at the latest after `WAIT` seconds.

        Those that were taken a moment ago will do, if the block that hangs had been entered before: ``since`` is when.
        Of the ranks that are ``hung``, the process that hangs is asked: the worker, or one below it. Its native frames
        are taken as well, if py-spy is there: for some 50 ms.
        """
        if self._collection is None and self._taken >= max(since, clock.now() - _FRESH):
            then()
            return
        self._waiting.append(then)
        if self._collection is None:
            self._begin(hung)

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

    def close(self) -> None:
        """Stop hearing. Idempotent."""
        self._waiting.clear()
        self._end()
        self._tidy_up()

    def _begin(self, hung: Mapping[int, int]) -> None:
        self._late = self._loop.after(WAIT, self._go_on)
        spied = sorted(hung)[:_SPIES]
        try:
            from phalanx._core import stacks

            self._collection = stacks.Collection(
                stacks.Target(rank, hung.get(rank, pid), self._error_files[rank], native=rank in spied)
                for rank, pid in self._pids().items()
            )
            self._collection.begin()
            self._loop.watch(self._collection.fileno(), self._on_stacks)
        except Exception:  # noqa: BLE001 - no descriptor is left, say; see the top
            self._go_on()
        else:
            self._on_stacks(0)

    def _on_stacks(self, _events: int) -> None:
        try:
            done = self._collection is None or self._collection.complete()
        except Exception:  # noqa: BLE001 - see the top
            done = True
        if done:
            self._go_on()

    def _go_on(self) -> None:
        self.texts, self.files, self._places, self._apart = self._end(), {}, {}, None
        self._taken = clock.now()
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _end(self) -> dict[int, str]:
        """Ask no more. Returns what has been said."""
        if self._late is not None:
            self._late.cancel()
        collection, self._collection = self._collection, None
        if collection is None:
            return {}
        try:
            with contextlib.suppress(ValueError):  # it did not come as far as to have a descriptor
                self._loop.forget(collection.fileno())
            texts = collection.finish()
            self._spent.append(collection)
            self._loop.when_idle(self._tidy_up)  # which takes its time
        except Exception:  # noqa: BLE001 - see the top
            collection.close()
            return {}
        return texts

    def _tidy_up(self) -> None:
        while self._spent:
            self._spent.pop().close()


def _import() -> None:
    with contextlib.suppress(Exception):  # no descriptor is left, say; see the top
        import json

        from phalanx._core import frames, stacks

        del json, frames, stacks
