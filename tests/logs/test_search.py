"""Searches: which lines are chosen, whatever the pattern, the text and the blocks; and what they cost."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._logs import patterns
from phalanx._logs import search as module
from phalanx._logs.search import Only, Search
from phalanx.multiprocessing import ConsoleSpecs
from tests.support.helpers import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterable

LANE = "rank 0"


def chosen(search: Search | Only, *blocks: bytes, source: object = LANE) -> bytes:
    return b"".join(lines for block in blocks for _moment, lines in search.choose(source, block, 0.0))


# --- what a line is


@pytest.mark.parametrize(
    "pattern,text,lines",
    [
        ("^$", b"\n", b"\n"),
        ("^$", b"a\n\nb\n", b"\n"),
        ("", b"a\n\n", b"a\n\n"),
        ("a$", b"a\r\nb\r\na\nab\r\n", b"a\r\na\n"),
        ("^$", b"\r\n", b"\r\n"),
        ("[äö]", "a\nä\nö\nã\n".encode(), "ä\nö\n".encode()),
        ("^.$", "ä\nab\n€\n😀\n".encode(), "ä\n€\n😀\n".encode()),
        ("^.b$", b"\377b\nab\nabb\n", b"\377b\nab\n"),
        ("b", b"\377b\n\376c\n", b"\377b\n"),
        ("^loss$", b"\033[31mlo\033[1;4mss\033[0m\nloss.\n", b"\033[31mlo\033[1;4mss\033[0m\n"),
        ("loss", b"\033[31mlo\033[0mss\n", b"\033[31mlo\033[0mss\n"),
        ("m", b"\033[31mred\033[0m\n", b""),
        ("^here$", b"\033]8;;http://x/\033\\here\033]8;;\033\\\n", b"\033]8;;http://x/\033\\here\033]8;;\033\\\n"),
        ("^next$", b"\033]0;a title without an end\nnext\n", b"next\n"),
        ("^next$", b"\033\nnext\n\033[31\nnext\n\033(\nnext\n", b"next\n" * 3),
        ("a\\sb|c\\Wd|e\\Df|g[^x]h|i[\\s\\S]j", b"a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n", b""),
        ("a\\sb|c\\Wd|e\\Df|g[^x]h", b"a b\nc-d\ne-f\ng-h\n", b"a b\nc-d\ne-f\ng-h\n"),
        (r"\Ab\z", b"ab\nb\nbc\n", b"b\n"),
        ("(?s)a.b", b"a\nb\naxb\n", b"axb\n"),
        (r"[^]]x", b"]x\nax\n\nx\n", b"ax\n"),
        (r"[^-]x", b"-x\nax\n", b"ax\n"),
        ("a\nb", b"a\nb\n", b""),
        (r"\bb\b", b"a b c\nabc\nb\n", b"a b c\nb\n"),
        ("(?i)LOSS", b"Loss\nlos\n", b"Loss\n"),
        ("x{0}", b"a\n", b"a\n"),
        ("a.c", b"a\000c\n", b"a\000c\n"),
    ],
)
def test_a_line(pattern: str, text: bytes, lines: bytes) -> None:
    assert chosen(Search([pattern]), text) == lines
    assert chosen(Search([pattern, pattern]), text) == lines  # whichever way it is searched for
    every = Search([pattern])
    assert b"".join(line for line in split(text) if every.wants(line)) == lines
    assert chosen(Search([], [pattern]), text) == b"".join(line for line in split(text) if line not in split(lines))


def split(text: bytes) -> list[bytes]:
    return [line + b"\n" for line in text[:-1].split(b"\n")] if text else []


PARTS = st.sampled_from(
    ["a", "b", "ä", " ", ".", "^", "$", "\\s", "\\W", "[^a]", "[ab]", "[äb]", "a|b", "(a|ab)+", "\\b"]
)
PATTERNS = st.lists(PARTS, min_size=1, max_size=4).map("".join)
LINES = st.lists(st.sampled_from(["", "a", "b", "ab", "ba", "ä", " a", "a b", "c", "aab"]), min_size=1, max_size=12)


@pytest.mark.slow
@given(PATTERNS, PATTERNS, LINES)
def test_lines_are_those_that_another_engine_finds(one: str, two: str, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    search = re.compile(one, re.ASCII).search  # its \W and \b are of ASCII, as RE2's are
    other = re.compile(two, re.ASCII).search
    assert chosen(Search([one]), text).decode().split("\n")[:-1] == [line for line in lines if search(line)]
    expected = [line for line in lines if (search(line) or other(line))]
    assert chosen(Search([one, two]), text).decode().split("\n")[:-1] == expected
    expected = [line for line in lines if search(line) and not other(line)]
    assert chosen(Search([one], [two]), text).decode().split("\n")[:-1] == expected


@pytest.mark.long
@given(LINES, st.data())
def test_what_is_not_read_changes_no_choice(lines: list[str], data: st.DataObject) -> None:
    unread = st.sampled_from([b"", b"\033[1;31m", b"\033[0m", b"\033[2K", b"\033]0;a b\007", b"\033(B"])
    ends = st.sampled_from([b"\n", b"\r\n", b"\r\r\n"])
    for pattern in ("a", "a|b$", "^$", "b+", r"\Aa"):
        raw = [
            b"".join(data.draw(unread) + letter.encode() for letter in line) + data.draw(unread) + data.draw(ends)
            for line in lines
        ]
        plain = {line: bool(chosen(Search([pattern]), f"{line}\n".encode())) for line in lines}
        expected = b"".join(text for text, line in zip(raw, lines, strict=True) if plain[line])
        assert chosen(Search([pattern]), b"".join(raw)) == expected


@pytest.mark.parametrize("dense", [False, True])
def test_a_word_is_found_in_many_lines_and_in_few(dense: bool) -> None:
    lines = [b"%d %s\n" % (n, b"word" if dense or n % 1000 == 7 else b"none") for n in range(5000)]
    assert chosen(Search(["word"]), b"".join(lines)) == b"".join(line for line in lines if b"word" in line)


def test_large_letters_for_small_ones() -> None:
    text = "LOSS\nÄrger\nloss\nlos\n".encode()
    assert chosen(Search(["loss", "ä"], ignore_case=True), text) == "LOSS\nÄrger\nloss\n".encode()
    assert chosen(Search([], ["LOSS"], ignore_case=True), text) == "Ärger\nlos\n".encode()


def test_what_is_excluded_is_no_context() -> None:
    text = b"noise\n1\nnoise\nhit\nnoise\n2\nnoise\n3\n"
    assert chosen(Search(["hit"], ["noise"], before=1, after=1), text) == b"1\nhit\n2\n"


# --- context


def reference(lines: list[str], before: int, after: int) -> list[str]:
    """What grep prints: `a` is what is looked for."""
    wanted = sorted(
        {
            near
            for place, line in enumerate(lines)
            if "a" in line
            for near in range(max(0, place - before), min(len(lines), place + after + 1))
        }
    )
    printed: list[str] = []
    for place, number in enumerate(wanted):
        if place and wanted[place - 1] != number - 1 and (before or after):
            printed.append("--")
        printed.append(lines[number])
    return printed


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(["", "a", "b", "c", "a b"]), max_size=30),
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.integers(0, 30), max_size=5),
    st.sampled_from(["a", "[a]", r"\A.*a"]),
)
def test_context_is_greps_however_the_lines_come(
    lines: list[str], before: int, after: int, cuts: list[int], pattern: str
) -> None:
    places = sorted({0, len(lines), *(cut for cut in cuts if cut < len(lines))})
    parts = [lines[start:end] for start, end in itertools.pairwise(places)]
    blocks = ["".join(f"{line}\n" for line in part).encode() for part in parts]
    expected = "".join(f"{line}\n" for line in reference(lines, before, after)).encode()
    assert chosen(Search([pattern], before=before, after=after), *blocks) == expected


def test_context_is_what_grep_prints() -> None:
    lines = ["a", "b", "c", "d", "a", "e", "f", "g", "h", "a", "a", "i"]
    text = "".join(f"{line}\n" for line in lines).encode()
    done = subprocess.run(["grep", "-B1", "-A2", "a"], input=text, capture_output=True, check=True)
    assert chosen(Search(["a"], before=1, after=2), text) == done.stdout


def test_each_lane_has_its_own_context() -> None:
    search = Search(["hit"], before=1, after=1)
    assert chosen(search, b"of one\n", source=1) == b""
    assert chosen(search, b"hit\n", source=2) == b"hit\n"
    assert chosen(search, b"hit\n", source=1) == b"of one\nhit\n"
    assert chosen(search, b"after\nnone\n", source=2) == b"after\n"


def test_context_keeps_its_time() -> None:
    search = Search(["hit"], before=2)
    assert list(search.choose(LANE, b"0\n1\n", 1.0)) == []
    assert list(search.choose(LANE, b"2\n", 2.0)) == []
    assert list(search.choose(LANE, b"hit\n", 3.0)) == [(1.0, b"1\n"), (2.0, b"2\n"), (3.0, b"hit\n")]
    assert list(search.choose(LANE, b"4\n5\n6\n", 4.0)) == []
    after = [(4.0, b"--\n"), (4.0, b"5\n"), (4.0, b"6\n"), (5.0, b"hit\n")]  # a separator is as old as what it precedes
    assert list(search.choose(LANE, b"hit\n", 5.0)) == after


def test_what_is_held_as_context_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_HELD", 16 * (6 + 64))
    search = Search(["hit"], before=1000)
    for n in range(1000):
        assert chosen(search, b"%05d\n" % n) == b""
    assert chosen(search, b"hit\n") == b"".join(b"%05d\n" % n for n in range(1000 - 16, 1000)) + b"hit\n"
    assert chosen(search, b"x" * 2000 + b"\n", b"hit\n") == b"--\nhit\n"


def test_what_cannot_be_held_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    lines_of = module._lines

    def lines(block: bytes) -> list[bytes]:
        taken.append(block.count(b"\n"))
        return lines_of(block)

    monkeypatch.setattr(module, "_lines", lines)
    search = Search(["hit"], before=1_000_000)
    assert chosen(search, b"\n" * 65_536) == b""
    assert chosen(search, b"hit\n") == b"\n" * (module._MOST_HELD // (1 + 64)) + b"hit\n"
    assert max(taken) < 5000


# --- what it costs


class Counted:
    """A pattern whose searches are counted, and the bytes that they are given."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern
        self.bytes = self.matches = 0

    def finditer(self, text: bytes) -> Iterable[Any]:
        self.bytes += len(text)
        for match in self._pattern.finditer(text):
            self.matches += 1
            yield match


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "[ab]c", "b|c", "(a*)*b"])
def test_a_block_is_looked_at_once(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counted] = []
    real = patterns._compiled

    def compiled(*given: str) -> Any:
        made.append(Counted(real(*given)))
        return made[-1]

    monkeypatch.setattr(patterns, "_compiled", compiled)
    search = Search([pattern])
    text = (b"a" * 5000 + b"!\n") * 20
    for _ in range(4):
        assert chosen(search, text) == b""
    assert [(it.bytes, it.matches) for it in made if it.bytes] == [(4 * len(text), 0)]


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(a+)+$", r"\A(a|aa)+\z"])
def test_no_pattern_backtracks(pattern: str) -> None:
    # An engine that backtracks takes longer than the world is old.
    assert chosen(Search([pattern]), b"a" * 100_000 + b"!\n" + b"a" * 100_000 + b"\n") == b"a" * 100_000 + b"\n"


