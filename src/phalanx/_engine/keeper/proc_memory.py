"""What /proc shows of a process out of its own memory: its command line, its environment, the files that it maps.

To read these, the kernel takes the lock of that memory (mmap_lock), and its pages. When the process waits for a disk
that does not answer, the reader may wait with it, for ever. So a fork of the keeper reads, and is killed when it has
waited for too long: for a process, not for a CPU. /proc/PID/stat and /proc/PID/status need no such lock: see `linux`.
"""

from __future__ import annotations

import marshal
import os
import select

from phalanx._base import clock, linux, procfs
from phalanx._engine.keeper import start_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

COMMAND, VARIABLE, MAPPED = range(3)
"""What can be asked for: the command line; the value of the variable; what follows in the mapped file's name."""

_COMMAND_SIZE = 1024
_MOST = 1 << 20  # bytes of an environment, or of a list of what is mapped
_HEAD = 4  # bytes of a record's length
_STEP = 0.02  # seconds between two looks at the fork
_PATIENCE = 10  # how many times as long a fork has that does not sleep


class Peek:
    """Looks at processes, and may be held up by them for ``seconds`` in all.

    Args:
        variable: The name of the environment variable whose value is wanted.
        mapped: How the name begins of the memfd that is looked for among what is mapped.
        seconds: The time for all looks together in which a fork sleeps. One that has no CPU is given ten times as long.
    """

    def __init__(self, variable: bytes, mapped: bytes, seconds: float) -> None:
        self.forks: set[int] = set()
        """Children that have taken too long. Whoever reaps one takes it out."""
        self._variable = variable + b"="
        self._mapped = b"/memfd:" + mapped
        self._seconds = seconds
        self._longest = seconds * _PATIENCE

    def read(self, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
        """Read what can be read of ``wanted``, each a pid and what is asked for, in this order."""
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
            data, ended = self._hear(reader, child)
            if ended:
                os.waitpid(child, 0)  # it is about to exit
                self.forks.discard(child)
            else:
                os.kill(child, linux.SIGKILL)  # and whoever reaps children will, if it can die
        except OSError:  # no process is to be had
            pass
        finally:
            for fd in (reader, writer):
                if fd >= 0:
                    os.close(fd)
        return dict(_records(data))

    def _hear(self, reader: int, child: int) -> tuple[bytes, bool]:
        """All that the fork has written until its end, or until its time is over; and whether it was the end."""
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
        """Be the fork."""
        try:
            linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)
            start_process.close_all_but([writer])  # should it never end, it holds nothing that others wait for
            for pid, what in wanted:
                record = marshal.dumps(((pid, what), self._look(pid, what)))
                os.write(writer, len(record).to_bytes(_HEAD, "little") + record)
        finally:
            os._exit(0)

    def _look(self, pid: int, what: int) -> bytes:
        if what == COMMAND:
            return procfs.read(f"/proc/{pid}/cmdline", _COMMAND_SIZE)
        if what == VARIABLE:
            for entry in procfs.read(f"/proc/{pid}/environ", _MOST).split(b"\0"):
                if entry.startswith(self._variable):
                    return entry[len(self._variable) :]
            return b""
        return procfs.read(f"/proc/{pid}/maps", _MOST).partition(self._mapped)[2].partition(b"\n")[0]


def _sleeps(pid: int) -> bool:
    """Whether a process waits for something else than a CPU."""
    try:
        return procfs.Stat(pid).state != "R"
    except OSError:  # no descriptor is left
        return True


def _records(data: bytes) -> Iterator[tuple[tuple[int, int], bytes]]:
    """What is complete."""
    while len(data) >= _HEAD:
        size = int.from_bytes(data[:_HEAD], "little") + _HEAD
        if len(data) < size:
            return
        yield marshal.loads(data[_HEAD:size])  # noqa: S302 - of our own fork
        data = data[size:]
