"""Parses what comes through the named pipe of a `FileTimerServer` into requests."""

from __future__ import annotations

from phalanx.timer import _pipe
from phalanx.timer._file_client import FileTimerRequest


class RequestParser:
    """Turns a stream of bytes into requests. Lines that are damaged or too long are logged, and skipped.

    Args:
        complaints: Logs them.
        mid_line: Whether the first line may lack its beginning, as a server before may have read that.

    >>> parser = RequestParser(_pipe.Complaints())
    >>> parser.feed(b'{"pid": 42, "scope_id": "load", ')
    []
    >>> parser.feed(b'"expiration_time": -1, "signal": 0}' + bytes([10]))
    [FileTimerRequest(worker_pid=42, scope_id='load', expiration_time=-1.0, signal=0)]
    """

    def __init__(self, complaints: _pipe.Complaints, *, mid_line: bool = False) -> None:
        self._complaints = complaints
        self._mid_line = mid_line
        self._lines = _pipe.Lines()

    def feed(self, data: bytes) -> list[FileTimerRequest]:
        """Return the requests whose lines are complete now, in order."""
        oversized = self._lines.oversized
        requests = [request for line in self._lines.feed(data) if (request := self._parse(line)) is not None]
        if self._lines.oversized > oversized:
            self._complaints.say("timer pipe: a line of more than %d bytes was skipped", _pipe.LINE_LIMIT)
        return requests

    def _parse(self, line: bytes) -> FileTimerRequest | None:
        mid_line, self._mid_line = self._mid_line, False
        try:
            return FileTimerRequest.from_json(line) if line else None
        except ValueError as exc:
            if not mid_line:  # else a request to the server before, whose timers are lost anyway
                self._complaints.say("timer pipe: a damaged line was skipped: %s: %r", exc, line[:120])
            return None
