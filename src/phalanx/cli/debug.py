"""``phalanx debug``: your terminal at the debugger of a rank that stands at a breakpoint.

Owns which rank is meant, and what a person types and reads. The rank's end, and the messages, are in
`phalanx._engine.worker.debug_socket`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import stat
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NoReturn

import click

from phalanx._base import clock, files
from phalanx._base.channels import by_folder, peer
from phalanx._base.text import name_ranks
from phalanx._base.tty import printable
from phalanx._engine.worker.debug_socket import Lines, encode
from phalanx._evidence import error_file, recording
from phalanx._runs.catalog import RunDir
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._declare import reading
from phalanx.cli._options import Whole, live_run, run_argument, time_of

_LONGEST_MESSAGE = 16 << 20  # of a rank: its output is bounded, see `debug_socket.MOST_OUTPUT`
_ANSWERS_WITHIN = 5.0  # seconds in which a rank completes a word, and in which it ends
_GREETS_WITHIN = 3.0  # seconds in which all say what they are: less than those in which one must attach to a rank
_CHECKS_EVERY = 0.25  # seconds in which a prompt notices that the rank has ended
_STEPS_WITHIN = 10.0  # seconds that `--all` waits for the end of a step
_DELIMITERS = " \t\n`@#%^&*()=+[{]}\\|;:'\",<>?"  # of words that are completed, as in pdb
_CHUNK = 1 << 16


class _GoneError(Exception):
    """The rank has closed the connection."""


class _LeftError(Exception):
    """The person leaves the rank as it is."""


class _Stop:
    """A process of a rank that stands, or has stood, at a breakpoint, and the connection to it.

    Only one of ``owner``, who the run belongs to, or of ours is believed. `is_greeted` fills in what it says of itself.

    Raises:
        OSError: There is none at the socket; PermissionError: it is another user's.
    """

    def __init__(self, path: str, owner: int, rank: int | None = None) -> None:
        self.path = path
        self._messages: list[dict[str, Any]] = []
        self._lines = Lines(_LONGEST_MESSAGE)
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.link.settimeout(_ANSWERS_WITHIN)
            by_folder(path, self.link.connect)
            self.pid, uid = peer(self.link)
            if uid not in (owner, os.geteuid(), files.ROOT):
                raise ConnectionRefusedError  # noqa: TRY301 - as if nobody listened
        except BaseException:
            self.link.close()
            raise
        self.rank = _number(rank)
        self.at = ""
        self.attached_by = -1
        self.since = 0.0

    @property
    def name(self) -> str:
        return f"process {self.pid}" if self.rank < 0 else f"rank {self.rank}"

    def is_greeted(self) -> bool:
        """Receive once. Returns whether it has said what it is. Raises _GoneError."""
        if not self.feed():
            return False
        greeting = self._messages.pop(0)
        if self.rank < 0:
            self.rank = _number(greeting.get("rank"))
        self.at = str(greeting.get("at") or "")
        self.attached_by = _number(greeting.get("attached"))
        since = greeting.get("since")
        self.since = float(since) if isinstance(since, (int, float)) else 0.0
        return True

    def send(self, **message: Any) -> None:
        try:
            self.link.sendall(encode(message))
        except OSError:
            raise _GoneError from None

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Return the next message. Raises _GoneError, also after ``seconds``."""
        while not self._messages:
            self.link.settimeout(seconds)
            try:
                self.feed()
            finally:
                self.link.settimeout(_ANSWERS_WITHIN)
        return self._messages.pop(0)

    def feed(self) -> list[dict[str, Any]]:
        """Receive once, and return the messages that are there. Raises _GoneError."""
        try:
            data = self.link.recv(_CHUNK)
            self._messages += self._lines.feed(data)
        except (OSError, ValueError, RecursionError):
            raise _GoneError from None
        if not data:
            raise _GoneError
        return self._messages

    def is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.link, select.POLLRDHUP)
        return bool(poll.poll(0))

    def has_news(self, seconds: float) -> bool:
        """Whether it sends something, or is gone, within so many ``seconds``."""
        return bool(self._messages or select.select([self.link], [], [], seconds)[0])

    def end(self) -> str:
        """How the rank has ended, in words; "": it has not."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], _ANSWERS_WITHIN)[0]:
                    return ""
            finally:
                os.close(pidfd)
        path = self.path.rpartition(error_file.DEBUG_SUFFIX)[0]
        left = recording.read_exit(path, self.pid)
        data, _ = error_file.read_error_file(path)
        why = error_file.message_of(data) if error_file.written_by(data) == self.pid else ""
        return "has ended" + (f": {why}" if why else f": exit code {left[0]}" if left else "")


def _number(value: object) -> int:
    return int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else -1


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--rank", type=Whole(min=0), metavar="N", help="The rank to attach to.")
@click.option("--all", "command", metavar="CMD",
              help="Send this command of pdb to all ranks that stand, and print their answers.")  # fmt: skip
@click.option("--wait", default="10", callback=reading(time_of(zero=False)), metavar="TIME",
              help="Time within which a rank that stands at no breakpoint has to stop. Default: 10.")  # fmt: skip
@run_argument(state="running")
def debug(run: str | None, *, rank: int | None, command: str | None, wait: float, log_dir: str | None) -> None:
    """Attach to a rank of RUN that stands at a breakpoint, or have one stop.

    \b
    phalanx debug                        the rank that stands; if several do, they are listed
    phalanx debug --rank 3               rank 3; on Python 3.14 and later also where it is now
    phalanx debug --all "p loss"         one command, and the answers of all that stand
    echo "p loss" | phalanx debug        commands of a file or a pipe

    A rank stands at breakpoint(), or after an exception under phalanx run --post-mortem, until it is told to go on. The
    prompt is that of pdb: h lists its commands. Ctrl-D leaves the rank as it stands, and so does the end of the
    commands. Ctrl-C interrupts a command; a second one leaves. After c you see the rank again when it next stops, and
    Ctrl-C leaves it. q ends the rank. RUN is as for phalanx stack, or the path of a socket that a rank has named. The
    ranks of another machine are reached there. The exit code is 1 if no rank stands.

    With --rank, a rank that stands nowhere stops where it is (sys.remote_exec), as soon as its main thread is at a line
    of Python or in a sleep: not in a long call of C code. If that takes longer than --wait, it does not stop at all.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    if rank is not None and command is not None:
        raise click.UsageError("--rank and --all exclude each other")
    with contextlib.ExitStack() as held:
        if run is not None and _is_socket(run):
            stops, notes = _reached([(run, None)], os.geteuid(), held)
            name, found = run, None
        else:
            found = live_run(log_dir, run)
            sockets = [(path, its) for path, its in _sockets(found) if rank in (None, its)]
            stops, notes = _reached(sockets, found.owner, held)
            name = found.name
        stops = sorted((stop for stop in stops if stop.at), key=lambda stop: (stop.rank, stop.since))
        if rank is not None:
            stops = [stop for stop in stops if stop.rank == rank]
        if not stops and notes:
            raise click.ClickException("; ".join(notes))
        for note in notes:
            click.echo(f"phalanx: {note}", err=True)
        if not stops and rank is not None and found is not None:
            from phalanx.cli._remote_stop import stop_rank

            stops, _ = _reached([(stop_rank(found, rank, wait), rank)], found.owner, held)
        if not stops:
            which = f"rank {rank}" if rank is not None else "no rank"
            raise click.ClickException(
                f"{which} of {name} {'does not stand' if rank is not None else 'stands'} at a breakpoint"
            )
        if command is not None:
            _ask_all(stops, command)
        elif rank is None and len(stops) > 1:
            _list(stops)
        else:
            place = [*(("--log-dir", log_dir) if log_dir else ()), *((run,) if run else ())]
            _attach(stops[0], shlex.join(["phalanx", "debug", *place]))


