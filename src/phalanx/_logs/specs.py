"""Where the workers' output and evidence go. Owns the layout of log directories; opens and follows no file."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from abc import ABC, abstractmethod

from phalanx._base import files
from phalanx._base.frozen import Value
from phalanx._logs.std import Std, to_map

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

_PRIVATE = 0o700
_MOST_NAME = 240  # bytes of a run id in the name of its folder, which can have 255

SYS_STREAM = ""
"""In place of a path: the stream stays the launcher's own."""


class LogsDest(Value):
    """The files of one group. A mapping holds paths by local rank; the path ``""`` is the launcher's own stream.

    Args:
        stdouts: Where each rank's stdout goes.
        stderrs: Where each rank's stderr goes.
        tee_stdouts: Those of ``stdouts`` that the console shows, too.
        tee_stderrs: Those of ``stderrs`` that the console shows, too.
        error_files: Where each rank leaves its evidence when it fails. A file of an earlier run is removed before any
            worker starts.
        filtered_stdout: One file for the lines of all ranks' stdout that a filter selects.
        filtered_stderr: The same for stderr.
        hidden_stdouts: Those of ``stdouts`` that the console shows only when their rank fails.
        hidden_stderrs: Those of ``stderrs`` that the console shows only when their rank fails.
        timeline: The file that says when each stream was written to; ``""``: none.
        max_size: Bytes at which a log file is rotated; 0: never.
        keep: How many rotated files of each log are kept; 0: all.
        compress: Whether rotated files are compressed.
    """

    __slots__ = (  # noqa: RUF023 - the order is that of the arguments
        "stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files", "filtered_stdout", "filtered_stderr",
        "hidden_stdouts", "hidden_stderrs", "timeline", "max_size", "keep", "compress",
    )  # fmt: skip

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
        )


def _names(files: Mapping[int, str] | None) -> dict[int, str]:
    return {rank: _name(path) for rank, path in (files or {}).items()}


def _folder(path: object) -> str:
    """The path of a folder. Raises TypeError, ValueError."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        msg = f"log_dir: expected the path of a folder, got {path!r}"
        raise TypeError(msg)
    if not text or "\0" in text:
        msg = f"log_dir: {text!r} cannot be the path of a folder"
        raise ValueError(msg)
    return text


def _streams(name: str, given: Any) -> Std | dict[int, Std]:
    """Streams of all ranks, or by rank. Raises TypeError, ValueError."""
    by_rank = hasattr(given, "items")
    streams = {}
    for rank, value in given.items() if by_rank else ((0, given),):
        if not isinstance(value, int) or not 0 <= value <= Std.ALL:
            right = f"rank {rank}: expected a Std" if by_rank else "expected a Std, or a mapping from local rank to one"
            like = "; Std.from_str reads the command line's notation" if isinstance(value, str) else ""
            msg = f"{name}: {right}, got {value!r}{like}"
            raise (ValueError if isinstance(value, int) else TypeError)(msg)
        streams[rank] = Std(value)
    return streams if by_rank else streams[0]


def _name_of(run_id: str) -> str:
    """What a run's folder is called after: no path, and no longer than names can be."""
    name = run_id.replace("/", "_")[:_MOST_NAME]
    while len(os.fsencode(name)) > _MOST_NAME:
        name = name[:-1]
    return name


def _name(path: str | os.PathLike[str]) -> str:
    """A path as plain text: layouts of somebody's own have `pathlib.Path`, or a subclass of str."""
    return path if type(path) is str else "".join(os.fsdecode(path))


def checked(logs: object, ranks: Iterable[int], specs: object) -> LogsDest:
    """What somebody's layout has named, if it names the files of every rank. Raises TypeError, ValueError."""
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


