r"""Finds regular expressions in lines. Owns the engine, which patterns are refused, and which text of a line it gets.

Patterns are RE2's: their time is linear in the text, whatever the pattern, and they search without the GIL. Where it is
not installed (the extra ``re2``), `slow_patterns` searches. A line is searched as a person reads it: without
escape sequences (colours), and without a carriage return at its end. Bytes that are no UTF-8 count as U+FFFD.
"""

from __future__ import annotations

import functools
from itertools import accumulate

from phalanx._base.stderr import mention
from phalanx._logs import slow_patterns

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Sequence

    Spans = list[tuple[int, int]]
    """The beginnings and ends of runs of whole lines, in order."""

_SPECIAL = frozenset("\\^$.|?*+()[]{}\n")
_SPARSE = 1024  # bytes of text for each occurrence of a word, above which it is faster not to look at each line

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
        has_engine = _has_engine()
        for pattern in patterns:
            if has_engine:
                _compiled(name, pattern, pattern)
            else:
                slow_patterns.check(name, pattern)
        given = " | ".join(patterns)
        flags = "(?i)" if ignore_case else ""
        self._word = b""
        self._search: Callable[[bytes], Spans]
        if len(patterns) == 1 and not ignore_case and not set(patterns[0]) & _SPECIAL:
            self._word = patterns[0].encode()
            self._search = functools.partial(_with_word, self._word)
            return
        if not has_engine:
            self._search = slow_patterns.SlowPatterns(name, patterns, ignore_case=ignore_case, announce=mention).spans
            return
        tame = [part for part in map(_within_a_line, patterns) if part is not None]
        if len(tame) == len(patterns):
            # One match for each run of matching lines, and no call for the others.
            run = f"{flags}(?m:(?:^.*(?:{_any(tame)}).*\n)+)"
            finditer = _compiled(name, run, given).finditer
            self._search = lambda text: [match.span() for match in finditer(text)]
        else:
            search = _compiled(name, flags + _any(patterns), given).search
            self._search = functools.partial(_line_by_line, search)

    def lines(self, block: bytes) -> bytes:
        """Return those of whole lines that match."""
        if not self._word:
            return pieces(block, self.spans(block))
        text = readable(block)
        if text is not block or text.count(self._word) * _SPARSE < len(text):
            return pieces(block, self.spans(block))
        word = self._word.decode("latin-1")  # `in` takes a third of the time in str
        chosen = [line for line in text[:-1].decode("latin-1").split("\n") if word in line]
        chosen.append("")
        return "\n".join(chosen).encode("latin-1")

    def spans(self, block: bytes) -> Spans:
        """Return where the matching lines are."""
        text = readable(block)
        found = self._search(text)
        return found if text is block or not found else _moved(found, text, block)


def pieces(block: bytes, spans: Iterable[tuple[int, int]]) -> bytes:
    """Return the lines at these spans."""
    return b"".join([block[start:end] for start, end in spans])


def _any(patterns: Sequence[str]) -> str:
    return "|".join([f"(?:{pattern})" for pattern in patterns])


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
    options.never_capture = True
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


@functools.cache
def _tokens() -> re.Pattern[str]:
    """Return a pattern for the parts of patterns that match no line feed, or that we know how to keep from it.

    Its alternatives begin with different characters, so it does not backtrack.
    """
    import re

    kind = "alnum|alpha|digit|lower|punct|upper|word|xdigit"
    item = rf"[^\\\[\]\0-\037]|\\[^\w\s]|\\[dw]|\\pL|\[:(?:{kind}):\]"
    return re.compile(
        rf"[^\\\[(\0-\037]|\\[^\w\s]|\\[dwbBStrfv]|\\p\{{\w+\}}|\\p[LMNPSZ]|\((?!\?)|\(\?i?[:)]|\(\?P?<\w+>"
        rf"|\[(?!\^)(?:{item})(?:{item})*+\]|(?P<space>\\s)|(?P<but>\\[WD])|(?P<none>\[\^(?!-)(?:{item})(?:{item})*+\])"
    )


def _within_a_line(pattern: str) -> str | None:
    r"""Return the pattern so that it never matches a line feed, for a text of many lines. None if we cannot.

    >>> _within_a_line(r"a\s+[^b]")
    'a[\\t\\f\\r ]+[^\\nb]'
    """
    parts, offset = [], 0
    while offset < len(pattern):
        token = _tokens().match(pattern, offset)
        if token is None:
            return None
        text = token[0]
        if token["space"]:
            text = r"[\t\f\r ]"
        elif token["but"]:
            text = rf"[^\n\{text[1].lower()}]"
        elif token["none"]:
            text = rf"[^\n{text[2:]}"
        parts.append(text)
        offset = token.end()
    return "".join(parts)


def _with_word(word: bytes, text: bytes) -> Spans:
    spans = []
    offset = text.find(word)
    while offset >= 0:
        start, end = text.rfind(b"\n", 0, offset) + 1, text.index(b"\n", offset) + 1
        spans.append((start, end))
        offset = text.find(word, end) if end < len(text) else -1
    return spans


def _line_by_line(search: Callable[[bytes], object], text: bytes) -> Spans:
    spans, start = [], 0
    for line in text[:-1].split(b"\n"):
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


@functools.cache
def _unread() -> re.Pattern[bytes]:
    """Return a pattern for escape sequences, whole or not (ECMA-48), and for carriage returns at a line's end."""
    import re

    csi = rb"\[[0-?]*+[ -/]*+[@-~]?"
    string = rb"[\]PX^_][^\007\033\n]*+(?:\007|\033\\)?"
    return re.compile(rb"\033(?:" + csi + rb"|" + string + rb"|[ -/]++[0-~]?|[0-~]?)|(?<!\r)\r++(?=\n)")


def readable(block: bytes) -> bytes:
    """Return a block's text as a person reads it, as UTF-8, with the same lines; the block itself if it is that."""
    text = _unread().sub(b"", block) if b"\033" in block or b"\r" in block else block
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return text.decode("utf-8", "replace").encode()
    return text
