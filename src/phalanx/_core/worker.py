"""What runs in a function worker before and after the user's code.

Owns the worker's side of the contract: unpickle, call, send the value back or leave evidence, exit. Knows nothing
of the group, and as little as possible is imported here: it is on the start-up path of every worker.
"""

from __future__ import annotations

import _socket
import os
import sys

from phalanx._core import evidence, linux, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    import io
    from collections.abc import Callable
    from typing import Any, NoReturn

    from phalanx._core.payload import Payload

_SMALL = 16 * 1024  # bytes of a pickled value that go into the message itself
_SIGINT = 2
_REPORT, _PAYLOAD = 0, 1  # places among the descriptors that every function worker is given


def main(rank: int) -> None:
    """A worker in an interpreter of its own; the last word of its command line lists its descriptors."""
    linux.die_with_parent(os.getppid())
    fds = [int(fd) for fd in sys.argv[-1].split(",")]
    for fd in fds:
        os.set_inheritable(fd, False)  # they had to survive our exec; what the user's code starts is not to have them
    sys.exit(_serve(rank, fds, "spawn"))


def serve(rank: int, fds: list[int]) -> None:
    """A worker that is a fork of its keeper. Does not return."""
    _part_ways()
    _leave(lambda: _serve(rank, fds, "forkserver"))


def serve_script(argv: list[bytes]) -> None:
    """A worker that is a fork of its keeper, and a script: ``argv`` is as `script` has it. Does not return."""
    from phalanx._core import script

    _part_ways()
    sys.argv[:] = [os.fsdecode(argument) for argument in argv]
    _open_streams(unbuffered=True)
    handler = sys.modules.get("faulthandler")
    if handler is not None and handler.is_enabled():  # by PYTHONFAULTHANDLER; our keeper's handlers are gone since
        handler.disable()
        handler.enable(2)
    _end_interpreter(_exit_of(lambda: script.run(evidence)))


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
            _die_of_interrupt()
        libc.on_exit(ctypes.cast(libc["raise"], ctypes.c_void_p), None)
        code = -code
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError


def call(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    fds: list[int],
    launcher: int,
    *,
    numbered: bool = False,
) -> None:
    """A worker that is a fork of the launcher's, with its call in memory. Does not return."""
    known = dict(vars(sys.modules["__main__"]))
    import atexit

    atexit._clear()  # the launcher's exit handlers are not ours to run
    _leave(
        lambda: _run(
            lambda: (function, arguments), rank, fds[_REPORT], "fork", launcher, known=known, numbered=numbered
        )
    )


def _serve(rank: int, fds: list[int], method: str) -> int:
    from phalanx._core.payload import Payload

    payload = Payload(fds[_PAYLOAD], fds[2:])
    index = payload.index
    sys.path[:] = index["path"]
    sys.argv[:] = index["argv"]

    def load() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _load(payload, rank)

    shared = index.get("multiprocessing")
    return _run(load, rank, fds[_REPORT], method, index["launcher"], shared, numbered=index["numbered"])


