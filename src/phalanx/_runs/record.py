"""The record of a run, ``run.json``: its format, how it is made, written and read; whether the run still goes on.

A run's folder, as `_logs.specs` lays it out:

    <run id>_<unique>/              one run
        run.json                    the record of the run: this module
        job.toml                    what `phalanx run` was asked for, as a job file, without secrets
        report.txt                  the report, once the run has ended
        report.html                 the same as a page: `_page`
        attempt_0/                  one start of all ranks; attempt_1 is the next
            timeline                when each log file grew: `_logs.timeline`
            filtered_stdout.log     the lines of all ranks that a filter chooses; also filtered_stderr.log
            0/                      local rank 0
                stdout.log          what it wrote; before that stdout.log.1 (rotated), stdout.log.2.gz (compressed), …
                stderr.log
                error.json          how it failed: `_evidence`; beside it error.json.exit, .fatal, .stacks, .debug.PID

Each file exists only if there is something for it. The record is typed, versioned, replaced in one step, and checked
when it is read: anybody may have written it. The classes below are its schema, for those who write it and those who
read it: a field's annotation says what `_checked` takes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

from phalanx._base import clock, files, procfs
from phalanx._base.frozen import Value
from phalanx._runs import launch_facts

FILE = "run.json"
"""The name of the record in a run's folder."""

REPORT = "report.txt"
"""The name of the report on a run that has ended, in its folder."""

CONFIG = "job.toml"
"""The name of the job file by which `phalanx rerun` starts a run again."""

VERSION = 1
"""The version of the format. New fields leave it as it is; a removed field, or one with a new meaning, raises it."""

MOST_BYTES = 8 << 20
"""Bytes of a record, at most, in reading and writing: 10,000 ranks take 1.5 MB an attempt."""

_MOST_TEXT = 128 << 10  # characters of a text: of an argument, Linux takes no more bytes
_MOST_RANKS = 1 << 17
_MOST_BRIEF = 4096  # characters of a command
_MOST_PROBLEM = 500  # characters of what is wrong with a record

State = Literal["running", "succeeded", "failed", "stopped", "lost"]
RankState = Literal["running", "succeeded", "failed", "stopped", "abandoned", "lost"]
Text = str
Count = int
Pid = int
Ticks = int
ExitCode = int
Step = int
Moment = float
Seconds = float


class Rank(Value):
    """One worker of an attempt.

    Attributes:
        rank, local_rank: Its number in the job, and on this machine.
        pid: Its process id.
        pid_started: When the process started, in clock ticks since boot; 0 if that is not known, because it had exited
            before /proc could be read, or because an older version wrote the record.
        state: "running"; "succeeded"; "failed" by itself; "stopped" by us; "abandoned" if it outlived SIGKILL; "lost"
            if its end was not seen.
        exitcode: As `subprocess` gives it, negative for a signal; None while it runs, or if it is not known.
        signal_sent: The last signal that we sent it, or None.
        ended: When it ended (Unix time, seconds); None while it runs, or if that is not known.
        early: For how many seconds the others went on after it had succeeded, if that is long; else 0.
    """

    rank: Count
    local_rank: Count
    pid: Pid
    pid_started: Ticks = 0
    state: RankState
    exitcode: ExitCode | None = None
    signal_sent: Count | None = None
    ended: Moment | None = None
    early: Seconds = 0.0


class Leftover(Value):
    """A process that a worker left behind, and that we signalled when no worker was left.

    Attributes:
        pid, command: Its process id and command line.
        local_rank: The worker that started it, or its parent; None if that is not known.
        age: Its age in seconds when it was first signalled.
        signal_sent: The last signal that we sent it.
        exitcode: As `subprocess` gives it; None if it outlived SIGKILL.
    """

    pid: Pid
    command: Text
    local_rank: Count | None = None
    age: Seconds = 0.0
    signal_sent: Count
    exitcode: ExitCode | None = None


class Attempt(Value):
    """One start of all ranks. ``number`` counts from 0; moments are Unix time in seconds.

    ``nodes`` says on how many machines it was; ``ranks`` are those of this one.
    ``leftovers`` are the processes that its workers left behind; ``cause`` says, in one line, why another attempt
    followed, and ``step`` is the highest step that a rank had reported by its end (`phalanx.timer.progress`), or None.
    """

    number: Count
    nodes: Count = 1
    started: Moment
    ended: Moment | None = None
    ranks: list[Rank] = []  # noqa: RUF012 - nobody changes it
    leftovers: list[Leftover] = []  # noqa: RUF012 - nobody changes it
    cause: Text = ""
    step: Step | None = None