def _is_socket(path: str) -> bool:
    """Whether a path is that of a socket; also of one that has gone, or that another user may not look at."""
    if os.sep in path and path.rpartition(error_file.DEBUG_SUFFIX)[2].isdecimal():
        return True
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _sockets(found: RunDir) -> Iterator[tuple[str, int]]:
    """The sockets of the latest attempt, each with its rank."""
    assert found.run is not None
    for attempt in found.run.attempts[-1:]:
        for rank in attempt.ranks:
            folder = os.path.join(found.path, f"attempt_{attempt.number}", str(rank.local_rank))
            with contextlib.suppress(OSError):
                yield from (
                    (os.path.join(folder, name), rank.rank)
                    for name in os.listdir(folder)
                    if error_file.DEBUG_SUFFIX in name
                )


def _reached(
    sockets: Iterable[tuple[str, int | None]], owner: int, held: contextlib.ExitStack
) -> tuple[list[_Stop], list[str]]:
    """Connect to all, then wait for them together. Returns those that say what they are, and why others do not."""
    notes = []
    waiting: dict[int, _Stop] = {}
    poll = select.poll()
    for path, rank in sockets:
        try:
            stop = _Stop(path, owner, rank)
        except PermissionError:
            what = printable(path) if rank is None else f"rank {rank}"
            notes.append(f"{what} belongs to {_owner(path)}: only that user, and root, can debug it")
        except OSError:  # of a process that has ended, perhaps by SIGKILL
            if rank is None:
                notes.append(f"{printable(path)}: its process has ended")
        else:
            held.callback(stop.link.close)
            waiting[stop.link.fileno()] = stop
            poll.register(stop.link, select.POLLIN)
    stops = []
    until = clock.now() + _GREETS_WITHIN
    while waiting and (late := until - clock.now()) > 0:
        for number, _ in poll.poll(late * 1000 + 1):
            stop = waiting[number]
            with contextlib.suppress(_GoneError):
                if not stop.is_greeted():
                    continue
                stops.append(stop)
            poll.unregister(number)
            del waiting[number]
    if waiting:
        names = _names(waiting.values())
        notes.append(f"{names} {'does' if len(waiting) == 1 else 'do'} not answer: paused or stopped (phalanx resume)")
    return stops, notes


