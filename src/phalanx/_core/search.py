r"""Which lines are wanted: searches in whole lines, with context. Pure: lines in, chosen lines out.

Patterns are RE2's: their time is linear in the text, whatever the pattern, and while they search other threads run. A
line is searched as it is read: without escape sequences (colours) and without the carriage return of its end. What is
no UTF-8 in it counts as U+FFFD. What is given out are the bytes as they came.
"""

from __future__ import annotations

import functools
from collections import deque
from itertools import accumulate

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Spans = list[tuple[int, int]]
    """Where runs of whole lines begin and end, in order."""

_SPECIAL = frozenset("\\^$.|?*+()[]{}\n")
_SPARSE = 1024  # bytes for each time that a word occurs, from which on it is faster not to look at each line
_MOST_HELD = 256 * 1024  # bytes of a lane that are held as context, like those of an unfinished line

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


class Only:
    """Lines that a function takes: it is given whole lines, and returns those that are wanted."""

    def __init__(self, select: Callable[[bytes], bytes]) -> None:
        self._select = select

    def wants(self, line: bytes) -> bool:
        """Whether a line (with its end) is wanted."""
        return bool(self._select(line))

    def choose(self, _lane: object, block: bytes, now: float) -> Iterable[tuple[float, bytes]]:
        """See `Search.choose`."""
        chosen = self._select(block)
        return ((now, chosen),) if chosen else ()


class Search:
    r"""Lines in which a pattern is found, and those around them.

    Args:
        grep: Patterns; a line is wanted in which one of them is found. None at all: every line is.
        exclude: Patterns; a line in which one of them is found is out, and no context either.
        ignore_case: Whether the patterns take large letters for small ones.
        before, after: Lines of context of each lane (>= 0). No more than 256 KiB are held of a lane.
        separator: What stands between lines of a lane that did not follow each other, where there is context.

    Raises:
        ValueError: A pattern is none; the message begins with ``grep:`` or ``exclude:``.

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
        self._grep = _Finder("grep", grep, ignore_case=ignore_case) if grep else None
        self._exclude = _Finder("exclude", exclude, ignore_case=ignore_case) if exclude else None
        self._before, self._after = before, after
        self._separator = separator
        self._contexts: dict[object, _Context] = {}

    def wants(self, line: bytes) -> bool:
        """Whether a line (with its end) is wanted by itself, whatever was before it."""
        kept = self._kept(line)
        return bool(kept and (self._grep is None or self._grep.spans(kept)))

    def choose(self, lane: object, block: bytes, now: float) -> Iterable[tuple[float, bytes]]:
        """Choose among the next whole lines of a lane, which came at a time.

        Returns what is to be shown, in order, each part with the time at which it came.
        """
        block = self._kept(block)
        if self._grep is None or not (self._before or self._after):
            chosen = block if self._grep is None else self._grep.lines(block)
            return ((now, chosen),) if chosen else ()
        context = self._contexts.get(lane)
        if context is None:
            context = self._contexts[lane] = _Context(self._before, self._after, self._separator)
        return context.around(block, self._grep.spans(block), now)

    def _kept(self, block: bytes) -> bytes:
        spans = self._exclude.spans(block) if self._exclude is not None else ()
        return _pieces(block, _between(spans, len(block))) if spans else block


class _Context:
    """What is known of a lane's lines between two blocks of it."""

    def __init__(self, before: int, after: int, separator: bytes) -> None:
        self._most, self._after, self._separator = before, after, separator
        self._held: deque[tuple[float, bytes]] = deque()  # the last lines that were not shown, each with its time
        self._size = 0
        self._due = 0  # lines that are still to be shown, after the last one that was wanted
        self._shown = False  # whether any line was
        self._apart = False  # whether lines have been left out since, and are not held

    def around(self, block: bytes, spans: Spans, now: float) -> Iterator[tuple[float, bytes]]:
        """What is to be shown of the lane's next lines, of which those in ``spans`` are wanted."""
        place = 0
        for start, end in spans:
            first = place
            place = self._follow(block, place, start)
            if first < place:
                yield now, block[first:place]
            self._hold(block[place:start], now)
            if self._apart and self._shown and self._separator:
                yield now, self._separator
            yield from self._held
            self._held.clear()
            yield now, block[start:end]
            self._size, self._due, self._shown, self._apart, place = 0, self._after, True, False, end
        first = place
        place = self._follow(block, place, len(block))
        if first < place:
            yield now, block[first:place]
        self._hold(block[place:], now)

    def _follow(self, block: bytes, place: int, end: int) -> int:
        """Where the lines end that are still to be shown after the last wanted one."""
        while self._due and place < end:
            place = block.index(b"\n", place) + 1
            self._due -= 1
        return place

    def _hold(self, lines: bytes, now: float) -> None:
        """Hold the last of what is not shown."""
        start, count = len(lines), 0
        while start and count < self._most and len(lines) - start < _MOST_HELD:
            start, count = lines.rfind(b"\n", 0, start - 1) + 1, count + 1
        self._apart |= start > 0
        for line in _lines(lines[start:]):
            self._held.append((now, line))
            self._size += len(line)
        while len(self._held) > self._most or (self._size > _MOST_HELD and self._held):
            self._size -= len(self._held.popleft()[1])
            self._apart = True


def _lines(block: bytes) -> list[bytes]:
    return [line + b"\n" for line in block[:-1].split(b"\n")] if block else []


