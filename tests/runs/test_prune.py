"""Runs that are not kept: `phalanx runs prune`, `phalanx run --keep-runs`, and what is never removed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx._base import clock
from phalanx._logs import temporary
from phalanx._runs import catalog
from phalanx._runs import prune as pruning
from phalanx._runs.catalog import RunDir
from phalanx._runs.prune import Stored, choose
from phalanx.cli import runs as runs_module
from tests.runs.test_other_users import acting_as
from tests.runs.test_runs import on_a_terminal
from tests.support.command import Done, Launcher, Place, refused, sh
from tests.support.helpers import Gate, Ready, until
from tests.support.records import example, write

PHALANX = (sys.executable, "-m", "phalanx")
NOBODY = 65534
DAY = 86400.0


def prune(place: Place, *options: object) -> Done:
    return place.program(*PHALANX, "runs", "prune", "--log-dir", place.logs, *options)


def put(place: Place, name: str, age: float = 0.0, size: int = 0, **changes: object) -> Path:
    """A run that ended some time ago."""
    return put_into(place.logs, name, age, size, **changes)


def put_into(root: Path, name: str, age: float = 0.0, size: int = 0, **changes: object) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    now = time.time()
    fields = {"state": "succeeded", "started": now - age - 1, "ended": now - age, "exit_code": 0, **changes}
    write(folder, example(**fields))
    (folder / "attempt_0").mkdir()
    (folder / "attempt_0" / "stdout.log").write_bytes(os.urandom(size))  # a file system may compress
    for path in (folder / "attempt_0" / "stdout.log", folder / "attempt_0", folder / "run.json", folder):
        os.utime(path, (now - age, now - age))
    return folder


def names(place: Place) -> list[str]:
    return sorted(path.name for path in place.logs.iterdir())


# --- which


def stored(name: str, state: str = "succeeded", size: int = 10, age: float = 0.0, owner: int | None = None) -> Stored:
    owner = os.geteuid() if owner is None else owner
    return Stored(RunDir(f"/runs/{name}", None, "", state, 0.0, owner), size, 1000 * DAY - age)


ALL = [
    stored("new", "stopped"),
    stored("runs", "running", size=100, age=90 * DAY),
    stored("week", "failed", age=7 * DAY),
    stored("theirs", size=1000, age=60 * DAY, owner=NOBODY),
    stored("month", "lost", size=50, age=30 * DAY + 1),
    stored("what", "unknown", size=70, age=40 * DAY),
    stored("torn", "unreadable", age=50 * DAY),
]


@pytest.mark.parametrize(
    "rules,expected",
    [
        ({"older": 30 * DAY}, ["month"]),
        ({"older": 400 * DAY}, []),
        ({"older": 0.0}, ["month", "week"]),
        ({"keep": 0}, ["month", "week", "new"]),
        ({"keep": 1}, ["month", "week"]),
        ({"keep": 3}, ["month"]),
        ({"keep": 7}, []),
        ({"larger": 1000}, []),
        ({"larger": 250}, []),
        ({"larger": 249}, ["month"]),
        ({"larger": 245}, ["month"]),
        ({"larger": 195}, ["month", "week"]),
        ({"larger": 0}, ["month", "week", "new"]),
        ({"larger": 245, "older": 20 * DAY}, ["month"]),
        ({}, []),
    ],
)
def test_which_runs_can_go(rules: dict[str, float], expected: list[str]) -> None:
    """The oldest first; never one that runs, that is somebody else's, or that says nothing that we can read."""
    chosen = choose(ALL, 1000 * DAY, **rules)  # type: ignore[arg-type]  # numbers of each kind
    assert [it.run.name for it in chosen] == expected


# --- the command


@pytest.mark.long
def test_it_says_what_it_would_free_before(place: Place) -> None:
    put(place, "new")
    put(place, "old", age=40 * DAY, size=100_000, state="failed")
    done = prune(place, "--older", "30d")
    assert done.status == 1
    head, row, summary = done.out.splitlines()
    assert head.split() == ["RUN", "STATE", "AGE", "SIZE"]
    assert row.split()[:3] == ["old", "failed", "40d00h"]
    assert summary.startswith("to be removed: 1 run, ")
    assert "; kept: 1 run, " in summary
    assert "nothing was removed: there is no terminal to ask at; give --yes" in done.err
    assert names(place) == ["new", "old"]
    assert prune(place, "--older", "30d", "--dry-run").status == 0
    assert names(place) == ["new", "old"]
    done = prune(place, "--older", "30d", "--yes")
    assert done.status == 0
    assert done.out.splitlines()[-1].startswith("removed 1 run, ")
    assert names(place) == ["new"]
    assert prune(place, "--older", "30d", "-y").out.startswith("nothing to remove: 1 run, ")


