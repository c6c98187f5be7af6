"""A process that has imported what workers will need, and forks the keepers of groups whose workers have it already.

Owns the importing, and the check that what was imported survives a fork. Its forks become guard and keeper as any
others do; it watches over none of them, and nothing of a group depends on it once its keeper is forked.

    launcher -- zygote -- guard -- keeper -- workers (forks, warm)

It ends with the launcher, or when the launcher's end of the socket closes.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading

from phalanx._base import channels, clock, interpreter, linux, procfs
from phalanx._base.process import reap_later
from phalanx._engine import main_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

_CLOSING = 10.0  # seconds in which a zygote that nobody needs has to be gone before it is killed
_KILLED = 2.0  # seconds after SIGKILL in which it is waited for
_LEAVING = 1.0  # seconds that a thread which has been joined, and is none of Python's any more, may take to its end
_FORKING = 60.0  # seconds in which it has to have forked: the launcher holds signals back meanwhile


class PreloadError(RuntimeError):
    """A module that was to be preloaded could not be, or must not be.

    Attributes:
        module: The module's name.
        traceback: The text of what its import raised; "" if it was imported, but has started what a fork would break.
    """

    __module__ = "phalanx.multiprocessing"

    def __init__(self, message: str, module: str = "", traceback: str = "") -> None:
        super().__init__(message, module, traceback)
        self.module = module
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.args[0]}\n\n{self.traceback}".rstrip() if self.traceback else str(self.args[0])


# --- in the launcher


class Zygote:
    """The launcher's end.

    Args:
        preload: The modules to import, in order. ``"__main__"`` is ``main``.
        path: Folders that come first on `sys.path` while they are imported.
        flags: The interpreter's options.
        env: Environment variables on top of the launcher's: some are read by a library once, as it is loaded.
        main: The launcher's main module, if that can be run again.
    """

    def __init__(
        self,
        preload: Sequence[str],
        path: Sequence[str],
        flags: Sequence[str],
        env: Mapping[str, str],
        main: main_module.Source | None = None,
    ) -> None:
        self.preload = tuple(preload)
        self._main = main
        self._env = dict(env)
        self._path = list(path)
        self._flags = list(flags)
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._serial = 0  # of the last question: an answer that nobody has waited for is for an older one
        self._channel: channels.Channel | None = None
        self._ready = False
        self._importing = ""
        self._failure: PreloadError | None = None
        self._one = threading.Lock()
        self._owner = 0

    @property
    def usable(self) -> bool:
        """Whether it runs, and nothing has failed."""
        return self._failure is None and self._alive()

    def start(self) -> None:
        """Start to import. Raises OSError."""
        self._owner = os.getpid()
        occupied = linux.occupy_standard_descriptors()
        ours, theirs = channels.pair()
        try:
            fd = theirs.fileno()
            code = f"from phalanx._engine.forkserver import main;main({fd},path)"
            command = interpreter.command(self._flags, code, "path=sys.path[:];")
            # A session of its own: a Ctrl-C at the terminal is for the launcher.
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                start_new_session=True,
                env={**os.environ, **self._env},
            )
            self._channel = channels.Channel(ours)
            # A process that an import has started may hold the socket, which would not tell of its end then.
            self._pidfd = _pidfd(self._popen.pid)
            arguments = [str(argument) for argument in getattr(sys, "argv", [])]
            self._channel.send(("preload", self._path, list(self.preload), self._main, arguments))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in occupied:
                os.close(fd)

    def wait(self) -> None:
        """Return when all is imported. Raises PreloadError."""
        with self._one:
            if self._ready:
                return
            if self._failure is not None:
                raise self._failure
            while not self._ready:
                (verb, *said), _fds = self._receive()
                if verb == "importing":
                    self._importing = str(said[0])
                elif verb == "failed":
                    module, why, text = map(str, said)
                    msg = f"preload: {module!r} {why}"
                    self._failure = PreloadError(msg, module, text)
                    raise self._failure
                else:
                    self._ready = True

    def fork(self, sock: _socket.socket, page: str) -> tuple[int, int]:
        """Fork a guard, which keeps at the end ``sock``. Returns its pid and a pidfd. Raises PreloadError, OSError.

        ``page`` names a page that is mapped in it and its forks, for the last resort of `launch`.
        """
        self.wait()
        cwd = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            with self._one:
                assert self._channel is not None
                self._serial += 1
                self._channel.drop_received()
                try:
                    self._channel.send(("fork", self._serial, page, procfs.umask()), [sock.fileno(), cwd, 1, 2])
                except channels.Closed:
                    self._gone()
                (verb, number), fds = self._answer()
        finally:
            os.close(cwd)
        if verb == "error":
            raise OSError(number, os.strerror(number))
        return number, fds[0] if fds else -1

    def _answer(self) -> tuple[tuple[str, int], list[int]]:
        """The answer to the last question. Older ones were for a call that an exception has ended meanwhile."""
        while True:
            (verb, serial, number), fds = self._receive(_FORKING)
            if serial == self._serial:
                return (str(verb), int(str(number))), fds
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Let it go. The groups that it has forked live on. Idempotent."""
        if self._owner != os.getpid():  # a fork of the launcher, which needs it still: the shutdown would be for both
            self._close_descriptors()
            return
        if self._channel is not None:
            self._channel.shutdown()
        if self._alive() and not self._ready:  # it does not listen while it imports; what that has started goes as well
            assert self._popen is not None
            try:
                os.killpg(self._popen.pid, signal.SIGKILL)
            except ProcessLookupError:  # its session is not made yet, or it has just gone
                self._popen.kill()
        if self._popen is not None:
            self._end(_CLOSING if self._ready else _KILLED)
        with self._one:  # another thread may be listening, and has heard the end by now
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._channel is not None:
            self._channel.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _end(self, seconds: float) -> int | None:
        """Reap it; kill it if it does not go within ``seconds``. Returns its exit code; None if it cannot be reaped."""
        assert self._popen is not None
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        try:
            return self._popen.wait(_KILLED)
        except subprocess.TimeoutExpired:  # on a disk that does not answer
            reap_later(self._popen.wait)
            return None

    def _alive(self) -> bool:
        return self._popen is not None and self._owner == os.getpid() and self._popen.poll() is None

    def _receive(self, timeout: float | None = None) -> tuple[channels.Message, list[int]]:
        assert self._channel is not None
        deadline = None if timeout is None else clock.now() + timeout
        received = None
        try:
            received = self._channel.receive_by(deadline, [self._pidfd])
        except TimeoutError:  # it is stopped: what it sends later would be taken for the answer to another question
            assert self._popen is not None
            self._popen.kill()
        except channels.Closed:
            pass
        if received is None:
            self._gone()
        return received

    def _gone(self) -> NoReturn:
        code = self._end(_KILLED)
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        if code is None:
            how = "was killed, and does not end"
        if self._ready:
            msg = f"preload: the process that has imported {', '.join(self.preload) or 'nothing'} {how}"
            raise PreloadError(msg) from None
        what = repr(self._importing or ", ".join(self.preload))  # the latter: it was gone before it could say
        msg = f"preload: {what} could not be imported: the process that does so {how}"
        raise PreloadError(msg, self._importing) from None


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # so soon: the socket will tell
        return -1


