"""The console's options, one by one: `phalanx run` as a person uses it, and `ConsoleSpecs` as a library does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import struct
import sys
import termios
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from phalanx._logs import dedup
from phalanx._logs.prefixes import stamp
from phalanx.multiprocessing import ConsoleSpecs
from tests.support.command import (
    COUNT,
    LIMIT,
    Done,
    Place,
    fold_patiently,
    group,
    path_of,
    read_until,
    sh,
    start_sh,
    terminal,
    workers_said,
)
from tests.support.helpers import TIMEOUT, Gate, Ready
from tests.support.screen import Emulator

PYTHON = sys.executable


@pytest.fixture
def patient_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in this process."""
    monkeypatch.setattr(dedup, "WINDOW", 60.0)


def report_of(done: Done) -> str:
    return done.err[done.err.index("====") :]


def shown_before_the_report(done: Done) -> list[str]:
    return workers_said(done.err[: done.err.index("====")])


# --- whose lines


@pytest.mark.parametrize(
    "options,shown",
    [
        ("--ranks 1,3-4", "1 3 4"),
        ("--ranks 0,1 --local-ranks-filter 1,2", "1"),
        ("--rank 0 --ranks 2", "0 2"),
        ("--local-ranks-filter 1 --local-ranks-filter 2-3", "1 2 3"),
    ],
)
def test_ranks_add_up_and_both_filters_hold(place: Place, options: str, shown: str) -> None:
    done = sh(place, "echo out $RANK; echo err $RANK >&2", *options.split(), n=5)
    assert sorted(done.out.splitlines()) == [f"[{rank}] out {rank}" for rank in shown.split()]
    assert sorted(workers_said(done.err)) == [f"[{rank}] err {rank}" for rank in shown.split()]
    assert [place.log(rank) for rank in range(5)] == [f"out {rank}\n" for rank in range(5)]


HIDDEN = """
    n=0
    case $RANK in
    0|2) exec 9>$FIFO-$RANK; echo "shown or hidden $RANK" ;;
    1) cat $FIFO-0 $FIFO-2
       while [ $n -lt 30 ]; do n=$((n+1)); echo out $n; echo err $n >&2; done
       printf 'no end'; exit 3 ;;
    esac
    """


@pytest.mark.parametrize("options", ["--local-ranks-filter 0", "--ranks 0 --grep shown --exclude out"])
def test_the_last_lines_of_a_hidden_rank_that_fails_are_shown(place: Place, options: str) -> None:
    place.env["FIFO"] = str(place.folder / "fifo")
    for rank in (0, 2):
        os.mkfifo(f"{place.env['FIFO']}-{rank}")
    done = sh(place, HIDDEN, *options.split(), n=3)
    assert done.status == 3
    lines = [f"[1] out {n}" for n in range(12, 31)] + ["[1] no end"]
    shown = done.out.splitlines()
    shown.remove("[0] shown or hidden 0")
    assert shown == lines
    assert shown_before_the_report(done) == [f"[1] err {n}" for n in range(11, 31)]
    assert "rank      : 1" in report_of(done)
    assert place.log(2) == "shown or hidden 2\n"


def test_the_last_lines_of_many_hidden_ranks_are_bounded(place: Place) -> None:
    fifo = place.folder / "fifo"
    os.mkfifo(fifo)
    place.env["FIFO"] = str(fifo)
    # All write, then all end: a read of a FIFO ends with its last writer.
    code = """
        exec 9>>$FIFO
        for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do echo $RANK: $n; done
        exit 3"""
    done = sh(place, f"exec 8<>$FIFO; {code}", "--local-ranks-filter", 0, "--settle", 10, n=13)
    assert done.status == 3
    hidden = [line for line in done.out.splitlines() if not line.startswith(" [0]")]
    ranks = {line.split(":")[0] for line in hidden}
    assert len(ranks) == 8
    assert len(hidden) == 8 * 20
    assert all(line.split()[-1] in {str(n) for n in range(6, 26)} for line in hidden)


# --- which lines