def test_sizes_are_those_on_the_disk(place: Place) -> None:
    put(place, "a", age=3, size=5_000_000)
    put(place, "b", age=2, size=5_000_000)
    put(place, "c", age=1, size=5_000_000)
    assert prune(place, "--larger", "11MB", "-y").status == 0
    assert names(place) == ["b", "c"]
    with (place.logs / "b" / "attempt_0" / "hole").open("wb") as file:
        file.truncate(1 << 40)
    assert prune(place, "--larger", "11MB", "-y").out.startswith("nothing to remove")


@pytest.mark.parametrize("path", ["attempt_0/stdout.log", "attempt_0"])
def test_the_age_is_that_of_the_last_change(place: Place, path: str) -> None:
    os.utime(put(place, "old", age=40 * DAY) / path)
    assert prune(place, "--older", "30d", "-y").out.startswith("nothing to remove: 1 run, ")


@pytest.mark.long
def test_a_run_that_runs_is_kept(place: Place, ready: Ready, gate: Gate) -> None:
    with place.start(place.write(f"{ready.python()}; {gate.python()}")) as launcher:
        ready.wait()
        until(lambda: bool(list(place.logs.glob("*/run.json"))))
        done = prune(place, "--keep", "0", "-y")
        assert done.out.startswith("nothing to remove: 1 run, "), done
        gate.open()
        assert launcher.end().status == 0
    (record,) = place.logs.glob("*/run.json")
    assert json.loads(record.read_text())["state"] == "succeeded"
    assert prune(place, "--keep", "0", "-y").status == 0
    assert names(place) == []


def test_what_is_no_run_is_kept(place: Place) -> None:
    put(place, "old", age=9)
    (place.logs / "data").mkdir()
    (place.logs / ".removed-photos").mkdir()
    (place.logs / "others" / "attempt_0").mkdir(parents=True)  # another launcher's
    (place.logs / "link").symlink_to(place.logs / "data")
    put(place, "elsewhere").rename(place.folder / "elsewhere")
    (place.logs / "run").symlink_to(place.folder / "elsewhere")
    assert prune(place, "--keep", "0", "-y").status == 0
    assert names(place) == [".removed-photos", "data", "link", "others", "run"]
    assert (place.folder / "elsewhere" / "run.json").exists()


@pytest.mark.parametrize("record", ['{"lr": 0.1}', '{"version": 2}', "", "{"])
def test_what_has_a_record_that_cannot_be_read_is_kept(place: Place, record: str) -> None:
    """It is another program's, or a newer version's run, which may be silent for long."""
    folder = put(place, "mine", age=90 * DAY)
    (folder / "run.json").write_text(record)
    for path in (folder / "run.json", folder):
        os.utime(path, (1e9, 1e9))
    assert prune(place, "--keep", "0", "--older", "1d", "--larger", "0", "-y").out.startswith(
        "nothing to remove: 1 run"
    )
    assert sh(place, "echo x", "--keep-runs", 1).status == 0
    assert "mine" in names(place)


def test_a_named_folder_overrides_the_environments(place: Place, tmp_path: Path) -> None:
    put(place, "named")
    put(place, "other").rename(tmp_path / "other")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "other").rename(tmp_path / "elsewhere" / "other")
    place.env["PHALANX_LOG_DIR"] = str(tmp_path / "elsewhere")
    done = place.program(*PHALANX, "runs", "--log-dir", place.logs, "prune", "--keep", "0", "-y")
    assert done.status == 0, done
    assert names(place) == []
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["other"]
    assert place.program(*PHALANX, "runs", "prune", "--keep", "0", "-y").status == 0
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_of_a_machine_of_the_same_name_what_goes_on_is_kept(place: Place) -> None:
    """Two machines can have one name, and one home: what began, or went on, since our start is not from before it."""
    before = time.time() - clock.booted() + DAY
    fields: dict[str, Any] = {"state": "running", "boot_id": "another", "ended": None, "exit_code": None}
    put(place, "began", age=0, **fields)
    (put(place, "goes_on", age=before, **fields) / "attempt_0" / "stdout.log").write_text("x")
    put(place, "ended", age=before, **fields)
    states = {run.name: run.state for run in catalog.find([str(place.logs)])}
    assert states == {"began": "running", "goes_on": "lost", "ended": "lost"}
    assert prune(place, "--keep", "0", "-y").status == 0
    assert names(place) == ["began", "goes_on"]
    put(place, "ended", age=before, **fields)
    assert sh(place, "echo x", "--keep-runs", 1, "--run-id", "today").status == 0
    assert [name.split("_")[0] for name in names(place)] == ["began", "goes", "today"]


