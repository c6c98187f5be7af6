"""What the agents of a job write into their store, as typed values, and how these are written and read.

Below the prefix of the job (keys, in the words of `phalanx._store.store`):

    job/leader              the id of the agent that decides                                lease OWN
    job/state               `Job`: the generation, who takes part in it, what came before   lease JOB
    job/stop/GENERATION     `Stop`: why a generation ends; the first to write it has said   lease JOB
    job/refused/NODE        `Refusal`: why a node is not taken                              lease JOB
    job/waiting             `Missing`: who is missing, while too few nodes have come        lease JOB
    job/look/QUESTION       `Question`: somebody asks all nodes something                   lease OWN
    looks/QUESTION/NODE     what a node answers, see `questions`                            lease OWN
    nodes/NODE              `Node`: an agent, and how far it is                             lease OWN
    nodes/NODE/done         `Node`: that its workers have succeeded, whatever becomes of it lease JOB
    evidence/GENERATION/NODE  what its workers have left, see `evidence`                    lease JOB
    kept/...                what the last job was that was to be kept: two of the above     none: KEPT

Each agent watches ``job/``; the leader alone watches ``nodes/``, too. So an agent takes part at a price that does not
depend on how many there are: an entry of its own, one write for each generation, and what it hears of ``job/``.

Anybody who reaches the store may have written it: what is read is checked for its types and bounds, and executed never.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from phalanx._base.clock import format_duration
from phalanx._base.text import name_ranks
from phalanx._rendezvous.settings import MOST_CODE, MOST_LINE, MOST_NODES, MOST_WORKERS
from phalanx._store.store import Entry

__all__ = ["Raw", "replace"]  # with all that is defined here; nobody else loads msgspec

VERSION = 1
"""Of the format. Agents of another one are refused."""

LEADER, STATE, STOP, REFUSED, QUESTION = "job/leader", "job/state", "job/stop/", "job/refused/", "job/look/"
WAITING = "job/waiting"
JOB, NODES, EVIDENCE, ANSWERS, KEPT = "job/", "nodes/", "evidence/", "looks/", "kept/"

MOST_ENDS = 100
"""Ends of generations that are kept."""
MOST_RESTARTS = 1 << 16
"""Restarts that are counted."""
LONGEST_DELAY = 1e9
"""Seconds."""
MOST_QUESTION = 4096
"""Characters of a question."""
MOST_SHARE = 128 << 10
"""Bytes of what one node writes that each other one may read: its evidence, its answer to a question; see `share`."""
ALL_SHARES = 8 << 20
"""Of what all nodes write, unless there are so many that `_LEAST_SHARE` of each are more."""
_LEAST_SHARE = 4 << 10

_Id = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[\w.-]+\Z")]
_Text = Annotated[str, Meta(max_length=MOST_LINE)]
_Count = Annotated[int, Meta(ge=0, lt=MOST_CODE)]
_Some = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Generation = Annotated[int, Meta(ge=-1, lt=2**31)]
_Code = Annotated[int, Meta(gt=-MOST_CODE, lt=MOST_CODE)]
_Seconds = Annotated[float, Meta(ge=0, lt=1e12)]
_Step = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Version = Annotated[int, Meta(ge=0, lt=1 << 31)]

NodeState = Literal["ready", "running", "done", "left"]
Kind = Literal["failure", "hang", "lost", "left", "grow", "signal"]


class Member(Struct, frozen=True):
    """A node as a generation has it: the id of its agent, its machine's name, how many workers it runs, their role."""

    id: _Id
    host: _Text
    nproc: _Some
    role: _Text


