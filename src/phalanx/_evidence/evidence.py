"""Evidence: what a failing process leaves behind about itself, and how that is read back.

Owns the error file: its format, its writing as one step, and its reading without ever trusting it; and the
files beside it that hold the Python stack after a fatal signal, and the stacks that somebody asked for. It refuses to
know who reads them, what a rank is, and anything else of Phalanx: a worker loads this file by its path, in whatever
Python it runs (3.8 or later), so it imports nothing but ``os``, ``time``, ``faulthandler`` and `files` of `_base`,
before something has gone wrong.

The format is that of torch elastic, with keys of our own inside ``extraInfo``::

    {"message": {"message": "ValueError: bad shape",
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1795184205",
                               "monotonic_ns": 81232345678, "pid": 4242}}}

``timestamp`` is Unix time in whole seconds, as a string. ``monotonic_ns`` is CLOCK_MONOTONIC, which all processes
of one kernel share: it orders failures that fall into the same second. It is when the failure began;
``recorded_ns`` is when it was written, where that was later. ``left``: it is known that the exception left the main
function. ``handled_ns``: when it was let go of, without having left. ``before``: what the file held before, in brief if
it was ours, whole if it was not. A flat file (``{"message": "text"}``) has these keys beside its message.
"""

# ruff: noqa: BLE001 - an exception's own methods can raise anything, and what they raise must not replace what happened.

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Any

if TYPE_CHECKING or __package__:
    from phalanx._base import files
else:  # by its path; so is what it needs
    import sys

    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_base"))
    try:
        import files
    finally:
        del sys.path[0]

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
"""The environment variable that names a worker's error file."""

STACK_SIGNAL_ENV = "PHALANX_STACK_SIGNAL"
"""The environment variable that names the signal on which a worker shows its stacks."""

TEXT_LIMIT = 1 << 20
"""The most characters of a message, and of a traceback, that `describe` keeps."""

READ_LIMIT = 4 << 20
"""The most bytes that `read` accepts. `record` writes no longer file: where two texts of `TEXT_LIMIT` characters take
more as JSON, less of them is kept, and what was there before only if that fits in, too."""

KEPT_LIMIT = 32 << 10
"""The most characters of each text of an error file that a launcher keeps of every rank: `kept`, `bounded`."""

_STACKS_LIMIT = 16 << 20  # bytes of a file of stacks that are looked at
_SHORT = READ_LIMIT >> 4  # characters of each of two texts, of six bytes of JSON at the most, that surely fit
_CUT = "... cut ..."
_DEPTH = 20  # levels of error file data that are kept

SOON_NS = 10_000_000_000
"""Nanoseconds after it was recorded in which an exception, or a file of the user's, tells of what follows."""

_PLAIN_LINES = 2000
_NOT_TO_BE_CAUGHT = (4, 6, 7, 8, 9, 11, 19)
"""SIGKILL and SIGSTOP, and those that are `catch_fatal_signals`'s; as numbers of Linux, which differ on no machine that
Phalanx is tested on, lest `signal` be imported."""
_UNHANDLED = b'"handled_ns": null'  # in a message, the quotes would be escaped
_ROOM = 20  # digits of a moment, and spaces: what is noted later takes no more place
_IRREPLACEABLE = (1, 13, 16, 30)
"""EPERM, EACCES, EBUSY and EROFS, as numbers of Linux: a mount cannot be replaced, nor what lies in a folder of others,
and may be written to."""
_FOLLOWED = "afterwards"  # the key of what a process has raised after what its file tells of
_BRIEF = 4096  # characters of what a file held before
_MARK = "_phalanx_recorded"  # the attribute of an exception that has been recorded
_CHAIN = 100  # exceptions of a chain that are looked at
_ASIDE = b"# exception of process "  # how `fatal_path` begins where it has one
_ASIDE_HEADER = _ASIDE + b"%d, began %d, message %d bytes, traceback %d bytes\n"
_STACKS_HEAD = b"# stacks on signals "
_STACKS_HEADER = _STACKS_HEAD + b"%d and %d, descriptor %d, process %d\n"
_SIGNALS = 64  # the highest number of a signal


def describe(exc: BaseException) -> tuple[str, str]:
    r"""Put an exception into words, whatever its own methods do.

    Never raises. Text beyond `TEXT_LIMIT` characters is cut, and says how much; of a traceback the middle goes, because
    its two ends are what one reads. Lone surrogates become backslash escapes, so that the result
    can always be encoded.

    Args:
        exc: Any exception, with or without a traceback. Causes, contexts, notes and groups are followed.

    Returns:
        The message (``"TypeName: text"``) and the traceback as the interpreter would print it.

    >>> describe(ValueError("bad shape"))
    ('ValueError: bad shape', 'ValueError: bad shape\n')
    """
    try:
        name = str(type(exc).__name__)
    except BaseException:
        name = "Exception"
    try:
        text = str(exc)
    except BaseException as failure:
        text = f"<__str__ raised {type(failure).__name__}>"
    message = _cut_end(name + ": " + text)
    try:
        import traceback

        stack = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    except BaseException:  # RecursionError or MemoryError while formatting, or a hostile __cause__
        stack = _plain_stack(exc, message)
    return _encodable(message), _encodable(_cut_middle(stack))


