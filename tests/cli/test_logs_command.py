"""`phalanx logs` as a person uses it: which run, which lines, in which order, and following a run to its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from phalanx._base import clock, linux
from phalanx._logs.rotated import rotated_files
from phalanx._logs.timeline import MAGIC, TimelineWriter
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from tests.runs.test_runs import wait_for_record
from tests.support.command import LIMIT, LOGS, Launcher, Place, logs, reader, refused, start_sh
from tests.support.fake_clock import FakeClock
from tests.support.helpers import Gate, Ready

PYTHON = sys.executable


def lines(place: Place, *options: object) -> list[str]:
    done = logs(place, *options)
    assert (done.status, done.err) == (0, "")
    return done.out.splitlines()


def sh(place: Place, code: str, *options: object, n: int = 1) -> Path:
    """Run a shell script in every rank, unseen; return the run's folder."""
    before = set(place.logs.glob("*"))
    with start_sh(place, code, "-r", 3, *options, n=n) as launcher:
        launcher.end()
    (folder,) = set(place.logs.glob("*")) - before
    return folder


def at_one_moment(folder: Path, *later: int, seconds: float = 0.0) -> None:
    """Have the lines of a run written at one: how far apart the ranks came to write them is the machine's affair.

    Those of ranks that are to be ``later``, so many seconds later.
    """
    attempt, fake = folder / "attempt_0", FakeClock(clock.now())
    apart = clock.wall() - fake()
    (attempt / "timeline").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", fake)
        patch.setattr(clock, "wall", lambda: fake() + apart)
        times = TimelineWriter(str(attempt / "timeline"))
        ranks = sorted(int(path.name) for path in attempt.iterdir() if path.name.isdigit())
        for rank in sorted(ranks, key=later.__contains__):
            if rank in later[:1]:
                fake.advance(seconds)
            for number, name in enumerate(("stdout", "stderr")):
                times.note(2 * rank + number, (attempt / str(rank) / f"{name}.log").stat().st_size)
        times.close()


# --- which run


@pytest.mark.long
def test_which_run_is_shown(place: Place) -> None:
    done = logs(place)
    assert (done.status, done.out) == (1, "")
    assert done.err == f"Error: there are no runs in {place.logs}\n"
    folder = sh(place, "echo night $RANK", "--run-id", "night", n=2)
    sh(place, "echo day; echo err >&2", "--run-id", "day")
    assert sorted(lines(place)) == ["[0] day", "[0] err"], "the latest"
    for name in ("night", "nig", folder.name, str(folder), f"logs/{folder.name}"):
        assert sorted(lines(place, name)) == ["[0] night 0", "[1] night 1"]
    sh(place, ":", "--run-id", "night")
    assert logs(place) == (0, "", "")
    for name, why in (
        ("nihgt_" + folder.name[-8:], f"close to it: {folder.name}"),
        (str(place.folder), "is not a run's folder"),
        ("night", "can be any of 2 runs"),
    ):
        done = logs(place, name)
        assert (done.status, why in done.err) == (1, True)
    (place.logs / "refused").mkdir()
    (place.logs / "refused" / "run.json").write_text("{}")
    assert logs(place, "refused") == (1, "", "Error: refused has no logs: its workers were never started\n")
    (place.logs / "refused" / "attempt_0").mkdir()
    assert logs(place, "refused") == (0, "", "")
    place.env["XDG_STATE_HOME"] = str(place.folder / "state")
    place.run("--no-python", "echo", "default place", logs=False)
    assert place.program(*LOGS).out == "[0] default place\n"


