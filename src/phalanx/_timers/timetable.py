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
so nothing is inherited that a worker does not use. A group's keeper, which watches, is sent them. The file is large and
sparse: a seat takes memory when it is sat in. The watcher maps its head alone, and reads seats by pread(2). That sees
what is stored in a mapping (they are the same pages), takes none of its address space, and makes no page of a hole.

How far the table is in use is said by flags that are only ever set, a byte each: no two processes, no two threads, and
no signal handler in the midst of its own thread can undo what another has said, as they could by comparing a number
and then raising it. Knows nothing of what follows when a deadline is over.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys

from phalanx._base import clock, sigpipe
from phalanx._base.frozen import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
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

_AT_A_TIME = 1 << 16  # timers that one look tells of, shared among the seats: any worker can fill the whole table

_MAGIC = int.from_bytes(b"phalanx2", "little")
_HEAD_MAGIC, _HEAD_SEATS, HEAD_WAKE, HEAD_HANG, _HEAD_USED, _HEAD_CLOSED = 0, 1, 2, 3, 4, 5  # words of the head;
_HEAD_MARKS = 8  # then one of each seat
SEAT_BEAT, SEAT_STEP, _SEAT_WHO, _SEAT_RANK, SEAT_REST, _SEAT_BEFORE, FIRST = 0, 1, 2, 5, 6, 7, 8  # words of a seat
_RESTS, _GIVEN_UP = 1, 2  # why a seat's heartbeats are not expected any more
_TEXT_SIZE = TEXT_LIMIT + 2
_TEXTS = (FIRST + 3 * SLOTS) * 8  # deadlines, spans, threads; then the texts
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_BETWEEN = b"\x1f"
# What a word of flags says by the highest one that is set: the seats, from the first on, that may be in use (the last
# flag: all), or the slots of a seat.
_SEATS_IN_USE = (16, 64, 256, 1024, 2048, 4096, 8192, 1 << 62)
_SLOTS_IN_USE = (0, 4, 16, 64, 128, 256, 512, SLOTS)

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


def _deadline(key: Key) -> int:
    return key[2]


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


def _flag(levels: tuple[int, ...], count: int) -> int:
    """The byte of a word of flags that says that the first ``count`` may be in use."""
    level = next(number for number, most in enumerate(levels) if count <= most)
    return level if sys.byteorder == "little" else 7 - level


def _in_use(levels: tuple[int, ...], flags: int) -> int:
    """How many may be in use, by a word of flags. Anybody may have written anything there."""
    return levels[(flags.bit_length() - 1) >> 3] if 0 < flags <= NEVER else 0


_FLAG_OF = [_flag(_SLOTS_IN_USE, max(0, slot - FIRST + 1)) for slot in range(FIRST + SLOTS)]