class Run(Value):
    """The content of a ``run.json``.

    Attributes:
        version: `VERSION`.
        run_id: The run's id.
        name: The name of the script, module or function.
        command: The command line: the program and its arguments.
        argv: The whole command line of the launcher, its options as well; empty if an older version wrote the record.
        cwd: The launcher's working directory; "" if that had been removed.
        versions: Those of Phalanx, Python and Linux, in a line; "" if an older version wrote the record.
        commit: The git commit that was checked out in ``cwd`` at the start, with its branch; "": none.
        environ: The launcher's variables that change how programs run, as ``NAME=value``, without secrets.
        host: The machine's name.
        pid: The launcher's process id.
        pid_started: When the launcher started, in clock ticks since boot (field 22 of proc_pid_stat(5)): pids are
            reused.
        pid_namespace: The pid namespace in which ``pid`` is valid (pid_namespaces(7)), or "".
        boot_id: The boot of the machine (/proc/sys/kernel/random/boot_id), or "".
        state: The state when the record was written; `state_now` returns the present one.
        started, ended: Unix time in seconds; None while it runs.
        exit_code: The launcher's; None while it runs.
        nprocs: The number of workers.
        cause: Why it did not succeed, in one line, or "". While it runs: why the last attempt that failed did.
        attempts: Each start of the workers, the latest last; at most the last 1000. Of those before the latest two,
            only the ranks are kept that neither succeeded nor were stopped.
    """

    version: Count = VERSION
    run_id: Text
    name: Text
    command: list[Text]
    argv: list[Text] = []  # noqa: RUF012 - nobody changes it
    cwd: Text = ""
    versions: Text = ""
    commit: Text = ""
    environ: list[Text] = []  # noqa: RUF012 - nobody changes it
    host: Text
    pid: Pid
    pid_started: Ticks
    pid_namespace: Text = ""
    boot_id: Text = ""
    state: State
    started: Moment
    ended: Moment | None = None
    exit_code: ExitCode | None = None
    nprocs: Count
    cause: Text = ""
    attempts: list[Attempt] = []  # noqa: RUF012 - nobody changes it


class _Versioned(Value):
    version: Count


class UnreadableRecordError(ValueError):
    """A ``run.json`` cannot be read, or is not valid. The message names the file, and the field that is wrong."""


class NoRecordError(UnreadableRecordError):
    """There is no ``run.json`` in the folder."""


# --- making and writing


def begin(
    *, run_id: str, name: str, command: list[str], started: float, nprocs: int, ranks: list[Rank],
    number: int = 0, nodes: int = 1, earlier: Sequence[Attempt] = (), cause: str = "", argv: Sequence[str] = (),
) -> Run:  # fmt: skip
    """Return the record of a run that this process launches: "running", in attempt ``number``, after ``earlier`` ones.

    ``nodes``: how many machines have a part in that attempt.

    >>> run = begin(run_id="night", name="train.py", command=["train.py"], started=1795184205.0, nprocs=4, ranks=[])
    >>> run.state, run.pid == os.getpid()
    ('running', True)
    """
    cwd = ""
    with contextlib.suppress(OSError):
        cwd = os.getcwd()
    return Run(
        run_id=run_id,
        name=name,
        command=command,
        argv=[*argv],
        cwd=cwd,
        versions=launch_facts.versions(),
        commit=launch_facts.commit(cwd) if cwd else "",
        environ=launch_facts.environment(os.environ),
        host=os.uname().nodename,
        pid=os.getpid(),
        pid_started=procfs.Stat(os.getpid()).start,
        pid_namespace=procfs.pid_namespace(),
        boot_id=procfs.boot_id(),
        state="running",
        started=earlier[0].started if earlier else started,
        nprocs=nprocs,
        cause=cause,
        attempts=[*earlier, Attempt(number=number, nodes=nodes, started=started, ranks=ranks)],
    )


def end(
    run: Run,
    *,
    state: State,
    exit_code: int,
    cause: str,
    ranks: list[Rank],
    leftovers: Sequence[Leftover] = (),
    when: float | None = None,
) -> Run:
    """Return the record of a run that has ended, with the final states of its last attempt's ranks."""
    run = end_attempt(run, ranks=ranks, leftovers=leftovers, when=when)
    return run.replace(state=state, ended=run.attempts[-1].ended, exit_code=exit_code, cause=cause)