def write_error_file(
    path: str,
    message: str,
    py_callstack: str,
    *,
    monotonic_ns: int | None = None,
    pid: int | None = None,
    **extra: Any,
) -> None:
    """Write an error file in one step: a reader sees the old file, or none, or all of the new one.

    What is there and is no regular file (a device) is written to, and so is a file that cannot be replaced (a mount, or
    one in a folder of others): in place, which takes more than a step.

    Args:
        path: Where. A missing folder is made. A file that is there is replaced; of a link, the file that it leads to;
            unless the link is neither ours nor root's, which is replaced itself.
        message: One line or more on what happened.
        py_callstack: The traceback as text; may be empty.
        monotonic_ns: When it happened, on CLOCK_MONOTONIC, in nanoseconds. Default: now.
        pid: The process that it happened to. Default: this one.
        **extra: More keys for ``extraInfo``. What JSON cannot say is written as its ``repr``.

    Raises:
        OSError: It could not be written. Nothing is left over, and a file that was there is untouched.
    """
    info = {
        "py_callstack": py_callstack,
        "timestamp": str(int(time.time())),
        "monotonic_ns": time.monotonic_ns() if monotonic_ns is None else monotonic_ns,
        "pid": os.getpid() if pid is None else pid,
    }
    info.update(extra)
    write_json(path, {"message": {"message": message, "extraInfo": info}})


def write_json(path: str, value: Any) -> None:
    """Write `value` as JSON to `path` in one step. Raises OSError as `write_error_file` does."""
    _write(path, _encoded(value))


def _encoded(value: Any) -> bytes:
    import json

    # What UTF-8 cannot say becomes \\udXXX, which inside a JSON string is the right escape for it.
    text = json.dumps(value, ensure_ascii=False, default=_repr).encode("utf-8", "backslashreplace")
    return text.replace(_UNHANDLED, _UNHANDLED[:-4] + b"null".ljust(_ROOM), 1)


def _write(path: str, data: bytes) -> None:
    path = files.target(path)  # a link of ours stays one
    try:
        found = os.lstat(path)
        what = files.kind(found.st_mode)
        if what and (what != files.LINK or files.is_ours(found)):  # one of ours that is left is of /proc
            _write_in_place(path, data)
            return
    except FileNotFoundError:
        pass
    try:
        _replace(path, data)
    except OSError as exc:
        if exc.errno not in _IRREPLACEABLE or not os.path.exists(path):
            raise
        _write_in_place(path, data)


def _write_in_place(path: str, data: bytes) -> None:
    fd = files.opened(path, os.O_WRONLY | os.O_TRUNC, links=files.OWN_LINKS, regular=False)
    try:
        files.write_all(fd, data)
    finally:
        os.close(fd)


def _replace(path: str, data: bytes) -> None:
    # The temporary name does not contain the final one: that one may be as long as the file system allows.
    # No fsync: the page cache outlives the process, and only the death of the process is at stake here.
    name = f".error.{os.getpid()}.{time.monotonic_ns()}.tmp"
    folder = os.path.dirname(path) or os.curdir
    os.makedirs(folder, exist_ok=True)  # it may not have been made yet, or have been removed since
    files.replace(path, os.path.join(folder, name), data)


def record(exc: BaseException, path: str | None = None, *, tb_text: str | None = None, left: bool = False) -> bool:
    """Leave evidence of an exception, as well as can be done; never raises.

    What is recorded last counts: an exception that was recorded before may have been handled. The same exception
    again keeps its date and its text. One that has come of another (its cause, or its context) has that one's
    date, and its own text: the failure began then. What else the file held is kept in it under ``before``.

    Evidence of our parent stays as it is. What came after an expired timer, or after an exception that had left the
    main function, is added to that: exit handlers and threads fail of what has ended. A file that the user's
    code has written, or `torch`, keeps its message if it tells of this exception, or is of what a launcher
    has launched that has failed, or is not older than `SOON_NS`: this exception is added.

    Args:
        exc: What happened. It is marked, by an attribute; nothing holds on to it.
        path: The error file. Default: the value of ``TORCHELASTIC_ERROR_FILE``.
        tb_text: The traceback to record in place of the exception's own, whole and as it is.
        left: Whether the exception has left the main function, and ends the process.

    Returns:
        Whether `path` now holds evidence of this process, or what has been `passed_on`; or, where it cannot be written
        any more, the file beside it does, see `set_aside`.
    """
    try:
        moment = time.monotonic_ns()  # first of all: the rest takes its time
        path = os.fspath(path or os.environ.get(ERROR_FILE_ENV, ""))
        if not path:
            return False
        data = read(path)[0]
        author = written_by(data)
        if author == os.getppid():
            return False
        mark = _mark_of(exc)
        if mark is not None and path in mark["files"] and mark["files"][path] == state(path):
            if left and author != os.getpid():  # a copy, which carries no date of ours
                _note_end(path, 1, mark["began"])
            elif left and not has_left(data):
                _extra_info(data)["left"] = True
                _extra_info(data).pop("handled_ns", None)
                write_json(path, data)
                mark["files"][path] = state(path)
            return True
        message, stack = describe(exc)
        chain = _chain(exc)
        began = min([moment] + [each["began"] for each in map(_mark_of, chain) if each is not None])
        text = stack if tb_text is None else tb_text
        of_launcher = any(callable(getattr(type(each), "get_first_failure", None)) for each in chain)
        try:
            put(path, message, text, data, began=began, recorded=moment, left=left, of_launcher=of_launcher)
        except (OSError, ImportError):  # the latter, of `json`: its user may not read the library
            return left and _put_aside(path, message, text, began)
        _mark(exc, path, began)
    except BaseException:  # the exception being recorded must not be lost to one of ours
        return False
    return True


