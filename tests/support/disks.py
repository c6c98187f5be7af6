"""Disks that do not answer, or are full, for tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import helpers
from tests.support.helpers import TIMEOUT

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878


class Disk:
    """A file system that can be made to answer no write: it is frozen (fsfreeze(8)), and writers sleep meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = os.open(folder, os.O_RDONLY)
        self._frozen = False

    def freeze(self) -> None:
        fcntl.ioctl(self._fd, FIFREEZE, 0)
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            fcntl.ioctl(self._fd, FITHAW, 0)
            self._frozen = False

    def close(self) -> None:
        self.thaw()
        os.close(self._fd)

    def fail(self) -> None:
        """Let the kernel find an error on it: it is read-only from now on, also for files that are open."""
        with open("/proc/self/mountinfo", encoding="utf-8") as file:
            device = next(line.split()[-2] for line in file if line.split()[4] == str(self.folder))
        with open(f"/sys/fs/ext4/{os.path.basename(device)}/trigger_fs_error", "w", encoding="utf-8") as file:
            file.write("a test")


@contextlib.contextmanager
def mounted(tmp_path: Path) -> Iterator[Disk]:
    """One of 64 MiB below the test's folder. Skips the test where nothing can be mounted."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        mount = ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    it = Disk(folder)
    try:
        yield it
    finally:
        it.close()
        deadline = time.monotonic() + TIMEOUT
        while subprocess.run(["umount", str(folder)], check=False, capture_output=True).returncode:
            assert time.monotonic() < deadline


@contextlib.contextmanager
def small(tmp_path: Path, kib: int = 64, inodes: int = 64) -> Iterator[Path]:
    """A file system of so many KiB below the test's folder. Skips the test where nothing can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k,nr_inodes={inodes}", "none", str(place)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)


def sleeping_on_disks(pid: int) -> int:
    """How many threads of a process are in an uninterruptible sleep."""
    count = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
            count += file.read().rpartition(b")")[2].split()[0] == b"D"
    return count


until = helpers.until
