"""The watcher's end of a timer table: makes the shared memory, and reads which timers have expired.

The memory is a memfd, the bell a pipe that clients write to; both belong to the process that made the table. A group's
keeper, which watches, receives duplicates of both descriptors. The file is large and sparse: a seat takes memory once
a process has taken it. The watcher maps the head alone, and reads seats by pread(2): that returns what was stored in a
mapping (they are the same pages), takes no address space, and allocates no page for a hole.

Which process holds a seat is read from the kernel, which knows the holder of its record lock (fcntl(2)), not from the
seat: there, any worker may have written anything.

The watcher publishes when it will look next. A client that sets an earlier deadline writes to the bell; all others need
no system call. The watcher looks once more after publishing, for the deadlines that were set by clients that still
read the moment published before. When to look, and what follows, is decided by `escalation`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct

from phalanx._base import clock
from phalanx._timers.hang import RankSigns, StepTimes, Timer
from phalanx._timers.layout import (
    FIRST,
    HEAD_CLOSED,
    HEAD_MARKS,
    HEAD_USED,
    HEAD_WAKE,
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
    decode,
    head_size,
    is_alive,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from phalanx._timers.hang import Key

_AT_A_TIME = 1 << 16  # timers that one look returns, shared among the seats: any worker can fill the whole table
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid

_tables: set[TimerTable] = set()  # those that this process watches, or has made


def _let_go_of_all() -> None:
    """In a fork: close the parent's tables.

    A fork that kept the reading end of the bell would keep the parent's clients from getting EPIPE when the parent
    ends. (A fork that C code makes without Python's hooks does keep it; hence `HEAD_CLOSED`, which `close` sets.)
    """
    for table in list(_tables):
        table.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def _in_use(levels: tuple[int, ...], flags: int) -> int:
    """Return how many seats or slots may be in use, by a word of flags. Any worker may have written anything there."""
    return levels[(flags.bit_length() - 1) >> 3] if 0 < flags <= NEVER else 0


def _highest_step(rows: Iterable[tuple[int, memoryview]]) -> int | None:
    steps = [row[SEAT_STEP] for _seat, row in rows if row[SEAT_BEAT]]
    return max(filter(lambda step: step > 0, steps), default=None)


def _seats_that_fit(seats: int) -> int:
    """Return how many of these seats a file may have here.

    ftruncate(2) beyond RLIMIT_FSIZE would send SIGXFSZ, which ends a process that has it at its default.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return seats
    return min(seats, (limit - head_size(seats)) // SEAT_SIZE)


class TimerTable:
    """A table of timers in shared memory, as its watcher uses it. Raises OSError if no memory or descriptor is left.

    Args:
        seats: The most processes that can have timers at a time; fewer where RLIMIT_FSIZE leaves no room.
        hang: Seconds after the last heartbeat when its sender counts as hung, or None.

    Heartbeats count by rank: any process of the rank may send them, and a block that any of them is in extends the
    limit.

    >>> from phalanx._timers.client import Seat
    >>> from phalanx._timers.layout import encode
    >>> table = TimerTable(4)
    >>> seat = Seat(f"{table.address}:0")
    >>> slot = seat.arm(deadline=5, span=3, text=encode("load", "train.py:7"))
    >>> (key,), _then = table.look(now=5)
    >>> timer = table.read(key)
    >>> timer.scope, timer.deadline
    ('load', 5)
    >>> seat.disarm(slot); table.look(now=5)
    ([], 9223372036854775807)
    >>> seat.close(); table.close()
    """

    def __init__(self, seats: int, hang: float | None = None) -> None:
        span = NEVER if hang is None else int(min(hang * clock.NS, LONGEST))
        seats = _seats_that_fit(seats)
        if seats < 1:
            raise OSError(errno.EFBIG, f"RLIMIT_FSIZE is too low for a table of timers ({os.strerror(errno.EFBIG)})")
        fds: list[int] = []
        try:
            fds.append(os.memfd_create("phalanx-timers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.truncate(fds[0], head_size(seats) + seats * SEAT_SIZE)
            # Any process that has it open could shorten it otherwise, and our next look would raise SIGBUS.
            fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            fds += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            head = struct.pack("4q", MAGIC, seats, NEVER, span)  # in the order of the words of the head
            os.pwrite(fds[0], head, 0)
            self._hold(fds, seats, span)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self._address = f"{os.getpid()}:{fds[0]}:{fds[2]}"

    @classmethod
    def from_descriptors(cls, fds: tuple[int, int], seats: int, hang: int) -> Self:
        """Open a table that another process has made, by duplicates of its `descriptors` and by its `size`.

        Takes the descriptors over: they are closed with the table. Raises OSError, with the descriptors closed.
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
        self._head_size = head_size(seats)
        self._map = mmap.mmap(fds[0], self._head_size)
        self._words = memoryview(self._map).cast("q")
        self._fds = fds
        self.seats = seats
        self._hang = hang
        self._seen: list[tuple[int, memoryview]] = []  # at the last look
        self._known: dict[int, tuple[list[int], int]] = {}  # by seat: the holder, and its slots used so far
        self._address = ""
        _tables.add(self)

    @property
    def descriptors(self) -> tuple[int, int]:
        """The memory, and the reading end of the bell."""
        return self._fds[0], self._fds[1]

    @property
    def size(self) -> tuple[int, int]:
        """Its seats, and the nanoseconds after a heartbeat (or `NEVER`): not as workers may have changed them."""
        return self.seats, self._hang

    @property
    def address(self) -> str:
        """Where a client finds the table: ``PID:MEMORY:BELL``. `client.Seat` takes it with a rank, as ``ADDRESS:RANK``.

        Empty, unless this is the process that has made it, or a fork of it, which may be a client.
        """
        return self._address

    def fileno(self) -> int:
        """The bell: readable once a client has set a deadline earlier than the published moment."""
        return self._fds[1]

    def clear_bell(self) -> None:
        """Read the bell once. Not until it is empty: a client that writes without end must not hold up the watcher."""
        try:
            os.read(self._fds[1], 1 << 16)
        except BlockingIOError:
            pass

    def publish(self, moment: int) -> None:
        """Store the moment of the next look. The caller must look again after that.

        Clients must see this store before the look reads what they store; they, in turn, set a deadline before they
        read this moment. No fence orders a store and a later load here. It holds because the look takes ten thousand
        times as long as a store stays in a processor's store buffer.
        """
        self._words[HEAD_WAKE] = moment

    def look(self, now: int) -> tuple[list[Key], int]:
        """Return the timers whose deadline is over at ``now``, and the earliest deadline of the others (or `NEVER`).

        Of a process that has very many expired ones, those that expired first; the others follow a second later.
        """
        then = NEVER
        due: list[Key] = []
        ranks: dict[int, list[tuple[int, memoryview]]] = {}
        self._seen = list(self._rows())
        share = self._share()
        for seat, row in self._seen:
            slots = row[FIRST:]
            low = min(slots, default=NEVER)
            if low <= now:
                deadlines = slots.tolist()
                late = [(seat, slot, deadline) for slot, deadline in enumerate(deadlines, FIRST) if deadline <= now]
                then = min((deadline for deadline in deadlines if now < deadline < then), default=then)
                if len(late) > share:
                    late = sorted(late, key=lambda key: key[2])[:share]
                    then = min(then, now + clock.NS)
                due += late
            else:
                then = min(then, low)
            if self._hang != NEVER:
                ranks.setdefault(row[SEAT_RANK], []).append((seat, row))
        for rows in ranks.values():
            beating = [seat for seat, row in rows if row[SEAT_BEAT] and not row[SEAT_REST]]
            if beating:
                limit = self._beat_limit(rows, now)
                if limit <= now:
                    due += [(seat, 0, limit) for seat in beating]
                    if len(rows) > 1:  # nothing reports that a process which sends none renews it, by leaving a block
                        then = min(then, now + self._hang)
                else:
                    # Nothing reports that a process died in a block: its hour must not hide the hang of its rank.
                    then = min(then, limit if len(rows) == 1 else min(limit, now + self._hang))
        return due, then

    def _share(self) -> int:
        """Return how many timers of one seat one look may return."""
        return max(1, _AT_A_TIME // max(1, len(self._seen)))

    def is_still_set(self, timer: Timer) -> bool:
        """Whether a timer has been neither disarmed nor set anew; of a heartbeat: whether none has come since."""
        if timer.slot:
            return self._word(timer.seat, timer.slot) == timer.deadline
        rows = self._seats_of_heartbeat(timer.seat)
        own = dict(rows).get(timer.seat)
        if own is None or not own[SEAT_BEAT] or own[SEAT_REST]:
            return False
        return self._beat_limit(rows, NEVER) <= timer.deadline

    def last_beat(self, seat: int) -> int:
        """Return when the heartbeat of a seat was last sent, by any process of its rank."""
        return self._last_beat(self._seats_of_heartbeat(seat))

    def _seats_of_heartbeat(self, seat: int) -> list[tuple[int, memoryview]]:
        """Return the seats that share the heartbeat of ``seat``; none if that is not taken."""
        rows = dict(self._rows())
        own = rows.get(seat)
        if own is None:
            return []
        return [(each, row) for each, row in rows.items() if row[SEAT_RANK] == own[SEAT_RANK]]

    @staticmethod
    def _last_beat(rows: list[tuple[int, memoryview]]) -> int:
        return max((max(row[SEAT_BEAT], row[SEAT_BEFORE]) for _, row in rows), default=0)

    def _beat_limit(self, rows: list[tuple[int, memoryview]], now: int) -> int:
        """Return when the heartbeat of these seats is late. If it is due at ``now``, their blocks extend it."""
        limit = self._last_beat(rows) + self._hang
        if limit <= now:
            for seat, row in rows:
                last = max((deadline for deadline in row[FIRST:].tolist() if deadline != NEVER), default=0)
                if last > limit and (len(rows) == 1 or self.holder(seat)):  # the dead leave deadlines behind
                    limit = last
        return limit

    def has_beaten(self) -> bool:
        """Whether any process has ever sent a heartbeat."""
        return any(self._last_beat([row]) for row in self._rows())

    def last_step(self) -> int | None:
        """Return the highest step that a process has reported with a heartbeat; None: none has reported one above 0."""
        return _highest_step(self._rows())

    def _rows(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the seats that are or were taken, and the words of each as far as it has slots in use."""
        reach = min(_in_use(SEATS_IN_USE, self._words[HEAD_USED]), self.seats)
        for seat, mark in enumerate(self._words[HEAD_MARKS : HEAD_MARKS + reach].tolist()):
            if mark > 0:
                yield seat, self._row(seat, FIRST + _in_use(SLOTS_IN_USE, mark))

    def _row(self, seat: int, words: int, first: int = 0) -> memoryview:
        at = self._head_size + seat * SEAT_SIZE + first * 8
        return memoryview(os.pread(self._fds[0], words * 8, at)).cast("q")

    def _word(self, seat: int, word: int) -> int:
        return self._row(seat, 1, word)[0]

    def standing(self) -> list[Key]:
        """Return the slots at which live processes stand at breakpoints, as the last look saw them."""
        return list(self._standing(self._seen))

    def _standing(self, rows: list[tuple[int, memoryview]]) -> Iterator[Key]:
        for seat, row in rows:
            slot = row[SEAT_STANDS]
            if FIRST <= slot < len(row) and row[slot] != NEVER and self.holder(seat):  # the dead leave it behind
                yield seat, slot, row[slot]

    def signs(self) -> dict[int, RankSigns]:
        """Return the signs of life of each rank that has taken a seat."""
        now = clock.now_ns()
        ranks: dict[int, list[tuple[int, memoryview]]] = {}
        for seat, row in self._rows():
            ranks.setdefault(row[SEAT_RANK], []).append((seat, row))
        found = {}
        for rank, rows in ranks.items():
            beating = any(row[SEAT_BEAT] for _, row in rows)
            at = next((timer.location for key in self._standing(rows) if (timer := self.read_now(*key[:2]))), None)
            beat = self._last_beat(rows) if beating else None
            found[rank] = RankSigns(beat, _highest_step(rows), at, self._step_times(rows, now), self._limit(rows))
        return found

    def _step_times(self, rows: list[tuple[int, memoryview]], now: int) -> StepTimes | None:
        """Return how long the latest steps of these seats took; None: no step was reported with a heartbeat before.

        Those of processes that have ended do not count; where none lives, the one does that has reported the last step.
        """
        timed = [(seat, row) for seat, row in rows if row[SEAT_BEAT] and 0 < row[SEAT_STEP_AT] <= now]
        if len(timed) > 1:
            last = max(timed, key=lambda one: one[1][SEAT_STEP_AT])
            timed = [(seat, row) for seat, row in timed if self.holder(seat)] or [last]
        at, count, times = 0, 0, list[int]()
        for _seat, row in timed:
            at = max(at, row[SEAT_STEP_AT])
            if 0 < row[SEAT_STEP_COUNT] <= LONGEST:
                count += row[SEAT_STEP_COUNT]
                times += row[SEAT_STEP_TIMES : SEAT_STEP_TIMES + min(row[SEAT_STEP_COUNT], STEP_TIMES)].tolist()
        times = sorted(time for time in times if 0 <= time <= LONGEST)
        return StepTimes(at, count, tuple(times)) if at else None

    def _limit(self, rows: list[tuple[int, memoryview]]) -> int | None:
        """Return when the heartbeat of a rank's seats is late; None: none is expected, or a process of it rests."""
        if self._hang == NEVER or not any(row[SEAT_BEAT] and not row[SEAT_REST] for _, row in rows):
            return None
        if any(row[SEAT_REST] == RESTS and self.holder(seat) for seat, row in rows):
            return None
        return self._beat_limit(rows, clock.now_ns())

    def newly_armed(self) -> list[Key]:
        """Return the timers that the last look saw in slots that the seat's holder had not used at a look before."""
        new: list[Key] = []
        share = self._share()
        for seat, row in self._seen:
            who = row[SEAT_WHO : SEAT_WHO + 3].tolist()
            before, count = self._known.get(seat, (who, 0))
            slots = row[FIRST + (count if before == who else 0) :]
            if min(slots, default=NEVER) != NEVER:
                first = len(row) - len(slots)
                fresh = [(seat, slot, at) for slot, at in enumerate(slots.tolist(), first) if at != NEVER]
                self._known[seat] = who, fresh[-1][1] - FIRST + 1
                new += fresh[:share]
        return new

    def read(self, key: Key) -> Timer | None:
        """Read a timer; None if it has been disarmed, or set anew."""
        seat, slot, deadline = key
        if not slot:
            return Timer(seat, 0, deadline, self._hang, 0, "heartbeat", "", self._word(seat, SEAT_STEP))
        timer = self._read(seat, slot, deadline)
        return timer if self._word(seat, slot) == deadline else None

    def read_now(self, seat: int, slot: int) -> Timer | None:
        """Read the timer that is in a slot now, whenever it was set; None if it is free."""
        deadline = self._word(seat, slot)
        return None if deadline == NEVER else self._read(seat, slot, deadline)

    def _read(self, seat: int, slot: int, deadline: int) -> Timer:
        at = self._head_size + seat * SEAT_SIZE + TEXTS + (slot - FIRST) * TEXT_SIZE
        scope, location = decode(os.pread(self._fds[0], TEXT_SIZE, at))
        span, thread = self._word(seat, slot + SLOTS), self._word(seat, slot + 2 * SLOTS)
        return Timer(seat, slot, deadline, span, thread, scope, location)

    def holder(self, seat: int) -> int:
        """Return the process that holds a seat, as the kernel knows it; 0: none.

        Not a process that is about to take it: what is stored there still belongs to the holder before.
        """
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, seat, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fds[0], fcntl.F_GETLK, asked))
        who = tuple(self._row(seat, 3, SEAT_WHO))
        if kind != fcntl.F_UNLCK:
            return who[0] if who[0] == pid else 0
        # None; or this process, whose own locks F_GETLK does not report; or one that has closed all its descriptors.
        return who[0] if who[0] == os.getpid() or is_alive(who) else 0

    def rank(self, seat: int) -> int:
        """Return the rank that the holder of a seat has written there."""
        return self._word(seat, SEAT_RANK)

    def resting(self) -> set[int]:
        """Return the processes that rest: they have suspended their heartbeats."""
        return {self.holder(seat) for seat, row in self._rows() if row[SEAT_REST] == RESTS} - {0}

    def close(self) -> None:
        """Release the memory and the descriptors. Clients that arm a timer then get RuntimeError. Idempotent.

        Not if another process made the table: a group's workers may still arm timers while they are given time to stop.
        """
        try:
            if self._address:
                self._words[HEAD_CLOSED] = 1
            self._words[HEAD_WAKE] = NEVER
        except ValueError:  # closed before, or this is a fork
            pass
        self.let_go()

    def let_go(self) -> None:
        """Release the memory and the descriptors, and leave the table as it is, as a fork must. Idempotent."""
        _tables.discard(self)
        self._words.release()
        try:
            self._map.close()
        except BufferError:  # a traceback still has a view of it; it is unmapped with that
            pass
        while self._fds:
            os.close(self._fds.pop())
