"""`run.json` and `phalanx runs`: what a run directory says of itself, during the run, later, and damaged."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx._base import linux, procfs
from phalanx._runs import catalog, record
from phalanx.multiprocessing import Leftover
from tests.support import command
from tests.support.command import Done, Place
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, wait_gone
from tests.support.records import example, write

IN_MOVED_TO = 0x80
BOOT = "00000000-1111-2222-3333-444444444444"


def runs(place: Place, *options: object) -> Done:
    """What `phalanx runs` says."""
    return place.program(sys.executable, "-m", "phalanx", "runs", "--log-dir", place.logs, *options)


def rows(place: Place, *options: object) -> list[dict[str, Any]]:
    done = runs(place, "--json", *options)
    assert done[::2] == (0, ""), done
    return [json.loads(line) for line in done.out.splitlines()]


def row(place: Place) -> dict[str, Any]:
    """The only run."""
    (only,) = rows(place)
    return only


def wait_for_record(place: Place) -> Path:
    """Wait until the only run has its record, with its ranks; return the record. To be called when its workers run."""
    (folder,) = place.logs.iterdir()
    path: Path = folder / record.FILE
    fd = linux.inotify()
    try:
        linux.inotify_add(fd, str(folder), IN_MOVED_TO)
        # It is written when the attempt begins, and again once all workers have been started.
        while not path.exists() or not json.loads(path.read_text())["attempts"][-1]["ranks"]:
            ready, _, _ = select.select([fd], [], [], TIMEOUT)
            assert ready
            os.read(fd, 4096)
    finally:
        os.close(fd)
    return path


def put(root: Path, name: str, **changes: Any) -> Path:
    """A run's folder with a record."""
    folder = root / name
    folder.mkdir(parents=True)
    write(folder, example(**changes))
    return folder


# --- what real runs say


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rank = record.Rank(rank=1, local_rank=0, pid=7, pid_started=5, state="failed", exitcode=1, signal_sent=15)
    left = [record.Leftover(**Leftover(9, "sleep 9", 0, 2.5, 15, -15).__getstate__())]
    ended = record.end(example(), state="failed", exit_code=1, cause="why", ranks=[rank], leftovers=left)
    for made in (record.begin(run_id="", name="", command=[], started=0.0, nprocs=1, ranks=[rank]), ended):
        record.write(str(tmp_path), made)
        assert record.read(str(tmp_path)) == made


@pytest.mark.long
def test_a_run_that_succeeds(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"{ready.python()}; {gate.python()}")
    before = time.time()
    with place.start("--nproc-per-node", 2, "--run-id", "night", script, "--lr", "0.1") as launcher:
        pids = set(ready.pids(2))
        record = wait_for_record(place)
        during = row(place)
        pid = launcher.process.pid
        gate.open(2)
        assert launcher.end().status == 0
    assert during["state"] == during["run"]["state"] == "running"
    assert during["run"]["ended"] is during["run"]["exit_code"] is None
    assert [rank["state"] for rank in during["run"]["attempts"][0]["ranks"]] == ["running", "running"]

    after = row(place)
    assert (after["state"], after["problem"], after["path"]) == ("succeeded", "", str(record.parent))
    run = after["run"]
    assert run["version"] == 1
    assert (run["run_id"], run["name"], run["command"]) == ("night", script, [script, "--lr", "0.1"])
    assert (run["cwd"], run["host"], run["pid"]) == (str(place.folder), os.uname().nodename, pid)
    assert run["nprocs"] == 2
    assert (run["exit_code"], run["cause"]) == (0, "")
    assert before <= run["started"] <= run["ended"] <= time.time()
    (attempt,) = run["attempts"]
    assert (attempt["number"], attempt["started"], attempt["ended"]) == (0, run["started"], run["ended"])
    assert {rank["pid"] for rank in attempt["ranks"]} == pids
    assert during["run"]["attempts"][0]["ranks"][0]["pid_started"] > run["pid_started"]
    for number, rank in enumerate(attempt["ranks"]):
        expected = {"rank": number, "local_rank": number, "state": "succeeded", "exitcode": 0, "signal_sent": None}
        started = during["run"]["attempts"][0]["ranks"][number]["pid_started"]
        assert run["started"] <= rank.pop("ended") <= run["ended"]
        assert rank == {**expected, "pid": rank["pid"], "pid_started": started, "early": 0.0}
    # Nothing else is in the folder: the temporary name has gone.
    assert {path.name for path in record.parent.iterdir()} >= {"run.json"}
    assert not list(record.parent.glob(".run.json*"))


