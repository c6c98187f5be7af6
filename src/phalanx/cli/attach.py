"""``phalanx attach``: your terminal at that of a rank which ``phalanx run --pty`` has given one.

Owns which rank is meant, and your terminal's modes meanwhile. The frames, and the other end, are in
`phalanx._engine.keeper.terminal`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import NoReturn

import click

from phalanx._base import clock, files
from phalanx._base.channels import by_folder, peer
from phalanx._base.process import Process
from phalanx._base.text import name_ranks
from phalanx._base.tty import printable
from phalanx._engine.keeper.terminal import SIZE, SOCKET, Frames, Modes, frame
from phalanx._outcomes.failure import signal_name
from phalanx._run.attached import AttachedRun
from phalanx._run.control_socket import user_name
from phalanx._runs.catalog import RunDir, look
from phalanx._runs.record import Rank
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._options import Whole, live_run, run_argument

_LEAVE = re.compile(rb"\x1d|\033\[93(?::\d*)*;(?:5|69|133|197)(?::1)?u|\033\[27;(?:5|69|133|197);93~")
"""Ctrl-], also as terminals send it that tell all keys apart: with Caps Lock (64) and Num Lock (128)."""
_HELD = re.compile(rb"\033\[[0-9:]+;[0-9]+:[23][u~]")  # a key is held, or released
_INTERRUPT = b"\x03"
_SECOND_WITHIN = 0.5  # seconds in which a second Ctrl-] has the first one typed
_CHUNK = 32 << 10
_MOST_TYPED = 64 << 10  # bytes that the rank has not taken; until then, more is read
_STALLS_AFTER = 2.0  # seconds in which the rank takes nothing, after which what is typed is dropped
_ENDS_WITHIN = 1.0  # seconds between the last byte of a rank and its end, at the most; and the other way round
_BEGINS_WITHIN = 2.0  # seconds after its start in which an attempt has its terminals
_WRITES_WITHIN = 1.0  # seconds in which a terminal accepts what restores its modes
_STATE_WITHIN = 2.0  # seconds in which its launcher knows how it has ended
_OFTEN = 100  # milliseconds between two questions for that

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_MARGINS = b"\0337\033[r\0338"  # no scroll region, cursor as it is
_PLAIN = b"\033[0m\033(B\x0f\r\n"  # colours, characters


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--rank", type=Whole(min=0), metavar="N", help="The rank. Default: the only one with a terminal.")
@click.option("--watch", is_flag=True, help="Type nothing: Ctrl-C, too, leaves the rank.")
@run_argument(state="running")
def attach(run: str | None, *, rank: int | None, watch: bool, log_dir: str | None) -> None:
    """Attach your terminal to that of a rank of RUN, which runs under phalanx run --pty.

    \b
    phalanx attach                       the rank with a terminal; if several have one, they are named
    phalanx attach --rank 3
    phalanx attach --rank 3 --watch

    You see what the rank has written last, and all that follows. What you type goes to the rank, Ctrl-C as well. Ctrl-]
    leaves it, and the rank goes on; pressed twice, Ctrl-] goes to the rank. One types, the first; others watch, and the
    next of them types once that one has left. If stdin or stdout is no terminal, the command only watches.

    Exit code: 0 after Ctrl-]; that of the rank if it ends (128 + n for signal n); 1 if the connection is lost. The next
    attempt of a rank is attached to anew.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    found = live_run(log_dir, run)
    chosen, path = _chosen(found, rank)
    has_terminal = os.isatty(0) and os.isatty(1)
    with _connected(path, found, chosen.rank) as link, _pidfd(chosen) as pidfd:
        session = _Session(link, pidfd, f"rank {chosen.rank}", types=has_terminal and not watch)
        if has_terminal:
            leave = "Ctrl-] leaves it" + (", and so does Ctrl-C" if watch else "; pressed twice, it is typed")
            _say(f"{session.name} of {found.name}; {leave}")
            with _Screen(session) as screen:
                screen.begin()
                session.screen = screen
                why = session.carry()
        else:
            why = session.carry()
    if why == _ENDED:
        text, code = _how_ended(found, chosen)
        _say(f"{session.name} {text}")
        sys.exit(code)
    _say(f"{session.name} {why}")
    sys.exit(why not in (_LEFT, _CLOSED))