def put(
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
) -> None:
    """Write evidence of an exception to a file that holds ``data`` (as `read` returns it), as `record` has it.

    Args:
        path: The error file.
        message: As `describe` gives it.
        stack: As `describe` gives it.
        data: What the file holds.
        began: The exception's date, on CLOCK_MONOTONIC, in nanoseconds.
        recorded: When it was recorded, likewise.
        pid: The process that it happened to. Default: this one.
        left: Whether it has left the main function.
        of_launcher: Whether it is, or has come of, that of a launcher whose workers have failed.

    Raises:
        OSError: It could not be written.
    """
    pid = os.getpid() if pid is None else pid
    author = written_by(data)
    if author == pid and (_of_timer(data) or (has_left(data) and not left)):
        _add_to(path, data, message, stack)
        return
    stamp: dict[str, Any] = {"monotonic_ns": began, "pid": pid}
    if recorded != began:
        stamp["recorded_ns"] = recorded
    stamp.update({"left": True} if left else {"handled_ns": None})
    if data is not None and author != pid and message_of(data) is not None:
        same = _tells_of(data, message)
        if of_launcher or (author is None and (same or _is_fresh(path))):
            if author is not None:
                stamp["origin_pid"] = author
            _add_to(path, data, "" if same else message, stack, stamp)
            return
    info = {"py_callstack": stack, "timestamp": str(int(time.time())), **stamp}
    before = _in_brief(data) if author == pid else data
    value = {"message": {"message": message, "extraInfo": info}}
    if before is not None:
        info["before"] = before
        encoded = _encoded(value)
        if len(encoded) <= READ_LIMIT:
            _write(path, encoded)
            return
        del info["before"]
    encoded = _encoded(value)
    if len(encoded) > READ_LIMIT:
        value["message"]["message"], info["py_callstack"] = _cut_middle(message, _SHORT), _cut_middle(stack, _SHORT)
        encoded = _encoded(value)
    _write(path, encoded)


def passed_on(exc: BaseException, path: str) -> None:
    """Note that the file tells of an exception as it is: `record` of that one leaves it so. Never raises."""
    try:
        _mark(exc, path, time.monotonic_ns())
    except BaseException:  # it is raised again, whatever happens here
        return


def state(path: str) -> tuple[int, int]:
    """What tells a file from the one that took its place; zeros where there is none. Never raises."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return 0, 0
    return found.st_ino, found.st_mtime_ns


class _Mark(dict):  # type: ignore[type-arg]  # no dict[...] at run time under Python 3.8
    """What an exception carries that has been recorded: by whom, its date, and the files with their state by then.

    A dict, and an attribute of the exception: a script's runner and `phalanx` each have a copy of this module, and
    what one has marked the other knows. It goes when the exception goes. That is when one was handled, unless it
    had left the main function by then: the file says so. (An exception that was never raised is handled by nobody, and
    neither is one that is there until the interpreter itself ends: that may be of it.)
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # it means nothing in another process, and on another machine

    def __del__(self) -> None:
        try:
            import sys

            if self["pid"] == os.getpid() and self["raised"] and not sys.is_finalizing():
                for path, noted in self["files"].items():
                    _note_handled(path, noted)
        except BaseException:  # at the interpreter's end there is nothing left to do it with
            return


def _mark(exc: BaseException, path: str, began: int) -> None:
    """Mark an exception."""
    mark = _mark_of(exc)
    if mark is None:
        mark = _Mark(pid=os.getpid(), began=began, raised=exc.__traceback__ is not None, files={})
        BaseException.__setattr__(exc, _MARK, mark)  # whatever a class of the user's makes of attributes
    mark["files"][path] = state(path)


def _mark_of(exc: BaseException) -> dict[str, Any] | None:
    """What this process has noted of an exception, if it has recorded it."""
    try:
        mark = BaseException.__getattribute__(exc, _MARK)
    except BaseException:
        return None
    return mark if isinstance(mark, dict) and mark.get("pid") == os.getpid() else None


def _chain(exc: BaseException) -> list[BaseException]:
    """An exception, and those that it has come of: causes, contexts, members of groups. The nearest come first."""
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


def _note_handled(path: str, noted: tuple[int, int]) -> None:
    """Note that the exception that a file tells of has been let go of, by who went on. Raises OSError, ValueError.

    In place: a file that another thread has put there meanwhile is not touched, and a loop may handle many.
    """
    import json

    fd = files.opened(path, os.O_RDWR, links=files.OWN_LINKS)
    try:
        found = os.fstat(fd)
        if (found.st_ino, found.st_mtime_ns) != noted:
            return
        raw = files.pread(fd, READ_LIMIT)
        place = raw.find(_UNHANDLED)
        data = json.loads(raw.decode("utf-8", "replace"))
        if place >= 0 and written_by(data) == os.getpid() and not has_left(data):
            os.pwrite(fd, (b"%d" % time.monotonic_ns()).ljust(_ROOM), place + len(_UNHANDLED) - 4)
    finally:
        os.close(fd)


def _tells_of(data: dict[str, Any], message: str) -> bool:
    """Whether error file data tell of an exception that is described so, in the message or as a traceback's line."""
    stack = _extra_info(data).get("py_callstack")
    text = f"{message_of(data)}\n{stack if isinstance(stack, str) else ''}\n"
    if message.endswith(": "):  # it has no text, and in its traceback no colon
        message, text = message[:-2], text.replace(": \n", "\n")
    return message + "\n" in text


def _is_fresh(path: str) -> bool:
    return time.time_ns() - os.stat(path).st_mtime_ns <= SOON_NS


