"""Writes what the workers of a node leave at the end of a generation, and makes one report of that of all nodes.

A node writes `records.share` bytes at most, for each of the others reads it all: long texts
lose their middles, those of the first failure last; then later failures go, and outcomes. Moments of different machines
are not compared: the first failure is that of the node whose `Stop` was written. But a worker that has lost a
connection is not the cause where one of another node has failed of something else; and of a hang, each node writes
where its ranks were: the rank that the others wait for is the root cause.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from phalanx._base.text import one_line
from phalanx._evidence.describe import cut_middle
from phalanx._evidence.error_file import is_of_timer
from phalanx._group.restart_policy import AttemptEnd
from phalanx._outcomes.failure import NOT_AVAILABLE, STATES, Outcome, ProcessFailure
from phalanx._outcomes.result import RunProcsResult, is_cut_off
from phalanx._rendezvous import records
from phalanx._rendezvous.records import Job, JobRanks, Kind, Member, Node, Stop, first_rank, neighbours
from phalanx._stacks import dump
from phalanx._stacks.dump import Location
from phalanx._store.store import Entry
from phalanx._timers.hang_reporter import HangReporter

_MOST = 1 << 16
_MOST_NUMBER, _MOST_MOMENT = 2**31, 253402214400
_LONGEST = 32 << 10  # characters of a text, at first; halved until all fits
_SHORTEST = 64
_MOST_PLACES = 256
_MOST_RUNS = 4096  # of neighbouring ranks at one place
_MOST_NAME = 200  # characters
_TEXTS = ("error_file", "message", "traceback", "unreadable", "stderr_tail", "stdout_file", "stderr_file")
"""Fields of a failure that are passed on, cut."""

_Text = Annotated[str, Meta(max_length=_LONGEST + 200)]
_Number = Annotated[int, Meta(ge=-_MOST_NUMBER, lt=_MOST_NUMBER)]
_State = Annotated[str, Meta(pattern=f"^({'|'.join(STATES)})$")]
_Rank = Annotated[int, Meta(ge=0, lt=2**31)]
_Name = Annotated[str, Meta(max_length=_MOST_NAME + 200)]


class Failed(Struct, frozen=True):
    """A `ProcessFailure`, as other nodes are told of it."""

    rank: _Rank
    local_rank: _Rank
    pid: _Number
    exitcode: _Number
    error_file: _Text
    message: _Text
    timestamp: Annotated[int, Meta(ge=0, lt=_MOST_MOMENT)]
    traceback: _Text = ""
    unreadable: _Text = ""
    detail: _Text = ""
    stderr_tail: _Text = ""
    stdout_file: _Text = ""
    stderr_file: _Text = ""
    is_cut_off: bool = False
    is_hang: bool = False


class Ended(Struct, frozen=True):
    """An `Outcome`, likewise."""

    rank: _Rank
    local_rank: _Rank
    pid: _Number
    state: _State
    exitcode: _Number | None = None
    signal_sent: _Number | None = None
    notice: _Number | None = None


class Place(Struct, frozen=True):
    """Where some ranks of a node were when a rank of the job was found to hang: a `dump.Location`.

    Attributes:
        kind: "in": at a frame, ``function``, ``file`` (its name alone) and ``line``; "ended"; "unknown".
        how: The state of a process that is stopped, or how it has ended, or why it has shown no stack; "".
        waits: Whether they wait for other ranks there, as far as one can tell.
        ranks: In the job: the first and the last of each run of neighbours.
    """

    kind: Literal["in", "ended", "unknown"]
    function: _Name = ""
    file: _Name = ""
    line: _Rank = 0
    how: _Name = ""
    waits: bool = False
    ranks: Annotated[tuple[tuple[_Rank, _Rank], ...], Meta(max_length=_MOST_RUNS)] = ()

    def location(self) -> Location:
        """Return it as `dump` has it."""
        if self.kind == "ended":
            return dump.Ended(self.how)
        if self.kind == "unknown":
            return self.how
        frame = dump.Frame(self.file, self.line, self.function)
        return dump.Halted(frame, self.how) if self.how else frame


class Evidence(Struct, frozen=True):
    """What the workers of a node have left.

    Attributes:
        node, host: The node.
        machine: See `records.Node.machine`.
        log_dir: Where its logs are, on its machine.
        failures: In their order.
        outcomes: Of all workers.
        error: What went wrong with the node itself; "".
        places: Where the workers were when a rank of the job was found to hang; of ranks that are in none, nothing is
            known.
    """

    node: _Text
    host: _Text
    log_dir: _Text = ""
    failures: Annotated[tuple[Failed, ...], Meta(max_length=_MOST)] = ()
    outcomes: Annotated[tuple[Ended, ...], Meta(max_length=_MOST)] = ()
    error: _Text = ""
    machine: _Text = ""
    places: Annotated[tuple[Place, ...], Meta(max_length=_MOST_PLACES)] = ()


_decoder = msgspec.json.Decoder(Evidence)


class Left(NamedTuple):
    """What the workers of a node have left, on its own machine.

    Attributes:
        result: What became of them, by local rank.
        log_dir: Where their logs are; "": nowhere.
        hangs: Knows where they were, if one was found to hang; None: nothing does.
    """

    result: RunProcsResult
    log_dir: str = ""
    hangs: HangReporter | None = None


def account(
    me: Node, job: Job, rank: int, end: AttemptEnd, uptime: float, port: int, left: Left
) -> tuple[Node, Stop | None, bytes]:
    """Return how the workers of a node have ended in a generation: its entry, why that is to end, and the evidence.

    ``me``: its entry before. ``rank``: its group rank in the ``job``, as the generation began. ``port``: one that is
    free for rank 0 in the next generation. Where ``end`` is no failure, there is no reason to end.
    """
    result, root = left.result, left.result.root_cause
    me = records.replace(
        me,
        outcome=end.state,
        uptime=uptime,
        step=end.step,
        survivors=sum(outcome.state == "abandoned" for outcome in result.outcomes.values()),
        port=port,
        error=records.one_line(end.error) if end.failed else "",
        rank=end.rank,
        exitcode=end.exitcode,
        is_cut_off=end.failed and root is not None and is_cut_off(root),
    )
    is_hang = root is not None and is_of_timer(root.error_file_data)
    stop = stop_of(me, job.generation, end.error, end.rank, end.exitcode, is_hang=is_hang) if end.failed else None
    error = end.error if end.failed and not result.failures else ""
    return me, stop, write(me, left, first_rank(job, rank), error, len(job.members))


def stop_of(
    me: Node, generation: int, error: str, rank: int | None, exitcode: int | None, *, is_hang: bool = False
) -> Stop:
    """Return that a generation ends because a worker of a node has failed; ``is_hang``: a timer has found that."""
    kind: Kind = "hang" if is_hang else "failure"
    return Stop(generation, kind, me.id, me.host, records.one_line(one_line(error)), rank, exitcode)


def write(me: Node, left: Left, first_rank: int, error: str = "", nodes: int = 1) -> bytes:
    """Return the evidence of one of ``nodes``, cut to its share; its workers have the ranks from ``first_rank`` on."""
    result, hangs = left.result, left.hangs
    most = records.share(nodes)
    summaries = {} if hangs is None else hangs.summaries
    places = () if hangs is None else _places(hangs.whereabouts, first_rank, most // 4)
    failures = sorted(result.failures.values(), key=lambda failure: failure.first_key)
    ended = tuple(
        Ended(first_rank + rank, rank, one.pid, one.state, one.exitcode, one.signal_sent, one.notice)
        for rank, one in result.outcomes.items()
    )
    longest, first = _LONGEST, most // 8
    while True:
        failed = tuple(
            _told(failure, first_rank, longest if index else max(longest, first), summaries.get(failure.local_rank, ""))
            for index, failure in enumerate(failures[:_MOST])
        )
        folder, what = cut_middle(left.log_dir, _LONGEST), cut_middle(error, longest)
        told = Evidence(me.id, me.host, folder, failed, ended, what, me.machine, places)
        data = records.write(told)
        if len(data) <= most:
            return data
        if longest > _SHORTEST:
            longest //= 2
        elif len(failures) > 1:
            failures = failures[: len(failures) // 2]
        elif ended:
            ended = ended[: len(ended) // 2]
        elif first > _SHORTEST:
            first //= 2
        else:
            return data


def _places(whereabouts: Mapping[int, tuple[Location, bool]], first_rank: int, most_bytes: int) -> tuple[Place, ...]:
    """Return where the ranks of a node are, cut to so many bytes: the place of most ranks, and those of few."""
    together: dict[tuple[Location, bool], list[int]] = {}
    for rank in sorted(whereabouts):
        together.setdefault(whereabouts[rank], []).append(first_rank + rank)
    found = [(where, neighbours(ranks)) for where, ranks in sorted(together.items(), key=lambda item: len(item[1]))]
    found = (found[-1:] + found[:-1])[:_MOST_PLACES]
    most = _MOST_RUNS
    while True:
        places = tuple(_place(*where, runs[:most]) for where, runs in found)
        if len(msgspec.json.encode(places)) <= most_bytes:
            return places
        if most > 1:
            most //= 2
        else:
            found = found[: len(found) // 2]


def _place(where: Location, waits: bool, ranks: tuple[tuple[int, int], ...]) -> Place:  # noqa: FBT001 - of `whereabouts`
    if isinstance(where, str):
        return Place("unknown", how=_name(where), ranks=ranks)
    if isinstance(where, dump.Ended):
        return Place("ended", how=_name(where.how), ranks=ranks)
    frame, how = (where.frame, where.state) if isinstance(where, dump.Halted) else (where, "")
    file = _name(os.path.basename(frame.path))
    return Place("in", _name(frame.function), file, frame.line, _name(how), waits, ranks)


def _name(text: str) -> str:
    return cut_middle(text, _MOST_NAME).encode("utf-8", "replace").decode()


def _told(failure: ProcessFailure, first_rank: int, longest: int, summary: str) -> Failed:
    """Return what other nodes are told. ``summary``: a line of its detail that is about this node's ranks alone."""
    texts = {name: cut_middle(getattr(failure, name), longest) for name in _TEXTS}
    detail = "\n".join(line for line in failure.detail.split("\n") if not summary or line != summary)
    pid, exitcode = (min(max(each, -_MOST_NUMBER), _MOST_NUMBER - 1) for each in (failure.pid, failure.exitcode))
    return Failed(
        first_rank + failure.local_rank, failure.local_rank, pid, exitcode, **texts,
        timestamp=min(max(0, failure.timestamp), _MOST_MOMENT - 1), detail=cut_middle(detail, longest),
        is_cut_off=is_cut_off(failure), is_hang=is_of_timer(failure.error_file_data),
    )  # fmt: skip