# --- in the zygote


def main(fd: int, path: list[str]) -> None:
    """Be a zygote, at the end ``fd``. ``path`` is what the interpreter itself had on `sys.path`. Does not return."""
    from phalanx._engine.keeper import start_process

    os.set_inheritable(fd, False)
    start_process.fill_standard_descriptors()  # what the launcher had closed; a fork puts a group's own in their place
    sock = _socket.socket(fileno=fd)
    # While we import, nobody listens at the socket. The thread that has started us waits for as long.
    linux.die_with_parent(os.getppid())
    launcher = start_process.open_launcher(sock)
    if not getattr(sys.flags, "safe_path", False):
        del path[0]  # the working directory, where ``-c`` looks, and no worker of ours
    channel = channels.Channel(sock)
    try:
        while (received := channel.receive_by(None, [launcher])) is not None:
            (verb, *arguments), fds = received
            if verb == "preload":
                _preload(channel, path, *arguments)  # type: ignore[arg-type]  # the launcher sends what it takes
            else:
                _fork(channel, launcher, fds, *arguments)  # type: ignore[arg-type]  # as above
        os._exit(0)
    except channels.Closed:
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        os._exit(70)


def _preload(
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
    from phalanx._engine.keeper import guard, start_process  # noqa: F401 - what forks will need
    from phalanx._engine.pickling import payload  # noqa: F401 - what forks will need
    from phalanx._engine.worker import function, script  # noqa: F401 - what forks will need

    function.own_path[:] = own
    ours = list(sys.path)
    sys.path[:] = [*path, *own]
    with start_process.importing():
        for name in modules:
            channel.send(("importing", name))
            try:
                if name == "__main__":
                    assert main is not None
                    sys.argv[:] = arguments
                    _run_again(main)
                else:
                    importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher is told
                how = "run again" if name == "__main__" else "imported"
                _say(channel, "failed", name, f"could not be {how}", _described(error))
                return
            why = _cannot_fork()
            if why:
                _say(channel, "failed", name, why, "")
                return
    sys.path[:] = ours
    linux.prctl(linux.PR_SET_PDEATHSIG, 0)
    start_process.turn_deaf()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the guards that we fork; launchers hold pidfds
    gc.collect()
    gc.freeze()
    _say(channel, "ready")


def _run_again(main: main_module.Source) -> None:
    """Run the main module. `multiprocessing` refuses to start children meanwhile, as it does in its own."""
    from multiprocessing import process

    me: Any = process.current_process()
    me._inheriting = True
    try:
        main_module.run_again(main)
    finally:
        del me._inheriting


def _say(channel: channels.Channel, *message: object) -> None:
    """Send, after what the modules have printed: a fork would print it once more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk, or closed by a module
            stream.flush()
    linux.flush_stdio()
    channel.send(message)


def _described(error: BaseException) -> str:
    import traceback

    from phalanx._evidence.describe import is_own_file

    trace = None if isinstance(error, main_module.UnguardedMainError) else error.__traceback__
    # Ours, and the import system's, say nothing about the module.
    while trace is not None and (
        is_own_file(trace.tb_frame.f_code.co_filename)
        or trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")
        or trace.tb_frame.f_code.co_filename.endswith("importlib/__init__.py")
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _cannot_fork() -> str:
    """Why the last import makes a fork of this process a broken copy; "" if it does not."""
    import warnings

    if _threads() > 1:
        # Libraries that know about forks (OpenBLAS) end their threads before one, and start them anew when needed.
        with warnings.catch_warnings(action="ignore"):  # of the others, which Python 3.12 and later warn of
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


def _fork(channel: channels.Channel, launcher: int, fds: list[int], serial: int, page: str, umask: int) -> None:
    from phalanx._engine.keeper import guard

    sock, cwd, out, err = fds
    try:
        pid = os.fork()
    except OSError as error:
        pid = -1
        channel.send(("error", serial, error.errno))
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
        except OSError:  # gone so soon: the launcher hears of it by the socket
            own = []
        channel.send(("forked", serial, pid), own)
        for fd in own:
            os.close(fd)
