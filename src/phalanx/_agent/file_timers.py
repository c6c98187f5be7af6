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

    Its pipe is at ``TORCHELASTIC_TIMER_FILE``, or beside it, if another agent's is there; or else at a path of its own
    among the temporary files. Workers find that variable, and make their `FileTimerClient` of it.

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
            try:
                self._server = self._serve(run_id)
            except OSError as error:
                if not getattr(error, "is_served", False):
                    raise
                self._path = f"{self._path}.{os.getpid()}"  # another agent of this machine has that one
                self._server = self._serve(run_id)
        return {TIMER_FILE_ENV: self._path}

    def _serve(self, run_id: str) -> Server:
        server = self._make(self._path, run_id)
        try:
            server.start()
        except OSError as error:
            if getattr(error, "is_served", False):
                raise
            why = error.strerror if isinstance(error.errno, int) else error.errno
            msg = f"{TIMER_FILE_ENV}: {self._path}: {why}"
            raise OSError(msg) from error
        return server

    def stop(self) -> None:
        """Stop the server, if it runs, and remove the pipe."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
