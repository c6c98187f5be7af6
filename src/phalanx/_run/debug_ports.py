"""`phalanx run --debugpy`: at which port each rank listens for an editor, and the editor's file, ``launch.json``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from phalanx._base.text import how_many
from phalanx._evidence.error_file import DEBUGPY_ENV
from phalanx._run.config import RunConfig, RunError
from phalanx._runs.recorder import write_text

HOST = "127.0.0.1"
FILE = "launch.json"
_HIGHEST = 65535


class DebugPorts:
    """The ports of the ranks of this machine: that of ``--debugpy`` and those after it; 0: free ones.

    Raises ValueError: there can be none.
    """

    def __init__(self, config: RunConfig, python: str) -> None:
        first, count = config.debugpy, config.nproc_per_node
        assert first is not None
        if config.no_python or config.run_path:
            option = "--run-path" if config.run_path else "--no-python"
            raise ValueError(f"--debugpy and {option} exclude each other: leave {option} out, for a script of Python")
        if config.log_dir == os.devnull:
            raise ValueError(f"--debugpy: there is no folder for {FILE}; leave --log-dir /dev/null out")
        if first + count - 1 > _HIGHEST:
            raise ValueError(f"--debugpy: {first} is no port that {count - 1} more can follow; they end at {_HIGHEST}")
        if python == sys.executable and importlib.util.find_spec("debugpy") is None:
            raise ValueError(f"--debugpy: {python} has no debugpy; pip install debugpy")
        self._ports = [first + rank if first else 0 for rank in range(count)]
        self._waits = config.debugpy_wait

    def reserve(self, until_end: ExitStack) -> None:
        """Choose the ports that nobody has chosen. Raises RunError."""
        if self._ports[0]:
            return
        from phalanx._run import master_port

        try:
            held = [until_end.enter_context(master_port.reserve()) for _ in self._ports]
        except OSError as error:
            raise RunError(f"no ports for --debugpy: {error.strerror}") from None
        self._ports = [port.number for port in held]

    def env(self, local_rank: int) -> dict[str, str]:
        """Return the variables of a rank. The second keeps debugpy from a warning that it writes at each start."""
        listens = f"{self._ports[local_rank]}{' wait' if self._waits else ''}"
        return {DEBUGPY_ENV: listens, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}

    def write(self, folder: str, envs: Mapping[int, Mapping[str, str]]) -> str:
        """Write the editor's file into a run's folder. Returns a line on it."""
        names = {local_rank: f"rank {env['RANK']}" for local_rank, env in envs.items()}
        attach = {"type": "debugpy", "request": "attach"}
        every: dict[str, Any] = {
            "version": "0.2.0",
            "configurations": [
                {"name": name, **attach, "connect": {"host": HOST, "port": self._ports[local_rank]}}
                for local_rank, name in names.items()
            ],
            "compounds": [{"name": "all ranks", "configurations": list(names.values()), "stopAll": True}],
        }
        where = os.path.join(folder, FILE) if folder else f"no {FILE}"
        try:
            if folder:
                write_text(folder, FILE, json.dumps(every, indent=4))
        except OSError as error:
            where = f"no {FILE} ({error.strerror})"
        ranks = "each waits for an editor" if self._waits else "for an editor"
        return f"debugpy: {how_many(len(names), 'rank')} at {HOST}, {_ports(self._ports)}, {ranks}: {where}"


def _ports(ports: list[int]) -> str:
    is_row = ports == list(range(ports[0], ports[0] + len(ports))) and len(ports) > 1
    return f"ports {ports[0]}-{ports[-1]}" if is_row else f"port{'s' * (len(ports) > 1)} {', '.join(map(str, ports))}"
