"""Chooses lines by patterns, and the lines around them. Pure: lines in, chosen lines out, bytes unchanged.

Owns the engine, which patterns are refused, and which text of a line it gets. Patterns are RE2's: their time is linear
in the text, whatever the pattern, and they search without the GIL. Where it is not installed (the extra ``re2``),
`slow_patterns` searches. A line is searched as a person reads it: without escape sequences (colours), and without a
carriage return at its end. Bytes that are no UTF-8 count as U+FFFD.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from phalanx._base.stderr import mention
from phalanx._logs import slow_patterns

Spans = list[tuple[int, int]]
"""The beginnings and ends of runs of whole lines, in order."""
_OF_A_TEXT = re.compile(r"\\[ACQz]|\(\?[a-zA-Z]*-")
"""Finds what may mean something else in a text of many lines than in one: its ends, any byte, flags switched off."""

_WANTING = {  # the beginning of what RE2 says, without "invalid", to what a person may want in its place
    "perl operator: (?!": "a negative lookahead: for lines without something there is --exclude (exclude=)",
    "perl operator: (?<!": "a negative lookbehind: for lines without something there is --exclude (exclude=)",
    "perl operator: (?=": "a lookahead: lines are chosen whole, so let it be a part of the pattern",
    "perl operator: (?<=": "a lookbehind: lines are chosen whole, so let it be a part of the pattern",
    "perl operator: (?>": "an atomic group: a plain one, (?:…), is as fast",
    "perl operator: (?(": "a condition: write its cases as alternatives, a|b",
    "perl operator: (?P": "backreferences, like (?P=name); a group gets its name as in (?P<name>a)",
    "perl operator: (?#": "a comment in a pattern: leave it out",
    "perl operator: (?": "this group or flag: its flags are i, m, s and U",
    "escape sequence: \\Z": r"\Z: the end of a line is $",
    "escape sequence: \\u": r"\u: a letter by its number is \x{20ac}, or stands as it is",
    "escape sequence: \\U": r"\U: a letter by its number is \x{20ac}, or stands as it is",
    "escape sequence: \\N": r"\N: a letter stands as it is, or by its number, as \x{20ac}",
    **{f"bad repetition operator: {it}+": "possessive repetitions: a plain one is as fast" for it in "?*+"},
    **{
        f"escape sequence: \\{n}": "a backreference: write out what may stand there, as in (aa|bb)"
        for n in range(1, 10)
    },
}


class Finder:
    """Finds the lines that contain one of several patterns. Raises ValueError: an invalid pattern."""

    def __init__(self, name: str, patterns: Sequence[str], *, ignore_case: bool) -> None:
        self._search: Callable[[bytes], Spans]
        if not _has_engine():
            for pattern in patterns:
                slow_patterns.check(name, pattern)
            slow = slow_patterns.SlowPatterns(name, patterns, ignore_case=ignore_case, announce=mention)
            self._search = slow.spans
            return
        for pattern in patterns:
            _compiled(name, pattern, pattern)
        any_ = "|".join([f"(?:{pattern})" for pattern in patterns])
        flags_, given = "(?i)" if ignore_case else "", " | ".join(patterns)
        if _OF_A_TEXT.search(any_):
            search = _compiled(name, flags_ + any_, given).search
            self._search = functools.partial(_line_by_line, search)
            return
        # One match for each run of matching lines, and no call for the others. `\C` matches the line feed, and by
        # `never_nl` nothing else does.
        finditer = _compiled(name, rf"{flags_}(?m:(?:^.*(?:{any_}).*$\C)+)", given).finditer
        self._search = lambda text: [match.span() for match in finditer(text)]

    def spans(self, block: bytes) -> Spans:
        """Return where the matching lines are."""
        text = readable(block)
        found = self._search(text)
        return found if text is block or not found else _moved(found, text, block)


def pieces(block: bytes, spans: Iterable[tuple[int, int]]) -> bytes:
    """Return the lines at these spans."""
    return b"".join([block[start:end] for start, end in spans])


def _has_engine() -> bool:
    try:
        import re2  # noqa: F401 - whether it can be imported
    except ImportError:
        return False
    return True


def _compiled(name: str, pattern: str, given: str) -> re.Pattern[bytes]:
    import re2

    options = re2.Options()
    options.log_errors = False  # the ValueError has them
    options.never_capture = options.never_nl = True
    try:
        return re2.compile(pattern.encode(), options)  # type: ignore[no-any-return]  # it has no types
    except UnicodeEncodeError:
        problem = "it is no UTF-8"
    except re2.error as error:
        problem = str(error.args[0], "utf-8", "replace")
        reason = problem.removeprefix("invalid ")
        hint = next((hint for head, hint in _WANTING.items() if reason.startswith(head)), None)
        if hint is not None:
            problem = f"the engine (RE2, which takes no more than linear time) does not have {hint}"
    msg = f"{name}: {given!r} is not a regular expression: {problem}"
    raise ValueError(msg) from None


def _line_by_line(search: Callable[[bytes], object], text: bytes) -> Spans:
    spans, start = [], 0
    for line in text[:-1].split(b"\n") if text else ():
        end = start + len(line) + 1
        if search(line):
            spans.append((start, end))
        start = end
    return spans


def _moved(found: Spans, text: bytes, block: bytes) -> Spans:
    """Turn spans of the searched text into spans of the block that it was made of: both have the same lines."""
    starts = [0, *accumulate(len(line) + 1 for line in block[:-1].split(b"\n"))]
    moved, offset, number = [], 0, 0
    for start, end in found:
        number += text.count(b"\n", offset, start)
        last = number + text.count(b"\n", start, end)
        moved.append((starts[number], starts[last]))
        offset, number = end, last
    return moved


_CSI = rb"\[[0-?]*+[ -/]*+[@-~]?"
_STRING = rb"[\]PX^_][^\007\033\n]*+(?:\007|\033\\)?"
_UNREAD = re.compile(rb"\033(?:" + _CSI + rb"|" + _STRING + rb"|[ -/]++[0-~]?|[0-~]?)|(?<!\r)\r++(?=\n)")
"""Matches escape sequences, whole or not (ECMA-48), and carriage returns at a line's end."""


