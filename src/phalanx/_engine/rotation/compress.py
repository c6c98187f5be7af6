"""Files that were set aside become smaller. Owns the thread of the log writer that compresses them, file by file.

What it makes has the names and the form of `set_aside`. It is whole before it has its name, and the plain file goes
only after that: who reads finds one or the other. What goes wrong (a full disk) leaves the plain file.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread

from phalanx._base import files
from phalanx._logs.rotated import PACKED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
else:
    from _collections import deque

_CHUNK = 256 * 1024
_GZIP = 31  # wbits of zlib: 15, the largest window; and 16, for gzip's head and tail
_PATIENCE = 1.0  # seconds in which a chunk is read, compressed and written, unless the disk does not answer
_UNFINISHED = ".gz.new"
_write = files.write_all


class Compressor:
    """Compresses files in a thread, one after the other. There is none while there is nothing to do."""

    def __init__(self) -> None:
        self._gate = allocate_lock()
        self._busy = allocate_lock()  # held by the thread, from its start to its end
        self._jobs: deque[tuple[str, Callable[[], bool]]] = deque()
        self._at_work = self._over = False

    def add(self, path: str, wanted: Callable[[], bool]) -> None:
        """Have a file compressed that will not be written to again; unless it is not ``wanted`` by then."""
        with self._gate:
            self._jobs.append((path, wanted))
            if self._at_work or self._over:
                return
            self._at_work = True
            self._busy.acquire()
        try:
            start_new_thread(self._work, ())
        except RuntimeError:  # no thread is to be had: the next file may get one
            self._at_work = False
            self._busy.release()

    def stop(self) -> None:
        """Leave what is not done as it is, and return once nothing is under way any more: within a second."""
        self._over = True
        if self._busy.acquire(timeout=_PATIENCE):
            self._busy.release()

    def _work(self) -> None:
        try:
            while True:
                with self._gate:
                    if self._over or not self._jobs:
                        self._at_work = False
                        return
                    path, wanted = self._jobs.popleft()
                if wanted():
                    try:
                        self._compress(path, wanted)
                    except (OSError, MemoryError, ImportError):
                        pass
        finally:
            self._busy.release()

    def _compress(self, path: str, wanted: Callable[[], bool]) -> None:
        """Put ``path.gz`` in the place of ``path``, with its mode and time. Raises OSError, with nothing changed."""
        source = files.opened(path)
        try:
            found = os.fstat(source)
            if found.st_nlink > 1:  # a rotation that was not brought to its end: it may yet grow under another name
                return
            unfinished, packed = path + _UNFINISHED, path + PACKED
            try:
                os.unlink(unfinished)  # of one that was killed; or what somebody has put there
            except FileNotFoundError:
                pass
            file = files.opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                try:
                    self._copy(source, file)
                    os.fchmod(file, found.st_mode & 0o7777)
                    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
                    os.fsync(file)  # else a power cut could leave neither
                finally:
                    os.close(file)
                os.rename(unfinished, packed)
            except BaseException:
                os.unlink(unfinished)
                raise
            try:
                os.unlink(path)
                gone = not wanted()
            except FileNotFoundError:
                gone = True
            if gone:  # by now: who removed the plain file did not find this one
                os.unlink(packed)
        finally:
            os.close(source)

    def _copy(self, source: int, file: int) -> None:
        """Compress a file into another. Raises OSError; InterruptedError when it is to stop."""
        import zlib

        packing = zlib.compressobj(wbits=_GZIP)
        while data := os.read(source, _CHUNK):
            if self._over:
                raise InterruptedError
            _write(file, packing.compress(data))
        _write(file, packing.flush())
