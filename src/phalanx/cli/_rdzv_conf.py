"""What ``--rdzv-conf`` and the environment say of how the agents of many machines meet; files are read, and checked."""

from __future__ import annotations

import click

from phalanx._agent.endpoint import FALSE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SECRET = "PHALANX_JOB_SECRET"  # noqa: S105 - the name of a variable
"""The environment variable that holds the secret of a job."""

LEAST_SECRET = 16
"""Characters that a secret has at least: it cannot be guessed by trying."""

_LEAST_TTL, _MOST_TTL = 2, 86400
_MOST_PORT = 65535
_MOST_SECONDS = 1e9
_MOST_FILE = 1 << 20
_SECONDS = {
    "join_timeout": "join_timeout", "timeout": "join_timeout", "last_call_timeout": "last_call",
    "away_timeout": "away_timeout",
}  # fmt: skip
"""Settings that are times, and what they are called in `Machines`."""

_OF_ETCD = ("ca", "cert", "key", "user", "password_file")
"""Settings that say who we are to an etcd that is there."""


def machine_settings(conf: Mapping[str, str], *, is_hosted: bool) -> dict[str, Any]:
    """Return what ``--rdzv-conf`` says, as `Machines` has it. Raises UsageError.

    Settings of torch's backends that have no counterpart here are passed over.

    Args:
        conf: The settings.
        is_hosted: Whether an agent of the job hosts the store.

    >>> machine_settings({"timeout": "60", "lease_ttl": "3", "read_timeout": "9"}, is_hosted=True)
    {'join_timeout': 60.0, 'lease_ttl': 3}
    """
    given = [name for name in _OF_ETCD if name in conf]
    if is_hosted and given:
        msg = f"--rdzv-conf: {given[0]}: it is for an etcd that is there; an agent of this job hosts the store"
        raise click.UsageError(msg)
    if "away_timeout" in conf and not is_hosted:
        msg = "--rdzv-conf: away_timeout: the workers go on for as long as an etcd is away that no agent hosts"
        raise click.UsageError(msg)
    for pair in (("user", "password_file"), ("cert", "key")):
        if (pair[0] in conf) != (pair[1] in conf):
            msg = f"--rdzv-conf: {' and '.join(pair)} belong together; one of them is missing"
            raise click.UsageError(msg)
    found: dict[str, Any] = {named: _seconds(name, conf[name]) for name, named in _SECONDS.items() if name in conf}
    if "lease_ttl" in conf:
        found["lease_ttl"] = _whole("lease_ttl", conf["lease_ttl"], _LEAST_TTL, _MOST_TTL, "seconds")
    for name in ("ca", "cert", "key"):
        if name in conf:
            _read(name, conf[name])
            found[name] = conf[name]
    if "user" in conf:
        found["user"] = conf["user"]
        found["password"] = _text("password_file", conf["password_file"])
    return found


def agent_port(conf: Mapping[str, str], default: int) -> int:
    """Return the port at which rank 0's agent listens to those of other machines. Raises UsageError.

    >>> agent_port({}, 29501), agent_port({"agent_port": "4000"}, 29501)
    (29501, 4000)
    """
    if "agent_port" in conf:
        return _whole("agent_port", conf["agent_port"], 1, _MOST_PORT, "numbers")
    if default > _MOST_PORT:
        msg = f"--rdzv-conf: agent_port=PORT is needed: --master-port is {_MOST_PORT}, and there is no port after it"
        raise click.UsageError(msg)
    return default


def may_host(conf: Mapping[str, str], *, is_here: bool) -> bool:
    """Whether this machine's agent hosts the store: that of the endpoint does, unless ``is_host`` says otherwise.

    >>> may_host({}, is_here=True), may_host({"is_host": "no"}, is_here=True)
    (True, False)
    """
    return conf["is_host"].lower() not in FALSE if "is_host" in conf else is_here


def job_secret(conf: Mapping[str, str], environ: Mapping[str, str]) -> bytes:
    """Return the secret of the job; empty: there is none. Raises UsageError.

    It is in `SECRET`, or in the file that ``secret_file`` of ``--rdzv-conf`` names.
    """
    text, where = environ.get(SECRET, ""), SECRET
    if "secret_file" in conf:
        text, where = _text("secret_file", conf["secret_file"]), f"--rdzv-conf: secret_file: {conf['secret_file']}"
    elif not text:
        return b""
    if len(text) < LEAST_SECRET:
        msg = f"{where}: expected {LEAST_SECRET} characters or more, as `openssl rand -hex 32` prints them; "
        msg += f"it has {len(text)}"
        raise click.UsageError(msg)
    return text.encode("utf-8", "surrogateescape")


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < _MOST_SECONDS:
        msg = f"--rdzv-conf: {name}: expected seconds, 0 or more, got {text!r}"
        raise click.UsageError(msg)
    return seconds


def _whole(name: str, text: str, least: int, most: int, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
        msg = f"--rdzv-conf: {name}: expected whole {what}, {least} to {most}, got {text!r}"
        raise click.UsageError(msg)
    return int(text)


def _text(name: str, path: str) -> str:
    return _read(name, path).decode("utf-8", "surrogateescape").rstrip("\r\n")


def _read(name: str, path: str) -> bytes:
    """Read a file that a setting names. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_FILE)
    except OSError as error:
        msg = f"--rdzv-conf: {name}: {path}: {error.strerror}"
        raise click.UsageError(msg) from None