@pytest.mark.long
@pytest.mark.parametrize(
    "end, code, status, cause",
    [
        ('raise ValueError("loss is nan\\nat step 2")', 1, 1, "ValueError: loss is nan"),
        ("os.kill(os.getpid(), 9)", -9, 137, r"Signal 9 \(SIGKILL\) received by PID \d+"),
    ],
)
def test_a_run_that_fails_names_the_cause(
    place: Place, gate: Gate, end: str, code: int, status: int, cause: str
) -> None:
    script = place.write(f"""
        import os
        if os.environ["RANK"] == "1": {end}
        {gate.python()}
        """)
    assert place.run("--nproc-per-node", 3, script).status == status
    run = row(place)["run"]
    assert (run["state"], run["exit_code"]) == ("failed", status)
    assert re.fullmatch(f"rank 1: {cause}", run["cause"])
    states = [(rank["state"], rank["exitcode"], rank["signal_sent"]) for rank in run["attempts"][0]["ranks"]]
    assert states == [("stopped", -15, 15), ("failed", code, None), ("stopped", -15, 15)]


@pytest.mark.long
def test_a_run_that_is_interrupted(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"{ready.python()}; {gate.python()}")
    with place.start("--nproc-per-node", 2, script) as launcher:
        ready.pids(2)
        launcher.send(signal.SIGINT)
        assert launcher.end().status == 130
    run = row(place)["run"]
    assert (run["state"], run["exit_code"], run["cause"]) == ("stopped", 130, "SIGINT")
    assert [rank["signal_sent"] for rank in run["attempts"][0]["ranks"]] == [2, 2]


INTERRUPTED_IMPORT = """
import _imp, _thread, os, signal, sys

acquire, main, done = _imp.acquire_lock, _thread.get_ident(), []

def acquire_lock():
    acquire()
    here = _thread.get_ident() == main and sys._getframe(1).f_locals.get("name") == "phalanx._outcomes.report"
    if here and not done:
        done.append(1)
        os.kill(os.getpid(), signal.SIGINT)  # its handler runs before the caller can see to the release

_imp.acquire_lock = acquire_lock
"""


@pytest.mark.slow
def test_a_signal_in_the_midst_of_an_import_leaves_a_record(place: Place) -> None:
    """An exception there leaves the import system's lock taken, for which the thread that writes would wait."""
    place.write(INTERRUPTED_IMPORT, "sitecustomize.py")
    place.env["PYTHONPATH"] = os.pathsep.join([str(place.folder), *filter(None, [place.env.get("PYTHONPATH")])])
    done = place.run("--no-python", "sleep", "600")
    assert done.status == 130
    assert "SIGINT" in done.err
    assert "cannot be written" not in done.err
    assert row(place)["run"]["cause"] == "SIGINT"


@pytest.mark.slow
def test_a_signal_is_never_lost_in_the_writing(place: Place) -> None:
    """There may be an `except Exception` in it, where an exception of ours would end."""
    program = """
import os
from phalanx import cli
from phalanx._runs import record
write = record.write
def interrupted(folder, run):
    try:
        write(folder, run)
        if run.state == "running": os.kill(os.getpid(), 15)
    except Exception: pass
record.write = interrupted
cli.main()
"""
    script = place.write("import signal; signal.pause()")
    done = place.program(sys.executable, "-c", program, "run", "--log-dir", place.logs, script)
    assert done.status == 143
    assert row(place)["state"] == "stopped"