class Node(Struct, frozen=True):
    """An agent, and how far it is.

    Attributes:
        id, host, nproc, role: See `Member`.
        address: Where its machine is reached; "": see `entrance.Entrance`.
        port: A port of it that is free for rank 0 of the workers, in the next generation.
        order: Its rank among the nodes, if somebody has given it one; -1: nobody has.
        min_nodes, max_nodes: How many nodes it was told there are.
        state: "ready": it has no workers, and can take part. "running": its workers run. "done": they have succeeded.
            "left": the node goes, or has gone, and its workers with it; it is not lost.
        generation: The one whose workers run, or have ended here last; -1: none.
        outcome: How its workers ended: "failed", "stopped", "succeeded", "not started"; "": there were none.
        uptime: For how many seconds they ran.
        step: The highest step that they have reported; None: they have not.
        survivors: How many have outlived SIGKILL.
        error, rank, exitcode: The first failure among them, see `Stop`; "" and None: there was none.
        is_cut_off: Whether that failure is a lost connection: its cause is elsewhere as a rule.
        program: What its workers run: the name of the script, without its folder; "": nobody has said.
        args: A digest of the arguments that they get; "": nobody has said.
        policy: When a failure is followed by another generation, see `RestartPolicy.describe`; "": whoever leads knows.
        version: See `VERSION`.
    """

    id: _Id
    host: _Text
    address: _Text
    nproc: _Some
    role: _Text = "default"
    port: _Port = 0
    order: Annotated[int, Meta(ge=-1, lt=MOST_NODES)] = -1
    min_nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)] = 1
    max_nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)] = 1
    state: NodeState = "ready"
    generation: _Generation = -1
    outcome: Literal["", "failed", "stopped", "succeeded", "not started"] = ""
    uptime: _Seconds = 0.0
    step: _Step | None = None
    survivors: _Count = 0
    error: _Text = ""
    rank: _Count | None = None
    exitcode: _Code | None = None
    is_cut_off: bool = False
    program: _Text = ""
    args: _Text = ""
    policy: _Text = ""
    version: _Version = VERSION

    @property
    def machine(self) -> str:
        """What its machine is known by, whichever agent runs there: the host's name, and where it is reached.

        Containers may share a name. Where no address is told, ranks are given: that of the node is in its place; or it
        is the machine of the store.
        """
        return f"{self.host} {self.address or f'node {self.order}'}"

    @property
    def member(self) -> Member:
        """The node as a generation has it."""
        return Member(self.id, self.host, self.nproc, self.role)


class Stop(Struct, frozen=True):
    """Why a generation ends.

    Attributes:
        kind: "failure" of a worker; "hang": a timer has expired; "lost": a node is gone; "left": a node goes; "grow":
            nodes have come, or somebody asked for another one; "signal": somebody asked for the end of the job.
        node, host: The node that it is about, and its machine.
        error: What happened, in one line.
        rank, exitcode: Those of the worker that failed: in the job; negative for a signal. None: not known.
        signal: The number of the signal that somebody sent; 0: none.
    """

    generation: _Generation
    kind: Kind
    node: _Id
    host: _Text
    error: _Text = ""
    rank: _Count | None = None
    exitcode: _Code | None = None
    signal: Annotated[int, Meta(ge=0, le=64)] = 0


class End(Stop, frozen=True):
    """How a generation ended, and why.

    Attributes:
        failed: Whether it counts as a failure.
        uptime: For how many seconds it ran, where it ran longest.
        step: The highest step that was reported.
        survivors: How many workers have outlived SIGKILL.
    """

    failed: bool = False
    uptime: _Seconds = 0.0
    step: _Step | None = None
    survivors: _Count = 0


class Verdict(Struct, frozen=True):
    """How the job ended.

    Attributes:
        state: "succeeded"; "failed"; "stopped": somebody asked for it.
        why: Why no other generation follows, or what was missing; "": nothing is to be said.
        stop: What the last generation ended with; None: it has succeeded, or there was none.
    """

    state: Literal["succeeded", "failed", "stopped"]
    why: _Text = ""
    stop: Stop | None = None


