"""The process above a keeper: it forks the keeper, outlives it, and takes over when that is killed.

Owns the boot of both, and what the guard waits for. The keeper is a fork of the guard and shares its pages:

    launcher -- guard -- keeper -- workers

Both are subreapers. When the keeper is killed, every process below it, however far it has run (setsid, double fork),
becomes a child of the guard, which ends the group by the same table and reports. When the guard is killed, the keeper
ends the group. A lone keeper with PR_SET_PDEATHSIG on its workers would lose their grandchildren to init; and arming it
needs code in the child between fork and exec, which rules out posix_spawn(3): a fork with an exec takes half as long
again.

It runs without `site` and imports its own few modules only: it is up in about 10 ms.
"""

from __future__ import annotations

import _socket
import errno
import gc
import select

from phalanx._base import channels, clock, linux
from phalanx._engine import protocol
from phalanx._engine.keeper.keeper import Keeper
from phalanx._engine.protocol import KILL_WAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable
    from typing import NoReturn
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up

BUSY = 0.1
"""Seconds in which the processor is left to the start, and to groups that end as soon."""

_LONGEST = 2e6  # seconds: poll(2) counts milliseconds in an int


def keep(sock: _socket.socket, call: Callable[[int, list[int]], None] | None = None, launcher: int = -1) -> None:
    """Run as guard, and as keeper in a fork, with the socket ``sock`` to the launcher. Does not return.

    ``call`` runs in workers that are forks of the launcher. ``launcher`` is its pidfd where a fork server forked us.
    """
    try:
        fill_standard_descriptors()
        ignore_signals()
        gc.disable()  # nothing here makes cycles, and a collection would copy every page shared with a fork
        if call is None:  # preloaded pages stay shared with workers; forks of the launcher do as that does
            gc.freeze()
        guard, ended = os.getpid(), -1
        try:
            linux.become_subreaper()
            above = os.pidfd_open(guard)
            if launcher < 0:
                launcher = open_launcher(sock)
            # Sent when our parent dies (launcher, fork server), or its thread that forked us: wakes a stopped guard.
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGCONT)
            notes_read, notes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            keeper = os.fork()
            if keeper == 0:
                # A stopped keeper could not see its guard's death: the kernel wakes it then.
                linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGCONT)
                linux.become_subreaper()
                os.close(notes_read)
                import phalanx._engine.keeper.start_group  # noqa: F401 - what the start needs: the launcher prepares it
            serving = Keeper(sock, call)  # in both: later, there may be no descriptor left for the guard's
            if keeper:
                os.close(notes)
                ended = os.pidfd_open(keeper)
                if call is not None:
                    linux.close_all_but([launcher, notes_read, ended, *serving.descriptors()])
        except (OSError, ImportError) as error:  # no worker has been started; ImportError: no descriptor is left
            _give_up(sock, error)
        if keeper == 0:
            _keep(serving, sock, launcher, above, guard, notes)
        else:
            noted = bytearray()
            status = _outlive(keeper, ended, launcher, notes_read, noted)
            if status:
                log_writer, _grace, story = _read_notes(notes_read, noted)
                serving.take_over(keeper, status, log_writer, launcher)
                os.write(2, story)
        os._exit(0)
    except BaseException as error:
        os.write(2, _story(error))
        raise
    finally:
        os._exit(70)


def _keep(keeper: Keeper, sock: _socket.socket, launcher: int, above: int, guard: int, notes: int) -> None:
    """Run as the keeper. On an error of ours, exit, so that the guard takes over; without a guard, take over here."""
    try:
        keeper.loop.after(BUSY, load_end)
        keeper.keep(launcher, above, guard, notes)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the group must not outlive its keeper
        story = _story(error)
        if os.getppid() == guard:
            try:
                os.write(notes, protocol.crash_note(story))  # a write to the console may block
            finally:
                os._exit(70)
        Keeper(sock).take_over(os.getpid(), 70 << 8, keeper.log_writer, launcher)
        os.write(2, story)


def load_end() -> None:
    """Import what the end needs: a disk may not answer then."""
    try:
        from phalanx._engine.keeper import log_writer, sweep  # noqa: F401 - the former for a guard that takes over
    except (OSError, ImportError):  # no descriptor is left, perhaps
        return


