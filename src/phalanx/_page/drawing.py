"""The timeline of a run as shapes: what is where, in percent of its width and in pixels of its height.

A share of the width, and not a number of pixels, so that the drawing fits a phone and a wide screen alike, and its
text keeps its size. `page` writes the shapes as SVG.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx._base.clock import format_duration
from phalanx._base.text import how_many
from phalanx._page.facts import AttemptFacts, Facts, Worker
from phalanx._page.history import KINDS, Mark

MOST_ROWS = 512
MOST_BARS = 4000

_LANE = 34  # pixels above the ranks, for what concerns all of them
_AXIS = 22  # below them, for the times
_NARROWEST = 0.35  # percent of a bar, at the least
_CLOSE = 1.2  # percent, within which marks are drawn as one
_LABELS = 14  # pixels from one label to the next
_TICKS = 5
_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
_SEVERITY = ("failure", "lost", "hang", "slow", "notice", "restart", "stop", "end", "start", "run", "other", "exit")
_OF_RANKS = ("failure", "hang", "slow", "notice")  # marks that stand on the rows of their ranks, too
_MOST_ON_ROWS = 8


class Bar(NamedTuple):
    """A worker's time: its id in the page, its place, its state, and where a click on it goes."""

    id: str
    x: str
    width: str
    y: float
    height: float
    state: str
    target: str
    title: str


class Glyph(NamedTuple):
    """A mark: its id in the page, its place, its kind, and where a click on it goes."""

    id: str
    x: str
    y: float
    kind: str
    target: str
    title: str


class Band(NamedTuple):
    """An attempt: from where to where."""

    x: str
    width: str
    number: int
    is_labelled: bool


class Tick(NamedTuple):
    """A time on the axis: where, what it says, and how its text is aligned."""

    x: str
    text: str
    anchor: str


class Label(NamedTuple):
    """A rank beside its row."""

    y: float
    text: str


class Drawing(NamedTuple):
    """All of it, with the marks' kinds that occur."""

    height: int
    lane: int
    bars: list[Bar]
    glyphs: list[Glyph]
    bands: list[Band]
    ticks: list[Tick]
    labels: list[Label]
    kinds: list[tuple[str, str]]
    note: str