_LEFT = "goes on"
_ENDED = "has ended"
_CLOSED = "goes on; it has closed its terminal"
_LOST = "goes on, and the connection is lost: what fills its log was killed, or you have read nothing for too long"


def _say(text: str) -> None:
    click.echo(printable(f"phalanx: {text}"), err=True)


# --- which rank


def _chosen(found: RunDir, number: int | None) -> tuple[Rank, str]:
    """Return the rank that is meant, and the path of its socket. Raises ClickException."""
    run, poll = found.run, select.poll()
    while True:
        assert run is not None
        attempt = run.attempts[-1] if run.attempts else None
        ranks = {} if attempt is None else {rank.rank: rank for rank in attempt.ranks}
        paths = {}
        for rank in ranks.values():
            assert attempt is not None
            path = os.path.join(found.path, f"attempt_{attempt.number}", str(rank.local_rank), SOCKET)
            if os.path.lexists(path):
                paths[rank.rank] = path
        which = next(iter(paths)) if number is None and len(paths) == 1 else number
        if which in paths:
            return ranks[which], paths[which]
        if paths or time.time() > (run.started if attempt is None else attempt.started) + _BEGINS_WITHIN:
            break
        poll.poll(_OFTEN)
        run = look(found.path).run or run
    if number is None:
        if paths:
            why = f"{name_ranks(paths)} have a terminal: --rank N attaches to one of them"
        else:
            why = "no rank has a terminal here: phalanx run --pty RANK,... gives them one"
    elif number in ranks:
        why = f"rank {number} has no terminal: phalanx run --pty {number} gives it one"
        if paths:
            why += f"; {name_ranks(paths)} {'has' if len(paths) == 1 else 'have'} one"
    else:
        why = _elsewhere(found, number)
    raise click.ClickException(printable(f"{found.name}: {why}"))


def _elsewhere(found: RunDir, number: int) -> str:
    """Why there is no such rank here, in words."""
    with contextlib.suppress(RuntimeError):
        for node in AttachedRun(found).status():
            if any(rank["rank"] == number for rank in node["ranks"]) and node["host"] != os.uname().nodename:
                return f"rank {number} runs on {node['host']}: attach to it there"
    return f"there is no rank {number} here"


