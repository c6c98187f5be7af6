"""Runs the function of a worker: unpickles the call, calls, sends the value back or records the failure.

Knows nothing of the group. It is on the start of every function worker, so it imports as little as possible; what
forks need besides is in `forked`.
"""

from __future__ import annotations

import errno
import os
import sys
import time

from phalanx._base import channels, linux, std_streams
from phalanx._engine import main_module, worker_messages
from phalanx._engine.worker.mp_child import Child
from phalanx._evidence import recording
from phalanx._evidence.describe import describe, skip_own_frames
from phalanx._evidence.error_file import ERROR_FILE_ENV, POST_MORTEM_ENV
from phalanx._evidence.recording import exit_code
from phalanx._evidence.sent import DESCRIPTORS_ENV
from phalanx._evidence.stack_signals import catch_fatal_signals, offer_stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from phalanx._engine.pickling.payload import Payload

    Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments

SIGINT = 2
REPORT, PAYLOAD = 0, 1  # indices among the descriptors that a function worker inherits

_UNSHARED = ("", "all", "none")  # values of `ThisWorker.prints` where no other worker has its stderr
_SMALL = 16 * 1024  # bytes up to which a pickled value is sent in the packet itself
_CLOSED = "the value cannot be returned: this process has closed the descriptor on which its launcher hears it"
_SHUT = "the value cannot be returned: the socket on which the launcher hears its workers has been shut down"


class ThisWorker:
    """The settings of this worker, read at its start: the user's code may change the environment afterwards."""

    child: Child | None = None  # None until the worker has begun
    pid = 0
    error_file = ""
    post_mortem = False
    prints = ""
    """Which tracebacks are printed: "all", as by an interpreter; or "none", because the launcher raises them. Where all
    workers have one stderr, whose they are: then none of KeyboardInterrupt, which a Ctrl-C causes in all of them."""


def main(rank: int) -> None:
    """Run a worker in an interpreter of its own."""
    linux.die_with_parent(os.getppid())
    fds = [int(fd) for fd in os.environ.pop(DESCRIPTORS_ENV).split(",")]
    for fd in fds:
        os.set_inheritable(fd, False)  # execve(2) had to keep it; programs that the user's code starts must not have it
    _end_spawned(recorded(lambda: run_payload(rank, fds, forked=False)))


def _end_spawned(code: int) -> NoReturn:
    """End an interpreter that has run `main`."""
    if code < 0:
        # For an uncaught KeyboardInterrupt the interpreter itself ends threads, runs exit handlers, and raises SIGINT.
        sys.excepthook = lambda *_shown: None
        raise KeyboardInterrupt
    sys.exit(code)


def run_payload(rank: int, fds: list[int], *, forked: bool) -> int:
    """Unpickle the call of ``rank`` from the payload among ``fds``, and run it. Returns the exit code."""
    from phalanx._engine.pickling.payload import Payload

    payload = Payload(fds[PAYLOAD], fds[2:])
    index = payload.index
    # Before `sys.path` is the program's, whose folder may hold a signal.py: it imports `multiprocessing`.
    child = Child(index["children"][rank], rank, fds[REPORT], forked=forked)
    sys.path[:] = index["path"]
    sys.argv[:] = index["argv"]
    payload.prepare()
    child.tracker = payload.take(rank)
    child.environment = index["envs"].get(rank, {})

    def load() -> Call:
        try:
            if index["main"] is not None:
                main_module.run_again(index["main"])
            return _unpickled(payload, rank)
        finally:
            payload.close()

    return run_call(load, child, numbered=index["numbered"])


def run_call(load: Callable[[], Call], child: Child, *, numbered: bool) -> int:
    """Run a call as a child of `multiprocessing`, and send its value. Returns the exit code; -SIGINT if interrupted.

    ``numbered``: the function takes the rank before its arguments, and its value is not sent.
    """
    _begin(child)
    child.begin()
    try:
        return child.run(lambda: _call(load, child, numbered=numbered))
    finally:
        child.end()


