"""The record of a run, ``run.json``: its format, how it is read, and whether the run still goes on.

A run's folder, as `_logs.specs` lays it out:

    <run id>_<unique>/              one run
        run.json                    the record of the run: this module
        job.toml                    what `phalanx run` was asked for, as a job file, without secrets
        report.txt                  the report, once the run has ended
        attempt_0/                  one start of all ranks; attempt_1 is the next
            timeline                when each log file grew: `_logs.timeline_format`
            filtered_stdout.log     the lines of all ranks that a filter chooses; also filtered_stderr.log
            0/                      local rank 0
                stdout.log          what it wrote; before that stdout.log.1 (rotated), stdout.log.2.gz (compressed), …
                stderr.log
                error.json          how it failed: `_evidence`; beside it error.json.exit, .fatal and .stacks

Each file exists only if there is something for it. The record is typed, versioned, replaced in one step by
`record_writer`, and checked when it is read: anybody may have written it. This is the one module that loads msgspec: it
is imported when it is needed and not before.
"""

from __future__ import annotations

import errno
import os
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from phalanx._base import clock, files, procfs
from phalanx._runs import record_writer
from phalanx._runs.record_writer import FILE, MOST_BYTES, VERSION, RankState, State

_MOST_TEXT = 128 << 10  # characters of a text: of an argument, Linux takes no more bytes
_MOST_RANKS = 1 << 17
_MOST_BRIEF = 4096  # characters of a command
_MOST_PROBLEM = 500  # characters of what is wrong with a record

# The bounds keep the values of a damaged file from breaking arithmetic and calendars later.
Text = Annotated[str, Meta(max_length=_MOST_TEXT)]
Moment = Annotated[float, Meta(ge=0, lt=253402214400)]  # 9999-12-31
Pid = Annotated[int, Meta(ge=1, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
ExitCode = Annotated[int, Meta(gt=-(2**31), lt=2**31)]


class Rank(Struct, frozen=True, kw_only=True):
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
    pid_started: Annotated[int, Meta(ge=0)] = 0
    state: RankState
    exitcode: ExitCode | None = None
    signal_sent: Count | None = None
    ended: Moment | None = None
    early: Annotated[float, Meta(ge=0)] = 0.0


class Leftover(Struct, frozen=True, kw_only=True):
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
    age: Annotated[float, Meta(ge=0)] = 0.0
    signal_sent: Count
    exitcode: ExitCode | None = None


class Attempt(Struct, frozen=True, kw_only=True):
    """One start of all ranks. ``number`` counts from 0; moments are Unix time in seconds.

    ``nodes`` says on how many machines it was; ``ranks`` are those of this one.
    ``leftovers`` are the processes that its workers left behind; ``cause`` says, in one line, why another attempt
    followed, and ``step`` is the highest step that a rank had reported by its end (`phalanx.timer.progress`), or None.
    """

    number: Count
    nodes: Count = 1
    started: Moment
    ended: Moment | None = None
    ranks: Annotated[list[Rank], Meta(max_length=_MOST_RANKS)] = []
    leftovers: Annotated[list[Leftover], Meta(max_length=_MOST_RANKS)] = []
    cause: Text = ""
    step: int | None = None


class Run(Struct, frozen=True, kw_only=True):
    """The content of a ``run.json``.

    Attributes:
        version: `VERSION`.
        run_id: The run's id.
        name: The name of the script, module or function.
        command: The command line: the program and its arguments.
        argv: The whole command line of the launcher, its options as well; empty if an older version wrote the record.
        cwd: The launcher's working directory; "" if that had been removed.
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
    argv: list[Text] = []
    cwd: Text = ""
    host: Text
    pid: Pid
    pid_started: Annotated[int, Meta(ge=0)]
    pid_namespace: Text = ""
    boot_id: Text = ""
    state: State
    started: Moment
    ended: Moment | None = None
    exit_code: ExitCode | None = None
    nprocs: Count
    cause: Text = ""
    attempts: list[Attempt] = []


class UnreadableRecordError(ValueError):
    """A ``run.json`` cannot be read, or is not valid. The message names the file, and the field that is wrong."""


class NoRecordError(UnreadableRecordError):
    """There is no ``run.json`` in the folder."""


class _Versioned(Struct):
    version: int


def brief(run: Run) -> Run:
    """Return the record without attempts and ``argv``, and with 4096 characters of its command: lists hold many."""
    left, command = _MOST_BRIEF, []
    for part in run.command:
        if len(part) >= left:
            command.append(f"{part[:left]}…")
            break
        command.append(part)
        left -= len(part) + 1
    return msgspec.structs.replace(run, command=command, argv=[], attempts=[])


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
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version == VERSION:
            return msgspec.json.decode(data, type=Run), owner
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        said = str(error)  # which may quote what stands there, and ends with the field
        half = _MOST_PROBLEM // 2
        msg = f"{path}: {said if len(said) <= _MOST_PROBLEM else f'{said[:half]} … {said[-half:]}'}"
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


def to_object(value: Struct) -> dict[str, Any]:
    """Return a part of a record, or all of it, as `record_writer` makes it."""
    made: dict[str, Any] = msgspec.to_builtins(value)
    return made


def to_json(**values: Any) -> str:
    """Encode values as one line of JSON. A `Run` becomes an object of its fields."""
    return msgspec.json.encode(record_writer.encodable(msgspec.to_builtins(values))).decode()


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
