"""The files of a run's attempts, and their way to the console: merged in the order of time, then followed.

Owns also what happens to a run that is followed: its end, what becomes of its folder, and what appears in it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterator

import click

from phalanx._base import clock, files, linux
from phalanx._base.loop import Loop
from phalanx._base.stderr import tell
from phalanx._base.tty import printable
from phalanx._logs.follower import Follower
from phalanx._logs.group_pump import open_view, target_of
from phalanx._logs.lines import Source
from phalanx._logs.merge import merge
from phalanx._logs.prefixes import Prefixes
from phalanx._logs.pump import Pump
from phalanx._logs.rotated import rotated_files
from phalanx._logs.sink import TailSink
from phalanx._logs.stream import Stream
from phalanx._logs.timeline import NAME, is_foreign
from phalanx._logs.timeline import read as read_timeline
from phalanx._runs.catalog import RunDir, look
from phalanx.multiprocessing import ConsoleSpecs

STREAMS = ("stdout", "stderr")
_MOST_NAMED = 16  # files

_GOES_ON = ("running", "unreadable", "unknown")
"""States of a run that has not ended, as far as is known. Without a record nobody will say: but of a run that is just
starting, it comes."""

_READ_INTERVAL = 1.0
"""Seconds between two looks at a folder."""


def attempt_folders(run_dir: str) -> dict[int, str]:
    """The folders of a run's attempts. A folder of ranks alone (the older layout) is attempt 0."""
    attempts = {number: f"{run_dir}/attempt_{number}" for number in _numbered(run_dir, "attempt_")}
    return attempts or ({0: run_dir} if _numbered(run_dir) else {})


def _numbered(folder: str, prefix: str = "") -> list[int]:
    """The numbers of the folders that are called as ours are: not ``03``, and no files. Raises OSError."""
    digits = [name.removeprefix(prefix) for name in os.listdir(folder) if name.startswith(prefix)]
    numbers = [int(text) for text in digits if text.isdecimal() and text == str(int(text))]
    return [number for number in numbers if os.path.isdir(f"{folder}/{prefix}{number}")]


