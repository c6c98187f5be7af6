"""What runs in a function worker before and after the user's code.

Owns the worker's side of the contract: unpickle, call, send the value back or leave evidence, exit. Knows nothing
of the group, and as little as possible is imported here: it is on the start-up path of every worker.
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
from phalanx._evidence.error_file import ERROR_FILE_ENV
from phalanx._evidence.fatal_signals import catch_fatal_signals
from phalanx._evidence.recording import exit_code
from phalanx._evidence.stack_signals import offer_stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from phalanx._engine.pickling.payload import Payload
    from phalanx._engine.worker.mp_child import State

_SMALL = 16 * 1024  # bytes of a pickled value that go into the message itself
_SIGINT = 2
_REPORT, _PAYLOAD = 0, 1  # places among the descriptors that every function worker is given
_MESSAGE_LIMIT, _STACK_LIMIT = 4 * 1024, 24 * 1024  # bytes; one packet holds both (see `reports`)
_CLOSED = "the value cannot be returned: this process has closed the descriptor on which its launcher hears it"
_SHUT = "the value cannot be returned: the socket on which the launcher hears its workers has been shut down"
_PATIENCE = 1000  # milliseconds in which a launcher that does not listen has to make room for evidence


own_path: list[str] = []
"""What an interpreter has on `sys.path` by itself, in a process that has preloaded modules. Scripts begin with it."""


class _Mine:
    """What this worker was given at its start. The user's code can change the environment, and nothing of this."""

    child: Child | None = None  # None: it has not begun
    error_file = ""
    stderr_logged = False


def main(rank: int) -> None:
    """A worker in an interpreter of its own; the last word of its command line lists its descriptors."""
    linux.die_with_parent(os.getppid())
    fds = [int(fd) for fd in sys.argv[-1].split(",")]
    for fd in fds:
        os.set_inheritable(fd, False)  # they had to survive our exec; what the user's code starts is not to have them
    _end_spawned(_code_of(lambda: _serve(rank, fds, forked=False)))


def serve(rank: int, fds: list[int]) -> None:
    """A worker that is a fork of its keeper. Does not return."""
    _part_ways()
    _leave(lambda: _serve(rank, fds, forked=True))


def serve_script(argv: list[bytes]) -> None:
    """A worker that is a fork of its keeper, and a script: ``argv`` is as `script` has it. Does not return."""
    from phalanx._engine.worker import script

    _part_ways()
    linux.allow_ptrace()
    sys.path[:] = own_path
    sys.argv[:] = [os.fsdecode(argument) for argument in argv]
    std_streams.reopen(unbuffered=True)
    handler = sys.modules.get("faulthandler")
    if handler is not None and handler.is_enabled():  # by PYTHONFAULTHANDLER; our keeper's handlers are gone since
        handler.disable()
        handler.enable(2)
    _end_interpreter(_exit_of(script.run))


def _part_ways() -> None:
    """Let go of what forks of one keeper would share, and interpreters of their own do not.

    The standard library's generator is seeded anew by each fork.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    # Torch's for the CPU alone is seeded by chance in an interpreter of its own; those of devices are all alike there.
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()


def _exit_of(program: Callable[[], None]) -> int:
    """Run a program that has shown what it fails with. Returns its exit code; -SIGINT if it was interrupted."""
    try:
        program()
    except SystemExit as leave:
        return _exit_code(leave)
    except KeyboardInterrupt:
        return -_SIGINT
    except BaseException:  # noqa: BLE001 - it has been recorded, and shown
        return 1
    return 0


def _end_spawned(code: int) -> NoReturn:
    """End an interpreter that runs nothing but `main`."""
    if code < 0:
        # The interpreter does the rest for a KeyboardInterrupt that nobody catches: threads, exit handlers, SIGINT.
        sys.excepthook = lambda *_shown: None
        raise KeyboardInterrupt
    sys.exit(code)


def _end_interpreter(code: int) -> NoReturn:
    """End as the interpreter ends below a script: threads, exit handlers, what open files and `__del__` have to do.

    `os._exit` would lose what is in the buffers of files that were not closed. Frames of ours lie above, and are never
    returned to: Py_Exit does not come back.
    """
    import ctypes

    if code < 0:
        # The signal comes last, as it does in Py_RunMain: on_exit(3) passes the status first, and raise(3) takes no
        # more. Finalization has reset SIGINT to its default by then.
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "on_exit"):  # musl
            _end_fork(code)
        libc.on_exit(ctypes.cast(libc["raise"], ctypes.c_void_p), None)
        code = -code
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError


def call(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    fds: list[int],
    state: State,
    *,
    numbered: bool = False,
) -> None:
    """A worker that is a fork of the launcher's, with its call in memory. Does not return."""
    import atexit

    atexit._clear()  # the launcher's exit handlers are not ours to run
    if "phalanx._engine.pickling.picklers" in sys.modules:  # nor is what it may itself have received from a launcher
        sys.modules["phalanx._engine.pickling.picklers"].received.clear()
    me = Child(state, rank, fds[_REPORT], forked=True)
    _leave(lambda: _run(lambda: (function, arguments), me, numbered=numbered))


