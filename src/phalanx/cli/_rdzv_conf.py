"""What ``--rdzv-conf`` and the environment say of how machines meet: `_rendezvous.conf`, with the command's errors."""

from __future__ import annotations

from contextlib import contextmanager

import click

from phalanx._rendezvous import conf as settings
from phalanx._rendezvous.conf import NOT_FOR_WORKERS, SECRET, exposed, may_host, secrets_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

__all__ = [
    "NOT_FOR_WORKERS",
    "SECRET",
    "agent_port",
    "exposed",
    "job_secret",
    "machine_settings",
    "may_host",
    "secrets_of",
]


def machine_settings(conf: Mapping[str, str], environ: Mapping[str, str], *, is_hosted: bool) -> dict[str, Any]:
    """See `_rendezvous.conf`. Raises UsageError."""
    with _refusing():
        return settings.machine_settings(conf, environ, is_hosted=is_hosted)


def agent_port(conf: Mapping[str, str], default: int) -> int:
    """See `_rendezvous.conf`. Raises UsageError."""
    with _refusing():
        return settings.agent_port(conf, default)


def job_secret(conf: Mapping[str, str], environ: Mapping[str, str]) -> bytes:
    """See `_rendezvous.conf`. Raises UsageError."""
    with _refusing():
        return settings.job_secret(conf, environ)


@contextmanager
def _refusing() -> Iterator[None]:
    """Make a ValueError a UsageError that names the option, unless it names the variable."""
    try:
        yield
    except ValueError as error:
        told = str(error)
        raise click.UsageError(told if told.startswith(SECRET) else f"--rdzv-conf: {told}") from None