def end_attempt(
    run: Run,
    *,
    ranks: list[Rank],
    leftovers: Sequence[Leftover] = (),
    cause: str = "",
    step: int | None = None,
    when: float | None = None,
) -> Run:
    """Return the record of a run that goes on, with the end of its last attempt: ``when``, or now."""
    last = run.attempts[-1]
    # The clock may have been set back.
    ended = max(time.time() if when is None else when, run.started, last.started)
    cause, step = cause or last.cause, last.step if step is None else step
    return change_attempt(run, ended=ended, ranks=ranks, leftovers=[*leftovers], cause=cause, step=step)


def change_attempt(run: Run, **changes: Any) -> Run:
    """Return the record with some fields of its last attempt changed."""
    *earlier, last = run.attempts
    return run.replace(attempts=[*earlier, last.replace(**changes)])


def write(run_dir: str, run: Run) -> None:
    """Write the record in one step: a reader sees the old one or the new one, whole.

    It is not synced to the disk: after a crash of the machine the workers are dead, too. Raises OSError, or ValueError
    if it is too long; then the old record is unchanged, and no temporary file is left.
    """
    data = _encode(to_object(run))
    if len(data) >= MOST_BYTES:
        msg = f"the record has {len(data)} bytes; {MOST_BYTES} can be read"
        raise ValueError(msg)
    write_file(run_dir, FILE, data + b"\n")


def write_file(run_dir: str, name: str, data: bytes) -> None:
    """Write a file of a run's folder in one step. Raises OSError, RecursionError."""
    temporary = os.path.join(run_dir, f".{name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # left by a launcher that was killed, and had this pid
        os.unlink(temporary)
    files.replace(os.path.join(run_dir, name), temporary, data)


def to_object(value: Any) -> Any:
    """Return a part of a record, or all of it, as an object of JSON."""
    if isinstance(value, Value):
        return {name: to_object(getattr(value, name)) for name in value.__match_args__}
    return [to_object(part) for part in value] if isinstance(value, list) else value


def to_json(**values: Any) -> str:
    """Encode values as one line of JSON. A `Run` becomes an object of its fields."""
    return _encode({name: to_object(value) for name, value in values.items()}).decode()


def _encode(value: Any) -> bytes:
    import json  # for which no start is to wait

    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # arguments and file names are bytes, and may be no UTF-8: as backslash escapes
        import re

        return re.sub("[\ud800-\udfff]", lambda found: f"\\\\u{ord(found[0]):04x}", text).encode()


# --- reading


def brief(run: Run) -> Run:
    """Return the record with 4096 characters of its command, its last attempt without ranks, and nothing else long.

    Lists hold many.
    """
    left, command = _MOST_BRIEF, []
    for part in run.command:
        if len(part) >= left:
            command.append(f"{part[:left]}…")
            break
        command.append(part)
        left -= len(part) + 1
    attempts = [attempt.replace(ranks=[], leftovers=[], cause="") for attempt in run.attempts[-1:]]
    return run.replace(command=command, argv=[], environ=[], attempts=attempts)


def read(run_dir: str) -> Run:
    """Read the record of a run's folder. Raises as `read_owned`."""
    return read_owned(run_dir)[0]


def read_owned(run_dir: str) -> tuple[Run, int]:
    """Read the record of a run's folder. Returns it, and the uid of the file's owner.

    Raises:
        NoRecordError: There is no ``run.json``.
        UnreadableRecordError: It cannot be read, is damaged, has a field of a wrong type, or was written by a newer
            version. Unknown fields are ignored.
    """
    path = os.path.join(run_dir, FILE)
    try:
        data, owner = _contents(path)
    except FileNotFoundError:
        msg = f"{path}: there is no such file"
        raise NoRecordError(msg) from None
    except OSError as error:
        msg = f"{path}: {error.strerror or error}"
        raise UnreadableRecordError(msg) from None
    import json

    try:
        found = json.loads(data.decode())
        version = _checked("_Versioned", found).version
        if version == VERSION:
            return _checked("Run", found), owner
    except (ValueError, OverflowError, RecursionError) as error:  # of JSON, of UTF-8, or ours
        msg = f"{path}: {_in_short(str(error), _MOST_PROBLEM)}"
        raise UnreadableRecordError(msg) from None
    msg = f"{path}: version {version}; this Phalanx reads version {VERSION}"
    if version > VERSION:
        msg = f"{path}: written by a newer Phalanx (version {version}; this one reads {VERSION})"
    raise UnreadableRecordError(msg)


def state_now(run: Run) -> State:
    """Return the present state of a run: "lost" if the record says "running" and the launcher is dead.

    A launcher on another machine, or in another pid namespace, cannot be looked up here: it counts as running. A run of
    this machine's name that began before the last boot counts as this machine's, and is lost.
    """
    if run.state != "running":
        return run.state
    if not is_here(run):
        lives = run.boot_id == procfs.boot_id() or run.host != os.uname().nodename or run.started >= clock.booted()
        return "running" if lives else "lost"
    return "running" if procfs.lives(run.pid, run.pid_started) else "lost"


def is_here(run: Run) -> bool:
    """Whether its pids are valid here: same machine, same boot, same pid namespace."""
    return run.boot_id == procfs.boot_id() and run.pid_namespace == procfs.pid_namespace()


def _contents(path: str) -> tuple[bytes, int]:
    """Read a file that anybody may have written. Returns its content, and its owner's uid. Raises OSError."""
    fd = files.opened(path, links=files.OWN_LINKS)
    try:
        found = os.fstat(fd)
        if found.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES} bytes, so it is no record")
        return files.pread(fd, MOST_BYTES), found.st_uid
    finally:
        os.close(fd)


