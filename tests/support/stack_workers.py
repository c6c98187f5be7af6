"""Functions for workers that are asked for their stacks."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx._evidence.error_file import ERROR_FILE_ENV
from phalanx._evidence.stack_signals import offer_stacks, stacks_path
from phalanx._stacks import collect, py_spy, request
from tests.support.helpers import pass_gate


def fake_py_spy(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have this process find a shell script in the place of py-spy."""
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(py_spy, "find", lambda: str(path))


def hang(address: str, gate: str) -> None:
    """Say that it is there and stay there in one line, without a call of Python: whenever one looks, it is there."""
    here = threading.Event()
    threading.Thread(target=idle, args=(here,), daemon=True).start()
    here.wait()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        _ = sock.sendto(b"here", address), os.read(os.open(gate, os.O_RDONLY), 1)


def idle(here: threading.Event) -> None:
    here.set()
    threading.Event().wait()


def nest(address: str, gate: str, logs: str) -> dict[str, Any]:
    """A worker that shows its stacks starts one that is its fork, and asks it."""
    from phalanx.multiprocessing import start_processes  # a worker needs none of it

    offer_stacks()
    os.makedirs(logs)
    os.mkfifo(f"{logs}/never")  # not the same gate: each pass lets one through, whoever that is
    os.mkdir(f"{logs}/inner")
    with start_processes(
        "inner", hang, {0: (address, f"{logs}/never")}, log_dir=f"{logs}/inner", start_method="fork"
    ) as group:
        pass_gate(gate)  # the inner one is ready
        pid = group.pids()[0]
        target = request.Target(
            0, pid, group.logs.error_files[0], doomed=True, send=lambda number: os.kill(pid, number)
        )
        text = ask(target)
        above = parents(pid)
        for keeper in above[: above.index(os.getpid())]:
            os.kill(keeper, signal.SIGRTMIN + 19)
        text = ask(target)
        group.close(signal.SIGKILL)
    return {"text": text, "mine": read(stacks_path(os.environ[ERROR_FILE_ENV]))}


def ask(target: request.Target) -> str:
    with collect.Collection([target], 10) as collection:
        collection.begin()
        assert collection.wait(), collection.finish()
        return collection.finish()[target.key]


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def parents(pid: int) -> list[int]:
    found = []
    while pid > 1:
        with open(f"/proc/{pid}/stat", "rb") as file:
            pid = int(file.read().rpartition(b")")[2].split()[1])
        found.append(pid)
    return found


def catches(pid: int) -> bool:
    """Whether a process handles the signal for stacks."""
    with open(f"/proc/{pid}/status") as file:
        (line,) = (line for line in file if line.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) >> signal.SIGRTMIN + 17 & 1)
