"""How a machine meets the others of its job: ``--rdzv-conf``, the secret and the endpoint are read, and checked.

Files are read; nothing is connected to. What is wrong is a ValueError, whose text begins with "endpoint", "max_nodes",
"rank", "run_id" or "keep", with the name of a setting, or with that of a variable. Who has asked puts the name of an
own parameter in its place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from phalanx._base.host_names import address_text, is_loopback, is_no_machine
from phalanx._base.text import parse_duration
from phalanx._rendezvous.endpoint import FALSE, split_endpoint, where_is
from phalanx._rendezvous.settings import C10D, C10D_PORT, ETCD_PORT, STATIC, STATIC_PORT, Machines

SECRET = "PHALANX_JOB_SECRET"  # noqa: S105 - the name of a variable
"""The environment variable that holds the secret of a job."""

PASSWORD = "PHALANX_ETCD_PASSWORD"  # noqa: S105 - as above
"""The environment variable that holds the password of the ``user`` of an etcd."""

NOT_FOR_WORKERS = {SECRET: "", PASSWORD: ""}
"""What workers find in place of what is the agents' alone."""

FILES = ("ca", "cert", "key", "password_file", "secret_file")
"""Settings that name files."""

LEAST_SECRET = 16
"""Characters that a secret has at least: it cannot be guessed by trying."""

CANNOT_KEEP = "one of this job's agents has the store, which ends with the job; it is for an etcd of your own"
"""Why what a job was cannot be kept."""

ETCD_AWAY = 300.0
"""Seconds for which workers go on while an etcd is away, unless that is set: it may be only restarted, or upgraded."""

_LEAST_TTL, _MOST_TTL = 2, 86400
_MOST_PORT = 65535
_DIGITS = 5  # of a port
_MOST_SECONDS = 1e9
_MOST_FILE = 1 << 20
_SECONDS = {
    "timeout": "join_timeout", "join_timeout": "join_timeout", "last_call_timeout": "last_call",
    "away_timeout": "away_timeout",
}  # fmt: skip
"""Settings that are times, and what they are called in `Machines`."""

_OF_ETCD = ("ca", "cert", "key", "user", "password_file")
"""Settings that say who we are to an etcd that is there."""


def machine_settings(conf: Mapping[str, str], environ: Mapping[str, str], *, is_hosted: bool) -> dict[str, Any]:
    """Return what the settings say, as `Machines` has it. Raises ValueError.

    Settings of torch's backends that have no counterpart here are passed over. ``is_hosted``: whether one of the job's
    agents has the store.

    >>> machine_settings({"timeout": "60", "lease_ttl": "3", "read_timeout": "9"}, {}, is_hosted=True)
    {'join_timeout': 60.0, 'lease_ttl': 3}
    >>> machine_settings({"join_timeout": "8", "timeout": "900"}, {}, is_hosted=True)  # the latter is torch's, of more
    {'join_timeout': 8.0}
    """
    password = environ.get(PASSWORD, "")
    _check_belonging(conf, is_hosted=is_hosted, has_password=bool(password))
    found: dict[str, Any] = {named: seconds(name, conf[name]) for name, named in _SECONDS.items() if name in conf}
    if not is_hosted:
        found.setdefault("away_timeout", ETCD_AWAY)
    if "lease_ttl" in conf:
        ttl = seconds("lease_ttl", conf["lease_ttl"])
        if not (ttl.is_integer() and _LEAST_TTL <= ttl <= _MOST_TTL):
            msg = f"lease_ttl: expected whole seconds, {_LEAST_TTL} to {_MOST_TTL}, got {conf['lease_ttl']!r}"
            raise ValueError(msg)
        found["lease_ttl"] = int(ttl)
    if "bind" in conf:
        try:
            found["bind"] = split_endpoint(conf["bind"])
        except ValueError as error:
            raise ValueError(f"bind: {error}") from None
    if "encrypt" in conf:
        found["encrypt"] = _encryption(conf["encrypt"])
    for name in ("ca", "cert", "key"):
        if name in conf:
            _read(name, conf[name])
            found[name] = conf[name]
    _check_tls(conf)
    if "user" in conf:
        found["user"] = conf["user"]
        found["password"] = _text("password_file", conf["password_file"]) if "password_file" in conf else password
    return found


