"""The guarantees, and whether one run has kept them. This module starts nothing and signals nobody.

1. No survivor. When the launcher reports the end, nobody is left whom a worker has started; and whatever has happened,
   within a second of the kill deadline nobody is left at all.
2. The root cause is the rank that failed first, and no rank that was stopped is called a failure.
3. Every byte that a worker has written into a log file, or into the pipe of one, is there, and nothing else.
4. There is a result, or an error that says something. A rank that succeeded has its value, and no other has one.
5. Nothing hangs.
6. Nothing is left in the launcher: no descriptor, thread, child, signal handler.

A fault may excuse that a guarantee is broken: a disk that is full takes no bytes. Each excuse stands where it is
checked, and is one that the documentation states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.injector import worker
from tests.injector.plan import HANG, HELPERS, Fault, Plan, sort

NS = 1_000_000_000
SECOND = 1.0
"""Seconds after the kill deadline in which all have to be gone."""
MARGIN = 4.0
"""Seconds that are added to this, because the machine may be slow and busy."""
EXHAUSTED = 15.0
"""Seconds that are added where something has run out: `KILL_WAIT`, and the time for a look at all of /proc."""
CONSOLE = 6.0
"""Seconds that a launcher may take, beyond the drain, to give up a console that nobody reads."""
SLACK = 0.3
"""Two events that are fewer seconds apart may be seen in either order."""
ANSWER_WAIT = 1.9
"""A launcher may take a helper for lost that is stopped for more seconds than this."""
STARTING = 60.0
"""Something that ends the group has to happen within so many seconds from the start of a run."""
IN_HAND = (256 + 64) << 10
"""A log writer that is killed loses no more bytes of one file: what it has read, and what is in the pipe."""
EVIDENCE = 1.0
"""A step of a timer waits for its evidence for no more seconds."""
HANGING = 0.3 + 2 * EVIDENCE
"""Seconds that may pass between the end of a timer and the end of its worker."""


@dataclass(slots=True)
class Word:
    """A message of a process of the run: what has happened there."""

    what: str
    rank: int
    pid: int
    start: int
    ns: int


@dataclass(slots=True)
class Shot:
    """A fault that was tried, and whom it has hit."""

    fault: Fault
    began: int  # ns
    ended: int = 0  # ns, of one that lasts
    pid: int = 0
    rank: int = -1
    hit: bool = False

    @property
    def deadly(self) -> bool:
        return self.hit and self.fault.what == "SIGKILL"


@dataclass(slots=True)
class Record:
    """All that was seen of a run."""

    began: int = 0
    words: list[Word] = field(default_factory=list)
    shots: list[Shot] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None  # the launcher's wait status
    gone: int = 0  # ns: nobody was left
    at_end: list[str] = field(default_factory=list)  # who was there when the launcher reported the end
    survivors: list[str] = field(default_factory=list)  # who was there when nobody was to be any more
    hung: list[str] = field(default_factory=list)  # what had to be killed for the run to end
    left_out: list[str] = field(default_factory=list)  # faults that this machine does not allow
    console: bytes = b""
    stderr: bytes = b""
    logs: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)  # by rank and stream, oldest part first
    written: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # by rank: stdout, stderr, errno

    def said(self, what: str, rank: int | None = None) -> Word | None:
        """The first word ``what`` (of ``rank``); None if there is none."""
        return next((word for word in self.words if word.what == what and rank in (None, word.rank)), None)

    def event(self, name: str) -> dict[str, Any]:
        """What the launcher wrote down when ``name`` happened; {} if it did not happen."""
        return next((event for event in self.events if event["event"] == name), {})

    def hits(self, *targets: str) -> list[Shot]:
        """The signals that have reached one of these targets."""
        return [shot for shot in self.shots if shot.hit and shot.fault.signal and shot.fault.target in targets]

    def exhausted(self, *whats: str) -> list[Shot]:
        """The faults that made something run out: of these kinds, or of any kind."""
        wanted = whats or ("descriptors", "processes", "inotify", "disk")
        return [shot for shot in self.shots if shot.hit and shot.fault.what in wanted]


# --- how long it may take


def decisive(plan: Plan, record: Record) -> int | None:
    """When (ns) the first thing happened that ends the group; None if nothing has yet."""
    moments = [word.ns for word in record.words if word.what in ("closing", "ended")]
    moments += [moment for moment, _rank in failures(plan, record)]
    for shot in record.shots:
        by_sigterm = shot.hit and shot.fault.what == "SIGTERM"
        if (by_sigterm and shot.fault.target == "launcher") or (
            shot.deadly and shot.fault.target in ("launcher", "guard", "keeper", "log writer")
        ):
            moments.append(shot.began)
    return min(moments, default=None)


def failures(plan: Plan, record: Record) -> list[tuple[int, int]]:
    """Who has failed, by plan or by a shot: the moment (ns) and the rank of each, in order.

    One that hangs fails at some time in the `HANGING` seconds before its moment. One that was about to leave when it
    was hit may have succeeded: it is not here.
    """
    found = []
    for rank, work in enumerate(plan.works):
        acting = record.said("acting", rank)
        if acting is not None and work.end in ("fail", "follow"):
            found.append((acting.ns, rank))
        elif acting is not None and work.end == "hang":
            found.append((acting.ns + int((HANG + HANGING) * NS), rank))
    for shot in record.hits("worker"):
        heeded = shot.fault.what == "SIGTERM" and plan.works[shot.rank].on_term in ("die", "fail")
        if (heeded or shot.deadly) and not _was_leaving(plan, record, shot):
            found += [(shot.began, shot.rank)]
    return sorted(found)


def _was_leaving(plan: Plan, record: Record, shot: Shot) -> bool:
    """Whether a worker was about to succeed when it was hit."""
    acting = record.said("acting", shot.rank)
    return acting is not None and acting.ns <= shot.began and plan.works[shot.rank].end == "succeed"


def bounds(plan: Plan, record: Record) -> tuple[int, int]:
    """Returns by when (ns) all processes of the group have to be gone, and by when the launcher has to end."""
    moment = decisive(plan, record)
    span = plan.settle + plan.grace + plan.linger + SECOND + MARGIN
    if record.exhausted() or plan.file_size:
        span += EXHAUSTED
    if moment is None:
        members = record.began + int(STARTING * NS)
    else:
        members = moment + int(span * NS)
        for shot in record.shots:
            if shot.hit and shot.fault.what == "SIGSTOP" and _delays(plan, record, shot, moment):
                members = max(members, (shot.ended or shot.began + int(shot.fault.lasting * NS)) + int(span * NS))
    return members, members + int((SECOND if plan.reader.way == "prompt" else plan.drain + CONSOLE) * NS)


def _delays(plan: Plan, record: Record, shot: Shot, moment: int) -> bool:
    """Whether this SIGSTOP may hold up the end of a group that was decided at ``moment`` (ns)."""
    if shot.fault.target == "worker":  # it was about to fail, and fails when it goes on
        return (moment, shot.rank) in failures(plan, record)
    if shot.fault.target == "launcher":  # it holds up only what it decides itself
        decisions = [word.ns for word in record.words if word.what in ("closing", "ended")]
        decisions += [other.began for other in record.hits("launcher") if other.fault.what == "SIGTERM"]
        return moment in decisions
    return shot.fault.target in HELPERS


# --- whether all of it holds


def check(plan: Plan, record: Record) -> list[str]:
    """Returns what was broken, one line each; nothing if all is well."""
    return [
        *_survivors(plan, record),
        *_ends(plan, record),
        *_late(plan, record),
        *_result(plan, record),
        *_files(plan, record),
        *_console(plan, record),
        *_left(record),
        *_mistakes(record),
    ]


def _killed(record: Record, *targets: str) -> set[str]:
    return {shot.fault.target for shot in record.hits(*targets) if shot.fault.what == "SIGKILL"}


def _survivors(plan: Plan, record: Record) -> Iterator[str]:
    ended = record.event("ended")
    alone = {"launcher", "guard", "keeper"} <= _killed(record, "launcher", "guard", "keeper")
    stated = "may live on" in ended.get("message", "") + ended.get("lost", "")
    survivors = record.survivors
    if alone:  # docs/failures.md has it: nobody is left to search, and the kernel kills function workers alone
        survivors = [who for who in survivors if plan.kind != "binary" and who.startswith("worker")]
    if survivors and not stated:
        yield "survivors: " + ", ".join(survivors)
    # A group that was dropped, because a signal came between its start and its owner's having it, ends soon.
    dropped = ended.get("error") == "SignalException" and not record.event("started")
    if record.at_end and not stated and not dropped:
        yield "there when the end was reported: " + ", ".join(record.at_end)


def _ends(plan: Plan, record: Record) -> Iterator[str]:
    if record.hung:
        yield "hangs: " + ", ".join(record.hung)
        return
    if record.status is None:
        yield "the launcher was not seen to end"
        return
    number = -record.status if record.status < 0 else 0
    if number and number in {shot.fault.signal for shot in record.hits("launcher")}:
        return
    terms = [shot for shot in record.hits("launcher") if shot.fault.what == "SIGTERM"]
    if record.status != 0 and len(terms) < 2:  # a second one may come where the program itself handles the first
        yield f"the launcher ended with {record.status}"
    elif record.status == 0 and not record.event("left"):
        yield "the launcher did not come to its end"
    del plan


def _late(plan: Plan, record: Record) -> Iterator[str]:
    """When guard or keeper has been killed, no worker may start, and none may go on."""
    if record.hits("launcher") or any(shot.fault.what == "SIGSTOP" for shot in record.hits(*HELPERS)):
        return
    for shot in record.hits("guard", "keeper"):
        for word in record.words if shot.deadly else ():
            if word.what in ("up", "acting") and word.ns > shot.began + int(SLACK * NS):
                late = (word.ns - shot.began) / NS
                yield f"rank {word.rank} goes on {late:.2f} s after the {shot.fault.target} was killed: {word.what}"
                return
    del plan


def _result(plan: Plan, record: Record) -> Iterator[str]:
    ended = record.event("ended")
    if not ended:
        return  # the launcher was killed; or `_ends` has said it
    if "error" in ended:
        yield from _error(plan, record, ended)
    if "result" in ended:
        result = ended["result"]
        yield from _outcomes(plan, record, result)
        yield from _values(plan, record, result)
        yield from _leftovers(plan, record, result)
        yield from _root(plan, record, result)


def _error(plan: Plan, record: Record, ended: dict[str, Any]) -> Iterator[str]:
    name, message = ended["error"], ended["message"]
    if not message.strip():
        yield f"{name} without a message"
    started = bool(record.event("started"))
    helpers = [
        shot for shot in record.hits(*HELPERS) if shot.fault.what != "SIGSTOP" or shot.fault.lasting > ANSWER_WAIT
    ]
    if name == "SignalException":
        allowed = any(shot.fault.what == "SIGTERM" for shot in record.hits("launcher"))
    elif name == "KeeperLostError":
        allowed = bool(record.exhausted()) or any(
            # Once the workers run, a helper heeds no SIGTERM, and nobody needs the fork server.
            (shot.fault.what != "SIGTERM" and shot.fault.target != "fork server")
            or not started
            or shot.began < _ns(record, "started")
            for shot in helpers
        )
    elif name == "PreloadError":
        allowed = bool(record.exhausted()) or any(shot.fault.target == "fork server" for shot in helpers)
    elif name in ("OSError", "BlockingIOError") and not started:
        # What is sent to workers may be in a file, too.
        allowed = bool(record.exhausted() or helpers) or plan.file_size > 0
    else:
        allowed = False
    if not allowed:
        yield f"{name} without a cause: {message}"
    elif name == "KeeperLostError" and _is_too_late(plan, record):
        yield f"{name} in the place of a result: {message}"


def _is_too_late(plan: Plan, record: Record) -> bool:
    """Whether the end of the group was decided before its guard was killed, and nothing else was lost: that stands."""
    guard = min((shot.began for shot in record.hits("guard") if shot.deadly), default=0)
    others = record.hits("launcher", "keeper", "log writer", "fork server", "worker")
    decisions = [moment for moment, _rank in failures(plan, record)]
    decisions += [word.ns for word in record.words if word.what == "closing"]
    return not others and not record.exhausted() and min(decisions, default=guard) + int(SLACK * NS) < guard


def _ns(record: Record, event: str) -> int:
    return int(record.event(event).get("ns", 0))


def _outcomes(plan: Plan, record: Record, result: dict[str, Any]) -> Iterator[str]:
    outcomes = result["outcomes"]
    if sorted(map(int, outcomes)) != list(range(len(plan.works))):
        yield f"outcomes of ranks {sorted(outcomes)} of {len(plan.works)}"
    for rank, (state, code, number, pid) in outcomes.items():
        if state == "abandoned":
            yield f"rank {rank} was abandoned"
        if (state == "failed") != (rank in result["failures"]):
            yield f"rank {rank} is {state}, and {'' if rank in result['failures'] else 'not '}among the failures"
        if state == "succeeded" and code != 0:
            yield f"rank {rank} succeeded with {code}"
        if state == "stopped" and number is None:
            yield f"rank {rank} was stopped, and was sent no signal"
        up = record.said("up", int(rank))
        if up is not None and up.pid != pid:
            yield f"rank {rank} is process {up.pid}, not {pid}"


def _values(plan: Plan, record: Record, result: dict[str, Any]) -> Iterator[str]:
    values = result["values"]
    for name, (state, _code, number, _pid) in result["outcomes"].items():
        work, value = plan.works[int(name)], values.get(name)
        if (state == "succeeded") != (value is not None):
            yield f"rank {name} is {state}, and its value is {value}"
            continue
        if value is None:
            continue
        shot = [shot for shot in record.hits("worker") if shot.fault.what == "SIGTERM" and shot.rank == int(name)]
        left = work.on_term == "leave" and (number is not None or shot)
        returned = work.end == "succeed" and record.said("acting", int(name)) is not None
        expected = {"None"} if left else set()
        if returned or record.exhausted():  # without a descriptor it cannot say that it returns
            expected.add("planted" if work.value else "None")
        if value not in expected and not (value == "planted" and work.value == 0):
            yield f"rank {name} returned {value}, not {' or '.join(expected) or 'at all'}"


def _leftovers(plan: Plan, record: Record, result: dict[str, Any]) -> Iterator[str]:
    """Nothing is ended in silence: what workers left behind is named, with its rank."""
    children = {word.pid: word.rank for word in record.words if word.what == "child"}
    named = {pid: rank for pid, rank, _code in result["leftovers"]}
    for pid, rank in named.items():
        if rank is not None and children.get(pid, rank) != rank:
            yield f"process {pid} is said to be rank {rank}'s, and is {children[pid]}'s"
    if record.shots:  # a shot child has ended before, and a helper that lacks something may find out nothing
        return
    for pid, rank in children.items():
        lasting = all(child.seconds == 0 and child.way != "chain" for child in plan.works[rank].children)
        if lasting and named.get(pid, -1) != rank:
            how = f"said to be rank {named[pid]}'s" if pid in named else "not named"
            yield f"process {pid} of rank {rank} was ended, and is {how}"


def _root(plan: Plan, record: Record, result: dict[str, Any]) -> Iterator[str]:
    """Who failed first, where that can be known."""
    failed = {int(rank) for rank in result["failures"]}
    root = result["root"]
    if (root is None) != (not failed) or (root is not None and root not in failed):
        yield f"the root cause is {root}, of the failures {sorted(failed)}"
        return
    if record.exhausted() or plan.file_size:  # any rank may fail of that
        return
    moments = failures(plan, record)
    for rank in failed - {rank for _moment, rank in moments} - {shot.rank for shot in _perhaps(plan, record)}:
        yield f"rank {rank} is called a failure: {result['failures'][str(rank)]}"
    if not moments:
        if not record.shots and not record.said("closing") and result["state"] != "succeeded":
            yield f"nothing has happened, and the group is said to be {result['state']}: {result['outcomes']}"
    elif root is None:
        if not _ended_otherwise(record, moments[0][0]):
            yield f"nobody is the root cause, and rank {moments[0][1]} failed"
    elif root not in (suspects := _suspects(plan, record, moments)):
        yield (
            f"the root cause is rank {root}, and not {' or '.join(map(str, sorted(suspects)))}: {result['failures']}, "
            f"failed at {moments}"
        )


def _suspects(plan: Plan, record: Record, moments: list[tuple[int, int]]) -> set[int]:
    """The ranks of which each may be the first that failed."""
    perhaps = _perhaps(plan, record)
    if _mixed_up(plan, record, moments):
        return {rank for _moment, rank in moments} | {shot.rank for shot in perhaps}
    if not record.hits("worker") and any(rank == plan.leader for _moment, rank in moments):
        return {plan.leader}
    latest = moments[0][0] + int(SLACK * NS)
    hanging = {rank for rank, work in enumerate(plan.works) if work.end == "hang"}
    return {
        *(rank for moment, rank in moments if moment - int(HANGING * NS) * (rank in hanging) <= latest),
        *(shot.rank for shot in perhaps if shot.began <= latest),
    }


def _perhaps(plan: Plan, record: Record) -> list[Shot]:
    """The shots that may have made a worker fail: it was leaving, or had not yet chosen what it does on a SIGTERM."""
    shots = record.hits("worker")
    return [shot for shot in shots if shot.fault.what == "SIGTERM" or _was_leaving(plan, record, shot)]


def _ended_otherwise(record: Record, moment: int) -> bool:
    """Whether something else may have ended the group before a rank failed."""
    others = [word.ns for word in record.words if word.what == "closing"]
    others += [shot.began for shot in record.hits("launcher", *HELPERS)]
    return any(other < moment + int(SLACK * NS) for other in others)


def _mixed_up(plan: Plan, record: Record, moments: list[tuple[int, int]]) -> bool:
    """Whether the order of two failures cannot be told.

    It cannot where one has a moment of its own, and the other only that of its exit, which a keeper that was stopped
    has seen late. Nor can it where the launcher was closing the group already.
    """
    closing = [word.ns for word in record.words if word.what == "closing"]
    closing += [shot.began for shot in record.hits("launcher") if shot.fault.what == "SIGTERM"]
    if any(moment < moments[0][0] + int(SLACK * NS) for moment in closing):
        return True
    if not record.hits("keeper", "guard"):
        return False
    shot = {shot.rank: shot.fault.what for shot in record.hits("worker")}
    return len({sort(shot.get(rank, plan.works[rank].way), plan.kind) for _moment, rank in moments}) > 1


def _files(plan: Plan, record: Record) -> Iterator[str]:
    """What the log files hold, against what the kernel has taken from the workers."""
    for (rank, stream), parts in record.logs.items():
        data = b"".join(parts)
        count = record.written.get(rank, (0, 0, 0))[stream - 1]
        expected = _expected(plan, rank, stream, max(len(data), count))
        name = f"{('stdout', 'stderr')[stream - 1]} of rank {rank}"
        same = _common(data, expected)
        if len(data) < count and (why := _missing(plan, record, count - len(data))):
            yield f"{name}: {len(data)} bytes of {count} that were written{why}"
        elif same < (len(data) if stream == 1 else min(count, len(data))) and not (  # a traceback may follow on stderr
            _may_have_holes(plan, record) and _is_in_order(plan, rank, stream, data)
        ):
            yield f"{name}: byte {same} of {len(data)} is wrong ({count} were written): {data[same : same + 60]!r}"
        for number, part in enumerate(parts):
            if plan.max_size and len(part) > max(plan.max_size, plan.works[rank].width) and stream == 1:
                yield f"{name}: part {number + 1} of {len(parts)} has {len(part)} bytes, of {plan.max_size}"
    refusable, lossy = _refusable(plan, record), _may_lose(plan, record)
    for rank, (out, err, number) in record.written.items():
        if plan.logs != "none" and number and not refusable and not lossy:
            yield f"rank {rank} was refused a write by errno {number} after {out} and {err} bytes"
        for stream, count in ((1, out), (2, err)):
            if plan.logs != "none" and count and (rank, stream) not in record.logs and not lossy:
                yield f"rank {rank} has written {count} bytes, and there is no file"


def _refusable(plan: Plan, record: Record) -> bool:
    """Whether a log file may refuse a write, or the log writer have no descriptor for it."""
    scarce = ("disk", "descriptors") if plan.max_size else ("disk",)
    return bool(record.exhausted(*scarce)) or plan.file_size > 0


def _may_lose(plan: Plan, record: Record) -> bool:
    """Whether a pipe may have lost what it held: its reader, the log writer, was killed, or refused a write."""
    return plan.max_size > 0 and bool(_killed(record, "log writer") or _refusable(plan, record))


def _may_have_holes(plan: Plan, record: Record) -> bool:
    """Whether lines may be missing in the midst of a file: the log writer goes on when its disk has room again."""
    return plan.max_size > 0 and _refusable(plan, record) and _is_stated(plan, record)


def _is_in_order(plan: Plan, rank: int, stream: int, data: bytes) -> bool:
    """Whether the lines that are whole are those of a rank, in their order. At a hole, pieces of two may be one."""
    last = -1
    for text in data.split(b"\n"):
        fields = text.split(b" ")
        number = int(fields[3]) if len(fields) == 5 and len(fields[3]) == 7 and fields[3].isdigit() else -1
        if number < 0 or text + b"\n" != worker.line(plan.seed, rank, stream, number, plan.works[rank].width):
            continue
        if number <= last:
            return False
        last = number
    return True


def _missing(plan: Plan, record: Record, count: int) -> str:
    """Why so many bytes may not be missing from a file; nothing if they may."""
    if not _may_lose(plan, record):
        return "; nothing excuses that"
    if not _is_stated(plan, record):
        return ", and nobody says so"
    if count > IN_HAND and not _refusable(plan, record):
        return ": more is missing than the log writer had in hand"
    return ""


def _is_stated(plan: Plan, record: Record) -> bool:
    """Whether somebody was told that log files are not complete, or was not there to be told."""
    ended = record.event("ended")
    if not ended or "error" in ended or "lost" in ended or plan.reader.way != "prompt":
        return True
    return b"log files are not complete" in record.console + record.stderr


def _expected(plan: Plan, rank: int, stream: int, count: int) -> bytes:
    width = plan.works[rank].width
    lines = (worker.line(plan.seed, rank, stream, number, width) for number in range(count // width + 1))
    return b"".join(lines)[:count]


def _common(one: bytes, other: bytes) -> int:
    """How many bytes of the two are the same, from the first on."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(index for index in range(length) if one[index] != other[index])


