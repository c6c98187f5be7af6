"""What a run will do: everything that is refused is refused here, and nothing is started, made or reserved."""

from __future__ import annotations

import os
import time

from phalanx._agent.worker_env import worker_env
from phalanx.cli import _python
from phalanx.cli._attempt_groups import AttemptGroups
from phalanx.cli._console import console_specs
from phalanx.cli._placement import place
from phalanx.cli._restarts import forwarded, restart_policy
from phalanx.cli._run_checks import check_command, check_preload, check_ranks, check_rotation, check_shown, timer_specs
from phalanx.cli._run_logs import run_logs, umask_notes
from phalanx.cli._say import say
from phalanx.cli._streams import check_no_logs, check_streams
from phalanx.multiprocessing import Std

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx._agent.master_port import ReservedPort
    from phalanx.cli._run_config import RunConfig


class RunPlan:
    """What a run will do.

    Args:
        config: What was asked for.
        makes_folder: Whether the default folder of runs is made, if it is not there yet.

    Raises click.UsageError: what cannot be.
    """

    def __init__(self, config: RunConfig, *, makes_folder: bool) -> None:
        nprocs = config.nproc_per_node
        self.config = config
        self.python = _python.executable()
        check_command(config.script, module=config.module, no_python=config.no_python)
        check_preload(config.preload, no_python=config.no_python, python=self.python)
        local_ranks = None if config.local_ranks_filter is None else set(config.local_ranks_filter)
        redirects, tee = config.redirects, config.tee
        check_ranks(nprocs, redirects, tee, local_ranks)
        self._timers = timer_specs(config.on_expiry, config.hang_timeout)
        if redirects is None and tee is None:
            tee = Std.ALL
        redirects, tee = redirects or Std.NONE, tee or Std.NONE
        self.run_id = config.run_id or time.strftime("%Y%m%d-%H%M%S")
        self.policy = restart_policy(config)
        self.forwarded = forwarded(config.signals_forward)
        self._placement, self._extra, said = place(config, nprocs, config.env)
        self.console = console_specs(config, drain=config.drain)
        check_shown(nprocs, self.console.ranks)
        filters = {"stdout": config.duplicate_stdout_filters, "stderr": config.duplicate_stderr_filters}
        bounds = {
            "max_size": config.log_max_size, "keep": config.log_keep, "compress": config.log_compress,
            "mode": config.log_mode,
        }  # fmt: skip
        if config.log_dir == os.devnull:
            check_no_logs(self.console, filters, {**bounds, "keep_runs": config.keep_runs})
            notes = []
        else:
            notes = check_streams(nprocs, redirects, tee, local_ranks, self.console, filters)
        check_rotation(config.log_max_size, keep=config.log_keep, compress=config.log_compress)
        self.specs = run_logs(config.log_dir, redirects, tee, local_ranks, bounds, makes_folder=makes_folder)
        self.specs.keeps_few = config.keep_runs is not None
        doubts = [] if config.no_python else _python.doubts(config.script)
        self.specs.notes = [*self.specs.notes, *doubts, *said, *notes, *umask_notes(config.log_mode)]
        self._filters = filters

    def groups(self, port: ReservedPort | None) -> AttemptGroups:
        """Return what makes the groups of all attempts. ``port``: what is reserved; None: the user has given one."""
        config = self.config
        options: dict[str, Any] = {"settle": config.settle, "grace": config.grace, "linger": config.linger}
        options |= {"orphan_grace": config.orphan_grace, "notice": config.notice, "placement": self._placement}
        options |= {"timers": self._timers, "speak": say, "console": self.console}
        options |= {f"duplicate_{stream}_filters": texts for stream, texts in self._filters.items()}
        return AttemptGroups(
            config.script, config.args, self._envs(port), self.specs, module=config.module, no_python=config.no_python,
            python=self.python, preload=config.preload, port=port, options=options,
        )  # fmt: skip

    def _envs(self, port: ReservedPort | None) -> dict[int, dict[str, str]]:
        config = self.config
        return {
            rank: worker_env(
                rank,
                config.nproc_per_node,
                role=config.role,
                run_id=self.run_id,
                master_addr=config.master_addr,
                master_port=config.master_port if port is None else port.number,
                max_restarts=self.policy.max_restarts,
            )
            | self._extra[rank]
            | config.env
            for rank in range(config.nproc_per_node)
        }
