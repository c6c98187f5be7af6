"""Records how this process ends: its exceptions in its error file, its exit code in ``error.json.exit``.

A worker loads this module before its script starts, in whatever Python the script runs (3.8 or later). At a failure it
imports `json` and `traceback` alone, because by then the process may have changed its user and may not read our files.
"""

from __future__ import annotations

import errno
import os
import time

from phalanx._evidence.describe import cut_middle, describe
from phalanx._evidence.error_file import (
    ERROR_FILE_ENV,
    FOLLOWED,
    READ_LIMIT,
    SOON_NS,
    check_root,
    encode,
    extra_info,
    file_identity,
    has_left,
    is_of_timer,
    message_of,
    note_handled,
    open_to_append,
    read_bytes,
    read_error_file,
    wall_clock,
    write_data,
    write_json,
    written_by,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# ruff: noqa: BLE001 - an exception's own methods can raise anything, and what they raise must not replace what happened.


_SHORT = READ_LIMIT >> 4  # two texts of so many characters fit into a file, with 6 bytes of JSON for each character
_BRIEF = 4096  # characters of what a file held before
_MARK = "_phalanx_recorded"  # the attribute of an exception that has been recorded
_CHAIN = 100  # exceptions of a chain that are looked at
_EXIT_LIMIT = 4096  # bytes that are read of the file of exits

_refused = {}  # type: dict[str, int]  # by error file; a comment, because a worker may run Python 3.8


def record(exc: BaseException, path: str | None = None, *, left: bool = False, how: str = "") -> bool:
    """Write an exception to the error file of this process. Never raises.

    The last exception replaces an earlier one, which may have been handled; the file keeps the earlier one under
    ``before``. An exception that is recorded twice keeps its first moment and text. An exception with a cause or a
    context that has been recorded gets the moment of that, because the failure began then.

    Some files are not replaced:

    - Evidence of our parent process is left as it is.
    - To an expired timer, and to an exception that has left the main function, this one is added under
      ``afterwards``: it is a consequence, raised by an exit handler or a thread.
    - To a file that the user's code or torch has written, this one is added, and the file keeps its message, if the
      message is of this exception, if a launcher's workers failed, or if the file is not older than `SOON_NS`.

    Args:
        exc: The exception. It gets an attribute that marks it as recorded; no reference to it is kept.
        path: The error file. Default: the value of ``TORCHELASTIC_ERROR_FILE``.
        left: Whether the exception has left the main function, and ends the process.
        how: What a new record's message begins with, before the exception's own.

    Returns:
        Whether `path` now holds evidence of this process, or a copy that `mark_as_recorded` knows.
    """
    try:
        moment = time.monotonic_ns()  # before anything that takes time
        path = os.fspath(path or os.environ.get(ERROR_FILE_ENV, ""))
        if not path:
            return False
        data = read_error_file(path)[0]
        author = written_by(data)
        if author == os.getppid():
            return False
        mark = _mark_of(exc)
        if mark is not None and path in mark["files"] and mark["files"][path] == file_identity(path):
            if left and author != os.getpid():  # a copy of another's evidence, without a moment of this process
                _append_exit(path, 1, mark["began"])
            elif left and not has_left(data):
                extra_info(data)["left"] = True
                extra_info(data).pop("handled_ns", None)
                write_json(path, data)
                mark["files"][path] = file_identity(path)
            return True
        message, stack = describe(exc)
        chain = _chain(exc)
        began = min([moment] + [each["began"] for each in map(_mark_of, chain) if each is not None])
        of_launcher = any(callable(getattr(type(each), "get_first_failure", None)) for each in chain)
        try:
            check_root()
            write_record(
                path, message, stack, data, began=began, recorded=moment, left=left, of_launcher=of_launcher,
                lost=any(map(_is_lost_connection, chain)), how=how,
            )  # fmt: skip
        except (OSError, ImportError) as error:  # ImportError of `json`: this process's user may not read the library
            _refused[path] = getattr(error, "errno", None) or 0
            return False
        _mark(exc, path, began)
    except BaseException:  # one of ours must not replace the exception that is being recorded
        return False
    return True


def refused(path: str | None) -> int:
    """Return the errno for which `record` could not write an error file; 0 if it could, or that is not known."""
    return _refused.get(path or "", 0)


def write_record(
    path: str,
    message: str,
    stack: str,
    data: dict[str, Any] | None,
    *,
    began: int,
    recorded: int,
    pid: int | None = None,
    left: bool = False,
    of_launcher: bool = False,
    lost: bool = False,
    how: str = "",
) -> None:
    """Write a described exception to an error file, by the rules of `record` for what the file holds. Raises OSError.

    ``data`` is what the file holds; ``began`` and ``recorded`` are when the failure began and when the exception was
    recorded, on CLOCK_MONOTONIC, in nanoseconds. ``of_launcher`` and ``lost``: whether the exception, or one in its
    chain, is that of a launcher whose workers failed, or a lost connection.
    """
    pid = os.getpid() if pid is None else pid
    author = written_by(data)
    if author == pid and (is_of_timer(data) or (has_left(data) and not left)):
        _add_to(path, data, message, stack)
        return
    stamp: dict[str, Any] = {"monotonic_ns": began, "pid": pid}
    if recorded != began:
        stamp["recorded_ns"] = recorded
    stamp.update({"left": True} if left else {"handled_ns": None})
    if lost:
        stamp["lost_connection"] = True
    if data is not None and author != pid and message_of(data) is not None:
        same = _tells_of(data, message)
        if of_launcher or (author is None and (same or time.time_ns() - os.stat(path).st_mtime_ns <= SOON_NS)):
            if author is not None:
                stamp["origin_pid"] = author
            _add_to(path, data, "" if same else message, stack, stamp)
            return
    info = {"py_callstack": stack, "timestamp": str(wall_clock(recorded)), **stamp}
    before = _in_brief(data) if author == pid else data
    value = {"message": {"message": how + message, "extraInfo": info}}
    if before is not None:
        info["before"] = before
        encoded = encode(value)
        if len(encoded) <= READ_LIMIT:
            write_data(path, encoded)
            return
        del info["before"]
    encoded = encode(value)
    if len(encoded) > READ_LIMIT:
        value["message"]["message"] = how + cut_middle(message, _SHORT)
        info["py_callstack"] = cut_middle(stack, _SHORT)
        encoded = encode(value)
    write_data(path, encoded)


def mark_as_recorded(exc: BaseException, path: str) -> None:
    """Mark an exception as recorded in a file as it is: `record` then leaves the file unchanged. Never raises."""
    try:
        _mark(exc, path, time.monotonic_ns())
    except BaseException:  # the caller raises the exception again, whatever happens here
        return


def note_exit(leave: SystemExit, path: str | None = None) -> None:
    """Record when a SystemExit with a code other than 0 left the user's code. Never raises.

    From then on the process closes its connections, and peers fail because of that long before it has exited: it still
    joins threads, runs exit handlers and frees memory. A recorded exception in the chain of this exit
    (``except Exception: sys.exit(1)``) is recorded as having left the main function; without one, the exception that
    was handled is recorded, unless a process below this one has left evidence.
    """
    try:
        moment = time.monotonic_ns()  # before anything that takes time
        path = path or os.environ.get(ERROR_FILE_ENV)
        code = exit_code(leave)
        if path and code:
            _append_exit(path, code, moment)
            recorded = [each for each in _chain(leave)[1:] if path in (_mark_of(each) or {"files": ()})["files"]]
            handled = recorded[0] if recorded else _handled_by(leave)
            if handled is not None and (recorded or written_by(read_error_file(path)[0]) in (None, os.getpid())):
                record(handled, path, left=True, how=f"exited with code {code} while handling ")
    except BaseException:  # the process leaves, whatever happens here
        return


def _handled_by(leave: SystemExit) -> BaseException | None:
    """Return the exception that was handled when a SystemExit was raised; None: there was none, by ``from None``, too.

    None also for a KeyboardInterrupt and its like, which are requests to leave.
    """
    found: BaseException | None = leave
    for _ in range(_CHAIN):
        if not isinstance(found, SystemExit):
            return found if isinstance(found, Exception) else None
        cause = found.__cause__
        found = cause if cause is not None or found.__suppress_context__ else found.__context__
    return None


def exit_path(path: str) -> str:
    """Return the path of the file that holds when a process began to leave with an exit code other than 0.

    It is written for ``sys.exit``, and for the exception of a launcher whose error file is a copy of its worker's.

    >>> exit_path("/logs/0/error.json")
    '/logs/0/error.json.exit'
    """
    return path + ".exit"


def _append_exit(path: str, code: int, moment: int) -> None:
    check_root()
    fd = open_to_append(exit_path(path))
    try:
        os.write(fd, b"%d %d %d\n" % (os.getpid(), code, moment))
    finally:
        os.close(fd)


def read_exit(path: str, pid: int) -> tuple[int, int] | None:
    """Return the first exit code that a process noted, and when (CLOCK_MONOTONIC, ns); or None. Never raises."""
    try:
        for line in read_bytes(exit_path(path), _EXIT_LIMIT).splitlines():
            author, code, moment = map(int, line.split())
            if author == pid and 0 < code < 256 and 0 <= moment < 1 << 63:  # noqa: PLR2004 - an exit code
                return code, moment
    except (OSError, ValueError):
        pass
    return None


def exit_code(leave: SystemExit) -> int:
    """Return the exit code that the interpreter derives from a SystemExit.

    >>> [exit_code(SystemExit(value)) for value in (None, 0, 3, 259, "bad")]
    [0, 0, 3, 3, 1]
    """
    if leave.code is None:
        return 0
    return leave.code & 0xFF if isinstance(leave.code, int) else 1


class _Mark(dict):  # type: ignore[type-arg]  # no dict[...] at run time under Python 3.8
    """The attribute of a recorded exception: the pid, when it began, and the identity of each file that holds it.

    It is a dict, because a script's runner and an imported `phalanx` have a copy each of this module, and must know
    each other's marks. It is freed with the exception: the exception has then been handled, unless it had left the
    main function, which the file says. An exception that was never raised counts as not handled, and so does one that
    exists until the interpreter ends, because it may be the reason for that.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # it means nothing in another process

    def __del__(self) -> None:
        try:
            import sys

            if self["pid"] == os.getpid() and self["raised"] and not sys.is_finalizing():
                for path, noted in self["files"].items():
                    note_handled(path, noted)
        except BaseException:  # at the interpreter's end modules are gone
            return


def _mark(exc: BaseException, path: str, began: int) -> None:
    """Mark an exception as recorded in the file as it is now."""
    mark = _mark_of(exc)
    if mark is None:
        mark = _Mark(pid=os.getpid(), began=began, raised=exc.__traceback__ is not None, files={})
        BaseException.__setattr__(exc, _MARK, mark)  # a class of the user's may override it
    mark["files"][path] = file_identity(path)


def _mark_of(exc: BaseException) -> dict[str, Any] | None:
    """Return the mark that this process put on an exception, or None."""
    try:
        mark = BaseException.__getattribute__(exc, _MARK)
    except BaseException:
        return None
    return mark if isinstance(mark, dict) and mark.get("pid") == os.getpid() else None


def _chain(exc: BaseException) -> list[BaseException]:
    """Return an exception and those before it: causes, contexts, members of groups. The nearest come first."""
    found, seen = [exc], {id(exc)}
    for each in found:
        for name in ("__cause__", "__context__", "exceptions"):
            try:
                others = getattr(each, name, None)
            except BaseException:
                others = None
            for other in others if type(others) is tuple else (others,):
                if isinstance(other, BaseException) and id(other) not in seen and len(found) < _CHAIN:
                    seen.add(id(other))
                    found.append(other)
    return found


def _tells_of(data: dict[str, Any], message: str) -> bool:
    """Whether a message is that of error file data, or a whole line of their traceback."""
    stack = extra_info(data).get("py_callstack")
    text = f"{message_of(data)}\n{stack if isinstance(stack, str) else ''}\n"
    if message.endswith(": "):  # a traceback leaves out the colon of an exception without text
        message, text = message[:-2], text.replace(": \n", "\n")
    return message + "\n" in text


def _in_brief(data: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the short form of evidence of this process for ``before``, with the whole of the user's file in it."""
    if data is None:
        return None
    info = extra_info(data)
    brief: dict[str, Any] = {key: info[key] for key in ("timestamp", "monotonic_ns", "recorded_ns") if key in info}
    older = info.get("before")
    while isinstance(older, dict) and "monotonic_ns" in older:  # the short form of evidence of this process
        older = older.get("before")
    return {"message": (message_of(data) or "")[:_BRIEF], **brief, **({} if older is None else {"before": older})}


def _add_to(path: str, data: Any, message: str, stack: str, stamp: dict[str, Any] | None = None) -> None:
    """Add an exception to data that stay the cause: of an expired timer, or of the user's. Raises OSError."""
    if isinstance(data["message"], dict) and not isinstance(data["message"].get("extraInfo"), dict):
        data["message"]["extraInfo"] = {}
    info = extra_info(data)
    if not stamp and FOLLOWED in info:
        return
    info.update(stamp or {})
    if message:
        text = info.get("py_callstack")
        info[FOLLOWED] = message
        info["py_callstack"] = f"{text if isinstance(text, str) else ''}\nAfterwards:\n{stack}"
    encoded = encode(data)
    if len(encoded) <= READ_LIMIT:
        write_data(path, encoded)


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
    except BaseException:
        return False