class Reader:
    """The files of a run's attempt, and their way to the console. Raises OSError, UsageError: what cannot be shown.

    ``folder``: that of the attempt, which need not be there yet. ``chosen``: whether somebody has chosen the attempt;
    else those that come later are followed, too.
    """

    def __init__(
        self, found: RunDir, attempt: int, folder: str, console: ConsoleSpecs, streams: tuple[str, ...] = STREAMS, *,
        chosen: bool = True, follow: bool = False,
    ) -> None:  # fmt: skip
        self._found = found
        self._follows = follow and found.state in ("running", "unknown")
        self._attempt, self._chosen = attempt, chosen
        self._timeline = os.path.join(folder, NAME)
        self._console = console
        self._streams = streams
        envs = _envs(found, attempt, folder)
        self._envs = dict(envs)
        self._unfit: dict[str, str] = {}
        for rank, env in envs.items():
            wanted = console.ranks is None or int(env["RANK"]) in console.ranks
            self._unfit |= _check(os.path.join(folder, str(rank)), streams if wanted else ())
        for path, why in list(self._unfit.items())[:_MOST_NAMED]:
            tell(f"phalanx: {printable(path)} is not shown: {why}")
        if len(self._unfit) > _MOST_NAMED:
            tell(f"phalanx: and {len(self._unfit) - _MOST_NAMED} other files are not shown")
        if is_foreign(self._timeline):
            tell(
                f"phalanx: {printable(self._timeline)} cannot be read by this version of Phalanx: "
                "lines come file by file, not in the order of time"
            )
        unknown = sorted((console.ranks or frozenset()) - {int(env["RANK"]) for env in self._envs.values()})
        if unknown and not self._follows:  # else they may come
            raise click.UsageError(f"--ranks: this run has no rank {', '.join(map(str, unknown))}")
        self._prefixes = Prefixes(
            self._envs, template=console.template, timestamps=console.timestamps, start=self._start()
        )
        self._counts = dict.fromkeys(STREAMS, 0)
        self._view, self._colour = open_view(target_of(sys.stdout), console, self._prefixes, self._counts)
        self._sink = self._view.output.sink
        self._known: set[tuple[int, int]] = set()
        self._sources: dict[int, Source] = {}  # by the number of the stream in the timeline
        self._followers: dict[int, Follower] = {}
        for rank in envs:
            for number, follower, source in self._add(attempt, folder, rank, envs):
                self._followers[number], self._sources[number] = follower, source
        self._loop = Loop()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop.watch(self._bell, lambda _events: self._loop.forget(self._bell))
        self.interrupted = False
        self.gone = False
        """Whether the run's folder went while it was followed;"""
        self.broken = False
        """Whether nobody has read to the end,"""
        self.refusal: BaseException | None = None
        """or why there was no place for it."""

    def interrupt(self) -> None:
        """Have `read` return soon. From any thread: an exception could come between a write and the note of it."""
        self.interrupted = True
        os.eventfd_write(self._bell, 1)

    def read(self, since: float | None = None, until: float | None = None, *, last: int | None = None) -> None:
        """Show what is there, and what comes if the run is followed. Raises OSError.

        Args:
            since: Only what was written from then on (seconds since the epoch),
            until: and before then.
            last: Only so many lines of what is there.
        """
        with contextlib.ExitStack() as held:
            self._read(since or -math.inf, math.inf if until is None else until, last, held)
            self.broken, self.refusal = self._sink.broken, self._sink.refusal
            if self.interrupted:
                self._sink.give_up()

    def close(self) -> None:
        """Give every descriptor back."""
        self._sink.close()
        for follower in self._followers.values():
            follower.close()
        self._loop.close()
        os.close(self._bell)

    @property
    def _over(self) -> bool:
        return self.interrupted or self._sink.broken

    def _read(self, since: float, until: float, lines: int | None, held: contextlib.ExitStack) -> None:
        view, sink = self._view, self._sink
        sink.open(self._loop, lambda: None)
        if lines is not None:
            view.output.sink = TailSink(min(lines, sys.maxsize))
        last: dict[Source, float] = {}
        for moment, stream, data in merge(self._followers, self._timeline):
            source = self._sources[stream]
            last[source] = moment
            if not since <= moment < until:
                view.skip(source, data)
                continue
            view.replay(moment)
            view.take(source, data)
            self._make_room()
            if self._over:
                return
        if self._follows:
            self._show_last()
            view.time = clock.wall
            self._follow(held)
            return
        for source, moment in sorted(last.items(), key=lambda item: item[1]):
            if since <= moment < until:
                view.replay(moment)
                view.finish(source)
        view.close()
        self._show_last()
        sink.flush()
        while not sink.idle and not self._over:
            self._loop.once()

    def _make_room(self) -> None:
        while not self._sink.make_room() and not self._over:
            self._loop.once()

    def _show_last(self) -> None:
        """Write the last lines, if they have been kept."""
        kept, self._view.output.sink = self._view.output.sink, self._sink
        if isinstance(kept, TailSink):
            for line, owner in kept.taken():
                self._sink.write((line,), owner)
                self._make_room()

    def _start(self) -> float:
        """When the run started, or wrote something first (seconds since the epoch)."""
        if self._found.run is not None:
            return self._found.run.started
        return next((record[0] for record in read_timeline(self._timeline)), self._found.started)

    def _follow(self, held: contextlib.ExitStack) -> None:
        streams = [
            Stream(follower, [(self._view, self._sources[stream])]) for stream, follower in self._followers.items()
        ]
        pump = Pump(streams, [self._view], drain=math.inf, stuck=math.inf)  # nothing waits for a viewer but its reader
        pump.unfit |= self._unfit.keys()
        held.callback(pump.close)
        pump.open(self._loop)
        ended = False

        def end() -> None:
            nonlocal ended
            ended = True

        def appeared(found: RunDir) -> None:
            with contextlib.suppress(OSError):  # the folder is gone
                for stream in self._new(found):
                    pump.add(stream)

        following = Following(self._loop, self._found, appeared, pump.look, lambda: pump.finish(end))
        held.callback(following.close)
        following.open()
        while not ended and not self._over:
            self._loop.once()
        self.gone = following.gone

    def _add(
        self, attempt: int, folder: str, rank: int, envs: dict[int, dict[str, str]]
    ) -> Iterator[tuple[int, Follower, Source]]:
        """The files of a local rank, if they are to be shown, with the timeline's numbers."""
        self._known.add((attempt, rank))
        number = int(envs[rank]["RANK"])
        if self._console.ranks is not None and number not in self._console.ranks:
            return
        self._envs[rank] = envs[rank]
        for name in self._streams:
            self._counts[name] += 1
            path = os.path.join(folder, str(rank), f"{name}.log")
            source = Source(number, name, self._prefixes.of(rank, colour=self._colour))
            yield 2 * rank + STREAMS.index(name), Follower(path, rotates=True), source

    def _new(self, found: RunDir) -> Iterator[Stream]:
        """The files of ranks that have appeared, in the attempt that was chosen, or in all from the latest on."""
        for number, folder in sorted(attempt_folders(found.path).items()):
            if number < self._attempt or (self._chosen and number != self._attempt):
                continue
            with contextlib.suppress(OSError):  # removed, or not for us to read
                envs = _envs(found, number, folder)
                for rank in envs:
                    if (number, rank) not in self._known:
                        for _number, follower, source in self._add(number, folder, rank, envs):
                            yield Stream(follower, [(self._view, source)])