def test_what_runs_by_now_is_kept(place: Place) -> None:
    """Between the choice and the removal lies a question, which may be answered late."""
    folder = put(place, "again")
    chosen = choose([pruning.measure(run) for run in catalog.find([str(place.logs)])], time.time(), keep=0)
    assert len(chosen) == 1
    write(folder, example())
    assert pruning.remove([], chosen) == (0, 0, [])
    assert names(place) == ["again"]


@pytest.mark.long
def test_several_at_once(place: Place) -> None:
    """Each run is removed by one of them, and counted by that one."""
    for number in range(40):
        folder = put(place, f"run_{number}", age=number + 9)
        for name in range(40):
            (folder / str(name)).touch()
    begin = [place_start(place) for _ in range(3)]
    ends = [launcher.end() for launcher in begin]
    assert [(done.status, done.err) for done in ends] == [(0, "")] * 3
    removed = [re.findall(r"^removed (\d+) run", done.out, re.MULTILINE) for done in ends]
    assert sum(int(number) for numbers in removed for number in numbers) == 40
    assert names(place) == []


def place_start(place: Place) -> Launcher:
    command = [*PHALANX, "runs", "prune", "--log-dir", str(place.logs), "--keep", "0", "-y"]
    return Launcher(command, cwd=place.folder, env=place.env)


def test_a_long_name_can_be_removed(place: Place) -> None:
    put(place, "ä" * 120 + "_12345678")
    assert prune(place, "--keep", "0", "-y").status == 0
    assert names(place) == []


def test_of_a_file_with_two_names_each_has_its_share(place: Place) -> None:
    folder = put(place, "run", size=1_000_000)
    before = pruning.measure(catalog.look(str(folder))).size
    (folder / "again").hardlink_to(folder / "attempt_0" / "stdout.log")
    assert pruning.measure(catalog.look(str(folder))).size == before


