"""A worker that has given up the rights it was started with still tells why it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx._evidence.cleanup import remove_empty
from phalanx._evidence.error_file import has_left, message_of, read_error_file, write_error_file
from phalanx._evidence.fatal_signals import fatal_path, read_fallback, read_fatal_stacks
from phalanx.multiprocessing import start_processes

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root can become another user")


@pytest.fixture(autouse=True)
def _logs_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def drop() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


DROP = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"


def drops_and_raises() -> NoReturn:
    drop()
    raise ValueError("after the drop")


@pytest.mark.long
@as_root
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_functions_exception_is_known(method: str) -> None:
    with start_processes("drop", drops_and_raises, nprocs=2, start_method=method) as group:
        result = group.wait()
        for rank, failure in result.failures.items():
            assert failure.message == "ValueError: after the drop"
            assert "in drops_and_raises" in failure.traceback
            assert failure.error_file == group.error_files[rank]
    for path in group.error_files.values():
        assert not os.path.exists(fatal_path(path))


def run(tmp_path: Path, text: str) -> Path:
    """Run a script as a worker, which fails. Returns the rank's folder."""
    script = tmp_path / "script.py"
    script.write_text(text)
    tmp_path.chmod(0o755)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0, done.stderr
    [folder] = (tmp_path / "logs").glob("*/attempt_0/0")
    return folder


@pytest.mark.slow
@as_root
def test_a_scripts_exception_is_known(tmp_path: Path) -> None:
    folder = run(tmp_path, DROP + "def fail():\n    raise ValueError('after the drop')\nfail()\n")
    data, problem = read_error_file(str(folder / "error.json"))
    assert (message_of(data), problem) == ("ValueError: after the drop", "")
    assert "in fail" in str(data)
    assert has_left(data)
    assert not (folder / "error.json.fatal").exists()


@as_root
def test_a_scripts_fatal_signal_is_known(tmp_path: Path) -> None:
    folder = run(tmp_path, DROP + "def crash():\n    os.kill(os.getpid(), 11)\ncrash()\n")
    assert "in crash" in read_fatal_stacks(str(folder / "error.json"))


LOSES_ITS_FOLDER = """
import os, sys
from phalanx._evidence import recording
from phalanx._evidence.fatal_signals import catch_fatal_signals
path = sys.argv[1]
catch_fatal_signals(path)
folder = os.path.dirname(path)
os.rename(folder, folder + ".moved")
open(folder, "w").close()
try:
    raise ValueError("früh")
except ValueError as error:
    recorded = recording.record(error, path), recording.record(error, path, left=True)
print(os.getpid(), *recorded, flush=True)
"""