def _room(seats: int) -> int:
    """How many of these seats a file may have here.

    ftruncate(2) beyond RLIMIT_FSIZE would send SIGXFSZ, which ends a process that has it at its default.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return seats
    return min(seats, (limit - _whole((_HEAD_MARKS + seats) * 8)) // _SEAT_SIZE)


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
        seats: How many processes can have timers at a time, at the most: fewer where RLIMIT_FSIZE leaves no room.
        hang: Seconds after the last heartbeat when who sent it counts as hung, or None.
        by_rank: Whether a heartbeat is its rank's, which any of its processes may send, and any scope that
            one of them is in extends; or each process's own.

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

    def __init__(self, seats: int, hang: float | None = None, *, by_rank: bool = False) -> None:
        span = NEVER if hang is None else min(int(hang * clock.NS), LONGEST)
        seats = _room(seats)
        if seats < 1:
            raise OSError(errno.EFBIG, f"RLIMIT_FSIZE is too low for a table of timers ({os.strerror(errno.EFBIG)})")
        fds: list[int] = []
        try:
            fds.append(os.memfd_create("phalanx-timers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.truncate(fds[0], _whole((_HEAD_MARKS + seats) * 8) + seats * _SEAT_SIZE)
            # Whoever has it open could cut it short otherwise, and our next look would be a SIGBUS.
            fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            fds += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            head = struct.pack("4q", _MAGIC, seats, NEVER, span)  # in the order of the words of the head
            os.pwrite(fds[0], head, 0)
            self._hold(fds, seats, span, by_rank=by_rank)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self._address = f"{os.getpid()}:{fds[0]}:{fds[2]}"

    @classmethod
    def of(cls, fds: tuple[int, int], seats: int, hang: int, *, by_rank: bool) -> Self:
        """The table that another process has made, by duplicates of its `descriptors`, ours then, and its `size`.

        Raises OSError, with the descriptors closed.
        """
        table = cls.__new__(cls)
        try:
            table._hold(list(fds), seats, hang, by_rank=by_rank)  # noqa: SLF001 - of this very class
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return table

    def _hold(self, fds: list[int], seats: int, hang: int, *, by_rank: bool) -> None:
        self._head = _whole((_HEAD_MARKS + seats) * 8)
        self._map = mmap.mmap(fds[0], self._head)
        self._words = memoryview(self._map).cast("q")
        self._fds = fds
        self.seats = seats
        self._hang = hang
        self._by_rank = by_rank
        self._seen: list[tuple[int, memoryview]] = []  # at the last look
        self._known: dict[int, tuple[list[int], int]] = {}  # by seat: whose slots, and how many, `news` has told
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
        """The timers whose deadline is over at ``now``, and the earliest deadline of the others (or `NEVER`).

        Of a process that has very many, the first to expire; the others are looked for again in a second.
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
                    late = sorted(late, key=_deadline)[:share]
                    then = min(then, now + clock.NS)
                due += late
            else:
                then = min(then, low)
            if self._hang != NEVER:
                ranks.setdefault(row[_SEAT_RANK] if self._by_rank else seat, []).append((seat, row))
        for rows in ranks.values():
            beating = [seat for seat, row in rows if row[SEAT_BEAT] and not row[SEAT_REST]]
            if beating:
                limit = self._limit(rows, now)
                if limit <= now:
                    due += [(seat, 0, limit) for seat in beating]
                else:
                    # Of a scope's end by the death of its process nobody tells; an hour's scope is not to hide a hang.
                    then = min(then, limit if len(rows) == 1 else min(limit, now + self._hang))
        return due, then

    def _share(self) -> int:
        """How many timers of one seat are told of at a time."""
        return max(1, _AT_A_TIME // max(1, len(self._seen)))

    def still(self, timer: Timer) -> bool:
        """Whether a timer has been neither cleared nor set anew, and a heartbeat not put off."""
        if timer.slot:
            return self._word(timer.seat, timer.slot) == timer.deadline
        rows = self._same(timer.seat)
        own = dict(rows).get(timer.seat)
        if own is None or not own[SEAT_BEAT] or own[SEAT_REST]:
            return False
        return self._limit(rows, NEVER) <= timer.deadline

    def last_beat(self, seat: int) -> int:
        """When the heartbeat of a seat was last sent: by which of its rank's processes ever."""
        return self._last(self._same(seat))

    def _same(self, seat: int) -> list[tuple[int, memoryview]]:
        """The seats whose heartbeat is that of ``seat``, if that is taken."""
        rows = dict(self._rows())
        own = rows.get(seat)
        if own is None or not self._by_rank:
            return [] if own is None else [(seat, own)]
        return [(each, row) for each, row in rows.items() if row[_SEAT_RANK] == own[_SEAT_RANK]]

    @staticmethod
    def _last(rows: list[tuple[int, memoryview]]) -> int:
        return max((max(row[SEAT_BEAT], row[_SEAT_BEFORE]) for _, row in rows), default=0)

    def _limit(self, rows: list[tuple[int, memoryview]], now: int) -> int:
        """The moment when the heartbeat of these is late: what is due at ``now``, any scope of theirs puts off."""
        limit = self._last(rows) + self._hang
        if limit <= now:
            for seat, row in rows:
                last = max((deadline for deadline in row[FIRST:].tolist() if deadline != NEVER), default=0)
                if last > limit and (len(rows) == 1 or self.holder(seat)):  # the dead leave their scopes behind
                    limit = last
        return limit

    def _rows(self) -> Iterator[tuple[int, memoryview]]:
        """The seats that are taken, or were, and the words of each as far as it has slots in use."""
        reach = min(_in_use(_SEATS_IN_USE, self._words[_HEAD_USED]), self.seats)
        for seat, mark in enumerate(self._words[_HEAD_MARKS : _HEAD_MARKS + reach].tolist()):
            if mark > 0:
                yield seat, self._row(seat, FIRST + _in_use(_SLOTS_IN_USE, mark))

    def _row(self, seat: int, words: int, first: int = 0) -> memoryview:
        at = self._head + seat * _SEAT_SIZE + first * 8
        return memoryview(os.pread(self._fds[0], words * 8, at)).cast("q")

    def _word(self, seat: int, word: int) -> int:
        return self._row(seat, 1, word)[0]

    def news(self) -> list[Key]:
        """The timers that the last look saw in slots in which the seat's holder had none at a look before."""
        new: list[Key] = []
        share = self._share()
        for seat, row in self._seen:
            who = row[_SEAT_WHO : _SEAT_WHO + 3].tolist()
            before, count = self._known.get(seat, (who, 0))
            slots = row[FIRST + (count if before == who else 0) :]
            if min(slots, default=NEVER) != NEVER:
                first = len(row) - len(slots)
                fresh = [(seat, slot, at) for slot, at in enumerate(slots.tolist(), first) if at != NEVER]
                self._known[seat] = who, fresh[-1][1] - FIRST + 1
                new += fresh[:share]
        return new

    def read(self, key: Key) -> Timer | None:
        """What a timer is about; None if it has been cleared, or set anew."""
        seat, slot, deadline = key
        if not slot:
            return Timer(seat, 0, deadline, self._hang, 0, "heartbeat", "", self._word(seat, SEAT_STEP))
        at = self._head + seat * _SEAT_SIZE + _TEXTS + (slot - FIRST) * _TEXT_SIZE
        text = os.pread(self._fds[0], _TEXT_SIZE, at)
        scope, place = decode(text[2 : 2 + min(int.from_bytes(text[:2], sys.byteorder), TEXT_LIMIT)])
        span, thread = self._word(seat, slot + SLOTS), self._word(seat, slot + 2 * SLOTS)
        now = self._word(seat, slot)
        return Timer(seat, slot, deadline, span, thread, scope, place) if now == deadline else None

    def holder(self, seat: int) -> int:
        """The process that has a seat, as the kernel knows it; 0: nobody.

        Not one that is about to take it: what the seat has yet is of the one before.
        """
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, seat, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fds[0], fcntl.F_GETLK, asked))
        who = tuple(self._row(seat, 3, _SEAT_WHO))
        if kind != fcntl.F_UNLCK:
            return who[0] if who[0] == pid else 0
        # Nobody, or this process (its own locks are not in its way), or one that has closed all its descriptors.
        return who[0] if who[0] == os.getpid() or _lives(who) else 0

    def rank(self, seat: int) -> int:
        """The rank that the holder of a seat says it belongs to."""
        return self._word(seat, _SEAT_RANK)

    def resting(self) -> set[int]:
        """The processes that have ended their heartbeats, until their next one."""
        return {self.holder(seat) for seat, row in self._rows() if row[SEAT_REST] == _RESTS} - {0}

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

    Attributes:
        expected: Whether anybody expects heartbeats here.

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
        self._flags = self.head.cast("B")
        self._flags[_HEAD_USED * 8 + _flag(_SEATS_IN_USE, seat + 1)] = 1
        whole = mmap.mmap(self._fds[0], _SEAT_SIZE, offset=_whole((_HEAD_MARKS + self._seats) * 8) + seat * _SEAT_SIZE)
        self._maps.append(whole)
        words = memoryview(whole).cast("q")
        # A heartbeat is its rank's, and so is the end of a block, also of a process that has ended since.
        last = max(words[SEAT_BEAT], words[_SEAT_BEFORE])
        before = last if words[_SEAT_RANK] == rank and 0 < last <= clock.now_ns() else 0
        first = bytes(_SEAT_BEFORE * 8) + before.to_bytes(8, sys.byteorder)
        # In one step: a look that has begun before must not find a deadline of 0.
        whole[:_TEXTS] = first + NEVER.to_bytes(8, sys.byteorder) * SLOTS + bytes(2 * SLOTS * 8)
        self._memory: mmap.mmap | bytearray = whole
        self.words = words
        self.words[_SEAT_RANK] = rank
        for word, part in enumerate(_image("self"), _SEAT_WHO):
            self.words[word] = part
        self.expected = self.head[HEAD_HANG] != NEVER
        self.free = list(range(FIRST + SLOTS - 1, FIRST - 1, -1))
        self.texts: list[bytes] = [b""] * (FIRST + SLOTS)
        self._flags[self._mark * 8 + _FLAG_OF[0]] = 1
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
        """Clear the deadline of a slot that was taken."""
        self.words[slot] = NEVER
        self.free.append(slot)
        if self.expected:
            self.left()

    def left(self) -> None:
        """A block has been left. To a process that sends heartbeats that is one; to its rank it is, in any case."""
        words = self.words
        if words[SEAT_BEAT]:
            self.beat(words[SEAT_STEP], wakes=False)
        else:  # what its block has put off so far is looked at soon enough, see `Timetable.look`
            words[_SEAT_BEFORE] = clock.now_ns()

    def write(self, slot: int, text: bytes) -> None:
        """Say what a free slot will be about."""
        at = _TEXTS + (slot - FIRST) * _TEXT_SIZE
        self._memory[at : at + 2 + len(text)] = len(text).to_bytes(2, sys.byteorder) + text
        self.texts[slot] = text
        self._flags[self._mark * 8 + _FLAG_OF[slot]] = 1

    def beat(self, step: int, *, wakes: bool = True) -> None:
        """Say that all is well. ``wakes``: and end a rest, as the end of a block does not."""
        now = clock.now_ns()
        words, head = self.words, self.head
        words[SEAT_STEP] = step
        words[SEAT_BEAT] = now
        if wakes:
            words[SEAT_REST] = 0
        if not now - LATE <= head[HEAD_WAKE] <= now + head[HEAD_HANG]:
            try:
                self.ring()
            except RuntimeError:  # who beats asks for nothing
                pass

    def rest(self) -> bool:
        """End the heartbeats until the next one. Returns whether there were any."""
        words = self.words
        ran = bool(words[SEAT_BEAT] and not words[SEAT_REST])
        words[SEAT_REST] = _RESTS
        return ran

    def give_up(self) -> None:
        """End the heartbeats of this seat, which go elsewhere. It speaks for nobody below this process, as `rest`."""
        self.words[SEAT_REST] = _GIVEN_UP

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
        self._flags = self.head.cast("B")

    def close(self) -> None:
        """Leave the seat. Idempotent. What is yet to be given goes nowhere; who takes a timer is told."""
        if self in _taken:
            self.head[self._mark] = 0
            _taken.discard(self)
        if hasattr(self, "head"):
            self.drift()
            self.head[_HEAD_CLOSED] = 1
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