def _check(folder: str, streams: tuple[str, ...]) -> dict[str, str]:
    """Which files of a rank's folder cannot be shown, and why. Raises OSError: what is there is not for us to read."""
    with contextlib.suppress(FileNotFoundError):  # removed since, as an attempt that is not kept
        os.listdir(folder)
    unfit = {}
    for path in [os.path.join(folder, f"{name}.log") for name in streams]:
        for name in (*rotated_files(path), path):
            if os.path.exists(name) and not os.access(name, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
            try:
                os.close(files.opened(name, links=files.OWN_LINKS))
            except files.UnfitError as error:
                unfit[name] = error.strerror or ""
            except OSError:  # not there, mostly
                continue
    return unfit


def _envs(found: RunDir, attempt: int, folder: str) -> dict[int, dict[str, str]]:
    """What is known of each rank, by local rank: those that have a folder. Raises OSError."""
    try:
        ranks = {rank: rank for rank in _numbered(folder)}
    except FileNotFoundError:  # it will appear
        return {}
    for known in found.run.attempts if found.run is not None else ():
        if known.number == attempt:
            ranks |= {rank.local_rank: rank.rank for rank in known.ranks if rank.local_rank in ranks}
    return {local: {"RANK": str(rank)} for local, rank in sorted(ranks.items())}


class Following:
    """Looks at a run's folder every second, and at the end of a launcher of this machine at once; on the loop.

    ``appeared`` is called with the run as it is now, and ``again`` for files that may have grown unnoticed, each time;
    ``over`` once the run is over: its record says so, its launcher is gone, or its folder.
    """

    def __init__(
        self, loop: Loop, found: RunDir, appeared: Callable[[RunDir], None], again: Callable[[], None],
        over: Callable[[], None],
    ) -> None:  # fmt: skip
        self.gone = False
        """Whether it is over because its folder is gone."""
        self._loop = loop
        self._path = found.path
        self._appeared = appeared
        self._again = again
        self._over = over
        self._ended = False
        self._launcher = -1

    def open(self) -> None:
        """Begin."""
        found = self._look()
        elsewhere = found.run is None or found.run.host != os.uname().nodename
        if elsewhere and not self._ended and linux.is_network_filesystem(self._path):
            tell(
                "phalanx: the logs are on a network file system, which does not tell what other machines write: "
                f"they are looked at every {_READ_INTERVAL:g} s"
            )
        self._loop.after(_READ_INTERVAL, self._look_again)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        self._ended = True
        if self._launcher >= 0:
            self._loop.forget(self._launcher)
            os.close(self._launcher)
            self._launcher = -1

    def _look_again(self) -> None:
        if not self._ended:
            self._look()
            self._again()
            self._loop.after(_READ_INTERVAL, self._look_again)

    def _look(self) -> RunDir:
        found = look(self._path)
        if self._launcher < 0 and found.run is not None and found.state == "running":
            with contextlib.suppress(OSError, OverflowError):  # of another machine, or gone; or no pid at all
                self._launcher = linux.pidfd_open(found.run.pid)
                self._loop.watch(self._launcher, self._on_launcher)
            found = look(self._path)  # its end before that, or its pid another's, shows by now
        self._appeared(found)
        self.gone = self.gone or not os.path.isdir(self._path)
        if not self._ended and (self.gone or found.state not in _GOES_ON):
            self._ended = True
            self._over()
        return found

    def _on_launcher(self, _events: int) -> None:
        self._loop.forget(self._launcher)
        self._look()
