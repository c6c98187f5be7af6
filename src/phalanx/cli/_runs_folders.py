"""The folders of the runs that a command is about."""

from __future__ import annotations

import click

from phalanx._runs import paths

MANY = 1000
"""Runs in a folder of which a person is told."""


def places(log_dir: str | None) -> tuple[str, ...]:
    """Those in which runs are looked for: ``log_dir``, or else the default ones. Raises UsageError."""
    if log_dir is not None:
        return (log_dir,)
    try:
        return paths.search_folders()
    except paths.NoHomeError as error:
        msg = f"--log-dir: {error}"
        raise click.UsageError(msg) from None
