"""Reads what /proc shows from a process's own memory: its command line, its environment, the files that it maps.

To read these, the kernel takes the lock of that memory (mmap_lock), and its pages. When the process waits for a disk
that does not answer, the reader may wait with it, without end. So a fork of the keeper reads, and is killed when it has
slept for too long; time without a CPU does not count. /proc/PID/stat and /proc/PID/status need no such lock.
"""

from __future__ import annotations

import marshal
import os
import select

from phalanx._base import clock, linux, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

COMMAND, VARIABLE, MAPPED = range(3)
"""What is read: the command line; the value of the variable; the rest of the mapped file's name."""

_COMMAND_SIZE = 1024
_MOST = 1 << 20  # bytes of an environment, or of a list of what is mapped
_HEAD = 4  # bytes of a record's length
_STEP = 0.02  # seconds between two looks at the fork
_PATIENCE = 10  # how many times as long a fork has that does not sleep


class MemoryReader:
    """Reads from processes, and waits for them for ``seconds`` in all.

    Args:
        variable: The name of the environment variable whose value is wanted.
        mapped: The beginning of the name of the memfd that is looked for among the mapped files.
        seconds: How long forks may sleep, over all reads. Those without a CPU have ten times as long.
    """

    def __init__(self, variable: bytes, mapped: bytes, seconds: float) -> None:
        self.forks: set[int] = set()
        """Children that took too long and have not been reaped. Whoever reaps one takes it out."""
        self._variable = variable + b"="
        self._mapped = b"/memfd:" + mapped
        self._seconds = seconds
        self._longest = seconds * _PATIENCE

    def read(self, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        """Read what can be read of ``wanted``, in this order: each a pid and what to read."""
        if not wanted or self._seconds <= 0 or self._longest <= 0:
            return {}
        try:
            reader, writer = os.pipe2(os.O_CLOEXEC)
        except OSError:  # no descriptor is left
            return {}
        data = b""
        try:
            child = os.fork()
            if child == 0:
                self._serve(wanted, writer)
            self.forks.add(child)
            os.close(writer)
            writer = -1
            data, ended = self._receive(reader, child)
            if ended:
                os.waitpid(child, 0)  # it is about to exit
                self.forks.discard(child)
            else:
                os.kill(child, linux.SIGKILL)  # reaped with the other children, if it can die
        except OSError:  # fork(2): EAGAIN
            pass
        finally:
            for fd in (reader, writer):
                if fd >= 0:
                    os.close(fd)
        return dict(_records(data))

    def _receive(self, reader: int, child: int) -> tuple[bytes, bool]:
        """Return what the fork wrote until EOF, or until its time was over; and whether it was EOF."""
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        data, began = b"", clock.now()
        until = began + self._longest
        try:
            while self._seconds > 0 and clock.now() < until:
                if poll.poll(_STEP * 1000):
                    more = os.read(reader, select.PIPE_BUF)
                    if not more:
                        return data, True
                    data += more
                elif _sleeps(child):
                    self._seconds -= _STEP
        finally:
            self._longest -= clock.now() - began
        return data, False

    def _serve(self, wanted: list[tuple[int, int]], writer: int) -> NoReturn:
        """Run as the fork: write a record for each read, and exit."""
        try:
            linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)
            linux.close_all_but([writer])  # it may sleep without end, and must hold no pipe open
            for pid, what in wanted:
                record = marshal.dumps(((pid, what), self._read_one(pid, what)))
                os.write(writer, len(record).to_bytes(_HEAD, "little") + record)
        finally:
            os._exit(0)

    def _read_one(self, pid: int, what: int) -> bytes:
        if what == COMMAND:
            return procfs.read(f"/proc/{pid}/cmdline", _COMMAND_SIZE)
        if what == VARIABLE:
            for entry in procfs.read(f"/proc/{pid}/environ", _MOST).split(b"\0"):
                if entry.startswith(self._variable):
                    return entry[len(self._variable) :]
            return b""
        return procfs.read(f"/proc/{pid}/maps", _MOST).partition(self._mapped)[2].partition(b"\n")[0]


def _sleeps(pid: int) -> bool:
    """Whether a process is in another state than running (R)."""
    try:
        return procfs.Stat(pid).state != "R"
    except OSError:  # no descriptor is left
        return True


def _records(data: bytes) -> Iterator[tuple[tuple[int, int], bytes]]:
    """The records that are complete."""
    while len(data) >= _HEAD:
        size = int.from_bytes(data[:_HEAD], "little") + _HEAD
        if len(data) < size:
            return
        yield marshal.loads(data[_HEAD:size])  # noqa: S302 - of our own fork
        data = data[size:]