LETTERS = "for it in a1 A2 b1 c d noise b2 e; do echo $it; done"


@pytest.mark.parametrize(
    "options,expected",
    [
        (["--grep", "a", "--grep", "b2"], "a1 b2"),
        (["--grep", "a", "-i"], "a1 A2"),
        (["--exclude", "noise", "--exclude", "[ab]", "--ignore-case"], "c d e"),
        (["--grep", "b", "-C", 1, "--exclude", "noise"], "A2 b1 c d b2 e"),
        (["--grep", "b", "-A", 1], "b1 c -- b2 e"),
        (["--grep", "b", "-C", 1, "-A", 0], "A2 b1 -- noise b2"),
    ],
)
def test_searches(place: Place, options: list[object], expected: str) -> None:
    done = sh(place, LETTERS, *options)
    assert done.out.splitlines() == [f"[0] {line}" for line in expected.split()]
    assert place.log(0) == "a1\nA2\nb1\nc\nd\nnoise\nb2\ne\n"


def test_searches_in_the_environment_are_one_a_line(place: Place) -> None:
    place.env |= {"PHALANX_GREP": "is nan\nwör[s]e", "PET_EXCLUDE": "not a", "PHALANX_RANKS": "0\n2"}
    done = sh(place, "for it in 'loss is nan' wörse is 'not a' 'wörse, not a'; do echo $it; echo $it >&2; done", n=3)
    shown = ["[0] loss is nan", "[0] wörse", "[2] loss is nan", "[2] wörse"]
    assert sorted(done.out.splitlines()) == sorted(workers_said(done.err)) == shown


def test_a_search_holds_up_no_signal(place: Place, gate: Gate) -> None:
    line = "a" * 60 + "!"
    with start_sh(place, f"echo {line}; echo ready a >&2; read x <{gate.address}", "--grep", "(a|aa)+$") as launcher:
        launcher.read_until("[0] ready a")
        launcher.send(signal.SIGTERM)
        assert launcher.end().status == 128 + signal.SIGTERM


def test_a_search_hides_lines_of_a_shown_rank_to_its_end(place: Place) -> None:
    done = sh(place, "echo loss 1; echo why; echo this >&2; exit 3", "--grep", "loss")
    assert done.out == "[0] loss 1\n"  # once
    assert shown_before_the_report(done) == []
    assert "this" in report_of(done)


# --- times


def test_lines_have_the_time_or_the_seconds_since_the_start(place: Place) -> None:
    before = datetime.now().astimezone()
    lines = sh(place, "echo a; echo b", "--timestamps").out.splitlines()
    found = [re.fullmatch(r"\[0\] (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d) ([ab])", line) for line in lines]
    assert [each and each[2] for each in found] == ["a", "b"]
    for each in filter(None, found):
        assert -0.001 <= (datetime.fromisoformat(each[1]) - before).total_seconds() < LIMIT
    lines = sh(place, "echo a; echo b", "--elapsed", n=2).out.splitlines()
    assert len(lines) == 4
    assert all(re.fullmatch(r"\[[01]\] \d{1,2}\.\d{3} [ab]", line) for line in lines)