@pytest.mark.long
def test_a_launcher_that_is_killed_leaves_a_lost_run(place: Place, ready: Ready, gate: Gate) -> None:
    script = place.write(f"{ready.python()}; {gate.python()}")
    with place.start("--nproc-per-node", 2, script) as launcher:
        pids = ready.pids(2)
        wait_for_record(place)
        assert row(place)["state"] == "running"
        launcher.send(signal.SIGKILL)
        assert not wait_gone([*pids, launcher.process.pid])
        assert row(place)["state"] == "lost"  # nobody has reaped it yet
    found = row(place)
    assert (found["state"], found["run"]["state"]) == ("lost", "running")
    assert re.search(r"  lost +\S+ +- +2 +- +- +0 +-  \S", runs(place).out)


@pytest.mark.slow
def test_a_start_that_fails(place: Place) -> None:
    """The interpreter cannot be executed: found out when the folder is there already."""
    place.env["PYTHON_EXEC"] = place.write("#!/no/such/interpreter\n", "python")
    os.chmod(place.env["PYTHON_EXEC"], 0o700)
    done = place.run(place.write(""))
    assert done.status == 1
    run = row(place)["run"]
    assert (run["state"], run["exit_code"]) == ("failed", 1)
    assert run["cause"]
    assert run["cause"] in done.err
    assert run["attempts"][0]["ranks"] == []


@pytest.mark.slow
def test_a_keeper_that_is_killed(place: Place, ready: Ready, gate: Gate) -> None:
    parent = ready.python("__import__('os').getppid()")
    script = place.write(f"{parent}; {gate.python()}")
    with place.start(script) as launcher:
        (keeper,) = ready.pids()
        wait_for_record(place)
        os.kill(keeper, signal.SIGKILL)
        done = launcher.end()
    assert done.status == 1
    run = row(place)["run"]
    assert (run["state"], run["exit_code"]) == ("failed", 1)
    assert run["cause"] in done.err
    assert [rank["state"] for rank in run["attempts"][0]["ranks"]] == ["stopped"]


def test_arguments_that_are_no_text(place: Place) -> None:
    argv = [os.fsencode(part) for part in (sys.executable, "-m", "phalanx", "run", "--log-dir", place.logs)]
    subprocess.run([*argv, b"--no-python", b"true", b"\xff\xfe", "é".encode()], check=True, env=place.env,
                   capture_output=True, timeout=60)  # fmt: skip
    assert row(place)["run"]["command"] == ["true", "\\udcff\\udcfe", "é"]


# --- a record that cannot be written


@pytest.mark.slow
def test_where_nothing_can_be_written_there_is_no_run(place: Place) -> None:
    """What fills up while workers run: see `tests/cli/test_full_disks.py`."""
    done = place.run("-t", 0, "-r", 0, "--no-python", "sh", "-c", "echo hello; exit 3",
                     head=("sh", "-c", 'ulimit -f 0; exec "$@"', "sh"))  # fmt: skip
    assert done.status == 3
    assert done.out == "hello\n"
    assert done.err.count("no logs are kept") == 2
    assert "cannot be written" not in done.err
    assert "Traceback" not in done.err
    assert rows(place) == []