class Job(Struct, frozen=True):
    """The job, as its leader has decided last.

    Attributes:
        generation: The one that runs, or is to come; from 0 on.
        phase: "forming": it is to come; "running"; "over": no other comes.
        members: Who takes part in it, by group rank; while it is forming, who took part in the last one.
        min_nodes, max_nodes: How many nodes take part.
        address, port: Where rank 0 of the workers listens.
        ends: How the generations before ended, the latest last: `MOST_ENDS` at most.
        restarts: Before how many seconds restarts were decided that count, as of the writing of this.
        delay: Seconds before the generation that is to come.
        blamed, times: The machine whose workers were the root cause last, see `Node.machine`, "": none; and
            how many times in a row.
        excluded: Machines that are left out for it.
        verdict: How it ended; None: it has not.
        programs: What workers of which role run, see `Node.program`: those of the first nodes.
        keep: Whether what it was is kept when it is over: this record, and the evidence of the generation that failed.
        policy: See `Node.policy`: that of the node that has made it.
        args: Which arguments workers of which role get, see `Node.args`: two of a role, if its machines differ.
        version: See `VERSION`.
    """

    generation: _Generation
    phase: Literal["forming", "running", "over"]
    min_nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)]
    max_nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)]
    members: Annotated[tuple[Member, ...], Meta(max_length=MOST_NODES)] = ()
    address: _Text = ""
    port: _Port = 0
    ends: Annotated[tuple[End, ...], Meta(max_length=MOST_ENDS)] = ()
    restarts: Annotated[tuple[_Seconds, ...], Meta(max_length=MOST_RESTARTS)] = ()
    delay: _Seconds = 0.0
    blamed: _Text = ""
    times: _Count = 0
    excluded: Annotated[tuple[_Text, ...], Meta(max_length=MOST_NODES)] = ()
    verdict: Verdict | None = None
    programs: Annotated[tuple[tuple[_Text, _Text], ...], Meta(max_length=MOST_NODES)] = ()
    keep: bool = False
    policy: _Text = ""
    args: Annotated[tuple[tuple[_Text, _Text], ...], Meta(max_length=2 * MOST_NODES)] = ()
    version: _Version = VERSION

    @property
    def is_kept(self) -> bool:
        """Whether it is over, and is to be kept: one that has never run is not."""
        return self.keep and self.phase == "over" and bool(self.members)

    @property
    def with_evidence(self) -> int:
        """The generation with whose failure the job has ended; -1: there is none."""
        stop = None if self.verdict is None else self.verdict.stop
        return -1 if stop is None or stop.kind == "signal" else stop.generation

    @property
    def ids(self) -> list[str]:
        """Who takes part, by group rank."""
        return [member.id for member in self.members]

    def rank_of(self, node: str) -> int:
        """Return the group rank of a node; -1: it does not take part."""
        return next((rank for rank, member in enumerate(self.members) if member.id == node), -1)


class Refusal(Struct, frozen=True):
    """Why a node is not taken."""

    why: _Text


class Missing(Struct, frozen=True):
    """Who has come to a generation that waits for nodes, as its leader knows.

    Attributes:
        words: See `candidates.call_roll`.
        rank: The first node rank that is missing, if they were given; -1: they were not.
        seconds: For how long it goes on waiting, at most, from now on.
        is_enough: Whether the generation begins then: those that have come are enough.

    >>> Missing(0, "1 of 2 nodes has come: 0 (h1); node 1 is missing", 1, 597.2).line
    'waiting at most 9m57s more: 1 of 2 nodes has come: 0 (h1); node 1 is missing'
    """

    generation: _Generation
    words: _Text
    rank: Annotated[int, Meta(ge=-1, lt=MOST_NODES)] = -1
    seconds: _Seconds = 0.0
    is_enough: bool = False

    @property
    def line(self) -> str:
        """What is printed of it."""
        return f"waiting at most {format_duration(self.seconds)} more: {self.words}"


