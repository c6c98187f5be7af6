"""The server: its routes, who may ask, what each answer says of itself, and what a stranger at its port can do.

starlette has the routes, uvicorn the sockets and HTTP. Owns the token, the headers, and the bounds.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx._base.stderr import mention
from phalanx._base.text import one_line
from phalanx._base.tty import printable
from phalanx._page.page import policy
from phalanx._serve.control import ACTIONS, Control, RefusedError
from phalanx._serve.pages import MOST_WATCHERS, FullError, LivePage, Page, Pages

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEEP = 15.0
"""Seconds after which a stream without events has one, by which both ends learn that the other is there."""

MOST_CONNECTIONS = 256
"""Connections at a time: for one more, the oldest is closed that waits for no answer."""

OWN_FILES = 96
"""Descriptors that no connection takes: fewer connections are kept where the process may not have so many more."""

LEAST_FILES = 128
"""Descriptors without which nothing is served."""

WITHIN = 10.0
"""Seconds, at least, after which a connection is closed that sends no whole request, or takes none of its answer."""

MAKE_WITHIN = 60.0
"""Seconds in which a page is made, or its folder has not answered."""

_BACKLOG = 128  # connections that wait to be accepted,
_AT_ONCE = 16  # and that are accepted before any is closed for them: three times as many are open for a moment
_MOST_PROBLEMS = 20  # kinds that are told
_MOST_HEAD = 16 << 10  # bytes of a request's head
_MOST_BODY = 1 << 10
_NOTHING = "default-src 'none'; frame-ancestors 'none'"  # may what is no page
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_LAST = {"connection": "close"}  # else one who is not let in asks on, takes no answer, and stays for it
_NOT_KNOWN = (
    "This takes the token of this server: open the address that phalanx serve has printed, or send "
    "'Authorization: Bearer TOKEN'.\n"
)
_NO_RUN = "There is no run of this name.\n"
_FULL = f"{MOST_WATCHERS} pages are open that watch this server: close one, and load this one anew.\n"


class Access(NamedTuple):
    """Who may ask.

    Attributes:
        token: What a browser has to know; "": it is enough to come to one of ``hosts``.
        hosts: Names by which this machine is known to itself.
        controls: Whether pages have buttons.
    """

    token: str
    hosts: frozenset[str]
    controls: bool


def most_connections() -> int:
    """Return how many connections there can be at a time. Raises OSError: too few files may be open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    if files < LEAST_FILES:
        raise OSError(f"this takes {LEAST_FILES} open files: it may have {files} (ulimit -n)")
    return min(MOST_CONNECTIONS, files - OWN_FILES)