def _in_brief(data: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is kept of evidence of ours; and whole, what is in that of a file that was not ours."""
    if data is None:
        return None
    info = _extra_info(data)
    brief: dict[str, Any] = {key: info[key] for key in ("timestamp", "monotonic_ns", "recorded_ns") if key in info}
    older = info.get("before")
    while isinstance(older, dict) and "monotonic_ns" in older:  # ours, in brief
        older = older.get("before")
    return {"message": (message_of(data) or "")[:_BRIEF], **brief, **({} if older is None else {"before": older})}


def read(path: str, limit: int = READ_LIMIT) -> tuple[dict[str, Any] | None, str]:
    """Read an error file that anyone may have written, or half written. Never raises.

    Never blocks either, were it a FIFO. Bytes that are not UTF-8 are replaced when the rest makes sense.

    Args:
        path: The file.
        limit: The most bytes to accept.

    Returns:
        The JSON object and ``""``; or None and why there is none: ``"missing"`` or ``"unreadable: ..."``. An object
        without a message comes with ``"unreadable: it has no message"``.

    >>> read("/nowhere/error.json")
    (None, 'missing')
    >>> read("/")
    (None, 'unreadable: it is not a regular file, but a folder')
    """
    why = ""
    try:
        raw = _contents(path, limit + 1)
        if len(raw) > limit:
            why = f"it is longer than {limit} bytes"
        elif not raw:
            why = "it is empty"
        else:
            import json

            data = json.loads(raw.decode("utf-8", "replace"))
            if isinstance(data, dict):
                return data, "" if message_of(data) is not None else "unreadable: it has no message"
            why = "it holds no JSON object"
    except (FileNotFoundError, NotADirectoryError):
        return None, "missing"
    except OSError as exc:
        why = exc.strerror or str(exc)
    except ImportError as exc:
        why = str(exc)
    except ValueError as exc:
        why = f"damaged or half written ({exc})"
    except (RecursionError, MemoryError) as exc:
        why = f"{type(exc).__name__} while parsing it"
    return None, f"unreadable: {why}"


def written_by(data: dict[str, Any] | None) -> int | None:
    """The pid that error file data (as `read` returns it) carries, or None."""
    return _number(_extra_info(data).get("pid"))


def written_at(data: dict[str, Any] | None) -> int | None:
    """The moment (CLOCK_MONOTONIC, nanoseconds) of what error file data tell, or None.

    That is when the process itself recorded it, or when a timer of it expired. Who observes an end comes later.
    """
    info = _extra_info(data)
    return _number(info.get("monotonic_ns")) if info.get("observer", "timer") == "timer" else None


def recorded_at(data: dict[str, Any] | None) -> int | None:
    """When the process itself recorded what error file data tell (CLOCK_MONOTONIC, nanoseconds), or None."""
    found = _number(_extra_info(data).get("recorded_ns"))
    return written_at(data) if found is None else found


def handled_at(data: dict[str, Any] | None) -> int | None:
    """When the exception of error file data was let go of by who went on (CLOCK_MONOTONIC, nanoseconds), or None."""
    return _number(_extra_info(data).get("handled_ns"))


def has_left(data: dict[str, Any] | None) -> bool:
    """Whether it is known that the exception of error file data left the main function."""
    return _extra_info(data).get("left") is True


def is_observed(data: dict[str, Any] | None) -> bool:
    """Whether error file data are of who watches timers, or ends, and not of the process itself."""
    return "observer" in _extra_info(data)


def message_of(data: dict[str, Any] | None) -> str | None:
    """The message of error file data, or None if they have none."""
    message = (data or {}).get("message")
    if isinstance(message, dict):
        message = message.get("message")
    return message if isinstance(message, str) else None


def seen_by_timer(path: str) -> str:
    """What the one who watches timers noted of an expired one, in lines; ``""`` if it did not. Never raises."""
    try:
        if b'"observer"' not in _contents(path, READ_LIMIT):
            return ""
    except (OSError, ValueError):
        return ""
    info = _extra_info(read(path)[0])
    detail = info.get("detail")
    return kept(detail, path) if info.get("observer") == "timer" and isinstance(detail, str) else ""


def kept(text: str, path: str = "") -> str:
    """The two ends of a text of more than `KEPT_LIMIT` characters, and how much was cut; ``path`` has all of it."""
    return _cut_middle(text, KEPT_LIMIT, f"; all in {path}" if path else "")


def bounded(data: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Error file data without what would cost much memory: the ends of long texts, few members, no great depth.

    Data whose texts have at most `KEPT_LIMIT` characters each, and three times as many together with 8 for every
    member, stay as they are. ``path`` has all of it.
    """
    whole: dict[str, Any] = _bounded(data, path, [3 * KEPT_LIMIT], 0)
    return whole


def _bounded(value: Any, path: str, left: list[int], depth: int) -> Any:
    """See `bounded`. ``left`` is how many characters may be kept still."""
    left[0] -= 8
    if isinstance(value, str):
        text = kept(value, path) if left[0] >= KEPT_LIMIT else _cut_middle(value, max(left[0], 0))
        left[0] -= len(text)
        return text
    if isinstance(value, int) and value.bit_length() > _BRIEF:
        return _CUT
    if not isinstance(value, (dict, list)):
        return value
    if depth == _DEPTH:
        return _CUT
    names = list(value) if isinstance(value, dict) else range(len(value))
    found: list[tuple[Any, Any]] = []
    for name in names:
        if left[0] <= 0:
            found.append((_CUT, f"... {len(value) - len(found)} of {len(value)} cut ..."))
            break
        short = _cut_middle(name, _BRIEF) if isinstance(name, str) else name
        left[0] -= len(str(short))
        found.append((short, _bounded(value[name], path, left, depth + 1)))
    return dict(found) if isinstance(value, dict) else [each for _name, each in found]


def _of_timer(data: dict[str, Any] | None) -> bool:
    return bool(_extra_info(data).get("observer") == "timer")


def _add_to(path: str, data: Any, message: str, stack: str, stamp: dict[str, Any] | None = None) -> None:
    """Add what a process has raised to a file that stays the cause: that of its expired timer, or of the user's."""
    if isinstance(data["message"], dict) and not isinstance(data["message"].get("extraInfo"), dict):
        data["message"]["extraInfo"] = {}
    info = _extra_info(data)
    if not stamp and _FOLLOWED in info:
        return
    info.update(stamp or {})
    if message:
        text = info.get("py_callstack")
        info[_FOLLOWED] = message
        info["py_callstack"] = f"{text if isinstance(text, str) else ''}\nAfterwards:\n{stack}"
    encoded = _encoded(data)
    if len(encoded) <= READ_LIMIT:
        _write(path, encoded)


def withdraw(path: str) -> None:
    """Remove an error file if it is of an expired timer. Never raises."""
    try:
        data = read(path)[0]
        if _of_timer(data) and _FOLLOWED not in _extra_info(data):
            os.unlink(path)
    except (OSError, ValueError):
        pass


def fatal_path(path: str) -> str:
    """The file beside an error file that takes the Python stack when a fatal signal strikes.

    >>> fatal_path("/logs/0/error.json")
    '/logs/0/error.json.fatal'
    """
    return path + ".fatal"


def catch_fatal_signals(path: str | None = None) -> bool:
    """Have the interpreter write the stacks of all threads to `fatal_path` when a fatal signal strikes.

    Fatal are SIGSEGV, SIGFPE, SIGABRT, SIGBUS and SIGILL. A file of its own, because the handler runs in a dying
    process: it can write to a descriptor and do nothing else, so the descriptor must be open before, and
    stays open as long as the process lives. The file stays empty unless the worst happens; whoever reaps the
    process removes it then (`remove_empty`). It also takes the exception of a process that may not write an error file
    by then, because it has changed its user: see `set_aside`.

    Args:
        path: The error file. Default: the value of ``TORCHELASTIC_ERROR_FILE``.

    Returns:
        Whether this was done. It is not where the user has enabled faulthandler already. Never raises.
    """
    try:
        import faulthandler

        path = path or os.environ.get(ERROR_FILE_ENV)
        if not path or _kept_open(path) >= 0:
            return False
        fd = _open_to_append(fatal_path(path))
        found = os.fstat(fd)
        _kept[path] = fd, found.st_dev, found.st_ino, os.getpid()
        if faulthandler.is_enabled():
            return False
        faulthandler.enable(fd)
    except (OSError, ValueError, RuntimeError, ImportError):
        return False
    return True


_kept = {}  # type: dict[str, tuple[int, int, int, int]]
"""The descriptor of `fatal_path` by the error file; the file's device and number, and the process that has opened it.
(A comment, because a worker may run Python 3.8.)"""


def _kept_open(path: str) -> int:
    """The descriptor of `fatal_path` that this process has open; -1 if there is none. The user may have closed it."""
    fd, device, number, pid = _kept.get(path, (-1, 0, 0, 0))
    if fd < 0 or pid != os.getpid():
        return -1
    try:
        found = os.fstat(fd)
    except OSError:
        return -1
    return fd if (found.st_dev, found.st_ino) == (device, number) else -1


def _put_aside(path: str, message: str, stack: str, began: int) -> bool:
    """Write evidence of an exception that ends this process to `fatal_path`. Returns whether that was open. OSError.

    Nothing is imported: what may write no error file may read no library either.
    """
    fd = _kept_open(path)
    if fd < 0:
        return False
    texts = message.encode("utf-8", "backslashreplace"), stack.encode("utf-8", "backslashreplace")
    data = _ASIDE_HEADER % (os.getpid(), began, len(texts[0]), len(texts[1])) + texts[0] + b"\n" + texts[1] + b"\n"
    os.ftruncate(fd, 0)
    while data:
        data = data[os.write(fd, data) :]
    return True


def set_aside(path: str, pid: int) -> tuple[str, str, int] | None:
    """What a process has left of its exception where it could not write its error file any more. Never raises.

    It stands first in `fatal_path`: a line with the process, the moment and the lengths in bytes, and the texts.

    Args:
        path: The error file.
        pid: The process.

    Returns:
        The message, the traceback and the moment (CLOCK_MONOTONIC, nanoseconds); or None.
    """
    author, moment, message, stack, _rest = _aside_and_rest(path)
    return (message, stack, moment) if author and author == pid and moment < 1 << 63 else None


def _aside_and_rest(path: str, limit: int = READ_LIMIT) -> tuple[int, int, str, str, bytes]:
    """What is in `fatal_path`: process, moment, message and traceback (0 and "": it has none), and what follows."""
    try:
        data = _contents(fatal_path(path), limit)
    except (OSError, ValueError):
        data = b""
    head, _newline, texts = data.partition(b"\n")
    words = head[len(_ASIDE) :].replace(b",", b"").split()
    numbers = [int(word) for word in words if word.isdigit() and len(word) < 20]  # noqa: PLR2004 - of 64 bits at the most
    if not head.startswith(_ASIDE) or len(numbers) != 4:  # noqa: PLR2004 - as the header has
        return 0, 0, "", "", data
    author, moment, first, second = numbers
    message, stack = texts[:first], texts[first + 1 : first + 1 + second]
    rest = texts[first + 1 + second + 1 :]
    return author, moment, message.decode("utf-8", "replace"), stack.decode("utf-8", "replace"), rest


def exit_path(path: str) -> str:
    """The file beside an error file that says when a process began to leave with a code that is not 0.

    It is there for ``sys.exit``; and for the exception of a launcher whose error file is a copy of a child's.

    >>> exit_path("/logs/0/error.json")
    '/logs/0/error.json.exit'
    """
    return path + ".exit"


def note_exit(leave: SystemExit, path: str | None = None) -> None:
    """Note when a SystemExit left the user's code, unless it says that all is well. Never raises.

    From then on the process closes its connections, and peers fail of it long before it has exited: threads are waited
    for, exit handlers run, memory is given back. An exception that was recorded before, and of which this exit
    has come (``except Exception: sys.exit(1)``), has left the main function by it.

    Args:
        leave: The exception.
        path: The error file. Default: the value of ``TORCHELASTIC_ERROR_FILE``.
    """
    try:
        moment = time.monotonic_ns()  # first of all: the rest takes its time
        path = path or os.environ.get(ERROR_FILE_ENV)
        code = exit_code(leave)
        if path and code:
            _note_end(path, code, moment)
            for each in _chain(leave)[1:]:
                if path in (_mark_of(each) or {"files": ()})["files"]:
                    record(each, path, left=True)
                    break
    except BaseException:  # nobody must be kept from leaving
        return


def _note_end(path: str, code: int, moment: int) -> None:
    fd = _open_to_append(exit_path(path))
    try:
        os.write(fd, b"%d %d %d\n" % (os.getpid(), code, moment))
    finally:
        os.close(fd)


def exit_code(leave: SystemExit) -> int:
    """The exit code of ``sys.exit(...)``, as the interpreter finds it.

    >>> [exit_code(SystemExit(value)) for value in (None, 0, 3, 259, "bad")]
    [0, 0, 3, 3, 1]
    """
    if leave.code is None:
        return 0
    return leave.code & 0xFF if isinstance(leave.code, int) else 1


def read_exit(path: str, pid: int) -> tuple[int, int] | None:
    """The exit code that a process noted first, and when (CLOCK_MONOTONIC, nanoseconds); or None. Never raises."""
    try:
        for line in _contents(exit_path(path), 4096).splitlines():
            author, code, moment = map(int, line.split())
            if author == pid and 0 < code < 256 and 0 <= moment < 1 << 63:  # noqa: PLR2004 - an exit code
                return code, moment
    except (OSError, ValueError):
        pass
    return None


def fatal_at(path: str) -> int | None:
    """When a fatal signal struck that has left its stack (CLOCK_MONOTONIC, nanoseconds), or None. Never raises."""
    return file_at(fatal_path(path))


def file_at(path: str) -> int | None:
    """When a file was written that is not empty (CLOCK_MONOTONIC, nanoseconds), or None. Never raises.

    By the file's time, which is some milliseconds early, and off by what steps the wall clock took since.
    """
    try:
        found = os.stat(path)
        if found.st_size == 0:
            return None
        return time.monotonic_ns() - (time.time_ns() - found.st_mtime_ns)
    except (OSError, ValueError):
        return None


def stacks_path(path: str, pid: int = 0) -> str:
    """The file beside an error file that takes the Python stacks of a live process, whenever somebody asks for them.

    The first process of a rank that offers its stacks has the plain name; each further one, a name with its ``pid``.

    >>> stacks_path("/logs/0/error.json"), stacks_path("/logs/0/error.json", 4242)
    ('/logs/0/error.json.stacks', '/logs/0/error.json.stacks.4242')
    """
    return f"{path}.stacks.{pid}" if pid else path + ".stacks"


def offer_stacks(path: str | None = None, number: int | None = None) -> bool:
    """Have the interpreter append its stacks to a file (`stacks_path`) whenever one of two signals comes.

    On the first, it is the stack of the thread that takes the signal: the main thread, unless that blocks it. This may
    be sent to any process. On the second, those of all threads: they are read while they run, and a thread whose
    frames move meanwhile can end the process by SIGSEGV, so it is for one that is about to be killed anyway.

    The file's first line says which signals these are, which descriptor of which process the file is (``# stacks on
    signals 52 and 53, descriptor 5, process 4242``); each further call appends such a line, and the last one counts.
    Both handlers are in C, take no lock and wait for no GIL. Like any handler they interrupt system calls, which Python
    itself takes up again.

    Args:
        path: The error file. Default: the value of ``TORCHELASTIC_ERROR_FILE``.
        number: The first signal; 0 ends the offer. Default: ``PHALANX_STACK_SIGNAL``; where that says nothing that
            makes sense it is SIGRTMIN+18, unless somebody in this process has a use for that. The second is
            SIGRTMIN+19 (SIGRTMIN+18, if that is the first), unless somebody has a use for that: then there is none.

    Returns:
        Whether stacks are offered now. Never raises.
    """
    try:
        path = path or os.environ.get(ERROR_FILE_ENV)
        return _offer(path, _asked_for() if number is None else number) if path else False
    except (OSError, ValueError, RuntimeError, ImportError, AttributeError, OverflowError):
        return False


def _offer(error_file: str, asked: int | None) -> bool:
    import _signal  # type: ignore[import-not-found]  # typeshed lacks the C half, which is there without an import
    import faulthandler

    path = _home_of_stacks(error_file)
    before, fd, _author = _offered_here(path)
    for each in before or _inherited(error_file):
        if _signal.getsignal(each) in (None, 0):  # else a handler of the user's has taken its place
            faulthandler.unregister(each)
    base = int(_signal.SIGRTMIN) + 18
    number = base if asked is None else asked
    free = number == 0 or _is_default(number)
    if number == 0 or (asked is None and not free):
        if fd >= 0:
            os.write(fd, _STACKS_HEADER % (0, 0, fd, os.getpid()))
        return False
    second = base if number == base + 1 else base + 1
    if not _is_default(second):
        second = 0
    fd = _write_header(error_file, fd, number, second)
    for each, unused, everyone in ((number, free, False), (second, True, True)):
        if each and unused:  # a process that has forked us may have it on the books still, which are not the kernel's
            faulthandler.unregister(each)
        if each:
            faulthandler.register(each, fd, all_threads=everyone, chain=False)
    return True


def offers_stacks(path: str) -> bool:
    """Whether this very process offers its stacks already. Never raises."""
    numbers, _fd, author = _offered_here(_home_of_stacks(path))
    return bool(numbers) and author == os.getpid()


def can_show_stacks(number: int) -> bool:
    """Whether `offer_stacks` takes a number: 0, and the signals that can be caught and are not fatal.

    >>> [number for number in (-1, 0, 9, 10, 11, 52, 65) if can_show_stacks(number)]
    [0, 10, 52]
    """
    import _signal

    return number == 0 or (number in _signal.valid_signals() and number not in _NOT_TO_BE_CAUGHT)


def offered(data: bytes) -> tuple[int, int, int, int]:
    """What the last header in a `stacks_path` says: both signals, the descriptor, and the process; 0 (-1) for nothing.

    The file is a worker's, who may have written anything: what is no signal's number counts as none, and what is not
    all numbers (a negative descriptor) as nothing.

    >>> offered(b"# stacks on signals 52 and 53, descriptor 5, process 4242")
    (52, 53, 5, 4242)
    >>> offered(b"# stacks on signals 15 and 15, descriptor -1, process 4242")
    (0, 0, -1, 0)
    """
    start = data.rfind(b"\n" + _STACKS_HEAD) + 1
    if not data.startswith(_STACKS_HEAD, start):
        return 0, 0, -1, 0
    words = data[start + len(_STACKS_HEAD) : start + 200].split(b"\n", 1)[0].replace(b",", b"").split()
    if not all(word.isdigit() and len(word) < 11 for word in words[0::2]) or len(words[0::2]) != 4:  # noqa: PLR2004 - of 32 bits at the most; and as the header has
        return 0, 0, -1, 0
    first, second, fd, pid = map(int, words[0::2])
    return (first if first <= _SIGNALS else 0), (second if second <= _SIGNALS else 0), fd, pid


def error_file_of(path: str, fd: int) -> str:
    """The error file beside which a file of stacks lies that a process has open as ``fd``; or ``""``. Never raises.

    It is one by its name, and by a header that names this descriptor: else the process may read another's.

    >>> error_file_of("/models/model.stacks", 3)
    ''
    """
    stem, found, rest = path.rpartition(".stacks")
    try:
        return stem if found and _is_pid(rest) and offered(_contents(path, _STACKS_LIMIT))[2] == fd else ""
    except (OSError, ValueError):
        return ""


def may_write(path: str) -> bool:
    """Whether nothing is at a path yet, or an error file, whoever has written it. Never raises."""
    data, problem = read(path)
    return problem == "missing" or (data is not None and "message" in data)


def remove_old(paths: Iterable[str]) -> None:
    """Remove error files of an earlier run, and what stands beside them. Raises OSError: they would pass for today's.

    What is no regular file (a folder, or a device that somebody has put there) is no evidence, and stays; and so does a
    link of ours that leads to such a one (/dev/stderr, whatever that is now).
    """
    for path in paths:
        for name in (path, exit_path(path), fatal_path(path), *_all_stacks(path)) if path else ():
            try:
                if _is_old(name):
                    os.unlink(name)
            except (FileNotFoundError, NotADirectoryError):
                continue


def _is_old(path: str) -> bool:
    """Whether there is a regular file, or a link that does not lead to anything else. Raises OSError."""
    found = os.lstat(path)
    if files.kind(found.st_mode) == files.LINK:
        try:
            found = os.lstat(files.target(path))
        except OSError:  # it leads nowhere
            return True
    what = files.kind(found.st_mode)
    return not what or (what == files.LINK and not files.is_of_kernel(found))


def remove_empty(path: str) -> None:
    """Remove `fatal_path` and each `stacks_path` of an error file unless there is a stack in them. Never raises.

    And `exit_path`: what it says has been read.
    """
    try:
        os.unlink(exit_path(path))
    except (OSError, ValueError):
        pass
    try:
        author, _moment, _message, _stack, rest = _aside_and_rest(path)
        told = author and not rest and os.path.exists(path)  # where it is by now
        if told or os.stat(fatal_path(path)).st_size == 0:
            os.unlink(fatal_path(path))
    except (OSError, ValueError):
        pass
    for name in _all_stacks(path):
        try:
            if all(line.startswith(_STACKS_HEAD) for line in _contents(name, _STACKS_LIMIT).splitlines()):
                os.unlink(name)
        except (OSError, ValueError):
            pass


def read_fatal(path: str, limit: int = TEXT_LIMIT) -> str:
    """The stack that a fatal signal left beside an error file, without our own frames; or ``""``. Never raises."""
    return without_us(_aside_and_rest(path)[-1][:limit].decode("utf-8", "replace"))


def without_us(text: str) -> str:
    """A fault handler's stacks without our own frames."""
    ours = '  File "' + os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(ours))


