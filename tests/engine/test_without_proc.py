"""Where /proc is empty, or another namespace's, nothing that a worker started is left behind either."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from phalanx._base import linux, procfs
from phalanx._engine.keeper.sweep import PID_LIMIT, ChildScan
from tests.support.helpers import TIMEOUT, Gate, Ready, alive, wait_gone
from tests.support.workers import ROOT

if TYPE_CHECKING:
    from pathlib import Path


EMPTY = "mount -t tmpfs none /proc"

# One in a session of its own, one twice forked, and one that heeds no SIGTERM. All are so before the worker goes on.
FAMILY = """
import os, signal
heard, settled = os.pipe()
for kind in range(3):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if kind and os.fork():
            os._exit(0)
        if kind == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        {ready}
        os.close(settled)
        signal.pause()
    if kind:
        os.waitpid(pid, 0)
os.close(settled)
assert os.read(heard, 1) == b""
{ready}
{last}
"""

LAUNCHER = """
import os, sys
from phalanx._base import procfs
from phalanx.multiprocessing import start_processes
assert not procfs.is_shown()
def work(code):
    exec(code)
if __name__ == "__main__":
    how, method, code = sys.argv[1:]
    group = start_processes("unseen", work, {{0: (code,)}}, {{0: {{}}}}, start_method=method)
    if how == "ends":
        result = group.wait()
        assert result.succeeded, result
        assert len(result.leftovers) == 3, result
    else:
        {gate}
        if how == "closed":
            group.close(timeout=0.2)
"""


def _may_mount() -> bool:
    command = ["unshare", "--mount", "sh", "-c", EMPTY]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, check=False, capture_output=True).returncode == 0
    )


@pytest.fixture
def unshare() -> str:
    if os.geteuid() != 0:
        pytest.skip("needs root: only that mounts over /proc")
    if not _may_mount():
        pytest.skip("needs CAP_SYS_ADMIN: only that mounts over /proc")
    return "unshare"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("how", ["ends", "closed", "killed"])
def test_without_proc_nobody_is_left(
    unshare: str, method: str, how: str, ready: Ready, gate: Gate, tmp_path: Path
) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(textwrap.dedent(LAUNCHER).format(gate=gate.python()))
    code = FAMILY.format(ready=ready.python(), last="" if how == "ends" else "signal.pause()")
    command = [unshare, "--mount", "sh", "-c", f'{EMPTY} && exec "$@"', "sh", sys.executable, str(script), how, method]
    command.append(code)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as launcher:
        pids = ready.pids(4)
        if how == "killed":
            launcher.kill()
        else:
            gate.open()
        _out, err = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == (-signal.SIGKILL if how == "killed" else 0), err
    assert not wait_gone(pids, 10)


@pytest.mark.slow
def test_another_namespaces_proc_is_not_believed(unshare: str, tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(textwrap.dedent(LAUNCHER).format(gate="pass"))
    code = FAMILY.format(ready="", last="")
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "TMPDIR": str(tmp_path)}
    command = [unshare, "--pid", "--fork", sys.executable, str(script), "ends", "spawn", code]
    done = subprocess.run(command, check=False, env=environ, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ended what was left behind: pid ") == 3


def test_a_number_is_told_to_be_a_childs_only_where_it_is() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        assert linux.children_among([1, os.getppid(), os.getpid(), pid, PID_LIMIT - 1]) == [pid]
        scan = ChildScan()
        while pid not in scan.found:
            assert not scan.step(pid)
        assert scan.found <= set(procfs.children(os.getpid()))  # of other tests, too: a resource tracker
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert linux.children_among([pid]) == [pid]  # not reaped yet
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert linux.children_among([pid]) == []


def test_we_are_shown_by_our_own_proc() -> None:
    assert procfs.is_shown()
