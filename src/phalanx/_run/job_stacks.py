"""Where the ranks of a job are, for ``phalanx stack``: the socket of its agent, who asks there, the looks at a node.

The socket is in the folder of the run. `_rendezvous.stack_report` has what the agents of a job ask each other.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from phalanx._base import clock, files, interrupts
from phalanx._base.loop import READ, WRITE, Loop
from phalanx._base.text import one_line
from phalanx._base.threads import Latch, SerialExecutor
from phalanx._engine import host_signals
from phalanx._rendezvous import stack_report
from phalanx._rendezvous.life import Found
from phalanx._rendezvous.records import DamagedError
from phalanx._rendezvous.stack_report import MOST_BYTES, PATIENCE, JobStacks
from phalanx._stacks.dump import EXITED, NO_STACK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx._group.context import PContext
    from phalanx._runs.record import Run

NAME = "stack.sock"
"""Of the socket, in the run's folder."""

SEEN = b"\n"
"""What somebody who asks is sent first: white space, for JSON."""

MOST_CALLERS = 16
"""Who may ask at a time; others find the connection closed."""

LONGEST = 30.0
"""Seconds after which the connection of somebody who does not read is closed."""

_MODE = 0o600
_NEXT_TRY = 1.0  # seconds after which somebody is let in again, if no descriptor was left
_JOIN = 1.0  # seconds that the end waits for the thread: for its disk, nobody waits
_CREDENTIALS = struct.Struct("iII")  # of unix(7): pid, uid, gid


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of who was at the other end of a Unix socket when it was connected, or listened at."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(said)
    return pid, uid