def _load(payload: Payload, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        return payload.load(rank)
    finally:
        payload.close()


def _run(
    load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
    rank: int,
    report: int,
    method: str,
    launcher: int,
    shared: dict[str, Any] | None = None,
    known: dict[str, Any] | None = None,
    *,
    numbered: bool = False,
) -> int:
    """Do the work; within `multiprocessing`'s frame for a child where it is in use. Returns the exit code.

    A function that is ``numbered`` takes the rank before its arguments, and nobody wants what it returns.
    """
    evidence.catch_fatal_signals()
    evidence.offer_stacks()
    # A killed worker loses what is in its buffers, and a log that lags is no log.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the interpreter's own text streams
    if shared is None and "multiprocessing.process" not in sys.modules:
        return _work(load, rank, report, known or {}, numbered=numbered)
    from multiprocessing import get_context, process

    current = process.current_process()
    if shared is not None:
        current.authkey = shared["authkey"]
        # The flag under which multiprocessing lets authentication keys be unpickled, as its own children do.
        current._inheriting = True  # type: ignore[attr-defined]  # multiprocessing.spawn sets it so
    code = 0

    def body() -> None:
        nonlocal code
        code = _work(load, rank, report, known or {}, numbered=numbered)

    child = get_context(method).Process(target=body, name=f"Process-{rank + 1}")  # type: ignore[attr-defined]  # typeshed lacks it on the base
    child._parent_pid = launcher
    # A pidfd serves as the sentinel of the parent: readable once it has ended, as multiprocessing expects.
    child._bootstrap(os.pidfd_open(launcher))
    return code


def _work(
    load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
    rank: int,
    report: int,
    known: dict[str, Any],
    *,
    numbered: bool,
) -> int:
    me = os.getpid()
    try:
        try:
            function, arguments = load()
        except Exception as error:
            error.add_note(f"The function or the arguments of rank {rank} could not be unpickled in the worker.")
            raise
        value = function(rank, *arguments) if numbered else function(*arguments)
    except SystemExit as leave:
        evidence.note_exit(leave)
        code = _exit_code(leave)
        if code:
            return code
        value = None
    except KeyboardInterrupt as error:
        _record(error)
        return _die_of_interrupt()
    except BaseException as error:  # noqa: BLE001 - the worker's whole purpose is to tell
        _record(error)
        return 1
    if numbered or os.getpid() != me:  # a fork of the function's own that came back has no value to report
        return 0
    try:
        _send(report, rank, value, known)
    except BaseException as error:  # noqa: BLE001 - as above
        _record(error)
        return 1
    return 0


def _send(report: int, rank: int, value: object, known: dict[str, Any]) -> None:
    from phalanx._core.payload import pack_value

    memfd = pack_value(value, known)
    size = os.fstat(memfd).st_size
    channel = wire.Channel(_socket.socket(fileno=report))
    try:
        if size <= _SMALL:  # without a descriptor, of which only so many may be under way, or open in the launcher
            sent = channel.send(("result", rank, os.getpid(), os.pread(memfd, size, 0)))
        else:
            sent = channel.send(("result", rank, os.getpid(), None), [memfd])
        while not sent:
            import select

            poll = select.poll()
            poll.register(channel.fileno(), select.POLLOUT)
            poll.poll()
            sent = channel.flush()
    except wire.Closed:  # nobody waits for it any more
        pass
    finally:
        channel.close()
        os.close(memfd)


def _record(error: BaseException) -> None:
    """Leave evidence, and print the traceback where a plain interpreter would: to stderr, if that is a log file."""
    # Our own frames, above the user's, are nobody's concern.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, _payload_file()):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
    evidence.record(error)
    if os.environ.get("PHALANX_STDERR_LOGGED"):
        print(evidence.describe(error)[1], end="", file=sys.stderr, flush=True)  # noqa: T201 - as above


def _payload_file() -> str:
    return getattr(sys.modules.get("phalanx._core.payload"), "__file__", None) or __file__


def _exit_code(leave: SystemExit) -> int:
    """The exit code of ``sys.exit(...)``, as the interpreter would find it."""
    if leave.code is not None and not isinstance(leave.code, int):
        print(leave.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return evidence.exit_code(leave)


def _die_of_interrupt() -> int:
    """End by SIGINT, as an interpreter does, so that whoever reaps us sees what happened."""
    import signal

    _flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    return 130


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed by the user, or a full disk
            pass


def _leave(run: Callable[[], int]) -> None:
    """Run a forked worker's work as if the interpreter were its own, and end the process."""
    import atexit
    import threading

    code = 1
    try:
        if "faulthandler" in sys.modules:  # the launcher's stacks go where the launcher wants them, ours do not
            sys.modules["faulthandler"].disable()
        if "multiprocessing.util" in sys.modules:
            atexit.register(sys.modules["multiprocessing.util"]._exit_function)
        _open_streams(unbuffered=False)
        code = run()
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter's end does
        atexit._run_exitfuncs()
    finally:
        _flush()
        linux.flush_stdio()
        os._exit(code)


def _open_streams(*, unbuffered: bool) -> None:
    """Make the standard streams anew on 0, 1 and 2, with the attributes that the interpreter gives them.

    Those that are there were made for what the descriptors were before, and may hold what others wrote.
    """
    sys.stdin = sys.__stdin__ = _stream(0, "r", unbuffered=unbuffered)  # type: ignore[misc]  # final, but for us
    sys.stdout = sys.__stdout__ = _stream(1, "w", unbuffered=unbuffered)  # type: ignore[misc]  # as above
    sys.stderr = sys.__stderr__ = _stream(2, "w", unbuffered=unbuffered)  # type: ignore[misc]  # as above


def _stream(fd: int, mode: str, *, unbuffered: bool) -> io.TextIOWrapper:
    import io

    before = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[fd]
    encoding, errors = getattr(before, "encoding", None), getattr(before, "errors", None)
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    binary: Any = io.BufferedReader(raw) if mode == "r" else raw if unbuffered else io.BufferedWriter(raw)
    by_line = mode == "w" and not unbuffered
    text = io.TextIOWrapper(binary, encoding, errors, "\n", line_buffering=by_line, write_through=unbuffered)
    text.mode = mode  # type: ignore[misc]  # typeshed has it read-only
    return text
