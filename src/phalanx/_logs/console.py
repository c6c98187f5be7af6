"""What a person chooses about the console: which lines it shows, and how.

Owns the checks of these choices. `group_pump` carries them out.
"""

from __future__ import annotations

from operator import index

from phalanx._base.frozen import Value
from phalanx._base.text import seconds
from phalanx._logs.prefixes import checked_template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from phalanx._logs.search import Search

DRAIN = 10.0
"""Seconds that the end of a group waits, at most, for a console that reads slowly."""


class ConsoleSpecs(Value):
    r"""How the console shows what the workers write. The log files are the same whatever is chosen here.

    It applies to teed streams: a stream that is neither redirected nor teed is the launcher's own, and is not changed.

    Args:
        color: "always", "never" or "auto": not if ``NO_COLOR`` is set, else if ``FORCE_COLOR`` is, else on a terminal
            that is not dumb (``TERM``).
        timestamps: None, "iso" (local time with milliseconds and its offset from UTC, ISO 8601) or "elapsed" (seconds
            since the start). It is the time at which the line was seen, a fraction of a millisecond after it was
            written.
        template: What stands before each line, with ``${role_name}``, ``${rank}``, ``${local_rank}``, ``${hostname}``
            and ``${time}``; None for ``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``, or ``[rank] ``.
        ranks: The global ranks whose lines are shown; None for all. Of one that fails, the last are shown regardless.
        grep: A regular expression (RE2's), or several; only lines in which one of them is found are shown.
        exclude: The same; lines in which one of them is found are not shown, and are no context either.
        ignore_case: Whether ``grep`` and ``exclude`` take large letters for small ones.
        before: How many lines (>= 0) of the same stream are shown before each line that ``grep`` finds.
        after: How many lines (>= 0) of the same stream are shown after it.
        fold: Whether lines that are equal across ranks within 0.2 s are shown once, as ``[0-7] …``.
        format: "text", or "json": JSON Lines with ``time``, ``rank``, ``stream`` and ``text``, all on stdout.
        drain: Seconds (>= 0) that the end waits, at most, for a console that reads slowly.
        raw: Whether a terminal is sent lines as they are. Else, what it would obey but colours is shown as escapes
            (``\x1b``); JSON has escapes of its own. Pipes, files and other streams get lines as they are.

    Raises:
        ValueError, TypeError: A value that is none of these; the message names the field.
    """

    color: str
    timestamps: str | None
    template: str | None
    ranks: frozenset[int] | None
    grep: tuple[str, ...]
    exclude: tuple[str, ...]
    ignore_case: bool
    before: int
    after: int
    fold: bool
    format: str
    drain: float
    raw: bool

    def __init__(
        self,
        *,
        color: str = "auto",
        timestamps: str | None = None,
        template: str | None = None,
        ranks: Iterable[int] | None = None,
        grep: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        ignore_case: bool = False,
        before: int = 0,
        after: int = 0,
        fold: bool = False,
        format: str = "text",  # noqa: A002 - what it is called on the command line
        drain: float = DRAIN,
        raw: bool = False,
    ) -> None:
        choices = {
            "color": (color, ("auto", "always", "never")),
            "timestamps": (timestamps, (None, "iso", "elapsed")),
            "format": (format, ("text", "json")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                msg = f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}"
                raise ValueError(msg)
        if fold and format == "json":
            raise ValueError("fold, format: machines are given every line; 'json' cannot be folded")
        self._store(
            color=color,
            timestamps=timestamps,
            template=checked_template(template),
            ranks=None if ranks is None else _ranks(ranks),
            grep=_patterns("grep", grep),
            exclude=_patterns("exclude", exclude),
            ignore_case=ignore_case,
            before=_count("before", before),
            after=_count("after", after),
            fold=fold,
            format=format,
            drain=seconds("drain", drain),
            raw=raw,
        )
        self.search()  # raises ValueError for an invalid pattern
        if (before or after) and not self.grep:
            raise ValueError(f"{'before' if before else 'after'}: needs --grep (grep=)")
        if ignore_case and not self.grep and not self.exclude:
            raise ValueError("ignore_case: needs --grep or --exclude (grep=, exclude=)")

    def search(self) -> Search | None:
        """Make the `Search` that chooses the lines; None if all are shown. Raises ValueError: an invalid pattern."""
        if not self.grep and not self.exclude:
            return None
        from phalanx._logs.search import Search

        return Search(
            self.grep,
            self.exclude,
            ignore_case=self.ignore_case,
            before=self.before,
            after=self.after,
            separator=b"--\n" if self.format == "text" else b"",
        )


def _patterns(name: str, given: str | Iterable[Any] | None) -> tuple[str, ...]:
    single = isinstance(given, (str, bytes)) or not hasattr(given, "__iter__")
    patterns = () if given is None else (given,) if single else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            msg = f"{name}: expected a regular expression, or several, each a str, got {pattern!r}"
            raise TypeError(msg)
    return patterns


def _ranks(given: Any) -> frozenset[int]:
    ranks = tuple(given) if hasattr(given, "__iter__") and not isinstance(given, bytes) else (None,)
    if not all(_is_whole(rank) for rank in ranks):
        msg = f"ranks: expected the numbers of ranks, like [0, 2], got {given!r}"
        raise TypeError(msg)
    numbers = frozenset(index(rank) for rank in ranks)
    if min(numbers, default=0) < 0:
        msg = f"ranks: expected numbers that are 0 or more, got {given!r}"
        raise ValueError(msg)
    return numbers


def _count(name: str, value: Any) -> int:
    if not _is_whole(value) or value < 0:
        msg = f"{name}: expected a number of lines, 0 or more, got {value!r}"
        raise ValueError(msg)
    return index(value)


def _is_whole(value: Any) -> bool:
    """Whether this is a whole number: Python's, or another library's."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and not hasattr(value, "__len__")