def _pieces(block: bytes, spans: Iterable[tuple[int, int]]) -> bytes:
    return b"".join([block[start:end] for start, end in spans])


def _between(spans: Iterable[tuple[int, int]], size: int) -> Spans:
    """What the spans leave."""
    left, place = [], 0
    for start, end in spans:
        if place < start:
            left.append((place, start))
        place = end
    if place < size:
        left.append((place, size))
    return left


# --- patterns


class _Finder:
    """What finds the lines in which one of some patterns is. Raises ValueError."""

    def __init__(self, name: str, patterns: Sequence[str], *, ignore_case: bool) -> None:
        for pattern in patterns:
            _compiled(name, pattern, pattern)
        given = " | ".join(patterns)
        flags = "(?i)" if ignore_case else ""
        self._word = b""
        self._search: Callable[[bytes], Spans]
        if len(patterns) == 1 and not ignore_case and not set(patterns[0]) & _SPECIAL:
            self._word = patterns[0].encode()
            self._search = functools.partial(_with_word, self._word)
            return
        tame = [part for part in map(_within_a_line, patterns) if part is not None]
        if len(tame) == len(patterns):
            # Runs of lines: one call for each, and none where there is nothing.
            run = f"{flags}(?m:(?:^.*(?:{_any(tame)}).*\n)+)"
            finditer = _compiled(name, run, given).finditer
            self._search = lambda text: [match.span() for match in finditer(text)]
        else:
            search = _compiled(name, flags + _any(patterns), given).search
            self._search = functools.partial(_line_by_line, search)

    def lines(self, block: bytes) -> bytes:
        """Those of whole lines."""
        if not self._word:
            return _pieces(block, self.spans(block))
        text = _readable(block)
        if text is not block or text.count(self._word) * _SPARSE < len(text):
            return _pieces(block, self.spans(block))
        word = self._word.decode("latin-1")  # in text, to look for a word takes a third of the time
        chosen = [line for line in text[:-1].decode("latin-1").split("\n") if word in line]
        chosen.append("")
        return "\n".join(chosen).encode("latin-1")

    def spans(self, block: bytes) -> Spans:
        """Where they are."""
        text = _readable(block)
        found = self._search(text)
        return found if text is block or not found else _moved(found, text, block)


def _any(patterns: Sequence[str]) -> str:
    return "|".join([f"(?:{pattern})" for pattern in patterns])


def _compiled(name: str, pattern: str, given: str) -> re.Pattern[bytes]:
    import re2

    options = re2.Options()
    options.log_errors = False  # they are ours to tell
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
    """What a pattern may consist of for us to know that it matches no line feed, or how to keep it from that.

    The alternatives begin differently: there is nothing to try again.
    """
    import re

    kind = "alnum|alpha|digit|lower|punct|upper|word|xdigit"
    item = rf"[^\\\[\]\0-\037]|\\[^\w\s]|\\[dw]|\\pL|\[:(?:{kind}):\]"
    return re.compile(
        rf"[^\\\[(\0-\037]|\\[^\w\s]|\\[dwbBStrfv]|\\p\{{\w+\}}|\\p[LMNPSZ]|\((?!\?)|\(\?i?[:)]|\(\?P?<\w+>"
        rf"|\[(?!\^)(?:{item})(?:{item})*+\]|(?P<space>\\s)|(?P<but>\\[WD])|(?P<none>\[\^(?!-)(?:{item})(?:{item})*+\])"
    )


def _within_a_line(pattern: str) -> str | None:
    r"""The pattern for a text of many lines: it never matches a line feed. None where we do not know how to say that.

    >>> _within_a_line(r"a\s+[^b]")
    'a[\\t\\f\\r ]+[^\\nb]'
    """
    parts, place = [], 0
    while place < len(pattern):
        token = _tokens().match(pattern, place)
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
        place = token.end()
    return "".join(parts)


def _with_word(word: bytes, text: bytes) -> Spans:
    spans = []
    place = text.find(word)
    while place >= 0:
        start, end = text.rfind(b"\n", 0, place) + 1, text.index(b"\n", place) + 1
        spans.append((start, end))
        place = text.find(word, end) if end < len(text) else -1
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
    """What was found in the text that is read, as lines of the block that it is made of: line by line the same."""
    starts = [0, *accumulate(len(line) + 1 for line in block[:-1].split(b"\n"))]
    moved, place, number = [], 0, 0
    for start, end in found:
        number += text.count(b"\n", place, start)
        last = number + text.count(b"\n", start, end)
        moved.append((starts[number], starts[last]))
        place, number = end, last
    return moved


@functools.cache
def _unread() -> re.Pattern[bytes]:
    """Escape sequences, whole or not (ECMA-48: CSI; OSC and other strings; the rest), and returns at a line's end."""
    import re

    csi = rb"\[[0-?]*+[ -/]*+[@-~]?"
    string = rb"[\]PX^_][^\007\033\n]*+(?:\007|\033\\)?"
    return re.compile(rb"\033(?:" + csi + rb"|" + string + rb"|[ -/]++[0-~]?|[0-~]?)|(?<!\r)\r++(?=\n)")


def _readable(block: bytes) -> bytes:
    """What a person reads, as UTF-8, line by line; the block itself if that is it."""
    text = _unread().sub(b"", block) if b"\033" in block or b"\r" in block else block
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return text.decode("utf-8", "replace").encode()
    return text
