"""What a worker writes can put text and colours on a terminal, and do nothing else to it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx._base import clock
from phalanx._base.stderr import tell
from phalanx._base.tty import Colours, escape_json, sanitise
from phalanx._logs.lines import Source
from phalanx._logs.prefixes import Prefixes
from phalanx._logs.render import Json, Text, View
from phalanx._logs.terminal import PlainOutput, TerminalOutput, visible
from phalanx.errors import ChildFailedError, ProcessFailure
from phalanx.spawn import ProcessRaisedException, spawn
from tests.support.command import Place, on_a_terminal
from tests.support.fake_clock import FakeClock
from tests.support.pump_tools import Memory

INPUTS = int(os.environ.get("PHALANX_TEST_INPUTS", "20000"))
few = settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))

SGR = rb"\033\[[0-9:;]*m"
OURS = rb"\033\[\?7[hl]|\r\033\[(?:[0-9]+A\033\[)?J"  # a screen's: autowrap, and the erasure of live lines
LETTER = (
    rb"[\t\n\r -~]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"  # UTF-8
    rb"|[\xa0-\xff]"  # or Latin-1
)
ALLOWED = re.compile(rb"(?:" + SGR + rb"|" + OURS + rb"|" + LETTER + rb")*+")
FORBIDDEN = re.compile("[\x80-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def obeyed(sent: bytes) -> str:
    """The first thing in ``sent`` that is neither text nor a colour; nothing if there is none.

    It is read as a terminal reads it: byte by byte, and with UTF-8 that is not whole as what its bytes are.
    """
    found = ALLOWED.match(sent)
    assert found is not None
    place = found.end()
    if place < len(sent):
        return repr(sent[max(0, place - 8) : place + 16])
    bad = FORBIDDEN.search(sent.decode("utf-8", "surrogateescape"))
    return repr(bad[0]) if bad else ""


PARTS = [
    b"\033", b"[", b"]", b"P", b"_", b"^", b"X", b"m", b"A", b"K", b"J", b"?", b">", b"0", b"31", b";", b":", b"(B",
    b"\033[", b"\033]0;t", b"\033]52;c;", b"\a", b"\033\\", b"\x9b", b"\x9d", b"\x9c", b"\xc2", b"\xe2", b"\x80",
    b"\x81", b"\xae", b"\xa6", b"\xd8", b"\033[31m", b"\033[0m", b"\033[m", b"\033[1;4m", b"\033[39m", b"\033[A",
    b"\033[2K", b"\xe6", b"\xa2",
    b"\033[?1049h", b"\033[6n", b"\033c", b"\0", b"\b", b"\x0e", b"\x0f", b"\x05", b"\x7f", b"\v", b"\f", b"\r",
    b"\n", b"\r\n", b"\t", b"x", b"text", "\N{RIGHT-TO-LEFT OVERRIDE}".encode(), "\u2066".encode(), "\u2028".encode(),
    "\x9b".encode(), "é".encode(), "漢".encode(), "🙂".encode(), b"\033[" + b"1;" * 200 + b"m",
]  # fmt: skip
PIECES = st.lists(st.one_of(st.sampled_from(PARTS), st.sampled_from(PARTS), st.binary(max_size=4)), max_size=24)


def check_stream(chunks: list[bytes]) -> None:
    colours = Colours()
    assert not obeyed(b"".join(map(colours.render, chunks)))


def check_rest(chunks: list[bytes]) -> None:
    """Lines of ours, live lines, and JSON."""
    data = b"".join(chunks)
    text = data.decode("utf-8", "surrogateescape")
    ours = sanitise(text)
    assert not obeyed(ours.encode("utf-8", "surrogateescape"))
    assert not re.search(r"\r(?!\n)", ours)
    live = visible(data, 20)
    assert not obeyed(live)
    assert not re.search(rb"[\t\r\n]", live)
    quoted = json.dumps(data.decode("utf-8", "backslashreplace"), ensure_ascii=False)
    assert json.loads(escape_json(quoted)) == json.loads(quoted)
    assert not obeyed(escape_json(quoted).encode())


@pytest.mark.long
def test_very_many_pieces() -> None:
    """By chance alone: Hypothesis takes a millisecond to think of one."""
    seed = os.environ.get("PHALANX_TEST_SEED") or os.urandom(8).hex()
    dice = random.Random(seed)  # noqa: S311 - no secret
    for number in range(INPUTS):
        chunks = [b"".join(dice.choices(PARTS, k=dice.randrange(12))) for _ in range(dice.randrange(1, 4))]
        try:
            (check_rest if number % 4 == 0 else check_stream)(chunks)
        except AssertionError as error:
            error.add_note(f"of {chunks!r}, PHALANX_TEST_SEED={seed}")
            raise


@contextlib.contextmanager
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    time = FakeClock(100.0)
    with monkeypatch.context() as patch:
        patch.setattr(clock, "now", time)
        yield time


@pytest.mark.long
@pytest.mark.parametrize("screen", [False, True], ids=["paper", "screen"])
def test_what_ranks_write_in_turns(screen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished lines, progress bars and their ends included; each rank's colours are its own."""
    with stopped_clock(monkeypatch) as time:

        @few
        @given(st.lists(st.tuples(st.integers(0, 2), PIECES.map(b"".join), st.booleans()), max_size=8))
        def check(turns: list[tuple[int, bytes, bool]]) -> None:
            memory = Memory()
            output = TerminalOutput(memory, lambda: (20, 8)) if screen else PlainOutput(memory)
            view = View(output, Text(), sanitise=True)
            sources = [Source(rank, "stdout", b"[%d] " % rank) for rank in range(3)]
            for rank, data, pause in turns:
                view.take(sources[rank], data)
                view.settle()
                if pause:
                    time.advance(2.0)
                    view.tick()
                    view.settle()
            for source in sources:
                view.finish(source)
            view.close()
            sent = memory.taken()
            assert not obeyed(sent)
            for line in sent.split(b"\n"):
                codes = re.findall(SGR, line)
                assert not codes or codes[-1] in (b"\033[m", b"\033[0m") or not codes[-1].strip(b"\033[0:;m"), line

        check()


