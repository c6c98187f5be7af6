"""``phalanx serve``: the runs, and each run's page, in a browser, live.

Owns the options, the address and the token. `phalanx._serve` is the server.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import secrets
import socket
import sys

import click

from phalanx._base.stderr import say
from phalanx._base.tty import printable
from phalanx.cli._commands import SETTINGS, Command, put
from phalanx.cli._options import LOG_DIR, Whole, places

PORT = 8766
"""The port, if none is given: always the same, so that ``ssh -L`` is."""

TOKEN_ENV = "PHALANX_SERVE_TOKEN"  # noqa: S105 - the name of the variable
INSTALL = "python -m pip install starlette uvicorn"

_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,256}")  # what needs no quotes in an address, nor in a cookie
_TOKEN_BYTES = 24
_MOST_PORT = 65535


@click.command(cls=Command, context_settings=SETTINGS, absent={"--log-dir": "phalanx serve FOLDER"})
@click.argument("folder", required=False, type=LOG_DIR["type"], envvar=LOG_DIR["envvar"])
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Where to listen. Default: 127.0.0.1.")
@click.option("--port", type=Whole(min=0, max=_MOST_PORT), default=PORT, metavar="N",
              help=f"The port; 0: any that is free. Default: {PORT}.")  # fmt: skip
@click.option("--allow-control", is_flag=True, help="Give the pages of running runs buttons: stop, restart, pause.")
@click.option("--no-token", is_flag=True, help="Let in every user of this machine. Only where it listens on loopback.")
def serve(folder: str | None, *, host: str, port: int, allow_control: bool, no_token: bool) -> None:
    """Show the runs in FOLDER in a browser, live: a list of them, and the page of each.

    \b
    phalanx serve                          prints the address to open; Ctrl-C ends it
    phalanx serve logs --port 9000
    ssh -L 8766:127.0.0.1:8766 me@trainer  and then phalanx serve there, the browser here

    FOLDER is as --log-dir of phalanx runs. The server reads files and has no part in any run. The address has a token,
    which the browser keeps: whoever knows it can read all that you can read of the runs, and with --allow-control stop
    them. PHALANX_SERVE_TOKEN, 16 characters or more, takes the place of a random one, and is not printed.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    own = _own_token()
    token = "" if no_token else own or secrets.token_urlsafe(_TOKEN_BYTES)
    if no_token and allow_control:
        raise click.UsageError("--allow-control and --no-token exclude each other: any user could stop your runs")
    if sys.stdout is None and token != own:
        raise click.ClickException(f"stdout is closed, to which the address is written; or set {TOKEN_ENV}")
    roots = _roots(folder)
    try:
        from phalanx._serve.server import Access, most_connections
        from phalanx._serve.server import serve as serve_at
    except ImportError as error:
        if (error.name or "").startswith("phalanx"):
            raise
        msg = f"this takes starlette and uvicorn, which cannot be imported here ({error}): {INSTALL}"
        raise click.ClickException(msg) from None
    most = most_connections()
    with _listener(host, port) as listener:
        address, number = listener.getsockname()[:2]
        is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if no_token and not is_loopback:
            raise click.UsageError(f"--no-token: {host} is no loopback address: anybody could read your runs")
        if not is_loopback:
            say("this listens on the network, and nothing is encrypted; ssh -L is safer, see phalanx serve --help")
        name = socket.gethostname() if address in ("0.0.0.0", "::") else address  # noqa: S104 - the user has said so
        shown = f"http://{f'[{name}]' if ':' in name else name}:{number}/"
        put(f"{shown}?token={token}\n" if token and token != own else f"{shown}\n")
        say(f"serves the runs in {' and '.join(map(printable, roots))}; Ctrl-C ends it")
        serve_at(listener, roots, Access(token, frozenset(("localhost", host.lower())), allow_control), most)


def _own_token() -> str:
    """Return the token of the environment, "" if it has none; no process below finds it there. Raises UsageError."""
    token = os.environ.pop(TOKEN_ENV, "")
    if token and not _TOKEN.fullmatch(token):
        raise click.UsageError(f"{TOKEN_ENV}: expected 16 to 256 letters, digits and any of . _ ~ -, drawn by chance")
    return token


def _roots(folder: str | None) -> tuple[str, ...]:
    """Return the folders that hold the runs, absolute. Raises UsageError, ClickException."""
    roots = tuple(map(os.path.abspath, places(folder)))
    if folder is None:
        return roots
    if not os.path.isdir(folder):
        raise click.ClickException(f"{folder}: there is no such folder")
    os.scandir(folder).close()
    if os.path.lexists(os.path.join(folder, "run.json")):
        above = os.path.dirname(roots[0])
        raise click.UsageError(f"FOLDER: {folder} is the folder of one run; phalanx serve {above} has it, too")
    return roots


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ClickException."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise click.ClickException(f"--host: {host!r} is no address of this machine: {error}") from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    both = address[0] == "::" and socket.has_dualstack_ipv6()  # else the name of this machine, by IPv4, leads nowhere
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        hint = f"another program has port {port}, maybe another phalanx serve; --port N takes another one, 0 any"
        why = hint if error.errno == errno.EADDRINUSE else error.strerror
        raise click.ClickException(f"it cannot listen at {host} port {port}: {why}") from None
