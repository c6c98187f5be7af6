"""What a run has beside its workers if it is asked for: a timer server, an answer how it is, a log."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager

from phalanx._rendezvous.endpoint import split_listener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from phalanx._events.kinds import Event
    from phalanx._run.status import RunStatus
    from phalanx.timer import FileTimerServer

PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"
"""The variable: a port, or an address of this machine and a port. An empty one is as none."""

METRICS_PORT = "--metrics-port"
"""The option with such a value,"""
METRICS_PORT_ENV = "PHALANX_METRICS_PORT"
"""and its variable."""

Addresses = dict[tuple[str, int], str]
"""Where an agent answers how it is: hosts and ports, and of each the option or the variable that it comes from."""


def address_of_environment() -> Addresses:
    """Return where to answer, by the environment. Raises ValueError."""
    text = os.environ.get(PORT_ENV, "").strip()
    if not text:
        return {}
    try:
        return {split_listener(text): PORT_ENV}
    except ValueError as error:
        msg = f"{PORT_ENV}: {error}"
        raise ValueError(msg) from None


ENABLE_FILE_TIMER_ENV = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE_ENV = "TORCHELASTIC_TIMER_FILE"

LEVEL_ENV = "LOGLEVEL"
"""The variable that torch's loggers heed, too."""


class Services:
    """The services of a run. A context manager, which ends them.

    Args:
        addresses: Where it answers how it is.
        status: What it answers.

    Attributes:
        variables: What workers find in the environment because of them: an agent among them could not have the same
            ports.
        observers: Take the events of the run, each on a thread of the name that is its key.

    Raises OSError: a service cannot be started.
    """

    def __init__(self, addresses: Addresses, status: RunStatus) -> None:
        self.observers: dict[str, Callable[[list[Event]], object]] = {}
        with ExitStack() as held:
            self.variables = _start_timers(status.run_id, held) | ports_for_workers(addresses)
            if addresses:
                from phalanx._run.health import HealthServer
                from phalanx._run.local_server import no_fork
                from phalanx._run.run_metrics import RunMetrics

                metrics = RunMetrics(status)
                self.observers["phalanx-metrics"] = metrics.observe

                def answer(request: bytes) -> bytes:
                    with no_fork:  # now: no start is to wait for it
                        from phalanx._run.health_pages import answer
                    return answer(request, metrics)

                for address, name in addresses.items():
                    held.enter_context(HealthServer(address, name, answer))
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


def ports_for_workers(addresses: Addresses) -> dict[str, str]:
    """Return the variables that workers find empty where an agent answers at these addresses."""
    return {name: "" for name in (PORT_ENV, METRICS_PORT_ENV) if addresses and os.environ.get(name)}


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


def _start_timers(run_id: str, held: ExitStack) -> dict[str, str]:
    """Run a `phalanx.timer.FileTimerServer` until ``held`` is closed, if the environment asks for one.

    Its pipe is at ``TORCHELASTIC_TIMER_FILE``, or beside it, if another agent's is there; or else at a path of its own
    among the temporary files. Returns the variable in which workers find it, see `FileTimerClient`. Raises OSError.
    """
    if os.environ.get(ENABLE_FILE_TIMER_ENV) != "1":
        return {}
    import uuid
    from tempfile import gettempdir

    path = os.environ.get(TIMER_FILE_ENV) or os.path.join(gettempdir(), f"phalanx_timer_{uuid.uuid4()}")
    try:
        server = _serve_timers(path, run_id)
    except OSError as error:
        if not getattr(error, "is_served", False):
            raise
        path = f"{path}.{os.getpid()}"  # another agent of this machine has that one
        server = _serve_timers(path, run_id)
    held.callback(server.stop)
    return {TIMER_FILE_ENV: path}


def _serve_timers(path: str, run_id: str) -> FileTimerServer:
    from phalanx.timer import FileTimerServer

    server = FileTimerServer(path, run_id)
    try:
        server.start()
    except OSError as error:
        if getattr(error, "is_served", False):
            raise
        why = error.strerror if isinstance(error.errno, int) else error.errno
        msg = f"{TIMER_FILE_ENV}: {path}: {why}"
        raise OSError(msg) from error
    return server