def _owner(path: str) -> str:
    from phalanx._run.control_socket import user_name

    try:
        return f"user {user_name(os.stat(path).st_uid)}"
    except OSError:
        return "another user"


def _names(stops: Collection[_Stop]) -> str:
    ranks = {stop.rank for stop in stops if stop.rank >= 0}
    others = [stop.name for stop in stops if stop.rank < 0]
    return ", ".join([*([name_ranks(ranks)] if ranks else ()), *others])


def _list(stops: list[_Stop]) -> None:
    width = max(len(stop.name) for stop in stops)
    for stop in stops:
        since = time.strftime("%H:%M:%S", time.localtime(stop.since))
        attached = f", attached: pid {stop.attached_by}" if stop.attached_by > 0 else ""
        click.echo(f"{stop.name.ljust(width)}  {printable(stop.at)}  since {since}{attached}")
    click.echo("phalanx: --rank N attaches to one of them", err=True)


# --- one command for all


class _Answer:
    """What one rank answers to a command.

    Attributes:
        text: What it has printed.
        until: When a step should be over (CLOCK_MONOTONIC); None: that may take any time.
    """

    def __init__(self, stop: _Stop, command: str) -> None:
        self.text = ""
        self.until: float | None = None
        self._stop = stop
        self._command: str | None = command  # None: it is sent
        with contextlib.suppress(_GoneError):
            stop.send(attach=True)

    def feed(self) -> bool:
        """Receive once. Returns whether the answer is complete."""
        try:
            messages = self._stop.feed()
            while messages:
                if self._handle(messages.pop(0)):
                    return True
        except _GoneError:
            self.text += f"({self._stop.end() or 'has closed the connection'})\n"
            return True
        return False

    def _handle(self, message: dict[str, Any]) -> bool:
        if "end" in message:
            self.text = f"({message['end']})\n"
            return True
        if self._command is not None:
            if "prompt" in message:
                self._stop.send(line=self._command)
                self._command = None
            return False
        if message.get("runs") == "step":
            self.until = clock.now() + _STEPS_WITHIN
        elif "runs" in message:
            self.text += f"({'goes on' if message['runs'] == 'on' else 'ends'})\n"
        else:
            self.text += str(message.get("out", ""))
        return "prompt" in message or message.get("runs") in ("on", "end")


