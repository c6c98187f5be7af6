"""``phalanx run --dry-run``: what each rank would be given, of a run that is not started. Loaded only for that."""

from __future__ import annotations

import errno
import json
import os
import shlex
from contextlib import ExitStack
from typing import Any

from phalanx._base.stderr import say
from phalanx._base.text import how_many, name_ranks
from phalanx._base.tty import printable
from phalanx._engine.protocol import STOP_PAGE_ENV
from phalanx._evidence.error_file import ERROR_FILE_ENV
from phalanx._logs.layout import SYS_STREAM, LogsDest
from phalanx._placement import topology
from phalanx._run.config import RunConfig, RunError
from phalanx._run.plan import RunPlan, in_our_words, reserve_port
from phalanx._run.services import ENABLE_FILE_TIMER_ENV, TIMER_FILE_ENV, ports_for_workers
from phalanx._run.worker_env import MASTER_PORT, RESTART_COUNT
from phalanx._runs.paths import can_be_made
from phalanx._store.etcd import INSTALL
from phalanx._timers.layout import TIMERS_ENV
from phalanx.cli._commands import put

_AGREED = (
    *("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR"),
    *(MASTER_PORT, RESTART_COUNT),
)
"""What many machines agree on."""


def rehearse(plan: RunPlan) -> dict[int, dict[str, Any]]:
    """Return what each rank would be given. Everything that a start would refuse by itself is refused here, too.

    Nothing is started, and no folder is made; the port is given back. Raises RunError.
    """
    config, folder = plan.config, plan.specs.root_log_dir
    if folder is not None and plan.specs.is_kept and not can_be_made(os.path.abspath(folder)):
        msg = f"--log-dir: {PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)}"
        raise RunError(msg)
    with ExitStack() as until_end:
        port = None if plan.meeting.master_port else until_end.enter_context(reserve_port())
        groups = plan.groups(port, ports_for_workers(plan.addresses))
        until_end.callback(groups.close)
        group = groups.make(0, None)
        try:
            previewed = group.preview()
        except OSError as error:
            raise RunError(in_our_words(error, group)) from None
        except ValueError as error:
            raise ValueError(in_our_words(error, group)) from None
    logs = plan.specs.preview(group.envs)
    later = {
        *("PHALANX_GROUP", TIMERS_ENV),
        *([MASTER_PORT] if port else []),
        *(_AGREED if plan.meeting.machines else ()),
        *([STOP_PAGE_ENV] if config.notice else []),
    }
    if os.environ.get(ENABLE_FILE_TIMER_ENV) == "1" and not (
        os.environ.get(TIMER_FILE_ENV) or TIMER_FILE_ENV in config.env
    ):
        later.add(TIMER_FILE_ENV)
    ranks = {}
    for rank, (argv, devices, bounds) in previewed.items():
        cpus, nice, limits = bounds or ([], 0, [])
        env: dict[str, str | None] = {**group.envs[rank], **devices, ERROR_FILE_ENV: logs.error_files[rank]}
        env |= dict.fromkeys(later)
        ranks[rank] = {
            "rank": rank,
            "argv": groups.called(rank) if config.run_path else [plan.python, "-u", *argv] if config.preload else argv,
            "run_path": config.start_method if config.run_path else None,
            "preloaded": config.preload or [],
            "environment": {name: env[name] for name in sorted(env) if env[name] != os.environ.get(name, "")
                            or name not in os.environ},
            "cpus": cpus or sorted(os.sched_getaffinity(0)),
            "nice": nice,
            "limits": {name: [soft, hard] for name, _, soft, hard in limits},
            **_streams(logs, rank),
        }  # fmt: skip
    return ranks


def _streams(logs: LogsDest, rank: int) -> dict[str, dict[str, Any]]:
    """Where the streams of a rank would go."""
    found = {}
    for name, paths, teed in (("stdout", logs.stdouts, logs.tee_stdouts), ("stderr", logs.stderrs, logs.tee_stderrs)):
        path = paths[rank]
        found[name] = {"file": path or None, "console": path == SYS_STREAM or rank in teed}
    return found


def show(plan: RunPlan) -> None:
    """Print what each rank would be given; of many machines, what is at the endpoint. Raises RunError."""
    ranks = rehearse(plan)
    if plan.meeting.machines is not None:
        from phalanx._rendezvous.entrance import probe

        try:
            say(probe(plan.meeting.machines, plan.run_id))
        except ImportError as error:
            msg = f"--rdzv-backend {plan.meeting.machines.backend}: {error}; {INSTALL}"
            raise RunError(msg) from None
    if plan.config.log_format == "json":
        put("".join(f"{json.dumps(facts)}\n" for facts in ranks.values()))
        return
    for note in plan.specs.notes:
        say(note)
    put("".join(f"{line}\n" for line in (*_lines(ranks), *_commands(plan.config))))


def _lines(ranks: dict[int, dict[str, Any]]) -> list[str]:
    """What is equal for all ranks once, and then what is not, rank by rank."""
    each = {rank: _described(facts) for rank, facts in ranks.items()}
    first = each[0]
    common = [fact for fact in first if len(each) > 1 and all(fact in facts for facts in each.values())]
    lines = [f"{how_many(len(ranks), 'worker')} would be started"]
    if common:
        lines += [f"{name_ranks(ranks)}:", *_aligned(common)]
    for rank, facts in each.items():
        lines += [f"rank {rank}:", *_aligned([fact for fact in facts if fact not in common])]
    return lines


def _commands(config: RunConfig) -> list[str]:
    """What would run beside the workers, when something happens."""
    found = [(f"on {', '.join(names)}:", shlex.join(["sh", "-c", command])) for names, command in config.on_event or []]
    return [f"{head} {printable(text)}" for head, text in found]


def _aligned(facts: list[tuple[str, str]]) -> list[str]:
    lines, last = [], ""
    for head, text in facts:
        lines.append(f"  {head if head != last else '':<12} {printable(text)}")
        last = head
    return lines


def _described(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What a rank would be given, as lines: what each is about, and the text."""
    found = [("command", shlex.join(facts["argv"]))]
    if facts["run_path"]:
        found.append(("", f"(by runpy.run_path, in a worker that {facts['run_path']} starts)"))
    if facts["preloaded"]:
        found.append(("", f"(a fork of an interpreter that has imported {', '.join(facts['preloaded'])})"))
    for name, value in facts["environment"].items():
        text = f"{name}: chosen at the start" if value is None else f"{name}={shlex.quote(value)}"
        found.append(("environment", text))
    found.append(("CPUs", topology.format_list(facts["cpus"])))
    if facts["nice"]:
        found.append(("nice", f"{facts['nice']:+d}"))
    for name, (soft, hard) in facts["limits"].items():
        text = " : ".join("unlimited" if value < 0 else str(value) for value in dict.fromkeys((soft, hard)))
        found.append(("limit", f"{name} {text}"))
    for name in ("stdout", "stderr"):
        path, console = facts[name]["file"], facts[name]["console"]
        found.append((name, " and ".join(filter(None, (path, "the console" if console else "")))))
    return found
