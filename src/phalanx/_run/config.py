"""What was asked of a run, as values: whoever gave them, a command line, a job file or the environment.

Owns also the console that the values describe. Knows no command line: what cannot be is a ValueError, whose text names
the option.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from phalanx._base.tty import use_colour
from phalanx._logs.console import ConsoleSpecs
from phalanx._logs.layout import Std
from phalanx._logs.prefixes import TEMPLATE_ENV, template_or_default

MANY = 1000
"""Runs in a folder of which a person is told."""

GONE = "the current folder has been removed, and there is nothing at a relative path"
"""Why what is relative is refused, if `is_here_gone`."""


EVENTS = ("started", "hung", "straggler", "restarted", "failed", "stopped", "succeeded")
"""What ``--on-event`` can be about."""


def is_here_gone() -> bool:
    """Whether the current folder has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


class RunError(Exception):
    """Why a run cannot begin, or go on, though nothing is wrong with what was asked for. Its text names the cause."""


class ConsoleConfig:
    """How lines are shown: a value for each option."""

    ranks: list[int] | None
    grep: list[str] | None
    exclude: list[str] | None
    ignore_case: bool
    after_context: int | None
    before_context: int | None
    context: int | None
    fold: bool
    timestamps: bool
    elapsed: bool
    log_format: str
    log_line_prefix_template: str | None
    color: str
    raw: bool

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class RunConfig(ConsoleConfig):
    """What `phalanx run` was asked for: a value for each option, which docs/reference/cli.md describes."""

    script: str
    args: tuple[str, ...]
    env: dict[str, str]
    """Variables for all workers, beside those that they get anyway."""

    nproc_per_node: int
    module: bool
    no_python: bool
    run_path: bool
    run_id: str | None
    role: str
    preload: list[str] | None
    start_method: str
    stdin: int | None
    pty: range | list[int] | None
    """Global ranks that have a terminal of their own."""
    detach: bool

    redirects: Std | dict[int, Std] | None
    tee: Std | dict[int, Std] | None
    log_dir: str | None
    logs_specs: str | None
    log_max_size: int | None
    log_keep: int | None
    log_compress: bool
    log_mode: int | None
    keep_attempts: int | None
    keep_runs: int | None
    on_report: str
    event_log_handler: str
    sample: float
    """Seconds between two samples of the workers; 0: none is taken."""
    metrics_port: tuple[str, int] | None
    on_event: list[tuple[tuple[str, ...], str]] | None
    """Commands, each with the `EVENTS` after which it runs."""
    duplicate_stdout_filters: list[str] | None
    duplicate_stderr_filters: list[str] | None
    local_ranks_filter: list[int] | None

    hang_timeout: float | None
    on_expiry: tuple[tuple[str, float], ...]
    breakpoint_timeout: float | None
    post_mortem: bool
    debugpy: int | None
    debugpy_wait: bool
    grace: float
    settle: float
    linger: float
    notice: tuple[int, float] | None
    orphan_grace: float
    no_force_color: bool
    drain: float
    signals_to_handle: list[signal.Signals]
    signals_forward: list[signal.Signals]

    max_restarts: tuple[int, float | None]
    """How many, and within how many seconds; None: in all."""
    backoff: tuple[float, float | None]
    backoff_jitter: float
    min_uptime: tuple[float, int] | None
    max_no_progress: int | None
    never_restart_on: list[int] | None
    always_restart_on: list[int] | None
    monitor_interval: float | None

    cpu_bind: str
    numa_binding: str | None
    nice: int
    rlimit: dict[str, str | tuple[str, str]] | None
    virtual_local_rank: bool

    master_addr: str
    master_port: int
    local_addr: str | None
    rdzv_id: str | None
    rdzv_backend: str
    rdzv_endpoint: list[tuple[str, int]]
    insecure: bool
    rdzv_conf: dict[str, str]
    rejoin_delay: float
    on_sigterm: str | None
    exclude_after: int | None
    node_check: str | None
    exit_barrier_timeout: float
    keep: bool
    standalone: bool
    nnodes: tuple[int, int] | None
    node_rank: int | None


def colours_of_workers(console: ConsoleSpecs, env: Mapping[str, str]) -> dict[str, str]:
    """Return what has workers, which write to files, use colours: nothing unless the console has them for all lines.

    ``env`` are variables that all workers get; one that the user has set, there or for us, stays as it is.
    """
    chosen = (os.environ.get(name) or env.get(name) for name in ("NO_COLOR", "FORCE_COLOR", "PYTHON_COLORS"))
    if any(chosen) or console.format != "text" or not all(use_colour(each, console.color) for each in (1, 2)):
        return {}
    # rich takes FORCE_COLOR for a terminal, on which it draws its bars again and again, unless the other says no.
    return {"FORCE_COLOR": "1", "TTY_INTERACTIVE": os.environ.get("TTY_INTERACTIVE", "0")}


def console_specs(config: ConsoleConfig, **more: Any) -> ConsoleSpecs:
    """Return what these values say of the console. Raises ValueError."""
    if config.timestamps and config.elapsed:
        raise ValueError("--timestamps and --elapsed exclude each other")
    try:
        template = config.log_line_prefix_template
        return ConsoleSpecs(
            ranks=config.ranks, grep=config.grep, exclude=config.exclude, ignore_case=config.ignore_case,
            before=(config.context or 0) if config.before_context is None else config.before_context,
            after=(config.context or 0) if config.after_context is None else config.after_context,
            fold=config.fold, timestamps="iso" if config.timestamps else "elapsed" if config.elapsed else None,
            format=config.log_format, template=template_or_default(template),
            raw=config.raw, color=config.color, **more,
        )  # fmt: skip
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        options = {
            "format": "log-format", "template": "log-line-prefix-template", "fold, format": "fold",
            "before": "before-context" if config.before_context else "context",
            "after": "after-context" if config.after_context else "context", "ignore_case": "ignore-case",
        }  # fmt: skip
        option = name if name.startswith(TEMPLATE_ENV) else f"--{options.get(name, name)}"
        raise ValueError(f"{option}{colon}{rest}") from None
