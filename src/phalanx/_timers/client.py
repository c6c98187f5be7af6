"""The worker's end of a timer table: a process takes a seat in the shared memory, and arms timers by storing words.

A timer is armed or disarmed without a system call, unless its deadline is earlier than the watcher's next look: then
the client writes a byte to the watcher's pipe (the bell). It also does so if the published moment of that look is long
over, to learn from EPIPE that nobody watches.

The memory is a memfd and the bell a pipe, both of the process that made the table. A client opens them as
/proc/PID/fd/N, so a worker that has no timers inherits nothing.

The holder of a seat has a record lock on it (fcntl(2)), which the kernel releases when the process ends, in whatever
way. So a client may die at any instruction. A program that closes all its descriptors loses the lock but keeps running:
its seat stays taken as long as the process image recorded in it lives.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys
from _thread import get_ident

from phalanx._base import clock, linux
from phalanx._timers.layout import (
    ATTACHED,
    BREAKPOINT,
    FIRST,
    HEAD_CLOSED,
    HEAD_HANG,
    HEAD_MARKS,
    HEAD_USED,
    HEAD_WAKE,
    LATE,
    LONGEST,
    MAGIC,
    NEVER,
    RESTS,
    SEAT_BEAT,
    SEAT_BEFORE,
    SEAT_RANK,
    SEAT_REST,
    SEAT_SIZE,
    SEAT_STANDS,
    SEAT_STEP,
    SEAT_STEP_AT,
    SEAT_STEP_COUNT,
    SEAT_STEP_TIMES,
    SEAT_WHO,
    SEATS_IN_USE,
    SLOTS,
    SLOTS_IN_USE,
    STEP_TIMES,
    TEXT_SIZE,
    TEXTS,
    TIMERS_ENV,
    encode,
    flag,
    head_size,
    is_alive,
    process_image,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

_FLAG_OF = [flag(SLOTS_IN_USE, max(0, slot - FIRST + 1)) for slot in range(FIRST + SLOTS)]

_NOTHING = (None,) * 7  # in `Seat.known`

_taken: set[Seat] = set()  # the seats of this process


def _detach_all() -> None:
    """In a fork: detach from the seats, which stay the parent's."""
    for seat in _taken:
        seat.detach()
    _taken.clear()


os.register_at_fork(after_in_child=_detach_all)


