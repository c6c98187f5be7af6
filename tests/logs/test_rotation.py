"""Rotated log files are filled by a process of their own: a flood, a full or a silent disk holds up nobody else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx._engine.keeper import keeper
from phalanx._logs import display
from phalanx._logs.follower import Follower
from phalanx._logs.rotated import rotated_files
from phalanx.multiprocessing import ConsoleSpecs, DefaultLogsSpecs, KeeperLostError, PContext, Std, start_processes
from tests.support import workers
from tests.support.command import Place, group, path_of, sh, whole
from tests.support.disks import Disk, sleeping_on_disks, until
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, pass_gate, tell, wait_gone
from tests.support.pump_tools import Rotated

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
SLACK = 10.0


def logs_of(folder: Path, rank: int, stream: str = "stdout") -> bytes:
    """All that a rank wrote, in order."""
    [path] = folder.glob(f"*/attempt_0/{rank}/{stream}.log")
    return b"".join(Path(name).read_bytes() for name in (*rotated_files(str(path)), str(path)))


def rotated(folder: Path, size: int = 64 << 10) -> DefaultLogsSpecs:
    return DefaultLogsSpecs(str(folder), redirects=Std.OUT, max_size=size)


def log_writer_of(group: PContext) -> int:
    return group._started().link.log_writer


# --- more than can be written


def floods_or_fails(rank: int, address: str, gate: str) -> None:
    """Rank 0 writes without end, by four processes; rank 1 fails when the gate opens."""
    if rank == 0:
        for _ in range(3):
            if os.fork() == 0:
                break
        tell(address, str(os.getpid()))
        line = b"y" * 1000 + b"\n"
        while True:
            os.write(1, line * 32)
    tell(address, str(os.getpid()))
    pass_gate(gate)
    os._exit(3)


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_flood_hides_no_failure(tmp_path: Path, ready: Ready, gate: Gate, method: str) -> None:
    args = {rank: (rank, ready.address, gate.address) for rank in range(2)}
    with start_processes(
        "g", floods_or_fails, args, logs_specs=rotated(tmp_path, 1 << 20), start_method=method
    ) as group:
        pids = ready.pids(5)
        began = time.monotonic()
        gate.open()
        assert wait_gone(pids, SLACK) == set()
        result = group.wait(TIMEOUT)
        assert time.monotonic() - began < TIMEOUT / 2
    assert result is not None
    assert result.root_cause is not None
    assert result.root_cause.local_rank == 1
    assert result.outcomes[0].state == "stopped"
    data = logs_of(tmp_path, 0)
    assert data
    assert data.replace(b"y" * 1000 + b"\n", b"").strip(b"y") == b"", "what was being written at the end may be cut"


@pytest.mark.slow
def test_a_close_in_the_midst_of_a_flood(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    args = {0: (0, ready.address, gate.address)}
    with start_processes("g", floods_or_fails, args, logs_specs=rotated(tmp_path, 1 << 20)) as group:
        ready.pids(4)
        began = time.monotonic()
        group.close(timeout=TIMEOUT)
        assert time.monotonic() - began < TIMEOUT / 2
        result = group.wait(0)
    assert result is not None
    assert result.state == "stopped"


# --- the writer, lost


def test_a_killed_log_writer_ends_the_group_by_name(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    args = {0: (ready.address, gate.address)}
    with start_processes("g", workers.announce, args, logs_specs=rotated(tmp_path)) as group:
        ready.wait()
        os.kill(log_writer_of(group), signal.SIGKILL)
        with pytest.raises(KeeperLostError, match="the group's log writer process was killed by signal 9"):
            group.wait(TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["keeper", "guard", "both", "launcher"])
def test_what_was_written_is_in_the_file_whoever_is_killed(tmp_path: Path, ready: Ready, who: str) -> None:
    """The log writer needs nobody, and ends by itself. Nobody kills it who ends the group."""
    script = tmp_path / "launcher.py"
    script.write_text(f"""
import os, signal, sys
from phalanx._base import procfs
from phalanx.multiprocessing import ConsoleSpecs, DefaultLogsSpecs, KeeperLostError, Std, start_processes
from tests.support.helpers import tell