class LogsSpecs(ABC):
    """What is wanted of a group's logs; `reify` turns it into files. Subclass it for a layout of your own.

    Args:
        log_dir: The folder for everything, or None for a new temporary one.
        redirects: Streams that go to files only.
        tee: Streams that go to files and to the console.
        local_ranks_filter: The local ranks whose output the console shows; None for all. The files hold everything, and
            of a rank that fails the last lines are shown regardless.
        max_size: Bytes; a log file that would grow beyond is set aside as ``stdout.log.1``, ``stdout.log.2``, … (the
            oldest is 1), at the end of a line. None for no bound.
        keep: With ``max_size``: how many that were set aside are kept of each log; older ones are removed. None: all.
        compress: With ``max_size``: whether they are compressed, in the background, to ``stdout.log.1.gz``, ….
    """

    folders_can_wait = False
    """Set by a group's start, which has `missing_folders` made once the workers are on their way."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | Mapping[int, Std] = Std.NONE,
        tee: Std | Mapping[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
        *,
        max_size: int | None = None,
        keep: int | None = None,
        compress: bool = False,
    ) -> None:
        if max_size is not None and max_size < 1:
            msg = f"max_size: expected a number of bytes, 1 or more, got {max_size!r}"
            raise ValueError(msg)
        if keep is not None and keep < 1:
            msg = f"keep: expected a number of files, 1 or more, got {keep!r}"
            raise ValueError(msg)
        for name, given in (("keep", keep is not None), ("compress", compress)):
            if given and max_size is None:
                msg = f"{name}: without max_size no file is set aside that this could be about; give that, too"
                raise ValueError(msg)
        self._max_size, self._keep, self._compress = max_size or 0, keep or 0, compress
        self._root_log_dir = None if log_dir is None else _folder(log_dir)
        self._redirects = _streams("redirects", redirects)
        self._tee = _streams("tee", tee)
        self._local_ranks_filter = local_ranks_filter

    @property
    def root_log_dir(self) -> str | None:
        """The folder given as ``log_dir``."""
        return self._root_log_dir

    @abstractmethod
    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Create the folders for the ranks in ``envs`` and name the files. Raises OSError."""

    def tidy(self, logs: LogsDest) -> None:  # noqa: B027 - most layouts have nothing to tidy
        """Remove what nobody will look for. Called when the group of ``logs`` has ended; must not raise."""


