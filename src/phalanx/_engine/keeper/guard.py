"""The process above a keeper: starts it, outlives it, and takes over when it is killed.

Owns the boot of both, and what the guard waits for. The second process is a fork of the first that shares its pages:

    launcher -- guard -- keeper -- workers

Both are subreapers. When the keeper is killed, every process below it, however far it has run (setsid, double
fork), becomes a child of the guard, which finishes the work by the same table and reports. When the guard is killed,
the keeper does. A lone keeper with PR_SET_PDEATHSIG on its workers would lose their grandchildren to init; and arming
it needs code in the child between fork and exec, which rules out posix_spawn(3): a fork with an exec takes half as long
again.

It runs on its own (no site, no package beyond its own few modules), and is up in about 10 ms.
"""

from __future__ import annotations

import _socket
import gc
import select

from phalanx._base import channels, linux
from phalanx._engine.keeper import start_process
from phalanx._engine.keeper.keeper import BUSY, Keeper, load
from phalanx._engine.lifecycle import KILL_WAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Callable
    from typing import NoReturn
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up


_CRASH = b"!"  # what stands before the story of a crash in the notes


def keep(sock: _socket.socket, call: Callable[[int, list[int]], None] | None = None, launcher: int = -1) -> None:
    """Be guard and keeper at the end ``sock``, with ``call`` for workers that are forks of us. Does not return.

    ``launcher`` is a pidfd, where it is not the launcher that has forked us.
    """
    try:
        start_process.fill_standard_descriptors()
        start_process.turn_deaf()
        gc.disable()  # nothing here makes cycles, and a collection would copy every page that is shared with a fork
        if call is None:  # what has been preloaded stays shared by workers, too; forks of the launcher do as that does
            gc.freeze()
        linux.become_subreaper()
        guard, ended = os.getpid(), -1
        try:
            above = os.pidfd_open(guard)
            if launcher < 0:
                launcher = start_process.open_launcher(sock)
            # Should somebody have stopped us when the launcher dies, or the warm process, which goes with it. It comes
            # when the thread ends that started us, too.
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGCONT)
            heard, notes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            keeper = os.fork()
            if keeper == 0:
                # Stopped by somebody, we could not see our guard's death: the kernel wakes us up then.
                linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGCONT)
                linux.become_subreaper()
                os.close(heard)
            serving = Keeper(sock, call)  # in both: later, there may be no descriptor left for the guard's
            if keeper:
                os.close(notes)
                ended = os.pidfd_open(keeper)
                if call is not None:
                    start_process.close_all_but([launcher, heard, ended, *serving.descriptors()])
        except OSError as error:  # nothing is there to be kept yet
            _give_up(sock, error)
        if keeper == 0:
            _keep(serving, sock, launcher, above, guard, notes)
        else:
            status = _outlive(keeper, ended, launcher)
            if status:
                log_writer, crash = _noted(heard)
                serving.take_over(keeper, status, log_writer, launcher)
                os.write(2, crash)
        os._exit(0)
    except BaseException as error:
        os.write(2, _story(error))
        raise
    finally:
        os._exit(70)


def _keep(keeper: Keeper, sock: _socket.socket, launcher: int, above: int, guard: int, notes: int) -> None:
    """Be the keeper. On a mistake of ours, leave it to the guard; or do what that would do, if it has gone."""
    try:
        keeper.keep(launcher, above, guard, notes)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the group must not outlive its keeper
        story = _story(error)
        if os.getppid() == guard:
            try:
                os.write(notes, _CRASH + story)  # for a console may block
            finally:
                os._exit(70)
        Keeper(sock).take_over(os.getpid(), 70 << 8, keeper.log_writer, launcher)
        os.write(2, story)


def _outlive(keeper: int, ended: int, launcher: int) -> int:
    """Wait for the keeper to end, whose pidfd is ``ended``, and return its status: what the guard does.

    A keeper that somebody has stopped (SIGSTOP) cannot see that the launcher has died, so it is woken up then; and
    should it still be there when all its own deadlines are over, it is killed, and the guard does its work. If not even
    that ends it, it sits in a system call, and what is below it cannot become ours: it is taken for killed.
    """
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(launcher, select.POLLIN)
    if not poll.poll(BUSY * 1000):
        load()
    if ended not in dict(poll.poll()):
        poll.unregister(launcher)
        os.kill(keeper, signal.SIGCONT)
        if not poll.poll((KILL_WAIT + 1) * 1000):
            os.kill(keeper, linux.SIGKILL)
            if not poll.poll(KILL_WAIT * 1000):
                return int(linux.SIGKILL)
    return os.waitpid(keeper, 0)[1]


def _give_up(sock: _socket.socket, error: OSError) -> NoReturn:
    """Tell the launcher that there will be no keeper. Does not return."""
    try:
        channels.Channel(sock).send(("start_failed", -1, "", error.errno or 0, linux.path_of(error)))
    finally:
        os._exit(0)


def _noted(notes: int) -> tuple[int, bytes]:
    """What the keeper has noted last: the pid of its log writer, 0 for none; and the story of its own crash."""
    try:
        pids, _, crash = os.read(notes, select.PIPE_BUF).partition(_CRASH)
    except BlockingIOError:
        return 0, b""
    return int(pids.split()[-1]) if pids else 0, crash


def _story(error: BaseException) -> bytes:
    """A traceback, without a look at the source: it is on a disk, which may not answer."""
    lines = [f"phalanx: a helper process of a group has failed: {type(error).__name__}: {error}"]
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f'  File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}')
        trace = trace.tb_next
    return "\n".join(lines).encode("utf-8", "replace")[: select.PIPE_BUF // 2] + b"\n"


def main(fd: int) -> None:
    """The keeper as a program: the socket to its launcher is descriptor ``fd``. Does not return."""
    os.set_inheritable(fd, False)  # it had to survive one exec; no worker may hold our end of the conversation
    keep(_socket.socket(fileno=fd))
