"""Starts and ends workers that are forks: of their keeper, or of the launcher.

A fork has the memory of its parent: random generators, exit handlers and streams are replaced at its start, and at its
end it leaves alone what the parent had begun.
"""

from __future__ import annotations

import os
import sys

from phalanx._base import linux, std_streams
from phalanx._base.interpreter import FOLLOW_ENV
from phalanx._engine.worker.function import REPORT, SIGINT, ThisWorker, recorded, run_call, run_payload, shown_exit_code
from phalanx._engine.worker.mp_child import Child
from phalanx._evidence.describe import describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from phalanx._engine.mp_parent import State

inherited: list[Any] = []
"""The `weakref.finalize` objects that were there before the fork. They are not called in it."""

own_path: list[str] = []
"""The initial `sys.path` of an interpreter, in a process that preloads modules. Scripts start with it."""


def serve(rank: int, fds: list[int]) -> None:
    """Run a function worker that is a fork of its keeper. Does not return."""
    _reseed_generators()
    _run_and_exit(lambda: run_payload(rank, fds, forked=True))


def serve_script(argv: list[bytes], fds: list[int]) -> None:
    """Run a script worker that is a fork of its keeper, with ``argv`` as `script` expects it. Does not return."""
    from phalanx._engine.worker import script

    _reseed_generators()
    linux.allow_ptrace()
    sys.path[:] = own_path
    sys.argv[:] = [os.fsdecode(argument) for argument in argv]
    std_streams.reopen(unbuffered=True)
    handler = sys.modules.get("faulthandler")
    # Enabled by PYTHONFAULTHANDLER. The keeper has reset the signal handlers since.
    if handler is not None and handler.is_enabled():
        handler.disable()
        handler.enable(2)
    _let_debugger_follow()
    _end_interpreter(_exit_code_of(lambda: script.run(fds[REPORT])))


def _let_debugger_follow() -> None:
    """Connect to the launcher's debugger, if it has one, see `interpreter.follow_fork`."""
    code = os.environ.pop(FOLLOW_ENV, "")
    if code:
        exec(code, {})  # noqa: S102 - the debugger's


def _reseed_generators() -> None:
    """Reseed the random generators whose state all forks of a keeper would share.

    Workers with an interpreter of their own share none. The standard library's generator reseeds itself in a fork.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    # Torch seeds its generator for the CPU at random in a new interpreter, and those of devices with a constant.
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()


def _exit_code_of(program: Callable[[], None]) -> int:
    """Run a program that prints its own failure. Returns its exit code; -SIGINT if it was interrupted."""
    try:
        program()
    except SystemExit as leave:
        return shown_exit_code(leave)
    except KeyboardInterrupt:
        return -SIGINT
    except BaseException:  # noqa: BLE001 - it has been recorded and printed
        return 1
    return 0


def _end_interpreter(code: int) -> NoReturn:
    """End as the interpreter ends after a script: join threads, run exit handlers, flush files, call `__del__`.

    `os._exit` would lose the buffers of files that were not closed. Py_Exit does not return to the frames above.
    """
    import ctypes

    if code < 0:
        # SIGINT is raised last, as in Py_RunMain: on_exit(3) passes the exit status as first argument, and raise(3)
        # takes one. Finalization has reset SIGINT to its default by then.
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
    """Run a function worker that is a fork of the launcher, with its call in memory. Does not return."""
    import atexit

    atexit._clear()  # the launcher's exit handlers must not run here
    if "weakref" in sys.modules:
        finalize = sys.modules["weakref"].finalize
        inherited[:] = finalize._registry
        finalize._registered_with_atexit = False  # those that are made here are called at the end
    if "phalanx._engine.pickling.picklers" in sys.modules:  # what the launcher itself has received, if it is a worker
        sys.modules["phalanx._engine.pickling.picklers"].received.clear()
    child = Child(state, rank, fds[REPORT], forked=True)
    _run_and_exit(lambda: run_call(lambda: (function, arguments), child, numbered=numbered))


def _run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Run a forked worker as if the interpreter were its own, and end the process."""
    code = 1
    ThisWorker.child, ThisWorker.error_file = None, ""  # the launcher may itself be a worker
    try:
        code = recorded(lambda: _as_own_interpreter(run))
    finally:
        _end_fork(code)


def _as_own_interpreter(run: Callable[[], int]) -> int:
    """Call ``run`` after the streams and exit handlers were set up as in a new interpreter. Returns its exit code."""
    import atexit
    import signal  # noqa: F401 - the end needs it, and the function may remove its file
    import threading  # noqa: F401 - as above

    if "faulthandler" in sys.modules:  # it would write this process's stacks to the launcher's file
        sys.modules["faulthandler"].disable()
    if "multiprocessing.util" in sys.modules:
        atexit.register(sys.modules["multiprocessing.util"]._exit_function)
    # As by -u, with which the launcher's streams were made, or by the environment.
    unbuffered = getattr(sys.__stdout__, "write_through", False) or bool(os.environ.get("PYTHONUNBUFFERED"))
    std_streams.reopen(unbuffered=unbuffered)
    _let_debugger_follow()
    return run()


def _end_fork(code: int) -> NoReturn:
    """End a forked worker as an interpreter ends, except for finalization: objects of before the fork are not freed."""
    try:
        import atexit
        import threading

        # Torch's take 30 ms, and 25 MB; one of a folder would remove it from under the other forks.
        for finalizer in inherited:
            finalizer.atexit = False
        for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]  # the stubs lack them
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - an interrupt: the interpreter prints it and goes on
                std_streams.write_stderr(describe(error)[1])
        std_streams.flush()
        linux.flush_stdio()
        if code < 0:
            _die_of_interrupt()
    finally:
        os._exit(code if code >= 0 else 128 - code)


def _die_of_interrupt() -> None:
    """End by SIGINT, as an interpreter does, so that the parent sees it in the status. Returns if SIGINT is blocked."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
