r"""Finds regular expressions in lines with Python's `re`, where RE2 is not installed. Both halves: parent and child.

`re` backtracks: on some lines some patterns take longer than anybody waits, and no other thread runs meanwhile. So a
child process searches, whose processor time the kernel limits (`ITIMER_PROF`, setitimer(2)). Where a block takes
longer, or the child is lost, it is announced, and the patterns are given up.

The child runs the text of this file, which may be in a zip file, and imports nothing of Phalanx. It gets a pickle of
patterns and then blocks of whole lines, and answers each with the ends of the lines that match, all with their sizes.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable, Sequence
    from typing import Any

    Spans = list[tuple[int, int]]

CPU_SECONDS = 1.0
"""Of processor time that `_BLOCK` bytes of lines may take, or a line that is longer."""
_BLOCK = 64 * 1024
_WAIT = 60.0  # seconds for an answer: of a child that somebody has stopped, none comes
_SIZE = struct.Struct("!Q")

_IN_CLASS = {  # of RE2, in ASCII alone
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\f\r ",
    "D": r"\x00-/:-\U0010ffff",
    "W": r"\x00-/:-@\[-\^`\{-\U0010ffff",
    "S": r"\x00-\x08\x0b\x0e-\x1f!-\U0010ffff",
}
_WORD = "(?-i:[0-9A-Za-z_])"  # ignoring case, U+017F and U+212A would be of it
_OUTSIDE = {
    **{letter: f"[{_IN_CLASS[letter]}]" for letter in "dws"},
    **{letter.upper(): f"[^{_IN_CLASS[letter]}]" for letter in "dws"},
    "b": f"(?:(?<!{_WORD})(?={_WORD})|(?<={_WORD})(?!{_WORD}))",
    "B": f"(?:(?<!{_WORD})(?!{_WORD})|(?<={_WORD})(?={_WORD}))",
    "z": r"\Z",
}


def check(name: str, pattern: str) -> None:
    """Raise ValueError: a pattern is invalid, or means something else to `re` than to RE2; or nothing searches here."""
    if getattr(sys, "frozen", False):  # its interpreter is the program itself
        msg = f"{name}: a frozen program searches with RE2 alone; build it with google-re2 in it"
        raise ValueError(msg)
    try:
        pattern.encode()
        with warnings.catch_warnings(action="ignore"):  # of what may mean something else one day
            re.compile(translated(pattern))
    except UnicodeEncodeError:
        problem = "it is no UTF-8"
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        problem = f"{error}; without RE2 (the extra re2), Python's re searches"
    else:
        return
    msg = f"{name}: {pattern!r} is not a regular expression: {problem}"
    raise ValueError(msg)


def translated(pattern: str) -> str:
    r"""Return a pattern that means to `re` what the given one means to RE2. Raises ValueError: there is none.

    >>> translated(r"\d+[^\w]\z")
    '[0-9]+[^0-9A-Za-z_]\\Z'
    """
    parts, offset, in_class = [], 0, False
    while offset < len(pattern):
        letter = pattern[offset]
        if letter == "\\" and offset + 1 < len(pattern):
            known = _IN_CLASS if in_class else _OUTSIDE
            parts.append(known.get(pattern[offset + 1], pattern[offset : offset + 2]))
            offset += 2
            continue
        if in_class and pattern.startswith("[:", offset):
            msg = f"it has no classes like {pattern[offset:].partition(']')[0]}]"
            raise ValueError(msg)
        if letter == "[" and not in_class:
            in_class = True
            opening = re.match(r"\[\^?\]?", pattern[offset:])
            assert opening is not None
            parts.append(opening[0].replace("]", r"\]"))  # a bracket that comes first belongs to the class
            offset += opening.end()
            continue
        in_class = in_class and letter != "]"
        of_sets = in_class and letter in "[&|~"  # which `re` may have one day
        is_text = not in_class and pattern.startswith("{,", offset)  # to `re` up to so many times, from none on
        parts.append(rf"\{letter}" if of_sets or is_text else letter)
        offset += 1
    return "".join(parts)


class SlowPatterns:
    """Finds the lines that match one of several patterns, which have been checked.

    Args:
        name: What the patterns are for, "grep" or "exclude": see `check`.
        patterns: The patterns.
        ignore_case: Whether they ignore case.
        announce: Announces a line; it must not wait.
    """

    def __init__(
        self, name: str, patterns: Sequence[str], *, ignore_case: bool, announce: Callable[[str], None]
    ) -> None:
        self._name = name
        self._given = " | ".join(patterns)
        self._flags = re.IGNORECASE if ignore_case else 0
        self._patterns = [translated(pattern) for pattern in patterns]
        self._announce = announce
        self._child: _Child | None = None
        self._has_given_up = False

    def spans(self, text: bytes) -> Spans:
        """Return where the matching lines are. Where it has given up: grep's are all, and those of exclude are none."""
        if not self._has_given_up:
            try:
                if self._child is None or self._child.owner != os.getpid():
                    self._child = _Child(self._patterns, self._flags)
                return self._child.ask(text)
            except OSError as error:
                self._give_up(error)
        return [(0, len(text))] if self._name == "grep" and text else []

    def _give_up(self, error: OSError) -> None:
        child, self._child, self._has_given_up = self._child, None, True
        why = f"cannot be searched for ({error})"
        if child is not None and child.has_run_out():
            why = f"takes longer than {CPU_SECONDS:g} s, which RE2 does not (the extra re2)"
        effect = "all lines are shown" if self._name == "grep" else "nothing is hidden by it"
        self._announce(f"phalanx: {self._name}: {self._given!r} {why}; from now on {effect}")


