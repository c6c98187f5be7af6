"""The timer server that an agent runs for its workers when ``TORCHELASTIC_ENABLE_FILE_TIMER`` is 1."""

from __future__ import annotations

import os

ENABLE_FILE_TIMER_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Server(Protocol):
        """A `phalanx.timer.FileTimerServer`."""

        def start(self) -> None: ...
        def stop(self) -> None: ...


class FileTimers:
    """Runs a `phalanx.timer.FileTimerServer` from the first attempt to the end, if the environment asks for one.

    Its pipe is at ``TORCHELASTIC_TIMER_FILE``, or else at a path of its own among the temporary files. Workers find
    that variable, and make their `FileTimerClient` of it.

    Args:
        make: Makes the server of a path and the id of the run.
    """

    def __init__(self, make: Callable[[str, str], Server]) -> None:
        self._make = make
        self._server: Server | None = None
        self._path = ""

    def start(self, run_id: str) -> dict[str, str]:
        """Start the server, if it is wanted and does not run. Return the variables for workers. Raises OSError."""
        if os.environ.get(ENABLE_FILE_TIMER_ENV) != "1":
            return {}
        if self._server is None:
            import uuid
            from tempfile import gettempdir

            self._path = os.environ.get(TIMER_FILE_ENV) or os.path.join(gettempdir(), f"phalanx_timer_{uuid.uuid4()}")
            server = self._make(self._path, run_id)
            try:
                server.start()
            except OSError as error:
                why = error.strerror if isinstance(error.errno, int) else error.errno
                raise OSError(None, f"{TIMER_FILE_ENV}: {self._path}: {why}") from error
            self._server = server
        return {TIMER_FILE_ENV: self._path}

    def stop(self) -> None:
        """Stop the server, if it runs, and remove the pipe."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