def _asked_for() -> int | None:
    """The signal that ``PHALANX_STACK_SIGNAL`` names, or 0; None where it names none that could be meant."""
    text = os.environ.get(STACK_SIGNAL_ENV, "")
    number = int(text) if text.isdigit() and text.isascii() and len(text) <= 3 else -1  # noqa: PLR2004 - NSIG is below 1000
    return number if can_show_stacks(number) else None


def _all_stacks(path: str) -> list[str]:
    """Every `stacks_path` of an error file that is there. Never raises."""
    plain = stacks_path(path)
    folder, name = os.path.split(plain)
    try:
        names = [
            each for each in os.listdir(folder or os.curdir) if each.startswith(name) and _is_pid(each[len(name) :])
        ]
    except (OSError, ValueError):
        return []
    return [os.path.join(folder, each) for each in names]


def _is_pid(text: str) -> bool:
    """Whether it is what follows ``.stacks`` in a name of ours."""
    return not text or (text[0] == "." and text[1:].isdigit())


def _home_of_stacks(path: str) -> str:
    """Which file takes the stacks of this process: the plain one, or that with its pid; ``""``: both are others'."""
    for each in (stacks_path(path), stacks_path(path, os.getpid())):
        try:
            if offered(_contents(each, _STACKS_LIMIT))[3] == os.getpid():
                return each
        except (FileNotFoundError, NotADirectoryError):
            return each
        except OSError:
            continue
    return ""


