"""The timer server that an agent runs for its workers when ``TORCHELASTIC_ENABLE_FILE_TIMER`` is 1."""

from __future__ import annotations

import os
import uuid

ENABLE_FILE_TIMER_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.timer import FileTimerServer


class FileTimers:
    """Runs a `FileTimerServer` from the first attempt to the end, if the environment asks for one.

    Its pipe is at ``TORCHELASTIC_TIMER_FILE``, or else at a path of its own among the temporary files. Workers find
    that variable, and make their `FileTimerClient` of it.
    """

    def __init__(self) -> None:
        self._server: FileTimerServer | None = None
        self._path = ""

    def start(self, run_id: str) -> dict[str, str]:
        """Start the server, if it is wanted and does not run. Return the variables for workers. Raises OSError."""
        if os.environ.get(ENABLE_FILE_TIMER_ENV) != "1":
            return {}
        if self._server is None:
            from tempfile import gettempdir

            from phalanx.timer import FileTimerServer

            self._path = os.environ.get(TIMER_FILE_ENV) or os.path.join(gettempdir(), f"phalanx_timer_{uuid.uuid4()}")
            server = FileTimerServer(self._path, run_id)
            server.start()
            self._server = server
        return {TIMER_FILE_ENV: self._path}

    def stop(self) -> None:
        """Stop the server, if it runs, and remove the pipe."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