def _in_short(text: str, most: int) -> str:
    """Return a text without its middle, if it is long: it may quote what stands in a file."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-(most // 2) :]}"


_PARTS: dict[str, type[Value]] = {
    "Rank": Rank,
    "Leftover": Leftover,
    "Attempt": Attempt,
    "Run": Run,
    "_Versioned": _Versioned,
}
_CHOICES = {"State": get_args(State), "RankState": get_args(RankState)}
_NUMBERS: dict[str, tuple[type, float, float]] = {  # at least, and less than: these break no arithmetic or calendar
    "Count": (int, 0, 2**31),
    "Pid": (int, 1, 2**31),
    "Ticks": (int, 0, 2**63),
    "ExitCode": (int, 1 - 2**31, 2**31),
    "Step": (int, -(2**63), 2**63),
    "Moment": (float, 0, 253402214400),  # 9999-12-31
    "Seconds": (float, 0, 253402214400),
}
_FLOATS = ("Moment", "Seconds")


def _checked(kind: str, value: Any, where: Any = ()) -> Any:
    """Return a value of JSON as a field with the annotation ``kind`` has it. Raises ValueError, which names the field.

    ``where``: the steps to it, the last one beside those before it.

    >>> _checked("list[Count]", [1, -1])
    Traceback (most recent call last):
    ValueError: expected a number, 0 or more and less than 2.14748e+09, got -1 - at `$[1]`
    """
    expected = _mismatch(kind, value)
    if not expected and kind in _PARTS:
        part, lacking = _PARTS[kind], ""
        found: dict[str, Any] = {}
        for name, inner, is_optional in _fields(kind):
            if name not in value:  # other names are of a later version
                lacking = lacking or ("" if hasattr(part, name) else name)
            elif (one := value[name]) is None and is_optional:
                found[name] = None
            else:
                found[name] = _checked(inner, one, (where, name))
        if not lacking:
            return part(**found)
        expected = f"an object with `{lacking}`"
    if expected:
        steps = []
        while where:
            where, step = where
            steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
        place = "".join(["$", *reversed(steps)])
        msg = f"expected {expected}, got {_in_short(repr(value), 80)} - at `{place}`"
        raise ValueError(msg)
    if kind.startswith("list["):
        return [_checked(kind[5:-1], one, (where, index)) for index, one in enumerate(value)]
    return float(value) if kind in _FLOATS else value


@functools.cache
def _fields(kind: str) -> list[tuple[str, str, bool]]:
    """Return the name of each field of a part, its annotation without None, and whether it has that."""
    kinds = ((name, _PARTS[kind].__annotations__[name].partition(" | None")) for name in _PARTS[kind].__match_args__)
    return [(name, inner, bool(optional)) for name, (inner, optional, _) in kinds]


def _mismatch(kind: str, value: Any) -> str:
    """Return what a value should be; "" if it is that, but for what is in it."""
    if kind in _NUMBERS:
        number, least, below = _NUMBERS[kind]
        is_right = type(value) in (int, number) and least <= value < below
        return "" if is_right else f"a number, {least:g} or more and less than {below:g}"
    if kind in _CHOICES:
        return "" if value in _CHOICES[kind] else f"one of {', '.join(_CHOICES[kind])}"
    if kind in _PARTS:
        return "" if isinstance(value, dict) else "an object"
    if kind.startswith("list["):
        is_right = isinstance(value, list) and len(value) <= _MOST_RANKS
        return "" if is_right else f"an array of {_MOST_RANKS} at most"
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        return f"a text of {_MOST_TEXT} characters at most"
    if not value.isascii():
        value.encode()  # raises UnicodeEncodeError for half a pair of surrogates
    return ""
