"""Sends what a worker's files cannot to the launcher, in packets on the report socket, see `worker_messages`.

That is evidence that no file takes, and that its program has left its main function: the launcher waits for no file.
Owns both ends of these packets' content. A worker loads this module before its script starts, in whatever Python the
script runs (3.8 or later).
"""

from __future__ import annotations

import os
import stat

_MESSAGE_LIMIT, _STACK_LIMIT = 4 * 1024, 24 * 1024  # bytes; one packet holds both
_MOMENT, _INT = 8, 4
_HEAD = _MOMENT + 2 * _INT
_LATEST = 1 << 63

LETTER = b"E"
"""How the packet begins. Its content: the moment (8 bytes), the errno for which no file took it (4; 0: not known), the
length of the message in bytes (4), the message, the traceback."""

LEAVING = b"X"
"""How the packet begins by which a program that has left its main function sends its exit code: 1 byte."""

DESCRIPTORS_ENV = "PHALANX_DESCRIPTORS"
"""The variable with the numbers of the descriptors that a worker with an interpreter of its own inherits, the report
socket's first. The worker removes it before its program begins."""


class Sent:
    """Evidence as it was received: what `pack` has packed."""

    __slots__ = ("message", "moment", "number", "stack")

    def __init__(self, content: bytes) -> None:
        """Unpack it. Raises ValueError: it is not whole, or of a moment that cannot be."""
        numbers = [int.from_bytes(content[at : at + size], "little") for at, size in ((0, 8), (8, 4), (12, 4))]
        self.moment, self.number, length = numbers
        if len(content) < _HEAD + length:
            raise ValueError("evidence that is not whole")
        if self.moment >= _LATEST:
            raise ValueError("evidence of a moment that cannot be")
        texts = content[_HEAD : _HEAD + length], content[_HEAD + length :]
        self.message, self.stack = (text.decode("utf-8", "replace") for text in texts)


def pack(message: bytes, stack: bytes, moment: int, number: int = 0) -> bytes:
    """Return a packet of evidence. The texts are UTF-8; ``number`` is an errno."""
    numbers = moment.to_bytes(_MOMENT, "little"), number.to_bytes(_INT, "little"), len(message).to_bytes(_INT, "little")
    return b"".join((LETTER, *numbers, message, stack))


class Report:
    """A worker's end of the report socket, by its descriptor. If that is no socket, nothing is sent.

    It stays open: otherwise a file of the user's would get its number, and later packets would go there. Programs that
    the user's code starts do not have it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file = _file(fd)
        if self._file is not None:
            os.set_inheritable(fd, False)  # execve(2) had to keep it

    def number(self) -> int | None:
        """Return the descriptor; None once the user's code has closed it: a file of theirs may have its number."""
        return self._fd if self._file is not None and _file(self._fd) == self._file else None

    def send_evidence(self, message: str, stack: str, moment: int, number: int = 0) -> None:
        """Send evidence, with the errno for which no file took it. Never raises.

        It waits for a launcher that reads nothing as long as the socket has it, see `worker_messages.pair`. Nothing is
        imported: the process may not be able to read a file any more. write(2) sends one packet.
        """
        try:
            self._send(pack(_cut(message, _MESSAGE_LIMIT), _cut(stack, _STACK_LIMIT), moment, max(number, 0)))
        except (ValueError, OverflowError, MemoryError):
            return

    def send_leaving(self, code: int) -> None:
        """Send that the program has left its main function, and is to exit with ``code``. Never raises.

        The exit may come much later, or never: the interpreter joins threads and runs exit handlers before it.
        """
        self._send(LEAVING + bytes((code & 0xFF,)))

    def _send(self, body: bytes) -> None:
        try:
            fd = self.number()
            if fd is None:
                return
            os.set_blocking(fd, True)  # others share it, and wait no longer
            os.write(fd, body)
        except OSError:
            return


def _file(fd: int) -> tuple[int, int] | None:
    """The device and inode of an open socket; None if the descriptor is not one."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def _cut(text: str, size: int) -> bytes:
    """Encode a text as UTF-8, cut in the middle so that its two ends have at most ``size`` bytes together."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= size:
        return data
    half = size // 2
    ends = (data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore"))
    return "\n... cut ...\n".join(ends).encode()
