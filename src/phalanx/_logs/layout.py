"""The files of one group: which streams are in files, which files there are, and the folders that hold them.

Opens and follows none of them. `Std` is a set of a worker's standard streams, with its notation on the command line.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntFlag

from phalanx._base import files
from phalanx._base.frozen import Value


class Std(IntFlag):
    """A set of standard streams: none, stdout, stderr, or both.

    Attributes:
        NONE: Neither stream: 0.
        OUT: stdout: 1.
        ERR: stderr: 2.
        ALL: Both: 3.

    >>> Std.ALL == Std.OUT | Std.ERR
    True
    """

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read the command line's notation: one value for all ranks, or ``rank:value`` pairs, separated by commas.

        Args:
            vm: The text. Ranks may have several digits.

        Returns:
            One value, or a value for each rank that is named.

        Raises:
            ValueError: It is neither; the message names the part that is wrong.

        >>> Std.from_str("3")
        <Std.ALL: 3>
        >>> Std.from_str("0:3,1:0,12:1")
        {0: <Std.ALL: 3>, 1: <Std.NONE: 0>, 12: <Std.OUT: 1>}
        """
        values = {str(value.value): value for value in (cls.NONE, cls.OUT, cls.ERR, cls.ALL)}
        text = vm.strip()
        if text in values:
            return values[text]
        ranks: dict[int, Std] = {}
        for entry in text.split(","):
            rank, colon, value = entry.partition(":")
            if not (colon and rank.isascii() and rank.isdigit() and value in values):
                msg = (
                    f"{vm!r} is not a choice of streams: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                    f"or a value per local rank like '0:3,1:0'; the trouble is with {entry!r}"
                )
                raise ValueError(msg)
            if int(rank) in ranks:
                msg = f"{vm!r} names local rank {int(rank)} twice"
                raise ValueError(msg)
            ranks[int(rank)] = values[value]
        return ranks


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return one `Std` for each rank.

    Args:
        val_or_map: One value for all ranks, or a mapping; a rank that it leaves out gets ``Std.NONE``.
        local_world_size: How many ranks there are.

    >>> to_map({1: Std.OUT}, 2)
    {0: <Std.NONE: 0>, 1: <Std.OUT: 1>}
    """
    if isinstance(val_or_map, int):
        return dict.fromkeys(range(local_world_size), Std(val_or_map))
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


SYS_STREAM = ""
"""In place of a path: the stream stays the launcher's own."""


class LogsDest(Value):
    """The files of one group. A mapping holds paths by local rank; the path ``""`` is the launcher's own stream.

    Args:
        stdouts: Where each rank's stdout goes.
        stderrs: Where each rank's stderr goes.
        tee_stdouts: Those of ``stdouts`` that the console shows, too.
        tee_stderrs: Those of ``stderrs`` that the console shows, too.
        error_files: Where each rank writes how it failed. A file of an earlier run is removed before any
            worker starts.
        filtered_stdout: One file for the lines of all ranks' stdout that a filter selects.
        filtered_stderr: The same for stderr.
        hidden_stdouts: Those of ``stdouts`` that the console shows only when their rank fails.
        hidden_stderrs: Those of ``stderrs`` that the console shows only when their rank fails.
        timeline: The file that notes when each log file grew; ``""``: none.
        max_size: Bytes at which a log file is rotated; 0: never.
        keep: How many rotated files of each log are kept; 0: all.
        compress: Whether rotated files are compressed.
        terminals: The local ranks that have a terminal of their own, whose log file is that in ``stdouts``.
    """

    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    error_files: dict[int, str]
    filtered_stdout: str
    filtered_stderr: str
    hidden_stdouts: dict[int, str]
    hidden_stderrs: dict[int, str]
    timeline: str
    max_size: int
    keep: int
    compress: bool
    terminals: frozenset[int]

    def __init__(
        self,
        stdouts: dict[int, str] | None = None,
        stderrs: dict[int, str] | None = None,
        tee_stdouts: dict[int, str] | None = None,
        tee_stderrs: dict[int, str] | None = None,
        error_files: dict[int, str] | None = None,
        filtered_stdout: str = "",
        filtered_stderr: str = "",
        hidden_stdouts: dict[int, str] | None = None,
        hidden_stderrs: dict[int, str] | None = None,
        timeline: str = "",
        max_size: int = 0,
        *,
        keep: int = 0,
        compress: bool = False,
        terminals: Iterable[int] = (),
    ) -> None:
        self._store(
            stdouts=_names(stdouts),
            stderrs=_names(stderrs),
            tee_stdouts=_names(tee_stdouts),
            tee_stderrs=_names(tee_stderrs),
            error_files=_names(error_files),
            filtered_stdout=_name(filtered_stdout),
            filtered_stderr=_name(filtered_stderr),
            hidden_stdouts=_names(hidden_stdouts),
            hidden_stderrs=_names(hidden_stderrs),
            timeline=_name(timeline),
            max_size=int(max_size),
            keep=int(keep),
            compress=bool(compress),
            terminals=frozenset(terminals),
        )


def _names(files: Mapping[int, str] | None) -> dict[int, str]:
    return {rank: _name(path) for rank, path in (files or {}).items()}


def _name(path: str | os.PathLike[str]) -> str:
    """Return a path as plain text: a user's layout may give `pathlib.Path`, or a subclass of str."""
    return path if type(path) is str else "".join(os.fsdecode(path))


def checked_dest(logs: object, ranks: Iterable[int], specs: object) -> LogsDest:
    """Return what ``specs.reify`` returned if it names the files of every rank. Raises TypeError, ValueError."""
    who = f"logs_specs: {type(specs).__name__}.reify"
    if not isinstance(logs, LogsDest):
        msg = f"{who}: expected a LogsDest, got {logs!r}"
        raise TypeError(msg)
    wanted = set(ranks)
    for name, own in (
        ("stdouts", ", or '' for the launcher's own stream"),
        ("stderrs", ", or ''"),
        ("error_files", ""),
    ):
        missing = sorted(wanted - getattr(logs, name).keys())
        if missing:
            listed = ", ".join(map(str, missing))
            msg = f"{who}: {name} has no file for local rank {listed}; it takes one for each of 0 to {len(wanted) - 1}"
            raise ValueError(msg + own)
    for name in ("tee_stdouts", "tee_stderrs", "hidden_stdouts", "hidden_stderrs"):
        surplus = sorted(getattr(logs, name).keys() - wanted)
        if surplus:
            msg = f"{who}: {name} has local rank {', '.join(map(str, surplus))}; ranks are 0 to {len(wanted) - 1}"
            raise ValueError(msg)
    return logs


def make_empty(folder: str) -> None:
    """Make a new folder. Raises OSError; FileExistsError names what is there, and its owner."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        found = os.lstat(folder)
        what = files.kind(found.st_mode) or "a file"
        msg = f"{what} of uid {found.st_uid} is there already; each rank's folder is made by its launcher alone"
        raise FileExistsError(errno.EEXIST, msg, folder) from None


def missing_folders(logs: LogsDest) -> Iterator[Callable[[], None]]:
    """Yield functions that make the folders that a layout left out, one each: a busy ext4 takes up to 1 ms for one.

    They ignore OSError: without the folder there is no error file, and the group runs.
    """

    def make(folder: str) -> None:
        with contextlib.suppress(OSError):
            os.mkdir(folder)

    for rank, path in logs.error_files.items():
        if logs.stdouts[rank] in (SYS_STREAM, os.devnull) and logs.stderrs[rank] in (SYS_STREAM, os.devnull):
            yield functools.partial(make, os.path.dirname(path))
