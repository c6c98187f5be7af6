"""Searches: which lines are chosen, whatever the pattern, the text, the blocks and the engine."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._logs import search as module
from phalanx._logs.search import Only, Search
from phalanx.multiprocessing import ConsoleSpecs

LANE = "rank 0"
HAS_RE2 = importlib.util.find_spec("re2") is not None


@pytest.fixture(scope="module", params=["RE2", "re"], autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """RE2 where it is installed, and what stands in for it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "re":
            patch.setitem(sys.modules, "re2", None)
        else:
            pytest.importorskip("re2", reason="RE2 is not installed")
        yield request.param


def chosen(search: Search | Only, *blocks: bytes, source: object = LANE) -> bytes:
    return b"".join(lines for block in blocks for _moment, lines in search.choose(source, block, 0.0))


# --- what a line is

RE2_ALONE = (r"\Ab\z", r"a\z", r"[[a]", r"^[a&&b||c~~+--]$", "^a{,2}$", r"^[^\s]$")
"""Patterns that Python's `re` refuses, or reads otherwise."""


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
        (r"\d", "1\n\u0661\n".encode(), b"1\n"),
        (r"^[\W]$", "a\nä\n_\n-\n".encode(), "ä\n-\n".encode()),
        (r"^[\S\D]$", b"a\n1\n \n\v\n", b"a\n1\n \n\v\n"),
        (r"^[^\s]$", "a\n \n\v\n\u00a0\n".encode(), "a\n\v\n\u00a0\n".encode()),
        (r"\bz\b", "äzä\nazb\n z\n".encode(), "äzä\n z\n".encode()),
        (r"a\Bb", b"ab\na b\n", b"ab\n"),
        (r"[]a]", b"]\na\nb\n", b"]\na\n"),
        (r"[[a]", b"[\na\nb\n", b"[\na\n"),
        (r"[^]]", b"]\na\n", b"a\n"),
        (r"^[a\]]$", b"]\na\nb\n", b"]\na\n"),
        (r"^[a&&b||c~~+--]$", b"&\n|\n,\n~\na\ne\n", b"&\n|\n,\n~\na\n"),
        (r"a\z", b"a\nab\n", b"a\n"),
        ("^a{,2}$", b"a\naa\na{,2}\n", b"a{,2}\n"),
    ],
)
def test_a_line(pattern: str, text: bytes, lines: bytes, engine: str) -> None:
    if engine == "re" and pattern in RE2_ALONE:
        pytest.skip("it is RE2's")
    assert chosen(Search([pattern]), text) == lines
    assert chosen(Search([pattern, pattern]), text) == lines  # whichever way it is searched for
    every = Search([pattern])
    assert b"".join(line for line in split(text) if every.wants(line)) == lines
    assert chosen(Search([], [pattern]), text) == b"".join(line for line in split(text) if line not in split(lines))


def split(text: bytes) -> list[bytes]:
    return [line + b"\n" for line in text[:-1].split(b"\n")] if text else []


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
    engine: str, lines: list[str], before: int, after: int, cuts: list[int], pattern: str
) -> None:
    if engine == "re" and HAS_RE2:
        pytest.skip("it is the same, whatever finds the lines, and each of these would take a process of its own")
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


# --- what is refused


@pytest.mark.parametrize(
    "given,words",
    [
        ({"before": 2}, "before: needs --grep"),
        ({"after": 2, "exclude": "x"}, "after: needs --grep"),
        ({"after": -1, "grep": "x"}, "after: expected a number of lines, 0 or more, got -1"),
        ({"before": 1.5, "grep": "x"}, "before: expected a number of lines, 0 or more, got 1.5"),
        ({"ignore_case": True}, "ignore_case: needs --grep or --exclude"),
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