def _outlive(keeper: int, ended: int, launcher: int, notes: int, noted: bytearray) -> int:
    """Wait until the keeper has ended, whose pidfd is ``ended``, and return its wait status: the guard's work.

    A stopped keeper (SIGSTOP) cannot see that the launcher has died, so it is sent SIGCONT then, and when the orphan
    grace is over. If it still runs when all its own deadlines are over, it is killed, and the guard takes over. If
    SIGKILL does not end it, it sits in a system call, its children cannot become the guard's, and it is taken for
    killed. ``notes`` and ``noted`` are for `_read_notes`.
    """
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(launcher, select.POLLIN)
    if not poll.poll(BUSY * 1000):
        load_end()
    if ended not in dict(poll.poll()):
        poll.unregister(launcher)
        os.kill(keeper, signal.SIGCONT)
        until = clock.now() + _read_notes(notes, noted)[1]
        while not (gone := poll.poll(min(max(0.0, until - clock.now()), _LONGEST) * 1000)) and clock.now() < until:
            pass
        if not gone:
            os.kill(keeper, signal.SIGCONT)
        if not gone and not poll.poll((KILL_WAIT + 1) * 1000):
            os.kill(keeper, linux.SIGKILL)
            if not poll.poll(KILL_WAIT * 1000):
                return int(linux.SIGKILL)
    return os.waitpid(keeper, 0)[1]


def _give_up(sock: _socket.socket, error: OSError | ImportError) -> NoReturn:
    """Report to the launcher that the keeper was not started. Does not return."""
    number, filename = errno.EMFILE, ""
    if isinstance(error, OSError):
        number, filename = error.errno or 0, linux.path_of(error)
    try:
        channels.Channel(sock).send(protocol.start_failed(-1, "", number, filename))
    finally:
        os._exit(0)


def _read_notes(fd: int, noted: bytearray) -> tuple[int, float, bytes]:
    """Read the keeper's new notes from a pipe, which fit one read. Returns what all say, see `protocol.read_notes`."""
    try:
        noted += os.read(fd, select.PIPE_BUF)
    except BlockingIOError:
        pass
    return protocol.read_notes(bytes(noted))


def _story(error: BaseException) -> bytes:
    """A traceback without source lines: those are on a disk, which may not answer."""
    lines = [f"phalanx: a helper process of a group has failed: {type(error).__name__}: {error}"]
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f'  File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}')
        trace = trace.tb_next
    return "\n".join(lines).encode("utf-8", "replace")[: select.PIPE_BUF // 2] + b"\n"


def fill_standard_descriptors() -> None:
    """Open /dev/null on each of 0, 1 and 2 that the launcher had closed. Workers inherit them."""
    for fd in linux.occupy_standard_descriptors():
        os.set_inheritable(fd, True)


def ignore_signals() -> None:
    """Ignore every signal but SIGKILL, SIGSTOP, SIGCHLD and SIGCONT. Signals to the group go to its launcher.

    A worker may send signals faster than a handler could run. The kernel drops an ignored signal as it is sent; a
    blocked one would stay queued. SIGCHLD is blocked, for a `linux.signalfd`; SIGCONT acts as it is sent. A fault of
    this process (SIGSEGV) ends it all the same.
    """
    signal.set_wakeup_fd(-1)  # a fork of the launcher has the launcher's
    for number in signal.valid_signals():
        if number not in (linux.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT):
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError as error:  # those that the C library keeps for itself
                if error.errno != errno.EINVAL:
                    raise
    for number in (signal.SIGCHLD, signal.SIGCONT):  # inherited: with SIGCHLD ignored, the kernel reaps
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, (signal.SIGCHLD,))


def open_launcher(sock: _socket.socket) -> int:
    """Return a pidfd of the process that made the socket. Exits if that has died: its death was before this."""
    parent = os.getppid()
    launcher = channels.peer(sock)[0] or parent  # a wrapper may stand between
    try:
        fd = os.pidfd_open(launcher)
    except ProcessLookupError:
        os._exit(0)
    if launcher == parent != os.getppid():  # the pid may be another's by now
        os._exit(0)
    return fd


def main(fd: int) -> None:
    """Run as a program: descriptor ``fd`` is the socket to the launcher. Does not return."""
    os.set_inheritable(fd, False)  # it had to survive one exec; no worker may inherit it
    keep(_socket.socket(fileno=fd))
