r"""Finds regular expressions in lines with Python's `re`, where RE2 is not installed. Both halves: parent and child.

`re` backtracks: on some lines some patterns take longer than anybody waits, and no other thread runs meanwhile. So a
child process searches, whose processor time the kernel limits (`ITIMER_PROF`, setitimer(2)). Where a block takes
longer, or the child is lost, it is announced, and the patterns are given up. The child gets the patterns, then blocks
of whole lines, and answers each with the beginnings and ends of the lines that match.
"""

from __future__ import annotations

import os
import re
import signal
import warnings
import weakref
from _socket import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from subprocess import Popen
from typing import Any

from phalanx._base import clock, interpreter
from phalanx._base.channels import Channel, Closed, pair

CPU_SECONDS = 1.0
"""Of processor time that `_BLOCK` bytes of lines may take, or a line that is longer."""
_BLOCK = 64 * 1024
_WAIT = 60.0  # seconds for an answer: of a child that somebody has stopped, none comes


def check(name: str, pattern: str) -> None:
    """Raise ValueError: a pattern is invalid, or nothing searches here."""
    try:
        interpreter.executable()
        pattern.encode()
        with warnings.catch_warnings(action="error"):  # of what means something else to RE2: [[:alpha:]]
            re.compile(pattern)
    except UnicodeEncodeError:
        problem = "it is no UTF-8"
    except OSError as error:
        msg = f"{name}: without RE2 (the extra re2), a process of its own searches: {error.strerror}"
        raise ValueError(msg) from None
    except (re.error, Warning, ValueError, OverflowError, RecursionError) as error:
        problem = f"{error}; without RE2 (the extra re2), Python's re searches"
    else:
        return
    msg = f"{name}: {pattern!r} is not a regular expression: {problem}"
    raise ValueError(msg)


class SlowPatterns:
    r"""Finds the lines that match one of several patterns, which have been checked.

    Args:
        name: What the patterns are for, "grep" or "exclude": see `check`.
        patterns: The patterns.
        ignore_case: Whether they ignore case. Else \w, \d, \s and \b know ASCII only, as RE2's.
        announce: Announces a line; it must not wait.
    """

    def __init__(
        self, name: str, patterns: Sequence[str], *, ignore_case: bool, announce: Callable[[str], None]
    ) -> None:
        self._name = name
        self._patterns = list(patterns)
        self._flags = int(re.IGNORECASE if ignore_case else re.ASCII)
        self._announce = announce
        self._child: _Child | None = None
        self._has_given_up = False

    def spans(self, text: bytes) -> list[tuple[int, int]]:
        """Return where the matching lines are. Where it has given up: grep's are all, and those of exclude are none."""
        if not self._has_given_up:
            try:
                if self._child is None or self._child.owner != os.getpid():
                    self._child = _Child(self._patterns, self._flags)
                return self._child.ask(text)
            except (OSError, Closed) as error:
                self._give_up(error)
        return [(0, len(text))] if self._name == "grep" and text else []

    def _give_up(self, error: Exception) -> None:
        child, self._child, self._has_given_up = self._child, None, True
        why = f"cannot be searched for ({str(error) or 'the process that searches has ended'})"
        if child is not None and child.has_run_out():
            why = f"takes longer than {CPU_SECONDS:g} s, which RE2 does not (the extra re2)"
        effect = "all lines are shown" if self._name == "grep" else "nothing is hidden by it"
        given = " | ".join(self._patterns)
        self._announce(f"phalanx: {self._name}: {given!r} {why}; from now on {effect}")


class _Child:
    """The process that searches. Raises OSError: it cannot be started."""

    def __init__(self, patterns: list[str], flags: int) -> None:
        self.owner = os.getpid()
        ours, theirs = pair()
        try:
            code = f"from phalanx._logs.slow_patterns import serve;serve({theirs.fileno()})"
            command = interpreter.command(["-I", "-S", "-W", "ignore"], code)
            self._process = interpreter.start_helper(command, theirs.fileno(), os.environ)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours)
        weakref.finalize(self, _end, self.owner, self._process, self._channel)
        self._channel.send((patterns, flags))

    def ask(self, text: bytes) -> list[tuple[int, int]]:
        """Return where the matching lines are. Raises OSError, Closed: no answer comes."""
        self._channel.send((text,))
        answer: Any = self._channel.receive_by(clock.now() + _WAIT)
        return answer[0][0]  # type: ignore[no-any-return]  # what `serve` sends

    def has_run_out(self) -> bool:
        """End it, and return whether the limit of its processor time had."""
        self._process.kill()  # one that somebody has stopped, too
        return self._process.wait(_WAIT) == -signal.SIGPROF


def _end(owner: int, process: Popen[bytes], channel: Channel) -> None:
    channel.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


# --- the child


def serve(fd: int) -> None:
    """Answer until the other end is closed."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that has started it may have blocked all
    channel = Channel(socket(fileno=fd))
    with suppress(Closed):
        received: Any = channel.receive_by(None)
        (patterns, flags), _ = received
        searches = [re.compile(pattern, flags).search for pattern in patterns]
        while True:
            received = channel.receive_by(None)
            channel.send((_search(searches, received[0][0]),))


def _search(searches: Sequence[Callable[[str], object]], text: bytes) -> list[tuple[int, int]]:
    spans, start, timed = [], 0, 0
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    for line in text[:-1].split(b"\n") if text else ():
        if start - timed >= _BLOCK:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            timed = start
        end = start + len(line) + 1
        whole = line.decode()
        if any(search(whole) for search in searches):
            spans.append((start, end))
        start = end
    signal.setitimer(signal.ITIMER_PROF, 0)
    return spans