def file_identity(fd: int) -> tuple[int, int]:
    """Return the device and inode of the file behind a descriptor; (0, 0) if it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


class Seat:
    """The part of a timer table that this process writes. Thread-safe: a slot belongs to the thread that armed it.

    ``words`` and ``head`` are there for `phalanx.timer.expires`, which stores by itself what `arm` and `disarm` store.

    Args:
        address: The table's address and the rank: ``PID:MEMORY:BELL:RANK``.

    Attributes:
        expected: Whether heartbeats are expected here.
        last_step: The last step that was reported; 0: none was.
        known: What the last timer of each slot was about, as `phalanx.timer.expires` has it: it stores what differs.

    Raises:
        ValueError: The address has another form.
        OSError: There is no such table, or no seat is left.
    """

    def __init__(self, address: str) -> None:
        try:
            pid, memory, bell, rank = (int(part) for part in address.split(":"))
        except ValueError:
            msg = f"{TIMERS_ENV}: expected PID:MEMORY:BELL:RANK, got {address!r}"
            raise ValueError(msg) from None
        self._fds: list[int] = []
        self._files: list[tuple[int, int]] = []  # a program that closes all descriptors reuses their numbers
        self._maps: list[mmap.mmap] = []
        try:
            self._open(f"/proc/{pid}/fd/", memory, bell)
            self._take_seat(rank)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: str, memory: int, bell: int) -> None:
        self._bell = f"{folder}{bell}"
        try:
            for path, flags in ((f"{folder}{memory}", os.O_RDWR), (self._bell, os.O_WRONLY | os.O_NONBLOCK)):
                self._fds.append(os.open(path, flags | os.O_CLOEXEC))
                self._files.append(file_identity(self._fds[-1]))
            magic, self._seats = struct.unpack("qq", os.pread(self._fds[0], 16, 0))
            if magic != MAGIC:
                raise OSError(errno.EINVAL, "that is no table of timers")  # noqa: TRY301 - worded below, as the others
        except (OSError, struct.error) as error:
            why = getattr(error, "strerror", None) or str(error)
            msg = f"the launcher's table of timers cannot be opened ({folder}{memory}: {why}); is the launcher there?"
            raise OSError(getattr(error, "errno", 0) or errno.EINVAL, msg) from None
        self._maps.append(mmap.mmap(self._fds[0], head_size(self._seats)))
        self.head = memoryview(self._maps[0]).cast("q")

    def _take_seat(self, rank: int) -> None:
        start = rank % self._seats
        for seat in (*range(start, self._seats), *range(start)):
            try:
                fcntl.lockf(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, seat)
            except (BlockingIOError, PermissionError):
                continue
            if not self._is_used_without_lock(seat):
                break
            fcntl.lockf(self._fds[0], fcntl.LOCK_UN, 1, seat)
        else:
            raise OSError(errno.ENOSPC, f"{self._seats} processes of the group have timers already: that is the most")
        self._mark = HEAD_MARKS + seat
        self.head[self._mark] = 0
        self._flags = self.head.cast("B")
        self._flags[HEAD_USED * 8 + flag(SEATS_IN_USE, seat + 1)] = 1
        whole = mmap.mmap(self._fds[0], SEAT_SIZE, offset=head_size(self._seats) + seat * SEAT_SIZE)
        self._maps.append(whole)
        words = memoryview(whole).cast("q")
        # A heartbeat counts for the rank, and so does the end of a block, also of a process that has ended since.
        last = max(words[SEAT_BEAT], words[SEAT_BEFORE])
        before = last if words[SEAT_RANK] == rank and 0 < last <= clock.now_ns() else 0
        first = bytes(SEAT_BEFORE * 8) + before.to_bytes(8, sys.byteorder) + bytes((FIRST - SEAT_BEFORE - 1) * 8)
        # In one step: a look that has begun before must not find a deadline of 0.
        whole[:TEXTS] = first + NEVER.to_bytes(8, sys.byteorder) * SLOTS + bytes(2 * SLOTS * 8)
        self._memory: mmap.mmap | bytearray = whole
        self.words = words
        self.words[SEAT_RANK] = rank
        for word, part in enumerate(process_image("self"), SEAT_WHO):
            self.words[word] = part
        self.expected = self.head[HEAD_HANG] != NEVER
        self.last_step = 0
        self._step_from = 0  # when the step began that goes on, and later by the time that does not count; 0: unknown
        self._timed = 0  # steps
        self._out_since = 0  # since when the time does not count; 0: it does
        self._waits = 0  # blocks of `wait` that are entered, in all threads
        self.free = list(range(FIRST + SLOTS - 1, FIRST - 1, -1))
        self.known: list[tuple[Any, ...]] = [_NOTHING] * (FIRST + SLOTS)
        self._standing: list[int] = []  # the slots of breakpoints at which threads of this process stand
        self._flags[self._mark * 8 + _FLAG_OF[0]] = 1
        _taken.add(self)

    def _is_used_without_lock(self, seat: int) -> bool:
        """Whether an unlocked seat is in use all the same, by a process that has closed all its descriptors."""
        mark = self.head[HEAD_MARKS + seat]
        start = head_size(self._seats) + seat * SEAT_SIZE
        image = struct.unpack("qqq", os.pread(self._fds[0], 24, start + SEAT_WHO * 8))
        return bool(mark) and is_alive(image)

    def arm(self, deadline: int, span: int, text: bytes, thread: int = 0) -> int:
        """Set a deadline in a free slot, and return the slot, to be disarmed. Raises RuntimeError if no slot is free.

        Args:
            deadline: Nanoseconds of CLOCK_MONOTONIC.
            span: Nanoseconds that the timer has in all.
            text: Scope and location, see `layout.encode`.
            thread: The id of the thread that is in the block; 0: unknown.
        """
        try:
            slot = self.free.pop()
        except IndexError:
            msg = f"{SLOTS} timers run in this process: that is the most"
            raise RuntimeError(msg) from None
        self.describe(slot, text, span, thread)
        self.words[slot] = deadline
        if not deadline - span - LATE <= self.head[HEAD_WAKE] <= deadline:
            try:
                self.wake_watcher()
            except BaseException:
                self.disarm(slot)
                raise
        return slot

    def disarm(self, slot: int) -> None:
        """Clear the deadline of an armed slot, and free the slot."""
        self.words[slot] = NEVER
        self.free.append(slot)
        if self.expected:
            self.record_block_end()

    def record_block_end(self) -> None:
        """Count the end of a block as a heartbeat: of this process if it sends any, else of its rank alone."""
        words = self.words
        if words[SEAT_BEAT]:
            self.beat(words[SEAT_STEP], wakes=False)
        else:  # the block had extended the rank's limit; the watcher looks again soon enough, see `TimerTable.look`
            words[SEAT_BEFORE] = clock.now_ns()

    def describe(self, slot: int, text: bytes, span: int, thread: int) -> None:
        """Store what the timers of a free slot are about from now on; see `arm`."""
        self.write_text(slot, text)
        words = self.words
        words[slot + SLOTS] = span
        words[slot + 2 * SLOTS] = thread

    def write_text(self, slot: int, text: bytes) -> None:
        """Store the scope and location of a slot; that of a breakpoint follows the person who steps."""
        self.known[slot] = _NOTHING
        at = TEXTS + (slot - FIRST) * TEXT_SIZE
        self._memory[at : at + len(text)] = text
        self._flags[self._mark * 8 + _FLAG_OF[slot]] = 1

    def beat(self, step: int, *, wakes: bool = True) -> None:
        """Record a heartbeat. With ``wakes`` it also ends a rest; the end of a block does not."""
        now = clock.now_ns()
        words, head = self.words, self.head
        if step:  # a beat without one leaves the last one
            words[SEAT_STEP] = step
        words[SEAT_BEAT] = now
        if wakes and words[SEAT_REST]:
            words[SEAT_REST] = 0
            self._end_rest(now, is_step=bool(step and step != self.last_step))
        if step and step != self.last_step:
            self._end_step(now)
        if not now - LATE <= head[HEAD_WAKE] <= now + head[HEAD_HANG]:
            try:
                self.wake_watcher()
            except RuntimeError:  # nobody watches: a heartbeat does not depend on it
                pass

    def rest(self) -> bool:
        """Suspend the heartbeats until the next one. Returns whether they ran."""
        words = self.words
        ran = bool(words[SEAT_BEAT] and not words[SEAT_REST])
        words[SEAT_REST] = RESTS
        self._out_since = self._out_since or clock.now_ns()
        return ran

    # --- how long steps take

    def _end_step(self, now: int) -> None:
        """Store how long the step took that ends now, if its beginning is known. A jump is of so many equal steps."""
        words, count = self.words, self._timed
        step = words[SEAT_STEP]  # an int, whatever kind of number was given
        steps, took = step - self.last_step, now - self._step_from
        self.last_step = step
        if self._out_since:  # another thread waits, or this one reports the step within the block
            took -= now - self._out_since
            self._out_since = now
        if self._step_from:
            if steps == 1:
                words[SEAT_STEP_TIMES + count % STEP_TIMES] = took
                self._timed = words[SEAT_STEP_COUNT] = count + 1
            elif steps > 1:
                for number in range(count, count + min(steps, STEP_TIMES)):
                    words[SEAT_STEP_TIMES + number % STEP_TIMES] = took // steps
                self._timed = words[SEAT_STEP_COUNT] = min(count + steps, LONGEST)
        self._step_from = words[SEAT_STEP_AT] = now

    def _end_rest(self, now: int, *, is_step: bool) -> None:
        """Go on with the step that a rest has interrupted; if it ends with the rest, nobody knows how long it took."""
        if is_step:
            self._step_from = 0
        if not self._waits:
            self._go_on_with_step(now)

    def _go_on_with_step(self, now: int) -> None:
        since, self._out_since = self._out_since, 0
        if since and self._step_from:
            self._step_from += now - since

    def wait(self) -> None:
        """Take the time from now on out of the step that goes on, until `end_wait` was called as often."""
        self._waits += 1
        self._out_since = self._out_since or clock.now_ns()

    def end_wait(self) -> None:
        """End a `wait`."""
        self._waits -= 1
        if not self._waits and not self.words[SEAT_REST]:
            self._go_on_with_step(clock.now_ns())

    def stand(self, location: str, seconds: float) -> int:
        """Record that a thread of this process stands at a breakpoint, and return its slot, for `go_on`.

        All other timers and heartbeats of the group rest meanwhile. Raises RuntimeError as `arm`.

        Args:
            location: Where it stands, as ``FILE:LINE``.
            seconds: The time after which the breakpoint itself counts as a hang.
        """
        span = int(min(seconds * clock.NS, LONGEST))
        slot = self.arm(clock.now_ns() + span, span, encode(BREAKPOINT, location), get_ident())
        self._standing.append(slot)
        self.words[SEAT_STANDS] = slot
        try:
            self.wake_watcher()
        except BaseException:
            self.go_on(slot)
            raise
        return slot

    def attach(self, slot: int, *, attached: bool = True, seconds: float = 0.0) -> None:
        """Record that somebody has attached to the breakpoint of this slot: it is no hang, however long that takes.

        With ``attached`` False: that nobody is attached any more, and that the time is ``seconds`` from now on.
        """
        span = int(min(seconds * clock.NS, LONGEST))
        self.words[slot + SLOTS] = span
        self.words[slot] = ATTACHED if attached else clock.now_ns() + span
        self._wake_if_watched()

    def go_on(self, slot: int) -> None:
        """Record that the thread that `stand` returned this slot for goes on."""
        self._standing.remove(slot)
        self.words[SEAT_STANDS] = self._standing[-1] if self._standing else 0
        self.disarm(slot)
        self._wake_if_watched()

    def _wake_if_watched(self) -> None:
        try:
            self.wake_watcher()
        except RuntimeError:  # nobody watches any more
            pass

    def wake_watcher(self) -> None:
        """Have the watcher look now. Raises RuntimeError if no process watches any more."""
        gone = "nobody watches timers any more: their server has stopped"
        if self.head[HEAD_CLOSED]:
            raise RuntimeError(gone)
        try:
            if file_identity(self._fds[1]) == self._files[1]:
                linux.write_to_pipe(self._fds[1], b"\0")
            else:
                self._wake_by_path()
        except BrokenPipeError:
            raise RuntimeError(gone) from None
        except (OSError, IndexError):  # the pipe is full, so the watcher wakes anyway; or this seat is closed
            pass

    def _wake_by_path(self) -> None:
        """Open the bell anew: the program has closed the descriptor, and its number may be another file's."""
        bell = os.open(self._bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if file_identity(bell) == self._files[1]:
                linux.write_to_pipe(bell, b"\0")
        finally:
            os.close(bell)

    def detach(self) -> None:
        """Redirect later writes to private memory: in a fork the seat stays the parent's."""
        self._memory = bytearray(SEAT_SIZE)
        self.words = memoryview(self._memory).cast("q")
        self.head = memoryview(bytearray(len(self.head) * 8)).cast("q")
        self._flags = self.head.cast("B")

    def close(self) -> None:
        """Leave the seat. Later writes go to private memory; `arm` raises RuntimeError. Idempotent."""
        if self in _taken:
            self.head[self._mark] = 0
            _taken.discard(self)
        if hasattr(self, "head"):
            self.detach()
            self.head[HEAD_CLOSED] = 1
        for each in self._maps:
            try:
                each.close()
            except BufferError:  # a memoryview of it still exists; it is unmapped with that
                pass
        self._maps.clear()
        while self._fds:
            fd = self._fds.pop()
            if file_identity(fd) == self._files.pop():  # else the number is another file's by now
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