def _check_belonging(conf: Mapping[str, str], *, is_hosted: bool, has_password: bool) -> None:
    """Refuse settings of another kind of store, and those of which others are missing. Raises ValueError."""
    given = [name for name in _OF_ETCD if name in conf]
    if is_hosted and given:
        raise ValueError(f"{given[0]}: it is for an etcd of your own; one of this job's agents has the store")
    given = [name for name in ("bind", "encrypt") if name in conf]
    if given and not is_hosted:
        msg = f"{given[0]}: it is for a store that one of this job's agents has, and not for an etcd of your own"
        raise ValueError(msg)
    if ("user" in conf) != ("password_file" in conf) and not ("user" in conf and has_password):
        raise ValueError(f"user and password_file belong together; one of them is missing (or the variable {PASSWORD})")
    if ("cert" in conf) != ("key" in conf):
        raise ValueError("cert and key belong together; one of them is missing")


def _check_tls(conf: Mapping[str, str]) -> None:
    """See that the files for TLS can be used, and that our certificate has not expired. Raises ValueError."""
    if conf.keys().isdisjoint(("ca", "cert")):
        return
    from phalanx._store.etcd.settings import Files

    files = Files(*(conf.get(name, "") for name in ("ca", "cert", "key")))
    try:
        files.read()
    except OSError as error:  # it could be read just now
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    if expired := files.expired():
        raise ValueError(f"cert: {expired}")


def agent_port(conf: Mapping[str, str], default: int) -> int:
    """Return the port at which rank 0's agent listens to those of other machines. Raises ValueError."""
    if "agent_port" in conf:
        text = conf["agent_port"]
        if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and 0 < int(text) <= _MOST_PORT):
            raise ValueError(f"agent_port: expected whole numbers, 1 to {_MOST_PORT}, got {text!r}")
        return int(text)
    if default > _MOST_PORT:
        msg = f"agent_port=PORT is needed: the port of the workers is {_MOST_PORT}, and there is none after it"
        raise ValueError(msg)
    return default


def may_host(conf: Mapping[str, str], host: str) -> bool | None:
    """Whether this machine's agent has the store: that of the endpoint has, unless ``is_host`` says otherwise.

    None: the endpoint's name is not known yet.

    >>> may_host({}, "127.0.0.1"), may_host({"is_host": "no"}, "127.0.0.1"), may_host({}, "no name")
    (True, False, None)
    """
    if "is_host" in conf:
        return conf["is_host"].lower() not in FALSE
    return {"here": True, "elsewhere": False, "unknown": None}[where_is(host)]


def job_secret(conf: Mapping[str, str], environ: Mapping[str, str]) -> bytes:
    """Return the secret of the job; empty: there is none. Raises ValueError.

    It is in `SECRET`, or in the file that ``secret_file`` names.
    """
    text, where = environ.get(SECRET, ""), SECRET
    if "secret_file" in conf:
        text, where = _text("secret_file", conf["secret_file"]), f"secret_file: {conf['secret_file']}"
    elif not text and conf.get("encrypt") == "require":
        raise ValueError("encrypt: require: a secret is needed, of which the key is made")
    elif not text:
        return b""
    if len(text) < LEAST_SECRET:
        msg = f"{where}: expected {LEAST_SECRET} characters or more, as `openssl rand -hex 32` prints them; "
        msg += f"it has {len(text)}"
        raise ValueError(msg)
    return text.encode("utf-8", "surrogateescape")


def exposed(conf: Mapping[str, str]) -> list[str]:
    """Return a line on each file with a secret that every user of this machine can read."""
    found = []
    for name in ("secret_file", "password_file", "key"):
        with suppress(OSError):
            if name in conf and os.stat(conf[name]).st_mode & stat.S_IROTH:
                found.append(f"{name}: every user of this machine can read {conf[name]} (chmod 600)")
    return found


def secrets_of(conf: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Return the variables from which secrets of a job are taken.

    >>> secrets_of({"secret_file": "/s", "user": "ada"}, {SECRET: "x", PASSWORD: "y"})
    ['PHALANX_ETCD_PASSWORD']
    """
    taken = {SECRET: "secret_file" not in conf, PASSWORD: "user" in conf and "password_file" not in conf}
    return [name for name, is_taken in taken.items() if is_taken and environ.get(name)]


def seconds(name: str, text: str) -> float:
    """Read a time. Raises ValueError."""
    try:
        number = parse_duration(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if number >= _MOST_SECONDS:
        raise ValueError(f"{name}: {text!r}: expected less than {_MOST_SECONDS:,.0f} seconds")
    return number


def _encryption(text: str) -> str:
    if text not in ("auto", "require", "no"):
        raise ValueError(f"encrypt: expected auto, require or no, got {text!r}")
    if text == "require":
        from phalanx._store.hub.wire import NEEDS, can_encrypt

        if not can_encrypt():
            raise ValueError(f"encrypt: require: {NEEDS} is needed, whose OpenSSL has TLS 1.3 with pre-shared keys")
    return text


def _text(name: str, path: str) -> str:
    return _read(name, path).decode("utf-8", "surrogateescape").rstrip("\r\n")


def _read(name: str, path: str) -> bytes:
    """Read a file that a setting names. Raises ValueError."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_FILE)
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror}") from None


