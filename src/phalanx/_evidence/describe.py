"""Describes an exception as text of bounded length, whatever its own methods do; tells our own frames from the user's.

A worker loads this module before its script starts, in whatever Python the script runs (3.8 or later).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

# ruff: noqa: BLE001 - an exception's own methods can raise anything, and what they raise must not replace what happened.


TEXT_LIMIT = 1 << 20
"""The most characters of a message, and of a traceback, that `describe` keeps."""

OWN_FOLDERS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(path)), "")
    for path in (__file__, os.path.abspath(__file__), (lambda: 0).__code__.co_filename)
)
"""The folder of our package, with a slash: a frame is ours if its file's name starts with one of these.

There are several, because an interpreter that runs without `site` keeps ``..`` in the names of its files, and the code
of a frozen program has names below ``phalanx/``.
"""

_BOOTSTRAP = '  File "<string>", line 1 in <module>\n'  # the code of our ``-c``, below what starts a worker
_PLAIN_LINES = 2000


def describe(exc: BaseException) -> tuple[str, str]:
    r"""Describe an exception by its message (``"TypeName: text"``) and its traceback as the interpreter prints it.

    Never raises. A message of more than `TEXT_LIMIT` characters loses its end, a traceback its middle, because its two
    ends are what people read; a line says how many characters were cut. Lone surrogates become backslash escapes, so
    that the result can always be encoded.

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
        stack = format_exception(exc, exc.__traceback__)
    except BaseException:  # RecursionError or MemoryError while formatting, or a hostile __cause__
        stack = _plain_stack(exc, message)
    return _encodable(message), _encodable(cut_middle(stack))


def format_exception(exc: BaseException, trace: TracebackType | None) -> str:
    """Format an exception, with that traceback, as the interpreter would print it. Raises what formatting raises.

    But for a warning, where warnings are errors: Python 3.15 warns of a frame whose module has no loader, like a main
    module that is run again.
    """
    import traceback

    try:
        return "".join(traceback.format_exception(type(exc), exc, trace))
    except Warning:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "".join(traceback.format_exception(type(exc), exc, trace))


def is_own_file(path: str) -> bool:
    """Whether a file is one of our package."""
    return path.startswith(OWN_FOLDERS)


def skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not ours; None if all are ours."""
    while trace is not None and is_own_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def decode_dump(data: bytes) -> str:
    r"""Return what a fault handler wrote as text, with the letters in it that it has escaped: it writes ASCII alone.

    >>> decode_dump(b'File "f' + b"\x5cxfcr.py")
    'File "für.py'
    """
    text = data.decode("utf-8", "replace")
    if "\\" not in text:
        return text
    import re

    def letter(match: re.Match[str]) -> str:
        code = int(match[1] or match[2] or match[3], 16)
        found = chr(code) if code <= sys.maxunicode else ""
        return match[0] if found.isascii() or not found.isprintable() else found

    return re.sub(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))", letter, text)


def without_own_frames(text: str) -> str:
    """Remove our own frames from what a fault handler wrote: stacks, the innermost frame first."""
    ours = tuple('  File "' + folder for folder in OWN_FOLDERS)
    lines, above = [], ""
    for line in text.splitlines(keepends=True):
        is_ours = line.startswith(ours) or (line == _BOOTSTRAP and above.startswith(ours) and "/_engine/" in above)
        if not is_ours:
            lines.append(line)
        above = line
    return "".join(lines)


def cut_middle(text: str, limit: int = TEXT_LIMIT, where: str = "") -> str:
    """Cut the middle out of a text of more than ``limit`` characters; a line there says how many, and ``where``."""
    over = len(text) - limit
    if over <= 0:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {over} characters cut{where} ...\n{text[len(text) - half :]}"


def _cut_end(text: str) -> str:
    over = len(text) - TEXT_LIMIT
    return text if over <= 0 else f"{text[:TEXT_LIMIT]}\n... {over} characters cut ..."


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain_stack(exc: BaseException, message: str) -> str:
    """Format a traceback by attribute look-ups alone: no source lines, no causes, no recursion."""
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


KEPT_LIMIT = 32 << 10
"""The most characters of each text of an error file that a launcher keeps of every rank."""
_CUT = "... cut ..."
_DEPTH = 20  # levels of error file data that are kept
_BRIEF = 4096  # characters of what a file held before


def truncate(text: str, path: str = "") -> str:
    """Cut the middle out of a text of more than `KEPT_LIMIT` characters. ``path`` names the file that has all of it."""
    return cut_middle(text, KEPT_LIMIT, f"; all in {path}" if path else "")


def truncate_data(data: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Copy error file data without what would take much memory.

    Of a long text the two ends are kept, of many members the first, of deep nesting the outer levels. Data stay as they
    are if no text has more than `KEPT_LIMIT` characters, and all texts, with 8 characters for every member, have at
    most three times as many. ``path`` names the file that has all of it.
    """
    whole: dict[str, Any] = _truncated(data, path, [3 * KEPT_LIMIT], 0)
    return whole


def _truncated(value: Any, path: str, left: list[int], depth: int) -> Any:
    """Copy one value for `truncate_data`. ``left`` holds the number of characters that may still be kept."""
    left[0] -= 8
    if isinstance(value, str):
        text = truncate(value, path) if left[0] >= KEPT_LIMIT else cut_middle(value, max(left[0], 0))
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
        short = cut_middle(name, _BRIEF) if isinstance(name, str) else name
        left[0] -= len(str(short))
        found.append((short, _truncated(value[name], path, left, depth + 1)))
    return dict(found) if isinstance(value, dict) else [each for _name, each in found]
