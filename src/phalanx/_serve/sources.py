"""What the pages are made of: the folder of a run, and the folders that hold runs.

Owns when either counts as changed. What is on a page, `phalanx._page` says.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Hashable, Iterator, Sequence
from http import HTTPStatus
from typing import Protocol
from urllib.parse import quote

from phalanx._base import files
from phalanx._base.text import one_line
from phalanx._base.tty import plain
from phalanx._page.facts import gather
from phalanx._page.page import ListedRun, Live, render, render_list
from phalanx._page.samples import FILE as SAMPLES
from phalanx._runs.catalog import REMOVED, RunDir, find, is_run, look
from phalanx._runs.record import FILE, state_now

MOST_LISTED = 1000
"""Runs in the list: the newest."""

_TICK = 10  # seconds after which the page of a run that goes on counts as changed: its times have
_MOST_NAME = 255  # bytes, see NAME_MAX in limits.h
_TAIL = 256 << 10  # bytes of the samples: the last one of some thousand ranks


class Source(Protocol):
    """What a page is made of."""

    def state(self) -> Hashable:
        """Return what changes when the page does. Raises OSError: there is nothing any more."""

    def make(self, version: int) -> str:
        """Return the page. Raises NoPageError, OSError."""


class NoPageError(Exception):
    """There is no page, or none for this user. ``status`` and ``str()`` are the answer."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class RunSource:
    """A run's folder.

    Args:
        path: The folder.
        controls: Whether its page has buttons.
    """

    def __init__(self, path: str, *, controls: bool) -> None:
        self.path = path
        self._controls = controls
        self._record: Hashable = None
        self._found: RunDir | None = None

    def state(self) -> Hashable:
        """See `Source`. Of earlier attempts, and of what a rank has written to other files, nothing is noticed."""
        if os.path.islink(self.path):  # in its place: no page is of what that leads to
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        top = dict(_stats(self.path))
        if self._found is None or self._record != top.get(FILE):
            self._record, self._found = top.get(FILE), look(self.path)
        run = self._found.run
        state = self._found.state if run is None else state_now(run)
        attempts = [
            int(number) for name in top if (number := name.removeprefix("attempt_")) != name and _is_whole(number)
        ]
        folder = os.path.join(self.path, f"attempt_{max(attempts)}") if attempts else self.path
        below = []
        with contextlib.suppress(OSError):  # pruned meanwhile
            for name, _ in top.items() if folder == self.path else _stats(folder):
                if _is_whole(name):
                    with contextlib.suppress(OSError):
                        below.append((name, *_stats(os.path.join(folder, name))))
            below.append(("", *_stats(folder)))
        return state, *top.items(), *below, time.time() // _TICK if state == "running" else 0

    def make(self, version: int) -> str:
        """See `Source`."""
        found = look(self.path)
        if os.path.islink(self.path) or not is_run(self.path):
            raise NoPageError(HTTPStatus.NOT_FOUND, f"The run {found.name} is gone: its folder was removed.")
        if not found.is_ours and (link := found.strange_link()):
            raise NoPageError(HTTPStatus.FORBIDDEN, f"{link} is a link of another user, which is not followed.")
        at = f"/runs/{quote(os.fsencode(found.name))}"
        return render(gather(found), Live(f"{at}/events", "/", f"{at}/control" if self._controls else "", version))


class ListSource:
    """The folders that hold runs."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots
        self._running: list[RunDir] = []

    def state(self) -> Hashable:
        """See `Source`."""
        seen: list[Hashable] = []
        for root in self._roots:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
                seen += [
                    (entry.path, _stat(os.path.join(entry.path, FILE)), _stat(entry.path))
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                ]
        running = [
            (state_now(found.run), _stat(os.path.join(found.path, SAMPLES)))
            for found in self._running
            if found.run is not None
        ]
        return *seen, *running, time.time() // _TICK if running else 0

    def make(self, version: int) -> str:
        """See `Source`."""
        found = find(self._roots)
        self._running = [one for one in found if one.state == "running"]
        where = " and ".join(self._roots)
        if len(found) > MOST_LISTED:
            where += f", the newest {MOST_LISTED:,} of {len(found):,}"
        rows = [_listed(one) for one in found[:MOST_LISTED]]
        return render_list(rows, Live("/events", "/", "", version), plain(where))


def _listed(found: RunDir) -> ListedRun:
    run = found.run
    url = f"/runs/{quote(os.fsencode(found.name))}"
    if run is None:
        name, why = _shown(found.name), _shown(found.problem)
        return ListedRun(name, url, found.state, found.started, None, name, 0, 0, None, why)
    last = run.attempts[-1] if run.attempts else None
    return ListedRun(
        name=_shown(found.name),
        url=url,
        state=found.state,
        started=run.started,
        ended=run.ended,
        script=_shown(os.path.basename(run.name)),
        ranks=run.nprocs,
        attempt=0 if last is None else last.number,
        step=None if last is None else _last_step(found.path, last.number) if found.state == "running" else last.step,
        cause=_shown(run.cause),
    )


def _shown(text: str) -> str:
    return plain(one_line(text))


def _stats(folder: str) -> Iterator[tuple[str, Hashable]]:
    """Yield the entries of a folder, and when and how large each was last. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield entry.name, (found.st_mtime_ns, found.st_size, found.st_ino)


def _stat(path: str) -> Hashable:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _is_whole(text: str) -> bool:
    return text.isdecimal() and text.isascii()


def find_run(roots: Sequence[str], name: str) -> str:
    """Return the folder of the run of this very name; "": there is none. A link is none."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith(REMOVED):
        return ""
    if len(name.encode("utf-8", "surrogateescape")) > _MOST_NAME:
        return ""
    for root in roots:
        path = os.path.join(root, name)
        if not os.path.islink(path) and is_run(path):
            return path
    return ""


def _last_step(folder: str, attempt: int) -> int | None:
    """Return the highest step of the ranks of an attempt in the last sample of a run; None: not all have one."""
    path = os.path.join(folder, SAMPLES)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        data = files.read(path, _TAIL, max(0, os.stat(path).st_size - _TAIL))
        sample = json.loads(data[: data.rindex(b"\n")].rpartition(b"\n")[2])
        if sample["attempt"] == attempt:
            return max(int(step) for step in sample["step"])
    return None
