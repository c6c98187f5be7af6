"""Chooses lines by patterns, and the lines around them. Pure: lines in, chosen lines out, bytes unchanged."""

from __future__ import annotations

from collections import deque

from phalanx._logs.patterns import Finder, pieces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from phalanx._logs.patterns import Spans

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
            chosen = block if self._grep is None else self._grep.lines(block)
            return ((now, chosen),) if chosen else ()
        context = self._contexts.get(source)
        if context is None:
            context = self._contexts[source] = _Context(self._before, self._after, self._separator)
        return context.around(block, self._grep.spans(block), now)

    def _kept(self, block: bytes) -> bytes:
        spans = self._exclude.spans(block) if self._exclude is not None else ()
        return pieces(block, _between(spans, len(block))) if spans else block


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


def _between(spans: Iterable[tuple[int, int]], size: int) -> Spans:
    """Return the spans between the given ones."""
    left, offset = [], 0
    for start, end in spans:
        if offset < start:
            left.append((offset, start))
        offset = end
    if offset < size:
        left.append((offset, size))
    return left