@pytest.mark.parametrize(
    "lines,sent",
    [
        (b"plain\n", b"plain\n"),
        ("Ünïcödé 漢字 🙂 „quoted“\n".encode(), None),
        (b"\xe9t\xe9\n", None),  # Latin-1
        (b"\033[31mred\033[0m\n", None),
        (b"\033[31mred\n\nstill\033[0m\nnot\n", b"\033[31mred\033[0m\n\n\033[31mstill\033[0m\nnot\n"),
        (b"\033[1m\033[31mA\033[39mB\nC\n", b"\033[1m\033[31mA\033[39mB\033[0m\nC\n"),
        (b"\033[1mA\033[0;32mB\nC\033[m\n", b"\033[1mA\033[0;32mB\033[0m\n\033[0;32mC\033[m\n"),
        (b"\033[38;5;0mA\nB\n", b"\033[38;5;0mA\033[0m\n\033[38;5;0mB\033[0m\n"),
        (b"50%\033[K\n\033[2K\033[1A60%\033[?25h\n", b"50%\n60%\n"),
        (b"\033[1mbold\033(B\033[m\017.\n", b"\033[1mbold\033[m.\n"),
        (b"\033]8;;http://x\033\\link\033]8;;\033\\\n", rb"\x1b]8;;http://x\x1b\link\x1b]8;;\x1b\ "[:-1] + b"\n"),
        (b"\x1bPq" + b"z" * 5000 + b"\nnext\n", rb"\x1bPq" + b"z" * 5000 + b"\nnext\n"),
        (b"\033" * 3 + b"[31m\n", rb"\x1b\x1b" + b"\033[31m\033[0m\n"),
        (b"\xe6\033[0m\x9b\xa2\n", b"\xe6\033[0m\\x9b\xa2\n"),
        (b"\x9b2J \xc2\x9b2J\n", rb"\x9b2J \x9b2J" + b"\n"),
        ("a\u202eb\u2066c\u200ed\u200be\n".encode(), "a\\u202eb\\u2066c\\u200ed\u200be\n".encode()),
    ],
)  # fmt: skip
def test_what_is_sent_of_lines(lines: bytes, sent: bytes | None) -> None:
    assert Colours().render(lines) == (lines if sent is None else sent)


def test_colours_that_never_end_are_kept_within_bounds() -> None:
    colours = Colours()
    assert max(len(colours.render(b"\033[38;5;%dmx\n" % (number % 256))) for number in range(2000)) < 500


# --- from end to end

NASTY = (
    "\033]0;title\a", "\033]52;c;aGk=\a", "\033[6n", "\033[c", "\033P$qm\033\\", "\033[?1049h", "\033[2J\033[H",
    "\033[5;9r", "\x9b2J", "\udc9b2J", "\N{RIGHT-TO-LEFT OVERRIDE}abc", "a\bb\a", "\x0e\x0f", "\033]unended",
    "\033[Aup\033[K", "\033[31mred",
)  # fmt: skip
WRITES = f"""import sys
for text in {NASTY!r}:
    data = text.encode("utf-8", "surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        stream.buffer.write(data + b"\\n")
        stream.flush()
"""


# The first to fail has the other one ended: that has written all by then. A FIFO is opened by two of them, or by none.
MEETS = """
import os
os.close(os.open("met", os.O_RDONLY if os.environ["RANK"] == "0" else os.O_WRONLY))
"""


def phalanx_on_a_terminal(place: Place, *argv: object, **env: str) -> bytes:
    return on_a_terminal(place, [sys.executable, "-m", "phalanx", *argv], **env)[1]