def test_others_run_while_it_searches() -> None:
    """Not one of them waits for the end of the search: one that never gives way would be a search for ever."""
    search = Search(["(x+x+)+y|" + "[ab]" * 200])
    text = (b"ax" * 60_000 + b"\n") * 8
    started, enough = threading.Event(), threading.Event()
    turns, many = 0, 10_000  # which takes long: another may have to wait for a CPU, too

    def work() -> None:
        nonlocal turns
        started.set()
        while turns < many and not enough.is_set():
            turns += 1
            chosen(search, text)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody is made to give way
    try:
        worker = threading.Thread(target=work)
        worker.start()
        started.wait(TIMEOUT)
        enough.set()
        worker.join(TIMEOUT)
    finally:
        sys.setswitchinterval(before)
    assert turns < many


# --- what is refused


@pytest.mark.parametrize(
    "pattern,words",
    [
        ("(?!a)b", "does not have a negative lookahead: for lines without something there is --exclude"),
        ("(?<!a)b", "does not have a negative lookbehind: for lines without something there is --exclude"),
        ("a(?=b)", "does not have a lookahead"),
        ("(?<=a)b", "does not have a lookbehind"),
        (r"(a)\1", "does not have a backreference"),
        ("(?P<n>a)(?P=n)", "does not have backreferences, like"),
        ("(?>a)", "does not have an atomic group"),
        ("a++", "does not have possessive repetitions"),
        ("(?(1)a|b)", "does not have a condition"),
        (r"a\Z", r"does not have \\Z: the end of a line is \$"),
        (r"\u00e4", r"does not have \\u"),
        ("(?x) a", "does not have this group or flag"),
        ("(a", "is not a regular expression: missing \\)"),
        ("*", "is not a regular expression: no argument for repetition operator: \\*"),
        ("a\udcff", "is not a regular expression: it is no UTF-8"),
    ],
)
def test_what_the_engine_does_not_have_is_said(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^grep: .*{words}"):
        ConsoleSpecs(grep=pattern)
    with pytest.raises(ValueError, match=f"^exclude: .*{words}"):
        ConsoleSpecs(exclude=["fine", pattern])


@pytest.mark.parametrize(
    "given,words",
    [
        ({"before": 2}, "before: there is no grep"),
        ({"after": 2, "exclude": "x"}, "after: there is no grep"),
        ({"after": -1, "grep": "x"}, "after: expected a number of lines, 0 or more, got -1"),
        ({"before": 1.5, "grep": "x"}, "before: expected a number of lines, 0 or more, got 1.5"),
        ({"ignore_case": True}, "ignore_case: there is no grep and no exclude"),
    ],
)
def test_choices_that_mean_nothing_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ConsoleSpecs(**given)
    with pytest.raises(TypeError, match="grep: expected a regular expression, or several, each a str, got b'x'"):
        ConsoleSpecs(grep=[b"x"])  # type: ignore[list-item]  # that is the point
    for pattern in (b"x", 5):
        with pytest.raises(TypeError, match=f"exclude: expected a regular expression, .*, got {pattern!r}"):
            ConsoleSpecs(exclude=pattern)  # type: ignore[arg-type]  # the same


def test_the_engine_is_loaded_for_a_pattern_only() -> None:
    code = "import sys; from phalanx.multiprocessing import ConsoleSpecs; ConsoleSpecs(); print('re2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    code = code.replace("ConsoleSpecs()", "ConsoleSpecs(grep='(?P<')", 1).replace("; print", "\nprint")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "grep: '(?P<' is not a regular expression" in done.stderr
    assert "re2.cc" not in done.stderr  # the engine itself tells nobody
