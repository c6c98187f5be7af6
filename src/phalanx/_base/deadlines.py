"""A heap of deadlines: which actions are due, and when the next one will be. It does not wait."""

from __future__ import annotations

from itertools import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from heapq import heapify, heappop, heappush
else:
    from _heapq import heapify, heappop, heappush  # the C half, which the keeper has sooner


_FEW = 64  # cancelled entries that are not worth a rebuilding of the heap


class Deadline:
    """A moment and the action that is due then."""

    __slots__ = ("_heap", "action", "at")

    def __init__(self, at: float, action: Callable[[], None], heap: Deadlines) -> None:
        self.at = at
        self.action: Callable[[], None] | None = action
        self._heap = heap

    @property
    def pending(self) -> bool:
        """Whether the action has neither been called nor cancelled."""
        return self.action is not None

    def cancel(self) -> None:
        """Drop the action. Idempotent, in constant time.

        The entry leaves the heap at its moment, or earlier when too many are cancelled.
        """
        if self.action is not None:
            self.action = None
            self._heap.note_cancelled()


class Deadlines:
    """Deadlines in order of their time; equal times in order of arrival.

    >>> due = Deadlines()
    >>> first = due.add(2.0, lambda: None)
    >>> due.next()
    2.0
    >>> first.cancel(); due.next() is None
    True
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._arrival = count()
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, action: Callable[[], None]) -> Deadline:
        """Have ``action`` called by `run` once the clock shows ``at`` (seconds, monotonic)."""
        deadline = Deadline(at, action, self)
        heappush(self._heap, (at, next(self._arrival), deadline))
        return deadline

    def next(self) -> float | None:
        """The time of the earliest live deadline, or None."""
        heap = self._heap
        while heap and heap[0][2].action is None:
            heappop(heap)
            self._cancelled -= 1
        return heap[0][0] if heap else None

    def run(self, now: float) -> None:
        """Call, in order, every action that is due at ``now``, once."""
        while (at := self.next()) is not None and at <= now:
            deadline = heappop(self._heap)[2]
            action = deadline.action
            deadline.action = None
            if action is not None:
                action()

    def note_cancelled(self) -> None:
        """Count a cancelled entry. Once they are most of the heap, remove them: heartbeats would fill it otherwise."""
        self._cancelled += 1
        if self._cancelled > _FEW and 2 * self._cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapify(self._heap)
            self._cancelled = 0
