"""Makes the prefix of a line: the rank, its colour, the time; or what the user's template makes of them."""

from __future__ import annotations

import os

from phalanx._base.text import format_ranks
from phalanx._base.tty import sanitise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

TEMPLATE_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # red is for errors
_SHARED = 1  # bold
_FIELDS = ("role_name", "rank", "local_rank", "host", "hostname", "time")


class Prefixes:
    """Makes the prefix of each rank's lines.

    Args:
        envs: The workers' environments, by local rank.
        given: The caller's own prefixes, by local rank. A rank that has none here gets the usual one.
        template: What stands before each line, with variables; None for `TEMPLATE_ENV`'s, or ``[rank] ``.
        timestamps: None, "iso" or "elapsed".
        start: What "elapsed" counts from (seconds since the epoch); None for now.
    """

    def __init__(
        self,
        envs: Mapping[int, Mapping[str, str]],
        given: Mapping[int, str] | None = None,
        *,
        template: str | None = None,
        timestamps: str | None = None,
        start: float | None = None,
    ) -> None:
        some = envs[min(envs)] if envs else {}
        many = int(some.get("GROUP_WORLD_SIZE") or 1) > 1
        self.host = os.uname().nodename if many else ""
        self._envs = envs
        self._given = given
        self._template = template_or_default(template)
        self._stamp = stamp(timestamps, start)
        self._width = max([len(envs[rank].get("RANK") or str(rank)) for rank in envs], default=1)

    def of(self, rank: int, *, colour: bool) -> bytes | Callable[[float], bytes]:
        """Return the prefix of a local rank; a function that returns it for a time, if it contains one."""
        return self._of([rank], self._number(rank), colour=colour)

    def shared(self, numbers: Iterable[int], *, colour: bool) -> bytes | Callable[[float], bytes]:
        """Return the prefix of a line that several ranks wrote, by their global ranks; or a function, as `of`."""
        among = set(numbers)
        return self._of([rank for rank in self._envs if int(self._number(rank)) in among],
                        format_ranks(among, ","), colour=colour)  # fmt: skip

    def _number(self, rank: int) -> str:
        return self._envs.get(rank, {}).get("RANK") or str(rank)

    def _of(self, ranks: list[int], shown: str, *, colour: bool) -> bytes | Callable[[float], bytes]:
        """Return the prefix of local ``ranks``, whose global ranks are ``shown`` as text."""
        if self._given is not None and all(rank in self._given for rank in ranks):
            return self._stamped(self._given_to(ranks, shown), "")
        if self._template is None:
            text = f"{self.host} {shown}" if self.host else shown
            label = f"[{text}]".rjust(len(text) - len(shown) + self._width + 2)
            return self._stamped(_painted(label, shown) if colour else label, " ")
        from string import Template

        roles = dict.fromkeys(self._envs.get(rank, {}).get("ROLE_NAME") or "default" for rank in ranks)
        values = {"role_name": ",".join(roles), "rank": shown, "local_rank": format_ranks(ranks, ",")}
        values["host"] = values["hostname"] = os.uname().nodename
        template = Template(self._template)
        if "time" not in template.get_identifiers():
            return self._stamped(template.safe_substitute(values), "")
        stamp_ = self._stamp or stamp("iso")
        assert stamp_ is not None
        return lambda now: _encoded(template.safe_substitute(values, time=stamp_(now)))

    def _given_to(self, ranks: list[int], shown: str) -> str:
        """Join the caller's prefixes: into one with all ranks, if they differ in the rank alone; else in a row."""
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

    def _stamped(self, text: str, gap: str) -> bytes | Callable[[float], bytes]:
        if self._stamp is None:
            return _encoded(text + gap)
        make, space = self._stamp, "" if not text or text.endswith(" ") else " "
        return lambda now: _encoded(f"{text}{space}{make(now)} ")


def stamp(kind: str | None, start: float | None = None) -> Callable[[float], str] | None:
    """Return a function that formats a time (seconds since the epoch), as "iso" or as "elapsed" since ``start``."""
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
        if last[0] != second:  # with the offset of that second: daylight saving may have begun or ended
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


def template_or_default(template: str | None) -> str | None:
    """Return ``template``, or if it is None that of the environment, or None. Raises ValueError."""
    return checked_template(os.environ.get(TEMPLATE_ENV) or None, TEMPLATE_ENV) if template is None else template


def checked_template(template: Any, name: str = "template") -> str | None:
    """Return a template whose variables are all known. Raises TypeError, ValueError, beginning with ``name``."""
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
