"""The stacks of all ranks of a job, as its nodes answer with them to `questions.STACKS`. Pure.

Equal stacks are written once. An agent writes `records.share` bytes at most, for one of them reads it all. Longer
ones are cut, and the answer says so: threads other than the main one are left out first, then all frames but the
innermost, then all but the one that says where a rank is. If that is still too much, ranks are left out: last those of
the place where most are, and those that are alone at theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from phalanx._evidence.describe import cut_middle
from phalanx._rendezvous import records
from phalanx._rendezvous.life import Found
from phalanx._rendezvous.records import MOST_SHARE, DamagedError, JobRanks, neighbours, share
from phalanx._rendezvous.settings import MOST_LINE, MOST_NODES
from phalanx._stacks import dump

MOST_BYTES = 64 << 20
"""Of what an agent tells a person."""

NONE_SHOWN = "its agent is a program that shows no stacks"

_MOST_RUNS = 4096  # of neighbouring ranks with the same stacks
_INNERMOST = 12  # frames
_MOST_PATH = 200  # characters, where one frame is told

CUTS = (
    "",
    "threads other than the main one are left out",
    f"threads other than the main one are left out, and all but the {_INNERMOST} innermost frames",
    "one frame of each rank is shown",
)
"""What is missing, in words."""

_Rank = Annotated[int, Meta(ge=0, lt=2**31)]
_Ranks = Annotated[tuple[tuple[_Rank, _Rank], ...], Meta(max_length=_MOST_RUNS)]
_Line = Annotated[str, Meta(max_length=MOST_LINE)]


class Stacks(Struct, frozen=True):
    """The stacks of some ranks of the job.

    Attributes:
        ranks: The first and the last of each run of neighbours.
        text: As `_stacks.collect` returns it.
    """

    ranks: _Ranks
    text: Annotated[str, Meta(max_length=MOST_SHARE)]


class Answer(Struct, frozen=True):
    """Where the ranks of a node are.

    Attributes:
        stacks: Those of ranks that are in none have been left out.
        why: Why there are none; "": there are.
        cut: What is missing of each: an index of `CUTS`.
    """

    stacks: Annotated[tuple[Stacks, ...], Meta(max_length=_MOST_RUNS)] = ()
    why: _Line = ""
    cut: Literal[0, 1, 2, 3] = 0


class Told(records.Told, frozen=True):
    """Where the ranks of a job are."""

    answers: Annotated[dict[str, Answer], Meta(max_length=MOST_NODES)] = msgspec.field(default_factory=dict)


_answer, _told = msgspec.json.Decoder(Answer), msgspec.json.Decoder(Told)


def write(texts: Mapping[int, str], first_rank: int, nodes: int = 1, why: str = "") -> bytes:
    """Return what one of ``nodes`` answers: the texts of its workers by local rank, which have ranks from the first on.

    ``why``: why there are none.
    """
    most = share(nodes)
    together: list[tuple[list[int], str]] = []
    data = b""
    for cut in range(len(CUTS)):
        known = {text: _cut(text, cut) for text in set(texts.values())}
        together = dump.group_equal({first_rank + rank: known[text] for rank, text in texts.items()}, dump.alike)
        data = _write(together, why, cut)
        if len(data) <= most:
            return data
    together.sort(key=lambda group: len(group[0]))
    together = together[-1:] + together[:-1]
    while len(data) > most and together:
        together = together[: len(together) // 2]
        data = _write(together, why, len(CUTS) - 1)
    return data


def read(data: bytes) -> Answer:
    """Return what a node has answered; if that cannot be read, an answer that says so: anybody may have written it.

    >>> read(write({0: "# no Python stack: it has exited"}, 4)).stacks[0].ranks, read(b"[]").why
    (((4, 4),), 'what its agent has answered cannot be read: Expected `object`, got `array`')
    """
    try:
        return _answer.decode(data)
    except msgspec.MsgspecError as error:
        return Answer(why=records.one_line(f"what its agent has answered cannot be read: {error}"))


def tell(found: Found) -> bytes:
    """Return what a person is told of what was found."""
    job = found.job
    if job is None:
        return records.write(Told(why=found.why))
    answers = {node: read(data) for node, data in found.answers.items()}
    return records.write(Told(generation=job.generation, members=job.members, answers=answers, why=found.why))


class JobStacks:
    """Where the ranks of a job are.

    Args:
        data: What `tell` has returned.

    Attributes:
        why: Why nothing is known, as no agent has answered; "": see the others.
        ranks: The ranks of the job.
        texts: By rank, its stacks; or why it has shown none, as `_stacks.collect` says that.
        notes: What is missing, a line each.

    Raises DamagedError.
    """

    def __init__(self, data: bytes) -> None:
        try:
            told = _told.decode(data)
        except msgspec.MsgspecError as error:
            raise DamagedError(str(error)) from None
        self.ranks = JobRanks(told.members)
        known = bool(told.members and told.answers)
        self.why = told.why if not known else "" if self.ranks.size else "the job has too many ranks"
        self.texts: dict[int, str] = {}
        self.notes: list[str] = []
        for member in told.members if self.ranks.size else ():
            answer = told.answers.get(member.id)
            own = self.ranks.of_node(member.id)
            missing = told.why if answer is None else answer.why or "it is left out: those of its host are too long"
            self.texts.update(dict.fromkeys(own, f"{dump.NO_STACK}{missing}\n"))
            for one in () if answer is None else answer.stacks:
                for first, last in one.ranks:
                    self.texts.update(dict.fromkeys(range(max(first, own.start), min(last + 1, own.stop)), one.text))
            if answer is not None and answer.cut:
                self.notes.append(f"host {member.host}: {CUTS[answer.cut]}, for all of it is too long")


def _write(together: Iterable[tuple[list[int], str]], why: str, cut: int) -> bytes:
    stacks = tuple(Stacks(neighbours(ranks)[:_MOST_RUNS], text) for ranks, text in together)
    return records.write(Answer(stacks[:_MOST_RUNS], why, cut))  # type: ignore[arg-type] # it is one of the four


def _cut(text: str, cut: int) -> str:
    """Return a text without what is left out at that cut."""
    threads = dump.parse(text)
    if not threads:
        return cut_middle(text, MOST_SHARE // (2, 8, 64, 256)[cut])
    if not cut:
        return cut_middle(text, MOST_SHARE // 2)
    first, main = text.partition("\n")[0], threads[-1]
    frames = list(dump.program_frames(main.frames))
    top = dump.top([main])
    if cut > 1:
        frames = frames[:_INNERMOST] + [frame for frame in frames[_INNERMOST:] if frame is top]
    lines = [cut_middle(first, MOST_LINE)] if first.startswith("# ") else []
    lines.append(f"Thread {main.ident:#x} (most recent call first):")
    if cut == len(CUTS) - 1 and top is not None:
        path = top.path if len(top.path) <= _MOST_PATH else os.path.basename(top.path)[-_MOST_PATH:]
        frames = [dump.Frame(path, top.line, cut_middle(top.function, _MOST_PATH))]
    lines += [f'  File "{frame.path}", line {frame.line or "???"} in {frame.function}' for frame in frames]
    return "\n".join([*lines, ""])