class _Child:
    """The process that searches. Raises OSError: it cannot be started."""

    def __init__(self, patterns: list[str], flags: int) -> None:
        import pickle
        import signal
        import weakref

        from phalanx._base import unpatched

        self.owner = os.getpid()
        sockets = unpatched.module("socket")
        self._socket: socket.socket
        self._socket, theirs = sockets.socketpair()
        self._signal = signal.SIGPROF
        program = [sys.executable or "", "-I", "-S", "-W", "ignore", "-c", _source()]
        with theirs:
            try:
                self._process: subprocess.Popen[bytes] = unpatched.module("subprocess").Popen(
                    program, stdin=theirs, stdout=theirs, process_group=0, cwd="/"
                )
            except BaseException:
                self._socket.close()
                raise
        weakref.finalize(self, _end, self.owner, self._process, self._socket)
        self._socket.settimeout(_WAIT)
        self._send(pickle.dumps((patterns, flags)))

    def ask(self, text: bytes) -> Spans:
        """Return where the matching lines are. Raises OSError: no answer comes."""
        self._send(text)
        numbers = memoryview(self._receive(_SIZE.unpack(self._receive(_SIZE.size))[0])).cast("Q")
        return [*zip(numbers[::2], numbers[1::2], strict=True)]

    def has_run_out(self) -> bool:
        """End it, and return whether the limit of its processor time had."""
        self._process.kill()  # one that somebody has stopped, too
        return self._process.wait(_WAIT) == -self._signal

    def _send(self, data: bytes) -> None:
        self._socket.sendall(_SIZE.pack(len(data)) + data)

    def _receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                msg = "the process that searches has ended"
                raise ConnectionResetError(msg)
            parts += part
        return bytes(parts)


def _end(owner: int, process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    ours.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _source() -> str:
    loader: Any = __spec__.loader
    text: str | None = loader.get_source(__name__)
    if text is None:  # only compiled files are installed
        msg = "the source of its process is not there"
        raise FileNotFoundError(msg)
    return text


# --- the child


def _serve() -> None:
    """Answer until the other end is closed."""
    import pickle
    import signal
    from array import array

    def receive() -> bytes:
        return read(_SIZE.unpack(read(_SIZE.size))[0])

    def read(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = os.read(0, size - len(parts))
            if not part:
                os._exit(0)
            parts += part
        return bytes(parts)

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that has started it may have blocked all
    patterns, flags = pickle.loads(receive())
    searches = [re.compile(pattern, flags).search for pattern in patterns]
    while True:
        text = receive()
        spans, start, timed = array("Q"), 0, 0
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        for line in text[:-1].split(b"\n") if text else ():
            if start - timed >= _BLOCK:
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                timed = start
            end = start + len(line) + 1
            whole = line.decode()
            if any(search(whole) for search in searches):
                spans.extend((start, end))
            start = end
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = memoryview(_SIZE.pack(len(spans) * spans.itemsize) + spans.tobytes())
        while answer:
            answer = answer[os.write(1, answer) :]


if __name__ == "__main__":
    _serve()
