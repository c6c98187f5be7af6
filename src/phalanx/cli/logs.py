"""``phalanx logs``: what the ranks of a run wrote, merged in the order of time, and followed while the run goes on.

Owns the options and which files they mean. Merging, following and showing are the library's.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import time
from datetime import datetime

import click

from phalanx._core import clock, linux, timeline
from phalanx._core.follower import Follower
from phalanx._core.loop import Loop
from phalanx._core.merge import merge
from phalanx._core.pump import Pump, Stream
from phalanx._core.view import Lane
from phalanx.cli._command import SETTINGS, Command
from phalanx.cli._interrupts import Interrupts
from phalanx.cli._options import console_options, console_specs, reading
from phalanx.cli._place import default_place
from phalanx.multiprocessing._console import make_view, target
from phalanx.multiprocessing._prefixes import Prefixes
from phalanx.multiprocessing._runs import UnknownRunError, find, look, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.multiprocessing import ConsoleSpecs
    from phalanx.multiprocessing._runs import RunDir

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_STREAMS = ("stdout", "stderr")


def read_since(text: str) -> float:
    """Read a time: how long ago (90s, 10m, 2h, 3d), or ISO 8601. Returns seconds since the epoch. Raises ValueError.

    >>> read_since("2026-11-20T12:00:00+00:00")
    1795176000.0
    """
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if ago:
        return time.time() - float(ago[1]) * _UNITS[ago[2] or "s"]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        msg = f"{text!r}: expected how long ago, like 90s, 10m or 2h, or a time, like 2026-11-20T12:00:00"
        raise ValueError(msg) from None


def _names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    try:
        return [
            run.name for run in find(ctx.params.get("log_dir") or default_place()) if run.name.startswith(incomplete)
        ]
    except (OSError, click.UsageError):
        return []


@click.command(cls=Command, context_settings=SETTINGS)
@click.argument("run", required=False, shell_complete=_names)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False),
    envvar=["PHALANX_LOG_DIR", "PET_LOG_DIR"],
    help="Folder of the runs. Default: as of phalanx run.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on as the run does; ends with it.")
@click.option("--since", callback=reading(read_since), metavar="TIME",
              help="Only what was written since: 90s, 10m, 2h ago, or a time, ISO 8601.")  # fmt: skip
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="N", help="Which start of the workers. Default: the last."
)
@click.option("--stderr", "stream", flag_value="stderr", help="Only stderr.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only stdout.")
@console_options
def logs(
    run: str | None,
    *,
    log_dir: str | None,
    follow: bool,
    since: float | None,
    attempt: int | None,
    stream: str | None,
    **shown: Any,
) -> None:
    """Print what the ranks of RUN wrote, in the order of time.

    \b
    phalanx logs                         the latest run
    phalanx logs -f --rank 3             its rank 3, as it goes on
    phalanx logs 20261120-1030 --stderr --since 10m

    RUN is the name of a run's folder, the beginning of one, a run id, or the path of a folder; phalanx runs lists them.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    console = console_specs(**shown)
    try:
        found = resolve(log_dir or default_place(), run)
        attempts = _attempts(found.path)
        if not attempts:
            msg = f"{found.name} has no logs: its workers were never started"
            raise click.ClickException(msg)
        number = attempt if attempt is not None else max(attempts)
        if number not in attempts:
            known = ", ".join(map(str, sorted(attempts)))
            msg = f"--attempt: {found.name} has no attempt {number}; its attempts are {known}"
            raise click.UsageError(msg)
        envs = _envs(found, number, attempts[number])
        for rank in envs:
            os.listdir(os.path.join(attempts[number], str(rank)))  # what cannot be read is said, not left out
    except UnknownRunError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise _refusal(error) from None
    reader = _Reader(found, envs, attempts[number], console, (stream,) if stream else _STREAMS)
    try:
        with Interrupts(reader.interrupt):
            reader.read(since, follow=follow)
    except OSError as error:
        raise _refusal(error) from None
    finally:
        reader.close()
    _leave(reader)


def _leave(reader: _Reader) -> None:
    """Say by the exit code how it ended. Raises ClickException, or SystemExit unless it has all been shown."""
    if reader.interrupted:
        sys.exit(128 + signal.SIGINT)
    if reader.refusal is not None:
        msg = f"stdout: {getattr(reader.refusal, 'strerror', reader.refusal)}"
        raise click.ClickException(msg)
    if reader.broken:  # | head
        sys.exit(128 + signal.SIGPIPE)


def _refusal(error: OSError) -> click.ClickException:
    return click.ClickException(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))


def _attempts(run_dir: str) -> dict[int, str]:
    """The folders of a run's attempts. A folder of ranks alone (the older layout) is attempt 0."""
    names = os.listdir(run_dir)
    attempts = {
        int(number): os.path.join(run_dir, name)
        for name in names
        if name.startswith("attempt_") and (number := name.removeprefix("attempt_")).isdecimal()
    }
    return attempts or ({0: run_dir} if any(name.isdecimal() for name in names) else {})


