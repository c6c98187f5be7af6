"""Decides whether an exception, or its text, is a lost connection: a peer's end may have caused it.

A refused connection is none: the peer was not there before. A worker loads this module before its script starts, in
whatever Python the script runs (3.8 or later).
"""

from __future__ import annotations

import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_ERRNOS = (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ENETRESET, errno.ENOTCONN, errno.ESHUTDOWN)
_TEXT = 1 << 15  # characters of a text that are searched

_NAMES = (
    r"(Disconnect(ed|ion)?|Incomplete(Read|Body)|SSLEOF|SSLZeroReturn|BrokenPipe|EndOfStream|StreamLost|BrokenResource|"
    r"Connection(Closed|Lost|Reset|Aborted|Dropped|Terminated)(OK)?)(Error|Exception)?$"
)
"""Names of classes of lost connections, wherever a class comes from: aiohttp's, websockets', anyio's, urllib3's."""

_MESSAGES = (
    r"^(Connection(Reset|Aborted)?|BrokenPipe|EOF|IncompleteRead)Error\b|"
    r"(connection|socket|pipe) ((was|is|has been) )?((likely|unexpectedly) )?(closed|reset|aborted|lost|dropped)|"
    r"(peer|server|remote( (side|process|peer|host|end))?) ((has|is|was) )?(closed|gone|exited|disconnected)|"
    r"broken pipe|closed the connection|transport endpoint is not connected|\bunexpected eof\b|"
    r"EOF occurred in violation|payload is not completed|\beof \(this error originated at tensorpipe|ncclRemoteError"
)
"""Messages of such exceptions: Python's, OpenSSL's, gloo's, tensorpipe's, NCCL's, of clients of all kinds."""


def any_is_lost_connection(chain: Iterable[BaseException]) -> bool:
    """Whether any of these exceptions is a lost connection, by its class, its errno or its text. Never raises."""
    return any(map(_is_lost_connection, chain))


def reads_as_lost_connection(message: str) -> bool:
    """Whether a message (``"TypeName: text"``) is that of a lost connection.

    >>> reads_as_lost_connection("RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    True
    >>> reads_as_lost_connection("ConnectionRefusedError: [Errno 111] Connection refused")
    False
    """
    import re

    return bool(re.search(_MESSAGES, message[:_TEXT], re.IGNORECASE))


def _is_lost_connection(exc: BaseException) -> bool:
    import re

    try:
        if isinstance(exc, (ConnectionError, EOFError)):
            return not isinstance(exc, ConnectionRefusedError)
        if isinstance(exc, OSError) and exc.errno in _ERRNOS:
            return True
        names = [kind.__name__ for kind in type(exc).__mro__]
        text = f"{names[0]}: {exc}"
        return any(re.search(_NAMES, name) for name in names) or reads_as_lost_connection(text)
    except BaseException:  # noqa: BLE001 - an exception's own methods can raise anything
        return False