class JobEvidence:
    """What the workers of all nodes have left.

    Args:
        entries: What the store holds of it.
        stop: Why the generation has ended.
        members: The nodes that have taken part, by group rank.

    Attributes:
        failures: The failures by rank in the job; the first is the root cause.
        summary: Where all ranks of the job were when a rank was found to hang, in one line; "": none was.
        outcomes: What became of the workers, by rank in the job.
        log_dir: Where the logs of the node are that has the root cause; "".
        errors: What went wrong with nodes themselves, a line each.
        damaged: What could not be read, a line each.
        is_cut_off: Whether the first failure is a lost connection: no rank is known to have failed of anything else.
        lost: The host that is lost, and a line on that, where it is why the workers have failed; None: it is not.
        machine: That of the root cause, see `records.Node.machine`; "": none is known.
    """

    def __init__(self, entries: Iterable[Entry], stop: Stop | None, members: Sequence[Member] = ()) -> None:
        self.damaged: list[str] = []
        found = [one for entry in sorted(entries, key=lambda entry: entry.modified) if (one := self._read(entry))]
        names = {member.id for member in members}
        found = [one for one in found if not names or one.node in names]  # others are of an earlier job of this id
        # By the store's revisions; the node first that was the first to tell.
        found.sort(key=lambda one: stop is None or one.node != stop.node)
        told = [(one, failed) for one in found for failed in one.failures]
        ranks = JobRanks(members)
        if stop is not None and (missing := _missing(stop, found, ranks)) is not None:
            told.insert(0, missing)
        locations, waits = _locations(found, ranks)
        outliers = dump.outliers(locations, waits.__contains__)
        told.sort(key=lambda item: (item[1].is_cut_off, not (item[1].is_hang and item[1].rank in outliers)))
        self.summary = ""
        if ranks.size and (any(failed.is_hang for _, failed in told) or (stop is not None and stop.kind == "hang")):
            everywhere = dict.fromkeys(range(ranks.size), dump.NOTHING) | locations
            hung = told[0][1].rank if told and told[0][1].is_hang else None
            self.summary = dump.sum_up_locations(everywhere, hung, ranks.name)
        self.failures: Mapping[int, ProcessFailure] = {
            failed.rank: _failure(one.host, failed, index, self.summary) for index, (one, failed) in enumerate(told)
        }
        outcomes = {
            each.rank: Outcome(
                each.local_rank, each.pid, each.state, each.exitcode, each.signal_sent, notice=each.notice
            )
            for one in found
            for each in one.outcomes
        }
        self.outcomes: Mapping[int, Outcome] = dict(sorted(outcomes.items()))
        self.log_dir = next((one.log_dir for one, _ in told if one.log_dir), "")
        self.errors = [f"host {one.host}: {one.error}" for one in found if one.error]
        first = told[0] if told else None
        self.is_cut_off = first is not None and first[1].is_cut_off
        is_lost = stop is not None and stop.kind == "lost" and self.is_cut_off
        self.lost = (stop.host, stop.error) if stop is not None and is_lost else None
        if stop is None or self.is_cut_off:
            self.machine = ""  # of a lost connection, the cause is elsewhere as a rule
        elif first[1].is_hang if first is not None else stop.kind == "hang":
            # The machine that the others waited for: that of the rank which hung, or the only one.
            elsewhere = {rank for rank in outliers if not isinstance(locations[rank], str)}
            those = {first[1].rank} if first is not None and first[1].rank in elsewhere else elsewhere
            machines = {one.machine for one in found if not those.isdisjoint(ranks.of_node(one.node))}
            self.machine = machines.pop() if len(machines) == 1 else ""
        else:  # a node whose workers did not start has told of no failure of a worker
            self.machine = next((one.machine for one in found if one.node == (first[0] if first else stop).node), "")

    def _read(self, entry: Entry) -> Evidence | None:
        try:
            return records.decode(_decoder, entry)
        except records.DamagedError as error:
            self.damaged.append(str(error))
            return None