@pytest.mark.parametrize(
    "zone,moments",
    [
        ("UTC0", {1700000000.125: "2023-11-14T22:13:20.125+00:00"}),
        ("<-0330>3:30", {1700000000.125: "2023-11-14T18:43:20.125-03:30"}),
        (
            "CET-1CEST,M3.5.0,M10.5.0/3",  # the clocks go back from 03:00 to 02:00: the offset alone tells which it is
            {
                1698537599.999: "2023-10-29T01:59:59.999+02:00",
                1698541199.5: "2023-10-29T02:59:59.500+02:00",
                1698541200.0: "2023-10-29T02:00:00.000+01:00",
                1698544799.0: "2023-10-29T02:59:59.000+01:00",
            },
        ),
    ],
)
def test_times_have_the_offset_of_their_moment(
    monkeypatch: pytest.MonkeyPatch, zone: str, moments: dict[float, str]
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        iso = stamp("iso")
        assert iso is not None
        assert [iso(moment) for moment in moments] == list(moments.values())
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("how", ["--log-format json --color always", "-t 1 -r 2 --duplicate-stdout-filters a"])
def test_our_own_lines_go_to_stderr_and_nowhere_else(how: str, place: Place, ready: Ready) -> None:
    """Not among a machine's lines, not into a file of chosen lines or of stderr, and not to stdout."""
    script = place.write(f"{ready.python()}\nimport signal\nprint('a line: é', flush=True)\nsignal.pause()")
    with place.start(*how.split(), script) as launcher:
        ready.wait()
        shown = launcher.read_until("a line", "stdout")
        launcher.send(signal.SIGTERM)
        done = launcher.end()
    assert "phalanx: SIGTERM: stopping the workers" in done.err
    assert (shown + done.out).count("\n") == 1
    filtered = [*place.logs.glob("*/attempt_0/filtered_stdout.log")]
    assert [path.read_text() for path in filtered] == ["[0] a line: é\n"] * ("json" not in how)
    if "json" in how:
        row = json.loads(shown)
        assert datetime.fromisoformat(row.pop("time")).tzinfo is not None
        assert row == {"rank": 0, "stream": "stdout", "text": "a line: é"}


# --- prefixes


TEMPLATE = "${role_name}|$rank|${local_rank}|${host}|${hostname}|$$|"


@pytest.mark.slow
def test_a_template_makes_the_prefix(place: Place) -> None:
    host = os.uname().nodename
    options = ("--role", "eval", "--log-line-prefix-template", TEMPLATE, "--color", "always")
    done = sh(place, "echo x", *options, n=2)
    assert sorted(done.out.splitlines()) == [f"eval|{rank}|{rank}|{host}|{host}|$|x" for rank in range(2)]
    place.env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "<${rank}> "
    assert sh(place, "echo x").out == "<0> x\n"
    for template, more, shown in (
        ("", (), "x"),
        ("${time}/$rank ", (), r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d/0 x"),
        ("${time}/$rank ", ("--elapsed",), r"\d+\.\d{3}/0 x"),
        ("é ", ("--elapsed",), r"é \d+\.\d{3} x"),
    ):
        done = sh(place, "echo x", "--log-line-prefix-template", template, *more)
        assert re.fullmatch(f"{shown}\n", done.out), done
    fold_patiently(place)
    template = "${role_name}|$rank|${local_rank}|"
    done = sh(place, "echo x; [ $RANK = 2 ] || echo y", "--fold", "--log-line-prefix-template", template, n=4)
    assert sorted(done.out.splitlines()) == ["default|0-1,3|0-1,3|y", "default|0-3|0-3|x"]


def test_ranks_without_a_given_prefix_have_the_default(logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = {rank: (f"of {rank}",) for rank in range(3)}
    group(logs, ConsoleSpecs(), "echo", args, log_line_prefixes={1: "one: ", 2: ""})
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] of 0", "of 2", "one: of 1"]
    console = ConsoleSpecs(template="${rank}: ", timestamps="elapsed", color="always")
    group(logs, console, "echo", args, log_line_prefixes={0: "<zero> "})
    lines = sorted(capfd.readouterr().out.splitlines())
    assert re.fullmatch(r"1: \d+\.\d{3} of 1", lines[0])
    assert re.fullmatch(r"<zero> \d+\.\d{3} of 0", lines[2])


@pytest.mark.usefixtures("patient_folds")
@pytest.mark.parametrize(
    "given,line",
    [
        ({0: "[job4]:", 1: "[job5]:", 2: "[job6]:"}, "[job4-6]:x"),  # of global ranks
        ({0: "0 of 3 ", 1: "1 of 3 ", 2: "2 of 3 "}, "0-2 of 3 x"),  # of local ones
        ({0: "zero ", 1: "one ", 2: "one "}, "zero one x"),
        ({0: "zero ", 1: "one "}, "[4-6] x"),
    ],
)
def test_given_prefixes_of_a_line_of_several_ranks(
    logs: Path, capfd: pytest.CaptureFixture[str], given: dict[int, str], line: str
) -> None:
    envs = {rank: {"RANK": str(rank + 4)} for rank in range(3)}
    args = dict.fromkeys(range(3), ("x",))
    group(logs, ConsoleSpecs(fold=True), "echo", args, envs=envs, log_line_prefixes=given)
    assert capfd.readouterr().out == line + "\n"


def test_prefixes_of_twelve_ranks(place: Place) -> None:
    done = sh(place, "echo x", "--color", "always", n=12)
    plain = re.sub(r"\033\[[0-9;]*m", "", done.out)
    assert sorted(plain.splitlines()) == sorted(f"{f'[{rank}]':>4} x" for rank in range(12))
    assert len(set(re.findall(r"\033\[(\d+)m", done.out))) == 11  # ten colours and their end


@pytest.mark.usefixtures("patient_folds")
def test_the_host_stands_in_prefixes_where_there_are_many(logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = os.uname().nodename
    envs = {rank: {"RANK": str(rank + 9), "GROUP_WORLD_SIZE": "2"} for rank in range(2)}
    args = {0: ("x",), 1: ("x",)}
    group(logs, ConsoleSpecs(), "echo", args, envs=envs)
    assert sorted(capfd.readouterr().out.splitlines()) == sorted([f" [{host} 9] x", f"[{host} 10] x"])
    group(logs, ConsoleSpecs(format="json"), "echo", args, envs=envs)
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {(row["host"], row["rank"]) for row in rows} == {(host, 9), (host, 10)}
    group(logs, ConsoleSpecs(ranks={10}), "echo", args, envs=envs)
    assert capfd.readouterr().out == f"[{host} 10] x\n"
    group(logs, ConsoleSpecs(fold=True, color="always", timestamps="elapsed"), "echo", args, envs=envs)
    prefix = re.escape(f"\033[1m[{host} 9-10]\033[0m ")  # of the ranks of all machines
    assert re.fullmatch(rf"{prefix}\d+\.\d{{3}} x\n", capfd.readouterr().out)


@pytest.mark.parametrize(
    "given,wrong,words",
    [
        ({"color": "red"}, ValueError, "color: expected .*, got 'red'"),
        ({"color": None}, ValueError, "color: expected .*, got None"),
        ({"format": "xml"}, ValueError, "format: expected .*, got 'xml'"),
        ({"drain": -1.0}, ValueError, "drain: expected .*, got -1.0"),
        ({"drain": float("nan")}, ValueError, "drain: expected .*, got nan"),
        ({"timestamps": "both"}, ValueError, "timestamps: expected one of None, 'iso', 'elapsed', got 'both'"),
        ({"grep": "(ab"}, ValueError, r"grep: '\(ab' is not a regular expression: missing \)"),
        ({"template": "5 $"}, ValueError, r"template: '5 \$' has a \$ that begins no variable"),
        ({"template": "${rang}"}, ValueError, r"template: there is no \$\{rang\}"),
        *(({"template": text}, TypeError, "template: expected a str, got ") for text in (5, b"${rank}")),
        ({"ranks": [0, -1]}, ValueError, r"ranks: expected numbers that are 0 or more, got \[0, -1\]"),
        *(
            ({"ranks": ranks}, TypeError, f"ranks: expected the numbers of ranks, .*, got {re.escape(repr(ranks))}$")
            for ranks in ("0,1", b"01", ["0"], 3, [1.0], [True], [None], [[0]])
        ),
    ],
)
def test_what_console_specs_cannot_have(given: dict[str, Any], wrong: type[Exception], words: str) -> None:
    with pytest.raises(wrong, match=f"^{words}"):
        ConsoleSpecs(**given)


def test_a_wrong_template_in_the_environment_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${rang}")
    with pytest.raises(ValueError, match=r"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE: there is no \$\{rang\}"):
        group(tmp_path / "logs", ConsoleSpecs(), "touch", {0: (str(tmp_path / "started"),)})
    assert list(tmp_path.iterdir()) == []


# --- one file of all ranks


def test_numbers_of_another_library() -> None:
    two: Any = type("Two", (), {"__index__": lambda _: 2, "__lt__": lambda _, other: other > 2})()
    specs = ConsoleSpecs(grep="x", ranks=(rank for rank in (0, two)), before=two)
    assert (specs.ranks, specs.before) == (frozenset({0, 2}), 2)


def test_filtered_files_have_the_chosen_lines_of_all_ranks(place: Place) -> None:
    code = "echo loss=$RANK; echo nothing; echo 'a WARNING: é'; echo loss=9 >&2; echo ERROR >&2"
    stdout, stderr = "--duplicate-stdout-filters", "--duplicate-stderr-filters"
    filters = (stdout, "loss,é,,", stderr, "ERROR", stdout, "WARNING")
    done = sh(place, code, *filters, "--local-ranks-filter", 1, n=3)
    (folder,) = place.logs.glob("*/attempt_0")
    assert sorted((folder / "filtered_stdout.log").read_text().splitlines()) == sorted(
        line for rank in range(3) for line in (f"[{rank}] loss={rank}", f"[{rank}] a WARNING: é")
    )
    assert sorted((folder / "filtered_stderr.log").read_text().splitlines()) == [f"[{rank}] ERROR" for rank in range(3)]
    assert done.out == "[1] loss=1\n[1] nothing\n[1] a WARNING: é\n"  # the console has all of what it shows
    assert workers_said(done.err) == ["[1] loss=9", "[1] ERROR"]


@pytest.mark.parametrize("how", [("-r", "3"), ("-t", "3", "--log-max-size", "1k"), ("-t", "3", "--grep", "z")])
def test_duplicates_are_of_all_that_is_in_files(place: Place, how: tuple[str, ...]) -> None:
    script = place.write(COUNT.format(count=2000))
    place.run("--nproc-per-node", 2, *how, "--duplicate-stdout-filters", "7", script)
    (path,) = place.logs.glob("*/attempt_0/filtered_stdout.log")
    lines = path.read_text().splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] line {n}" for n in range(2000) if "7" in str(n)]
    assert not list(path.parent.glob("filtered_stderr.log"))


# --- a console that does not read


MORE = re.compile(r"phalanx: … ([\d,]+) more lines? in (\S+)")


@pytest.mark.parametrize("options", [("--fold",), ("--timestamps", "--log-max-size", "20k")])
def test_what_was_not_shown_is_counted(place: Place, options: tuple[str, ...]) -> None:
    total = 40_000
    script = place.write(
        "import os\n"
        f"for n in range(0, {total}, 100): os.write(1, b''.join(b'line %d\\n' % (n + i) for i in range(100)))"
    )
    with place.start("--drain", "0.05", *options, script) as launcher:
        launcher.process.wait(LIMIT)
        done = launcher.end()
    assert done.status == 0
    ((count, path),) = MORE.findall(done.err)
    assert path == str(path_of(place, 0))
    lines = done.out.split("\n")[:-1]  # a full pipe does not even take the end of a line that it has cut
    shown = [line for line in lines if re.fullmatch(r"\[0\] (\S+ )?line \d+", line)]
    last = int(shown[-1].split()[-1])
    if last != len(shown) - 1:  # the last one was cut
        shown.pop()
    assert [int(line.split()[-1]) for line in shown] == list(range(len(shown)))
    assert len(shown) + int(count.replace(",", "")) == total


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_streams_in_one_place_do_not_break_each_others_lines(place: Place, gate: Gate, kind: str) -> None:
    """What `>log 2>&1` is to give."""
    code = f"printf 'name? '; read x <{gate.address}; echo wait >&2; read x <{gate.address}; echo me; echo done >&2"
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            read, write = os.pipe()
        else:
            path = place.folder / "out"
            path.touch()
            write = os.open(path, os.O_WRONLY)
            read = os.open(path, os.O_RDONLY)
        stack.callback(os.close, read)
        launcher = stack.enter_context(start_sh(place, code, stdout=write, stderr=write))
        os.close(write)
        shown = grows_until(read, "[0] name? ")
        os.write(gate._fd, b"\n")
        shown += grows_until(read, "wait\n")
        os.write(gate._fd, b"\n")
        shown += grows_until(read, "done\n")
        launcher.process.wait(LIMIT)
    assert "".join(shown.splitlines(keepends=True)[1:]) == "[0] name? \n[0] wait\n[0] me\n[0] done\n"


def grows_until(fd: int, text: str) -> str:
    """Read a pipe, or a file that grows, until `text` has come."""
    data, until = b"", time.monotonic() + TIMEOUT
    while text.encode() not in data:
        assert time.monotonic() < until, data
        select.select([fd], [], [], 0.1)
        data += os.read(fd, 65536)
    return data.decode()


# --- terminals


def on_a_terminal(place: Place, code: str, *options: object, n: int = 1) -> str:
    with terminal() as (ours, theirs), start_sh(place, code, *options, n=n, stdout=theirs, stderr=theirs) as launcher:
        os.close(theirs)
        shown = read_until(ours, "what never comes")
        launcher.process.wait(LIMIT)
    return shown


def resize(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


def test_live_lines_are_at_the_bottom_and_messages_above(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"""
        import os, signal
        rank = os.environ["RANK"].encode()
        signal.signal(signal.SIGINT, lambda *_: None)
        os.write(1, b"\\rbar of %s: 10%%" % rank)
        {ready.python()}
        {gate.python()}
        print("\\nline of", rank.decode())
        """)
    with terminal() as (ours, theirs):
        resize(theirs, 400, 24)
        options = ("--nproc-per-node", 2, "--grace", 60)
        with place.start(*options, script, stdout=theirs, stderr=theirs) as launcher:
            os.close(theirs)
            ready.wait(2)
            screen = Emulator(400)
            feed_until(screen, ours, lambda: screen.text()[-2:] == ["[0] bar of 0: 10%", "[1] bar of 1: 10%"])
            launcher.send(signal.SIGINT)
            feed_until(screen, ours, lambda: any("SIGINT" in line for line in screen.text()))
            feed_until(screen, ours, lambda: screen.text()[-2:] == ["[0] bar of 0: 10%", "[1] bar of 1: 10%"])
            above = screen.text()[-3]
            gate.open(2)
            screen.feed(read_until(ours, "what never comes"))
            launcher.process.wait(LIMIT)
        assert launcher.process.returncode == 130
    assert above == "phalanx: SIGINT: stopping the workers (at most 60 s; once more to kill them)"
    lines = [line for line in screen.text() if not line.startswith("phalanx: ")]
    assert sorted(lines) == sorted(f"[{rank}] {text} {rank}{more}" for rank in range(2)
                                   for text, more in (("bar of", ": 10%"), ("line of", "")))  # fmt: skip


def feed_until(screen: Emulator, fd: int, seen: Any) -> None:
    while not seen():
        ready, _, _ = select.select([fd], [], [], TIMEOUT)
        assert ready, screen.text()
        screen.feed(os.read(fd, 65536).decode())


def test_a_dumb_terminal_gets_no_moves(place: Place) -> None:
    place.env["TERM"] = "dumb"
    shown = on_a_terminal(place, "printf '\\r 1%%\\r 2%%\\r100%%\\n'", "--color", "never")
    assert "\033" not in shown
    assert "[0] 100%\r\n" in shown


# --- consoles that cannot be written to, and slips of the finger


def test_a_console_on_a_full_disk_is_said(place: Place) -> None:
    script = '"$@" >/dev/full'
    argv = [PYTHON, "-m", "phalanx", "run", "--log-dir", place.logs, "--duplicate-stdout-filters", "a,b"]
    done = place.program("sh", "-c", script, "sh", *argv, "--no-python", "echo", "abc")
    assert (done.status, done.out) == (0, "")
    assert "phalanx: the console: No space left on device; lines are missing there" in done.err
    assert place.log(0) == "abc\n"
    assert next(place.logs.glob("*/attempt_0/filtered_stdout.log")).read_text() == "[0] abc\n"
