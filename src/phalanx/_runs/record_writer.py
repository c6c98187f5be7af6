"""The record of a run, ``run.json``, as the run's own launcher makes it: begins it, ends it, writes it.

A record is an object of JSON here: `record` has its fields, and checks them when it is read. The two are apart because
msgspec, which checks, takes a tenth of the processor time of a short run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any, Literal

from phalanx._base import files, procfs

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

State = Literal["running", "succeeded", "failed", "stopped", "lost"]
RankState = Literal["running", "succeeded", "failed", "stopped", "abandoned", "lost"]


def begin(
    *, run_id: str, name: str, command: list[str], started: float, nprocs: int, ranks: list[dict[str, Any]],
    number: int = 0, nodes: int = 1, earlier: Sequence[dict[str, Any]] = (), cause: str = "", argv: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return the record of a run that this process launches: "running", in attempt ``number``, after ``earlier`` ones.

    ``nodes``: how many machines have a part in that attempt.

    >>> run = begin(run_id="night", name="train.py", command=["train.py"], started=1795184205.0, nprocs=4, ranks=[])
    >>> run["state"], run["pid"] == os.getpid()
    ('running', True)
    """
    cwd = ""
    with contextlib.suppress(OSError):
        cwd = os.getcwd()
    attempt = {
        "number": number, "nodes": nodes, "started": started, "ended": None, "ranks": ranks, "leftovers": [],
        "cause": "", "step": None,
    }  # fmt: skip
    return {
        "version": VERSION,
        "run_id": run_id,
        "name": name,
        "command": command,
        "argv": [*argv],
        "cwd": cwd,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "pid_started": procfs.Stat(os.getpid()).start,
        "pid_namespace": procfs.pid_namespace(),
        "boot_id": procfs.boot_id(),
        "state": "running",
        "started": earlier[0]["started"] if earlier else started,
        "ended": None,
        "exit_code": None,
        "nprocs": nprocs,
        "cause": cause,
        "attempts": [*earlier, attempt],
    }


def end(
    run: dict[str, Any],
    *,
    state: State,
    exit_code: int,
    cause: str,
    ranks: list[dict[str, Any]],
    leftovers: Sequence[dict[str, Any]] = (),
    when: float | None = None,
) -> dict[str, Any]:
    """Return the record of a run that has ended, with the final states of its last attempt's ranks."""
    run = end_attempt(run, ranks=ranks, leftovers=leftovers, when=when)
    ended = run["attempts"][-1]["ended"]
    return {**run, "state": state, "ended": ended, "exit_code": exit_code, "cause": cause}


def end_attempt(
    run: dict[str, Any],
    *,
    ranks: list[dict[str, Any]],
    leftovers: Sequence[dict[str, Any]] = (),
    cause: str = "",
    step: int | None = None,
    when: float | None = None,
) -> dict[str, Any]:
    """Return the record of a run that goes on, with the end of its last attempt: ``when``, or now."""
    *earlier, last = run["attempts"]
    ended = max(
        time.time() if when is None else when, run["started"], last["started"]
    )  # the clock may have been set back
    known = {"cause": cause or last["cause"], "step": last["step"] if step is None else step}
    return {**run, "attempts": [*earlier, {**last, "ended": ended, "ranks": ranks, "leftovers": [*leftovers], **known}]}


def rank(
    *, rank: int, local_rank: int, pid: int, pid_started: int, state: RankState, exitcode: int | None = None,
    signal_sent: int | None = None, ended: float | None = None, early: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Return one worker of an attempt, see `record.Rank`."""
    return {
        "rank": rank,
        "local_rank": local_rank,
        "pid": pid,
        "pid_started": pid_started,
        "state": state,
        "exitcode": exitcode,
        "signal_sent": signal_sent,
        "ended": ended,
        "early": early,
    }


def write(run_dir: str, run: dict[str, Any]) -> None:
    """Write the record in one step: a reader sees the old one or the new one, whole.

    It is not synced to the disk: after a crash of the machine the workers are dead, too. Raises OSError, or ValueError
    if it is too long; then the old record is unchanged, and no temporary file is left.
    """
    try:
        data = _encode(run)
    except UnicodeEncodeError:  # arguments and file names are bytes, and may be no UTF-8
        data = _encode(encodable(run))
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


def encodable(value: Any) -> Any:
    """Replace what UTF-8 cannot encode by backslash escapes: bytes of names and arguments that are no text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [encodable(part) for part in value]
    if isinstance(value, dict):
        return {key: encodable(part) for key, part in value.items()}
    return value


def _encode(run: dict[str, Any]) -> bytes:
    import json  # for which no start is to wait

    return json.dumps(run, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