@contextlib.contextmanager
def _connected(path: str, found: RunDir, rank: int) -> Iterator[socket.socket]:
    """Connect to a terminal's socket. Only one of the run's owner, or of ours, is believed. Raises ClickException."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            by_folder(path, link.connect)
        except PermissionError:
            msg = f"{found.name} belongs to user {user_name(found.owner)}: only that user, and root, can attach to it"
            raise click.ClickException(printable(msg)) from None
        except OSError:
            msg = f"{found.name}: rank {rank} has ended, or what fills its log was killed"
            raise click.ClickException(printable(msg)) from None
        if peer(link)[1] not in (found.owner, os.geteuid(), files.ROOT):
            raise click.ClickException(printable(f"{found.name}: another user's process answers for rank {rank}"))
        link.setblocking(False)
        yield link


@contextlib.contextmanager
def _pidfd(rank: Rank) -> Iterator[int]:
    """A descriptor that can be read once a rank has ended; -1: it has."""
    try:
        process = Process(rank.pid, start=rank.pid_started or None)
    except OSError:
        yield -1
        return
    with process:
        yield process.pidfd


def _how_ended(found: RunDir, rank: Rank) -> tuple[str, int]:
    """Return how a rank has ended, in words, and the exit code that follows."""
    poll, until = select.poll(), clock.now() + _STATE_WITHIN
    while (end := _end_of(found, rank)) is None and clock.now() < until:
        poll.poll(_OFTEN)  # the launcher learns of it
    state, code = end or ("ended", None)
    if code is None:
        return "has ended", 1
    return f"has {state} ({signal_name(-code) if code < 0 else f'exit code {code}'})", 128 - code if code < 0 else code


def _end_of(found: RunDir, rank: Rank) -> tuple[str, int | None] | None:
    """The state and the exit code of a rank that has ended, by its launcher or the record; None: not known yet."""
    with contextlib.suppress(RuntimeError):
        for node in AttachedRun(found).status():
            for facts in node["ranks"]:
                if (facts["rank"], facts["pid"]) == (rank.rank, rank.pid) and facts["exitcode"] is not None:
                    return {"stopped": "been stopped"}.get(facts["state"], facts["state"]), facts["exitcode"]
    recorded = look(found.path)
    for attempt in () if recorded.run is None else recorded.run.attempts:
        for each in attempt.ranks:
            if (each.rank, each.pid) == (rank.rank, rank.pid) and each.exitcode is not None:
                return {"stopped": "been stopped"}.get(each.state, each.state), each.exitcode
    return None if recorded.state == "running" else ("ended", None)


# --- a session


class _Session:
    """What goes from the rank to stdout, and from stdin to the rank. ``screen``: the terminal; None: there is none."""

    def __init__(self, link: socket.socket, pidfd: int, name: str, *, types: bool) -> None:
        self.name = name
        self.screen: _Screen | None = None
        self._link, self._pidfd = link, pidfd
        self._types = types
        self._frames = Frames()
        self._out = b""  # what the rank's end has not taken
        self._took = clock.now()  # when it took some
        self._is_told = False  # that what is typed is dropped
        self._second_until = 0.0  # a Ctrl-] was pressed: until when a second one may follow; 0: none was
        self._until: float | None = None  # when the wait for the end is over
        self._why = ""
        self._has_ended = pidfd < 0
        self._is_closed = False  # no process has the terminal open
        self._role: int | None = None
        self._send(b"A", _size() if types else b"")
        if self._has_ended:
            self._until = clock.now() + _ENDS_WITHIN

    def carry(self) -> str:
        """Carry bytes until the person leaves, or the rank ends. Returns what has become of the rank, in words."""
        while not self._why:
            now = clock.now()
            if self._until is not None and now >= self._until:
                return _ENDED if self._has_ended else _CLOSED
            if self._second_until and now >= self._second_until:
                return _LEFT
            waits = [each - now for each in (self._until, self._second_until or None) if each is not None]
            if self._is_held:
                waits.append(max(0.0, self._took + _STALLS_AFTER - now))
            for number in self._ready(min(waits) * 1000 + 1 if waits else None):
                if number == self._link.fileno():
                    self._on_link()
                elif number == self._pidfd:
                    self._has_ended, self._pidfd = True, -1
                    self._until = now + (0.0 if self._is_closed else _ENDS_WITHIN)
                elif number == 0:
                    self._on_typed()
                elif self.screen is not None:
                    self.screen.on_signals()
        return self._why

    @property
    def _is_held(self) -> bool:
        """Whether nothing is read of what is typed: the rank has yet to take what was typed before."""
        return len(self._out) >= _MOST_TYPED and clock.now() < self._took + _STALLS_AFTER

    def _ready(self, timeout: float | None) -> list[int]:
        poll = select.poll()
        poll.register(self._link, select.POLLIN | (select.POLLOUT if self._out else 0))
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        if self.screen is not None:
            poll.register(self.screen.wakes, select.POLLIN)
            if not self._is_held and self._role is not None:
                poll.register(0, select.POLLIN)
        return [number for number, _ in poll.poll(timeout)]

    # --- the rank

    def resize(self, *, redraws: bool = False) -> None:
        """Send the size of the terminal to the rank."""
        if self._types:
            if redraws:
                rows, columns = SIZE.unpack(_size())
                self._send(b"S", SIZE.pack(rows, columns + 1))
            self._send(b"S", _size())

    def _send(self, kind: bytes, data: bytes = b"") -> None:
        if not self._out:
            self._took = clock.now()
        self._out += frame(kind, data)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                self._out = self._out[self._link.send(self._out, socket.MSG_NOSIGNAL) :]
                self._took = clock.now()
                self._is_told = False
        except BlockingIOError:
            pass
        except OSError:  # what can be received is the end
            self._out = b""

    def _on_link(self) -> None:
        self._flush()
        try:
            data = self._link.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._wait_for_end(_LOST)
        for kind, rest in self._frames.feed(data):
            if kind == b"O":
                if self._is_closed:  # a process has opened it again
                    self._is_closed, self._until = False, None
                self._write(rest)
            elif kind == b"R":
                self._on_role(int(rest))
            elif kind == b"H":
                self._is_closed, self._until = True, clock.now() + (0.0 if self._has_ended else _ENDS_WITHIN)
            elif kind == b"E":
                self._wait_for_end(f"is not attached to: {rest.decode()}" if rest else _LOST)

    def _wait_for_end(self, why: str) -> None:
        """The rank is about to end, or has. If not within a second, ``why`` it is."""
        if self._has_ended or self._pidfd < 0:
            self._why = _ENDED
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        self._why = _ENDED if poll.poll(_ENDS_WITHIN * 1000) else why

    def _on_role(self, pid: int) -> None:
        before, self._role = self._role, pid
        if self._types and pid == os.getpid() and before is not None:
            self._note("you type from now on")
        elif self._types and pid not in (0, os.getpid()):
            self._note(f"pid {pid} types; you watch, and may type once it has left")

    def _note(self, text: str) -> None:
        end = "\r" * (self.screen is not None)
        click.echo(f"{end}{printable(f'phalanx: {text}')}{end}", err=True)

    def _write(self, data: bytes) -> None:
        if self.screen is not None:
            self.screen.modes.follow(data)
        files.write_all(1, data)

    # --- the person

    def _on_typed(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # the terminal was hung up
            data = b""
        if not data or (not self._types and _INTERRUPT in data):
            self._why = _LEFT
            return
        if self._second_until:
            data = _HELD.sub(b"", data)
        while data and not self._why:
            found = _LEAVE.match(data) if self._second_until else _LEAVE.search(data)
            if self._second_until:
                self._second_until = 0.0
                if found is None:
                    self._why = _LEFT
                else:
                    self._type(found[0])
                    data = data[found.end() :]
            elif found is None:
                self._type(data)
                return
            else:
                self._type(data[: found.start()])
                data = _HELD.sub(b"", data[found.end() :])
                self._second_until = clock.now() + _SECOND_WITHIN

    def _type(self, data: bytes) -> None:
        if not data or not self._types or self._role != os.getpid():
            return
        if len(self._out) < _MOST_TYPED:
            self._send(b"K", data)
        elif not self._is_told:
            self._is_told = True
            self._note(f"{self.name} does not read: what you type is dropped")


def _size() -> bytes:
    rows, columns = 24, 80
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(0)
    return SIZE.pack(rows, columns)


class _Screen:
    """The terminal of this process: raw as long as the context is open, then as it was before.

    Attributes:
        modes: Those that the rank's program has changed: it may not be there to restore them.
        wakes: A descriptor that can be read after a signal.
    """

    def __init__(self, session: _Session) -> None:
        self._session = session
        self.modes = Modes()
        self._own = termios.tcgetattr(0)
        self._pending: set[int] = set()
        self.wakes = -1

    def __enter__(self) -> _Screen:  # noqa: PYI034 - one class
        self.wakes, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return self

    def begin(self) -> None:
        """Make the terminal raw. A signal from now on ends the context."""
        for number in _ENDING:
            signal.signal(number, _exit)
        for number in (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT):
            signal.signal(number, lambda number, _frame: self._pending.add(number))
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._set_raw()

    def __exit__(self, *_error: object) -> None:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        self._restore()
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(self.wakes)
        os.close(self._waker)

    def on_signals(self) -> None:
        """Handle the signals that have come."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakes, _CHUNK):
                pass
        pending, self._pending = self._pending, set()
        if signal.SIGTSTP in pending:
            self._restore()
            os.kill(os.getpid(), signal.SIGSTOP)
            pending.add(signal.SIGCONT)
        if signal.SIGCONT in pending:
            self._set_raw()
            if signal.SIGTSTP in pending:
                files.write_all(1, self.modes.changed)
            self._session.resize(redraws=True)
        elif signal.SIGWINCH in pending:
            self._session.resize()

    def _set_raw(self) -> None:
        while True:
            try:
                tty.setraw(0, termios.TCSANOW)  # which the kernel stops in the background (SIGTTOU)
            except termios.error as error:
                if error.args[0] != errno.EINTR:
                    raise
            else:
                return

    def _restore(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # it was hung up
            if os.tcgetpgrp(0) != os.getpgrp():  # another program has it now
                return
            termios.tcsetattr(0, termios.TCSANOW, self._own)
            ends = self.modes.restored
            _write_soon((ends + _MARGINS if ends else b"") + _PLAIN)


def _write_soon(data: bytes) -> None:
    """Write to stdout what it accepts within a second: a terminal may be held by Ctrl-S."""
    poll, until = select.poll(), clock.now() + _WRITES_WITHIN
    poll.register(1, select.POLLOUT)
    while data and poll.poll(max(0.0, until - clock.now()) * 1000):
        data = data[os.write(1, data[:1]) :]


def _exit(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