def readable(block: bytes) -> bytes:
    """Return a block's text as a person reads it, as UTF-8, with the same lines; the block itself if it is that."""
    text = _UNREAD.sub(b"", block) if b"\033" in block or b"\r" in block else block
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return text.decode("utf-8", "replace").encode()
    return text


_MOST_HELD = 256 * 1024  # bytes of a source that are held as context, as of an unfinished line;
_OVERHEAD = 64  # bytes that each held line counts beside its text


class Only:
    """Chooses lines with a function, which takes whole lines and returns those that are wanted."""

    def __init__(self, select: Callable[[bytes], bytes]) -> None:
        self._select = select

    def wants(self, line: bytes) -> bool:
        """Whether a line (with its end) is wanted."""
        return bool(self._select(line))

    def choose(self, _source: object, block: bytes, now: float) -> Iterable[tuple[float, bytes]]:
        """See `Search.choose`."""
        chosen = self._select(block)
        return ((now, chosen),) if chosen else ()


class Search:
    r"""Chooses the lines that contain a pattern, and lines around them.

    Args:
        grep: Patterns; a line that contains one of them is wanted. Empty: every line is.
        exclude: Patterns; a line that contains one of them is dropped, and is no context either.
        ignore_case: Whether the patterns ignore case.
        before, after: Lines of context of each source (>= 0). No more than 256 KiB are held of a source.
        separator: A line between lines of a source that did not follow each other, if there is context.

    Raises:
        ValueError: A pattern is invalid; the message begins with ``grep:`` or ``exclude:``.

    >>> search = Search(["[äö]"], after=1)
    >>> b"".join(lines for _, lines in search.choose("rank 0", "a\nä\n\nb\nö\n".encode(), 0.0)).decode()
    'ä\n\n--\nö\n'
    """

    def __init__(
        self,
        grep: Sequence[str] = (),
        exclude: Sequence[str] = (),
        *,
        ignore_case: bool = False,
        before: int = 0,
        after: int = 0,
        separator: bytes = b"--\n",
    ) -> None:
        self._grep = Finder("grep", grep, ignore_case=ignore_case) if grep else None
        self._exclude = Finder("exclude", exclude, ignore_case=ignore_case) if exclude else None
        self._before, self._after = before, after
        self._separator = separator
        self._contexts: dict[object, _Context] = {}

    def wants(self, line: bytes) -> bool:
        """Whether a line (with its end) is wanted by itself, not as context."""
        kept = self._kept(line)
        return bool(kept and (self._grep is None or self._grep.spans(kept)))

    def choose(self, source: object, block: bytes, now: float) -> Iterable[tuple[float, bytes]]:
        """Choose among the next whole lines of a source, which came at the time ``now``.

        Returns the chosen lines, in order, in parts, each with the time at which it came.
        """
        block = self._kept(block)
        if self._grep is None or not (self._before or self._after):
            chosen = block if self._grep is None else pieces(block, self._grep.spans(block))
            return ((now, chosen),) if chosen else ()
        context = self._contexts.get(source)
        if context is None:
            context = self._contexts[source] = _Context(self._before, self._after, self._separator)
        return context.around(block, self._grep.spans(block), now)

    def _kept(self, block: bytes) -> bytes:
        spans = self._exclude.spans(block) if self._exclude is not None else ()
        starts, ends = [0, *(end for _start, end in spans)], [*(start for start, _end in spans), len(block)]
        return pieces(block, zip(starts, ends, strict=True)) if spans else block