class _Caller:
    """Somebody who asks: the connection, and what is still to be sent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.data = memoryview(b"")


class StackDoor:
    """Answers those who ask where the ranks are, from `open` to `close`.

    Args:
        ask: Finds it out: the function that it is given is called with it once, on any thread, or never.
        warn: Called with a line, by the door's thread, if there can be no such socket.
    """

    def __init__(self, ask: Callable[[Callable[[Found], None]], None], warn: Callable[[str], None]) -> None:
        self._ask = ask
        self._warn = warn
        self._owner = os.getpid()
        self._loop: Loop | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._callers: dict[int, _Caller] = {}
        self._told: tuple[Found | None, bytes] = None, b""  # what was told last: several may have asked

    def open(self, folder: str) -> None:
        """Begin to listen in a run's folder, soon. A further call does nothing."""
        if self._loop is not None or not folder:
            return
        try:
            with interrupts.deferred():
                self._begin(folder)
        except (OSError, RuntimeError) as error:  # no descriptor is left, or no thread
            self._warn(_why(error))

    def _begin(self, folder: str) -> None:
        loop = Loop()
        thread = threading.Thread(target=self._serve, args=(loop, folder), name="phalanx-stack", daemon=True)
        self._loop = loop
        _open.add(self)
        try:
            thread.start()
        except RuntimeError:
            _open.discard(self)
            loop.close()
            raise
        self._thread = thread

    def close(self) -> None:
        """Stop listening, and close all connections. Waits for the thread at most a second. Idempotent."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None or self._owner != os.getpid():
            return
        loop.call(loop.stop)
        thread.join(_JOIN)
        self._thread = None  # now: a signal may have raised before

    def abandon(self) -> None:
        """Close, in a fork, what belongs to the parent."""
        self._thread = None
        for caller in self._callers.values():
            caller.connection.close()
        if self._listener is not None:
            self._listener.close()
        if self._loop is not None:
            self._loop.close_in_fork()

    # --- the door's thread

    def _serve(self, loop: Loop, folder: str) -> None:
        inside = -1
        try:
            inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._listener = _listen(inside)
            self._await(loop)
            loop.run()
        except Exception as error:  # noqa: BLE001 - the job is not to feel it
            with suppress(Exception):  # the caller's
                self._warn(_why(error))
        finally:
            _open.discard(self)
            for caller in [*self._callers.values()]:
                self._drop(caller)
            if self._listener is not None:
                self._listener.close()
                with suppress(OSError):
                    os.unlink(NAME, dir_fd=inside)
            if inside >= 0:
                os.close(inside)
            loop.close()

    def _await(self, loop: Loop) -> None:
        assert self._listener is not None
        loop.watch(self._listener.fileno(), lambda _: self._accept(loop))

    def _accept(self, loop: Loop) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # who asked has gone
            return
        except OSError:  # no descriptor is left: who asks waits, and this thread, too
            loop.forget(self._listener.fileno())
            loop.after(_NEXT_TRY, lambda: self._await(loop))
            return
        if len(self._callers) >= MOST_CALLERS or peer(connection)[1] not in (os.geteuid(), files.ROOT):
            connection.close()
            return
        connection.setblocking(False)
        with suppress(OSError):  # who asked has gone, which is seen soon
            connection.send(SEEN)
        caller = self._callers[connection.fileno()] = _Caller(connection)
        loop.watch(connection.fileno(), lambda events: self._see(caller, events))
        loop.after(LONGEST, lambda: self._drop(caller))
        self._ask(lambda found: loop.call(lambda: self._answer(loop, caller, found)))

    def _answer(self, loop: Loop, caller: _Caller, found: Found) -> None:
        if caller.connection.fileno() < 0:
            return
        if self._told[0] is not found:
            self._told = found, stack_report.tell(found)
        caller.data = memoryview(self._told[1])
        loop.change(caller.connection.fileno(), READ | WRITE)

    def _see(self, caller: _Caller, events: int) -> None:
        """Send what can be sent. Nothing is to be read: who sends anything, or has gone, is told no more."""
        try:
            if events & ~WRITE:
                self._drop(caller)
                return
            caller.data = caller.data[caller.connection.send(caller.data) :]
            if not caller.data:
                self._drop(caller)
        except BlockingIOError:
            return
        except OSError:
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        fd = caller.connection.fileno()
        if fd >= 0:
            assert self._loop is not None
            self._loop.forget(fd)
            self._callers.pop(fd, None)
            caller.connection.close()
            if not self._callers:
                self._told = None, b""


def _listen(folder: int) -> socket.socket:
    """Return a socket in a folder that is open. Raises OSError."""
    with suppress(FileNotFoundError):  # of a run before, whose folder this one has, too
        if stat.S_ISSOCK(os.lstat(NAME, dir_fd=folder).st_mode):
            os.unlink(NAME, dir_fd=folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), _MODE)  # before: that of the file is made of it
        listener.bind(f"/proc/self/fd/{folder}/{NAME}")  # a path of the folder may be too long, see unix(7)
        listener.listen(MOST_CALLERS)
    except BaseException:
        listener.close()
        raise
    return listener


def _why(error: object) -> str:
    return f"phalanx stack cannot show the ranks of other machines here: {error}"


_open: set[StackDoor] = set()


def _abandon_all() -> None:
    for door in _open:
        door.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)


LOOK = 3.0
"""Seconds by which the end of the workers is put off, at the most, as a rank of another node hangs."""

_STACKS = 2.0  # seconds in which workers have to give their stacks
_NOT_STARTED = f"{NO_STACK}it has not been started\n"


class NodeLooks:
    """Looks at the workers of a node, one time after another."""

    def __init__(self) -> None:
        self._thread = SerialExecutor("phalanx-look", 1)

    def look(self, group: PContext | None, first: int, nproc: int, nodes: int, then: Callable[[bytes], None]) -> None:
        """Have ``then`` called with where the workers are, for the others to read. Returns at once.

        Args:
            group: The workers; None: they have not been started.
            first: The rank of the first one in the job.
            nproc: How many they are.
            nodes: How many nodes share the room for answers.
            then: Called by a thread of ours, or by this one.
        """

        def take() -> None:
            if group is None:
                then(stack_report.write({}, 0, why="no worker of this attempt has been started there"))
                return
            try:
                from phalanx._stacks import collect

                pids = group.pids()
                texts = {rank: EXITED if rank in pids else _NOT_STARTED for rank in range(nproc)}
                texts |= collect.take(lambda: group.alive, group.error_files, _STACKS)
                then(stack_report.write(texts, first, nodes))
            except Exception as error:  # noqa: BLE001 - no descriptor is left, say: who asks is to know
                then(stack_report.write({}, 0, why=one_line(f"its workers could not be looked at: {error}")))

        if not self._thread.submit(take):
            then(stack_report.write({}, 0, why="its agent has no thread left to look at its workers"))

    def close(self) -> None:
        """Wait for a look that is under way, but not for long."""
        self._thread.drain(_STACKS)


class LastLook:
    """The last look at the workers of a node, as a rank of another node hangs; their end waits for it, but not long.

    At most one look at a time. Used by one thread, which waits for nothing here.

    Attributes:
        end_at: When the end of the workers waits no longer (seconds, monotonic); None: it does not wait.
    """

    def __init__(self) -> None:
        self.end_at: float | None = None
        self._taken: Latch | None = None  # opened when the stacks are there; None: nobody has asked for them

    def begin(self, group: PContext, wake: Callable[[], None]) -> None:
        """Have the stacks of a group's workers taken and written. ``wake`` is called when they are, on any thread."""
        taken = self._taken = Latch()

        def note() -> None:
            taken.open()
            wake()

        group.take_stacks(_STACKS, note)

    @property
    def is_under_way(self) -> bool:
        """Whether the stacks are asked for, and not there yet."""
        return self._taken is not None and not self._taken

    def puts_off(self, now: float) -> bool:
        """Whether an end of the workers that is ordered now has to wait, until `is_over`."""
        if not self.is_under_way:
            return False
        self.end_at = now + LOOK
        return True

    def is_over(self, now: float) -> bool:
        """Whether an end that was put off has waited enough."""
        return self.end_at is not None and (bool(self._taken) or now >= self.end_at)

    def wait(self) -> None:
        """Return when the stacks are there, after `LOOK` at the latest; a signal may interrupt it."""
        if self._taken is not None:
            with host_signals.delivering():
                self._taken.wait(LOOK)

    def hurry(self, group: PContext | None) -> None:
        """Wait for no stacks any more: the workers are to be ended at once."""
        report = None if group is None else group.hang_report
        if self.is_under_way and report is not None:
            report.hurry()
        self.drop()

    def drop(self) -> None:
        """Wait no longer: the workers are being ended."""
        self.end_at = self._taken = None


