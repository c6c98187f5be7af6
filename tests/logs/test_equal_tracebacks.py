"""Tracebacks that are equal across ranks are shown once on the console; the files keep them all."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._base import clock
from phalanx._logs import dedup
from phalanx._logs.dedup import HEAD, QUIET, Dedup, Tracebacks
from phalanx._logs.lines import Source
from phalanx._logs.render import Text, View
from phalanx._logs.terminal import PlainOutput
from phalanx.errors import format_ranks
from phalanx.multiprocessing import ConsoleSpecs
from tests.support.command import Place, fold_patiently, group
from tests.support.fake_clock import FakeClock
from tests.support.helpers import Gate
from tests.support.pump_tools import Memory, source

pytestmark = pytest.mark.each_python

HEADER = HEAD + b"\n"
FRAME = b'  File "train.py", line 9, in main\n    step()\n'
ONE = HEADER + FRAME + b"ValueError: nan\n"
CHAINED = ONE + b"\nDuring handling of the above exception, another exception occurred:\n\n" + ONE
CAUSED = ONE + b"\nThe above exception was the direct cause of the following exception:\n\n" + ONE


class Console:
    """What comes out for some ranks: whole texts, after the ranks that they are of."""

    def __init__(self, ranks: int) -> None:
        self.sources = [source(rank) for rank in range(ranks)]
        self.out: list[tuple[str, bytes]] = []
        self.by_rank = [b""] * ranks
        dedup = Dedup(self.emit, {"stdout": ranks}, by_rank=True)
        self.tracebacks = Tracebacks(dedup, lambda source, block: self.emit([source], block))

    def emit(self, sources: list[Source], text: bytes) -> None:
        assert text.endswith(b"\n")
        self.out.append((format_ranks([it.rank for it in sources], ","), text))
        for it in sources:
            self.by_rank[it.rank] += text

    def take(self, rank: int, block: bytes) -> None:
        self.tracebacks.take(self.sources[rank], block)

    def wait(self, time: FakeClock, seconds: float) -> list[tuple[str, bytes]]:
        """What has come out when that time is over."""
        time.advance(seconds)
        self.tracebacks.tick()
        out, self.out = self.out, []
        return out


LONG = QUIET + dedup.WINDOW + 0.01


@pytest.mark.parametrize("text", [ONE, CHAINED, CAUSED, HEADER + FRAME + b"KeyboardInterrupt\n"])
def test_equal_ones_are_shown_once(time: FakeClock, text: bytes) -> None:
    it = Console(4)
    for rank in range(4):
        it.take(rank, text)
    assert it.out == []  # it may go on with another
    assert it.wait(time, QUIET) == [("0-3", text)]
    assert it.tracebacks.due == float("inf")


def marked(rank: int, text: bytes) -> bytes:
    """As torch writes it where its process group is up: the rank before each line that is not empty."""
    return b"".join(b"[rank%d]: " % rank + line if line != b"\n" else line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize("text", [ONE, CHAINED])
def test_the_rank_before_each_line_makes_no_difference(time: FakeClock, text: bytes) -> None:
    """One that is alone is shown as it was written."""
    it = Console(4)
    other = text.replace(b"nan", b"inf")
    for rank in range(4):
        it.take(rank, marked(rank, other if rank == 1 else text) + marked(rank, b"A note.\n"))
    it.wait(time, QUIET)
    after = [("0,2-3", b"A note.\n"), ("1", marked(1, b"A note.\n"))]
    shown = it.wait(time, LONG)
    assert sorted(shown) == sorted([("0,2-3", text), ("1", marked(1, other)), *after])
    assert shown.index(after[0]) > shown.index(("0,2-3", text))


def test_line_by_line(time: FakeClock) -> None:
    """As a worker writes them, whose stderr has no buffer."""
    it = Console(2)
    for line in CHAINED.splitlines(keepends=True):
        it.take(0, line)
        time.advance(QUIET / 2)
        it.take(1, line)
    assert it.wait(time, LONG) == [("0-1", CHAINED)]


def test_what_is_around_it_keeps_its_place(time: FakeClock) -> None:
    it = Console(2)
    it.take(0, b"before\n" + ONE + b"after\nand after\n")
    assert it.out == [("0", b"before\n")]
    it.take(1, b"other\n")
    assert it.out[1:] == [("1", b"other\n")]  # nothing of that rank is held
    it.take(1, ONE)
    it.wait(time, 0)
    assert it.wait(time, LONG) == [("0-1", ONE), ("0", b"after\nand after\n")]
    it.take(0, b"at once\n")
    assert it.out == [("0", b"at once\n")]
    it.take(1, ONE)
    it.wait(time, QUIET)
    it.take(0, b"and now\n")  # what is held is not of that rank
    assert it.out == [("0", b"and now\n")]


@pytest.mark.parametrize(
    "text", [HEADER, HEADER + FRAME, ONE + b"\n", HEADER + b"\n", b"said: " + HEADER, b"  + Exception Group " + ONE]
)
def test_what_has_no_end_is_not_held_for_long(time: FakeClock, text: bytes) -> None:
    it = Console(2)
    it.take(0, text)
    time.advance(QUIET)
    it.tracebacks.tick()
    it.wait(time, dedup.WINDOW)
    assert it.by_rank[0] == text
    assert it.tracebacks.due == float("inf")


def test_a_very_long_one_is_not_held_whole(time: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    del time
    monkeypatch.setattr(dedup, "_LONGEST", 1000)
    monkeypatch.setattr(dedup, "_MOST_BYTES", 2000)
    it = Console(2)
    text = HEADER + FRAME * 100 + b"RecursionError: x\n"
    it.take(0, text)
    assert it.by_rank[0] == text
    assert len(it.out[0][1]) < 1100


def test_a_rank_that_has_no_others_waits_for_none(time: FakeClock) -> None:
    del time
    it = Console(1)
    it.take(0, ONE)
    assert it.out == [("0", ONE)]


def test_what_goes_on_after_one_is_soon_shown_at_once(time: FakeClock) -> None:
    """However little time is between two lines."""
    it = Console(2)
    it.take(0, ONE)
    for number in range(20):
        it.take(0, b"%d\n" % number)
        time.advance(QUIET / 4)
        it.tracebacks.tick()
    it.out.clear()
    for rank in range(2):
        it.take(rank, b"at once\n")
    assert it.out == [("0", b"at once\n"), ("1", b"at once\n")]


def test_a_flood_after_one_is_shown_in_large_pieces(time: FakeClock) -> None:
    """Line by line, the console would be left behind, and what it has not shown in the end is not shown at all."""
    del time
    it = Console(2)
    flood = b"x\n" * 100_000
    for number in range(10):
        for rank in range(2):
            it.take(rank, (ONE if number == 0 else b"") + flood)
    it.tracebacks.release()
    assert it.by_rank == [ONE + 10 * flood] * 2
    assert len(it.out) < 5000


def test_a_flood_of_them_is_shown_at_once(time: FakeClock) -> None:
    del time
    it = Console(2)
    it.take(0, ONE + b"after\n" + ONE)
    it.take(0, ONE * 100)
    assert it.by_rank[0] == ONE + b"after\n" + ONE * 101
    assert len(it.out) == 4


def test_the_other_stream_of_a_rank_comes_after_it(time: FakeClock) -> None:
    it = Console(2)
    out = source(0, "other")
    it.take(0, HEADER + FRAME)
    it.tracebacks.take(out, b"meanwhile\n")
    assert it.out == [("0", b"meanwhile\n")]  # it may come from another thread
    it.take(0, b"ValueError: nan\n")
    it.tracebacks.take(out, b"gone on\n")
    it.take(0, b"and more\n")
    assert it.tracebacks.holds(out)
    it.out.clear()
    it.take(1, ONE)
    assert it.wait(time, LONG) == [("0-1", ONE), ("0", b"gone on\n"), ("0", b"and more\n")]


def test_it_has_the_time_at_which_it_began(time: FakeClock) -> None:
    times = []
    sources = [source(rank) for rank in range(2)]
    held = Dedup(lambda _sources, text: times.append((held.time, text)), {"stdout": 2}, time=clock.now, by_rank=True)
    it = Tracebacks(held, lambda _source, _block: None)
    began = time()
    it.take(sources[0], ONE)
    time.advance(QUIET / 2)
    it.take(sources[0], b"after\n")
    time.advance(LONG)
    it.tick()
    assert times == [(began, ONE), (began + QUIET / 2, b"after\n")]


def test_what_follows_is_shown_once_as_far_as_it_is_equal(time: FakeClock) -> None:
    it = Console(4)
    for rank, after in enumerate((b"a\nb\nc\n", b"a\nb\nd\n", b"a\ne\n", b"")):
        it.take(rank, ONE + after)
    shown = [("0-3", ONE), ("0-2", b"a\n"), ("0-1", b"b\n"), ("0", b"c\n"), ("1", b"d\n"), ("2", b"e\n")]
    assert it.wait(time, LONG) == shown


GROUP = b"""\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 10, in g
  |     raise ExceptionGroup("eg", found)
  | ExceptionGroup: eg (2 sub-exceptions)
  | a note
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 7, in g
    | ValueError: a
    +---------------- 2 ----------------
    | ExceptionGroup: in (1 sub-exception)
    +-+---------------- 1 ----------------
      | KeyError: 'k'
      +------------------------------------
