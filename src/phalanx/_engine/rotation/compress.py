"""Compresses rotated files, one after the other, in a thread of the log writer.

A compressed file has the name and the form that `_logs.rotated` describes. It is complete before it gets that name, and
the plain file is removed after that: a reader finds one or the other. An error (a full disk) leaves the plain file.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread

from phalanx._base import files
from phalanx._logs.rotated import GZIP_SUFFIX

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
    """Compresses files in a thread, which runs only while there is something to do."""

    def __init__(self) -> None:
        self._gate = allocate_lock()
        self._busy = allocate_lock()  # held by the thread, from its start to its end
        self._jobs: deque[tuple[str, Callable[[], bool]]] = deque()
        self._at_work = self._over = False

    def add(self, path: str, wanted: Callable[[], bool]) -> None:
        """Queue a file that will not be written to again. It is skipped if ``wanted`` returns False by its turn."""
        with self._gate:
            self._jobs.append((path, wanted))
            if self._at_work or self._over:
                return
            self._at_work = True
            self._busy.acquire()
        try:
            start_new_thread(self._work, ())
        except RuntimeError:  # no thread can be started: the next file may get one
            self._at_work = False
            self._busy.release()

    def stop(self) -> None:
        """Drop the queue and the file that is being compressed. Returns when the thread has ended: within a second."""
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
        """Replace ``path`` by ``path.gz``, with its mode and time. Raises OSError, with nothing changed."""
        source = files.opened(path)
        try:
            found = os.fstat(source)
            if found.st_nlink > 1:  # a rotation that failed half-way: it may still grow under another name
                return
            unfinished, packed = path + _UNFINISHED, path + GZIP_SUFFIX
            try:
                os.unlink(unfinished)  # left by a log writer that was killed; or by somebody else
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
            if gone:  # no longer wanted: the plain file was removed when this one had no name yet
                os.unlink(packed)
        finally:
            os.close(source)

    def _copy(self, source: int, file: int) -> None:
        """Compress a file into another. Raises OSError; InterruptedError after `stop`."""
        import zlib

        packing = zlib.compressobj(wbits=_GZIP)
        while data := os.read(source, _CHUNK):
            if self._over:
                raise InterruptedError
            _write(file, packing.compress(data))
        _write(file, packing.flush())
