"""Waits until processes that were sent a stack signal have written their dumps.

Owns the inotify descriptor on their files, and a timer for what inotify does not report: that a handler has returned
after its last write; and, where no inotify is to be had, that a file has grown.
"""

from __future__ import annotations

import contextlib
import os
import struct

from phalanx._base import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from phalanx._base.loop import Loop
    from phalanx._stacks.request import StackRequest

_SOON, _LATER = 0.0003, 0.008  # seconds between two looks at a handler that is about to return: the first, the longest
_EVENTS = 65536  # bytes that are read at a time


class DumpWatch:
    """Polls requests while they wait for a dump.

    Args:
        loop: What waits.
        requests: All requests of the collection: each is polled when inotify has lost events.
        complete: Called with each request that has its dump.
    """

    def __init__(
        self, loop: Loop, requests: Collection[StackRequest], complete: Callable[[StackRequest], None]
    ) -> None:
        self._loop = loop
        self._requests = requests
        self._complete = complete
        self._by_watch: dict[int, StackRequest] = {}
        self._again: set[StackRequest] = set()
        self._delay = _SOON
        self._inotify = self._open_inotify()

    def add(self, request: StackRequest) -> None:
        """Watch the file of a request, before its signal is sent. Raises OSError."""
        if self._inotify >= 0 and request.path:
            self._by_watch[linux.inotify_add(self._inotify, request.path)] = request

    def follow(self, request: StackRequest) -> None:
        """Poll a request whose signal has been sent, where inotify does not report its writes."""
        if self._inotify < 0:
            self._poll_later([request])

    def _open_inotify(self) -> int:
        """Returns -1 when there is none to be had: then the timer alone serves."""
        fd = -1
        try:
            fd = linux.inotify()
            self._loop.watch(fd, self._on_events)
        except OSError:
            if fd >= 0:
                os.close(fd)
            return -1
        return fd

    def close(self) -> None:
        """Close the inotify descriptor, which takes the kernel up to 30 ms. Idempotent."""
        inotify, self._inotify = self._inotify, -1
        if inotify >= 0:
            os.close(inotify)

    def _on_events(self, _events: int) -> None:
        grown: set[StackRequest] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._inotify, _EVENTS):
                offset = 0
                while offset < len(data):
                    watch, _mask, _cookie, length = struct.unpack_from("iIII", data, offset)
                    offset += 16 + length
                    request = self._by_watch.get(watch)
                    grown.update(self._requests if request is None else (request,))  # -1: events were lost
        self._poll(grown)

    def _poll(self, requests: Iterable[StackRequest]) -> None:
        waiting = [request for request in requests if request.waits]
        self._poll_later([request for request in waiting if request.poll() or self._inotify < 0])
        for request in waiting:
            if not request.waits:
                self._complete(request)

    def _poll_later(self, requests: Iterable[StackRequest]) -> None:
        waiting = [request for request in requests if request.waits]
        if waiting:
            if not self._again:
                self._loop.after(self._delay, self._on_timer)
            self._again.update(waiting)

    def _on_timer(self) -> None:
        again, self._again = self._again, set()
        self._delay = min(2 * self._delay, _LATER)
        self._poll(again)
