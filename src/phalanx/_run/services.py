"""What a run has beside its workers if the environment asks for it: a timer server, an answer how it is, a log."""

from __future__ import annotations

import os
from contextlib import contextmanager

from phalanx._agent.file_timers import FileTimers
from phalanx._agent.health import Health

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from phalanx._agent.file_timers import Server
    from phalanx._events.kinds import Event


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
        self._timers = FileTimers(_make_server)
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


def _make_server(path: str, run_id: str) -> Server:
    from phalanx.timer import FileTimerServer

    return FileTimerServer(path, run_id)