def _inherited(error_file: str) -> list[int]:
    """In a fork, the signals on which who has forked us offers stacks."""
    return [number for each in _all_stacks(error_file) for number in _offered_here(each)[0]]


def _write_header(error_file: str, fd: int, number: int, second: int) -> int:
    """Say what this process offers, in its file (-1: it is not open yet). Returns the descriptor. Raises OSError."""
    new = fd < 0
    if new:
        fd = _open_stacks(error_file)
    try:
        os.write(fd, _STACKS_HEADER % (number, second, fd, os.getpid()))
    except OSError:
        if new:
            os.close(fd)
        raise
    return fd


def _open_stacks(error_file: str) -> int:
    """Open the file that takes the stacks of this process. Raises OSError."""
    path = _home_of_stacks(error_file)
    try:
        return _open_to_append(path, 0 if os.path.lexists(path) else os.O_EXCL)
    except FileExistsError:  # another process of the rank was faster
        return _open_to_append(stacks_path(error_file, os.getpid()), os.O_EXCL)


def _offered_here(path: str) -> tuple[list[int], int, int]:
    """The signals and the descriptor that this process has for a file of stacks, and who has offered; or none and -1.

    In a fork of a process that offers, that one: the fork has its descriptor and its handlers.
    """
    try:
        file = os.stat(path)
        first, second, fd, author = offered(_contents(path, _STACKS_LIMIT))
        mine = os.fstat(fd)
    except (OSError, ValueError):
        return [], -1, 0
    if (mine.st_dev, mine.st_ino) != (file.st_dev, file.st_ino):
        return [], -1, 0
    return [number for number in (first, second) if number], fd, author