class _Reader:
    """The files of one attempt, and their way to the console."""

    def __init__(
        self,
        found: RunDir,
        envs: dict[int, dict[str, str]],
        folder: str,
        console: ConsoleSpecs,
        streams: tuple[str, ...],
    ) -> None:
        self._found = found
        self._timeline = os.path.join(folder, timeline.NAME)
        self._prefixes = Prefixes(envs, None, console, start=self._start())
        self._ranks = {rank: int(env["RANK"]) for rank, env in envs.items()}
        unknown = sorted((console.ranks or frozenset()) - set(self._ranks.values()))
        if unknown:
            raise click.UsageError(f"--ranks: this run has no rank {', '.join(map(str, unknown))}")
        self._followers: dict[int, Follower] = {
            2 * rank + _STREAMS.index(name): Follower(os.path.join(folder, str(rank), f"{name}.log"), rotates=True)
            for rank, number in self._ranks.items()
            for name in streams
            if console.ranks is None or number in console.ranks
        }
        counts = dict.fromkeys(_STREAMS, len(self._followers) // len(streams))
        self._view, colour = make_view(target(sys.stdout), console, self._prefixes, counts)
        self._sink = self._view.surface.sink
        self._lanes = {
            number: Lane(self._ranks[number // 2], _STREAMS[number % 2], self._prefixes.of(number // 2, colour=colour))
            for number in self._followers
        }
        self._loop = Loop()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop.watch(self._bell, lambda _events: self._loop.forget(self._bell))
        self.interrupted = False
        self.broken = False
        """Whether nobody has read to the end,"""
        self.refusal: BaseException | None = None
        """or why there was no place for it."""

    def interrupt(self) -> None:
        """Have `read` return soon. From any thread: an exception could come between a write and the note of it."""
        self.interrupted = True
        os.eventfd_write(self._bell, 1)

    def read(self, since: float | None, *, follow: bool) -> None:
        """Show what is there; and, to ``follow``, what comes, until the run ends. Raises OSError."""
        with contextlib.ExitStack() as held:
            self._read(since, held, follow=follow)
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

    def _read(self, since: float | None, held: contextlib.ExitStack, *, follow: bool) -> None:
        view, sink = self._view, self._sink
        sink.open(self._loop, lambda: None)
        last: dict[Lane, float] = {}
        for moment, number, data in merge(self._followers, self._timeline):
            lane = self._lanes[number]
            last[lane] = moment
            if since is not None and moment < since:
                view.skip(lane, data)
                continue
            view.replay(moment)
            view.take(lane, data)
            while not sink.make_room() and not self._over:
                self._loop.once()
            if self._over:
                return
        if follow and self._found.state in ("running", "unknown"):
            view.time = clock.wall
            self._follow(held)
            return
        for lane, moment in sorted(last.items(), key=lambda item: item[1]):
            if since is None or moment >= since:
                view.replay(moment)
                view.finish(lane)
        view.close()
        sink.flush()
        while not sink.idle and not self._over:
            self._loop.once()

    def _start(self) -> float:
        """When the run started, or wrote something first (seconds since the epoch)."""
        if self._found.run is not None:
            return self._found.run.started
        return next((record[0] for record in timeline.read(self._timeline)), self._found.started)

    def _follow(self, held: contextlib.ExitStack) -> None:
        streams = [
            Stream(follower, [(self._view, self._lanes[number])]) for number, follower in self._followers.items()
        ]
        pump = Pump(streams, [self._view], drain=math.inf)
        held.callback(pump.close)
        pump.open(self._loop)
        ended = False

        def end() -> None:
            nonlocal ended
            ended = True

        self._watch_end(lambda: pump.finish(end), held)
        while not ended and not self._over:
            self._loop.once()

    def _watch_end(self, ended: Callable[[], None], held: contextlib.ExitStack) -> None:
        """Have ``ended`` called once the run is over: its record says so, or its launcher is gone."""
        over = False
        watched = False

        def look_again(_events: int = 0) -> None:
            nonlocal over, watched
            with contextlib.suppress(BlockingIOError):
                os.read(notify, 65536)
            found = look(self._found.path)
            if not watched and found.run is not None and found.state == "running":
                watched = True
                watch_launcher(found.run.pid)
                found = look(self._found.path)  # its end before that, or its pid another's, shows by now
            # Without a record nobody will say; but of a run that is just starting, it comes.
            if not over and found.state not in ("running", "unreadable", "unknown"):
                over = True
                ended()

        def watch_launcher(pid: int) -> None:
            with contextlib.suppress(OSError):  # of another machine, or gone
                launcher = os.pidfd_open(pid)
                held.callback(os.close, launcher)

                def gone(_events: int) -> None:
                    self._loop.forget(launcher)
                    look_again()

                self._loop.watch(launcher, gone)
                held.callback(self._loop.forget, launcher)

        notify = linux.inotify()
        held.callback(os.close, notify)
        linux.inotify_add(notify, self._found.path, linux.IN_MOVED_TO)
        self._loop.watch(notify, look_again)
        held.callback(self._loop.forget, notify)
        look_again()


def _envs(found: RunDir, attempt: int, folder: str) -> dict[int, dict[str, str]]:
    """What is known of each rank, by local rank: those that have a folder."""
    ranks = {int(name): int(name) for name in os.listdir(folder) if name.isdecimal()}
    for known in found.run.attempts if found.run is not None else ():
        if known.number == attempt:
            ranks |= {rank.local_rank: rank.rank for rank in known.ranks if rank.local_rank in ranks}
    return {local: {"RANK": str(rank)} for local, rank in sorted(ranks.items())}
