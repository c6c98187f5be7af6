"""What happens to a run that is followed: its end, what becomes of its folder, and what appears in it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from phalanx._base import linux
from phalanx._base.loop import Loop
from phalanx._base.stderr import tell
from phalanx._runs.catalog import RunDir, look

GOES_ON = ("running", "unreadable", "unknown")
"""States of a run that has not ended, as far as is known. Without a record nobody will say: but of a run that is just
starting, it comes."""

AGAIN = 1.0
"""Seconds between two looks at a folder of another machine, or where there is no inotify to be had (inotify(7))."""

_NONE_LEFT = (errno.ENOSPC, errno.ENOMEM)
_APPEARS = linux.IN_CREATE | linux.IN_MOVED_TO
_GOES = linux.IN_DELETE | linux.IN_MOVED_FROM  # told of by the folder above: one that is open somewhere tells late


class Following:
    """Watches a run's folder. All calls come on the loop.

    Args:
        loop: What waits.
        found: The run.
        appeared: Is called with the run as it is now, first at once and then whenever something may have appeared in
            it. Returns the folders in which more may appear.
        again: Is called where files have to be looked at, for nobody says that they have grown.
        over: Is called once the run is over: its record says so, its launcher is gone, or its folder.
    """

    def __init__(
        self,
        loop: Loop,
        found: RunDir,
        appeared: Callable[[RunDir], list[str]],
        again: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        self.gone = False
        """Whether it is over because its folder is gone."""
        self._loop = loop
        self._path = found.path
        self._appeared = appeared
        self._again = again
        self._over = over
        self._ended = self._blind = False
        self._notify = self._launcher = -1

    def open(self) -> None:
        """Begin."""
        try:
            self._notify = linux.inotify()
        except OSError:
            self._look_on()
        else:
            self._loop.watch(self._notify, self._on_change)
        real = os.path.realpath(self._path)  # of a link, either can go
        for above in dict.fromkeys((os.path.dirname(self._path), os.path.dirname(real))):
            self._watch(above, _GOES)
        self._watch(self._path, _APPEARS)
        found = self._look()
        elsewhere = found.run is None or found.run.host != os.uname().nodename
        if elsewhere and not self._ended and linux.is_network_filesystem(self._path):
            tell(
                "phalanx: the logs are on a network file system, which does not tell what other machines write: "
                f"they are looked at every {AGAIN:g} s"
            )
            self._look_on()

    def close(self) -> None:
        """Give every descriptor back. Idempotent."""
        self._ended = True
        for fd in (self._notify, self._launcher):
            if fd >= 0:
                self._loop.forget(fd)
                os.close(fd)
        self._notify = self._launcher = -1

    def _watch(self, path: str, mask: int) -> None:
        if self._notify >= 0:
            try:
                linux.inotify_add(self._notify, path, mask)
            except OSError as error:
                if error.errno in _NONE_LEFT:  # else it is gone, which the next look sees
                    self._look_on()

    def _on_change(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._notify, 65536)
        self._look()

    def _look_on(self) -> None:
        """Look again and again: nobody tells us of all that happens."""
        if not self._blind:
            self._blind = True
            self._loop.after(AGAIN, self._look_again)

    def _look_again(self) -> None:
        if not self._ended:
            self._look()
            self._again()
            self._loop.after(AGAIN, self._look_again)

    def _look(self) -> RunDir:
        found = look(self._path)
        if self._launcher < 0 and found.run is not None and found.state == "running":
            self._watch_launcher(found.run.pid)
            found = look(self._path)  # its end before that, or its pid another's, shows by now
        for folder in self._appeared(found):
            self._watch(folder, _APPEARS)
        self._appeared(found)  # what has appeared in them just before they were watched
        self.gone = self.gone or not os.path.isdir(self._path)
        if not self._ended and (self.gone or found.state not in GOES_ON):
            self._ended = True
            self._over()
        return found

    def _watch_launcher(self, pid: int) -> None:
        with contextlib.suppress(OSError, OverflowError):  # of another machine, or gone; or no pid at all
            self._launcher = linux.pidfd_open(pid)
            self._loop.watch(self._launcher, self._on_launcher)

    def _on_launcher(self, _events: int) -> None:
        self._loop.forget(self._launcher)
        self._look()