code = '''
import os, signal
for number in range(20000):
    os.write(1, b"line %d\\\\n" % number)
{ready.python('"written"')}
signal.pause()
'''
specs = DefaultLogsSpecs({str(tmp_path / "logs")!r}, redirects=Std.OUT, max_size=1 << 14)
with start_processes("g", sys.executable, ("-S", "-c", code), nprocs=1, logs_specs=specs) as group:
    supervisor = group._started()
    guard = supervisor._keeper._guard
    writer = supervisor.link.log_writer
    tell({ready.address!r}, f"{{guard}} {{procfs.children(guard)[0]}} {{writer}} {{group.pids()[0]}}")
    try:
        group.wait()
    except KeeperLostError as error:
        print(error)
""")
    env = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([workers.ROOT, *filter(None, sys.path)]),
    }
    with subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True) as launcher:
        said = ready.wait(2)
        said.remove("written")
        guard, kept, writer, worker = map(int, said[0].split())
        victims = {"keeper": [kept], "guard": [guard], "both": [guard, kept], "launcher": [launcher.pid]}[who]
        os.kill(writer, signal.SIGSTOP)  # the pipe has something left when it happens
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                os.kill(pid, number)
        assert wait_gone([worker]) == set()
        assert alive(writer)
        os.kill(writer, signal.SIGCONT)
        out, _ = launcher.communicate(timeout=TIMEOUT)
        assert wait_gone([writer, guard, kept]) == set()
    assert ("killed" in out) == (who != "launcher")
    assert logs_of(tmp_path / "logs", 0) == b"".join(b"line %d\n" % number for number in range(20000))


def test_nothing_of_the_launchers_is_open_in_the_log_writer(tmp_path: Path, ready: Ready, gate: Gate) -> None:
    """It may outlive the launcher, whose readers wait for the end of its output."""
    args = dict.fromkeys(range(2), (ready.address, gate.address))
    with start_processes("g", workers.announce, args, logs_specs=rotated(tmp_path), start_method="fork") as group:
        ready.wait(2)
        writer = log_writer_of(group)
        until(lambda: kinds(writer) == (3, 2, 2, 1, 0))  # it gets to that in its own time
        gate.open(2)
        group.wait()


def kinds(pid: int) -> tuple[int, ...]:
    """How many descriptors of a process are the null device, logs, pipes, sockets, and of files and the like."""
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(path))
    known = "/dev/null", "/stdout.log", "pipe:", "socket:", "anon_inode:"
    counts = [sum(part in name for name in names) for part in known]
    return *counts[:-1], len(names) - sum(counts)


# --- file systems that have less

_BPF = struct.Struct("HBBI")


def forbid(number: int, error: int) -> None:
    """Have the kernel refuse a system call to this process and its children, with an error (seccomp(2))."""
    program = b"".join(
        (
            _BPF.pack(0x20, 0, 0, 0),  # load the system call's number
            _BPF.pack(0x15, 0, 1, number),  # if it is this one,
            _BPF.pack(0x06, 0, 0, 0x00050000 | error),  # SECCOMP_RET_ERRNO
            _BPF.pack(0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
        )
    )
    code = ctypes.create_string_buffer(program)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    of = Program(4, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(of), 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "seccomp")


WITHOUT_LINKS = """
import errno, os, sys
from phalanx._logs.rotated import rotated_files
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes
from tests.logs.test_rotation import forbid

for number in sys.argv[2].split(","):
    forbid(int(number), errno.EPERM)
code = "for number in range(2000): print(f'line {number}')"
specs = DefaultLogsSpecs(sys.argv[1], tee=Std.OUT, max_size=1000)
with start_processes("g", sys.executable, ("-S", "-c", code), nprocs=1, logs_specs=specs) as group:
    result = group.wait()
assert result.succeeded, result
print(len(rotated_files(result.stdouts[0])), file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are this machine's")
def test_a_file_system_without_hard_links(tmp_path: Path) -> None:
    """The files are renamed. Nothing is refused, nothing is lost, and what is shown is in order."""
    links = "86,265"  # link(2), linkat(2)
    done = workers.run_script(tmp_path, WITHOUT_LINKS, str(tmp_path / "logs"), links)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr) >= 15
    lines = [f"line {number}" for number in range(2000)]
    assert logs_of(tmp_path / "logs", 0).decode().splitlines() == lines
    assert done.stdout.splitlines() == [f"[0] {line}" for line in lines]


def test_a_file_of_somebody_elses_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Rotated(str(path), 10) as it:
        (tmp_path / "log.1").write_text("of somebody else")
        it.write(b"one two\nthree four\nfive six\n")
    assert (tmp_path / "log.1").read_text() == "of somebody else"
    assert [(tmp_path / name).read_text() for name in ("log.2", "log.3", "log")] == [
        "one two\n",
        "three four\n",
        "five six\n",
    ]