@pytest.mark.skipif(shutil.which("setpriv") is None and os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_becomes_read_only_harms_nobody(place: Place, ready: Ready, gate: Gate) -> None:
    head = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
    script = place.write(f"{ready.python()}; {gate.python()}; print('done')")
    with place.start(script, head=head) as launcher:
        ready.wait()
        record = wait_for_record(place)
        os.chmod(record.parent, 0o500)
        gate.open()
        done = launcher.end()
    os.chmod(record.parent, 0o700)
    assert done[:2] == (0, "[0] done\n")
    assert done.err.count("run.json cannot be written") == 1
    assert "Permission denied" in done.err
    assert row(place)["state"] == "lost"  # that is what can be known: it ran, and its launcher has gone


def test_a_failed_write_leaves_the_old_record_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(tmp_path, "a")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write(folder, example(cause="new"))
    assert os.listdir(folder) == ["run.json"]
    assert record.read(str(folder)).cause == ""


# --- a record that cannot be read

GOOD = record.to_object(example())


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["run.json"]),
        (b"{", ["run.json", "Expecting"]),
        (b"\x00\xff\xfe", ["run.json", "utf-8"]),
        (b'{"version": 1, "run_id": "\xff"}', ["run.json"]),
        (b"[" * 100_000, ["run.json"]),
        (b"[]", ["run.json", "object"]),
        (b"{}", ["run.json", "`version`"]),
        (b'{"version": 1}', ["run.json", "`run_id`"]),
        (b'{"version": "1"}', ["run.json", "$.version"]),
        (b'{"version": 2, "state": 7}', ["run.json", "newer Phalanx", "version 2"]),
        (b'{"version": 0}', ["run.json", "version 0"]),
        (json.dumps({**GOOD, "nprocs": "four"}).encode(), ["$.nprocs", "a number"]),
        (json.dumps({**GOOD, "state": "asleep"}).encode(), ["$.state", "asleep"]),
        (json.dumps({**GOOD, "pid": 10**30}).encode(), ["$.pid"]),
        (json.dumps({**GOOD, "pid": 0}).encode(), ["$.pid"]),
        (json.dumps({**GOOD, "started": 1e300}).encode(), ["$.started"]),
        (json.dumps({**GOOD, "attempts": [{"number": 0, "started": 0, "ranks": [7]}]}).encode(), ["$.attempts["]),
        (json.dumps({**GOOD, "command": ["x" * ((128 << 10) + 1)]}).encode(), ["command"]),
        (json.dumps({**GOOD, "state": "x" * 1_000_000}).encode(), ["`$.state`"]),
        (json.dumps(GOOD).replace('"early": 0.0', f'"early": 1{400 * "0"}', 1).encode(), ["].early`"]),
    ],
)  # fmt: skip
def test_a_damaged_record_is_listed_as_such(place: Place, content: bytes, words: list[str]) -> None:
    good, bad = put(place.logs, "good"), put(place.logs, "bad")
    (bad / "run.json").write_bytes(content)
    with pytest.raises(record.UnreadableRecordError) as caught:
        record.read(str(bad))
    for word in words:
        assert word in str(caught.value)
    found = {run.name: run for run in catalog.find([str(place.logs)])}
    assert (found["good"].state, found["good"].problem) == ("running", "")
    assert (found["bad"].state, found["bad"].run) == ("unreadable", None)
    assert found["bad"].problem == str(caught.value)
    assert len(found["bad"].problem) < 1000
    assert good.exists()


def test_fields_of_a_later_day_are_no_error(tmp_path: Path) -> None:
    folder = put(tmp_path, "a")
    (folder / "run.json").write_text(json.dumps({**GOOD, "mood": "good"}))
    assert record.read(str(folder)).run_id == "night"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir), ("loop", lambda path: os.symlink(path, path))):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "run.json")
    assert {run.name: run.state for run in catalog.find([str(tmp_path)])} == dict.fromkeys(
        ("pipe", "folder", "loop"), "unreadable"
    )


