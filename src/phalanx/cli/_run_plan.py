"""What a run will do: everything that is refused is refused here, and nothing is started, made or reserved."""

from __future__ import annotations

import os
import sys
import time

from phalanx._agent.worker_env import OF_PART, worker_env
from phalanx._base.stderr import say
from phalanx._engine.host_signals import SIGNALS_ENV
from phalanx._group.warm import shared
from phalanx._rendezvous.conf import exposed
from phalanx._run.attempt_groups import AttemptGroups, scripts_of
from phalanx.cli import _python
from phalanx.cli._console import colours_of_workers, console_specs
from phalanx.cli._meet import meet
from phalanx.cli._placement import place
from phalanx.cli._restarts import check_heeded, forwarded, restart_policy
from phalanx.cli._run_checks import (
    check_command,
    check_destination,
    check_preload,
    check_ranks,
    check_rotation,
    check_shown,
    health_address,
    timer_specs,
)
from phalanx.cli._run_logs import run_logs, umask_notes
from phalanx.cli._stdin import Stdin
from phalanx.cli._streams import check_no_logs, check_streams
from phalanx.multiprocessing import Std

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from phalanx._agent.master_port import ReservedPort
    from phalanx._run.node_check import NodeCheck
    from phalanx._run.status_events import StatusEvents
    from phalanx.cli._run_config import RunConfig

_SILENT = ("null", "dynamic_rendezvous")  # destinations of events that lead nowhere


