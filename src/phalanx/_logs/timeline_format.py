"""The format of a timeline: when the bytes of an attempt's log files were written. Bytes to records and back; pure.

A log file holds what the worker wrote and nothing else. To merge the files of many ranks in the order of time later,
their times of writing must be known: so the pump, which sees every growth as it happens, notes it in the timeline.

The file begins with `MAGIC` and the wall clock's time (64 bits, little-endian, nanoseconds since the epoch). Records
follow, each of three numbers in groups of 7 bits (LEB128, 63 bits at most): milliseconds since the record before; four
times the stream (which is twice the local rank, plus one for stderr) plus the kind; and a value:

- `GREW`: bytes by which the file grew (uncompressed).
- `CUT`: the file was cut short. What was noted of it before is no longer in it; its growth since follows.
- `ROTATED`: what was noted of the file since the last such record is in the rotated file of this number. It comes once
  with 0 for a log that is rotated, before anything is noted of it; others have no rotated files.
- `CLOCK`: the wall clock's time in nanoseconds. Milliseconds are counted on CLOCK_MONOTONIC, which stops while the
  machine is suspended and does not follow when the wall clock is set: so the wall clock is noted anew when the two have
  come apart by `APART`. Times can go back, as the wall clock does; records are in the order of writing.

So a time is that of the pump's look at the file, within 0.02 s: that much is shared by growths that are close together,
and as much may the clocks be apart. A cut is seen by the file's size: one after which the file has grown beyond its
former size before the next look is not seen.

The formats `phalanx1` and `phalanx2`, which no release has written, are not read any more.
"""

from __future__ import annotations

import struct

Record = tuple[float, int, int, int]
"""Seconds since the epoch; the kind; the stream; and the bytes or the number."""

NAME = "timeline"
"""The name of the file in an attempt's folder."""

MAGIC = b"phalanx3"
HEAD = struct.Struct("<8sQ")

GREW, CUT, ROTATED, CLOCK = range(4)
KINDS = 4
"""How many there are: a record has four times the stream, plus the kind."""

APART = 0.01
"""Seconds by which a time may be wrong, because wall clock and monotonic clock have come apart."""

_MOST_DIGITS = 9  # groups of 7 bits
_BITS, _MORE = 7, 0x80


def pack(*numbers: int) -> bytes:
    r"""Pack numbers (>= 0) in groups of 7 bits, the lowest first; all but a number's last group have the eighth bit.

    >>> pack(1, 300)
    b'\x01\xac\x02'
    """
    groups = bytearray()
    for number in numbers:
        left = number
        while left >= _MORE:
            groups.append(left & ~_MORE & 0xFF | _MORE)
            left >>= _BITS
        groups.append(left)
    return bytes(groups)


def unpack(data: bytes) -> tuple[list[tuple[int, int, int]], int, bool]:
    """Unpack whole records. Returns them, the bytes that they take, and whether none of them is damaged.

    A hole in a file reads as zeros, which are no record.
    """
    found: list[tuple[int, int, int]] = []
    offset = used = 0
    numbers = [0, 0, 0]
    try:
        while True:
            for index in (0, 1, 2):
                byte = data[offset]
                offset += 1
                if byte < _MORE:
                    numbers[index] = byte
                    continue
                number, shift = byte & ~_MORE, _BITS
                while byte >= _MORE:
                    byte = data[offset]
                    offset += 1
                    number |= (byte & ~_MORE) << shift
                    shift += _BITS
                    if shift > _BITS * _MOST_DIGITS:
                        return found, used, False
                numbers[index] = number
            if not numbers[2] and not numbers[1]:
                return found, used, False
            found.append((numbers[0], numbers[1], numbers[2]))
            used = offset
    except IndexError:
        return found, used, True
