"""Files and folders of other users, in log folders that are shared: what they may make of them, and what they may not.

The other user is nobody, as whom these tests act for a moment (seteuid(2)): so they need root.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx._base import files, procfs
from phalanx._evidence.error_file import read_error_file, write_error_file
from phalanx._evidence.stack_signals import STACK_SIGNAL_ENV
from phalanx._logs.follower import Follower, last_lines
from phalanx._logs.specs import FolderLogsSpecs
from phalanx._runs import catalog, record
from phalanx._stacks import collect, py_spy, request
from phalanx.cli.logs import logs
from phalanx.cli.stack import stack
from phalanx.cli.status import status
from phalanx.cli.top import top
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from tests.runs.test_runs import put
from tests.support.helpers import TIMEOUT
from tests.support.records import example, write

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user has to be there")


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which everybody may make files, like /tmp: pytest's own is its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx_shared_", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


CATCHES = "trap 'echo struck; exit 9' TERM; echo up; read line; echo spared"


@contextlib.contextmanager
def victim(*inherited: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process of root's that catches SIGTERM. Its output is to be read once it has been let go, by the descriptor."""
    reader, writer = os.pipe()
    with subprocess.Popen(["sh", "-c", CATCHES], stdin=reader, stdout=subprocess.PIPE, pass_fds=inherited) as process:
        os.close(reader)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        try:
            yield process, writer
        finally:
            process.kill()
            with contextlib.suppress(OSError):
                os.close(writer)


def last_word(process: subprocess.Popen[bytes], writer: int) -> bytes:
    os.close(writer)
    return process.communicate(timeout=TIMEOUT)[0]


def forge(root: Path, pid: int, offer: str, uid: int = NOBODY) -> Path:
    """A run of another user's, which says that it runs, started last, and has a process as its only rank."""
    start = procfs.Stat(pid).start
    rank = record.Rank(rank=0, local_rank=0, pid=pid, pid_started=start, state="running")
    run = example(started=253402214399.0, run_id="forged", pid=pid, pid_started=start)
    run = run.replace(attempts=[run.attempts[0].replace(ranks=[rank])])
    folder = root / "forged_run"
    with acting_as(uid):
        (folder / "attempt_0/0").mkdir(parents=True)
        (folder / "attempt_0/0/stdout.log").write_text("forged\n")
        (folder / "attempt_0/0/error.json.stacks").write_text(offer)
        write(folder, run)
    return folder


# --- runs


def test_another_users_run_is_never_the_latest(shared: Path) -> None:
    ours = put(shared, "ours", started=1e9, state="failed", ended=1e9, exit_code=1)
    with victim() as (process, writer):
        forge(shared, process.pid, f"# stacks on signals 15 and 15, descriptor -1, process {process.pid}\n")
        assert [run.name for run in catalog.find([str(shared)])] == ["forged_run", "ours"]
        assert catalog.resolve([str(shared)]).path == str(ours)
        done = CliRunner().invoke(stack, ["--log-dir", str(shared)])
        assert (done.exit_code, "the latest is ours (failed)" in done.output) == (1, True)
        shutil.rmtree(ours)
        for command in (stack, logs):
            done = CliRunner().invoke(command, ["--log-dir", str(shared)])
            said = f"there are no runs of yours in {shared}; of other users, which have to be named: forged_run"
            assert (done.exit_code, said in done.output) == (1, True)
        assert last_word(process, writer) == b"spared\n"