_SHOWN = re.compile(rb"\[(\d+)\] (.*)")


def _console(plan: Plan, record: Record) -> Iterator[str]:
    """Lines on the console are whole, and in order. The last one of a rank may be cut: it was, in the file."""
    if plan.logs != "tee" or plan.reader.terminal:
        return
    following: dict[int, int] = {}  # by rank, the number that its next line has at least
    for text in record.console.split(b"\n")[:-1]:  # what follows the last end of a line is not
        found = _SHOWN.fullmatch(text)
        if found is None:
            continue
        rank, shown = int(found[1]), found[2]
        fields = shown.split(b" ")
        number = int(fields[3]) if len(fields) == 5 and len(fields[3]) == 7 else following.get(rank, 0)
        whole = worker.line(plan.seed, rank, 1, number, plan.works[rank].width)[:-1]
        if plan.reader.both:  # and reads promptly, perhaps: the launcher may be the slow one
            shown = shown.partition(b"phalanx: ")[0]  # a line that was given up, and what is said of that
        if not whole.startswith(shown):
            if _may_have_holes(plan, record):
                continue
            yield f"a line is not whole: {text[:120]!r}"
            return
        if number < following.get(rank, 0):
            yield f"line {number} of rank {rank} is shown where line {following[rank]} is the next"
            return
        is_whole = len(shown) == len(whole) or _may_have_holes(plan, record)
        following[rank] = number + 1 if is_whole else 1 << 60


def _left(record: Record) -> Iterator[str]:
    for what in record.event("left").get("what", ()):
        yield f"left in the launcher: {what}"


def _mistakes(record: Record) -> Iterator[str]:
    """What our own processes say when they fail at something that they did not expect."""
    ended = record.event("ended")
    for text in (ended.get("message", ""), ended.get("lost", "")):
        if re.search(r"supervisor failed|cannot see|exit code 70", text):
            yield f"a mistake: {text}"
    for pattern in (rb"phalanx/_\w+/[\w/]+\.py\", line .*", rb"Exception ignored.*", rb"ResourceWarning.*"):
        found = re.search(pattern, record.stderr)
        if found is not None:
            yield f"on stderr: {record.stderr[-3000:].decode('utf-8', 'replace')}"
            return
