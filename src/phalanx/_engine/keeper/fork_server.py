"""The process that preloads: it imports modules, checks that a fork of it works, and forks guards on request.

Its client in the launcher is `forkserver`; what the two send each other is in `protocol`. Its forks become guard
and keeper as any others do. It watches over none of them, and no group needs it once its keeper is forked.

    launcher -- fork server -- guard -- keeper -- workers (forks, warm)

It ends with the launcher, or when the launcher's end of the socket closes.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import select
import signal
import sys
import threading
import weakref

from phalanx._base import channels, clock, linux
from phalanx._engine import main_module, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LEAVING = 1.0  # seconds that a thread which has been joined, and is none of Python's any more, may take to its end


def main(fd: int, path: list[str]) -> None:
    """Run as the fork server with the socket ``fd``. Does not return.

    ``path`` is what the interpreter had on `sys.path` by itself.
    """
    from phalanx._engine.keeper import guard

    os.set_inheritable(fd, False)
    guard.fill_standard_descriptors()  # those that the launcher had closed; a fork gets a group's own
    sock = _socket.socket(fileno=fd)
    # Nothing is received during the imports: then the launcher's death kills us. Its thread that started us waits.
    linux.die_with_parent(os.getppid())
    launcher = guard.open_launcher(sock)
    if not getattr(sys.flags, "safe_path", False):
        del path[0]  # the working directory, where ``-c`` looks, and no worker of ours
    channel = channels.Channel(sock)
    try:
        while (received := channel.receive_by(None, [launcher])) is not None:
            (verb, *fields), fds = received
            if verb == "preload":
                _on_preload(channel, path, *fields)  # type: ignore[arg-type]  # as `protocol.preload` has them
            else:
                _on_fork(channel, launcher, fds, *fields)  # type: ignore[arg-type]  # as `protocol.fork` has them
        os._exit(0)
    except channels.Closed:
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        os._exit(70)


def _on_preload(
    channel: channels.Channel,
    own: list[str],
    path: list[str],
    modules: list[str],
    main: main_module.Source | None,
    arguments: list[str],
) -> None:
    import gc
    import importlib

    from phalanx._base import process  # noqa: F401 - what forks will need
    from phalanx._engine import forkserver, supervisor  # noqa: F401 - workers that run the main module again import them
    from phalanx._engine.keeper import guard, start_group, start_process  # noqa: F401 - what forks will need
    from phalanx._engine.pickling import payload, results  # noqa: F401 - what forks will need
    from phalanx._engine.worker import forked, script  # noqa: F401 - what forks will need

    forked.own_path[:] = own
    ours = list(sys.path)
    sys.path[:] = [*path, *own]
    with start_process.preloaded:
        for name in modules:
            channel.send(protocol.importing(name))
            try:
                if name == "__main__":
                    assert main is not None
                    sys.argv[:] = arguments
                    _run_again(main)
                else:
                    importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher is told
                how = "run again" if name == "__main__" else "imported"
                _send(channel, protocol.failed(name, f"could not be {how}", _described(error)))
                return
            why = _cannot_fork()
            if why:
                _send(channel, protocol.failed(name, why, ""))
                return
    sys.path[:] = ours
    guard.load_end()
    if "torch" in sys.modules:
        from phalanx._engine.pickling import tensors  # noqa: F401 - what forks will need
    forked.inherited[:] = weakref.finalize._registry  # type: ignore[attr-defined]  # the stubs lack it
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGCONT)  # a stopped one could not see the launcher's death
    guard.ignore_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the guards that we fork; launchers hold pidfds
    gc.collect()
    gc.freeze()
    _send(channel, protocol.ready())


def _run_again(main: main_module.Source) -> None:
    """Run the main module again. `multiprocessing` refuses to start children meanwhile, as in its own children."""
    from multiprocessing import process

    me: Any = process.current_process()
    me._inheriting = True
    try:
        main_module.run_again(main)
    finally:
        del me._inheriting


def _send(channel: channels.Channel, message: channels.Message) -> None:
    """Send a message, after a flush of what the modules have printed: a fork would print it once more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk, or closed by a module
            stream.flush()
    linux.flush_stdio()
    channel.send(message)


def _described(error: BaseException) -> str:
    from phalanx._evidence.describe import format_exception, is_own_file

    trace = None if isinstance(error, main_module.UnguardedMainError) else error.__traceback__
    # Frames of this package and of the import system are left out.
    while trace is not None and (
        is_own_file(trace.tb_frame.f_code.co_filename)
        or trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")
        or trace.tb_frame.f_code.co_filename.endswith("importlib/__init__.py")
    ):
        trace = trace.tb_next
    return format_exception(error, trace)


def _cannot_fork() -> str:
    """Why the last import makes a fork of this process a broken copy; "" if it does not."""
    import warnings

    if _threads() > 1:
        # Libraries with a fork handler (OpenBLAS) end their threads before a fork, and start them again when needed.
        with warnings.catch_warnings(action="ignore"):  # Python 3.12 and later warn of the other threads
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, by the host or by the module
            os.waitpid(pid, 0)
    count = _threads() - 1
    until = clock.now() + _LEAVING
    while count > 0 and threading.active_count() == 1 and clock.now() < until:
        select.select((), (), (), 0.001)
        count = _threads() - 1
    if count > 0:
        others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        what = f"{count} thread{'s' * (count > 1)}" + (f" ({', '.join(others)})" if others else "")
        return f"has started {what}, which a fork would not have: it cannot be preloaded"
    initialized = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    if callable(initialized) and initialized():
        return "has initialised CUDA, which does not work in a fork: it cannot be preloaded"
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                return "has opened a GPU, which does not work in a fork: it cannot be preloaded"
        except OSError:
            continue
    return ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _on_fork(channel: channels.Channel, launcher: int, fds: list[int], serial: int, page: str, umask: int) -> None:
    from phalanx._engine.keeper import guard

    sock, cwd, out, err = fds
    try:
        pid = os.fork()
    except OSError as error:
        pid = -1
        channel.send(protocol.not_forked(serial, error.errno or 0))
    if pid == 0:
        try:
            channel.close()
            os.fchdir(cwd)
            os.umask(umask)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for fd in (cwd, out, err):
                os.close(fd)
            os.setsid()
            linux.map_name(page)
            guard.keep(_socket.socket(fileno=sock), launcher=launcher)
        finally:
            os._exit(70)
    for fd in fds:
        os.close(fd)
    if pid > 0:
        try:
            own = [os.pidfd_open(pid)]
        except OSError:  # it has died: the launcher sees EOF on its socket
            own = []
        channel.send(protocol.forked(serial, pid), own)
        for fd in own:
            os.close(fd)
