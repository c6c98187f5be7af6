"""The engines of searches: what each costs, what it refuses, and what happens where it takes too long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.multiprocessing import ConsoleSpecs
from tests.logs.test_search import chosen
from tests.support.command import Place
from tests.support.forks import code_of_fork
from tests.support.helpers import TIMEOUT


def search(grep: Sequence[str] = (), exclude: Sequence[str] = (), *, ignore_case: bool = False) -> Any:
    return ConsoleSpecs(grep=grep, exclude=exclude, ignore_case=ignore_case).search()


@pytest.fixture
def re2() -> None:
    pytest.importorskip("re2", reason="RE2 is not installed")


@pytest.fixture
def no_re2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)


# --- RE2


PARTS = st.sampled_from(
    ["a", "b", "ä", " ", ".", "^", "$", "\\s", "\\W", "[^a]", "[ab]", "[äb]", "a|b", "(a|ab)+", "\\b"]
)
PATTERNS = st.lists(PARTS, min_size=1, max_size=4).map("".join)
LINES = st.lists(st.sampled_from(["", "a", "b", "ab", "ba", "ä", " a", "a b", "c", "aab"]), min_size=1, max_size=12)


@pytest.mark.slow
@pytest.mark.usefixtures("re2")
@given(PATTERNS, PATTERNS, LINES)
def test_lines_are_those_that_another_engine_finds(one: str, two: str, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    first = re.compile(one, re.ASCII).search  # its \W and \b are of ASCII, as RE2's are
    other = re.compile(two, re.ASCII).search
    assert chosen(search([one]), text).decode().split("\n")[:-1] == [line for line in lines if first(line)]
    expected = [line for line in lines if (first(line) or other(line))]
    assert chosen(search([one, two]), text).decode().split("\n")[:-1] == expected
    expected = [line for line in lines if first(line) and not other(line)]
    assert chosen(search([one], [two]), text).decode().split("\n")[:-1] == expected


@pytest.mark.long
@pytest.mark.usefixtures("re2")
@given(LINES, st.data())
def test_what_is_not_read_changes_no_choice(lines: list[str], data: st.DataObject) -> None:
    unread = st.sampled_from([b"", b"\033[1;31m", b"\033[0m", b"\033[2K", b"\033]0;a b\007", b"\033(B"])
    ends = st.sampled_from([b"\n", b"\r\n", b"\r\r\n"])
    for pattern in ("a", "a|b$", "^$", "b+", r"\Aa"):
        raw = [
            b"".join(data.draw(unread) + letter.encode() for letter in line) + data.draw(unread) + data.draw(ends)
            for line in lines
        ]
        plain = {line: bool(chosen(search([pattern]), f"{line}\n".encode())) for line in lines}
        expected = b"".join(text for text, line in zip(raw, lines, strict=True) if plain[line])
        assert chosen(search([pattern]), b"".join(raw)) == expected


@pytest.mark.usefixtures("re2")
@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(a+)+$", r"\A(a|aa)+\z"])
def test_no_pattern_backtracks(pattern: str) -> None:
    # An engine that backtracks takes longer than the world is old.
    assert chosen(search([pattern]), b"a" * 100_000 + b"!\n" + b"a" * 100_000 + b"\n") == b"a" * 100_000 + b"\n"


@pytest.mark.usefixtures("re2")
def test_others_run_while_it_searches() -> None:
    """Not one of them waits for the end of the search: one that never gives way would be a search for ever."""
    its = search(["(x+x+)+y|" + "[ab]" * 200])
    text = (b"ax" * 60_000 + b"\n") * 8
    started, enough = threading.Event(), threading.Event()
    turns, many = 0, 10_000  # which takes long: another may have to wait for a CPU, too

    def work() -> None:
        nonlocal turns
        started.set()
        while turns < many and not enough.is_set():
            turns += 1
            chosen(its, text)

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


REFUSED = {
    "re2": [
        ("(?!a)b", "the engine .* does not have a negative lookahead: for lines without something there is --exclude"),
        (
            "(?<!a)b",
            "the engine .* does not have a negative lookbehind: for lines without something there is --exclude",
        ),
        ("a(?=b)", "the engine .* does not have a lookahead"),
        ("(?<=a)b", "the engine .* does not have a lookbehind"),
        (r"(a)\1", "the engine .* does not have a backreference"),
        ("(?P<n>a)(?P=n)", "the engine .* does not have backreferences, like"),
        ("(?>a)", "the engine .* does not have an atomic group"),
        ("a++", "the engine .* does not have possessive repetitions"),
        ("(?(1)a|b)", "the engine .* does not have a condition"),
        (r"a\Z", r"the engine .* does not have \\Z: the end of a line is \$"),
        (r"\u00e4", r"the engine .* does not have \\u"),
        ("(?x) a", "the engine .* does not have this group or flag"),
        ("(a", "missing \\)"),
        ("*", "no argument for repetition operator: \\*"),
        ("a\udcff", "it is no UTF-8"),
    ],
    "no_re2": [
        ("(a", r"missing \), .*; without RE2 \(the extra re2\), Python's re searches"),
        ("[[:alpha:]]", "Possible nested set"),
        (r"a\z", r"bad escape \\z"),
        (r"\pL", r"bad escape \\p"),
        (r"\x{20ac}", r"incomplete escape \\x"),
        ("a\udcff", "it is no UTF-8"),
    ],
}


@pytest.mark.parametrize("engine, pattern, words", [(engine, *row) for engine, rows in REFUSED.items() for row in rows])
def test_what_an_engine_does_not_have_is_said(
    request: pytest.FixtureRequest, engine: str, pattern: str, words: str
) -> None:
    request.getfixturevalue(engine)
    with pytest.raises(ValueError, match=f"^grep: .* is not a regular expression: {words}"):
        ConsoleSpecs(grep=pattern)
    with pytest.raises(ValueError, match=f"^exclude: .* is not a regular expression: {words}"):
        ConsoleSpecs(exclude=["fine", pattern])


@pytest.mark.usefixtures("re2")
def test_the_engine_is_loaded_for_a_pattern_only() -> None:
    code = "import sys; from phalanx.multiprocessing import ConsoleSpecs; ConsoleSpecs(); print('re2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    code = code.replace("ConsoleSpecs()", "ConsoleSpecs(grep='(?P<')", 1).replace("; print", "\nprint")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "grep: '(?P<' is not a regular expression" in done.stderr
    assert "re2.cc" not in done.stderr  # the engine itself tells nobody


# --- what stands in for it


@pytest.mark.usefixtures("no_re2")
def test_a_large_block_is_searched_and_an_empty_one() -> None:
    text = b"aXb\n" * 200_000 + b"x" * 3_000_000 + b"\n"
    its = search(["X"], ignore_case=True)
    assert chosen(its, b"", text) == text
    assert chosen(its, b"\n") == b""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["grep", "exclude"])
def test_a_pattern_that_takes_too_long_is_given_up(place: Place, kind: str) -> None:
    """It has a second; then nothing is lost, and that is announced once."""
    (place.folder / "re2.py").write_text("raise ImportError")
    place.env["PYTHONPATH"] = str(place.folder)
    pattern = "(x+x+)+y"
    script = place.write("""
        import sys
        for text in ("plain", "x" * 50, "xxy", "x" * 50):
            print(text, flush=True)
        """)
    done = place.run(f"--{kind}", pattern, script)
    assert done.status == 0, done.err
    shown = [line.removeprefix("[0] ") for line in done.out.splitlines()]
    rest = ["x" * 50, "xxy", "x" * 50]
    assert shown in ([["plain", *rest], rest] if kind == "grep" else [["plain", *rest]])  # it may come in its own block
    effect = "all lines are shown" if kind == "grep" else "nothing is hidden by it"
    said = (
        f"phalanx: {kind}: {pattern!r} takes longer than 1 s, which RE2 does not (the extra re2); from now on {effect}"
    )
    assert [line for line in done.err.splitlines() if f"{kind}:" in line] == [said]


@pytest.mark.usefixtures("no_re2")
def test_a_search_whose_process_is_lost_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    its = search(["^b"])
    assert chosen(its, b"a\nb\n") == b"b\n"
    for child in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split():
        if b"slow_patterns" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    assert chosen(its, b"a\nb\n") == b"a\nb\n"
    assert chosen(its, b"a\nb\n") == b"a\nb\n"
    said = ""
    while not said.endswith("\n"):  # it is written aside
        said += capfd.readouterr().err
    assert re.fullmatch(r"phalanx: grep: '\^b' cannot be searched for \(.*\); from now on all lines are shown\n", said)


@pytest.mark.usefixtures("no_re2")
def test_a_fork_has_a_search_of_its_own() -> None:
    its = search(["^b"])
    assert chosen(its, b"a\nb\n") == b"b\n"
    assert code_of_fork(lambda: chosen(its, b"a\nb\n") == b"b\n") == 0
    assert chosen(its, b"a\nb\n") == b"b\n"