def _is_default(number: int) -> bool:
    """Whether a signal has its default disposition here, also as C libraries know it, which Python does not."""
    fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.read(fd, 8192)
    finally:
        os.close(fd)
    masks = (int(status.partition(b"\n" + name)[2][:17], 16) for name in (b"SigIgn:", b"SigCgt:"))
    return not any(mask >> number - 1 & 1 for mask in masks)


def _open_to_append(path: str, more: int = 0) -> int:
    """Open a regular file, and make it and its folder if need be. Raises OSError; a FIFO it does not wait for."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | more
    try:
        return files.opened(path, flags)
    except FileNotFoundError:
        if not path:
            raise
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
        return files.opened(path, flags)


def _contents(path: str, limit: int) -> bytes:
    """At most `limit` bytes of a regular file. Raises OSError."""
    return files.read(path, limit, links=files.OWN_LINKS)


def _extra_info(data: dict[str, Any] | None) -> dict[str, Any]:
    """Where the keys of our own are: beside the message of a flat file, else in its ``extraInfo``."""
    message = (data or {}).get("message")
    info = message.get("extraInfo") if isinstance(message, dict) else data if isinstance(message, str) else None
    return info if isinstance(info, dict) else {}


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def _repr(value: object) -> str:
    try:
        return repr(value)
    except BaseException:
        return f"<a {type(value).__name__} whose __repr__ raises>"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _cut_end(text: str) -> str:
    over = len(text) - TEXT_LIMIT
    return text if over <= 0 else f"{text[:TEXT_LIMIT]}\n... {over} characters cut ..."


def _cut_middle(text: str, limit: int = TEXT_LIMIT, where: str = "") -> str:
    over = len(text) - limit
    if over <= 0:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {over} characters cut{where} ...\n{text[len(text) - half :]}"


def _plain_stack(exc: BaseException, message: str) -> str:
    """The traceback with nothing but attribute look-ups: no source lines, no causes, no recursion."""
    lines = ["Traceback (most recent call last):\n"]
    try:
        step: TracebackType | None = exc.__traceback__
        while step is not None and len(lines) < _PLAIN_LINES:
            code = step.tb_frame.f_code
            lines.append(f'  File "{code.co_filename}", line {step.tb_lineno}, in {code.co_name}\n')
            step = step.tb_next
    except BaseException:
        lines.append("  (the rest of the traceback could not be formatted)\n")
    lines.append(message + "\n")
    return "".join(lines)