class DefaultLogsSpecs(LogsSpecs):
    """Log files in one folder for each run, attempt and rank.

    The layout is ``<log_dir>/<run id>_<unique>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}``.

    Run id and attempt are ``TORCHELASTIC_RUN_ID`` and ``TORCHELASTIC_RESTART_COUNT`` of the workers' environments.
    Missing folders are created. Reified for another attempt (a restart), the same instance stays in its run's folder;
    for an attempt that has its folder already, it is another group's, which gets a run's folder of its own. A
    temporary folder in which no file is left when the group has ended (nothing redirected, nobody failed) is removed.

    With ``log_dir=os.devnull`` nothing is kept: what is redirected is dropped, other streams are the launcher's own,
    also those that are teed, and the evidence of a failure goes with the group, once it is in the result.

    Args:
        log_dir: The folder for all runs; None or "" for a new temporary one.
        redirects: See `LogsSpecs`.
        tee: See `LogsSpecs`.
        local_ranks_filter: See `LogsSpecs`.
        max_size: See `LogsSpecs`.
        keep: See `LogsSpecs`.
        compress: See `LogsSpecs`.
        run_id: What the run is called where ``TORCHELASTIC_RUN_ID`` does not say it; default "run".
        mode: Permissions of the run's folder and of those in it, like 0o750; a set-group-ID bit that they inherit
            stays. None: nobody else can enter the run's folder (0o700). Files have what the umask leaves of 0o666.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | Mapping[int, Std] = Std.NONE,
        tee: Std | Mapping[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
        *,
        max_size: int | None = None,
        keep: int | None = None,
        compress: bool = False,
        mode: int | None = None,
        run_id: str = "",
    ) -> None:
        log_dir = log_dir or None  # "" is a temporary folder, too
        super().__init__(log_dir, redirects, tee, local_ranks_filter, max_size=max_size, keep=keep, compress=compress)
        self._mode = None if mode is None else checked_mode(mode)
        if not self.is_kept and (max_size or mode is not None):
            msg = f"log_dir: {os.devnull} keeps no logs that {'max_size' if max_size else 'mode'} could be about"
            raise ValueError(msg)
        if self.is_kept and log_dir is not None and os.path.lexists(log_dir) and not os.path.isdir(log_dir):
            msg = f"log_dir: {os.fspath(log_dir)!r} is not a folder"
            raise NotADirectoryError(msg)
        self.run_id = run_id
        self._run_log_dir: str | None = None
        self._attempts: set[str] = set()  # that have a folder there

    @property
    def run_log_dir(self) -> str | None:
        """The folder of the run that `reify` has last made it for; None before."""
        return self._run_log_dir

    @property
    def is_kept(self) -> bool:
        """Whether there are logs at all: ``log_dir`` is not ``os.devnull``."""
        return self._root_log_dir != os.devnull

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`."""
        if not self.is_kept:
            return _lay_out_nothing(len(envs), self._redirects, self._tee, self._local_ranks_filter)
        any_env = envs[min(envs)] if envs else {}
        run_id = any_env.get("TORCHELASTIC_RUN_ID") or self.run_id or "run"
        attempt = any_env.get("TORCHELASTIC_RESTART_COUNT") or "0"
        made: list[str] = []
        if self._run_log_dir is None or attempt in self._attempts:
            made = self._make_run_dir(_name_of(run_id))
            self._run_log_dir = made[-1]
            self._attempts = set()
        elif not os.path.lexists(self._run_log_dir):  # somebody has tidied up since the last attempt
            made = self._make_run_dir_again(self._run_log_dir)
        folder = os.path.join(self._run_log_dir, f"attempt_{attempt}")
        files.make_folder(folder)
        self._attempts.add(attempt)
        can_wait = self.folders_can_wait and self._mode is None
        logs = lay_out(folder, len(envs), self._redirects, self._tee, self._local_ranks_filter, can_wait)
        made += [folder, *map(os.path.dirname, logs.error_files.values())]
        self._open_up(reversed(made))  # the outermost last: until then, nobody else gets at those in it
        bounds: dict[str, Any] = {"max_size": self._max_size, "keep": self._keep, "compress": self._compress}
        return logs.replace(timeline=os.path.join(folder, "timeline"), **bounds)

    def tidy(self, logs: LogsDest) -> None:
        """See `LogsSpecs.tidy`."""
        if not self.is_kept:
            import shutil  # tempfile has loaded it

            for path in list(logs.error_files.values())[:1]:
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        if self._root_log_dir is not None or not logs.timeline:  # not reified
            return
        attempt = os.path.dirname(logs.timeline)
        run = os.path.dirname(attempt)
        try:
            for folder in (*map(os.path.dirname, logs.error_files.values()), attempt, run, os.path.dirname(run)):
                with contextlib.suppress(FileNotFoundError):  # not made, for want of a worker
                    os.rmdir(folder)
        except OSError:  # something is there to be read
            return

    def _make_run_dir(self, run_id: str) -> list[str]:
        """Make the run's folder, for us alone. Returns the folders that are ours to open up, the run's last."""
        import tempfile

        root = self._root_log_dir
        if root is None:
            root = tempfile.mkdtemp(prefix="phalanx_")
            return [root, tempfile.mkdtemp(prefix=f"{run_id}_", dir=root)]
        os.makedirs(root, exist_ok=True)
        return [tempfile.mkdtemp(prefix=f"{run_id}_", dir=os.path.abspath(root))]

    def _make_run_dir_again(self, run_dir: str) -> list[str]:
        """Make the run's folder where it was; by now, others know its name. Returns as `_make_run_dir`."""
        root = os.path.dirname(run_dir)
        made = [run_dir]
        if self._root_log_dir is not None:
            os.makedirs(root, exist_ok=True)
        elif files.make_folder(root, _PRIVATE):
            made = [root, run_dir]
        os.mkdir(run_dir, _PRIVATE)
        return made

    def _open_up(self, folders: Iterable[str]) -> None:
        """Give folders the permissions that were asked for, whatever the umask is."""
        if self._mode is not None:
            for folder in folders:
                os.chmod(folder, self._mode | (os.stat(folder).st_mode & stat.S_ISGID))


def checked_mode(mode: int) -> int:
    """Permissions of folders that their owner can use. Raises ValueError.

    >>> checked_mode(750)
    Traceback (most recent call last):
    ValueError: mode: expected permissions of folders, like 0o750, in which the owner has all, got 0o1356
    """
    if mode & 0o700 != 0o700 or mode & ~0o3777:  # noqa: PLR2004 - rwx of the owner; all but set-user-ID
        msg = f"mode: expected permissions of folders, like 0o750, in which the owner has all, got {mode:#o}"
        raise ValueError(msg)
    return mode