def serve(listener: socket.socket, roots: Sequence[str], access: Access, most: int) -> None:
    """Answer at a socket that listens, until SIGINT or SIGTERM, which is raised again once all is closed.

    ``most``: connections at a time, see `most_connections`.
    """
    _Connection.most = most
    pages = Pages(roots, controls=access.controls)
    config = uvicorn.Config(
        _Guard(_Routes(pages).app(controls=access.controls), access),
        http=_Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEAD,
        backlog=_AT_ONCE,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)  # what is wrong with a request, its sender learns
    _Server(config, pages).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends at once: no stream, and nobody who does not read, is waited for."""

    def __init__(self, config: uvicorn.Config, pages: Pages) -> None:
        super().__init__(config)
        self._pages = pages
        self._problems: set[str] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._tell(context))
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)  # asyncio has one number for this, and for how many it accepts at once

    def _tell(self, context: dict[str, Any]) -> None:
        """Tell what has gone wrong outside of any request, each kind once: strangers may cause it again and again."""
        error = context.get("exception")
        what = printable(one_line(context["message"]))
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._problems and len(self._problems) < _MOST_PROBLEMS:
            self._problems.add(kind)
            mention(f"phalanx: {what}: {printable(one_line(error)) if error else 'why is not known'}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        self._pages.close()
        tasks = list(self.server_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=0.1)
        for task in tasks:
            task.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # until they are lost
        await super().shutdown(sockets)


class _Connection(H11Protocol):
    """A connection that does not stay if its other end does nothing.

    Attributes:
        most: How many there are at a time.
    """

    most = MOST_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base has it
        super().connection_made(transport)
        self.since = self.loop.time()
        self._seen: tuple[object, int] | None = None
        self._look = self.loop.call_later(WITHIN, self._check)
        others = [one for one in self.connections if isinstance(one, _Connection) and not one.transport.is_closing()]
        if len(others) > self.most:
            idle = [one for one in others if not one.is_answered]
            min(idle or [self], key=lambda one: one.since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    @property
    def is_answered(self) -> bool:
        """Whether a request is being answered."""
        return not getattr(self.cycle, "response_complete", True)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and nothing more; close the connection if an answer has begun."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # for its application
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except Exception:  # noqa: BLE001 - h11's, before anything is written: an answer has begun
            self.transport.close()

    def _check(self) -> None:
        """Close it if nothing has happened since the last look: no request was completed, nothing was taken."""
        now = (self.cycle, self.transport.get_write_buffer_size())
        if now == self._seen and (now[1] or not self.is_answered):
            self.transport.abort()
            return
        self._seen = now
        self._look = self.loop.call_later(WITHIN, self._check)


class _Guard:
    """Lets those in who may, and has every answer say what a browser may do with it."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = unquote(scope["raw_path"].decode("ascii"), errors="surrogateescape")  # as a file's name is read
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("content-security-policy", _NOTHING)
            await send(message)

        try:
            answer: ASGIApp = self._refusal(Request(scope)) or self._app
            await answer(scope, receive, sending)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001 - a mistake of ours: whoever asks learns it, and the others go on
            text = f"{type(error).__name__}: {printable(one_line(error))}"
            mention(f"phalanx: a request could not be answered: {text}")
            if not started:
                await PlainTextResponse(f"{text}\n", HTTPStatus.INTERNAL_SERVER_ERROR)(scope, receive, sending)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is not let in, or that brings the token for the first time."""
        token = self._access.token
        if not token:
            if _host(request) in self._access.hosts:
                return None
            names = ", ".join(sorted(self._access.hosts))
            text = f"This server has no token, so it answers only those who call it by its own name: {names}.\n"
            return PlainTextResponse(text, HTTPStatus.MISDIRECTED_REQUEST, _LAST)
        name = f"phalanx-{_port(request)}"
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(given.strip(), token):
            return None
        if _equal(request.query_params.get("token", ""), token):
            path = os.fsencode(request.scope["path"]).lstrip(b"/")
            response = RedirectResponse(f"/{quote(path)}", HTTPStatus.SEE_OTHER)
            response.set_cookie(name, token, path="/", httponly=True, samesite="strict")
            return response
        if _equal(request.cookies.get(name, ""), token):
            return None
        return PlainTextResponse(_NOT_KNOWN, HTTPStatus.UNAUTHORIZED, {"www-authenticate": "Bearer", **_LAST})


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def _host(request: Request) -> str:
    """Return the name by which a request calls this machine, "" if that is none."""
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""
    try:
        return "localhost" if ipaddress.ip_address(name).is_loopback else name
    except ValueError:
        return name


def _port(request: Request) -> int:
    """Return the port that a browser has: another than the server's, if ssh forwards it."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").port or 80
    except ValueError:
        return 0


# --- the routes


class _Routes:
    """What is answered at which path."""

    def __init__(self, pages: Pages) -> None:
        self._pages, self._control = pages, Control()

    def app(self, *, controls: bool) -> Starlette:
        """Return the application. ``controls``: whether anything can be asked for, and not only read."""
        routes = [
            Route("/", self._list),
            Route("/events", self._list_events),
            Route("/runs/{name}", self._run),
            Route("/runs/{name}/events", self._run_events),
        ]
        if controls:
            routes.append(Route("/runs/{name}/control", self._act, methods=["POST"]))
        app = Starlette(routes=routes, exception_handlers={HTTPException: _plain})
        app.router.redirect_slashes = False
        return app

    async def _list(self, request: Request) -> Response:
        return await _answer(request, self._pages.runs)

    async def _list_events(self, _request: Request) -> Response:
        return _Stream(self._pages.runs, self._pages)

    async def _run(self, request: Request) -> Response:
        return await _answer(request, await self._page(request))

    async def _run_events(self, request: Request) -> Response:
        return _Stream(await self._page(request), self._pages)

    async def _page(self, request: Request) -> LivePage:
        page = await self._pages.of_run(request.path_params["name"])
        if page is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, _NO_RUN)
        return page

    async def _act(self, request: Request) -> Response:
        path = await self._pages.path(request.path_params["name"])
        if not path:
            raise HTTPException(HTTPStatus.NOT_FOUND, _NO_RUN)
        try:
            async with asyncio.timeout(WITHIN):
                do = await _asked_for(request)
            return _told(HTTPStatus.OK, await self._control.act(path, do), ok=True)
        except TimeoutError:
            return _told(HTTPStatus.REQUEST_TIMEOUT, f"The request did not come within {WITHIN:g} s.")
        except _BadRequestError as error:
            return _told(error.status, str(error))
        except RefusedError as error:
            return _told(HTTPStatus.CONFLICT, str(error))