@pytest.mark.long
def test_a_record_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither read nor written beyond that. Several attempts of 4,000 ranks (here, a 16th of all) are below."""
    monkeypatch.setattr(record, "MOST_BYTES", record.MOST_BYTES // 16)
    ranks = [record.Rank(rank=n, local_rank=n, pid=4194304, pid_started=10**9, state="succeeded") for n in range(250)]
    attempts = [record.Attempt(number=n, started=1e9, ranks=ranks) for n in range(12)]
    folder = put(tmp_path, "a", attempts=attempts)
    assert record.MOST_BYTES / 2 < (folder / "run.json").stat().st_size < record.MOST_BYTES
    with pytest.raises(ValueError, match=f"{record.MOST_BYTES} can be read"):
        write(folder, example(attempts=attempts * 2))
    assert len(record.read(str(folder)).attempts) == 12

    os.truncate(folder / "run.json", 1 << 40)
    (found,) = catalog.find([str(tmp_path)])
    assert (found.state, f"more than {record.MOST_BYTES} bytes" in found.problem) == ("unreadable", True)


def test_of_many_runs_no_more_is_held_than_is_shown(tmp_path: Path) -> None:
    put(tmp_path, "a", command=["x" * 3000, "y" * 3000, "z"])
    (found,) = catalog.find([str(tmp_path)])
    assert found.run is not None
    assert ([len(attempt.ranks) for attempt in found.run.attempts], found.run.argv) == ([0], [])
    assert found.run.command == ["x" * 3000, "y" * 1095 + "…"]
    whole = catalog.resolve([str(tmp_path)], "a").run
    assert whole is not None
    assert (len(whole.attempts), len(whole.command)) == (1, 3)


def test_a_link_in_place_of_the_draft_is_not_followed(tmp_path: Path) -> None:
    folder = put(tmp_path, "a")
    (tmp_path / "precious").write_text("precious")
    (folder / f".run.json.{os.getpid()}").symlink_to(tmp_path / "precious")
    write(folder, example(cause="why"))
    assert ((tmp_path / "precious").read_text(), record.read(str(folder)).cause) == ("precious", "why")


def test_runs_without_a_record_and_folders_that_are_no_runs(place: Place) -> None:
    (place.logs / "20260101-000000_x" / "attempt_0").mkdir(parents=True)
    (place.logs / "src").mkdir()
    (place.logs / "file").touch()
    os.symlink("20260101-000000_x", place.logs / "link")
    found = row(place)
    assert (found["folder"], found["state"], found["run"]) == ("20260101-000000_x", "unknown", None)
    assert "run.json" in found["problem"]
    assert "unknown" in runs(place).out


# --- whether it still runs


def test_a_launcher_is_known_by_more_than_its_pid() -> None:
    mine = example()
    assert record.state_now(mine) == "running"
    assert record.state_now(mine.replace(pid_started=mine.pid_started + 1)) == "lost"  # the pid is another's by now
    assert record.state_now(mine.replace(boot_id=BOOT)) == "lost"  # the machine has been started anew
    assert record.state_now(mine.replace(boot_id=BOOT, started=time.time())) == "running"  # another of the same name
    assert record.state_now(mine.replace(boot_id=BOOT, host="elsewhere")) == "running"  # who knows?
    assert record.state_now(mine.replace(host="elsewhere", pid_started=1)) == "lost"  # it only had another name
    assert record.state_now(mine.replace(pid_namespace="pid:[1]", pid_started=1)) == "running"  # who knows?
    assert record.state_now(mine.replace(state="failed", pid_started=1)) == "failed"


def test_a_zombie_does_not_run() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        dead = example(pid=child.pid, pid_started=procfs.Stat(child.pid).start)
        assert record.state_now(dead) == "lost"
    assert not alive(child.pid)
    assert record.state_now(dead) == "lost"


# --- finding them again


def test_names_and_what_they_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = str(tmp_path / "runs")
    put(tmp_path / "runs", "20260101-101010_aaaa", run_id="20260101-101010", started=1.0)
    put(tmp_path / "runs", "20260101-121212_bbbb", run_id="20260101-121212", started=3.0)
    put(tmp_path / "runs", "night_cccc", run_id="night", started=2.0)
    put(tmp_path / "runs", "nightly_dddd", run_id="nightly", started=2.0)
    put(tmp_path / "runs", "twice_eeee", run_id="twice", started=4.0)
    put(tmp_path / "runs", "twice_ffff", run_id="twice", started=5.0)
    elsewhere = put(tmp_path, "elsewhere")

    def name(text: str | None) -> str:
        return catalog.resolve([root], text).name

    assert name(None) == "twice_ffff"
    assert name("night_cccc") == name("night") == name("night_") == "night_cccc"
    assert name("nightly") == name("nightl") == "nightly_dddd"
    assert name("20260101-12") == "20260101-121212_bbbb"
    assert name("twice_e") == "twice_eeee"
    assert catalog.resolve([root], str(elsewhere)).path == str(elsewhere)
    assert catalog.resolve([root], "./elsewhere/").path == str(elsewhere)
    assert catalog.resolve([root], "elsewhere").path == str(elsewhere)

    for text, words in {
        "twice": ["'twice'", "2 runs", "twice_ffff, twice_eeee"],
        "20260101": ["2 runs", "20260101-121212_bbbb, 20260101-101010_aaaa"],
        "": ["6 runs", "and 1 more"],
        "nigth_cccc": ["no run 'nigth_cccc'", "close to it: night_cccc"],
        "zzz": ["no run 'zzz'", "twice_ffff"],
        "./runs": ["'./runs' is not a run's folder"],
        "no/such": ["'no/such' is not a run's folder"],
    }.items():
        with pytest.raises(catalog.UnknownRunError) as caught:
            name(text)
        for word in words:
            assert word in str(caught.value)


# --- the command


def test_a_table_for_pipes(place: Place) -> None:
    put(place.logs, "20260101-101010_aaaa", state="succeeded", started=1e9, ended=1e9 + 725, exit_code=0)
    put(
        place.logs,
        "b_b",
        state="failed",
        started=2e9,
        ended=2e9 + 1.25,
        exit_code=1,
        nprocs=1000,
        cause="rank 3: \x1b[2J",
    )
    put(place.logs, "c", started=3e9, command=["train.py", "a\tb", "x y", "é" * 300])
    place.env["TZ"] = "UTC"
    done = runs(place)
    assert done[::2] == (0, "")
    head, c, b, a = done.out.splitlines()
    assert "\t" not in done.out
    assert "\x1b" not in done.out
    assert " ".join(head.split()) == "RUN STATE STARTED TIME RANKS EXIT PID ATTEMPT STEP COMMAND CAUSE"
    said = "20260101-101010_aaaa succeeded 2001-09-09T01:46:40 12m05s 1 0 - 0 - train.py --lr 0.1"
    assert " ".join(a.split()) == said
    assert b.split()[:6] == ["b_b", "failed", "2033-05-18T03:33:20", "1.2s", "1000", "1"]
    assert b.endswith("rank 3: \\x1b[2J")
    assert c.split()[:6] == ["c", "running", "2065-01-24T05:20:00", "0ms", "1", "-"]
    assert c.split()[6:9] == [str(os.getpid()), "0", "-"]
    assert f"'a\\tb' 'x y' '{'é' * 300}'" in c  # never cut, never wrapped
    assert {line.index(word) for line, word in ((head, "STATE"), (a, "succ"), (b, "failed"), (c, "runn"))} == {22}


def test_an_encoding_that_has_no_word_for_it(place: Place) -> None:
    put(place.logs, "a", command=["é"])
    place.env.update(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert "\\xe9" in runs(place).out


def test_no_runs_is_no_error(place: Place) -> None:
    assert catalog.find([str(place.folder / "no" / "such")]) == []
    for text in (None, "x"):
        with pytest.raises(catalog.UnknownRunError, match="no run"):
            catalog.resolve([str(place.folder)], text)
    place.write("", "file")
    assert "is a file" in place.program(sys.executable, "-m", "phalanx", "runs", "--log-dir", "file").err
    assert runs(place, "-n", 0).status == 2
    assert place.run("--no-python", "no-such-binary").status != 0  # it is refused, and leaves nothing
    assert runs(place) == (0, f"no runs in {place.logs}\n", "")
    assert runs(place, "--json") == (0, "", "")


@pytest.mark.long
def test_the_place_is_the_one_that_run_uses(place: Place) -> None:
    place.env["XDG_STATE_HOME"] = str(place.folder / "state")
    assert place.run("--no-python", "true", logs=False).status == 0
    program = [sys.executable, "-m", "phalanx", "runs"]
    assert "succeeded" in place.program(*program).out
    place.env["PHALANX_LOG_DIR"] = str(place.folder / "other")
    assert place.program(*program).out == f"no runs in {place.folder / 'other'}\n"
    assert place.run("--no-python", "echo", "there", logs=False).status == 0
    assert place.program(sys.executable, "-m", "phalanx", "logs").out == "[0] there\n"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_is_said(place: Place, options: tuple[str, ...]) -> None:
    put(place.logs, "a")
    place.env.pop("PYTHONUNBUFFERED", None)  # what stdout has refused is written again at the end: 120
    argv = [sys.executable, "-m", "phalanx", "runs", "--log-dir", place.logs, *options]
    done = place.program("sh", "-c", '"$@" >/dev/full', "sh", *argv)
    assert done == (1, "", "Error: stdout: No space left on device\n")


def on_a_terminal(place: Place, columns: int, *options: str, typed: str = "", **env: str) -> str:
    argv = [sys.executable, "-m", "phalanx", "runs", "--log-dir", place.logs, *options]
    settings = {"TERM": "xterm-256color", "COLUMNS": str(columns), "TZ": "UTC", **env}
    status, text = command.on_a_terminal(place, argv, typed, **settings)
    assert status == (1 if b"Aborted" in text else 0), text
    return text.decode()


def test_a_table_for_people(place: Place) -> None:
    put(
        place.logs,
        "20260101-101010_aaaa",
        state="failed",
        started=1e9,
        ended=1e9 + 7300,
        exit_code=1,
        cause="rank 1: " + "x" * 99,
    )
    put(place.logs, "b", state="succeeded", started=2e9, ended=2e9 + 1, exit_code=0, command=["train.py", "y" * 99])
    text = on_a_terminal(place, 80)
    assert "\x1b[32msucceeded" in text
    assert "\x1b[1;31mfailed" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    head, b, a, cause, end = plain.split("\n")
    assert end == ""
    assert head.split() == ["RUN", "STATE", "STARTED", "TIME", "RANKS", "EXIT", "COMMAND"]
    assert b.endswith("yyy…")
    assert len(b) == len(cause) == 80
    assert a.split()[:6] == ["20260101-101010_aaaa", "failed", "2001-09-09", "2h01m", "1", "1"]
    assert cause.startswith("  rank 1: xxx")
    assert cause.endswith("x…")
    assert "\x1b" not in on_a_terminal(place, 80, NO_COLOR="1")


@pytest.mark.parametrize("columns", [80, 60])
def test_the_name_of_the_script_is_kept_on_a_narrow_terminal(place: Place, columns: int) -> None:
    script = "/home/ada/experiments/sweep/finetune.py"
    for name in ("20260101-101010_aaaaaaaa", "20260101-101010_abbbbbbb", "20260101-101011_cccccccc"):
        put(place.logs, name, state="failed", started=1e9, ended=1e9 + 7300, exit_code=130, command=[script, "y" * 99])
    text = re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal(place, columns, TERM="xterm"))
    head, *rows = text.splitlines()
    assert head.split()[-1] == "COMMAND"
    assert all(len(row) == columns and "finetune.py" in row for row in rows)
    listed = runs(place, "--json").out
    for name in [row.split()[0] for row in rows]:  # shortened, and good for the other commands
        assert listed.count(f'"{name}') == 1
    if columns == 60:
        return
    wide = on_a_terminal(place, 240)
    assert "20260101-101010_aaaaaaaa" in wide
    assert script in wide


def test_started_today_is_a_time_of_day(place: Place) -> None:
    put(place.logs, "a", started=time.time())
    assert re.search(r"running\S*  \d\d:\d\d:\d\d", on_a_terminal(place, 100))


def test_a_reader_that_leaves_early(place: Place) -> None:
    for number in range(30):
        put(place.logs, f"run{number}", command=["x" * 10_000])
    done = place.program(
        "bash", "-o", "pipefail", "-c", '"$@" | head -n 1', "bash",
        sys.executable, "-m", "phalanx", "runs", "--log-dir", place.logs,
    )  # fmt: skip
    assert done.out.startswith("RUN ")
    assert (done.status, done.err) == (128 + signal.SIGPIPE, "")


def test_what_is_not_needed_is_not_loaded() -> None:
    code = "import sys, phalanx.cli._commands, phalanx.cli.run; print(sorted({'msgspec', 'rich'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
