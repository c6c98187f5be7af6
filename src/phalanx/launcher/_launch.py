"""`elastic_launch` and `launch_agent`: run a job to its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from phalanx import metrics
from phalanx._engine.host_signals import SIGNALS_ENV, SignalException
from phalanx._timers.specs import TimerSpecs
from phalanx.agent import LocalElasticAgent, RunResult, WorkerSpec
from phalanx.errors import ChildFailedError
from phalanx.launcher._checks import checked, rendezvous_of
from phalanx.launcher._config import LaunchConfig
from phalanx.rendezvous import ManyMachinesRendezvous, OneMachineRendezvous, RendezvousClosedError


class LaunchedAgent(LocalElasticAgent):
    """The agent of a launched job: its end is that of the job."""

    _is_launched = True

    def error(self, result: RunResult) -> ChildFailedError:
        """Make the error of a run that has failed: with what became of every worker, and where its logs are."""
        return self._failed(result)


class elastic_launch:  # noqa: N801 - torch's name
    """Runs a function or a program on every worker, when it is called with the arguments.

    Args:
        config: What the job is. It may be used again.
        entrypoint: A function; or a program, by its name (found on PATH) or its path.

    >>> from phalanx.launcher import LaunchConfig
    >>> elastic_launch(LaunchConfig(1, 1, 1), "true")()
    {0: None}
    """

    __module__ = "phalanx.launcher"

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the workers to their end. See `launch_agent`."""
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]
) -> dict[int, Any]:
    """Run a job to its end, with restarts.

    Args:
        config: What the job is. It is not changed.
        entrypoint: See `elastic_launch`.
        args: The positional arguments. In strings, ``${local_rank}`` stands for the worker's local rank.

    Returns:
        What each worker of this machine returned (None for a program), by global rank.

    Raises:
        TypeError, ValueError: What is wrong with which field; nothing has been started.
        phalanx.events.UnknownDestinationError: ``event_log_handler`` names no destination. It is a KeyError.
        ChildFailedError: Workers have failed, on this machine or on another one, and there was no restart left. It has
            the failures of all machines by global rank, and is the same on each of them: the first is the root cause.
        SignalException: A signal arrived. No worker is left. Other machines go on without this one, if they can.
        phalanx.rendezvous.RendezvousError: The machines have not met; or (`RendezvousClosedError`) the job has ended
            otherwise: it was closed, or a machine was lost.
        Exception: What `phalanx.agent.SimpleElasticAgent.run` raises otherwise.
    """
    config = checked(config)
    logs_specs, shutdown_timeout = config.logs_specs, config.shutdown_timeout
    assert logs_specs is not None
    assert shutdown_timeout is not None
    handler = rendezvous_of(config)
    spec = WorkerSpec(
        config.role,
        config.nproc_per_node,
        handler,
        entrypoint=entrypoint,
        args=tuple(args),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    agent = LaunchedAgent(
        spec,
        logs_specs,
        config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=shutdown_timeout,
        timers=TimerSpecs(),
    )
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    ends = True
    try:
        with _handling(config.signals_to_handle):
            result = agent.run()
    except RendezvousClosedError as error:
        if isinstance(error.__cause__, ChildFailedError):  # the report of all machines
            raise error.__cause__ from None
        raise
    except SignalException:  # other machines may go on, and somebody else's handler may end the job for all of them
        ends = isinstance(handler, ManyMachinesRendezvous | OneMachineRendezvous)
        raise
    finally:
        if ends:
            handler.shutdown()
    if result.is_failed():
        raise agent.error(result)
    return result.return_values


@contextmanager
def _handling(names: str) -> Iterator[None]:
    """Have the agent and its workers find these signals in the environment, as torch's do; as before afterwards.

    Not in another thread than the main one, where no handler is set: others may be launching there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = os.environ.get(SIGNALS_ENV)
    os.environ[SIGNALS_ENV] = names
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SIGNALS_ENV, None)
        else:
            os.environ[SIGNALS_ENV] = before