def test_a_file_that_cannot_be_set_aside_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with Rotated(str(folder / "log"), 10) as it:
        it.write(b"one two\n")
        os.rename(folder, tmp_path / "elsewhere")
        it.write(b"three four\n")
        os.rename(tmp_path / "elsewhere", folder)
        it.write(b"five six\n")
        it.write(b"seven\n")
    assert (folder / "log.1").read_text() == "one two\nthree four\n"
    assert [(folder / name).read_text() for name in ("log.2", "log")] == ["five six\n", "seven\n"]


@pytest.mark.long
def test_as_many_ranks_as_the_hard_limit_on_open_files_allows(tmp_path: Path) -> None:
    """The soft limit is raised for the start, and in the log writer, and is what it was in the workers."""
    os.mkfifo(tmp_path / "gate")
    script = f"""
import os, resource, sys
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
specs = DefaultLogsSpecs({str(tmp_path / "logs")!r}, redirects=Std.ALL, max_size=1 << 20)
code = "read line < {tmp_path}/gate; ulimit -n"
with start_processes("g", "/bin/sh", ("-c", code), nprocs=120, logs_specs=specs) as group:
    gate = os.open("{tmp_path}/gate", os.O_RDWR)
    os.write(gate, b"\\n" * 120)  # only now, when the files of all are open
    result = group.wait()
assert result.succeeded, result
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 4096)
"""
    done = workers.run_script(tmp_path, script)
    assert (done.stderr, done.returncode) == ("", 0)
    assert {logs_of(tmp_path / "logs", rank) for rank in range(120)} == {b"256\n"}
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 4096


def test_more_ranks_than_the_hard_limit_allows_are_refused(tmp_path: Path) -> None:
    """Before one of them runs: the log writer could not hold their files."""
    script = f"""
import resource
from phalanx.multiprocessing import DefaultLogsSpecs, Std, start_processes

resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
specs = DefaultLogsSpecs({str(tmp_path / "logs")!r}, redirects=Std.ALL, max_size=1 << 20)
start_processes("g", "/bin/sh", ("-c", "echo here"), nprocs=40, logs_specs=specs)
"""
    done = workers.run_script(tmp_path, script)
    assert "worker 20 was not started; opening its log files failed: Too many open files" in done.stderr
    assert [path for path in (tmp_path / "logs").rglob("*.log") if path.stat().st_size] == []


# --- a disk that does not answer


def writes_waits_or_fails(rank: int, address: str, gate: str) -> None:
    """Rank 0 writes without end, rank 1 waits, rank 2 fails when the gate opens."""
    tell(address, str(os.getpid()))
    while rank == 0:
        os.write(1, b"a line\n" * 100)
    if rank == 1:
        while True:
            signal.pause()
    pass_gate(gate)
    os._exit(3)


@contextlib.contextmanager
def on(disk: Disk, ready: Ready, gate: Gate, **options: Any) -> Iterator[tuple[PContext, list[int]]]:
    args = {rank: (rank, ready.address, gate.address) for rank in range(3)}
    specs = DefaultLogsSpecs(str(disk.folder), redirects=Std.OUT, **options)
    group = start_processes(
        "g", writes_waits_or_fails, args, logs_specs=specs, start_method="fork", settle=0.1, grace=0.3
    )
    closed = threading.Thread(target=group.close)
    try:
        pids = ready.pids(3)
        yield group, pids
    finally:
        disk.thaw()
        closed.start()
        closed.join()