class Given(NamedTuple):
    """What a machine was given of its job.

    Attributes:
        nodes: The least number of machines, and the greatest.
        endpoints: Hosts and ports (0: the default), of which there is one where an agent has the store.
        rank: The rank of this machine; None: it is numbered as it comes.
        words: What the backend is called, and how a file with the secret, and ``insecure``, are given: for errors.
        more: Further fields of `Machines`.
    """

    backend: str
    nodes: tuple[int, int]
    endpoints: tuple[tuple[str, int], ...]
    run_id: str
    conf: Mapping[str, str]
    rank: int | None
    address: str
    insecure: bool
    keep: bool
    words: tuple[str, str, str]
    more: Mapping[str, Any]


def machines_of(given: Given) -> Machines:
    """Return how this machine meets the others. Raises ValueError, see above."""
    is_hosted = given.backend in (STATIC, C10D)
    found = _static(given) if given.backend == STATIC else _numbered(given, is_hosted=is_hosted)
    if given.keep and is_hosted:
        raise ValueError(f"keep: {CANNOT_KEEP}")
    fields = machine_settings(given.conf, os.environ, is_hosted=is_hosted) | found | dict(given.more)
    endpoints = fields.pop("endpoints")
    return Machines(*given.nodes, given.backend, endpoints, given.address, keep=given.keep, **fields)


def _static(given: Given) -> dict[str, Any]:
    """Return the fields of machines whose ranks are given: they meet at the agent of rank 0."""
    least, most = given.nodes
    if least != most:
        msg = f"max_nodes: {least}:{most}: with {given.words[0]} static, a fixed number of machines takes part"
        raise ValueError(msg)
    if given.rank is None or not 0 <= given.rank < most:
        raise ValueError(f"rank: expected the rank of this machine, 0 to {most - 1}, got {given.rank}")
    if len(given.endpoints) != 1:
        raise ValueError(f"endpoint: expected one machine, that of node rank 0; got {len(given.endpoints)}")
    host, port = given.endpoints[0]
    port = port or STATIC_PORT
    _check_host(host)
    endpoint = address_text(host, agent_port(given.conf, port + 1))
    secret = _secret(given, host, endpoint)
    return {
        "endpoints": (endpoint,), "hosts": given.rank == 0, "secret": secret, "node_rank": given.rank,
        "master": (host, port),
    }  # fmt: skip


def _numbered(given: Given, *, is_hosted: bool) -> dict[str, Any]:
    """Return the fields of machines that are numbered as they come."""
    default = C10D_PORT if is_hosted else ETCD_PORT
    what = "where the machine is that has the store" if is_hosted else "where the etcd is"
    if not given.endpoints or not all(host for host, _ in given.endpoints):
        raise ValueError(f"endpoint: expected {what}, like host:{default}; it is not given")
    if is_hosted and len(given.endpoints) > 1:
        raise ValueError(f"endpoint: expected one machine, which has the store; got {len(given.endpoints)}")
    host = given.endpoints[0][0]
    _check_host(host)
    if not given.run_id and not is_hosted:
        raise ValueError("run_id: the machines of a job find each other by it; give the same one on each")
    endpoints = tuple(address_text(name, port or default) for name, port in given.endpoints)
    if not is_hosted:
        return {"endpoints": endpoints, "hosts": False}
    hosts = may_host(given.conf, host)
    return {"endpoints": endpoints, "hosts": hosts, "secret": _secret(given, host, endpoints[0])}


def _check_host(host: str) -> None:
    """Refuse an endpoint that each machine would take for its own."""
    if is_no_machine(host):
        msg = f"endpoint: expected the name or the address of a machine, by which the others reach it; got {host!r}"
        raise ValueError(msg)


def _secret(given: Given, host: str, endpoint: str) -> bytes:
    """Return the secret of a job whose store an agent has. Raises ValueError: none is given, and one is needed."""
    secret = job_secret(given.conf, os.environ)
    if secret or given.insecure or is_loopback(host):
        return secret
    _, file, insecure = given.words
    raise ValueError(
        f"endpoint: the agents meet at {endpoint}, which other machines reach: set {SECRET} to the same secret on each"
        f" (`openssl rand -hex 32` makes one), or let {file} name a file that holds it. {insecure} does without: "
        "whoever reaches that port can then stop the job, or lead it astray"
    )
