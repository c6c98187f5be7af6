"""``phalanx top``: the ranks of a live run, drawn again and again, until the run ends.

Owns the screen, the keys and the terminal's modes. What is shown of a rank is `status`' business; what takes long, or
may not answer, is done by threads beside the one that draws.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import signal
import subprocess
import sys
import termios
import tty
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import click

from phalanx._base import clock, files
from phalanx._base.process import Process
from phalanx._base.threads import SerialExecutor
from phalanx._base.tty import is_terminal, obeys_controls, plain, printable, use_colour
from phalanx._run.control_socket import NotAnsweredError, RefusedError
from phalanx._runs.catalog import RunDir, look
from phalanx.cli import status
from phalanx.cli._commands import SETTINGS, Command
from phalanx.cli._declare import reading
from phalanx.cli._options import read_ranks, run_argument, time_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rich.text import Text

    Line = tuple[str, str] | Text  # a text and its style, or one that has several

_LEAST = 0.1  # seconds between two questions
_SOON = 0.3  # seconds until the next question, if none was answered
_MOST_TYPED = 4096  # bytes of a line, see termios(3)
_BRIEF = 1.0  # seconds without an answer that are not worth a line: a launcher begins, or ends
_KEYS = "q quit | sort: c CPU m mem r rank s step | f filter k signal l log t stack d pdb"
_SORTS: dict[str, tuple[str, Callable[[status.Row], Any]]] = {
    "r": ("RANK", lambda row: row.rank),
    "c": ("CPU%", lambda row: -(row.cpu or 0.0)),
    "m": ("MEM", lambda row: -(row.memory or 0)),
    "s": ("STEP", lambda row: row.step or 0),
}
"""By key: the column, and the order: of ranks that are in the way, first."""

_PROMPTS = {"f": "only ranks (like 0-7,12; none: all): ", "k": "signal to rank {}, like USR1: "}
_MARKS = {
    "busy": "#", "idle": ".", "breakpoint": "b", "paused": "p", "late": "!", "slow": "s", "failed": "x",
    "succeeded": "=", "ended": "-",
}  # fmt: skip
"""The cells of the map, which a terminal without colours tells apart, too."""

_IN_A_LINE = (64, 32, 16, 8)  # cells of the map
_LABEL = 6  # columns before them
_ESCAPES = {"\033[A": "up", "\033[B": "down", "\033OA": "up", "\033OB": "down", "\033": "escape"}


@click.command(cls=Command, context_settings=SETTINGS)
@click.option("--interval", callback=reading(time_of(zero=False, endless=False)), default="2s", metavar="TIME",
              help="Time between two looks, 0.1 s or more. Default: 2s.")  # fmt: skip
@run_argument(state="running")
def top(run: str | None, *, interval: float, log_dir: str | None) -> None:
    """Show the ranks of RUN, again and again, until it ends.

    \b
    phalanx top                          the latest run that runs
    phalanx top 20261120-1030 --interval 5

    The columns are those of phalanx status; CPU% and STEP/S are those since the look before. Where the screen is too
    low for all ranks, it has a map of them, a cell for each, above as many lines as fit.

    Keys: c, m, r and s sort by CPU, memory, rank and step; f asks which ranks to show; the arrows choose a rank, to
    which k sends a signal, l shows the last lines of its log, t its stacks, and d attaches as phalanx debug; q quits.

    Where stdout is no terminal, it prints a table for each look. The exit code is 1 if the launcher was killed.
    """  # noqa: D301 - the one backslash is click's mark for lines to be left as they are
    found = status.find(log_dir, run)
    if found.state == "running" and os.geteuid() not in (found.owner, files.ROOT):
        found, _ = status.ask_once(found)  # which is refused
    if found.state == "running":
        watch = _Watch(found, max(_LEAST, interval))
        with watch:
            has_ended = _Screen(watch).run() if obeys_controls(sys.stdout) else _print_all(watch)
        if not has_ended:
            return
        found = look(found.path)
    status.show(found, None, ends=True)
    if found.state == "lost":
        sys.exit(1)


class _Watch:
    """Asks the launcher of a run how it is, on a thread, and watches that it lives. A context manager.

    Attributes:
        answer, before: The latest answer, and the one before; None: there is none.
        why: Why there is no newer one; "": there is.
        since: When the first of the questions was asked that have no answer; `clock.now`.
    """

    def __init__(self, found: RunDir, interval: float) -> None:
        self.found, self.interval = found, interval
        self.answer: status.Answer | None = None
        self.before: status.Answer | None = None
        self.why = ""
        self.since = 0.0
        self._due = 0.0
        self._asks = False
        self._asking, self._working = SerialExecutor("phalanx-asking"), SerialExecutor("phalanx-working")
        self._results: deque[Callable[[], object]] = deque()
        self._held = contextlib.ExitStack()
        self._launcher: Process | None = None
        self._poll = select.poll()

    def __enter__(self) -> Self:
        run = self.found.run
        assert run is not None
        with self._held as held:
            self._bell, self.ring_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            held.callback(os.close, self._bell)
            held.callback(os.close, self.ring_fd)
            with contextlib.suppress(OSError):  # it has ended, and an answer will say so; or /proc is another's
                self._launcher = held.enter_context(Process(run.pid, start=run.pid_started))
                self._poll.register(self._launcher, select.POLLIN)
            self._poll.register(self._bell, select.POLLIN)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def watch(self, fd: int) -> None:
        """Have `wait` return when this descriptor can be read."""
        self._poll.register(fd, select.POLLIN)

    def do(self, work: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Call ``work`` on a thread, and ``then`` with what it has returned, in `wait`."""
        self._working.submit(functools.partial(self._call, work, then))

    def wait(self) -> list[int]:
        """Ask if that is due, and wait until something has happened. Returns the watched descriptors that are ready."""
        now = clock.now()
        if not self._asks and now >= self._due:
            self.since = self.since if self.why else now
            self._asks, self._due = True, now + self.interval
            self._asking.submit(functools.partial(self._call, self._ask, self._take))
        until = 1e6 if self._asks else max(0.0, self._due - now)
        ready = [fd for fd, _ in self._poll.poll(until * 1000)]
        if self._bell in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell, 4096)
        if self._launcher is not None and self._launcher.fileno() in ready:  # its record has what there is to be known
            self._poll.unregister(self._launcher)
            self._due = 0.0
        while self._results:
            self._results.popleft()()
        return ready

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, or its launcher was killed, as `found` has it."""
        return self.found.state != "running"

    def _ask(self) -> tuple[status.Answer | None, str, RunDir]:
        try:
            return status.ask(self.found), "", self.found
        except (NotAnsweredError, RefusedError) as error:
            return None, str(error), look(self.found.path)

    def _take(self, asked: tuple[status.Answer | None, str, RunDir]) -> None:
        answer, self.why, self.found = asked
        self._asks = False
        if answer is not None:
            self.answer, self.before = answer, self.answer
        else:
            self._due = min(self._due, clock.now() + _SOON)

    def _call(self, work: Callable[[], Any], then: Callable[[Any], object]) -> None:
        result = work()
        self._results.append(lambda: then(result))
        with contextlib.suppress(OSError):  # it is full, which wakes as well; or the end has come
            os.write(self.ring_fd, b"\0")


def _print_all(watch: _Watch) -> bool:
    """Print a table for each answer, and why there is none, until the run has ended. Returns whether it has: true."""
    printed: status.Answer | None = None
    why = ""
    while True:
        watch.wait()
        if watch.has_ended:
            return True
        if not watch.why:
            why = ""
        elif watch.why != why and clock.now() - watch.since >= _BRIEF:
            why = watch.why
            click.echo(printable(f"phalanx: {watch.found.name}: {why}"), err=True)
        if watch.answer is not None and watch.answer is not printed:
            printed = watch.answer
            status.show(watch.found, printed, watch.before)
            click.echo()


class _Screen:
    """Draws on a terminal, and obeys keys."""

    def __init__(self, watch: _Watch) -> None:
        from rich.console import Console
        from rich.live import Live

        colour = use_colour(sys.stdout)
        self._watch = watch
        self._console = Console(  # not `sys.stdout` as it is then: see `_stacks_of`
            file=sys.stdout, highlight=False, no_color=not colour, color_system="standard" if colour else None
        )
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
            vertical_overflow="crop",
        )  # fmt: skip
        self._keys = 0 if is_terminal(0) and sys.stdin is not None else -1
        self._modes: list[Any] | None = None  # of the terminal, as they were
        self._flags: set[str] = set()  # of signals that have come
        self._over = False
        self._sort, self._only, self._chosen = "r", set[int](), -1
        self._prompt, self._typed, self._message = "", "", ""
        self._text: list[str] = []  # in place of the table

    def run(self) -> bool:
        """Draw until the run has ended. Returns whether it has; False: somebody has quit."""
        with contextlib.ExitStack() as held:
            self._handle_signals(held)
            held.callback(self._leave)
            self._enter()
            if self._keys >= 0:
                self._watch.watch(self._keys)
            while not self._over and not self._watch.has_ended:
                self._live.update(self._drawing(), refresh=True)
                ready = self._watch.wait()
                if self._keys in ready:
                    self._read_keys()
                if self._flags:
                    self._obey()
        return not self._over

    # --- the terminal

    def _enter(self) -> None:
        if self._keys >= 0:
            with contextlib.suppress(termios.error):
                self._modes = self._modes or termios.tcgetattr(self._keys)
                tty.setcbreak(self._keys, termios.TCSANOW)
        self._live.start()

    def _leave(self) -> None:
        if self._modes is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSANOW, self._modes)
        self._live.stop()

    def _handle_signals(self, held: contextlib.ExitStack) -> None:
        """Have signals restore the terminal before they do what they do, or draw again. They wake `_Watch.wait`."""

        def end(number: int, _frame: FrameType | None) -> None:
            sys.exit(128 + number)

        def flag(name: str, _number: int, _frame: FrameType | None) -> None:
            self._flags.add(name)

        flags = {signal.SIGTSTP: "stop", signal.SIGCONT: "go on", signal.SIGWINCH: "size"}
        handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), end)
        handlers |= {number: functools.partial(flag, name) for number, name in flags.items()}
        held.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._watch.ring_fd, warn_on_full_buffer=False))
        for number, handler in handlers.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                held.callback(signal.signal, number, signal.signal(number, handler))

    def _obey(self) -> None:
        """Do what signals have asked for."""
        flags, self._flags = self._flags, set()
        if "stop" in flags:
            self._leave()
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # which returns when it goes on
            signal.signal(signal.SIGTSTP, handler)
        if flags & {"stop", "go on"}:  # a shell may have set other modes meanwhile
            self._live.stop()
            self._enter()

    # --- the keys

    def _read_keys(self) -> None:
        try:
            data = os.read(self._keys, 1024)
        except OSError:
            data = b""
        if not data:  # the terminal has gone
            self._over = True
        text = data.decode("utf-8", "replace")
        while text and not self._over:
            sequence = text[:3] if text[:3] in _ESCAPES else text[0]
            text = text[len(sequence) :]
            self._press(_ESCAPES.get(sequence, sequence))

    def _press(self, key: str) -> None:
        self._message = ""
        if self._prompt:
            self._type(key)
        elif self._text:
            self._text = []
        elif key == "q":
            self._over = True
        elif key in _SORTS:
            self._sort = key
        elif key in ("up", "down"):
            rows = self._rows()
            at = next((index for index, row in enumerate(rows) if row.rank == self._chosen), None)
            if rows:
                step = 0 if at is None else at + (1 if key == "down" else -1)
                self._chosen = rows[min(max(step, 0), len(rows) - 1)].rank
        elif key == "f" or (key in ("k", "l", "t", "d") and self._row() is not None):
            if key in _PROMPTS:
                self._prompt, self._typed = key, ""
            else:
                (self._debug if key == "d" else self._show_text)(key)
        elif key in ("k", "l", "t", "d"):
            self._message = "choose a rank first, by the arrows"

    def _type(self, key: str) -> None:
        """Take a key of an answer that is being typed."""
        if key == "escape":
            self._prompt = ""
        elif key in ("\x7f", "\b"):
            self._typed = self._typed[:-1]
        elif key in ("\n", "\r"):
            prompt, self._prompt = self._prompt, ""
            (self._filter if prompt == "f" else self._signal)(self._typed.strip())
        elif len(key) == 1 and key.isprintable():
            self._typed += key

    def _filter(self, text: str) -> None:
        try:
            self._only = read_ranks(text) if text else set()
        except ValueError as error:
            self._message = str(error)

    def _signal(self, text: str) -> None:
        from phalanx._run.attached import AttachedRun
        from phalanx.cli.control import read_signal

        row = self._row()
        if row is None or not text:
            return
        try:
            number = read_signal(text)
        except ValueError as error:
            self._message = str(error)
            return

        def send() -> str:
            try:
                sent = AttachedRun(self._watch.found).signal(number, [row.rank])
            except RuntimeError as error:
                return str(error)
            return f"{number.name} to rank {row.rank}" if sent else f"rank {row.rank} does not run"

        self._watch.do(send, functools.partial(setattr, self, "_message"))

    def _show_text(self, key: str) -> None:
        row = self._row()
        assert row is not None
        work = functools.partial(_log_of if key == "l" else _stacks_of, self._watch.found, row)
        self._message = f"{'the log' if key == 'l' else 'the stacks'} of rank {row.rank} ..."

        def take(lines: list[str]) -> None:
            self._text, self._message = lines, ""

        self._watch.do(work, take)

    def _debug(self, _key: str) -> None:
        """Give the terminal to ``phalanx debug`` for the chosen rank, and come back when it has ended."""
        found, row = self._watch.found, self._row()
        assert row is not None
        if not _is_here(found, row):
            self._message = f"rank {row.rank} runs on {row.host}: phalanx debug reaches it there"
            return
        self._leave()
        # Ctrl-C is for the debugger alone; Ctrl-Z stops both. A handler of ours is none in another program.
        handlers: dict[int, Any] = {signal.SIGINT: lambda *_: None, signal.SIGTSTP: signal.SIG_DFL}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            argv = [sys.executable, "-P", "-m", "phalanx", "debug", found.path, "--rank", str(row.rank)]
            if subprocess.call(argv):  # it has printed why
                click.echo("phalanx: Enter: back to phalanx top", err=True)
                os.read(self._keys, _MOST_TYPED)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self._enter()

    # --- what is drawn

    def _rows(self) -> list[status.Row]:
        """Return the rows that are to be shown, in their order."""
        answer = self._watch.answer
        rows = [] if answer is None else status.rows_of(answer, self._watch.before)
        return sorted((row for row in rows if not self._only or row.rank in self._only), key=_SORTS[self._sort][1])

    def _row(self) -> status.Row | None:
        """Return the chosen row."""
        return next((row for row in self._rows() if row.rank == self._chosen), None)

    def _drawing(self) -> Text:
        from rich.text import Text

        width, height = self._console.size
        lines = self._text_lines(height - 1) if self._text else self._table_lines(width, height - 1)
        prompt = _PROMPTS.get(self._prompt, "").format(self._chosen) + self._typed
        footer = "any key: back" if self._text else f"{prompt}_" if self._prompt else self._message or _KEYS
        del lines[height - 1 :]
        lines += [("", "")] * (height - 1 - len(lines))
        drawn = [
            line if isinstance(line, Text) else Text(status.cut(printable(line[0]), width), line[1])
            for line in (*lines, (footer, "reverse"))
        ]
        return Text("\n", no_wrap=True, overflow="crop", end="").join(drawn)

    def _text_lines(self, height: int) -> list[Line]:
        return [(line, "") for line in self._text[:1] + self._text[1:][-height + 1 :]]

    def _table_lines(self, width: int, height: int) -> list[Line]:
        answer, found = self._watch.answer, self._watch.found
        why = [(self._watch.why, "yellow")] if self._watch.why else []
        if answer is None:
            return [(f"{found.name}: asking its launcher ...", "bold"), *why]
        rows = self._rows()
        lines: list[Line] = [(line, "") for line in status.heading(found, answer)]
        lines += [*why, *((line, "yellow") for line in status.unanswered(answer)[:3])]
        if self._only:
            lines.append((f"only {len(rows)} of the ranks (f: filter)", ""))
        lines.append(("", ""))
        every = status.rows_of(answer, self._watch.before)
        if len(rows) + 1 > height - len(lines):
            lines += [*_map(every, self._chosen, width, (height - len(lines)) // 2), ("", "")]
        heads, cells = status.table(rows, width)
        if heads:
            lines.append(("  ".join(heads), "bold"))
        fit = max(1, height - len(lines))
        chosen = next((index for index, row in enumerate(rows) if row.rank == self._chosen), 0)
        first = max(0, min(chosen - fit // 2, len(rows) - fit))
        for row, line in list(zip(rows, cells, strict=True))[first : first + fit]:
            is_chosen = " reverse" * (row.rank == self._chosen)
            lines.append(("  ".join(line), status.COLOURS[row.looks()] + is_chosen))
        return lines


def _map(rows: list[status.Row], chosen: int, width: int, most: int) -> list[Line]:
    """Return a map of ranks in ``most`` lines, and what its cells mean."""
    from rich.text import Text

    count = next((count for count in _IN_A_LINE if count + _LABEL <= width), 1)
    looks = {row.rank: row.looks() for row in rows}
    found = Counter(looks.values())
    lines: list[Line] = []
    for first in sorted({rank // count * count for rank in looks})[:most]:
        line = Text(f"{first:>{_LABEL - 1}} ")
        for rank in range(first, first + count):
            look = looks.get(rank, "")
            line.append(_MARKS.get(look, " "), status.COLOURS.get(look, "") + " reverse" * (rank == chosen))
        lines.append(line)
    return [*lines, ("  ".join(f"{mark} {found[look]} {look}" for look, mark in _MARKS.items() if found[look]), "")]


def _is_here(found: RunDir, row: status.Row) -> bool:
    """Whether a rank is on the machine of the launcher whose run's folder this is."""
    return found.run is not None and row.facts["launcher"] == found.run.pid


def _log_of(found: RunDir, row: status.Row) -> list[str]:
    """Return the last lines of a rank's log."""
    from phalanx._logs.follower import last_lines

    facts = row.facts
    if not _is_here(found, row):
        return [f"rank {row.rank} runs on {row.host}, where its log is"]
    folder = os.path.join(found.path, f"attempt_{facts['attempt']}", str(facts["local_rank"]))
    lines = []
    for name in ("stdout", "stderr"):
        text = plain(last_lines(os.path.join(folder, f"{name}.log"), rotates=True).decode("utf-8", "backslashreplace"))
        lines += [f"{name}:", *text.splitlines(), ""] if text else []
    return [f"the last lines of rank {row.rank}", "", *(lines or ["it has written nothing to a log file"])]


def _stacks_of(found: RunDir, row: status.Row) -> list[str]:
    """Return what ``phalanx stack`` shows of a rank."""
    from phalanx.cli.stack import stack

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            stack.main([found.path, "--rank", str(row.rank)], prog_name="phalanx stack", standalone_mode=False)
        except click.ClickException as error:
            shown.write(error.message)
        except SystemExit:  # there was no stack to show
            pass
    return shown.getvalue().splitlines() or ["it has no stack"]