def _call(load: Callable[[], Call], child: Child, *, numbered: bool) -> int:
    pid = os.getpid()
    try:
        function, arguments = _loaded(load, child)
        if not numbered:  # before the call: the function may remove the files, or use up all descriptors
            from phalanx._engine.pickling import picklers, results  # noqa: F401 - see above

            if picklers.received:  # something came by value, and so may go back
                from phalanx._engine.pickling import by_value  # noqa: F401 - see above
        known = dict(vars(sys.modules["__main__"]))
        value = function(child.rank, *arguments) if numbered else function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is recorded
        code = _failed(error)
        if code:
            return code
        value, known = None, {}
    if os.getpid() == pid:  # the watcher must expect no more heartbeats: what follows may take long
        getattr(sys.modules.get("phalanx.timer._beats"), "rest", int)()
    if not numbered and os.getpid() == pid:  # a process that the function forked, and that returned from it: no value
        try:
            _send(child, value, known)
        except BaseException as error:  # noqa: BLE001 - as above
            return _failed(error)
    _send_leaving(0)
    return 0


def _send_leaving(code: int) -> None:
    child = ThisWorker.child
    if child is not None:
        child.socket.send_leaving(code)


def _failed(error: BaseException) -> int:
    """Record the exception that has ended the call. Returns the exit code; -SIGINT if it was interrupted."""
    if isinstance(error, SystemExit):
        recording.note_exit(error, ThisWorker.error_file)
        _send_leaving(exit_code(error))
        return shown_exit_code(error)
    _record(error)
    if not isinstance(error, KeyboardInterrupt):
        return 1
    sys.last_type, sys.last_value = type(error), error  # exit handlers look for an exception that was printed
    return -SIGINT


def _loaded(load: Callable[[], Call], child: Child) -> Call:
    """Load the function and its arguments, as `multiprocessing` does it in a child."""
    child.inherit()
    try:
        return load()
    except main_module.UnguardedMainError as error:
        raise error.with_traceback(None) from None
    finally:
        child.settle()
        os.environ.update(child.environment)  # the top level of the main module may have changed it
        if "torch" in sys.modules:
            from phalanx._engine.pickling import tensors

            tensors.note_received()


def _unpickled(payload: Payload, rank: int) -> Call:
    try:
        return payload.load(rank)
    except Exception as error:
        why = main_module.absent(error) if isinstance(error, AttributeError) else ""
        if isinstance(error, ModuleNotFoundError):
            why = (
                f"The function or the arguments of rank {rank} need the module {error.name!r}, which this worker does "
                "not find on its path, the launcher's sys.path. Put its folder there (PYTHONPATH), or send the module "
                "by value: cloudpickle.register_pickle_by_value(module)."
            )
        error.add_note(why or f"The function or the arguments of rank {rank} could not be unpickled in the worker.")
        raise


def _begin(child: Child) -> None:
    """Read the settings of this worker, and install the handlers of fatal signals and of requests for stacks."""
    ThisWorker.child, ThisWorker.pid = child, os.getpid()
    ThisWorker.error_file = os.environ.get(ERROR_FILE_ENV, "")
    # Removed: groups that the worker starts must not inherit it.
    ThisWorker.prints = os.environ.pop("PHALANX_TRACEBACKS", "")
    catch_fatal_signals()
    offer_stacks()
    _install_breakpoint()
    ThisWorker.post_mortem = os.environ.get(POST_MORTEM_ENV) == "1"
    linux.allow_ptrace()
    # A killed worker loses what is in its buffers; and its log is read while it runs.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        std_streams.try_call(stream, "reconfigure", line_buffering=True)