def test_root_signals_nobody_for_another_users_run(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(py_spy, "find", lambda: "")  # else it is read from outside, and a signal is not thought of
    offered = shared / "offered"
    with acting_as(NOBODY):
        offered.touch()
    with offered.open() as file, victim(file.fileno()) as (process, writer):
        text = f"# stacks on signals 15 and 15, descriptor {file.fileno()}, process {process.pid}\n"
        folder = forge(shared, process.pid, text)
        stacks_file = folder / "attempt_0/0/error.json.stacks"
        with acting_as(NOBODY):
            offered.write_text(text)
            stacks_file.unlink()
            os.link(offered, stacks_file)  # the very file that the process has open
        done = CliRunner().invoke(stack, ["--log-dir", str(shared), "forged"])
        assert f"process {process.pid} is not that of uid {NOBODY}, whose run this is" in done.output
        assert last_word(process, writer) == b"spared\n"


def test_a_user_cannot_ask_another_users_run(shared: Path) -> None:
    folder = forge(shared, os.getpid(), "", uid=NOBODY - 1)
    said = f"forged_run belongs to uid {NOBODY - 1}: only that user, and root, can reach its processes"
    for command in (stack, status, top):
        with acting_as(NOBODY):
            done = CliRunner().invoke(command, ["--log-dir", str(shared), "forged_run"])
        assert (done.exit_code, said in done.output) == (1, True)
    assert folder.exists()


def test_another_users_logs_can_be_read_by_name(shared: Path) -> None:
    """Colleagues open their folders for that (--log-mode). What they are called cannot be taken from ours."""
    forge(shared, os.getpid(), "")
    done = CliRunner().invoke(logs, ["--log-dir", str(shared), "forged_run"])
    assert done.output == "[0] forged\n"
    put(shared, "forged_run2")
    assert catalog.resolve([str(shared)], "forged").name == "forged_run2"
    assert catalog.resolve([str(shared)], str(shared / "forged_run")).owner == NOBODY


def test_a_record_in_a_folder_of_ours_may_be_anothers(shared: Path) -> None:
    folder = put(shared, "ours")
    assert catalog.look(str(folder)).is_ours
    os.chown(folder / "run.json", NOBODY, -1)
    assert not catalog.look(str(folder)).is_ours


# --- stacks by signal


def first_line_of(pid: int, folder: Path) -> str:
    """What the collection of a process' stacks begins with, whose error file is in a folder."""
    with collect.Collection([request.Target(0, pid, str(folder / "error.json"), doomed=True)], TIMEOUT) as collection:
        collection.begin()
        collection.wait()
        return collection.finish()[0].partition("\n")[0]


@pytest.mark.parametrize(
    "offer, why, owner",
    [
        ("signals 15 and 0, descriptor {fd}", "signal 15, which is not its stack signal", 0),
        ("signals 10 and 15, descriptor {fd}", "signal 15, which is not its stack signal", 0),
        ("signals 52 and 53, descriptor -1", "it offers none", 0),
        ("signals 52 and 53, descriptor 0", "it offers none itself", 0),
        ("signals 10 and 10, descriptor {fd}", "it offers none;", NOBODY),
    ],
)
def test_an_offer_that_cannot_be_the_workers_own_is_not_taken(
    shared: Path, monkeypatch: pytest.MonkeyPatch, offer: str, why: str, owner: int
) -> None:
    monkeypatch.setattr(py_spy, "find", lambda: "")
    path = shared / "error.json.stacks"
    with acting_as(owner):
        path.touch()
    with path.open() as file, victim(file.fileno()) as (process, writer):
        with acting_as(owner):
            path.write_text(f"# stacks on {offer.format(fd=file.fileno())}, process {process.pid}\n")
        assert why in first_line_of(process.pid, shared)
        assert last_word(process, writer) == b"spared\n"


def test_the_signal_of_a_workers_environment_is_its_own(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx._stacks.request import StackRequest

    monkeypatch.setenv(STACK_SIGNAL_ENV, str(int(signal.SIGTERM)))
    path = shared / "error.json.stacks"
    with path.open("w") as file, victim(file.fileno()) as (process, _writer):
        path.write_text(f"# stacks on signals 15 and 0, descriptor {file.fileno()}, process {process.pid}\n")
        ask = StackRequest(request.Target(0, process.pid, str(shared / "error.json")))
        ask.open()
        assert ask.signals == (15, 0)
        ask.close()


# --- folders


def test_folders_are_there_at_once_where_others_may_make_some(shared: Path, tmp_path: Path) -> None:
    for folder, can_wait in ((shared, False), (tmp_path, True)):
        specs = FolderLogsSpecs(str(folder), Std.NONE, Std.NONE)
        specs.folders_can_wait = True
        specs.reify({0: {}, 1: {}})
        assert sorted(os.listdir(folder)) == ([] if can_wait else ["0", "1"])


def test_what_another_user_was_quicker_to_make_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the folder, which is empty, and the making of ours in it."""
    home = shared / "victims"
    home.mkdir()
    place = shared / "place"
    place.mkdir()
    place.chmod(0o1777)

    def look(_folder: str) -> list[str]:
        with acting_as(NOBODY):
            (place / "1").symlink_to(home)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", look)
        with pytest.raises(FileExistsError, match=f"a link of uid {NOBODY} is there already.*: '{place}/1'"):
            start_processes("x", "/bin/true", nprocs=2, log_dir=place)
    assert next(home.iterdir(), None) is None


def test_a_folder_of_another_users_is_no_attempt_of_ours(shared: Path) -> None:
    specs = DefaultLogsSpecs(str(shared), Std.ALL, mode=0o1777)
    specs.reify({0: {}})
    assert specs.run_log_dir is not None
    attempt = Path(specs.run_log_dir) / "attempt_1"
    with acting_as(NOBODY):
        attempt.mkdir()
    with pytest.raises(OSError, match=f"a folder of uid {NOBODY} is there; a folder of our own was to be made"):
        specs.reify({0: {"TORCHELASTIC_RESTART_COUNT": "1"}})


def test_a_runs_folder_is_opened_last(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in it is there by then."""
    opened = []
    monkeypatch.setattr(os, "chmod", lambda path, _mode: opened.append(os.path.basename(path)))
    specs = DefaultLogsSpecs(str(shared), Std.ALL, mode=0o1777)
    specs.reify({0: {}})
    assert opened == ["0", "attempt_0", os.path.basename(specs.run_log_dir or "")]


# --- files of a worker that has another uid by now, in a folder that is its own


@pytest.fixture
def own(shared: Path) -> Path:
    """A folder of nobody's."""
    path = shared / "0"
    path.mkdir()
    os.chown(path, NOBODY, -1)
    return path


@pytest.fixture
def secret(shared: Path) -> Path:
    path = shared / "secret"
    path.write_text(json.dumps({"message": "secret"}) + "\n")
    path.chmod(0o600)
    return path


def test_evidence_does_not_go_along_a_workers_link(own: Path, secret: Path) -> None:
    before = secret.read_text()
    path = own / "error.json"
    with acting_as(NOBODY):
        path.symlink_to(secret)
    assert read_error_file(str(path)) == (
        None,
        f"unreadable: it leads over a link of uid {NOBODY}, which is not followed",
    )
    write_error_file(str(path), "hung", "")
    assert (secret.read_text(), path.is_symlink()) == (before, False)
    assert read_error_file(str(path))[1] == ""


def test_a_chain_of_links_is_followed_as_far_as_it_is_ours(own: Path, secret: Path) -> None:
    (own / "ours").symlink_to("theirs")
    with acting_as(NOBODY):
        (own / "theirs").symlink_to(secret)
    with pytest.raises(files.UnfitError, match=f"a link of uid {NOBODY}"):
        files.read(str(own / "ours"), 100, links=files.OWN_LINKS)
    assert files.target(str(own / "ours")) == str(own / "theirs")


def test_logs_are_not_read_along_a_workers_link(own: Path, secret: Path) -> None:
    with acting_as(NOBODY):
        (own / "stdout.log").symlink_to(secret)
        (own / "stdout.log.1").symlink_to(secret)
    for rotates in (False, True):
        follower = Follower(str(own / "stdout.log"), rotates=rotates)
        with pytest.raises(files.UnfitError, match=f"a link of uid {NOBODY}"):
            follower.read(bytearray(100))
        assert last_lines(str(own / "stdout.log"), rotates=rotates) == b""
    with pytest.raises(files.UnfitError, match=f"a link of uid {NOBODY}"):
        files.opened_log(str(own / "stdout.log"))


def test_a_worker_with_another_uid_leaves_its_evidence(shared: Path) -> None:
    """In a folder that it was given. Its launcher, which is root, reads what it has written."""
    code = """
        cd "${TORCHELASTIC_ERROR_FILE%/*}"; chown 65534 .
        exec setpriv --reuid=65534 --clear-groups sh -c '
            echo "{\\"message\\": \\"lost its way\\"}" > error.json
            rm stdout.log; ln -s /etc/shadow stdout.log; exit 3'
    """
    specs = DefaultLogsSpecs(str(shared), tee=Std.OUT, mode=0o711)
    with start_processes("x", "/bin/sh", {0: ("-c", code)}, logs_specs=specs, grace=1) as group:
        result = group.wait(TIMEOUT)
    assert result is not None
    assert result.failures[0].message == "lost its way"


def test_in_a_user_namespace_stdout_of_dev_can_be_a_log(shared: Path) -> None:
    """There, root's files are those of the overflow uid, as are all of users that have no uid in it."""
    clone_newuser, pr_set_dumpable, own = 0x10000000, 4, NOBODY - 1
    link = shared / "log"
    link.symlink_to(os.devnull)
    pid = os.fork()
    if not pid:
        code = 4
        try:
            libc = ctypes.CDLL(None)
            os.setresuid(own, own, own)
            libc.prctl(pr_set_dumpable, 1, 0, 0, 0)  # else its /proc/self is root's
            code = 3
            if libc.unshare(clone_newuser) == 0:
                code = 4
                Path("/proc/self/uid_map").write_text(f"0 {own} 1")
                assert os.lstat("/dev/stdout").st_uid == NOBODY
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                for path in ("/dev/stdout", "/dev/../dev/stdout"):
                    os.close(files.opened(path, os.O_WRONLY, links=files.OWN_LINKS, regular=False))
                assert files.target("/dev/stdout") == "/proc/self/fd/1"
                with contextlib.suppress(files.UnfitError):
                    files.opened(str(link), os.O_WRONLY, links=files.OWN_LINKS, regular=False)
                    os._exit(5)
                code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 3:
        pytest.skip("this process may make no user namespace")
    assert code == 0


READ_ONLY = """
import os, sys, tempfile
from phalanx._runs.paths import folder_for_new_runs
os.setuid(int(sys.argv[1]))  # root may write anywhere
print(*folder_for_new_runs())
"""


def test_a_read_only_folder_of_runs_is_replaced(shared: Path) -> None:
    runs = shared / "phalanx" / "runs"
    runs.mkdir(parents=True)
    runs.chmod(0o555)
    env = {**os.environ, "XDG_STATE_HOME": str(shared), "TMPDIR": str(shared)}
    command = (sys.executable, "-c", READ_ONLY, str(NOBODY))
    assert subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout == (
        f"{shared}/phalanx-{NOBODY} the home folder cannot be written to\n"
    )