def _serve(rank: int, fds: list[int], *, forked: bool) -> int:
    from phalanx._engine.pickling.payload import Payload

    payload = Payload(fds[_PAYLOAD], fds[2:])
    index = payload.index
    sys.path[:] = index["path"]
    sys.argv[:] = index["argv"]
    me = Child(index["members"][rank], rank, fds[_REPORT], forked=forked)
    me.tracker = payload.take(rank)
    me.environment = index["envs"].get(rank, {})

    def load() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        try:
            if index["main"] is not None:
                main_module.run_again(index["main"])
            return _unpickled(payload, rank)
        finally:
            payload.close()

    return _run(load, me, numbered=index["numbered"])


def _run(load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]], me: Child, *, numbered: bool) -> int:
    """Do the work, as a child of `multiprocessing`. Returns the exit code.

    A function that is ``numbered`` takes the rank before its arguments, and nobody wants what it returns.
    """
    _begin(me)
    me.begin()
    try:
        return _work(load, me, numbered=numbered)
    finally:
        me.end()


def _work(load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]], me: Child, *, numbered: bool) -> int:
    pid = os.getpid()
    try:
        function, arguments = _loaded(load, me)
        if not numbered:  # now: the function may leave nothing to import it from, and no descriptor
            from phalanx._engine.pickling import picklers, results  # noqa: F401 - see above
        known = dict(vars(sys.modules["__main__"]))
        value = function(me.rank, *arguments) if numbered else function(*arguments)
    except BaseException as error:  # noqa: BLE001 - the worker's whole purpose is to tell
        code = _failed(error)
        if code:
            return code
        value, known = None, {}
    if os.getpid() == pid:  # no heartbeat is to be expected any more: what follows may take long
        getattr(sys.modules.get("phalanx.timer._beats"), "rest", int)()
    if numbered or os.getpid() != pid:  # a fork of the function's own that came back has no value to report
        return 0
    try:
        _send(me, value, known)
    except BaseException as error:  # noqa: BLE001 - as above
        return _failed(error)
    return 0


def _failed(error: BaseException) -> int:
    """Leave evidence of what has ended the work. Returns the exit code; -SIGINT if it was interrupted."""
    if isinstance(error, SystemExit):
        recording.note_exit(error, _Mine.error_file)
        return _exit_code(error)
    _record(error)
    if not isinstance(error, KeyboardInterrupt):
        return 1
    sys.last_type, sys.last_value = type(error), error  # as if it had been shown: exit handlers look for it
    return -_SIGINT


