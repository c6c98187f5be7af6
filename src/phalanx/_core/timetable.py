"""The table of deadlines, in memory that workers share with the one who watches: its layout, and both of its ends.

To set or clear a deadline is to store a word. A process that takes timers holds a *seat*, a part of the table that it
alone writes; every timer that it has running is a *slot* of it. Which process holds a seat is not what the seat says
but what the kernel says: the holder has a record lock on it (fcntl(2)), which goes with the process, however
it ends. So a client may die at any instruction: what it leaves behind belongs to nobody. A program that closes every
descriptor loses the lock and goes on: such a seat is still that of the very process image which it says has taken it.

The watcher publishes when it will look next. Who sets an earlier deadline rings, and who finds that moment long over,
to learn whether anybody watches; all others need no system call. The watcher looks again after publishing, for the
deadlines that were set meanwhile with the old moment in view.

The memory is a memfd and the bell a pipe, both of the process that made the table; workers open them as /proc/PID/fd/N,
so nothing is inherited that a worker does not use. A group's keeper, which watches, is sent them. Knows nothing of what
follows when a deadline is over.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys

from phalanx._core import clock, sigpipe
from phalanx._core.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

ENV = "PHALANX_TIMERS"
"""The environment variable that tells a worker where the table is."""

NEVER = (1 << 63) - 1
"""The deadline of a slot that is free."""

LONGEST = 1 << 61
"""The longest time in nanoseconds that is told apart from a longer one: 73 years."""

SLOTS = 1024
"""The most timers that one process can have at a time."""

TEXT_LIMIT = 254
"""The most bytes that are kept of a timer's scope and place together."""

LATE = clock.NS
"""Nanoseconds after the published moment of its next look after which a watcher is asked whether it is there."""

_MAGIC = int.from_bytes(b"phalanx1", "little")
_HEAD_MAGIC, _HEAD_SEATS, HEAD_WAKE, HEAD_HANG, _HEAD_CLOSED, _HEAD_MARKS = 0, 1, 2, 3, 7, 8  # words of the head
SEAT_BEAT, SEAT_STEP, _SEAT_WHO, _SEAT_RANK, FIRST = 0, 1, 2, 5, 8  # words of a seat; its first slot is number FIRST
_TEXT_SIZE = TEXT_LIMIT + 2
_TEXTS = (FIRST + 3 * SLOTS) * 8  # deadlines, spans, threads; then the texts
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_BETWEEN = b"\x1f"

Key = tuple[int, int, int]
"""What tells a timer that is set from every other one: its seat, its slot (0: the heartbeat) and its deadline."""

_taken: set[Seat] = set()  # the seats of this process
_held: set[Timetable] = set()  # the tables that this process watches, or has made
_hooked = False


def _hook() -> None:
    global _hooked  # noqa: PLW0603 - hooks are the process's
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    """In a fork: it has none of its parent's seats, and watches nothing.

    A fork that kept the bell's other end would keep the parent's clients from noticing its end: they would ring, and no
    EPIPE would come. (One that C code makes behind Python's back does keep it; hence the word that `close` leaves.)
    """
    for seat in _taken:
        seat.drift()
    _taken.clear()
    for table in list(_held):
        table.let_go()


def _image(pid: int | str) -> tuple[int, int, int]:
    """What tells a process, and the program in it, from every other: pid, start time, and where its stack begins.

    The last is random for each execve(2), and 0 where we may not know it (proc_pid_stat(5)). Raises OSError.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        head, _, tail = file.read().rpartition(b")")
    fields = tail.split()
    return int(head.split(None, 1)[0]), int(fields[19]), int(fields[25]) & NEVER


def _lives(who: tuple[int, ...]) -> bool:
    """Whether what a seat says of who has taken it is true yet."""
    try:
        return who[0] > 0 and who[2] != 0 and _image(who[0]) == who
    except OSError:
        return False


def _file(fd: int) -> tuple[int, int]:
    """Which file a descriptor is; none, if it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _whole(size: int) -> int:
    """``size``, rounded up to what can be mapped by itself."""
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


_SEAT_SIZE = _whole(_TEXTS + SLOTS * _TEXT_SIZE)


