"""What the workers of a node have left at the end of a generation: written for all nodes, and made one report of.

A node writes `MOST_BYTES` at most, and of many nodes a share of `ALL_BYTES`, for each of them reads it all: long texts
lose their middles, those of the first failure last; of many failures the later ones are left out, and of outcomes.
Moments are of the machine that saw them, and are not compared with those of others: the first failure is that of the
node that was the first to say so, see `Stop`; but a worker that has lost a connection is not the cause where one of
another node has failed of something else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from phalanx._evidence.describe import cut_middle
from phalanx._outcomes.failure import ProcessFailure
from phalanx._outcomes.outcome import NOT_AVAILABLE, STATES, Outcome
from phalanx._outcomes.result import is_cut_off
from phalanx._rendezvous import records

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from phalanx._outcomes.result import RunProcsResult
    from phalanx._rendezvous.records import Stop
    from phalanx._store.store import Entry

MOST_BYTES = 128 << 10
"""Of the evidence of one node."""

ALL_BYTES = 8 << 20
"""Of the evidence of all, unless there are so many that `_LEAST_BYTES` of each are more."""

_LEAST_BYTES = 4 << 10
_MOST = 1 << 16
_MOST_NUMBER, _MOST_MOMENT = 2**31, 253402214400
_LONGEST = 32 << 10  # characters of a text, at first; halved until all fits
_SHORTEST = 64

_Text = Annotated[str, Meta(max_length=_LONGEST + 200)]
_Number = Annotated[int, Meta(ge=-_MOST_NUMBER, lt=_MOST_NUMBER)]
_State = Annotated[str, Meta(pattern=f"^({'|'.join(STATES)})$")]
_Rank = Annotated[int, Meta(ge=0, lt=2**31)]


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


class Ended(Struct, frozen=True):
    """An `Outcome`, likewise."""

    rank: _Rank
    local_rank: _Rank
    pid: _Number
    state: _State
    exitcode: _Number | None = None
    signal_sent: _Number | None = None
    notice: _Number | None = None


class Evidence(Struct, frozen=True):
    """What the workers of a node have left.

    Attributes:
        node, host: The node.
        log_dir: Where its logs are, on its machine.
        failures: In their order.
        outcomes: Of all workers.
        error: What went wrong with the node itself; "".
    """

    node: _Text
    host: _Text
    log_dir: _Text = ""
    failures: Annotated[tuple[Failed, ...], Meta(max_length=_MOST)] = ()
    outcomes: Annotated[tuple[Ended, ...], Meta(max_length=_MOST)] = ()
    error: _Text = ""


_decoder = msgspec.json.Decoder(Evidence)


def write(
    node: str, host: str, log_dir: str, result: RunProcsResult, first_rank: int, error: str = "", nodes: int = 1
) -> bytes:
    """Return the evidence of one of ``nodes``, cut to its share; its workers have the ranks from ``first_rank`` on."""
    failures = sorted(result.failures.values(), key=lambda failure: failure.first_key)
    ended = tuple(
        Ended(first_rank + rank, rank, one.pid, one.state, one.exitcode, one.signal_sent, one.notice)
        for rank, one in result.outcomes.items()
    )
    most = max(_LEAST_BYTES, min(MOST_BYTES, ALL_BYTES // nodes))
    longest, first = _LONGEST, most // 8
    while True:
        failed = tuple(
            _told(failure, first_rank, longest if index else max(longest, first))
            for index, failure in enumerate(failures[:_MOST])
        )
        told = Evidence(node, host, cut_middle(log_dir, _LONGEST), failed, ended, cut_middle(error, longest))
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


def _told(failure: ProcessFailure, first_rank: int, longest: int) -> Failed:
    def cut(text: str) -> str:
        return cut_middle(text, longest)

    def bound(number: int) -> int:
        return min(max(number, -_MOST_NUMBER), _MOST_NUMBER - 1)

    return Failed(
        first_rank + failure.local_rank, failure.local_rank, bound(failure.pid), bound(failure.exitcode),
        cut(failure.error_file), cut(failure.message), min(max(0, failure.timestamp), _MOST_MOMENT - 1),
        cut(failure.traceback), cut(failure.unreadable), cut(failure.detail), cut(failure.stderr_tail),
        cut(failure.stdout_file), cut(failure.stderr_file), is_cut_off(failure),
    )  # fmt: skip


class JobEvidence:
    """What the workers of all nodes have left.

    Args:
        entries: What the store holds of it.
        stop: Why the generation has ended.

    Attributes:
        failures: The failures by rank in the job; the first is the root cause.
        outcomes: What became of the workers, by rank in the job.
        log_dir: Where the logs of the node are that has the root cause; "".
        errors: What went wrong with nodes themselves, a line each.
        damaged: What could not be read, a line each.
    """

    def __init__(self, entries: Iterable[Entry], stop: Stop | None) -> None:
        self.damaged: list[str] = []
        found = [one for entry in sorted(entries, key=lambda entry: entry.modified) if (one := self._read(entry))]
        # By the store's revisions; the node first that was the first to tell.
        found.sort(key=lambda one: stop is None or one.node != stop.node)
        told = [(one, failed) for one in found for failed in one.failures]
        told.sort(key=lambda item: item[1].is_cut_off)
        self.failures: Mapping[int, ProcessFailure] = {
            failed.rank: _failure(one.host, failed, index) for index, (one, failed) in enumerate(told)
        }
        outcomes = {ended.rank: _outcome(ended) for one in found for ended in one.outcomes}
        self.outcomes: Mapping[int, Outcome] = dict(sorted(outcomes.items()))
        self.log_dir = next((one.log_dir for one, _ in told), "")
        self.errors = [f"host {one.host}: {one.error}" for one in found if one.error]

    def _read(self, entry: Entry) -> Evidence | None:
        try:
            return _decoder.decode(entry.value)
        except msgspec.MsgspecError as error:
            self.damaged.append(f"{entry.key}: {error}")
            return None


def _failure(host: str, failed: Failed, index: int) -> ProcessFailure:
    failure = ProcessFailure(failed.local_rank, failed.pid, failed.exitcode, NOT_AVAILABLE, rank=failed.rank, host=host)
    return failure.replace(
        error_file=failed.error_file,
        message=failed.message,
        timestamp=failed.timestamp,
        traceback=failed.traceback,
        unreadable=failed.unreadable,
        detail=failed.detail,
        stderr_tail=failed.stderr_tail,
        stdout_file=failed.stdout_file,
        stderr_file=failed.stderr_file,
        dated_ns=index,
    )


def _outcome(ended: Ended) -> Outcome:
    return Outcome(
        ended.local_rank, ended.pid, ended.state, ended.exitcode, ended.signal_sent, notice=ended.notice
    )  # fmt: skip