def lay_out(
    folder: str,
    nprocs: int,
    redirects: Std | Mapping[int, Std],
    tee: Std | Mapping[int, Std],
    local_ranks_filter: set[int] | None = None,
    folders_can_wait: bool = False,  # noqa: FBT001, FBT002 - private to this file
) -> LogsDest:
    """Make ``<folder>/<rank>/`` for every rank, and name the files in it. Raises OSError.

    With ``folders_can_wait``, only for the ranks that have a stream in a file: the others are `missing_folders`.
    """
    redirected, teed = to_map(redirects, nprocs), to_map(tee, nprocs)
    streams: dict[Std, dict[int, str]] = {Std.OUT: {}, Std.ERR: {}}
    tees: dict[Std, dict[int, str]] = {Std.OUT: {}, Std.ERR: {}}
    hidden: dict[Std, dict[int, str]] = {Std.OUT: {}, Std.ERR: {}}
    errors = {}
    for rank in range(nprocs):
        rank_dir = os.path.join(folder, str(rank))
        if redirected[rank] | teed[rank] or not folders_can_wait:
            _make_empty(rank_dir)
        shown = local_ranks_filter is None or rank in local_ranks_filter
        for stream, name in ((Std.OUT, "stdout.log"), (Std.ERR, "stderr.log")):
            path = os.path.join(rank_dir, name)
            if stream in redirected[rank] | teed[rank]:
                streams[stream][rank] = path
                if stream in teed[rank]:
                    (tees if shown else hidden)[stream][rank] = path
            else:
                streams[stream][rank] = SYS_STREAM if shown else os.devnull
        errors[rank] = os.path.join(rank_dir, "error.json")
    return LogsDest(
        streams[Std.OUT],
        streams[Std.ERR],
        tees[Std.OUT],
        tees[Std.ERR],
        errors,
        os.path.join(folder, "filtered_stdout.log"),
        os.path.join(folder, "filtered_stderr.log"),
        hidden[Std.OUT],
        hidden[Std.ERR],
    )


def _lay_out_nothing(
    nprocs: int, redirects: Std | Mapping[int, Std], tee: Std | Mapping[int, Std], shown: set[int] | None
) -> LogsDest:
    """Streams in no file, and evidence side by side in a temporary folder. Raises OSError."""
    import tempfile

    dropped, teed = to_map(redirects, nprocs), to_map(tee, nprocs)

    def stream(rank: int, kind: Std) -> str:
        is_shown = (shown is None or rank in shown) and (kind in teed[rank] or kind not in dropped[rank])
        return SYS_STREAM if is_shown else os.devnull

    ranks = range(nprocs)
    folder = tempfile.mkdtemp(prefix="phalanx_")
    return LogsDest(
        {rank: stream(rank, Std.OUT) for rank in ranks},
        {rank: stream(rank, Std.ERR) for rank in ranks},
        error_files={rank: os.path.join(folder, f"{rank}.json") for rank in ranks},
    )


def _make_empty(folder: str) -> None:
    """Make a folder that is not there. Raises OSError: what is there already, and whose."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        found = os.lstat(folder)
        what = files.kind(found.st_mode) or "a file"
        msg = f"{what} of uid {found.st_uid} is there already; each rank's folder is made by its launcher alone"
        raise FileExistsError(errno.EEXIST, msg, folder) from None


def missing_folders(logs: LogsDest) -> Iterator[Callable[[], None]]:
    """What makes those that `lay_out` has left for later, one by one: a folder costs a busy ext4 up to a millisecond.

    What cannot be made will not take evidence either, and is no error.
    """

    def make(folder: str) -> None:
        with contextlib.suppress(OSError):
            os.mkdir(folder)

    for rank, path in logs.error_files.items():
        if logs.stdouts[rank] in (SYS_STREAM, os.devnull) and logs.stderrs[rank] in (SYS_STREAM, os.devnull):
            yield functools.partial(make, os.path.dirname(path))


class FolderLogsSpecs(LogsSpecs):
    """The older layout, ``<folder>/<local rank>/…`` in an existing, empty folder."""

    def __init__(self, folder: str, redirects: Std | Mapping[int, Std], tee: Std | Mapping[int, Std]) -> None:
        super().__init__(folder, redirects, tee)
        self._folder = folder

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`. Raises FileNotFoundError, NotADirectoryError, or RuntimeError when it is not empty."""
        folder = self._folder
        if not os.path.lexists(folder):
            msg = f"log_dir: {folder!r} does not exist"
            raise FileNotFoundError(msg)
        if not os.path.isdir(folder):
            msg = f"log_dir: {folder!r} is not a folder"
            raise NotADirectoryError(msg)
        found = sorted(os.listdir(folder))
        if found:
            msg = f"log_dir: {folder!r} is not empty; it holds {', '.join(found[:3])}{' …' if len(found) > 3 else ''}"  # noqa: PLR2004 - a few to recognise it by
            raise RuntimeError(msg)
        # Where others may make folders too, ours are there before anything of theirs can be.
        can_wait = self.folders_can_wait and not files.is_shared(os.stat(folder))
        return lay_out(os.path.abspath(folder), len(envs), self._redirects, self._tee, None, can_wait)
