"""What a user wants of a group's log files: `LogsSpecs`, and the two layouts that come with Phalanx."""

from __future__ import annotations

import contextlib
import os
import stat
from abc import ABC, abstractmethod

from phalanx._base import files
from phalanx._logs import temporary
from phalanx._logs.layout import SYS_STREAM, LogsDest, Std, make_empty, to_map

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Any

LEAST_ATTEMPTS = 5
"""Attempts whose folders are kept at least: the console may be so many behind, see `phalanx._run.group_team`."""

_PRIVATE = 0o700
_MOST_NAME = 240  # bytes of a run id in the name of its folder, which can have 255


def _folder(path: object) -> str:
    """Return the path of a folder as text. Raises TypeError, ValueError."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        msg = f"log_dir: expected the path of a folder, got {path!r}"
        raise TypeError(msg)
    if not text or "\0" in text:
        msg = f"log_dir: {text!r} cannot be the path of a folder"
        raise ValueError(msg)
    return text


def _streams(name: str, given: Any) -> Std | dict[int, Std]:
    """Return the given streams: of all ranks, or by rank. Raises TypeError, ValueError."""
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


def _check_number(name: str, given: Any, what: str, least: int = 1) -> None:
    """Refuse what is no number of so many or more; None is none. Raises TypeError, ValueError."""
    is_whole = hasattr(given, "__index__")
    if given is not None and not (is_whole and given >= least):
        msg = f"{name}: expected a number of {what}, {least} or more, got {given!r}"
        raise (ValueError if is_whole else TypeError)(msg)


def _name_of(run_id: str) -> str:
    """Turn a run id into the beginning of a folder's name: without slashes, and not too long."""
    name = run_id.replace("/", "_")[:_MOST_NAME]
    while len(os.fsencode(name)) > _MOST_NAME:
        name = name[:-1]
    return name


def _temporary() -> str:
    import tempfile

    return tempfile.gettempdir()


class LogsSpecs(ABC):
    """What a user wants of a group's log files; `reify` names them. Subclass it for a layout of your own.

    Args:
        log_dir: The folder for everything, or None for a new temporary one.
        redirects: Streams that go to files only.
        tee: Streams that go to files and to the console.
        local_ranks_filter: The local ranks whose output the console shows; None for all. The files hold everything, and
            the last lines of a rank that fails are shown in any case.
        max_size: Bytes. A log file that would grow beyond is rotated at the end of a line: it becomes ``stdout.log.1``,
            the next one ``stdout.log.2``, …. None for no bound.
        keep: With ``max_size``: how many rotated files of each log are kept; older ones are removed. None: all.
        compress: With ``max_size``: whether rotated files are compressed in the background, to ``stdout.log.1.gz``, ….
    """

    folders_can_wait = False
    """Set by a group's start, which makes the `missing_folders` after the workers have been ordered."""

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
        _check_number("max_size", max_size, "bytes")
        _check_number("keep", keep, "files")
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
        """Remove files that nobody will read. Called when the group of ``logs`` has ended; must not raise."""

    def _lay_out(self, folder: str, ranks: Collection[int], *, can_wait: bool) -> LogsDest:
        """Make ``<folder>/<rank>/`` for each of the local ``ranks``, and name the files in it. Raises OSError.

        If folders ``can_wait``, those of ranks without a stream in a file are not made: see `missing_folders`.
        """
        redirects, tee = self._by_rank(ranks)
        for rank in sorted(ranks):
            if redirects[rank] | tee[rank] or not can_wait:
                make_empty(os.path.join(folder, str(rank)))
        return self._name_files(folder, ranks)

    def _name_files(self, folder: str, ranks: Collection[int]) -> LogsDest:
        """Name the files in ``<folder>/<rank>/`` for each of the local ``ranks``."""
        redirects, tee = self._by_rank(ranks)
        files_of: dict[str, Any] = {}
        for stream, name in ((Std.OUT, "stdout"), (Std.ERR, "stderr")):
            paths, tees, hidden = [files_of.setdefault(f"{kind}{name}s", {}) for kind in ("", "tee_", "hidden_")]
            for rank in sorted(ranks):
                paths[rank] = os.path.join(folder, str(rank), f"{name}.log")
                if stream in tee[rank]:
                    (tees if self._shows(rank) else hidden)[rank] = paths[rank]
                elif stream not in redirects[rank]:
                    paths[rank] = SYS_STREAM if self._shows(rank) else os.devnull
        return LogsDest(
            **files_of,
            error_files={rank: os.path.join(folder, str(rank), "error.json") for rank in sorted(ranks)},
            filtered_stdout=os.path.join(folder, "filtered_stdout.log"),
            filtered_stderr=os.path.join(folder, "filtered_stderr.log"),
        )

    def _name_nothing(self, folder: str, ranks: Collection[int]) -> LogsDest:
        """Name no log files, and error files side by side in ``folder``."""
        redirects, tee = self._by_rank(ranks)

        def stream(kind: Std) -> dict[int, str]:
            shown = [rank for rank in ranks if self._shows(rank) and (kind in tee[rank] or kind not in redirects[rank])]
            return {rank: SYS_STREAM if rank in shown else os.devnull for rank in ranks}

        errors = {rank: os.path.join(folder, f"{rank}.json") for rank in ranks}
        return LogsDest(stream(Std.OUT), stream(Std.ERR), error_files=errors)

    def _by_rank(self, ranks: Collection[int]) -> tuple[dict[int, Std], dict[int, Std]]:
        """Return the streams that are redirected, and those that are teed."""
        count = max(ranks, default=0) + 1
        return to_map(self._redirects, count), to_map(self._tee, count)

    def _shows(self, rank: int) -> bool:
        return self._local_ranks_filter is None or rank in self._local_ranks_filter