WAIT = 2 * PATIENCE + 3.0
"""Seconds that a person waits at the most: for the end of what somebody else has asked, and for our own."""

SOON = 3.0
"""Seconds of these after which an agent is taken for stopped that has not noticed that it is asked."""

_CHUNK = 1 << 20


class NotToldError(Exception):
    """The agent has not told where the ranks of other machines are. ``str()`` is why."""


def ask(folder: str, run: Run, owner: int) -> JobStacks:
    """Return where the ranks are, of a run that goes on here. ``owner``: the uid that it belongs to.

    Only the launcher that the record names is believed. Raises NotToldError, after `WAIT` at the latest.
    """
    until = clock.now() + WAIT
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SOON)
            _connect(connection, folder)
            pid, uid = peer(connection)
            if pid != run.pid or uid not in (owner, os.geteuid(), files.ROOT):
                raise NotToldError(f"another process than its launcher answers at {NAME}")
            data = connection.recv(_CHUNK)
            data += _receive(connection, until) if data else b""
    except FileNotFoundError:
        raise NotToldError(f"its agent shows no others (there is no {NAME} in the run's folder)") from None
    except TimeoutError:
        msg = f"its agent has not answered within {WAIT if clock.now() >= until else SOON:g} s"
        raise NotToldError(msg) from None
    except BlockingIOError:
        raise NotToldError("too many ask its agent at once") from None
    except OSError as error:
        raise NotToldError(f"its agent cannot be asked: {error.strerror or error}") from None
    if not data.strip():
        raise NotToldError("its agent has not answered: it ends, or too many ask at once")
    try:
        told = JobStacks(data)
    except DamagedError as error:
        raise NotToldError(f"what its agent has answered cannot be read: {error}") from None
    if told.why:
        raise NotToldError(told.why)
    return told


def _connect(connection: socket.socket, folder: str) -> None:
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{inside}/{NAME}")  # a path of the folder may be too long, see unix(7)
    finally:
        os.close(inside)


def _receive(connection: socket.socket, until: float) -> bytes:
    """Return all that is sent. Raises OSError, TimeoutError."""
    parts: list[bytes] = []
    size = 0
    while size <= MOST_BYTES:
        left = until - clock.now()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(_CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise NotToldError(f"its answer is longer than {MOST_BYTES} bytes")