def test_links_in_a_run_are_not_followed(place: Place, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (precious / "large").write_bytes(os.urandom(1_000_000))
    folder = put(place, "old")
    (folder / "attempt_0" / "link").symlink_to(precious)
    assert pruning.measure(catalog.look(str(folder))).size < 500_000
    assert prune(place, "--keep", "0", "-y").status == 0
    assert names(place) == []
    assert (precious / "file").read_text() == "x"


def test_a_removal_that_was_interrupted_is_finished(place: Place) -> None:
    put(place, "new")
    (put(place, "old") / "run.json").unlink()
    (place.logs / "old").rename(place.logs / f"{catalog.REMOVED}old")
    assert [run.name for run in catalog.find([str(place.logs)])] == ["new"]
    done = prune(place, "--keep", "5", "-y")
    assert done.out.startswith("to be removed: 0 runs, 0 B; kept: 1 run, ")
    assert "what is left of 1 run whose removal was interrupted" in done.out
    assert names(place) == ["new"]


def test_which_removals_were_interrupted(place: Place) -> None:
    place.logs.mkdir()
    begun = [place.logs / f"{catalog.REMOVED}{name}" for name in ("ours", "theirs", "file", "link")]
    for path in begun[:2]:
        path.mkdir()
    begun[2].touch()
    begun[3].symlink_to(begun[0])
    if os.geteuid() == 0:
        os.chown(begun[1], NOBODY, NOBODY)
    else:
        begun[1].rmdir()
    assert pruning.half_removed([str(place.logs), str(place.logs / "none")]) == [str(begun[0])]


def test_there_is_nothing(place: Place) -> None:
    assert prune(place, "--keep", "0", "-y").out == f"nothing to remove: 0 runs, 0 B, in {place.logs}\n"


def test_what_cannot_be_removed_keeps_nothing_else() -> None:
    """It is said each time; all the others go."""
    if os.geteuid() != 0:
        pytest.skip("needs root: only that can act as somebody else")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is its user's alone
        root = Path(folder)
        for name, age in (("old", 3), ("older", 4), ("oldest", 5)):
            put_into(root, name, age=age * DAY)
        for path in (root, *root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        (root / "oldest" / "attempt_0" / "theirs").mkdir()
        (root / "oldest" / "attempt_0" / "theirs" / "file").touch()
        left = f"{catalog.REMOVED}oldest"
        for keep, removed in ((1, 1), (1, 0), (0, 1)):
            with acting_as(NOBODY):
                number, _, failed = pruning.prune(folder, keep)
            assert (number, failed) == (removed, [f"{folder}/{left}: Permission denied"])
        assert os.listdir(folder) == [left]


@pytest.mark.parametrize(
    "options,words",
    [
        ((), ("which runs? Give --older, --keep or --larger",)),
        (("--older", "1y"), ("--older", "'1y': expected a time, 0 or more, like 90")),
        (("--older", "30"), ("--older", "'30': of what? Give a unit, like 30d")),
        (("--larger", "10"), ("--larger", "'10': of what? Give a unit, like 10GiB")),
        (("--larger", "much"), ("--larger", "'much': expected a size")),
        (("--keep", "-1"), ("--keep",)),
    ],
)
def test_rules_that_are_none(place: Place, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(prune(place, *options), *words)


# --- the list


@pytest.mark.long
def test_states_and_limits(place: Place) -> None:
    put(place, "a", age=3, state="failed", exit_code=1)
    put(place, "b", age=2)
    put(place, "c", age=1, state="failed", exit_code=1)

    def listed(*options: str) -> list[str]:
        out = place.program(*PHALANX, "runs", "--log-dir", place.logs, "--json", *options).out
        return [json.loads(line)["folder"] for line in out.splitlines()]

    assert listed() == ["c", "b", "a"]
    assert listed("--state", "failed") == ["c", "a"]
    assert listed("--state", "failed, succeeded", "--limit", "2") == ["c", "b"]
    assert listed("--state", "failed", "-n", "1") == ["c"]
    none = place.program(*PHALANX, "runs", "--log-dir", place.logs, "--state", "lost")
    assert none.out == f"no such runs in {place.logs}\n"
    refused(place.program(*PHALANX, "runs", "--state", "faild"), "there is no state 'faild'; did you mean 'failed'?")
    refused(
        place.program(*PHALANX, "runs", "--state", "xyz"), "there is no state 'xyz'; there are running, succeeded, "
    )
    refused(place.program(*PHALANX, "runs", "--json", "prune", "--keep", "1"), "--json is for the list alone")


def test_much_is_hinted_at(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(place, "a", size=50_000)
    (place.logs / "data").mkdir()  # no run
    found = catalog.find([str(place.logs)])
    runs_module._hint(found)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(runs_module, "_LARGE", 10_000)
    runs_module._hint(found)
    assert capsys.readouterr().err.endswith(" KiB; phalanx runs prune removes old ones\n")
    monkeypatch.setattr(runs_module, "_LOOKED_AT", 0)
    monkeypatch.setattr(runs_module, "MANY", 0)
    runs_module._hint(found)
    assert capsys.readouterr().err == "1 run, 0 B or more; phalanx runs prune removes old ones\n"


def many_are(place: Place, count: int) -> None:
    """Have programs take so many runs for many."""
    folder = place.folder / "few"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"from phalanx._run import config; config.MANY = {count}\n")
    place.env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [place.env.get("PYTHONPATH")])])


def test_much_is_hinted_at_on_a_terminal_alone(place: Place) -> None:
    many_are(place, 0)
    put(place, "a")
    hint = "; phalanx runs prune removes old ones\n"
    assert on_a_terminal(place, 100).endswith(hint)
    assert hint not in on_a_terminal(place, 100, "--json")
    assert place.program(*PHALANX, "runs", "--log-dir", place.logs).err == ""


def test_a_person_is_asked(place: Place) -> None:
    put(place, "a")
    assert "Remove them? [y/N]: " in on_a_terminal(place, 100, "prune", "--keep", "0", typed="n\n")
    assert names(place) == ["a"]
    assert "removed 1 run, " in on_a_terminal(place, 100, "prune", "--keep", "0", typed="y\n")
    assert names(place) == []


# --- phalanx run


@pytest.mark.long
def test_so_many_are_kept(place: Place) -> None:
    for age in (3, 2, 1):
        put(place, f"run-{age}", age=age * DAY, size=50_000)
    (place.logs / f"{catalog.REMOVED}run-4").mkdir()
    done = sh(place, "echo x", "--keep-runs", 2, "--run-id", "today")
    assert done.status == 0
    assert re.search(r"^phalanx: --keep-runs 2: removed 2 runs, 1\d\d\.\d KiB$", done.err, re.MULTILINE)
    assert [name.split("_")[0] for name in names(place)] == ["run-1", "today"]
    assert "--keep-runs" not in sh(place, "echo x", "--keep-runs", 3).err
    assert "phalanx: --keep-runs 3: removed 1 run, " in sh(place, "echo x", "--keep-runs", 3).err


