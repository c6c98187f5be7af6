"""Groups in a program that gevent has patched: its greenlets have their turns while a group is waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.each_python]


def _program(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "patched.py"
    script.write_text(dedent(text), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(script), *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_program_that_gevent_has_patched_starts_groups(tmp_path: Path) -> None:
    """But not as forks of itself, which is refused."""
    program = """
        import gevent.monkey; gevent.monkey.patch_all()
        import os, sys, time
        import gevent
        from phalanx import spawn
        from phalanx.multiprocessing import start_processes

        def work(gate):  # until a greenlet of the launcher's opens the gate: it has had its turn, then
            assert os.read(os.open(gate, os.O_RDONLY), 1) == b"x"
            return os.environ["NAME"]

        def fail(rank):
            if rank == 1:
                raise ValueError("loss is nan")
            time.sleep(3600)

        def open_gate():
            gevent.sleep(0.05)
            os.write(gate, b"xx")

        if __name__ == "__main__":
            os.mkfifo("gate")
            gate = os.open("gate", os.O_RDWR)
            envs = {0: {"NAME": "zero"}, 1: {"NAME": "one"}}
            for method in ("spawn", "forkserver"):
                with start_processes("g", work, {0: ("gate",), 1: ("gate",)}, envs, start_method=method) as group:
                    print(group.wait(0.01))
                    opens = gevent.spawn(open_gate)
                    print(group.wait(30).return_values)
                    opens.join()
                try:
                    spawn.start_processes(fail, nprocs=2, start_method=method)
                except spawn.ProcessRaisedException as error:
                    print(error.error_index, str(error).splitlines()[-1])
            try:
                spawn.start_processes(print, nprocs=1, start_method="fork")
            except RuntimeError as error:
                print(error)
        """
    done = _program(tmp_path, program)
    *said, refused = done.stdout.splitlines()
    assert said == ["None", "{0: 'zero', 1: 'one'}", "1 ValueError: loss is nan"] * 2, done
    assert refused.startswith("start_method 'fork': gevent has patched")
    assert done.returncode == 0


def test_an_agent_works_there_too(tmp_path: Path, port: int) -> None:
    program = """
        import gevent.monkey; gevent.monkey.patch_all()
        import os, sys, urllib.request
        from phalanx.launcher import LaunchConfig, elastic_launch
        from phalanx.multiprocessing import DefaultLogsSpecs

        def work(port):
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise ValueError("once")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
                return os.environ["RANK"], answer.status

        if __name__ == "__main__":
            os.environ["TORCHELASTIC_HEALTH_CHECK_PORT"] = sys.argv[1]
            config = LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                max_restarts=1, start_method="spawn", logs_specs=DefaultLogsSpecs(log_dir="logs"),
            )
            print(elastic_launch(config, work)(sys.argv[1]))
        """
    done = _program(tmp_path, program, str(port))
    assert done.stdout == "{0: ('0', 200), 1: ('1', 200)}\n", done


def test_a_program_that_eventlet_has_patched_is_refused(tmp_path: Path) -> None:
    """As eventlet does, which its authors advise against, and which is therefore not installed here."""
    program = """
        import select; del select.epoll, select.poll
        from phalanx import spawn
        if __name__ == "__main__":
            try:
                spawn.start_processes(print, nprocs=1, start_method="spawn")
            except RuntimeError as error:
                print(error)
        """
    done = _program(tmp_path, program)
    assert done.stdout.startswith("eventlet has patched this program: no group"), done
    assert done.stdout.count("\n") == 1
