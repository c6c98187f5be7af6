"""The events of a run of `phalanx run`, and who takes them: the files in the run's folder, and other observers."""

from __future__ import annotations

from typing import NamedTuple

from phalanx._base import clock
from phalanx._events import agent_kinds, kinds
from phalanx._events.stream import PATIENCE, EventStream
from phalanx._runs.recorder import observe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx._events.kinds import Event
    from phalanx._runs.recorder import Recorder

    Observer = Callable[[list[Event]], object]
    Observers = Mapping[str, Observer]

_LAST = 0.2  # seconds for what is emitted after the end of the run is recorded, where an exception came instead


class Asked(NamedTuple):
    """What was asked for."""

    argv: list[str]
    """The whole command line."""
    config: str
    """All options that hold, as a job file; "": no job file can hold them."""


class RunRecord:
    """The stream of a run's events, which are written from `begin` on.

    Args:
        recorder: Writes the record.
        warn: Shows a line to the user.
        observers: Take the events, too, each on a thread of the name that is its key.

    Attributes:
        stream: Where what happens is emitted.
    """

    def __init__(self, recorder: Recorder, warn: Callable[[str], None], observers: Observers) -> None:
        self.stream = EventStream()
        self._recorder = recorder
        self._warn = warn
        self._observers = observers
        self._closed: set[str] = set()  # of stdout and stderr

    def begin(self) -> None:
        """Begin to write what happens."""
        observe(self.stream, self._warn, self._recorder)
        for name, take in self._observers.items():
            self.stream.subscribe(name, take)

    def reader_gone(self, attempt: int, stream: str) -> None:
        """Note, and show, that nobody reads a stream of the launcher's any more. Once for each; see `PContext`."""
        if stream not in self._closed:
            self._closed.add(stream)
            self.stream.emit(kinds.ConsoleClosed, attempt, clock.now_ns(), stream=stream)
            self._warn(f"nobody reads {stream} any more; the run goes on, and its log files have all lines")

    def end(self, attempt: int, state: str, exitcode: int, cause: str = "", report: str = "") -> None:
        """Write how the run has ended. Returns when all is written, after 5 s at most if the disk does not answer.

        ``report``: what the report says; "": what the record does.
        """
        self._recorder.report = report
        self.stream.emit(agent_kinds.RunEnded, attempt, clock.now_ns(), state=state, exitcode=exitcode, cause=cause)
        self._recorder.finish(self.stream)

    def close(self) -> None:
        """End the threads, once they have taken all, or after 0.2 s; after 5 s where somebody observes them."""
        late = self.stream.close(PATIENCE if self._observers else _LAST)
        for name in self._observers.keys() & set(late):
            self._warn(f"{name} has not taken all events of this run within {PATIENCE:g} s of its end")
