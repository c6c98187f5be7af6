"""What a run directory says of itself: ``run.json``, typed, versioned and replaced in one step.

Owns the file's format, its writing and its distrustful reading, and whether a run still runs. Knows nothing of groups
and options. It is imported when it is needed and not before, because it is the one module that loads msgspec.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from phalanx._base import clock, files, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx._engine.leftovers import Leftover as Found

FILE = "run.json"
"""The name of the record in a run's folder."""

VERSION = 1
"""The version of the format. Fields may be added to one; a field that changes its meaning, or goes, makes another."""

MOST_BYTES = 8 << 20
"""Bytes of a record that is read, or written: 10,000 ranks take 1.2 MB an attempt."""

_MOST_TEXT = 128 << 10  # characters of a text: of an argument, Linux takes no more bytes
_MOST_RANKS = 1 << 17
_MOST_BRIEF = 4096
_MOST_SAID = 500  # characters of what is wrong with a record

State = Literal["running", "succeeded", "failed", "stopped", "lost"]
RankState = Literal["running", "succeeded", "failed", "stopped", "abandoned", "lost"]

# The bounds keep what a damaged file says from breaking arithmetic and calendars later.
Text = Annotated[str, Meta(max_length=_MOST_TEXT)]
Moment = Annotated[float, Meta(ge=0, lt=253402214400)]  # 9999-12-31
Pid = Annotated[int, Meta(ge=1, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
ExitCode = Annotated[int, Meta(gt=-(2**31), lt=2**31)]


class Rank(Struct, frozen=True, kw_only=True):
    """One worker of an attempt.

    Attributes:
        rank, local_rank: Its number in the job, and on this machine.
        pid: Its process,
        pid_started: and its start, in clock ticks since boot, as that of the launcher; 0 when it is not known, because
            it had exited before it could be looked at, or an older version wrote the record.
        state: "running"; "succeeded"; "failed" by itself; "stopped" by us; "abandoned", when it outlived SIGKILL;
            "lost", when its end was not seen.
        exitcode: As `subprocess` gives it, negative for a signal; None when there is none, or it is not known.
        signal_sent: The last signal that we sent it, or None.
        ended: When it ended, in Unix time in seconds; None while it runs, or when that is not known.
        early: Seconds for which the others went on after it had succeeded, where that is long; else 0.
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
    """A process that a worker left behind, and that was ended when no worker was left.

    Attributes:
        pid, command: The process.
        local_rank: Whose it was; None when that is not known.
        age: Its age in seconds when it was first signalled.
        signal_sent: The last signal that it was sent.
        exitcode: As `subprocess` gives it; None when it outlived even SIGKILL.
    """

    pid: Pid
    command: Text
    local_rank: Count | None = None
    age: Annotated[float, Meta(ge=0)] = 0.0
    signal_sent: Count
    exitcode: ExitCode | None = None

    @classmethod
    def of(cls, found: Found) -> Leftover:
        """What a group's result says."""
        return cls(**{name: getattr(found, name) for name in cls.__struct_fields__})


class Attempt(Struct, frozen=True, kw_only=True):
    """One start of all ranks. ``number`` counts from 0; moments are Unix time in seconds.

    ``leftovers`` are the processes that its workers left behind, and that were ended.
    """

    number: Count
    started: Moment
    ended: Moment | None = None
    ranks: Annotated[list[Rank], Meta(max_length=_MOST_RANKS)] = []
    leftovers: Annotated[list[Leftover], Meta(max_length=_MOST_RANKS)] = []


class Run(Struct, frozen=True, kw_only=True):
    """What a run directory says of its run.

    Attributes:
        version: `VERSION`.
        run_id: What the run is called.
        name: What was run.
        command: It, with its arguments.
        cwd: Where; "" when that folder was gone.
        host: The machine's name.
        pid: The launcher's process,
        pid_started: and its start, in clock ticks since boot (field 22 of proc_pid_stat(5)): pids are used again.
        pid_namespace: The namespace in which the pid has its meaning (pid_namespaces(7)), or "".
        boot_id: Which boot of the machine it was (/proc/sys/kernel/random/boot_id), or "".
        state: As written. What it means by now, `state_now` says.
        started, ended: Unix time in seconds; None while it runs.
        exit_code: The launcher's; None while it runs.
        nprocs: The number of workers.
        cause: Why it did not succeed, in one line, or "".
        attempts: Each start of the workers, the latest last.
    """

    version: Count = VERSION
    run_id: Text
    name: Text
    command: list[Text]
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
    """A ``run.json`` that cannot be used. The message names the file, and the field where it is one."""


class NoRecordError(UnreadableRecordError):
    """There is no ``run.json`` in the folder."""


class _Versioned(Struct):
    version: int


def begin(
    *, run_id: str, name: str, command: list[str], started: float, nprocs: int, ranks: list[Rank], number: int = 0,
    earlier: Sequence[Attempt] = (),
) -> Run:  # fmt: skip
    """The record of a run that this process launches: "running", in attempt ``number``, after those of ``earlier``.

    >>> run = begin(run_id="night", name="train.py", command=["train.py"], started=1795184205.0, nprocs=4, ranks=[])
    >>> run.state, run.pid == os.getpid(), state_now(run)
    ('running', True, 'running')
    """
    cwd = ""
    with contextlib.suppress(OSError):
        cwd = os.getcwd()
    return Run(
        run_id=run_id,
        name=name,
        command=command,
        cwd=cwd,
        host=os.uname().nodename,
        pid=os.getpid(),
        pid_started=procfs.Stat(os.getpid()).start,
        pid_namespace=procfs.pid_namespace(),
        boot_id=procfs.boot_id(),
        state="running",
        started=earlier[0].started if earlier else started,
        nprocs=nprocs,
        attempts=[*earlier, Attempt(number=number, started=started, ranks=ranks)],
    )


def brief(run: Run) -> Run:
    """The record without its attempts, and with the first 4096 characters of its command: many can be held."""
    left, command = _MOST_BRIEF, []
    for part in run.command:
        if len(part) >= left:
            command.append(f"{part[:left]}…")
            break
        command.append(part)
        left -= len(part) + 1
    return msgspec.structs.replace(run, command=command, attempts=[])


def end(
    run: Run, *, state: State, exit_code: int, cause: str, ranks: list[Rank], leftovers: Sequence[Leftover] = ()
) -> Run:
    """The record of a run that is over by now, with what became of the ranks of its last attempt."""
    ended = max(time.time(), run.started)  # the clock may have been set back
    last = msgspec.structs.replace(run.attempts[-1], ended=ended, ranks=ranks, leftovers=list(leftovers))
    attempts = [*run.attempts[:-1], last]
    return msgspec.structs.replace(run, state=state, ended=ended, exit_code=exit_code, cause=cause, attempts=attempts)


def write(run_dir: str, run: Run) -> None:
    """Write the record in one step: a reader sees the old one, or all of the new one.

    Not synced to the disk: the order of the steps is what matters, and after a crash of the machine the workers are
    gone, too. Raises OSError; a record that was there is untouched then, and nothing is left over.
    """
    try:
        data = msgspec.json.encode(run)
    except UnicodeEncodeError:  # arguments and file names are bytes, and may be no text
        data = msgspec.json.encode(_encodable(msgspec.to_builtins(run)))
    path = os.path.join(run_dir, FILE)
    if len(data) >= MOST_BYTES:
        raise OSError(errno.EFBIG, f"the record has {len(data)} bytes; {MOST_BYTES} can be read", path)
    temporary = os.path.join(run_dir, f".{FILE}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # of one that was killed, and had this pid
        os.unlink(temporary)
    files.replace(path, temporary, data + b"\n")


def read(run_dir: str) -> Run:
    """Read the record of a run's folder. Raises as `read_owned`."""
    return read_owned(run_dir)[0]


def read_owned(run_dir: str) -> tuple[Run, int]:
    """Read the record of a run's folder. Returns it, and the uid of whom the file is.

    Raises:
        NoRecordError: There is none.
        UnreadableRecordError: It cannot be read, is damaged, has a field of a wrong type, or was written by a newer
            version. A field that is not known is no error.
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
        half = _MOST_SAID // 2
        msg = f"{path}: {said if len(said) <= _MOST_SAID else f'{said[:half]} … {said[-half:]}'}"
        raise UnreadableRecordError(msg) from None
    msg = f"{path}: version {version}; this Phalanx reads version {VERSION}"
    if version > VERSION:
        msg = f"{path}: written by a newer Phalanx (version {version}; this one reads {VERSION})"
    raise UnreadableRecordError(msg)


def state_now(run: Run) -> State:
    """The state of a run by now: "lost" when the record says "running" and the launcher is gone.

    A launcher on another machine, or in another pid namespace, cannot be looked at from here: its word is taken. What
    a machine of this name began before our last start is ours, and over.
    """
    if run.state != "running":
        return run.state
    if not is_here(run):
        lives = run.boot_id == procfs.boot_id() or run.host != os.uname().nodename or run.started >= clock.booted()
        return "running" if lives else "lost"
    return "running" if _lives(run.pid, run.pid_started) else "lost"


def is_here(run: Run) -> bool:
    """Whether its pids have their meaning here: not on another machine, before its last start, or in a container."""
    return run.boot_id == procfs.boot_id() and run.pid_namespace == procfs.pid_namespace()


def to_json(**values: Any) -> str:
    """One line of JSON. A `Run` among the values is an object of its fields."""
    return msgspec.json.encode(_encodable(msgspec.to_builtins(values))).decode()


def _contents(path: str) -> tuple[bytes, int]:
    """Read a file that anybody may have put there. Returns its content, and whose it is. Raises OSError."""
    fd = files.opened(path, links=files.OWN_LINKS)
    try:
        found = os.fstat(fd)
        if found.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES} bytes, so it is no record")
        return files.pread(fd, MOST_BYTES), found.st_uid
    finally:
        os.close(fd)


def _lives(pid: int, started: int) -> bool:
    """Whether this very process is there and has not exited."""
    try:
        found = procfs.Stat(pid)
    except OSError:  # /proc may hide others' processes (hidepid, proc(5)); kill(2) with 0 asks, and sends nothing
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True
    return found.start == started and not found.has_exited


def _encodable(value: Any) -> Any:
    """The same with backslash escapes for what UTF-8 cannot say (bytes of names and arguments that are no text)."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_encodable(part) for part in value]
    if isinstance(value, dict):
        return {key: _encodable(part) for key, part in value.items()}
    return value