def _send(child: Child, value: object, known: dict[str, Any]) -> None:
    """Send the value that the function has returned. ``known`` is what the main module held before the call."""
    from phalanx._engine.pickling import results

    memfd, fds = results.pack(value, known)
    try:
        size = os.fstat(memfd).st_size
        if size <= _SMALL:  # no memfd: descriptors in flight, and in the launcher, are limited
            body, sent = worker_messages.RESULT + os.pread(memfd, size, 0), fds
        else:
            body, sent = worker_messages.LARGE, [*fds, memfd]
        if child.report is None:
            raise OSError(errno.EBADF, _CLOSED)
        worker_messages.send(child.report, body, sent)
    except channels.Closed:  # the launcher may be alive, and must not conclude that there is no value
        raise OSError(errno.EPIPE, _SHUT) from None
    finally:
        for fd in (memfd, *fds):
            os.close(fd)


def _record(error: BaseException) -> None:
    """Write the error file, and print the traceback to stderr as a plain interpreter does, see `ThisWorker.prints`.

    If the error file cannot be written, the traceback is printed in any case, and sent to the launcher.
    """
    moment = time.monotonic_ns()  # first: the rest takes time
    # Leave out our own frames, which are above the user's.
    trace = skip_own_frames(error.__traceback__)
    if trace is not None or main_module.says_it_all(error):
        BaseException.with_traceback(error, trace)  # its class may let no attribute be set: a frozen dataclass
    written = recording.record(error, ThisWorker.error_file, left=True)
    is_rank = ThisWorker.pid == os.getpid()  # a fork of the worker is not
    waits = ThisWorker.post_mortem and is_rank
    if not waits:
        _send_leaving(1)
    child = ThisWorker.child  # None: it failed before the worker began, and is printed as by any interpreter
    prints = ThisWorker.prints if is_rank else "all"
    is_shared = prints not in _UNSHARED
    if not written or not (prints == "none" or (is_shared and isinstance(error, KeyboardInterrupt))):
        message, stack = describe(error)
        if child is not None and not written:
            child.socket.send_evidence(message, stack, moment, recording.refused(ThisWorker.error_file))
        if is_shared:
            _write_last(f"phalanx: {prints} failed:\n{stack}")
        else:
            std_streams.write_stderr(stack)
    if waits:
        _debugger().post_mortem(error)
        _send_leaving(1)


def _install_breakpoint() -> None:
    """Have `breakpoint` stop as `phalanx debug` expects it, unless the user or a debugger has chosen otherwise."""
    if sys.breakpointhook is sys.__breakpointhook__ and not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _breakpoint


def _breakpoint(*args: Any, **options: Any) -> None:
    """Stop in pdb: `sys.breakpointhook`, with the arguments of `pdb.set_trace`."""
    _debugger().stop(sys._getframe(1), *args, **options)  # noqa: SLF001 - it is where the program stops


def _debugger() -> Any:
    """Import the module that stops this process in pdb. `remote_stop` calls it, too."""
    from phalanx._engine.worker import breakpoints

    return breakpoints


def _write_last(text: str) -> None:
    """Write to a stderr that may be a console that nobody reads: others wait for this process's end, to be stopped."""
    try:
        from phalanx._base import stderr

        written = stderr.write_last(text.removesuffix("\n"))
    except BaseException:  # noqa: BLE001 - this process's user may not read the library
        written = False
    if not written:
        std_streams.write_stderr(text)


def shown_exit_code(leave: SystemExit) -> int:
    """Return the exit code of ``sys.exit(...)`` as the interpreter determines it; print a text, as it does."""
    if leave.code is not None and not isinstance(leave.code, int):
        try:
            text = str(leave.code)
        except Exception:  # noqa: BLE001 - the user's code may raise anything
            text = ""
        write = std_streams.write_stderr if ThisWorker.prints in _UNSHARED else _write_last
        write(text + "\n")
    return exit_code(leave)


def recorded(run: Callable[[], int]) -> int:
    """Call ``run``, and record an exception that it raises. Returns its exit code; -SIGINT if it was interrupted."""
    try:
        return run()
    except BaseException as error:  # noqa: BLE001 - it is recorded
        return _failed(error)