def draw(facts: Facts, known: set[str]) -> Drawing | None:
    """Draw a run; None: nothing of it has a time. ``known``: the ids of the page's rows, where clicks can go."""
    ranks = sorted({worker.rank for attempt in facts.attempts for worker in attempt.workers})
    if not ranks and not facts.history.marks:
        return None
    begin = min([facts.began, *(mark.time for mark in facts.history.marks)])
    scale = _Scale(begin, max(facts.ended, *(mark.time for mark in facts.history.marks), begin))
    notes = []
    if len(ranks) > MOST_ROWS:
        bad = {worker.rank for attempt in facts.attempts for worker in attempt.workers if worker.state == "failed"}
        notes.append(f"It has {MOST_ROWS} of {len(ranks)} ranks, those that failed among them.")
        ranks = sorted(
            [*(rank for rank in ranks if rank in bad), *(rank for rank in ranks if rank not in bad)][:MOST_ROWS]
        )
    pitch = next(
        pitch for most, pitch in ((16, 20), (40, 14), (80, 9), (160, 6), (300, 3), (MOST_ROWS, 2)) if len(ranks) <= most
    )
    rows = {rank: _LANE + index * pitch for index, rank in enumerate(ranks)}
    bars: list[Bar] = []
    for attempt in reversed(facts.attempts):
        own = [
            _bar(worker, attempt, scale, rows[worker.rank], pitch, known)
            for worker in attempt.workers
            if worker.rank in rows
        ]
        if len(bars) + len(own) > MOST_BARS:
            notes.append(f"The ranks of the attempts before attempt {attempt.number + 1} are not drawn.")
            break
        bars = own + bars  # in a live page, those of a new attempt follow what is there
    glyphs = [*_lane(facts.history.marks, scale), *_on_rows(facts.history.marks, scale, rows, pitch)]
    every = -(-_LABELS // pitch)
    labels = [Label(rows[rank] + pitch / 2, str(rank)) for index, rank in enumerate(ranks) if index % every == 0]
    present = {mark.kind for mark in facts.history.marks}
    return Drawing(
        height=_LANE + max(1, len(ranks)) * pitch + _AXIS,
        lane=_LANE,
        bars=bars,
        glyphs=glyphs,
        bands=[*_bands(facts.attempts, scale)],
        ticks=[*_ticks(scale)],
        labels=labels,
        kinds=[(kind, name) for kind, name in KINDS.items() if kind in present and kind not in ("other", "exit")],
        note=" ".join(notes),
    )


class _Scale:
    """Where a moment is, in percent."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin = begin
        self.span = max(end - begin, 0.001)

    def at(self, moment: float) -> float:
        return min(100.0, max(0.0, (moment - self.begin) / self.span * 100))


def _percent(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".") + "%"


def _bar(worker: Worker, attempt: AttemptFacts, scale: _Scale, y: float, pitch: float, known: set[str]) -> Bar:
    end = attempt.ended if worker.ended is None else worker.ended
    start = scale.at(attempt.started if worker.started is None else worker.started)
    width = max(_NARROWEST, scale.at(end) - start)
    gap = 4 if pitch >= 14 else 2 if pitch > 5 else 1 if pitch > 3 else 0.5  # noqa: PLR2004 - these are pixels
    own = f"w{attempt.number}-{worker.rank}"
    how = f", {worker.how}" if worker.how else ""
    return Bar(
        f"b{own[1:]}",
        _percent(min(start, 100 - _NARROWEST)),
        _percent(width),
        y,
        pitch - gap,
        worker.state,
        own if own in known else f"a{attempt.number}",
        f"rank {worker.rank}, attempt {attempt.number}: {worker.state}{how}",
    )


def _lane(marks: Sequence[Mark], scale: _Scale) -> Iterator[Glyph]:
    """Yield the marks above the ranks: of several that are close to each other, one, the worst."""
    cluster: list[tuple[int, Mark]] = []
    for index, mark in [*enumerate(marks), (-1, None)]:
        if mark is not None and mark.kind in ("exit", "other"):
            continue
        if cluster and (mark is None or scale.at(mark.time) - scale.at(cluster[0][1].time) > _CLOSE):
            first, worst = min(cluster, key=lambda one: _SEVERITY.index(one[1].kind))
            more = f" (and {how_many(len(cluster) - 1, 'more moment')})" if len(cluster) > 1 else ""
            after = format_duration(worst.time - scale.begin)
            at, text = _percent(scale.at(worst.time)), f"{after}: {worst.text}{more}"
            yield Glyph(f"g{first}", at, _LANE / 2 + 4, worst.kind, f"e{first}", text)
            cluster = []
        if mark is not None:
            cluster.append((index, mark))


def _on_rows(marks: Sequence[Mark], scale: _Scale, rows: dict[int, int], pitch: int) -> Iterator[Glyph]:
    if pitch < 9:  # noqa: PLR2004 - a glyph has so many pixels
        return
    for index, mark in enumerate(marks):
        if mark.kind in _OF_RANKS and len(mark.ranks) <= _MOST_ON_ROWS:
            for rank in mark.ranks:
                if rank in rows:
                    title = f"rank {rank}: {mark.text.partition(': ')[2]}"
                    own, at = f"g{index}-{rank}", _percent(scale.at(mark.time))
                    yield Glyph(own, at, rows[rank] + pitch / 2, mark.kind, f"e{index}", title)


def _bands(attempts: Sequence[AttemptFacts], scale: _Scale) -> Iterator[Band]:
    last = -100.0
    for attempt in attempts:
        start = scale.at(attempt.started)
        is_labelled = len(attempts) > 1 and start - last > 8 and start < 92  # noqa: PLR2004 - percent that a label takes
        last = start if is_labelled else last
        yield Band(_percent(start), _percent(max(0.0, scale.at(attempt.ended) - start)), attempt.number, is_labelled)


def _ticks(scale: _Scale) -> Iterator[Tick]:
    step = next((step for step in _STEPS if scale.span / step <= _TICKS), 86400 * -(-scale.span // (86400 * _TICKS)))
    number = 0
    while number * step <= scale.span:
        moment = number * step
        at = moment / scale.span * 100
        text = "0" if not number else format_duration(moment) if step >= 1 else f"{moment:.1f}s"
        yield Tick(_percent(at), text, "start" if not number else "end" if at > 94 else "middle")  # noqa: PLR2004 - percent, near the end
        number += 1