class Question(Struct, frozen=True, omit_defaults=True):
    """What somebody asks all nodes of a generation. ``node``: whose agent asks; ``what``: see `questions`."""

    node: _Id
    generation: _Generation
    what: Annotated[str, Meta(max_length=MOST_QUESTION)] = "stacks"


class Told(Struct, frozen=True):
    """What the nodes of a job have answered to a question.

    Attributes:
        generation: The one that was asked.
        members: Its nodes, by group rank; none: nobody could be asked.
        answers: What they have answered, by their ids.
        why: Why nobody could be asked, or why those that are missing have not answered; "": all have.
    """

    generation: int = -1
    members: Annotated[tuple[Member, ...], Meta(max_length=MOST_NODES)] = ()
    answers: Any = {}
    why: _Text = ""


class DamagedError(ValueError):
    """What a key holds cannot be what an agent has written."""


class OtherVersionError(DamagedError):
    """A key holds what an agent of another version has written: see `VERSION`."""


class _Versioned(Struct, frozen=True):
    version: _Version = VERSION


Record = TypeVar("Record", Node, Job, Stop, Refusal, Missing, Question)
T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (Node, Job, Stop, Refusal, Missing, Question, _Versioned)
}
_objects = msgspec.json.Decoder(dict[str, Any])


def write(record: Struct) -> bytes:
    r"""Return a record as the value of a key. Lone surrogates (of file names that are no UTF-8) become "?".

    >>> write(Refusal("no such file: \udcff"))
    b'{"why":"no such file: ?"}'
    """
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        return _encoder.encode(_plain(msgspec.to_builtins(record)))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def read(kind: type[Record], entry: Entry) -> Record:
    """Return the record that a key holds. Raises DamagedError, which names the key and what is wrong.

    >>> from phalanx._store.store import Entry
    >>> read(Refusal, Entry("job/refused/a", b'{"why": "full"}', 1, 1))
    Refusal(why='full')
    >>> read(Refusal, Entry("job/refused/a", b'[]', 1, 1))
    Traceback (most recent call last):
    phalanx._rendezvous.records.DamagedError: job/refused/a: Expected `object`, got `array`
    """
    return decode(_decoders[kind], entry)  # type: ignore[no-any-return] # the decoder is that of the kind


def read_object(entry: Entry) -> dict[str, Any]:
    """Return a JSON object that a key holds. Raises DamagedError."""
    return decode(_objects, entry)


def decode(decoder: msgspec.json.Decoder[T], entry: Entry) -> T:
    """Return what a decoder finds in a key. Raises DamagedError, as `read`, whatever the key holds."""
    try:
        return decoder.decode(entry.value)
    except RecursionError:
        why = "arrays or objects within each other, too deep"
    except (msgspec.MsgspecError, UnicodeError) as error:
        why = str(error)
    raise DamagedError(f"{entry.key}: {why}")