class DefaultLogsSpecs(LogsSpecs):
    """Log files in one folder for each run, attempt and rank.

    The layout is ``<log_dir>/<run id>_<unique>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}``.

    Run id and attempt are ``TORCHELASTIC_RUN_ID`` and ``TORCHELASTIC_RESTART_COUNT`` of the workers' environments.
    Missing folders are created. If the same instance is reified again for another attempt (a restart), the attempt's
    folder is made in the same run's folder; for an attempt that has its folder already, a new run's folder is made. A
    temporary folder is removed with the group if no file is in it, but for error files of a group that has succeeded.

    With ``log_dir=os.devnull`` nothing is kept: redirected output is dropped, other streams are the launcher's own
    (also those that are teed), and error files are removed once the result holds what they contain.

    Args:
        log_dir: The folder for all runs; None or "" for a new temporary one.
        redirects: See `LogsSpecs`.
        tee: See `LogsSpecs`.
        local_ranks_filter: See `LogsSpecs`.
        max_size: See `LogsSpecs`.
        keep: See `LogsSpecs`.
        compress: See `LogsSpecs`.
        keep_attempts: The folders of the first attempt and of the last so many (5 or more) are kept, the one that
            begins among them; those between are removed as an attempt begins. None: all are kept.
        run_id: The run's id if ``TORCHELASTIC_RUN_ID`` is not set; default "run".
        mode: Permissions of the run's folder and the folders in it, like 0o750; a set-group-ID bit that they inherit
            stays. None: nobody else can enter the run's folder (0o700). Files get 0o666 less the umask.
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
        keep_attempts: int | None = None,
        mode: int | None = None,
        run_id: str = "",
    ) -> None:
        log_dir = log_dir or None  # "" stands for a temporary folder, too
        super().__init__(log_dir, redirects, tee, local_ranks_filter, max_size=max_size, keep=keep, compress=compress)
        _check_number("keep_attempts", keep_attempts, "attempts", LEAST_ATTEMPTS)
        self._keep_attempts = keep_attempts
        self._mode = None if mode is None else checked_mode(mode)
        for name, is_given in (
            ("max_size", max_size), ("mode", mode is not None), ("keep_attempts", keep_attempts is not None)
        ):  # fmt: skip
            if is_given and not self.is_kept:
                msg = f"log_dir: {os.devnull} keeps no logs that {name} could be about"
                raise ValueError(msg)
        if self.is_kept and log_dir is not None and os.path.lexists(log_dir) and not os.path.isdir(log_dir):
            msg = f"log_dir: {os.fspath(log_dir)!r} is not a folder"
            raise NotADirectoryError(msg)
        self.run_id = run_id
        self._run_log_dir: str | None = None
        self._attempts: list[str] = []  # those that have a folder in it

    @property
    def run_log_dir(self) -> str | None:
        """The run's folder that `reify` made last; None before."""
        return self._run_log_dir

    @property
    def is_kept(self) -> bool:
        """Whether there are logs at all: ``log_dir`` is not ``os.devnull``."""
        return self._root_log_dir != os.devnull

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`."""
        if not self.is_kept:
            try:
                folder = temporary.make()
            except OSError:  # workers send their evidence where they cannot write it
                folder = os.path.join(os.devnull, "phalanx")
            return self._name_nothing(folder, envs)
        any_env = envs[min(envs)] if envs else {}
        run_id = any_env.get("TORCHELASTIC_RUN_ID") or self.run_id or "run"
        attempt = any_env.get("TORCHELASTIC_RESTART_COUNT") or "0"
        made: list[str] = []
        if self._run_log_dir is None or attempt in self._attempts:
            made = self._make_run_dir(run_id)
            self._run_log_dir = made[-1]
            self._attempts = []
        elif not os.path.lexists(self._run_log_dir):  # removed since the last attempt
            made = self._make_run_dir_again(self._run_log_dir)
        folder = os.path.join(self._run_log_dir, f"attempt_{attempt}")
        files.make_folder(folder)
        self._attempts.append(attempt)
        self._remove_old(self._run_log_dir)
        logs = self._lay_out(folder, envs, can_wait=self.folders_can_wait and self._mode is None)
        made += [folder, *map(os.path.dirname, logs.error_files.values())]
        self._set_mode(reversed(made))  # the outermost last: until then, nobody else can reach those in it
        bounds: dict[str, Any] = {"max_size": self._max_size, "keep": self._keep, "compress": self._compress}
        return logs.replace(timeline=os.path.join(folder, "timeline"), **bounds)

    def preview(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Name the files as the first `reify` of ``envs`` would, and make none. ``*``: what makes a name unique."""
        if not self.is_kept:
            return self._name_nothing(os.path.join(_temporary(), f"{temporary.PREFIX}*"), envs)
        run_id = envs[0].get("TORCHELASTIC_RUN_ID") or self.run_id or "run"
        root = self._root_log_dir or os.path.join(_temporary(), f"{temporary.PREFIX}*")
        attempt = envs[0].get("TORCHELASTIC_RESTART_COUNT") or "0"
        return self._name_files(
            os.path.join(os.path.abspath(root), f"{_name_of(run_id)}_*", f"attempt_{attempt}"), envs
        )

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
            for folder in (*map(os.path.dirname, logs.error_files.values()), attempt, run):
                with contextlib.suppress(FileNotFoundError):  # not made, for want of a worker
                    os.rmdir(folder)
            temporary.remove_empty(os.path.dirname(run))
        except OSError:  # something is there to be read
            return

    def _remove_old(self, run_dir: str) -> None:
        """Remove the folders of attempts but for the first and the last ones. What cannot be removed stays."""
        if self._keep_attempts is None:
            return
        import shutil

        for attempt in self._attempts[1 : -self._keep_attempts]:
            self._attempts.remove(attempt)
            shutil.rmtree(os.path.join(run_dir, f"attempt_{attempt}"), ignore_errors=True)

    def _make_run_dir(self, run_id: str) -> list[str]:
        """Make the run's folder with mode 0o700. Returns the new folders for `_set_mode`, the run's last."""
        import tempfile

        root = self._root_log_dir
        if root is None:
            root = temporary.make()
            return [root, tempfile.mkdtemp(prefix=f"{_name_of(run_id)}_", dir=root)]
        os.makedirs(root, exist_ok=True)
        return [tempfile.mkdtemp(prefix=f"{_name_of(run_id)}_", dir=os.path.abspath(root))]

    def _make_run_dir_again(self, run_dir: str) -> list[str]:
        """Make the run's folder again under its old name, which others know by now. Returns as `_make_run_dir`."""
        root = os.path.dirname(run_dir)
        made = [run_dir]
        if self._root_log_dir is not None:
            os.makedirs(root, exist_ok=True)
        elif files.make_folder(root, _PRIVATE):
            temporary.mark(root)
            made = [root, run_dir]
        os.mkdir(run_dir, _PRIVATE)
        return made

    def _set_mode(self, folders: Iterable[str]) -> None:
        """Give folders the permissions ``mode``, whatever the umask is."""
        if self._mode is not None:
            for folder in folders:
                os.chmod(folder, self._mode | (os.stat(folder).st_mode & stat.S_ISGID))


def checked_mode(mode: int) -> int:
    """Return permissions if a folder's owner has all of his with them. Raises ValueError.

    >>> checked_mode(750)
    Traceback (most recent call last):
    ValueError: mode: expected permissions of folders, like 0o750, in which the owner has all, got 0o1356
    """
    if mode & 0o700 != 0o700 or mode & ~0o3777:  # noqa: PLR2004 - rwx of the owner; all but set-user-ID
        msg = f"mode: expected permissions of folders, like 0o750, in which the owner has all, got {mode:#o}"
        raise ValueError(msg)
    return mode


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
        # Where other users may make folders, ours must not come later: theirs could be there first.
        can_wait = self.folders_can_wait and not files.is_shared(os.stat(folder))
        return self._lay_out(os.path.abspath(folder), envs, can_wait=can_wait)
