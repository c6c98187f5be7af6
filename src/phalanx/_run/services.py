"""What a run has beside its workers if the environment asks for it: a timer server, an answer how it is, a log."""

from __future__ import annotations

import os
from contextlib import contextmanager

from phalanx._agent.health import Health

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from phalanx._events.kinds import Event
    from phalanx.timer import FileTimerServer


ENABLE_FILE_TIMER_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"

LEVEL_ENV = "LOGLEVEL"
"""The variable that torch's loggers heed, too."""


class Services:
    """The services of a run. A context manager, which ends them.

    Args:
        address: Where it answers how it is, see `health_address`.
        run_id: The id of the run.
        max_restarts: How many restarts there may be.

    Attributes:
        variables: What workers find in the environment because of them.

    Raises OSError: a service cannot be started.
    """

    def __init__(self, address: tuple[str, int] | None, run_id: str, max_restarts: int) -> None:
        self._health = Health(address, run_id=run_id, max_restarts=max_restarts)
        self._timers = FileTimers()
        try:
            self._health.start()
            self.variables = self._timers.start(run_id) | self._health.variables()
        except BaseException:
            self._stop()
            raise

    def observe(self, events: list[Event]) -> None:
        """Note what has happened: an observer of the run's events."""
        self._health.observe(events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._timers.stop()
        self._health.stop()


@contextmanager
def log_shown() -> Iterator[None]:
    """Write to stderr what is logged to ``phalanx`` and below, from the level of ``LOGLEVEL`` on, if that is set.

    Without it, or with a name that is no level, the host's settings hold: by default, warnings and errors are written.
    """
    text = os.environ.get(LEVEL_ENV, "").strip().upper()
    if not text:
        yield
        return
    import logging

    level = logging.getLevelNamesMapping().get(text)
    logger = logging.getLogger("phalanx")
    if level is None or logger.handlers:
        yield
        return
    before = logger.level
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("phalanx: %(levelname)s: %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class FileTimers:
    """Runs a `phalanx.timer.FileTimerServer` from the first attempt to the end, if the environment asks for one.

    Its pipe is at ``TORCHELASTIC_TIMER_FILE``, or beside it, if another agent's is there; or else at a path of its own
    among the temporary files. Workers find that variable, and make their `FileTimerClient` of it.
    """

    def __init__(self) -> None:
        self._server: FileTimerServer | None = None
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

    def _serve(self, run_id: str) -> FileTimerServer:
        from phalanx.timer import FileTimerServer

        server = FileTimerServer(self._path, run_id)
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