def read_job(entry: Entry) -> Job:
    """Return the job that a key holds. Raises DamagedError; OtherVersionError, whatever else the key holds then."""
    if (version := version_of(entry)) != VERSION:
        raise OtherVersionError(
            f"{entry.key} is of version {version}, and this agent knows version {VERSION}: the agents of this job are"
            " of another release of Phalanx"
        )
    job = read(Job, entry)
    # The parts of a job fit together, as leaders write them.
    wrong = {
        "min_nodes": job.min_nodes > job.max_nodes,
        "generation": job.generation < 0,
        "members": len(set(job.ids)) < max(len(job.members), job.phase == "running"),
        "ends": job.generation > 0 and not job.ends,
        "verdict": (job.verdict is None) == (job.phase == "over"),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise DamagedError(f"{entry.key}: `$.{name}` does not fit the rest")
    return job


def version_of(entry: Entry) -> int:
    """Return the version that a key names, if nothing else of it can be read; `VERSION`, if it names none.

    >>> from phalanx._store.store import Entry
    >>> version_of(Entry("job/state", b'{"version": 7, "phase": ["new"]}', 1, 1)), version_of(Entry("x", b"?", 1, 1))
    (7, 1)
    """
    try:
        return int(decode(_decoders[_Versioned], entry).version)
    except DamagedError:
        return VERSION


def evidence_of(node: Node, *, before: int = 0) -> str:
    """Return the key of what the workers of a node have left, of its generation or one ``before``."""
    return f"{EVIDENCE}{node.generation - before}/{node.id}"


def success_of(node: str) -> str:
    """Return the key of what stays of a node whose workers have succeeded."""
    return f"{NODES}{node}/done"


def one_line(text: str) -> str:
    """Cut a line to what a record takes."""
    return text if len(text) <= MOST_LINE else f"{text[: MOST_LINE - 1]}…"


def share(nodes: int) -> int:
    """Return how many bytes one of ``nodes`` may write that all others read.

    >>> share(2), share(128), share(100_000)
    (131072, 65536, 4096)
    """
    return max(_LEAST_SHARE, min(MOST_SHARE, ALL_SHARES // max(1, nodes)))


_MOST = 1 << 20  # ranks: of more, nothing is told
_MOST_HOSTS = 4  # that a name has
_MOST_TEXT = 200  # characters of the numbers in a name


class JobRanks:
    """The ranks of a job.

    ``members``: the nodes, by group rank. ``size``: how many ranks there are; 0, if there are more than 1,048,576.

    >>> ranks = JobRanks([Member("x", "a", 2, "trainer"), Member("y", "b", 3, "trainer")])
    >>> ranks.size, ranks.of_node("y"), ranks.of_node("z")
    (5, range(2, 5), range(0, 0))
    >>> ranks.name([3]), ranks.name([2, 3, 4]), ranks.name([0, 3, 4])
    ('rank 3 on host b', 'ranks 2-4 on host b', 'ranks 0, 3-4 on hosts a, b')
    >>> JobRanks([Member("x", "a", 1000, "trainer")]).name(range(0, 1000, 2))[-30:]
    '0, 92, 94, 96, 98, … on host a'
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._hosts = [member.host for member in members]
        self._starts = list(itertools.accumulate((member.nproc for member in members), initial=0))
        self._places = {member.id: index for index, member in enumerate(members)}
        self.size = self._starts[-1] if self._starts[-1] <= _MOST else 0

    def of_node(self, node: str) -> range:
        """Return the ranks of a node; none, if it takes no part."""
        index = self._places.get(node)
        return range(0) if index is None or not self.size else range(self._starts[index], self._starts[index + 1])

    def name(self, ranks: Iterable[int]) -> str:
        """Return what ranks are called, with their hosts."""
        known = list(ranks)
        found = dict.fromkeys(self._hosts[bisect.bisect_right(self._starts, rank) - 1] for rank in known)
        hosts = list(found)
        more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
        text = name_ranks(known)
        if len(text) > _MOST_TEXT:
            text = f"{text[:_MOST_TEXT].rpartition(',')[0]}, …"
        return f"{text} on host{'s' * (len(hosts) > 1)} {', '.join(hosts[:_MOST_HOSTS])}{more}"


def neighbours(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the first and the last of each run of neighbours, of ranks in their order.

    >>> neighbours([0, 1, 2, 5])
    ((0, 2), (5, 5))
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return tuple((first, last) for first, last in runs)


def first_rank(job: Job, rank: int, role: str | None = None) -> int:
    """Return the rank in the job of a node's first worker; with a ``role``, its rank among the workers of that.

    >>> job = Job(0, "running", 2, 2, (Member("a", "a", 2, "reader"), Member("b", "b", 3, "trainer")))
    >>> first_rank(job, 1), first_rank(job, 1, "trainer"), first_rank(job, 2)
    (2, 0, 5)
    """
    return sum(member.nproc for member in job.members[:rank] if role is None or member.role == role)