def leave_aside(tmp_path: Path, more: str = "") -> tuple[str, int, str]:
    """Have a process record what it cannot write. Returns where its error file is by now, its pid, and what it said."""
    folder = tmp_path / "rank"
    folder.mkdir()
    command = [sys.executable, "-c", LOSES_ITS_FOLDER + more, str(folder / "error.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    pid, said = done.stdout.split(" ", 1)
    return str(tmp_path / "rank.moved" / "error.json"), int(pid), said


def test_what_cannot_be_written_is_left_in_the_file_that_is_open(tmp_path: Path) -> None:
    path, pid, said = leave_aside(tmp_path)
    assert said == "False True\n"  # what has not left the main function may yet be handled
    found = read_fallback(path, pid)
    assert found is not None
    assert found[0] == "ValueError: früh"
    assert found[1].endswith("ValueError: früh\n")
    assert read_fallback(path, pid + 1) is None
    assert read_fatal_stacks(path) == ""
    remove_empty(path)
    assert os.listdir(tmp_path / "rank.moved") == ["error.json.fatal"]  # it is told nowhere else
    write_error_file(path, *found[:2], monotonic_ns=found[2], pid=pid)
    remove_empty(path)
    assert os.listdir(tmp_path / "rank.moved") == ["error.json"]


def test_a_fatal_signal_after_that_leaves_its_stack_behind_it(tmp_path: Path) -> None:
    path, pid, _said = leave_aside(tmp_path, "def crash(): os.kill(os.getpid(), 11)\ncrash()\n")
    found = read_fallback(path, pid)
    assert found is not None
    assert found[0] == "ValueError: früh"
    stack = read_fatal_stacks(path)
    assert stack.startswith("Fatal Python error: Segmentation fault")
    assert "in crash" in stack


def test_a_descriptor_that_is_another_files_by_now_is_left_alone(tmp_path: Path) -> None:
    close = "os.closerange(3, 64); other = open(path + '.other', 'w'); "
    closed = LOSES_ITS_FOLDER.replace("folder = ", close + "folder = ", 1)
    folder = tmp_path / "rank"
    folder.mkdir()
    command = [sys.executable, "-c", closed, str(folder / "error.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith(" False False\n")
    assert {path.name: path.stat().st_size for path in (tmp_path / "rank.moved").iterdir()} == {
        "error.json.fatal": 0,
        "error.json.other": 0,
    }


@pytest.mark.parametrize(
    "head",
    [
        "# exception of process x, began 5, message 1 bytes, traceback 1 bytes",
        "# exception of process 7, began 5, message 1 bytes",
        "# exception of process 7, began 99999999999999999999, message 1 bytes, traceback 1 bytes",
        "# exception of process 0, began 5, message 1 bytes, traceback 1 bytes",
        "# exception of process 7, began 9223372036854775808, message 1 bytes, traceback 1 bytes",
    ],
)
def test_what_somebody_else_has_written_there_is_no_exception(tmp_path: Path, head: str) -> None:
    path = str(tmp_path / "error.json")
    (tmp_path / "error.json.fatal").write_text(f"{head}\na\nb\n")
    assert read_fallback(path, 7) is None
    remove_empty(path)


NUMBERS = st.integers(0, 40).map(str) | st.sampled_from(["", "-1", "x", "9" * 19, "9" * 30, "٣"])


@pytest.mark.long
@settings(deadline=None, max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NUMBERS, min_size=3, max_size=4), st.binary(max_size=60))
def test_whatever_stands_there_is_read(tmp_path: Path, numbers: list[str], rest: bytes) -> None:
    path = str(tmp_path / "error.json")
    head = "# exception of process {}, began {}, message {} bytes, traceback {} bytes\n{}".format(*numbers, "", "")
    (tmp_path / "error.json.fatal").write_bytes(head.encode() + rest)
    found = read_fallback(path, 7)
    if found is not None:
        assert numbers[0] == "7"
        assert len(found[0]) + len(found[1]) <= len(rest) + 9
    assert len(read_fatal_stacks(path)) <= len(head) + len(rest)


# --- another root

JAILED = """
import os, sys
os.chroot(sys.argv[1])
os.chdir("/")
{end}
"""


def jailed(folder: str) -> NoReturn:
    os.chroot(folder)
    os.chdir("/")
    raise ValueError("loss is nan")


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_function_with_another_root_leaves_its_evidence(method: str, tmp_path: Path) -> None:
    jail = tmp_path / "jail"
    jail.mkdir()
    with start_processes("jail", jailed, {0: (str(jail),)}, start_method=method) as group:
        result = group.wait()
        failure = result.failures[0]
        assert (failure.exitcode, failure.message) == (1, "ValueError: loss is nan")
        assert "in jailed" in failure.traceback
        assert failure.error_file == group.error_files[0]
    assert not list(jail.iterdir())


@pytest.mark.slow
@as_root
@pytest.mark.parametrize(
    "end, expected",
    [("raise ValueError('loss is nan')", "ValueError: loss is nan"), ("sys.exit(3)", "exited with code 3")],
)
def test_so_is_that_of_a_script(end: str, expected: str, tmp_path: Path) -> None:
    jail, script = tmp_path / "jail", tmp_path / "train.py"
    jail.mkdir()
    script.write_text(JAILED.format(end=end))
    argv = [sys.executable, "-m", "phalanx", "run", "--log-dir", str(tmp_path / "logs"), str(script), str(jail)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (3 if "exit" in end else 1)
    assert f"error     : {expected}" in done.stderr
    assert not list(jail.iterdir())