class RunPlan:
    """What a run will do.

    Args:
        config: What was asked for.
        makes_folder: Whether the default folder of runs is made, if it is not there yet.
        typed: The names of the options that stand on the command line itself.

    Raises click.UsageError: what cannot be.
    """

    def __init__(self, config: RunConfig, *, makes_folder: bool, typed: Collection[str] = ()) -> None:
        nprocs = config.nproc_per_node
        self.config = config
        # As with torchrun, --run-path goes before these.
        self._run_path = config.start_method if config.run_path else ""
        self._module, self._no_python = (given and not self._run_path for given in (config.module, config.no_python))
        self.python = sys.executable if self._run_path else _python.executable()
        for script in [config.script] if self._no_python else scripts_of(config.script, nprocs):
            check_command(script, module=self._module, no_python=self._no_python)
        check_preload(config.preload, no_python=self._no_python, python=self.python, run_path=self._run_path)
        local_ranks = None if config.local_ranks_filter is None else set(config.local_ranks_filter)
        redirects, tee = config.redirects, config.tee
        check_ranks(nprocs, redirects, tee, local_ranks)
        self._timers = timer_specs(config.on_expiry, config.hang_timeout)
        if redirects is None and tee is None:
            tee = Std.ALL
        redirects, tee = redirects or Std.NONE, tee or Std.NONE
        self.meeting = meet(config, config.run_id)
        self.run_id = self.meeting.run_id or time.strftime("%Y%m%d-%H%M%S")
        self.stdin = Stdin(config.stdin, nprocs, machines=self.meeting.machines is not None)
        self.policy = restart_policy(config)
        self.forwarded = forwarded(config.signals_forward, config.signals_to_handle)
        self._placement, self._extra, said = place(config, nprocs, config.env)
        self.console = console_specs(config, drain=config.drain)
        check_shown(nprocs, self.console.ranks)
        filters = {"stdout": config.duplicate_stdout_filters, "stderr": config.duplicate_stderr_filters}
        bounds = {
            "max_size": config.log_max_size, "keep": config.log_keep, "compress": config.log_compress,
            "mode": config.log_mode, "keep_attempts": config.keep_attempts,
        }  # fmt: skip
        if config.log_dir == os.devnull:
            check_no_logs(self.console, filters, {**bounds, "keep_runs": config.keep_runs})
            notes = []
        else:
            notes = check_streams(nprocs, redirects, tee, local_ranks, self.console, filters)
        check_rotation(config.log_max_size, keep=config.log_keep, compress=config.log_compress)
        streams = redirects, tee, local_ranks
        if config.logs_specs is None:
            self.specs = run_logs(config.log_dir, *streams, bounds, makes_folder=makes_folder)
        else:
            from phalanx.cli._own_logs import own_logs

            self.specs = own_logs(
                config.logs_specs, config.log_dir, *streams, {**bounds, "keep_runs": config.keep_runs}
            )
        self.specs.keeps_few = self.specs.keeps_few or config.keep_runs is not None
        self.events = self._events(config)
        self.health_address = health_address()
        doubts = [] if self._no_python else _python.doubts(config.script)
        if self.meeting.machines is not None:
            doubts = [*doubts, *exposed(config.rdzv_conf)]
        said = [*self.meeting.notes, *check_heeded(config, self.policy, typed), *doubts, *said]
        unread = self.stdin.unread()
        self.specs.notes = [*self.specs.notes, *said, *notes, *unread, *umask_notes(config.log_mode)]
        self._filters = filters

    def _events(self, config: RunConfig) -> StatusEvents | None:
        """Return what posts the run's events; None: nobody wants them."""
        if config.event_log_handler in _SILENT:
            return None
        from phalanx._run.status_events import StatusEvents

        check_destination(config.event_log_handler)
        return StatusEvents(
            config.event_log_handler, run_id=self.run_id, role=config.role, backend=config.rdzv_backend,
            entry_point=config.script, is_job=True,
        )  # fmt: skip

    def node_check(self) -> NodeCheck | None:
        """Return what this machine has to pass before each attempt; None: nothing."""
        if not self.config.node_check:
            return None
        from phalanx._run.node_check import NodeCheck

        return NodeCheck(self.config.node_check)

    def groups(self, port: ReservedPort | None, variables: Mapping[str, str]) -> AttemptGroups:
        """Return what makes the groups of all attempts.

        Args:
            port: What is reserved; None: the user has given one.
            variables: What all workers find besides.
        """
        config = self.config
        options: dict[str, Any] = {"settle": config.settle, "grace": config.grace, "linger": config.linger}
        options |= {"orphan_grace": config.orphan_grace, "notice": config.notice, "placement": self._placement}
        options |= {"timers": self._timers, "speak": say, "announces": False}
        options["console"] = self.console
        options |= {f"duplicate_{stream}_filters": texts for stream, texts in self._filters.items()}
        envs = self._envs(port, variables)
        # What preloads finds what is the same for all workers: those of one attempt, or of any part in a job of many.
        unknown = () if self.meeting.machines is None else OF_PART
        preload_env = {name: value for name, value in shared(envs).items() if name not in unknown}
        return AttemptGroups(
            config.script, config.args, envs, self.specs, module=self._module, no_python=self._no_python,
            python=self.python, preload=config.preload, preload_env=preload_env, run_path=self._run_path, port=port,
            stdin=self.stdin.of, options=options,
        )  # fmt: skip

    def _envs(self, port: ReservedPort | None, variables: Mapping[str, str]) -> dict[int, dict[str, str]]:
        number = self.meeting.master_port if port is None else port.number
        where = {"master_addr": self.meeting.master_addr, "master_port": number}
        return self.envs(0, self.config.nproc_per_node, variables, **where)

    def envs(
        self, first: int, world_size: int, variables: Mapping[str, str], **place: Any
    ) -> dict[int, dict[str, str]]:
        """Return the environments of the workers of this machine, by local rank.

        Args:
            first: The rank of local rank 0; ``first_in_role``: among the workers of its role.
            world_size: How many workers there are on all machines.
            variables: What all workers find besides.
            place: See `worker_env`.
        """
        config = self.config
        first_in_role = place.pop("first_in_role", first)
        shows = config.tee or (config.tee is None and config.redirects is None)
        colours = colours_of_workers(self.console, config.env) if shows and not config.no_force_color else {}
        same = {SIGNALS_ENV: ",".join(number.name for number in config.signals_to_handle), **colours, **variables}
        return {
            rank: worker_env(
                first + rank,
                world_size,
                role=config.role,
                run_id=self.run_id,
                local_rank=rank,
                local_world_size=config.nproc_per_node,
                role_rank=first_in_role + rank,
                max_restarts=self.policy.max_restarts,
                **place,
            )
            | same
            | self._extra[rank]
            | config.env
            for rank in range(config.nproc_per_node)
        }
