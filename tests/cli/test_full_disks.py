"""`phalanx run` where the disk of the logs takes no more: from the start, or while the workers run."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from tests.support import workers
from tests.support.command import Done, Place
from tests.support.disks import Disk, fill, small
from tests.support.helpers import Gate, Ready

pytestmark = [
    pytest.mark.usefixtures("own_temporary_folder"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system"),
]

NO_SPACE = "No space left on device"
OK = "print('fine')"
FILL = """
    import os, sys
    def fill(disk):
        try:
            with open(os.path.join(disk, "filler"), "wb", buffering=0) as stream:
                while True:
                    stream.write(b"x" * 4096)
        except OSError:
            pass
"""


@pytest.fixture
def home(place: Place, tmp_path: Path) -> Iterator[Path]:
    """A small disk, on which runs are kept by default; temporary files are elsewhere."""
    (tmp_path / "tmp").mkdir()
    with small(tmp_path, kib=1024, inodes=200) as disk:
        place.env |= {"XDG_STATE_HOME": str(disk), "TMPDIR": str(tmp_path / "tmp"), "DISK": str(disk)}
        yield disk


def elsewhere(tmp_path: Path) -> Path:
    return tmp_path / "tmp" / f"phalanx-{os.geteuid()}"


def record_of(runs: Path) -> dict[str, object]:
    (path,) = runs.glob("*/run.json")
    found: dict[str, object] = json.loads(path.read_text())
    return found


def limit_files(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def blames(done: Done, words: str, disk: Path) -> None:
    """The report names the disk, and nothing on the console is a traceback of ours."""
    assert f"  detail    : {words}: {disk}/phalanx/runs/" in done.err, done.err
    assert f"/attempt_0, on the disk at {disk}; lines are missing from its logs\n" in done.err
    assert "the run goes on" not in done.err
    assert "site-packages/phalanx" not in done.err
    assert "src/phalanx" not in done.err


# --- from the start


@pytest.mark.parametrize("named", [False, True])
def test_a_run_whose_disk_is_full_is_kept_elsewhere(place: Place, home: Path, tmp_path: Path, named: bool) -> None:
    fill(home)
    folder, what = (home / "mine", "logs") if named else (home / "phalanx/runs", "runs")
    done = place.run(*(("--log-dir", folder) if named else ()), place.write(OK), logs=False)
    assert (done.status, done.out) == (0, "[0] fine\n")
    why = f"{NO_SPACE}: {folder}, on the disk at {home}"
    assert f"phalanx: {why}; {what} are kept in {elsewhere(tmp_path)}\n" in done.err
    assert done.err.count("phalanx: ") == 2, done.err
    assert record_of(elsewhere(tmp_path))["state"] == "succeeded"


@pytest.mark.slow
def test_a_disk_without_inodes_is_not_used(place: Place, home: Path, tmp_path: Path) -> None:
    """If there are none only later, the evidence arrives all the same."""
    takes_all = "for number in range(os.statvfs(disk).f_ffree): open(os.path.join(disk, f'file{number}'), 'w').close()"
    script = f"import os\ndisk = os.environ['DISK']\n{takes_all}\nraise ValueError('loss is nan')"
    done = place.run(place.write(script), logs=False)
    assert done.status == 1
    assert "  error     : ValueError: loss is nan\n" in done.err
    assert f"  detail    : {NO_SPACE} (0 inodes are free: see df -i): {home}/phalanx/runs/" in done.err
    done = place.run(place.write(OK), logs=False)
    assert (done.status, done.out) == (0, "[0] fine\n")
    why = rf"phalanx: {NO_SPACE} \(\d inodes are free: see df -i\): {home}/phalanx/runs, on the disk at {home}; "
    assert re.search(why, done.err), done.err
    assert record_of(elsewhere(tmp_path))["state"] == "succeeded"


@pytest.mark.slow
def test_where_no_folder_takes_logs_none_are_kept(place: Place, home: Path) -> None:
    done = place.run("--nproc-per-node", 2, place.write(OK), logs=False, preexec_fn=limit_files(8192))
    assert (done.status, sorted(done.out)) == (0, sorted("fine\nfine\n")), "the two write to the same console"
    assert "phalanx: 2 workers, no logs are kept\n" in done.err
    assert "File too large (the limit on the size of a file: see ulimit -f): " in done.err
    assert NO_SPACE not in done.err
    assert not list(home.rglob("*.log"))
    done = place.run(place.write("raise ValueError('loss is nan')"), logs=False, preexec_fn=limit_files(0))
    assert done.status == 1
    assert "  error     : ValueError: loss is nan\n" in done.err


# --- while the workers run


@pytest.mark.parametrize("options", ["", "--preload json --log-max-size 100000", "--run-path"])
def test_the_exception_on_a_full_disk_is_in_the_report(place: Place, home: Path, options: str) -> None:
    script = place.write(FILL + "\n    fill(os.environ['DISK'])\n    raise ValueError('loss is nan')")
    done = place.run(*options.split(), script, logs=False)
    assert done.status == 1
    blames(done, NO_SPACE, home)
    assert "  error     : ValueError: loss is nan\n" in done.err
    assert 'raise ValueError("loss is nan")\n' in done.err.replace("'", '"')
    assert options or done.err.count("Traceback (most recent call last)") == 1
    assert f"phalanx: run.json cannot be written: {NO_SPACE}: {home}" in done.err


@pytest.mark.slow
def test_a_print_that_the_disk_does_not_take_is_in_the_report(place: Place, home: Path) -> None:
    script = place.write(FILL + "\n    fill(os.environ['DISK'])\n    print('x' * 10000)")
    done = place.run(script, logs=False)
    assert done.status == 1
    blames(done, NO_SPACE, home)
    assert f"  error     : OSError: [Errno 28] {NO_SPACE}\n" in done.err
    assert "print('x' * 10000)" in done.err


@pytest.mark.slow
def test_workers_with_rotated_logs_go_on(place: Place, home: Path, ready: Ready, gate: Gate) -> None:
    """A line says at once what is lost. What is written again, when there is room, begins a line of its own."""
    text = f"{ready.python()}\n{gate.python()}\nprint('x' * 10000, flush=True)\n{gate.python()}\nprint('after')\n"
    text = f"print('before')\n{text}"
    with place.start("--log-max-size", 1_000_000, place.write(text), logs=False) as launcher:
        ready.wait()
        launcher.read_until("[0] before\n", "stdout")  # it is in the file, which has a page
        fill(home)
        gate.open()
        lost = f"rotated log files cannot be written: {NO_SPACE}; lines are missing there, and the workers go on\n"
        said = launcher.read_until(lost)
        (home / "filler").unlink()
        gate.open()
        done = launcher.end()
    assert done.status == 0, done
    assert f"rotated log files are not complete: {NO_SPACE}\n" in done.err
    assert "Traceback" not in said + done.err
    # The line's end may have been written apart from it.
    first, cut, last = filter(None, next(home.rglob("stdout.log")).read_text().splitlines())
    assert (first, cut.strip("x"), last) == ("before", "", "after")


@pytest.mark.slow
def test_a_run_that_fills_its_disk_and_writes_no_more_succeeds(place: Place, home: Path) -> None:
    done = place.run(place.write(FILL + "\n    fill(os.environ['DISK'])"), logs=False)
    assert (done.status, done.out) == (0, "")
    assert done.err.count("run.json cannot be written: ") == 1
    assert done.err.count("events.jsonl cannot be written: ") <= 1, "its last page may have room"
    assert done.err.count("lines may be missing from the logs\n") == 1
    assert "Traceback" not in done.err
    assert "the run goes on" not in done.err
    assert home.exists()


@pytest.mark.slow
def test_the_next_attempt_is_kept_elsewhere(place: Place, home: Path, tmp_path: Path) -> None:
    script = place.write(
        FILL
        + """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fill(os.environ['DISK'])
        raise ValueError('loss is nan')
    print('fine')
    """
    )
    done = place.run("--max-restarts", 1, script, logs=False)
    assert (done.status, done.out) == (0, "[0] fine\n"), done.err
    assert "ValueError: loss is nan" in done.err
    assert f"on the disk at {home}; logs are kept in {elsewhere(tmp_path)}\n" in done.err
    assert "fine\n" in next(elsewhere(tmp_path).glob("*/attempt_1/0/stdout.log")).read_text()
    assert record_of(elsewhere(tmp_path))["state"] == "succeeded"
    (config,) = elsewhere(tmp_path).glob("*/job.toml")
    assert config.with_name("report.txt").exists()


@pytest.mark.slow
def test_a_log_that_reaches_the_limit_on_files_is_no_full_disk(place: Place, home: Path) -> None:
    limit = limit_files(100_000)
    done = place.run(place.write("while True: print('x' * 1000)"), logs=False, preexec_fn=limit)
    assert done.status == 1
    assert "  error     : OSError: [Errno 27] File too large\n" in done.err
    assert f"  detail    : File too large (the limit on the size of a file: see ulimit -f): {home}/" in done.err
    assert "lines are missing from its logs\n" in done.err
    assert NO_SPACE not in done.err
    done = place.run("--no-python", "head", "-c", 1_000_000, "/dev/zero", logs=False, preexec_fn=limit)
    assert done.status == 128 + 25
    assert "a file that it wrote has reached the limit on the size of a file: see ulimit -f\n" in done.err


@pytest.mark.slow
def test_a_disk_that_becomes_read_only(place: Place, disk: Disk, ready: Ready, gate: Gate) -> None:
    place.env["XDG_STATE_HOME"] = str(disk.folder)
    text = f"print('before')\n{ready.python()}\n{gate.python()}\nraise ValueError('loss is nan')\n"
    with place.start(place.write(text), logs=False) as launcher:
        ready.wait()
        try:
            disk.fail()
        except OSError as error:
            pytest.skip(f"no error can be made here: {error}")
        gate.open()
        done = launcher.end()
    assert done.status == 1
    blames(done, "Read-only file system", disk.folder)
    assert "  error     : ValueError: loss is nan\n" in done.err
    assert done.err.count("Traceback (most recent call last)") == 1


# --- through the library


@pytest.mark.parametrize("how", ["-t ramfs", "-t tmpfs -o size=0", "-o loop"])
def test_a_disk_that_takes_writes_is_not_called_full(how: str, tmp_path: Path) -> None:
    """It may have no size; or what it has left may be kept for root, who runs this."""
    folder, image = tmp_path / "mounted", tmp_path / "image"
    folder.mkdir()
    if "loop" in how:
        image.write_bytes(b"")
        os.truncate(image, 16 << 20)
    try:
        if "loop" in how:
            subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "40", image], check=True, capture_output=True)
        subprocess.run(["mount", *how.split(), image, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        with open(folder / "filler", "wb", buffering=0) as file:
            while os.statvfs(folder).f_bavail:
                file.write(bytes(1 << 16))
        logs = DefaultLogsSpecs(str(folder), redirects=Std.ALL)
        with start_processes("n", divmod, (1, 0), nprocs=1, logs_specs=logs) as group:
            failure = group.wait().failures[0]
        assert failure.message.startswith("ZeroDivisionError")
        assert failure.detail == ""
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_groups_name_the_disk_of_their_logs(home: Path, ready: Ready, gate: Gate) -> None:
    logs = home / "logs"
    logs.mkdir()
    with start_processes(
        "n", workers.fail_after, {0: (ready.address, gate.address)}, log_dir=logs, redirects=Std.ALL
    ) as group:
        ready.wait()
        fill(home)
        gate.open()
        failure = group.wait().failures[0]
    assert failure.message.startswith("ValueError")
    assert failure.detail == f"{NO_SPACE}: {logs}/0, on the disk at {home}; lines are missing from its logs"
