"""Workers that lose their peer, and the exceptions that they have of that, for tests that fork them."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import ssl
import sys
import time
from typing import Any, NoReturn


def _class(name: str, module: str, base: type[Exception] = Exception) -> type[Exception]:
    return type(name, (base,), {"__module__": module})  # stands for a class of a package that is not installed here


_Protocol = _class("RemoteProtocolError", "httpx", _class("TransportError", "httpx"))
_TENSORPIPE = "eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)"
_GLOO = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40211"
_NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1\nncclRemoteError: A call failed, possibly due to a network error"

LOSSES: dict[str, BaseException] = {
    "reset": ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)),
    "a subclass": type("PeerLost", (ConnectionError,), {"__str__": lambda _self: 1 / 0})(),
    "an errno": type("TransportFailed", (OSError,), {})(errno.ENOTCONN, "?"),
    "http.client": http.client.RemoteDisconnected("Remote end closed connection without response"),
    "IncompleteRead": http.client.IncompleteRead(b"abc", 97),
    "SSLEOFError": ssl.SSLEOFError(8, "?"),
    "SSLZeroReturnError": ssl.SSLZeroReturnError(6, "?"),
    "aiohttp": _class("ServerDisconnectedError", "aiohttp", _class("ClientError", "aiohttp"))("?"),
    "httpx": _Protocol("Server disconnected without sending a response."),
    "websockets": _class("ConnectionClosedError", "websockets", _class("ConnectionClosed", "websockets"))("?"),
    "gloo": RuntimeError(_GLOO),
    "tensorpipe": RuntimeError(_TENSORPIPE),
    "NCCL": RuntimeError(_NCCL),
    "a group": ExceptionGroup("tasks", [KeyError("x"), ExceptionGroup("more", [EOFError()])]),
}
"""Exceptions of a rank whose peer has gone."""


def follows_a_loss(rank: int, ends: tuple[Any, Any], loss: str, way: str) -> None:
    """Rank 0 raises the cause, and takes 0.2 s to leave; rank 1 has lost it by then."""
    mine, other = ends if rank == 0 else ends[::-1]
    other.close()
    if rank == 0:
        try:
            raise ValueError("the cause")
        finally:
            mine.close()
            time.sleep(0.2)
    with contextlib.suppress(EOFError):
        mine.recv()
    fail(LOSSES[loss], way)


def fail(lost: BaseException, way: str) -> NoReturn:
    try:
        raise lost  # noqa: TRY301 - as programs do
    except BaseException as error:
        if way == "bare":
            raise
        if way == "exit":
            sys.exit(3)
        if way == "real":
            raise ValueError("the cause")  # noqa: B904 - raised while the loss is handled
        raise RuntimeError("step 7 failed") from (None if way == "hidden" else error)


def both_lose(rank: int, ends: tuple[Any, Any], ways: tuple[str, str]) -> None:
    """Rank 0 loses a connection to others, and fails of that; rank 1 loses the one to rank 0, which has left."""
    mine, other = ends if rank == 0 else ends[::-1]
    other.close()
    if rank == 1:
        with contextlib.suppress(EOFError):
            mine.recv()
    fail(ConnectionResetError("the peer has gone"), ways[rank])