def _missing(stop: Stop, found: Iterable[Evidence], ranks: JobRanks) -> tuple[Evidence, Failed] | None:
    """Return the failure that a generation has ended with, where its node has said no more: its agent is gone."""
    own = ranks.of_node(stop.node)
    if stop.kind not in ("failure", "hang") or stop.exitcode is None or stop.rank is None or stop.rank not in own:
        return None
    if any(one.node == stop.node for one in found):
        return None
    detail = "its agent has ended before it could tell more"
    local_rank = stop.rank - own.start
    failed = Failed(stop.rank, local_rank, 0, stop.exitcode, NOT_AVAILABLE, stop.error, 0, detail=detail)
    return Evidence(stop.node, stop.host), failed


def _locations(found: Iterable[Evidence], ranks: JobRanks) -> tuple[dict[int, Location], set[int]]:
    """Return where the ranks of a job are, as far as their nodes have said; and those that wait for others."""
    locations: dict[int, Location] = {}
    waits: set[int] = set()
    for one in found:
        own = ranks.of_node(one.node)
        left = len(own)  # a rank that is told of twice counts twice: somebody else may have written that
        for place in one.places:
            where = place.location()
            for first, last in place.ranks:
                those = range(max(first, own.start), min(last + 1, own.stop, max(first, own.start) + left))
                left -= len(those)
                locations.update(dict.fromkeys(those, where))
                if place.waits:
                    waits.update(those)
    return locations, waits


def _failure(host: str, failed: Failed, index: int, summary: str) -> ProcessFailure:
    detail = failed.detail
    if failed.is_hang and summary:  # in the second line, as in the report on one machine
        first, *more = detail.split("\n")
        detail = "\n".join((first, summary, *more))
    failure = ProcessFailure(failed.local_rank, failed.pid, failed.exitcode, NOT_AVAILABLE, rank=failed.rank, host=host)
    texts = {name: getattr(failed, name) for name in _TEXTS}
    return failure.replace(**texts, timestamp=failed.timestamp, detail=detail, dated_ns=index)