class _Context:
    """The held lines of a source, and the lines after a wanted one that are still due, between two blocks of it."""

    def __init__(self, before: int, after: int, separator: bytes) -> None:
        self._most, self._after, self._separator = before, after, separator
        self._held: deque[tuple[float, bytes]] = deque()  # the last lines that were not chosen, each with its time
        self._size = 0
        self._due = 0  # lines still to be chosen after the last wanted one
        self._shown = False  # whether any line was chosen
        self._apart = False  # whether lines since then were dropped, and are not held

    def around(self, block: bytes, spans: Spans, now: float) -> Iterator[tuple[float, bytes]]:
        """Yield the chosen lines of the source's next block, in which those at ``spans`` are wanted."""
        offset = 0
        for start, end in spans:
            first = offset
            offset = self._follow(block, offset, start)
            if first < offset:
                yield now, block[first:offset]
            self._hold(block[offset:start], now)
            if self._apart and self._shown and self._separator:
                yield self._held[0][0] if self._held else now, self._separator
            yield from self._held
            self._held.clear()
            yield now, block[start:end]
            self._size, self._due, self._shown, self._apart, offset = 0, self._after, True, False, end
        first = offset
        offset = self._follow(block, offset, len(block))
        if first < offset:
            yield now, block[first:offset]
        self._hold(block[offset:], now)

    def _follow(self, block: bytes, offset: int, end: int) -> int:
        """Return the end of the lines that are still due after the last wanted one."""
        while self._due and offset < end:
            offset = block.index(b"\n", offset) + 1
            self._due -= 1
        return offset

    def _hold(self, lines: bytes, now: float) -> None:
        """Hold the last lines that are not chosen, as context of a later one."""
        start, count = len(lines), 0
        while start and count < self._most and len(lines) - start + count * _OVERHEAD < _MOST_HELD:
            start, count = lines.rfind(b"\n", 0, start - 1) + 1, count + 1
        self._apart |= start > 0
        for line in _lines(lines[start:]):
            self._held.append((now, line))
            self._size += len(line) + _OVERHEAD
        while len(self._held) > self._most or (self._size > _MOST_HELD and self._held):
            self._size -= len(self._held.popleft()[1]) + _OVERHEAD
            self._apart = True


def _lines(block: bytes) -> list[bytes]:
    return [line + b"\n" for line in block[:-1].split(b"\n")] if block else []