@pytest.mark.skipif(shutil.which("setpriv") is None and os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_is_not_ours_to_read(place: Place) -> None:
    folder = sh(place, "echo hidden")
    head = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    for below in (".", "attempt_0", "attempt_0/0", "attempt_0/0/stdout.log"):
        os.chmod(folder / below, 0)
        try:
            done = logs(place, folder.name, head=head)
        finally:
            os.chmod(folder / below, 0o700)
        assert (done.status, done.out) == (1, "")
        assert re.fullmatch(rf"Error: {folder / below}\S*: Permission denied\n", done.err)


# --- in which order


def test_what_is_apart_in_time_is_never_mixed(place: Place, gate: Gate) -> None:
    """Ranks write in turns that the console has shown: the order in which they are seen is the one that is kept."""
    code = f'while read x <{gate.address}-$RANK; do echo "$RANK: $x"; echo "$RANK: $x err" >&2; done'
    turns = [0, 2, 1, 1, 0, 2, 2, 1, 0, 1]
    order = []
    with contextlib.ExitStack() as stack:
        fifos = []
        for rank in range(3):
            os.mkfifo(f"{gate.address}-{rank}")
            fifos.append(os.open(f"{gate.address}-{rank}", os.O_RDWR | os.O_CLOEXEC))
        launcher = stack.enter_context(start_sh(place, code, n=3))
        for number, rank in enumerate(turns):
            os.write(fifos[rank], b"turn %d\n" % number)
            launcher.read_until(f"turn {number}\n", "stdout")
            launcher.read_until(f"turn {number} err\n")
            order += [f"[{rank}] {rank}: turn {number}", f"[{rank}] {rank}: turn {number} err"]
        for fifo in fifos:
            os.close(fifo)
        launcher.send(signal.SIGTERM)
        launcher.end()
    found = lines(place)
    assert sorted(found) == sorted(order)
    turns_found = [int(line.split()[3]) for line in found]
    assert turns_found == sorted(turns_found)


def read_until_twice(launcher: Launcher, line: str) -> None:
    """Two ranks have written a line, and that has been seen."""
    shown = ""
    while shown.count(line) < 2:
        shown += launcher.read_until(line, "stdout")


@pytest.mark.long
def test_since_and_until_choose_by_time(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"""
        import os
        print("early")
        {ready.python()}
        {gate.python()}
        print("late")
        os.write(2, b"no end")
        """)
    with place.start("--nproc-per-node", 2, script) as launcher:
        ready.wait(2)
        read_until_twice(launcher, "early\n")
        time.sleep(0.05)  # times are right to 0.02 s: what is tested here is that time passes
        between = datetime.now(UTC)
        time.sleep(0.05)
        gate.open(2)
        launcher.end()
    moment, early = between.isoformat(), ["[0] early", "[1] early"]
    late = ["[0] late", "[0] no end", "[1] late", "[1] no end"]
    for options, shown in (
        (("--since", moment), late),
        (("--since", between.astimezone().replace(tzinfo=None).isoformat()), late),
        (("--since", "1h"), early + late),
        (("--since", "0"), []),
        (("--since", "2999-01-01"), []),
        (("--until", moment), early),
        (("--until", "0"), early + late),
        (("--until", "1h"), []),
        (("--since", moment, "--until", "2999-01-01"), late),
    ):
        assert sorted(lines(place, *options)) == sorted(shown), options
    for text in ("yesterday", "1x", "-5", ""):
        refused(logs(place, f"--since={text}"), "--since", "expected how long ago")
    refused(logs(place, "--until=tomorrow"), "--until", "expected how long ago")
    refused(logs(place, "-f", "--until", "1h"), "--follow and --until exclude each other")
    refused(logs(place, "--since", "1h", "--until", "2h"), "--since, --until", "--until is the later one")


# --- which lines


@pytest.mark.long
def test_the_last_lines(place: Place) -> None:
    sh(place, "for n in $(seq 100); do echo $RANK line $n; done; printf 'no end'", n=2)
    for options in ((), ("--fold",), ("--log-format", "json"), ("--grep", "7")):
        whole = lines(place, *options)
        for count in (0, 2, 10**30) if options else (0, 1, 5, 1000, 2**63):
            assert lines(place, "-n", count, *options) == (whole[-count:] if count else [])
    refused(logs(place, "-n", "-1"), "--lines")
    refused(logs(place, "-n", "x"), "--lines")


@pytest.mark.long
def test_ranks_and_streams(place: Place) -> None:
    sh(place, "echo out $RANK; echo err $RANK >&2", n=4)
    assert sorted(lines(place, "--rank", 3)) == ["[3] err 3", "[3] out 3"]
    assert sorted(lines(place, "--ranks", "0,2-3", "--stdout")) == ["[0] out 0", "[2] out 2", "[3] out 3"]
    assert lines(place, "--stderr", "--rank", 1) == ["[1] err 1"]
    refused(logs(place, "--rank", 4), "--ranks: this run has no rank 4")


@pytest.mark.long
def test_attempts(place: Place) -> None:
    place.logs.mkdir()
    specs = DefaultLogsSpecs(str(place.logs), redirects=Std.ALL)
    for attempt in (0, 1, 10):
        env = {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        with start_processes("r", "echo", {0: (f"attempt {attempt}",)}, {0: env}, specs) as group:
            group.wait()
    assert lines(place) == ["[0] attempt 10"]
    assert lines(place, "--attempt", 1) == ["[0] attempt 1"]
    assert lines(place, "--attempt", 0) == ["[0] attempt 0"]
    refused(logs(place, "--attempt", 2), "--attempt:", "logs of attempt 2 are not kept; there are those of 0, 1, 10")
    refused(logs(place, "--attempt", 11), "--attempt:", "has no attempt 11; its attempts are 0, 1, 10")
    refused(logs(place, "--attempt", "last"), "--attempt")


@pytest.mark.long
def test_filters_and_forms(place: Place) -> None:
    at_one_moment(sh(place, "echo same; echo grün $RANK; echo same err >&2", n=3))
    assert sorted(lines(place, "--grep", "gr[ü]n [12]")) == ["[1] grün 1", "[2] grün 2"]
    assert sorted(lines(place, "--fold", "--grep", "same")) == ["[0-2] same", "[0-2] same err"]
    coloured = lines(place, "--rank", 0, "--grep", "same$", "--color", "always")
    assert coloured == ["\033[36m[0]\033[0m same"]
    assert sorted(lines(place, "--stdout", "--log-line-prefix-template", "$rank ")) == sorted(
        f"{rank} {text}" for rank in range(3) for text in ("same", f"grün {rank}")
    )
    refused(logs(place, "--grep", "("), "--grep: '(' is not a regular expression")
    refused(logs(place, "--timestamps", "--elapsed"), "exclude each other")
    place.env["PHALANX_GREP"] = "same$"
    assert lines(place, "--rank", 0) == ["[0] same"]
    assert lines(place, "--rank", 0, "--grep", "err") == ["[0] same err"]


@pytest.mark.long
def test_times_are_those_of_writing(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"""
        import time
        print("first", time.time(), flush=True)
        print("same")
        {ready.python()}
        {gate.python()}
        print("same")
        print("last", time.time(), end="")
        """)
    with place.start("--nproc-per-node", 2, script) as launcher:
        ready.wait(2)
        read_until_twice(launcher, "same\n")
        between = time.time()
        time.sleep(0.3)  # what is tested here is that time passes
        gate.open(2)
        launcher.end()
    begun = time.time()

    def is_of_writing(seen: float, written: float) -> bool:
        """It was seen once it had been written, and before we went on; times are right to 0.02 s, as above."""
        return written - 0.05 < seen < (between if written < between else begun) + 0.05

    rows = [json.loads(line) for line in lines(place, "--log-format", "json")]
    shown = [(row["time"], row["text"]) for row in rows if row["text"] != "same"]
    assert (len(rows), len(shown)) == (8, 4)
    for line in lines(place, "--timestamps", "--grep", "first|last"):
        _prefix, seen, text = line.split(" ", 2)
        shown.append((seen, text))
    for seen, text in shown:
        assert is_of_writing(datetime.fromisoformat(seen).timestamp(), float(text.split()[1]))
    around = [line.split() for line in lines(place, "--elapsed", "--rank", 1, "--grep", "last", "-B", 3)]
    assert [words[2] for words in around] == ["first", "same", "same", "last"]
    assert float(around[0][1]) > 0.0
    assert float(around[2][1]) - float(around[1][1]) > 0.25  # context has the time at which it was written


@pytest.mark.long
def test_equal_lines_are_folded_by_their_time_of_writing(place: Place) -> None:
    folder = sh(place, "echo same", n=3)
    at_one_moment(folder)
    assert lines(place, "--fold") == ["[0-2] same"]
    at_one_moment(folder, 1, seconds=0.1)
    assert lines(place, "--fold") == ["[0-2] same"]
    at_one_moment(folder, 1, seconds=0.3)
    [both, late] = [line.split() for line in lines(place, "--fold", "--elapsed")]
    assert (both[0], late[0]) == ("[0,2]", "[1]")
    assert round(float(late[1]) - float(both[1]), 2) == 0.3


@pytest.mark.long
def test_rotated_logs_some_of_which_are_gone(place: Place) -> None:
    script = place.write("import os\nfor n in range(2000): os.write(1, b'line %d\\n' % n)")
    place.run("--log-max-size", "1k", script)
    [path] = place.logs.glob("*/attempt_0/0/stdout.log")
    for number in (1, 3, 5):
        os.unlink(f"{path}.{number}")
    packed = [name for name in rotated_files(str(path)) if name.endswith(("2", "4"))]
    subprocess.run(["gzip", *packed], check=True)
    left = subprocess.run(
        ["zcat", "-f", *rotated_files(str(path)), str(path)], check=True, capture_output=True, text=True
    ).stdout
    assert lines(place) == [f"[0] {line}" for line in left.splitlines()]
    assert lines(place, "-n", "1500") == [f"[0] {line}" for line in left.splitlines()][-1500:]


def test_few_descriptors(place: Place) -> None:
    """Every line is there, and in its place."""
    attempt = place.logs / "many_x" / "attempt_0"
    attempt.mkdir(parents=True)
    times = TimelineWriter(str(attempt / "timeline"))
    for turn in range(2):
        for rank in range(70):
            path = attempt / str(rank) / "stdout.log"
            path.parent.mkdir(exist_ok=True)
            with open(path, "a") as file:
                file.write(f"{turn}\n")
            times.note(2 * rank, path.stat().st_size)
    times.close()
    found = logs(place, "--color", "never", head=("sh", "-c", 'ulimit -n 24; "$@"', "sh"))
    assert (found.status, found.err) == (0, "")
    assert [line.split() for line in found.out.replace("[ ", "[").splitlines()] == [
        [f"[{rank}]", str(turn)] for turn in range(2) for rank in range(70)
    ]


def test_files_and_folders_called_nearly_like_ours(place: Place) -> None:
    folder = sh(place, "echo x", n=2)
    for name in ("attempt_9", "attempt_0/7", "attempt_0/stdout.log"):
        (folder / name).touch()
    for name in ("attempt_05", "attempt_0/03", "attempt_0/\u0663"):
        (folder / name).mkdir()
    assert sorted(lines(place)) == ["[0] x", "[1] x"]


def test_a_pipe_in_the_place_of_a_file(place: Place) -> None:
    """Nobody writes to it, and nobody waits for that. Of a log, it is said."""
    folder = sh(place, "echo x", n=2)
    paths = [folder / "attempt_0" / name for name in ("0/stdout.log", "0/stderr.log", "timeline")]
    for path in paths:
        path.unlink()
        os.mkfifo(path)
    said = [f"phalanx: {path} is not shown: it is not a regular file, but a FIFO\n" for path in paths[:2]]
    assert logs(place) == (0, "[1] x\n", "".join(said))


def test_a_run_of_the_library(place: Place) -> None:
    """There is no run.json."""
    place.logs.mkdir()
    args = {rank: ("-c", f"echo of {rank}") for rank in range(2)}
    specs = DefaultLogsSpecs(str(place.logs), redirects=Std.ALL)
    with start_processes("library", "sh", args, logs_specs=specs) as group:
        group.wait()
    assert sorted(lines(place)) == ["[0] of 0", "[1] of 1"]
    elapsed = [float(line.split()[1]) for line in lines(place, "--elapsed")]
    assert min(elapsed) < 0.1  # counted from the first of them, whichever rank that is, and however late the other
    flat = place.folder / "flat"  # which has no attempts
    flat.mkdir()
    with start_processes("library", "sh", args, log_dir=flat, redirects=Std.ALL) as group:
        group.wait()
    for name in (str(flat), "./flat"):
        assert sorted(lines(place, name, "--stdout")) == ["[0] of 0", "[1] of 1"]


def test_a_timeline_of_another_version(place: Place) -> None:
    """Its lines come file by file, and a line says why. Half of an own one, as of a full disk, is no other."""
    folder = sh(place, "echo one; echo two", n=2)
    timeline = folder / "attempt_0" / "timeline"
    for number, rank in enumerate((1, 0)):
        os.utime(folder / "attempt_0" / str(rank) / "stdout.log", (clock.wall(), 1_700_000_000.0 + number))
    shown = ["[1] one", "[1] two", "[0] one", "[0] two"]
    for version in (b"phalanx1", b"phalanx2", b"phalanx4"):
        timeline.write_bytes(version + bytes(range(64)))
        done = logs(place)
        assert (done.status, done.out.splitlines()) == (0, shown)
        assert done.err == (
            f"phalanx: {timeline} cannot be read by this version of Phalanx:"
            " lines come file by file, not in the order of time\n"
        )
    for damaged in (MAGIC[:-1], MAGIC, b"", b"\0" * 64):
        timeline.write_bytes(damaged)
        assert lines(place) == shown


# --- a reader that leaves


def test_a_full_disk_is_said(place: Place) -> None:
    sh(place, "echo one")
    with reader(place, head=("sh", "-c", '"$@" >/dev/full', "sh")) as launcher:
        assert launcher.end() == (1, "", "Error: stdout: No space left on device\n")


@pytest.mark.long
def test_head(place: Place) -> None:
    script = place.write("for n in range(100_000): print('line', n)")
    place.run("-r", 3, script)
    command = 'set -o pipefail; "$@" | head -1'
    done = logs(place, head=("bash", "-c", command, "bash"))
    assert done == (128 + signal.SIGPIPE, "[0] line 0\n", "")


@pytest.mark.long
def test_a_slow_reader_gets_everything(place: Place) -> None:
    script = place.write("for n in range(100_000): print('line', n)")
    place.run("-r", 3, "--nproc-per-node", 2, script)
    read, write = os.pipe()
    with reader(place, stdout=write) as launcher:
        os.close(write)
        data = b""
        while chunk := os.read(read, 5000):
            data += chunk
        os.close(read)
        assert launcher.process.wait(LIMIT) == 0
    found = data.decode().splitlines()
    for rank in range(2):
        mine = [line for line in found if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] line {n}" for n in range(100_000)]


# --- following


@pytest.mark.long
def test_following_a_run_to_its_end(place: Place, ready: Ready, gate: Gate) -> None:
    second = Gate(place.folder / "second gate")
    script = place.write(f"""
        import os
        print("history of", os.environ["RANK"])
        {ready.python()}
        {gate.python()}
        print("live")
        {ready.python()}
        {second.python()}
        print("no end", end="")
        """)
    with second, place.start("--nproc-per-node", 2, "-r", 3, script) as launcher:
        ready.wait(2)
        with reader(place, "-f") as follower:
            shown = ""
            while shown.count("history") < 2:
                shown += follower.read_until("\n", "stdout")
            gate.open(2)
            ready.wait(2)
            more = ""
            while more.count("live") < 2:
                more += follower.read_until("live\n", "stdout")
            second.open(2)
            assert launcher.end().status == 0
            done = follower.end()
    assert (done.status, done.err) == (0, "")
    assert sorted((shown + more + done.out).splitlines()) == [
        "[0] history of 0", "[0] live", "[0] no end", "[1] history of 1", "[1] live", "[1] no end"
    ]  # fmt: skip


def test_following_a_run_that_is_just_starting(place: Place, ready: Ready, gate: Gate) -> None:
    """There is no record yet, and the file of a rank is not there either."""
    with place.start("-r", 3, place.write(f"print('x')\n{ready.python()}\n{gate.python()}\nprint('y')")) as launcher:
        ready.wait()
        (folder,) = place.logs.iterdir()
        record = folder / "run.json"
        while not record.exists():
            pass
        os.rename(record, folder / "aside")
        with reader(place, "-f") as follower:
            follower.read_until("x\n", "stdout")
            os.rename(folder / "aside", record)
            gate.open()
            launcher.end()
            assert follower.end() == (0, "[0] y\n", "")


def test_following_after_the_last_lines(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"for n in range(100): print(n)\n{ready.python()}\n{gate.python()}\nprint('live')")
    with place.start("-r", 3, script) as launcher:
        ready.wait()
        with reader(place, "-f", "-n", 2) as follower:
            assert follower.read_until("99\n", "stdout") == "[0] 98\n[0] 99\n"
            gate.open()
            launcher.end()
            assert follower.end() == (0, "[0] live\n", "")
    assert lines(place, "-f", "-n", 2) == ["[0] 99", "[0] live"], "it is over"


@pytest.mark.long
def test_following_ends_with_the_folder(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"print('x')\n{ready.python()}\n{gate.python()}")
    with place.start("-r", 3, script) as launcher:
        ready.wait()
        folder = wait_for_record(place).parent
        for how in ("renamed", "removed"):
            with reader(place, "-f", folder.name) as follower:
                follower.read_until("x\n", "stdout")
                if how == "renamed":
                    os.rename(folder, place.folder / "away")
                while folder.exists():  # the run may make its timeline meanwhile
                    shutil.rmtree(folder, ignore_errors=True)
                done = follower.end()
            assert (done.status, done.out) == (1, "")
            assert done.err == f"Error: {folder}: the folder of this run is not there any more\n"
            if how == "renamed":
                os.rename(place.folder / "away", folder)
        gate.open()
        launcher.end()


@pytest.mark.parametrize("chosen", [False, True])
def test_ranks_and_attempts_that_appear_later(place: Place, chosen: bool) -> None:
    folder = place.logs / "old_x"

    def write(attempt: int, rank: int, text: str) -> None:
        path = folder / f"attempt_{attempt}" / str(rank)
        path.mkdir(parents=True, exist_ok=True)
        with open(path / "stdout.log", "a") as file:
            file.write(text)

    write(0, 0, "old\n")
    write(1, 0, "first\n")
    with reader(place, "-f", *(("--attempt", "1") if chosen else ())) as follower:
        assert follower.read_until("first\n", "stdout") == "[0] first\n"
        write(0, 1, "not asked for\n")
        write(1, 3, "another rank\n")
        assert follower.read_until("rank\n", "stdout") == "[3] another rank\n"
        write(2, 0, "another attempt\n")
        if not chosen:
            assert follower.read_until("attempt\n", "stdout") == "[0] another attempt\n"
            write(2, 12, "and its rank\n")
            assert follower.read_until("rank\n", "stdout") == "[12] and its rank\n"
        write(1, 3, "goes on\n")
        assert follower.read_until("on\n", "stdout") == "[3] goes on\n"
        follower.send(signal.SIGINT)
        assert follower.end() == (130, "", "")


def test_a_rank_that_is_not_there_yet(place: Place) -> None:
    folder = place.logs / "old_x" / "attempt_0"
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "stdout.log").write_text("x\n")
    with reader(place, "-f", "--ranks", "0-1") as follower:
        follower.read_until("x\n", "stdout")
        (folder / "1").mkdir()
        (folder / "1" / "stdout.log").write_text("y\n")
        assert follower.read_until("y\n", "stdout") == "[1] y\n"
        shutil.rmtree(folder.parent)
        assert follower.end().status == 1


def test_a_file_system_of_a_network_is_known_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = subprocess.run(
        ["stat", "-f", "-c", "%t", str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout
    monkeypatch.setattr(linux, "_OF_NETWORKS", {int(number, 16): "this one"})
    assert linux.is_network_filesystem(str(tmp_path))
    assert not linux.is_network_filesystem("/proc")
    assert not linux.is_network_filesystem(str(tmp_path / "missing"))


UNWATCHED = """
import errno, os, sys
from phalanx._base import linux
add = linux.inotify_add
def refuse(number):
    raise OSError(number, os.strerror(number))
{patch}
from phalanx.__main__ import main
main()
"""
BLIND = "linux.inotify_add = lambda fd, path, mask=0: add(fd, '.'); linux.is_network_filesystem = lambda path: True"


@pytest.mark.parametrize(
    "patch,said",
    [
        (BLIND, "they are looked at every 1 s\n"),  # another machine's: its kernel does not notify this one
        ("linux.inotify_add = lambda *_: refuse(errno.ENOSPC)", ": log files are looked at 10 times a second\n"),
    ],
    ids=["network", "no watch"],
)
def test_following_without_inotify_reads_again_and_again(place: Place, patch: str, said: str) -> None:
    """A file that grows, a rank that appears, and the folder's removal are seen."""
    folder = place.logs / "old_x"
    (folder / "attempt_0" / "0").mkdir(parents=True)
    path = folder / "attempt_0" / "0" / "stdout.log"
    path.write_text("x\n")
    argv = [PYTHON, "-c", UNWATCHED.format(patch=patch), "logs", "--log-dir", str(place.logs), "-f"]
    with Launcher(argv, cwd=place.folder, env=place.env) as follower:
        follower.read_until("x\n", "stdout")
        assert follower.read_until("\n").endswith(said)
        with open(path, "a") as file:
            file.write("y\n")
        assert follower.read_until("y\n", "stdout") == "[0] y\n"
        (folder / "attempt_0" / "1").mkdir()
        (folder / "attempt_0" / "1" / "stderr.log").write_text("z\n")
        assert follower.read_until("z\n", "stdout") == "[1] z\n"
        shutil.rmtree(folder)
        assert follower.end() == (1, "", f"Error: {folder}: the folder of this run is not there any more\n")


@pytest.mark.parametrize("what", ["link", "folder"])
def test_following_ends_when_a_links_folder_goes(place: Place, what: str) -> None:
    folder, link = place.folder / "elsewhere" / "run", place.folder / "latest"
    path = folder / "attempt_0" / "0" / "stdout.log"
    path.parent.mkdir(parents=True)
    path.write_text("x\n")
    link.symlink_to(folder)
    with reader(place, "-f", "./latest") as follower:
        follower.read_until("x\n", "stdout")
        with open(path, "a") as file:
            file.write("y\n")
        follower.read_until("y\n", "stdout")
        os.rename(link if what == "link" else folder, place.folder / "away")
        assert follower.end().status == 1