"""
CAUSE = b"\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize("text", [GROUP, GROUP + CAUSE + ONE, ONE + CAUSE + GROUP])
def test_groups_of_exceptions_that_end_the_ranks(time: FakeClock, text: bytes) -> None:
    it = Console(2)
    for rank in range(2):
        it.take(rank, text)
    assert it.wait(time, LONG) == [("0-1", text)]


LINES = st.sampled_from(
    [HEADER, FRAME, b"ValueError: nan\n", b"KeyError: 1\n", b"\n", b"x\n", ONE, CHAINED, b"  indented\n",
     b"The above exception was the direct cause of the following exception:\n"]
)  # fmt: skip


SAID = st.lists(st.tuples(st.integers(0, 5), LINES, st.sampled_from([0.0, 0.05, 0.3])), max_size=40)


@pytest.mark.slow
@given(SAID, st.sampled_from([1, 4096]), st.data())
def test_nothing_is_lost_and_each_rank_keeps_its_order(
    said: list[tuple[int, bytes, float]], most: int, data: st.DataObject
) -> None:
    """Of two streams of three ranks, wherever a read cuts them; also when no more can be held."""
    time = FakeClock(100.0)
    memory = Memory()
    view = View(PlainOutput(memory), Text())
    sources = [source(number // 2, ("stdout", "stderr")[number % 2]) for number in range(6)]
    for number, one in enumerate(sources):
        one.prefix = b"%d " % number

    def emit(those: list[Source], text: bytes) -> None:
        prefix = ",".join(str(sources.index(one)) for one in those).encode() + b" "
        memory.write((b"".join(prefix + line for line in text.splitlines(keepends=True)),))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", time)
        patch.setattr(dedup, "_MOST_HELD", most)
        view.dedup_tracebacks_with(Dedup(emit, {"stdout": 3, "stderr": 3}, by_rank=True))
        given = [b""] * 6
        waiting = [b""] * 6
        for number, text, seconds in said:
            given[number] += text
            waiting[number] += text
            cut = data.draw(st.integers(1, len(waiting[number])))
            view.take(sources[number], waiting[number][:cut])
            waiting[number] = waiting[number][cut:]
            if not any(one.cutter.held for one in sources):  # what has no end is shown then, and others break it
                time.advance(seconds)
            view.tick()
        for one, rest in zip(sources, waiting, strict=True):
            view.take(one, rest)
        for one in sources:
            view.finish(one)
        view.close()
    shown = [b""] * 6
    for line in memory.data.splitlines(keepends=True):
        those, _, words = line.partition(b" ")
        for number in map(int, those.split(b",")):
            shown[number] += words
    assert shown == given


# --- real ones


@pytest.fixture
def patient(place: Place) -> None:
    """Nothing has to come quickly, on a busy machine; a traceback of all ranks is shown as soon as they have ended."""
    fold_patiently(place, "from phalanx._logs import dedup; dedup.QUIET = 60.0")


@pytest.mark.slow
def test_one_is_shown_while_its_worker_goes_on(place: Place, gate: Gate) -> None:
    """What stands after it, and what has no end, too."""
    script = place.write(f"""
        import os, sys, traceback
        if os.environ["RANK"] == "0":
            try:
                1 / 0
            except ZeroDivisionError:
                traceback.print_exc()
            {gate.python()}
            print("retry", file=sys.stderr)
            print("Traceback (most recent call last):", file=sys.stderr)
            print("next?", end="", file=sys.stderr, flush=True)
            {gate.python()}
        """)
    with place.start("--nproc-per-node", 2, script) as launcher:
        launcher.read_until("[0] ZeroDivisionError: division by zero\n")
        gate.open()
        shown = launcher.read_until("[0] next?")
        gate.open()
        assert launcher.end().status == 0
    assert shown.splitlines() == ["[0] retry", "[0] Traceback (most recent call last):", "[0] next?"]


@pytest.mark.long
@pytest.mark.usefixtures("patient")
def test_equal_failures(place: Place) -> None:
    """And one that is not equal: that is shown whole, too."""
    script = place.write("""
        import os, time
        rank = os.environ["RANK"]
        print("rank", rank)
        open(f"rank-{rank}", "w").close()
        while not all(os.path.exists(f"rank-{each}") for each in range(4)):
            time.sleep(0.001)
        raise ValueError("the same" if rank != "2" else "another")
        """)
    done = place.run("--nproc-per-node", 4, "--settle", 60, script)
    assert done.status == 1
    lines = [line for line in done.err[: done.err.index("=====")].splitlines() if line.startswith("[")]
    same = [line.removeprefix("[0-1,3] ") for line in lines if line.startswith("[0-1,3] ")]
    other = [line.removeprefix("[2] ") for line in lines if line.startswith("[2] ")]
    assert len(same) == len(other)
    assert same[0] == other[0] == "Traceback (most recent call last):"
    assert (same[-1], other[-1]) == ("ValueError: the same", "ValueError: another")
    assert len(lines) == len(same) + len(other)
    for rank in range(4):
        assert place.log(rank, "stderr.log").count("ValueError: ") == 1
    logs = place.program(sys.executable, "-m", "phalanx", "logs", "--log-dir", place.logs, "--stderr").out
    assert logs.count("Traceback") == 4  # what they wrote, and not what was shown


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_ranks_that_were_hidden_until_they_failed(place: Place) -> None:
    script = place.write("""
        import os, time
        open("rank-" + os.environ["RANK"], "w").close()
        while not all(os.path.exists(f"rank-{each}") for each in range(3)):
            time.sleep(0.001)
        raise ValueError("the same")
        """)
    done = place.run("--nproc-per-node", 3, "--settle", 60, "--ranks", 0, script)
    prefixes = re.findall(r"^(\[.*\]) ValueError: the same$", done.err, re.MULTILINE)
    # When they fail is theirs to say.
    assert prefixes in (["[0]", "[1-2]"], ["[0-1]", "[2]"], ["[0,2]", "[1]"], ["[0-2]"])


def test_what_a_hidden_rank_writes_on_its_way_out_is_shown(place: Place) -> None:
    script = place.write("""
        import atexit, os, sys, time
        def leave():
            time.sleep(0.5)  # its failure is known by then
            print("the last word", file=sys.stderr)
        if os.environ["RANK"] == "1":
            atexit.register(leave)
            raise ValueError("it fails")
        time.sleep(60)
        """)
    done = place.run("--nproc-per-node", 2, "--ranks", 0, script)
    lines = [line for line in done.err[: done.err.index("=====")].splitlines() if line.startswith("[1] ")]
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert lines[-2:] == ["[1] ValueError: it fails", "[1] the last word"]


def test_in_json_each_rank_has_its_own(place: Place) -> None:
    script = place.write("import sys; print('Traceback (most recent call last):', file=sys.stderr)")
    done = place.run("--nproc-per-node", 2, "--log-format", "json", script)
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert sorted((row["rank"], row["text"].encode()) for row in rows) == [(0, HEAD), (1, HEAD)]


def test_one_that_is_alone_has_its_ranks_prefix(logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where two have the same number."""
    args = {rank: (f"{rank}: Traceback (most recent call last):",) for rank in range(2)}
    envs = {rank: {"RANK": "0"} for rank in range(2)}
    group(logs, ConsoleSpecs(), "echo", args, envs=envs, log_line_prefixes={0: "<a> ", 1: "<b> "})
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"<{name}> {rank}: {HEAD.decode()}" for rank, name in enumerate("ab")]
