"""Stops this process in pdb, at `breakpoint()` or where an exception was raised, for a person at another terminal.

Owns what is done while it stands: the timers of its group rest, and the person is asked to come. `debug_socket` has the
connection. A worker loads this module when it stops for the first time, in whatever Python it runs (3.8 or later).
"""

from __future__ import annotations

import io
import math
import os
import sys
import threading

from phalanx._base import std_streams
from phalanx._engine.worker.debug_socket import Server, Standing
from phalanx._evidence.describe import is_own_file
from phalanx._evidence.error_file import BREAKPOINT_TIMEOUT_ENV, DEBUG_SUFFIX, DEBUGPY_ENV, ERROR_FILE_ENV, is_of_run
from phalanx._timers.client import Seat
from phalanx._timers.layout import BREAKPOINT, TIMERS_ENV, encode

_known = "readline" in sys.modules
if not _known:  # nobody types here; and as it is loaded, it may wait for a terminal
    sys.modules["readline"] = None  # type: ignore[assignment]  # so that its import fails
try:
    import bdb
    import pdb  # noqa: T100 - what this module is about
finally:
    if not _known:
        del sys.modules["readline"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

_TIMEOUT = 3600.0
_LOCK = "post-mortem.lock"  # in the attempt's folder: held by the rank that stands after its failure
_OWN_FOLDER = os.path.join(os.path.dirname(__file__), "")


def _take_seat() -> Any:
    used = sys.modules.get("phalanx.timer._beats")
    if used is not None:
        return used.take_seat()
    return Seat(os.environ[TIMERS_ENV])


def _timeout() -> float:
    try:
        return float(os.environ.get(BREAKPOINT_TIMEOUT_ENV, "")) or _TIMEOUT
    except ValueError:
        return _TIMEOUT


def _rank() -> str:
    rank = os.environ.get("RANK", "")
    return rank if rank.isascii() and rank.isdecimal() else ""


class _Stop:
    """That this process stands, for the timers of its group and for the person."""

    def __init__(self) -> None:
        self.terminal = threading.RLock()  # held by the thread at whose prompt the person is
        self._threads: set[int] = set()
        self._lock = threading.Lock()
        self._seat: Any = None
        self._slot = 0
        self._seconds = _timeout()
        self._is_attached = False

    def begin(self, at: str, server: Server | None) -> None:
        """Have the timers rest while this thread stands, which `end` ends."""
        with self._lock:
            first = not self._threads
            self._threads.add(threading.get_ident())
            if not first:
                if self._slot and server is not None:  # at another line
                    self._seat.write_text(self._slot, encode(BREAKPOINT, at))
                return
            is_watched = self._rest("" if server is None else at)
            if server is not None and not (is_watched and is_of_run(server.path)):  # else the launcher writes it
                rank = f"rank {_rank()}" if _rank() else f"process {os.getpid()}"
                std_streams.write_stderr(f"phalanx: {rank} stopped at {at}: phalanx debug {server.path}\n")

    def end(self) -> None:
        """Have them run again, if no other thread stands."""
        with self._lock:
            self._threads.discard(threading.get_ident())
            if not self._threads and self._slot:
                slot, self._slot = self._slot, 0
                self._seat.go_on(slot)

    def attached(self, there: bool) -> None:  # noqa: FBT001 - the one argument, of a callback
        """Note whether somebody is attached: a session is no hang, however long."""
        with self._lock:
            self._is_attached = there
            if self._slot:
                self._seat.attach(self._slot, attached=there, seconds=self._seconds)

    def _rest(self, at: str) -> bool:
        """Have the timers rest; "": a person at a terminal has them. Returns False where nobody watches any."""
        try:
            if self._seat is None:
                self._seat = _take_seat()
            self._slot = self._seat.stand(at, self._seconds if at else math.inf)
        except Exception:  # noqa: BLE001 - there are none, or they have gone
            return False
        if self._is_attached:
            self._seat.attach(self._slot)
        return True


_stop = _Stop()
_server: Server | None = None
_thread = threading.local()  # its last debugger, which Python 3.13 and later go on with


def _start_anew() -> None:
    """In a fork: it has its own socket, and stands for itself."""
    global _server, _stop  # noqa: PLW0603 - one for the process
    _server = None
    _stop = _Stop()
    vars(_thread).clear()


def _is_own_terminal() -> bool:
    """Whether stdin is the terminal of our session: each worker has a session of its own."""
    try:
        os.tcgetpgrp(0)
    except OSError:
        return False
    return True


def _open(*, beside_terminal: bool = False) -> Server | None:
    """Return the server of this process; None: the debugger reads stdin, which is said unless that is a terminal.

    A terminal that is the rank's own (``--pty``) has nobody at it, perhaps.
    """
    global _server  # noqa: PLW0603 - as above
    if _server is not None and _server.is_open:
        return _server
    _server = None
    if os.isatty(0) and not beside_terminal and not _is_own_terminal():
        return None
    path = os.environ.get(ERROR_FILE_ENV)
    why = f"this process has no {ERROR_FILE_ENV}, so there is no folder for a socket"
    try:
        if path:
            _server = Server(f"{path}{DEBUG_SUFFIX}{os.getpid()}", _rank(), _stop.attached)
    except (OSError, RuntimeError) as error:  # RuntimeError: there can be no thread
        why = getattr(error, "strerror", None) or str(error)
    if _server is None:
        std_streams.write_stderr(f"phalanx: the debugger reads stdin here: {why}\n")
    return _server


class _StopError(BaseException):
    """A SIGINT of another than the person: it ends the program, and not a command, as pdb would have it."""


class _File(io.TextIOBase):
    """The stdin and the stdout of a debugger that has a server."""

    prompt = "(Pdb) "

    def __init__(self, server: Server) -> None:
        self._server = server
        self.begin()

    def begin(self) -> None:
        """Begin as the program comes to stand."""
        self._handled = id(sys.exc_info()[1])  # what the program handles itself
        self._is_stopped = False

    def readline(self, size: int = -1) -> str:  # type: ignore[override]  # noqa: ARG002 - the base's; whole lines
        if self._is_stopped:
            raise _StopError
        try:
            return self._server.read(self.prompt)
        except KeyboardInterrupt:
            if self._server.has_interrupted:
                raise
            raise _StopError from None

    def write(self, text: str) -> int:
        error = sys.exc_info()[1]  # pdb catches that of a command, and prints it
        if isinstance(error, KeyboardInterrupt) and id(error) != self._handled and not self._server.has_interrupted:
            self._is_stopped = True
        self._server.write(text)
        return len(text)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True


class Debugger(pdb.Pdb):
    """A pdb at a server; without one, at stdin. It does not show Phalanx's own frames, and does not stop in them."""

    def __init__(self, server: Server | None) -> None:
        file: Any = None if server is None else _File(server)
        super().__init__(stdin=file, stdout=file, nosigint=server is not None)
        self._file = file
        self.server = server
        self.heading = ""
        self._goes = "step"  # how the program goes on, see `Server.goes`

    def interaction(self, frame: FrameType | None, *trace: Any) -> None:
        """See `pdb.Pdb`: the rank stands from here to a command that has it go on."""
        self._standing(lambda: super(Debugger, self).interaction(frame, *trace), frame, *trace)

    def bp_commands(self, frame: FrameType) -> Any:
        """See `pdb.Pdb`: the commands of a breakpoint have a prompt of their own, at which the rank stands as well."""
        if getattr(self, "currentbp", 0) not in self.commands:
            return True
        return self._standing(lambda: super(Debugger, self).bp_commands(frame), frame)

    def _standing(self, interact: Callable[[], Any], frame: FrameType | None, *trace: Any) -> Any:
        at = _place(frame, *trace)
        with _stop.terminal:
            self._goes = "step" if frame is not None else "end"
            _stop.begin(at, self.server)
            before = None
            if self.server is not None:
                self._file.begin()
                before = self.server.stands(Standing(at, self._greet, self._matches))
            try:
                return interact()
            except _StopError:
                self.set_quit()
                raise KeyboardInterrupt from None
            finally:
                if before is None and self._goes != "step":
                    _stop.end()
                if self.server is not None:
                    self.server.goes(self._goes, before)

    def set_continue(self) -> None:
        """See `bdb.Bdb`."""
        self._goes = "end" if self._goes == "end" else "on"
        super().set_continue()

    def set_quit(self) -> None:
        """See `bdb.Bdb`."""
        self._goes = "end"
        super().set_quit()

    @property
    def stands(self) -> bool:
        """Whether the program makes a step, after which it stands again."""
        return self._goes == "step"

    def do_interact(self, arg: str) -> bool | None:
        """Start an interactive interpreter: at a terminal alone, not at a socket."""
        if self.server is None:
            return super().do_interact(arg)
        self.error("interact does not work at a socket: use ! for single statements")
        return None

    def stop_here(self, frame: FrameType) -> bool:
        """See `bdb.Bdb`. Where the program is at its end, our frames follow, and it goes on."""
        path = frame.f_code.co_filename
        if path.startswith(_OWN_FOLDER):
            self.set_continue()
            _stop.end()
        return not is_own_file(path) and super().stop_here(frame)

    def get_stack(self, f: FrameType | None, t: Any) -> Any:
        """See `bdb.Bdb`."""
        stack, index = super().get_stack(f, t)
        ours = [at for at, (frame, _) in enumerate(stack[:index]) if frame.f_code.co_filename.startswith(_OWN_FOLDER)]
        first = ours[-1] + 1 if ours else 0
        return stack[first:], index - first

    def _greet(self) -> None:
        if self.heading:
            self.message(self.heading)
        self.print_stack_entry(self.stack[self.curindex])

    def _matches(self, text: str, line: str, begin: int, end: int) -> list[str]:
        if not begin:
            return list(self.completenames(text, line, begin, end))
        name = self.parseline(line)[0]
        complete = getattr(self, f"complete_{name}", self.completedefault) if name else self.completedefault
        return list(complete(text, line, begin, end))


def _place(frame: FrameType | None, trace: Any = None) -> str:
    if frame is None:
        trace = getattr(trace, "__traceback__", trace)
        while trace.tb_next is not None:
            trace = trace.tb_next
        frame, line = trace.tb_frame, trace.tb_lineno
    else:
        line = frame.f_lineno
    assert frame is not None
    path = frame.f_code.co_filename
    try:
        below = os.path.relpath(path)
    except (OSError, ValueError):
        below = os.pardir
    return f"{path if below.startswith(os.pardir) else below}:{line}"


def _debugger(server: Server | None) -> Debugger:
    """Return the debugger of this thread: its last one, from Python 3.13 on, if that can be had."""
    debugger: Debugger | None = getattr(_thread, "debugger", None)
    is_new = debugger is None or sys.version_info < (3, 13) or debugger.server is not server
    if is_new or (server is not None and server.standing is not None):
        debugger = _thread.debugger = Debugger(server)
    assert debugger is not None
    return debugger


def listen() -> str:
    """Open the socket of this process. Returns its path; "": there is none, and a line on stderr says why."""
    server = _open(beside_terminal=True)
    return "" if server is None else server.path


def stop_now(frame: FrameType) -> None:
    """Stop at ``frame``, after `listen`: also within its call of C code, in which no trace function is called.

    Python 3.14 and later have what this takes. After ``q``, the program raises BdbQuit once it runs on.
    """
    debugger: Any = _debugger(_server)  # of a Python that has more
    debugger.heading = ""
    debugger.set_trace(frame)
    debugger.stopframe = frame  # else it would stop in the next call
    debugger.stop_trace()
    try:
        debugger.trace_dispatch(frame, "opcode", None)
    except bdb.BdbQuit:  # which would go nowhere from here
        frame.f_trace = _quit
        sys.settrace(_quit)
        return
    if debugger.breaks or debugger.stands:
        debugger.start_trace()  # nothing may follow: it would be traced


def _quit(*_event: Any) -> None:
    """A trace function that ends the program."""
    sys.settrace(None)
    raise bdb.BdbQuit


def stop(frame: FrameType, header: str | None = None, commands: list[str] | None = None) -> None:
    """Stop at ``frame``, as `pdb.set_trace` does."""
    debugger = _debugger(_open())
    debugger.heading = header or ""
    if header:
        debugger.message(header)
    debugger.rcLines.extend(commands or ())
    debugger.set_trace(frame)  # nothing may follow: it would be traced


def post_mortem(error: BaseException) -> None:
    """Stop where an exception was raised that has ended the program, if no other rank of the attempt stands so.

    If one does, wait until that has ended. Returns when the person leaves it. Never raises.
    """
    trace = error.__traceback__
    path = os.environ.get(ERROR_FILE_ENV, "")
    if trace is None or not path or not isinstance(error, Exception) or type(error).__name__ == "BdbQuit":
        return
    try:
        import fcntl

        folder = os.path.dirname(os.path.dirname(os.path.abspath(path)))
        # Held until the process ends.
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
            return
        debugger = Debugger(_open())
        debugger.heading = f"{type(error).__name__}: {error}"
        debugger.reset()
        debugger.interaction(None, error if sys.version_info >= (3, 13) else trace)
    except KeyboardInterrupt:
        return  # the group is stopped
    except Exception as failure:  # noqa: BLE001 - the failure of the program is what counts
        std_streams.write_stderr(f"phalanx: there is no debugger after this exception: {failure!r}\n")


_HOST = "127.0.0.1"


def listen_for_editor() -> None:
    """Have debugpy listen before the program begins, and wait for an editor if that is wanted: `phalanx run --debugpy`.

    While the editor holds a thread, the timers of the group rest. Where there can be no debugpy, a line on stderr says
    why.
    """
    port, _, waits = os.environ.pop(DEBUGPY_ENV).partition(" ")  # programs that this one starts must not have it
    try:
        import debugpy  # noqa: T100 - what this module is about

        debugpy.listen((_HOST, int(port)))  # noqa: T100 - as above
        pydevd = sys.modules["pydevd"]
        _let_timers_rest(pydevd.PyDB)
    except Exception as error:  # noqa: BLE001 - of another project; the program runs without it
        why = f"{type(error).__name__}: {error}"
        std_streams.write_stderr(f"phalanx: --debugpy: no editor can attach to pid {os.getpid()}: {why}\n")
        return

    def stop_in_editor(*args: Any, **options: Any) -> None:
        """Stop in the editor; in pdb, if none is attached."""
        frame = sys._getframe(1)  # noqa: SLF001 - it is where the program stops
        if debugpy.is_client_connected():
            pydevd.settrace(
                suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame
            )
        else:
            stop(frame, *args, **options)

    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = stop_in_editor
    if waits:
        std_streams.write_stderr(f"phalanx: waits for an editor at {_HOST}:{port}\n")
        debugpy.wait_for_client()  # noqa: T100 - as above


def _let_timers_rest(kind: Any) -> None:
    """Wrap the method of pydevd in which a thread waits, held by an editor."""
    wait = kind.do_wait_suspend

    def do_wait_suspend(*args: Any, **options: Any) -> Any:
        _stop.begin("", None)
        try:
            return wait(*args, **options)
        finally:
            _stop.end()

    kind.do_wait_suspend = do_wait_suspend


os.register_at_fork(after_in_child=_start_anew)