@pytest.mark.long
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_run_and_its_logs(place: Place, term: str) -> None:
    os.mkfifo(place.folder / "met")
    script = place.write(WRITES + MEETS + "raise SystemExit(3)")
    run = ("run", "--log-dir", place.logs, "--nproc-per-node", 2, "--role", "evil\033]0;role\a", script)
    sent = phalanx_on_a_terminal(place, *run, TERM=term, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${role_name}${rank}]:")
    assert not obeyed(sent)
    assert sent.count(rb"\x1b]52;c;aGk=\x07") >= 4
    assert b"FAILED" in sent
    (folder,) = place.logs.iterdir()
    written = "".join(f"{text}\n" for text in NASTY).encode("utf-8", "surrogateescape")
    for rank in range(2):
        for stream in ("stdout", "stderr"):
            assert (folder / f"attempt_0/{rank}/{stream}.log").read_bytes() == written
    more = (("--log-format", "json"), ("--fold",), ("-n", 10), ("--grep", ".")) if term == "xterm" else ()
    for options in ((), *more):
        sent = phalanx_on_a_terminal(place, "logs", "--log-dir", place.logs, *options, TERM=term)
        assert not obeyed(sent), options
        assert b"red" in sent
    for command in ("runs", "runs --json"):
        assert not obeyed(phalanx_on_a_terminal(place, *command.split(), "--log-dir", place.logs, TERM=term))


@pytest.mark.long
def test_raw_and_whatever_is_no_terminal_get_all(place: Place) -> None:
    script = place.write(WRITES)
    sent = phalanx_on_a_terminal(place, "run", "--log-dir", place.logs, "--raw", script)
    assert b"\033]52;c;aGk=\a" in sent
    assert b"\033]52;c;aGk=\a" in phalanx_on_a_terminal(place, "logs", "--raw", "--log-dir", place.logs)
    assert b"\033]52;c;aGk=\a" in phalanx_on_a_terminal(place, "logs", "--log-dir", place.logs, PHALANX_RAW="1")
    command = [sys.executable, "-m", "phalanx", "logs", "--stdout", "--log-dir", str(place.logs)]
    piped = subprocess.run(command, env=place.env, cwd=place.folder, capture_output=True, check=True).stdout
    assert piped == b"".join(b"[0] %b\n" % text.encode("utf-8", "surrogateescape") for text in NASTY)


GROUP = """
import sys
from phalanx.multiprocessing import ConsoleSpecs, DefaultLogsSpecs, Std, start_processes
from phalanx.multiprocessing.tail_log import TailLog

logs = DefaultLogsSpecs(sys.argv[1], redirects=Std.NONE, tee=Std.ALL)
args = (sys.argv[2],)
prefixes = {0: "evil\\033[2J"}
with start_processes("g", sys.executable, {0: args}, logs_specs=logs, log_line_prefixes=prefixes) as group:
    result = group.wait()
tail = TailLog("tail", {0: result.stdouts[0]}, sys.stdout).start()
tail.stop()
"""


def test_a_group_and_a_tail_of_python_code(place: Place) -> None:
    argv = [sys.executable, place.write(GROUP, "group.py"), place.logs, place.write(WRITES)]
    _status, sent = on_a_terminal(place, argv)
    assert not obeyed(sent)
    assert sent.count(rb"\x1b]52;c;aGk=\x07") == 3


def test_what_we_say_ourselves(capfd: pytest.CaptureFixture[str]) -> None:
    tell("rank 0: \033]0;title\a\033[1mbold\nand a name: \N{RIGHT-TO-LEFT OVERRIDE}")
    assert capfd.readouterr().err == (
        "rank 0: \\x1b]0;title\\x07\033[1mbold\033[0m\n\033[1mand a name: \\u202e\033[0m\n"
    )


def raise_(_rank: int, text: str) -> None:
    raise ValueError(text)


@pytest.mark.long
def test_errors_that_python_prints() -> None:
    nasty = "".join(NASTY).replace("\udc9b", "\x9b")
    failure = ProcessFailure(0, 1, 1, "<N/A>", told=(nasty, nasty, 0))
    assert not obeyed(str(ChildFailedError(nasty, {0: failure}, log_dir=nasty)).encode())
    with pytest.raises(ProcessRaisedException) as caught:
        spawn(raise_, (nasty,))
    assert not obeyed(str(caught.value).encode())
    assert r"\x1b]52;c;aGk=\x07" in str(caught.value)


def test_a_prefix_with_names_of_others() -> None:
    envs = {0: {"RANK": "0", "ROLE_NAME": "evil\033[2J\033]0;role\a"}}
    prefixes = Prefixes(envs, template="\033[1m${role_name}\033[0m ")
    assert prefixes.of(0, colour=True) == b"\033[1mevil" + rb"\x1b[2J\x1b]0;role\x07" + b"\033[0m "


def test_json_says_the_same() -> None:
    memory = Memory()
    view = View(PlainOutput(memory), Json(), sanitise=True)
    view.take(Source(0, "stdout"), "a\x9b\u202e\x7fé\n".encode())
    sent = memory.taken()
    assert not obeyed(sent)
    assert "é".encode() in sent
    assert json.loads(sent)["text"] == "a\x9b\u202e\x7fé"