def _ask_all(stops: list[_Stop], command: str) -> None:
    """Send a command to all, and print the answers: equal ones once."""
    from phalanx._stacks.dump import group_equal

    answers = [_Answer(stop, command) for stop in stops]
    poll = select.poll()
    waiting = {}
    for stop, answer in zip(stops, answers, strict=True):
        poll.register(stop.link, select.POLLIN)
        waiting[stop.link.fileno()] = answer
    while waiting:
        ends = [answer.until for answer in waiting.values() if answer.until is not None]
        late = max(0.0, min(ends) - clock.now()) if ends else None
        for number, _ in poll.poll(None if late is None else late * 1000 + 1):
            if waiting[number].feed():
                poll.unregister(number)
                del waiting[number]
        for number in [number for number, one in waiting.items() if one.until and one.until <= clock.now()]:
            waiting.pop(number).text += "(still runs)\n"
            poll.unregister(number)
    for group, text in group_equal(dict(enumerate(answer.text for answer in answers)), str):
        click.secho(f"{_names([stops[index] for index in group])}:", bold=True)
        for line in text.splitlines():
            click.echo(f"  {_shown(line)}")


# --- a session


def _attach(stop: _Stop, command: str) -> None:
    """Have a person at the prompt of a rank, until they leave it or it ends."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # the modes of the terminal are restored
        signal.signal(number, _exit)
    session = _Session(stop, command if stop.path in command else f"{command} --rank {stop.rank}")
    try:
        stop.send(attach=True)
        while session.goes_on():
            pass
    except _LeftError:
        click.echo()
        session.say(f"runs; when it stands again: {session.back}")
    except _GoneError:
        session.say(stop.end() or f"has closed the connection; come back: {session.back}")


class _Session:
    """A person, or commands of a file, at the prompt of a rank. ``back`` is the command by which they come back."""

    def __init__(self, stop: _Stop, back: str) -> None:
        self.back = back
        self._stop = stop
        self._typed = _Typed(stop) if sys.stdin.isatty() else None
        self._read = self._typed.read if self._typed else _Piped(stop).read
        self._next: str | None = None  # a line of a file that was read before its prompt
        self._runs = False
        self._interrupts = 0  # Ctrl-C, since the rank has sent anything
        if self._typed is not None:
            signal.signal(signal.SIGINT, self._interrupt)

    def say(self, text: str) -> None:
        click.echo(printable(f"phalanx: {self._stop.name} {text}"), err=True)

    def goes_on(self) -> bool:
        """Handle what comes next. Returns False when the person leaves. Raises _GoneError."""
        message = self._stop.receive()
        self._interrupts = 0
        if "end" in message:
            raise click.ClickException(f"{self._stop.name}: {message['end']}")
        if "out" in message:
            click.echo(_shown(str(message["out"])), nl=False)
        elif "runs" in message:
            self._runs = message["runs"] != "step"
            return self._ends() if message["runs"] == "end" else message["runs"] == "step" or self._waits()
        elif "prompt" in message:
            self._runs = False
            return self._answers(str(message["prompt"]))
        return True

    def _interrupt(self, *_signal: object) -> None:
        assert self._typed is not None
        if self._typed.at_prompt:
            raise KeyboardInterrupt
        if self._runs or self._interrupts:
            raise _LeftError
        self._interrupts += 1
        self._stop.send(interrupt=True)

    def _ends(self) -> bool:
        """Whether a rank that was told to end does: it may sleep, or handle BdbQuit."""
        if self._stop.has_news(_ANSWERS_WITHIN):
            return True
        self.say(f"has not ended within {_ANSWERS_WITHIN:g} s; when it stands again: {self.back}")
        return False

    def _waits(self) -> bool:
        """Whether somebody is there for the next stop of a rank that goes on."""
        if self._typed is None:
            if self._next is None:
                self._next = self._read("")
            return self._next is not None
        self.say("goes on; you see it again when it stands, Ctrl-C leaves it")
        return True

    def _answers(self, prompt: str) -> bool:
        line, self._next = self._next, None
        if line is None:
            line = self._read(_shown(prompt))
        if line is None:
            if self._stop.is_gone():
                raise _GoneError
            self.say(f"stands on; come back: {self.back}")
            return False
        self._stop.send(line=line)
        return True


class _Piped:
    """The lines of a file or a pipe."""

    def __init__(self, stop: _Stop) -> None:
        self._rest = b""
        self._poll = select.poll()
        self._poll.register(sys.stdin, select.POLLIN)
        self._poll.register(stop.link, select.POLLRDHUP)

    def read(self, prompt: str) -> str | None:
        """Return the next line, without its end; None at the end of all. Raises _GoneError if the rank ends before."""
        while b"\n" not in self._rest:
            if sys.stdin.fileno() not in dict(self._poll.poll()):
                raise _GoneError
            data = os.read(sys.stdin.fileno(), _CHUNK)
            if not data:
                break
            self._rest += data
        line, end, self._rest = self._rest.partition(b"\n")
        if not line and not end:
            return None
        text = line.decode(errors="replace").rstrip("\r")
        if prompt:
            click.echo(f"{prompt}{text}")
        return text


class _Typed:
    """What a person types, with history and completion, while the rank stands."""

    def __init__(self, stop: _Stop) -> None:
        self.at_prompt = False
        self._stop = stop
        self._matches: list[str] = []
        with contextlib.suppress(ImportError):  # a Python that was built without it
            import readline

            readline.set_completer(self._complete)
            readline.set_completer_delims(_DELIMITERS)
            readline.parse_and_bind("tab: complete")
        signal.signal(signal.SIGALRM, self._check)

    def read(self, prompt: str) -> str | None:
        """Return a line; None for Ctrl-D. Raises _GoneError, as soon as the rank has ended."""
        signal.setitimer(signal.ITIMER_REAL, _CHECKS_EVERY, _CHECKS_EVERY)  # readline waits for the terminal alone
        try:
            while True:
                try:
                    self.at_prompt = True
                    return self._input(prompt)
                except KeyboardInterrupt:
                    click.echo()
                finally:
                    self.at_prompt = False
        except EOFError:
            click.echo()
            return None
        except _GoneError:
            click.echo()
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @staticmethod
    def _input(prompt: str) -> str:
        try:
            return input(prompt)
        except SystemError as error:
            # What a signal's handler raised: `input` has run that of another signal before it returned, which CPython
            # takes for a fault of that one.
            raise error.__cause__ or error from None

    def _check(self, *_signal: object) -> None:
        if self._stop.is_gone():
            raise _GoneError

    def _complete(self, text: str, state: int) -> str | None:
        import readline

        if state == 0:
            line = readline.get_line_buffer()
            stripped = line.lstrip()
            cut = len(line) - len(stripped)
            begin, end = readline.get_begidx() - cut, readline.get_endidx() - cut
            self._matches = self._ask(text, stripped, begin, end)
        return self._matches[state] if state < len(self._matches) else None

    def _ask(self, *parts: Any) -> list[str]:
        try:
            self._stop.send(complete=list(parts))
            found = self._stop.receive(_ANSWERS_WITHIN).get("matches")
        except _GoneError:
            return []
        return [str(each) for each in found] if isinstance(found, list) else []


def _exit(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _shown(text: str) -> str:
    """Text of a rank that stdout can express: on a terminal, without what that would obey."""
    if not sys.stdout.isatty():
        return text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding)
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
