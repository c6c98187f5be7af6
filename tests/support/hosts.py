"""Hosts of one machine: network namespaces that a bridge in another one joins. Root is needed; nothing leaves them.

Silence is made without a packet filter: a port that is taken from the bridge drops what is sent through it, and its
carrier stays. One way: who sends has a wrong address of the Ethernet for the other, so what it sends reaches nobody.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

import pytest

NET = "10.77.0"
_count = itertools.count()
NOBODY = "02:00:00:00:00:99"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def check() -> None:
    """Skip a test where hosts cannot be made."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("hosts are network namespaces: root and iproute2 are needed")
    done = subprocess.run(["ip", "netns", "add", f"phx{os.getpid()}-try"], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"hosts are network namespaces, and none can be made here: {done.stderr.strip()}")
    _ip("netns", "del", f"phx{os.getpid()}-try")


class Hosts:
    """Hosts with the addresses 10.77.0.1 and up. A context manager."""

    def __init__(self, count: int) -> None:
        self._prefix = f"phx{os.getpid()}-{next(_count)}"
        self.numbers = range(1, count + 1)
        self.names: dict[int, Path] = {}
        """What is /etc/hosts on a host, where it has one of its own."""

    def name(self, number: int) -> str:
        """The namespace of a host."""
        return f"{self._prefix}-{number}"

    @staticmethod
    def address(number: int) -> str:
        """Where a host is reached."""
        return f"{NET}.{number}"

    def on(self, number: int) -> list[str]:
        """What a command begins with that is run on a host, which has a name of its own."""
        rename = f'hostname h{number} && exec "$@"'
        if number in self.names:  # ip has made a mount namespace for it
            rename = f"mount --bind {self.names[number]} /etc/hosts && {rename}"
        return ["ip", "netns", "exec", self.name(number), "unshare", "--uts", "sh", "-c", rename, "sh"]

    def give(self, number: int, address: str) -> None:
        """Give a host a further address, with the length of its network."""
        _ip("-n", self.name(number), "addr", "replace", address, "dev", "eth0", *(["nodad"] if ":" in address else []))

    def __enter__(self) -> Self:
        try:
            switch = self.name(0)
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
            _ip("-n", switch, "link", "set", "br0", "up")
            for number in self.numbers:
                name = self.name(number)
                _ip("netns", "add", name)
                _ip("-n", switch, "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("-n", switch, "link", "set", f"v{number}", "master", "br0", "up")
                _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hosts down."""
        for number in (*self.numbers, 0):
            subprocess.run(["ip", "netns", "del", self.name(number)], check=False, capture_output=True)

    def cut(self, number: int) -> None:
        """Take the carrier from a host."""
        _ip("-n", self.name(0), "link", "set", f"v{number}", "down")

    def silence(self, number: int) -> None:
        """Drop all that a host sends and is sent."""
        _ip("-n", self.name(0), "link", "set", f"v{number}", "nomaster")

    def deafen(self, number: int) -> None:
        """Drop all that a host is sent; it can send."""
        for other in self._others(number):
            self._mislead(other, number)

    def mute(self, number: int) -> None:
        """Drop all that a host sends; it can be sent to."""
        for other in self._others(number):
            self._mislead(number, other)

    def part(self, number: int, *others: int) -> None:
        """Drop all that a host and some others send each other."""
        for other in others:
            self._mislead(number, other)
            self._mislead(other, number)

    def _others(self, number: int) -> list[int]:
        return [other for other in self.numbers if other != number]

    def _mislead(self, sender: int, receiver: int) -> None:
        words = ["lladdr", NOBODY, "dev", "eth0", "nud", "permanent"]
        _ip("-n", self.name(sender), "neigh", "replace", self.address(receiver), *words)

    def heal(self, number: int) -> None:
        """Let a host be as before."""
        _ip("-n", self.name(0), "link", "set", f"v{number}", "master", "br0", "up")
        for other in self._others(number):
            for one, its in ((other, number), (number, other)):
                words = ["neigh", "del", self.address(its), "dev", "eth0"]
                subprocess.run(["ip", "-n", self.name(one), *words], check=False, capture_output=True)
