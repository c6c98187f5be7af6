"""Which lines are wanted, and those around them. Pure: lines in, chosen lines out, the bytes as they came."""

from __future__ import annotations

from collections import deque

from phalanx._logs.patterns import Finder, pieces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from phalanx._logs.patterns import Spans

_MOST_HELD = 256 * 1024  # bytes of a lane that are held as context, like those of an unfinished line;
_OVERHEAD = 64  # with so many for each line


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
        self._grep = Finder("grep", grep, ignore_case=ignore_case) if grep else None
        self._exclude = Finder("exclude", exclude, ignore_case=ignore_case) if exclude else None
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
        return pieces(block, _between(spans, len(block))) if spans else block


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
                yield self._held[0][0] if self._held else now, self._separator
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
    """What the spans leave."""
    left, place = [], 0
    for start, end in spans:
        if place < start:
            left.append((place, start))
        place = end
    if place < size:
        left.append((place, size))
    return left