@pytest.mark.slow
def test_a_silent_disk_under_rotated_logs(
    disk: Disk, ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the log writer waits for it. When the disk answers again, it writes what there was, and ends."""
    monkeypatch.setattr(keeper, "DRAIN_WAIT", 0.5)  # in the keeper, which is a fork of this process
    monkeypatch.setattr(display, "REACTION", 0.5)
    with on(disk, ready, gate, max_size=16 << 20) as (group, pids):
        writer = log_writer_of(group)
        disk.freeze()
        until(lambda: sleeping_on_disks(writer) > 0)
        began = time.monotonic()
        gate.open()
        assert wait_gone(pids, 0.1 + 0.3 + SLACK) == set()
        result = group.wait(TIMEOUT)
        assert time.monotonic() - began < TIMEOUT / 2
        assert result is not None
        assert result.root_cause is not None
        assert result.root_cause.local_rank == 2
        assert group._started().link.logs_left == f"process {writer} still writes them"
        assert alive(writer)
        disk.thaw()
        assert wait_gone([writer]) == set()
        data = logs_of(disk.folder, 0)
        assert data
        assert data.replace(b"a line\n", b"") in (b"", *(b"a line\n"[:count] for count in range(7)))


@pytest.mark.slow
def test_a_silent_disk_under_redirected_logs(
    disk: Disk, ready: Ready, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes to it is beyond SIGKILL until it answers, and is reported; the others are stopped on time."""
    monkeypatch.setattr(keeper, "KILL_WAIT", 0.5)  # as above
    monkeypatch.setattr(display, "REACTION", 0.5)
    with on(disk, ready, gate) as (group, pids):
        writes = group.pids()[0]
        disk.freeze()
        until(lambda: sleeping_on_disks(writes) > 0)
        gate.open()
        assert wait_gone(set(pids) - {writes}, 0.1 + 0.3 + SLACK) == set()
        result = group.wait(TIMEOUT)
        assert result is not None
        assert result.root_cause is not None
        assert result.root_cause.local_rank == 2
        assert [outcome.state for outcome in result.outcomes.values()] == ["abandoned", "stopped", "failed"]
        disk.thaw()
        assert wait_gone([writes]) == set()


def test_a_follower_between_two_names(tmp_path: Path) -> None:
    """For a moment of a rotation by renaming there is no file under the name: what comes is read when there is one."""
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    with contextlib.closing(Follower(str(path), rotates=True)) as it:
        buffer = bytearray(100)
        assert it.read(buffer) == 4
        os.rename(path, tmp_path / "log.1")
        assert it.read(buffer) == 0
        path.write_bytes(b"two\n")
        assert it.read(buffer) == 4
        assert buffer[:4] == b"two\n"


# --- runs and functions whose logs are rotated


@pytest.mark.slow
def test_files_are_set_aside_at_the_end_of_a_line(place: Place) -> None:
    """One that is longer than a file may be makes a longer file."""
    counts = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo line $i; done"
    done = sh(place, f"{counts}; printf '%0500d\\nshort\\n%0500d\\n' 1 2; printf end", "--log-max-size", "100", n=2)
    expected = [*(f"line {n}" for n in range(1, 301)), f"{1:0500}", "short", f"{2:0500}", "end"]
    for rank in range(2):
        path = path_of(place, rank)
        assert whole(path).decode().split("\n") == expected
        parts = [part.read_bytes() for part in path.parent.glob("stdout.log.*")]
        assert len(parts) > 20
        assert all(part.endswith(b"\n") and (len(part) <= 100 or part.count(b"\n") == 1) for part in parts)
        assert [line[4:] for line in done.out.splitlines() if line.startswith(f"[{rank}]")] == expected


@pytest.mark.slow
def test_a_grandchilds_descriptor_stays_valid_across_rotations(place: Place) -> None:
    place.env["CHILD"] = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo child $i; done"
    done = sh(place, 'echo before; (setsid sh -c "$CHILD"; true); echo after', "--log-max-size", "200")
    expected = ["before", *(f"child {i}" for i in range(1, 201)), "after"]
    assert whole(path_of(place, 0)).decode().splitlines() == expected
    assert done.out.splitlines() == [f"[0] {line}" for line in expected]


@pytest.mark.each_python
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_rotation_of_functions(logs: Path, capfd: pytest.CaptureFixture[str], method: str) -> None:
    specs = DefaultLogsSpecs(str(logs), tee=Std.ALL, max_size=300)
    texts = tuple(f"text {n}" for n in range(300))
    result = group(
        logs, ConsoleSpecs(), workers.prints, {0: texts, 1: texts}, logs_specs=specs, start_method=method
    )  # fmt: skip
    assert not result.is_failed()
    captured = capfd.readouterr()
    for rank in range(2):
        for shown, files in ((captured.out, result.stdouts), (captured.err, result.stderrs)):
            path = logs.joinpath(files[rank])
            assert whole(path).decode().splitlines() == list(texts)
            assert len(list(path.parent.glob(f"{path.name}.*"))) > 3
            mine = [line for line in shown.splitlines() if line.startswith(f"[{rank}]")]
            assert mine == [f"[{rank}] {text}" for text in texts]