def _loaded(
    load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]], me: Child
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments."""
    me.inherit(begins=True)
    try:
        return load()
    except main_module.UnguardedMainError as error:
        raise error.with_traceback(None) from None
    finally:
        me.inherit(begins=False)
        me.settle()
        os.environ.update(me.environment)  # over what the top of the main module has made of it
        if "torch" in sys.modules:
            from phalanx._engine.pickling import tensors

            tensors.note_received()


def _unpickled(payload: Payload, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        return payload.load(rank)
    except Exception as error:
        why = main_module.absent(error) if isinstance(error, AttributeError) else ""
        error.add_note(why or f"The function or the arguments of rank {rank} could not be unpickled in the worker.")
        raise


def _begin(me: Child) -> None:
    """Note what the end will need, and get ready for what may happen until then."""
    _Mine.child = me
    _Mine.error_file = os.environ.get(ERROR_FILE_ENV, "")
    _Mine.stderr_logged = bool(os.environ.pop("PHALANX_STDERR_LOGGED", ""))  # not for groups of its own
    catch_fatal_signals()
    offer_stacks()
    linux.allow_ptrace()
    # A killed worker loses what is in its buffers, and a log that lags is no log.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        std_streams.try_call(stream, "reconfigure", line_buffering=True)


def _send(me: Child, value: object, known: dict[str, Any]) -> None:
    from phalanx._engine.pickling import results

    memfd, fds = results.pack(value, known)
    try:
        size = os.fstat(memfd).st_size
        if size <= _SMALL:  # without a descriptor, of which only so many may be under way, or open in the launcher
            body, sent = worker_messages.RESULT + os.pread(memfd, size, 0), fds
        else:
            body, sent = worker_messages.LARGE, [*fds, memfd]
        if me.report is None:
            raise OSError(errno.EBADF, _CLOSED)
        worker_messages.send(me.report, body, sent)
    except channels.Closed:  # a launcher that is there must not take this for no value
        raise OSError(errno.EPIPE, _SHUT) from None
    finally:
        for fd in (memfd, *fds):
            os.close(fd)


def _record(error: BaseException) -> None:
    """Leave evidence, and print the traceback where a plain interpreter would: to stderr, if that is a log file.

    Where no evidence can be written the traceback is printed anyway, and told to the launcher.
    """
    moment = time.monotonic_ns()  # first of all: the rest takes its time
    # Our own frames, above the user's, are nobody's concern.
    trace = skip_own_frames(error.__traceback__)
    if trace is not None or main_module.says_it_all(error):
        error.__traceback__ = trace
    recorded = recording.record(error, _Mine.error_file, left=True)
    me = _Mine.child  # what fails before there is one is printed, as by any interpreter
    if recorded and me is not None and not _Mine.stderr_logged:
        return
    message, stack = describe(error)
    if me is not None and not recorded:
        _tell_evidence(me, message, stack, moment)
    std_streams.write_stderr(stack)


def _tell_evidence(me: Child, message: str, stack: str, moment: int) -> None:
    """Tell the launcher what no file could take. Never raises: a disk, a limit or the user has done enough already.

    The socket stays open: another file of the user's would get its number, and later words would go there.
    """
    try:
        report = me.report
        if report is not None:
            body = worker_messages.evidence(_cut(message, _MESSAGE_LIMIT), _cut(stack, _STACK_LIMIT), moment)
            worker_messages.send(report, body, patience=_PATIENCE)
    except (OSError, ValueError, MemoryError, channels.Closed):
        pass


def _cut(text: str, size: int) -> bytes:
    """A text as UTF-8, cut in the middle, so that its two ends have ``size`` bytes at most."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= size:
        return data
    half = size // 2
    ends = (data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore"))
    return "\n... cut ...\n".join(ends).encode()


def _exit_code(leave: SystemExit) -> int:
    """The exit code of ``sys.exit(...)``, as the interpreter would find it. Prints a text, as the interpreter does."""
    if leave.code is not None and not isinstance(leave.code, int):
        try:
            text = str(leave.code)
        except Exception:  # noqa: BLE001 - of the user's
            text = ""
        std_streams.write_stderr(text + "\n")
    return exit_code(leave)


def _code_of(work: Callable[[], int]) -> int:
    """Run a worker's work. Returns its exit code, also if it fails outside the user's code; -SIGINT if interrupted."""
    try:
        return work()
    except BaseException as error:  # noqa: BLE001 - it is recorded
        return _failed(error)


def _leave(run: Callable[[], int]) -> NoReturn:
    """Run a forked worker's work as if the interpreter were its own, and end the process."""
    code = 1
    _Mine.child, _Mine.error_file = None, ""  # the launcher may itself be a worker
    try:
        code = _code_of(lambda: _as_own(run))
    finally:
        _end_fork(code)


def _as_own(run: Callable[[], int]) -> int:
    import atexit
    import signal  # noqa: F401 - the end needs it, and the function may leave nothing to import it from
    import threading  # noqa: F401 - as above

    if "faulthandler" in sys.modules:  # the launcher's stacks go where the launcher wants them, ours do not
        sys.modules["faulthandler"].disable()
    if "multiprocessing.util" in sys.modules:
        atexit.register(sys.modules["multiprocessing.util"]._exit_function)
    # As the interpreter has it by -u, which has made the streams of the launcher, or by its environment.
    unbuffered = getattr(sys.__stdout__, "write_through", False) or bool(os.environ.get("PYTHONUNBUFFERED"))
    std_streams.reopen(unbuffered=unbuffered)
    return run()


def _end_fork(code: int) -> NoReturn:
    """End a forked worker as an interpreter ends, but for what others had begun before the fork: that is left alone."""
    try:
        for step in _last_steps():
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - an interrupt: the interpreter shows it, and goes on
                std_streams.write_stderr(describe(error)[1])
        std_streams.flush()
        linux.flush_stdio()
        if code < 0:
            _die_of_interrupt()
    finally:
        os._exit(code if code >= 0 else 128 - code)


def _last_steps() -> tuple[Callable[[], None], ...]:
    """What an interpreter does at its end: it waits for threads, and runs exit handlers."""
    import atexit
    import threading

    return threading._shutdown, atexit._run_exitfuncs  # type: ignore[attr-defined]  # the stubs lack them


def _die_of_interrupt() -> None:
    """End by SIGINT, as an interpreter does, so that whoever reaps us sees what happened. Returns if it is blocked."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