@pytest.mark.long
def test_many_are_hinted_at(place: Place) -> None:
    assert runs_module._LARGE == 10 << 30
    many_are(place, 3)
    for name in "ab":
        (place.logs / name).mkdir(parents=True)
    assert "folders are in" not in sh(place, "echo x").err
    assert "folders are in" not in sh(place, "echo x", "--keep-runs", 9).err
    done = sh(place, "echo x")
    assert (
        f"phalanx: 5 folders are in {place.logs}; phalanx runs prune removes old runs, --keep-runs N keeps" in done.err
    )


def test_files_are_no_runs(place: Place) -> None:
    place.logs.mkdir()
    for number in range(1001):
        (place.logs / f"run_{number}").touch()
    assert "phalanx runs prune" not in sh(place, "echo x").err


# --- temporary folders


@pytest.fixture
def temporary_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of programs; there are no runs elsewhere."""
    folder = place.folder / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    place.env |= {"TMPDIR": str(folder), "XDG_STATE_HOME": str(place.folder / "state")}
    return folder


def left_behind(place: Place, folder: Path, age: float = 9 * DAY) -> Path:
    """The temporary folder of a program that has ended, some time ago, after a failure."""
    before = set(folder.iterdir())
    if first := next(
        (path for path in before if temporary.is_left(str(path))), None
    ):  # programs take time: what one has left, under another name
        shutil.copytree(first, folder / f"phalanx_{len(before):08}", symlinks=True)
        return aged(folder / f"phalanx_{len(before):08}", age)
    script = place.write(
        """
        from phalanx.multiprocessing import start_processes
        with start_processes("fails", divmod, (1, 0), nprocs=1) as group:
            group.wait()
        """
    )
    assert place.program(sys.executable, script).status == 0
    [made] = set(folder.iterdir()) - before
    return aged(made, age)


def aged(folder: Path, age: float) -> Path:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - age,) * 2)
    return folder


@pytest.mark.slow
def test_temporary_folders_of_programs_that_have_ended_go(place: Place, temporary_folder: Path) -> None:
    old, recent = left_behind(place, temporary_folder), left_behind(place, temporary_folder, age=0)
    of_ours, unmarked = Path(temporary.make()), temporary_folder / "phalanx_abcdefgh"
    (unmarked / "run_x" / "attempt_0").mkdir(parents=True)
    elsewhere = left_behind(place, temporary_folder)
    elsewhere.rename(place.folder / "elsewhere")
    link = temporary_folder / "phalanx_12345678"
    link.symlink_to(place.folder / "elsewhere")
    kept = [recent, of_ours, unmarked, link]
    if os.geteuid() == 0:
        others = left_behind(place, temporary_folder)
        for path in (*others.rglob("*"), others):
            os.chown(path, NOBODY, NOBODY)
        kept.append(others)
    for path in (of_ours, unmarked):
        os.utime(path, (0, 0))
    command = (*PHALANX, "runs", "prune", "--yes")
    for options in (("--keep", 0), ("--larger", "1B"), ("--older", "1d", "--log-dir", place.folder)):
        assert "nothing to remove" in place.program(*command, *options).out
    done = place.program(*command, "--older", "1d")
    assert done.status == 0, done.err
    assert re.search(rf"^{old.name} +temporary +9d", done.out, re.MULTILINE), done.out
    assert done.out.splitlines()[-1].startswith("removed 1 run")
    assert sorted(temporary_folder.iterdir()) == sorted(kept)
    assert (place.folder / "elsewhere" / temporary.MARKER).exists()


@pytest.mark.parametrize(
    "line, value, goes",
    [
        (0, "4194304", True),  # beyond the highest pid
        (0, "9" * 25, True),
        (1, "1", True),  # another process has the pid
        (0, "", False),
        (2, "another-machine", False),
        (3, "another-boot", False),  # the folder has changed since this one: a container that shares it, perhaps
        (4, "pid:[1]", False),
    ],
)
def test_unused_temporary_folders_are_recognised(temporary_folder: Path, line: int, value: str, goes: bool) -> None:
    assert temporary_folder.is_dir()
    marker = Path(temporary.make()) / temporary.MARKER
    assert not temporary.is_left(str(marker.parent))
    lines = marker.read_text().split("\n")
    marker.write_text("\n".join([*lines[:line], value, *lines[line + 1 :]]))
    assert temporary.is_left(str(marker.parent)) is goes
    (marker.parent / "link").symlink_to(marker)
    marker.rename(marker.with_name("true"))
    marker.symlink_to("true")
    assert not temporary.is_left(str(marker.parent))