def encode(scope: str, place: str) -> bytes:
    """What a slot says about its timer. Of what is too long, the middle of the scope goes, and the head of the place.

    >>> decode(encode("load", "train.py:7"))
    ('load', 'train.py:7')
    >>> scope, place = decode(encode("s" * 300, "/very/long" * 50 + "/train.py:7"))
    >>> scope[:3], scope[-3:], place[-11:], len(scope + place) < TEXT_LIMIT
    ('sss', 'sss', '/train.py:7', True)
    """
    first, second = (text.encode("utf-8", "replace") for text in (scope, place))
    room = TEXT_LIMIT - 1
    if len(first) + len(second) > room:
        if len(second) > room // 2:
            second = "…".encode() + second[-max(room // 2, room - len(first)) + 3 :]
        if len(first) > room - len(second):
            half = (room - len(second) - 3) // 2
            first = first[:half] + "…".encode() + first[-half:]
    return first + _BETWEEN + second


def decode(text: bytes) -> tuple[str, str]:
    """The scope and the place that `encode` was given. Never raises."""
    scope, _, place = text.partition(_BETWEEN)
    return scope.decode("utf-8", "ignore"), place.decode("utf-8", "ignore")


class Timer(Value):
    """A timer as the watcher sees it. ``slot`` 0 is the heartbeat; times are CLOCK_MONOTONIC in nanoseconds."""

    __slots__ = ("seat", "slot", "deadline", "span", "thread", "scope", "place", "step")  # noqa: RUF023 - as the arguments

    seat: int
    slot: int
    deadline: int
    span: int
    thread: int
    scope: str
    place: str
    step: int

    def __init__(
        self, seat: int, slot: int, deadline: int, span: int, thread: int, scope: str, place: str, step: int = 0
    ) -> None:
        self._store(
            seat=seat, slot=slot, deadline=deadline, span=span, thread=thread, scope=scope, place=place, step=step
        )


class Timetable:
    """The watcher's end. Raises OSError when there is no memory, or no descriptor, for it.

    Args:
        seats: How many processes can have timers at a time.
        hang: Seconds after a process's last heartbeat when it counts as hung, or None.

    >>> table = Timetable(4)
    >>> seat = Seat(f"{table.address}:0")
    >>> slot = seat.take(deadline=5, span=3, text=encode("load", "train.py:7"))
    >>> (key,), _then = table.look(now=5)
    >>> timer = table.read(key)
    >>> timer.scope, timer.deadline
    ('load', 5)
    >>> seat.give(slot); table.look(now=5)
    ([], 9223372036854775807)
    >>> seat.close(); table.close()
    """

    def __init__(self, seats: int, hang: float | None = None) -> None:
        span = NEVER if hang is None else min(int(hang * clock.NS), LONGEST)
        fds: list[int] = []
        try:
            fds.append(os.memfd_create("phalanx-timers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.truncate(fds[0], _whole((_HEAD_MARKS + seats) * 8) + seats * _SEAT_SIZE)
            # Whoever has it open could cut it short otherwise, and our next look would be a SIGBUS.
            fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            fds += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            head = struct.pack("4q", _MAGIC, seats, NEVER, span)  # in the order of the words of the head
            os.pwrite(fds[0], head, 0)
            self._hold(fds, seats, span)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self._address = f"{os.getpid()}:{fds[0]}:{fds[2]}"

    @classmethod
    def of(cls, fds: tuple[int, int], seats: int, hang: int) -> Self:
        """The table that another process has made, by duplicates of its `descriptors`, ours then, and its `size`.

        Raises OSError, with the descriptors closed.
        """
        table = cls.__new__(cls)
        try:
            table._hold(list(fds), seats, hang)  # noqa: SLF001 - of this very class
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return table

    def _hold(self, fds: list[int], seats: int, hang: int) -> None:
        self._map = mmap.mmap(fds[0], 0)
        self._words = memoryview(self._map).cast("q")
        self._fds = fds
        self.seats = seats
        self._hang = hang
        self._head = _whole((_HEAD_MARKS + seats) * 8)
        self._known: dict[int, int] = {}
        self._address = ""
        _hook()
        _held.add(self)

    @property
    def descriptors(self) -> tuple[int, int]:
        """The memory, and the end of the bell that is to be heard."""
        return self._fds[0], self._fds[1]

    @property
    def size(self) -> tuple[int, int]:
        """Its seats, and the nanoseconds after a heartbeat (or `NEVER`): not from the memory, where workers write."""
        return self.seats, self._hang

    @property
    def address(self) -> str:
        """Where `Seat` finds the table, if a rank is added: ``ADDRESS:RANK``.

        Empty, unless this is the process that has made it, or a fork of it, which may be a client.
        """
        return self._address

    def fileno(self) -> int:
        """The bell: readable once somebody has set a deadline earlier than `publish` has said."""
        return self._fds[1]

    def hear(self) -> None:
        """Take what was rung. Not until there is no more: who rings without end must not hold us up."""
        try:
            os.read(self._fds[1], 1 << 16)
        except BlockingIOError:
            pass

    def publish(self, moment: int) -> None:
        """Say when the next look will be. Look again after that.

        The store must be seen by others before the look reads what they store; they, in turn, set a deadline before
        they read this. No fence orders a store and a later load here: what does is that the look takes ten thousand
        times as long as a processor keeps a store to itself.
        """
        self._words[HEAD_WAKE] = moment

    def look(self, now: int) -> tuple[list[Key], int]:
        """The timers whose deadline is over at ``now``, and the earliest deadline of the others (or `NEVER`)."""
        words, then = self._words, NEVER
        due: list[Key] = []
        for seat, mark in enumerate(words[_HEAD_MARKS : _HEAD_MARKS + self.seats].tolist()):
            if not 0 < mark <= SLOTS + 1:
                continue
            base = (self._head + seat * _SEAT_SIZE) // 8
            slots = words[base + FIRST : base + FIRST + mark - 1]
            low = min(slots, default=NEVER)
            if low <= now:
                for slot, deadline in enumerate(slots.tolist(), FIRST):
                    if deadline <= now:
                        due.append((seat, slot, deadline))
                    else:
                        then = min(then, deadline)
            else:
                then = min(then, low)
            beat = words[base + SEAT_BEAT]
            if beat and self._hang != NEVER:
                limit = beat + self._hang
                if limit <= now:
                    limit = self._extended(limit, slots)
                if limit <= now:
                    due.append((seat, 0, limit))
                else:
                    then = min(then, limit)
        return due, then

    def still(self, timer: Timer) -> bool:
        """Whether a timer has been neither cleared nor set anew."""
        base = (self._head + timer.seat * _SEAT_SIZE) // 8
        if not timer.slot:
            beat = self._words[base + SEAT_BEAT]
            slots = self._words[base + FIRST : base + FIRST + SLOTS]
            return bool(beat) and self._extended(beat + self._hang, slots) <= timer.deadline
        return self._words[base + timer.slot] == timer.deadline

    @staticmethod
    def _extended(limit: int, slots: memoryview) -> int:
        """The moment when a heartbeat is late: a scope that may take longer puts it off."""
        return max([limit, *(deadline for deadline in slots.tolist() if deadline != NEVER)])

    def news(self) -> list[Key]:
        """The timers in slots that had never been in use when this was asked before."""
        new = []
        for seat, mark in enumerate(self._words[_HEAD_MARKS : _HEAD_MARKS + self.seats].tolist()):
            before = self._known.get(seat, 1)
            if before < mark <= SLOTS + 1:
                self._known[seat] = mark
                base = (self._head + seat * _SEAT_SIZE) // 8
                slots = range(FIRST + before - 1, FIRST + mark - 1)
                new += [(seat, slot, self._words[base + slot]) for slot in slots]
        return [key for key in new if key[2] != NEVER]

    def read(self, key: Key) -> Timer | None:
        """What a timer is about; None if it has been cleared, or set anew."""
        seat, slot, deadline = key
        start = self._head + seat * _SEAT_SIZE
        if not slot:
            return Timer(seat, 0, deadline, self._hang, 0, "heartbeat", "", self._words[start // 8 + SEAT_STEP])
        word = start // 8 + slot
        text = start + _TEXTS + (slot - FIRST) * _TEXT_SIZE
        size = min(int.from_bytes(self._map[text : text + 2], sys.byteorder), TEXT_LIMIT)
        scope, place = decode(self._map[text + 2 : text + 2 + size])
        span, thread = self._words[word + SLOTS], self._words[word + 2 * SLOTS]
        return Timer(seat, slot, deadline, span, thread, scope, place) if self._words[word] == deadline else None

    def holder(self, seat: int) -> int:
        """The process that has a seat, as the kernel knows it; 0: nobody.

        Not one that is about to take it: what the seat has yet is of the one before.
        """
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, seat, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fds[0], fcntl.F_GETLK, asked))
        word = (self._head + seat * _SEAT_SIZE) // 8 + _SEAT_WHO
        who = tuple(self._words[word : word + 3])
        if kind != fcntl.F_UNLCK:
            return who[0] if who[0] == pid else 0
        # Nobody, or this process (its own locks are not in its way), or one that has closed all its descriptors.
        return who[0] if who[0] == os.getpid() or _lives(who) else 0

    def rank(self, seat: int) -> int:
        """The rank that the holder of a seat says it belongs to."""
        return self._words[(self._head + seat * _SEAT_SIZE) // 8 + _SEAT_RANK]

    def latest_beats(self) -> dict[int, int]:
        """The last heartbeat of each rank: of all processes that say they belong to it."""
        latest: dict[int, int] = {}
        for seat, mark in enumerate(self._words[_HEAD_MARKS : _HEAD_MARKS + self.seats].tolist()):
            if mark:
                rank, beat = self.rank(seat), self._words[(self._head + seat * _SEAT_SIZE) // 8 + SEAT_BEAT]
                latest[rank] = max(latest.get(rank, 0), beat)
        return latest

    def close(self) -> None:
        """Give the memory and the descriptors back: whoever takes a timer then is told. Idempotent.

        Nobody is told of the end of one that another process has made: a group's workers may use the time of grace.
        """
        try:
            if self._address:
                self._words[_HEAD_CLOSED] = 1
            self._words[HEAD_WAKE] = NEVER
        except ValueError:  # done before, or this is a fork
            pass
        self.let_go()

    def let_go(self) -> None:
        """Give the memory and the descriptors back, and leave the table as it is: a fork does that. Idempotent."""
        _held.discard(self)
        self._words.release()
        try:
            self._map.close()
        except BufferError:  # a traceback has a view of it yet: it goes with that
            pass
        while self._fds:
            os.close(self._fds.pop())


class Seat:
    """A worker's end: what one process writes. Thread-safe: a slot belongs to the thread that took it.

    ``words`` and ``head`` are there for `phalanx.timer.expires`, which stores by itself what `take` and `give` store.

    Args:
        address: As `Timetable.address`, and the rank: ``PID:MEMORY:BELL:RANK``.

    Raises:
        ValueError: The address is none.
        OSError: There is no such table, or no seat is left.
    """

    def __init__(self, address: str) -> None:
        try:
            pid, memory, bell, rank = (int(part) for part in address.split(":"))
        except ValueError:
            msg = f"{ENV}: expected PID:MEMORY:BELL:RANK, got {address!r}"
            raise ValueError(msg) from None
        _hook()
        self._fds: list[int] = []
        self._files: list[tuple[int, int]] = []  # which files they are: a program that closes all has others there
        self._maps: list[mmap.mmap] = []
        try:
            self._open(f"/proc/{pid}/fd/", memory, bell)
            self._sit(rank)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: str, memory: int, bell: int) -> None:
        self._bell = f"{folder}{bell}"
        try:
            for path, flags in ((f"{folder}{memory}", os.O_RDWR), (self._bell, os.O_WRONLY | os.O_NONBLOCK)):
                self._fds.append(os.open(path, flags | os.O_CLOEXEC))
                self._files.append(_file(self._fds[-1]))
            magic, self._seats = struct.unpack("qq", os.pread(self._fds[0], 16, 0))
            if magic != _MAGIC:
                raise OSError(errno.EINVAL, "that is no table of timers")  # noqa: TRY301 - told below, as the others
        except (OSError, struct.error) as error:
            why = getattr(error, "strerror", None) or str(error)
            msg = f"the launcher's table of timers cannot be opened ({folder}{memory}: {why}); is the launcher there?"
            raise OSError(getattr(error, "errno", 0) or errno.EINVAL, msg) from None
        self._maps.append(mmap.mmap(self._fds[0], _whole((_HEAD_MARKS + self._seats) * 8)))
        self.head = memoryview(self._maps[0]).cast("q")

    def _sit(self, rank: int) -> None:
        start = rank % self._seats
        for seat in (*range(start, self._seats), *range(start)):
            try:
                fcntl.lockf(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, seat)
            except (BlockingIOError, PermissionError):
                continue
            if not self._lost(seat):
                break
            fcntl.lockf(self._fds[0], fcntl.LOCK_UN, 1, seat)
        else:
            raise OSError(errno.ENOSPC, f"{self._seats} processes of the group have timers already: that is the most")
        self._mark = _HEAD_MARKS + seat
        self.head[self._mark] = 0
        whole = mmap.mmap(self._fds[0], _SEAT_SIZE, offset=_whole((_HEAD_MARKS + self._seats) * 8) + seat * _SEAT_SIZE)
        self._maps.append(whole)
        # In one step: a look that has begun before must not find a deadline of 0.
        whole[:_TEXTS] = bytes(FIRST * 8) + NEVER.to_bytes(8, sys.byteorder) * SLOTS + bytes(2 * SLOTS * 8)
        self._memory: mmap.mmap | bytearray = whole
        self.words = memoryview(whole).cast("q")
        self.words[_SEAT_RANK] = rank
        for word, part in enumerate(_image("self"), _SEAT_WHO):
            self.words[word] = part
        self.free = list(range(FIRST + SLOTS - 1, FIRST - 1, -1))
        self.texts: list[bytes] = [b""] * (FIRST + SLOTS)
        self.head[self._mark] = self.high = 1
        _taken.add(self)

    def _lost(self, seat: int) -> bool:
        """Whether a seat that is free to the kernel is in use: by a process that has closed all its descriptors."""
        mark = self.head[_HEAD_MARKS + seat]
        start = _whole((_HEAD_MARKS + self._seats) * 8) + seat * _SEAT_SIZE
        who = struct.unpack("qqq", os.pread(self._fds[0], 24, start + _SEAT_WHO * 8))
        return bool(mark) and _lives(who)

    def take(self, deadline: int, span: int, text: bytes, thread: int = 0) -> int:
        """Set a deadline. Returns the slot, to `give` back. Raises RuntimeError when `SLOTS` timers run."""
        try:
            slot = self.free.pop()
        except IndexError:
            msg = f"{SLOTS} timers run in this process: that is the most"
            raise RuntimeError(msg) from None
        if self.texts[slot] is not text:
            self.write(slot, text)
        words = self.words
        words[slot + SLOTS] = span
        words[slot + 2 * SLOTS] = thread
        words[slot] = deadline
        if not deadline - span - LATE <= self.head[HEAD_WAKE] <= deadline:
            try:
                self.ring()
            except BaseException:
                self.give(slot)
                raise
        return slot

    def give(self, slot: int) -> None:
        """Clear the deadline of a slot that was taken. To those who send heartbeats, that is one."""
        words = self.words
        words[slot] = NEVER
        self.free.append(slot)
        if words[SEAT_BEAT]:
            self.beat(words[SEAT_STEP])

    def write(self, slot: int, text: bytes) -> None:
        """Say what a free slot will be about."""
        at = _TEXTS + (slot - FIRST) * _TEXT_SIZE
        self._memory[at : at + 2 + len(text)] = len(text).to_bytes(2, sys.byteorder) + text
        self.texts[slot] = text
        if slot - FIRST + 2 > self.high:
            self.head[self._mark] = self.high = slot - FIRST + 2

    def beat(self, step: int) -> None:
        """Say that all is well."""
        now = clock.now_ns()
        words, head = self.words, self.head
        words[SEAT_STEP] = step
        words[SEAT_BEAT] = now
        if not now - LATE <= head[HEAD_WAKE] <= now + head[HEAD_HANG]:
            try:
                self.ring()
            except RuntimeError:  # who beats asks for nothing
                pass

    def ring(self) -> None:
        """Have the watcher look now. Raises RuntimeError when nobody watches any more."""
        gone = "nobody watches timers any more: their server has stopped"
        if self.head[_HEAD_CLOSED]:
            raise RuntimeError(gone)
        try:
            if _file(self._fds[1]) == self._files[1]:
                sigpipe.write(self._fds[1], b"\0")
            else:
                self._ring_anew()
        except BrokenPipeError:
            raise RuntimeError(gone) from None
        except (OSError, IndexError):  # it rings already; or it is closed
            pass

    def _ring_anew(self) -> None:
        """Ring although the program has closed all its descriptors, and perhaps has other files by their numbers."""
        bell = os.open(self._bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _file(bell) == self._files[1]:
                sigpipe.write(bell, b"\0")
        finally:
            os.close(bell)

    def drift(self) -> None:
        """In a fork of the process that holds the seat: let what is yet to be given go nowhere."""
        self._memory = bytearray(_SEAT_SIZE)
        self.words = memoryview(self._memory).cast("q")
        self.head = memoryview(bytearray(len(self.head) * 8)).cast("q")

    def close(self) -> None:
        """Leave the seat. Idempotent. What is yet to be given goes nowhere."""
        if self in _taken:
            self.head[self._mark] = 0
            _taken.discard(self)
        if hasattr(self, "head"):
            self.drift()
        for each in self._maps:
            try:
                each.close()
            except BufferError:  # somebody has a view of it yet: it goes with that
                pass
        self._maps.clear()
        while self._fds:
            fd = self._fds.pop()
            if _file(fd) == self._files.pop():  # else it is another's by now
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
