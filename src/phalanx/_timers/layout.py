"""The layout of a timer table: the words of its shared memory, and the texts that name its timers.

The memory begins with a head, whose words are `HEAD_WAKE` and so on, then one mark for each seat. A *seat* is the part
of the table that one process writes: a few words about the process (`SEAT_BEAT` and so on), how long its latest steps
took, then a deadline for each of its `SLOTS` slots, a span for each, a thread for each, and a text for each. A *slot*
is one timer. All words have 64 bits; all times are nanoseconds of CLOCK_MONOTONIC.

How far the table is in use is recorded by flags of one byte each that are only ever set. A number that is compared and
then raised could be lowered again by another process, another thread, or a signal handler that interrupts its own
thread; a flag cannot.

This module holds what both ends share. The watcher's end is `table`, the worker's end is `client`.
"""

from __future__ import annotations

import mmap
import sys

from phalanx._base import clock

TIMERS_ENV = "PHALANX_TIMERS"
"""The environment variable that holds the table's address in a worker: ``PID:MEMORY:BELL:RANK``."""

NEVER = (1 << 63) - 1
"""The deadline of a slot that is free."""

LONGEST = 1 << 61
"""The longest time in nanoseconds that a timer can have, 73 years: a longer one counts as this."""

SLOTS = 1024
"""The most timers that one process can have at a time."""

TEXT_LIMIT = 254
"""The most bytes that are kept of a timer's scope and location together."""

ATTACHED = NEVER - 1
"""The deadline of a breakpoint to which somebody has attached."""

LATE = clock.NS
"""Nanoseconds after the published moment of the next look. A client that finds it longer ago checks for a watcher."""

MAGIC = int.from_bytes(b"phalanx4", "little")
HEAD_MAGIC, HEAD_SEATS, HEAD_WAKE, HEAD_HANG, HEAD_USED, HEAD_CLOSED = 0, 1, 2, 3, 4, 5  # words of the head
HEAD_MARKS = 8  # then one of each seat
SEAT_BEAT, SEAT_STEP, SEAT_WHO, SEAT_RANK, SEAT_REST, SEAT_STANDS, SEAT_BEFORE = 0, 1, 2, 5, 6, 7, 8  # words of a seat
SEAT_STEP_AT, SEAT_STEP_COUNT = 9, 10  # when the last step was reported; how many durations of steps were stored so far
SEAT_STEP_TIMES = 11  # then the latest `STEP_TIMES` of them: number n, from 0 on, is in word n % STEP_TIMES
STEP_TIMES = 32
FIRST = SEAT_STEP_TIMES + STEP_TIMES  # then the slots
RESTS = 1  # in SEAT_REST: no heartbeat is expected from the seat, nor from processes below its own
BREAKPOINT = "breakpoint"  # the scope of the slot at which a process stands; SEAT_STANDS has its number, or 0
TEXT_SIZE = TEXT_LIMIT + 2
TEXTS = (FIRST + 3 * SLOTS) * 8  # bytes before the texts: deadlines, spans, threads
# A word of flags is read by the highest one that is set. It stands for the number of seats, from the first one on, that
# may be in use (the last flag: all), or for the number of slots of a seat.
SEATS_IN_USE = (16, 64, 256, 1024, 2048, 4096, 8192, 1 << 62)
SLOTS_IN_USE = (0, 4, 16, 64, 128, 256, 512, SLOTS)

_SEPARATOR = b"\x1f"


def round_up(size: int) -> int:
    """Round ``size`` up to a multiple of what can be mapped by itself."""
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


SEAT_SIZE = round_up(TEXTS + SLOTS * TEXT_SIZE)
"""The bytes of one seat."""


def head_size(seats: int) -> int:
    """Return the bytes of the head of a table, and of its marks."""
    return round_up((HEAD_MARKS + seats) * 8)


def flag(levels: tuple[int, ...], count: int) -> int:
    """Return which byte of a word of flags stands for the first ``count`` being in use."""
    level = next(number for number, most in enumerate(levels) if count <= most)
    return level if sys.byteorder == "little" else 7 - level


def process_image(pid: int | str) -> tuple[int, int, int]:
    """Identify a process and the program in it: pid, start time, and the address at which its stack begins.

    The address is random for each execve(2), and 0 where we may not read it (proc_pid_stat(5)). Raises OSError.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        head, _, tail = file.read().rpartition(b")")
    fields = tail.split()
    return int(head.split(None, 1)[0]), int(fields[19]), int(fields[25]) & NEVER


def is_alive(image: tuple[int, ...]) -> bool:
    """Whether the process recorded in a seat is still alive, and has not executed another program."""
    try:
        return image[0] > 0 and image[2] != 0 and process_image(image[0]) == image
    except OSError:
        return False


def encode(scope: str, location: str) -> bytes:
    """Encode the text of a slot, behind its length.

    If it is too long, the middle of the scope and the head of the location are cut out.

    >>> decode(encode("load", "train.py:7"))
    ('load', 'train.py:7')
    >>> scope, location = decode(encode("s" * 300, "/very/long" * 50 + "/train.py:7"))
    >>> scope[:3], scope[-3:], location[-11:], len(scope + location) < TEXT_LIMIT
    ('sss', 'sss', '/train.py:7', True)
    """
    first, second = (text.encode("utf-8", "replace") for text in (scope, location))
    room = TEXT_LIMIT - 1
    if len(first) + len(second) > room:
        if len(second) > room // 2:
            second = "…".encode() + second[-max(room // 2, room - len(first)) + 3 :]
        if len(first) > room - len(second):
            half = (room - len(second) - 3) // 2
            first = first[:half] + "…".encode() + first[-half:]
    text = first + _SEPARATOR + second
    return len(text).to_bytes(2, sys.byteorder) + text


def decode(text: bytes) -> tuple[str, str]:
    """Return the scope and the location that `encode` was given. What follows them is ignored. Never raises."""
    scope, _, location = text[2 : 2 + int.from_bytes(text[:2], sys.byteorder)].partition(_SEPARATOR)
    return scope.decode("utf-8", "ignore"), location.decode("utf-8", "ignore")
