"""What stands before the lines of a rank: its number, its colour, the time, or what a template makes of them."""

from __future__ import annotations

import os

from phalanx._base.control_chars import sanitise
from phalanx._base.rank_ranges import format_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from phalanx._logs.console import ConsoleSpecs

TEMPLATE_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # red is for errors
_SHARED = 1  # bold
_FIELDS = ("role_name", "rank", "local_rank", "host", "time")


class Prefixes:
    """What stands before the lines of each rank.

    Args:
        envs: The workers' environments, by local rank.
        given: What the caller gave, by local rank; those that it lacks have what they would have without.
        console: The template, and the kind of times.
        start: What "elapsed" counts from (seconds since the epoch); None for now.
    """

    def __init__(
        self,
        envs: Mapping[int, Mapping[str, str]],
        given: Mapping[int, str] | None,
        console: ConsoleSpecs,
        *,
        start: float | None = None,
    ) -> None:
        some = envs[min(envs)] if envs else {}
        many = int(some.get("GROUP_WORLD_SIZE") or 1) > 1
        self.host = os.uname().nodename if many else ""
        self._envs = envs
        self._given = given
        self._template = template_of(console)
        self._stamp = stamp(console.timestamps, start)
        self._width = max([len(envs[rank].get("RANK") or str(rank)) for rank in envs], default=1)

    def of(self, rank: int, *, colour: bool) -> bytes | Callable[[float], bytes]:
        """The prefix of a local rank, or what gives it for a time."""
        return self._of([rank], self._number(rank), colour=colour)

    def shared(self, numbers: Iterable[int], *, colour: bool) -> bytes | Callable[[float], bytes]:
        """The prefix of a line of several ranks, by their global ones."""
        among = set(numbers)
        return self._of([rank for rank in self._envs if int(self._number(rank)) in among],
                        format_ranks(among, ","), colour=colour)  # fmt: skip

    def _number(self, rank: int) -> str:
        return self._envs.get(rank, {}).get("RANK") or str(rank)

    def _of(self, ranks: list[int], shown: str, *, colour: bool) -> bytes | Callable[[float], bytes]:
        """The prefix of local ``ranks``, whose global ones are ``shown`` as a text."""
        if self._given is not None and all(rank in self._given for rank in ranks):
            return self._stamped(self._given_to(ranks, shown), "")
        if self._template is None:
            label = self._label(shown)
            return self._stamped(_painted(label, shown) if colour else label, " ")
        from string import Template

        roles = dict.fromkeys(self._envs.get(rank, {}).get("ROLE_NAME") or "default" for rank in ranks)
        values = {"role_name": ",".join(roles), "rank": shown, "local_rank": format_ranks(ranks, ",")}
        values["host"] = os.uname().nodename
        text = Template(self._template)
        if "time" not in text.get_identifiers():
            return self._stamped(text.safe_substitute(values), "")
        stamp_ = self._stamp or stamp("iso")
        assert stamp_ is not None
        return lambda now: _encoded(text.safe_substitute(values, time=stamp_(now)))

    def _given_to(self, ranks: list[int], shown: str) -> str:
        """What the caller gave them: with all their numbers, if it differs by those alone, or one after the other."""
        assert self._given is not None
        texts = list(dict.fromkeys(self._given[rank] for rank in ranks))
        if len(texts) == 1:
            return texts[0]
        import re

        for all_, each in ((shown, self._number), (format_ranks(ranks, ","), str)):
            parts = {tuple(re.split(rf"(?<!\d){each(rank)}(?!\d)", self._given[rank])) for rank in ranks}
            if len(parts) == 1:
                return all_.join(parts.pop())
        return "".join(texts)

    def _label(self, rank: str) -> str:
        text = f"{self.host} {rank}" if self.host else rank
        return f"[{text}]".rjust(len(text) - len(rank) + self._width + 2)

    def _stamped(self, text: str, gap: str) -> bytes | Callable[[float], bytes]:
        if self._stamp is None:
            return _encoded(text + gap)
        make, space = self._stamp, "" if not text or text.endswith(" ") else " "
        return lambda now: _encoded(f"{text}{space}{make(now)} ")


def stamp(kind: str | None, start: float | None = None) -> Callable[[float], str] | None:
    """What writes a time (seconds since the epoch): as "iso", or as "elapsed" since ``start`` (None: now)."""
    if kind is None:
        return None
    import time

    if kind == "elapsed":
        begin = time.time() if start is None else start
        return lambda now: f"{max(0.0, now - begin):.3f}"
    last = (-1, "", "")

    def iso(now: float) -> str:
        nonlocal last
        second = int(now)
        if last[0] != second:  # with its own offset: the clocks may have been put forward or back
            local = time.localtime(second)
            minutes = local.tm_gmtoff // 60
            offset = f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
            last = (second, time.strftime("%Y-%m-%dT%H:%M:%S", local), offset)
        return f"{last[1]}.{int((now - second) * 1000):03d}{last[2]}"

    return iso


def _painted(text: str, ranks: str) -> str:
    look = _COLOURS[int(ranks) % len(_COLOURS)] if ranks.isdecimal() else _SHARED
    return f"\033[{look}m{text}\033[0m"


def _encoded(text: str) -> bytes:
    return sanitise(text).encode("utf-8", "surrogateescape")


def template_of(console: ConsoleSpecs) -> str | None:
    """The template that is given, or that of the environment. Raises ValueError."""
    return template_of_environment() if console.template is None else console.template


def template_of_environment() -> str | None:
    """The template that the environment gives. Raises ValueError."""
    return checked(os.environ.get(TEMPLATE_ENV) or None, TEMPLATE_ENV)


def checked(template: Any, name: str = "template") -> str | None:
    """A template in which all can be filled in. Raises ValueError, which begins with ``name``."""
    if template is None:
        return None
    if not isinstance(template, str):
        msg = f"{name}: expected a str, got {template!r}"
        raise TypeError(msg)
    from string import Template

    text = Template(template)
    if not text.is_valid():
        msg = f"{name}: {template!r} has a $ that begins no variable like ${{rank}}; $$ stands for the character itself"
        raise ValueError(msg)
    unknown = [field for field in text.get_identifiers() if field not in _FIELDS]
    if unknown:
        known = ", ".join(f"${{{field}}}" for field in _FIELDS)
        msg = f"{name}: there is no ${{{unknown[0]}}}; known are {known}"
        raise ValueError(msg)
    return template