async def _plain(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail.rstrip()}\n", error.status_code, error.headers)


async def _answer(request: Request, live: LivePage) -> Response:
    try:
        async with asyncio.timeout(MAKE_WITHIN):
            page = await live.current()
    except TimeoutError:
        text = f"This page could not be made within {MAKE_WITHIN:g} s.\n"
        return PlainTextResponse(text, HTTPStatus.SERVICE_UNAVAILABLE)
    return _response(page, takes_gzip="gzip" in request.headers.get("accept-encoding", ""))


def _response(page: Page, *, takes_gzip: bool) -> Response:
    headers = {"vary": "accept-encoding"}
    kind = "text/plain"
    if page.status == HTTPStatus.OK:
        headers["content-security-policy"] = policy()
        kind = "text/html"
    if takes_gzip:
        headers["content-encoding"] = "gzip"
    return Response(page.body if takes_gzip else page.text(), page.status, headers, f"{kind}; charset=utf-8")


class _Stream(StreamingResponse):
    """The events of a page, see "Server-sent events" in the HTML standard."""

    def __init__(self, live: LivePage, pages: Pages) -> None:
        super().__init__(self._events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._live, self._pages = live, pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await Response(media_type=self.media_type, headers={"x-accel-buffering": "no"})(scope, receive, send)
            return
        try:
            with self._live.watched():
                await super().__call__(scope, receive, send)
        except FullError:
            await PlainTextResponse(_FULL, HTTPStatus.SERVICE_UNAVAILABLE)(scope, receive, send)

    async def _events(self) -> AsyncIterator[str]:
        known = -1
        while not self._pages.is_closed:
            try:
                async with asyncio.timeout(KEEP):
                    await self._live.change(known)
            except TimeoutError:
                yield f"event: keep\ndata: {known}\n\n"
                continue
            if self._live.version != known:
                known = self._live.version
                yield f"event: changed\nid: {known}\ndata: {known}\n\n"
            if self._live.is_gone:
                return


# --- control


class _BadRequestError(Exception):
    """A request to do something is not one. ``status`` and ``str()`` are the answer."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


async def _asked_for(request: Request) -> str:
    """Return what a request asks for. Raises _BadRequestError: it is none, or a page of another server has sent it."""
    headers = request.headers
    origin, host = headers.get("origin"), headers.get("host")
    why = ""
    if headers.get("x-phalanx") != "1" or headers.get("content-type") != "application/json":
        why = "This takes the header X-Phalanx: 1, and JSON, which no form can send."
    elif origin is None and not headers.get("authorization"):
        why = "This takes the header Origin, which browsers send."
    elif origin not in (None, f"http://{host}", f"https://{host}"):
        why = "A page of another server has sent this."
    if why:
        raise _BadRequestError(HTTPStatus.FORBIDDEN, why)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY:
            raise _BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"These are more than {_MOST_BODY} bytes.")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    do = found.get("do") if isinstance(found, dict) else None
    if do not in ACTIONS:
        why = f"Expected an object with `do`: one of {', '.join(ACTIONS)}."
        raise _BadRequestError(HTTPStatus.BAD_REQUEST, why)
    return str(do)


def _told(status: HTTPStatus, text: str, *, ok: bool = False) -> Response:
    return JSONResponse({"ok": ok, "text": text}, status)
