"""`HostedEtcd`: an etcd of one member that an agent hosts for its job, and which ends with the agent.

It runs as the one worker of a group: when the agent is killed, the group's keeper ends it. Its data are in a temporary
folder that only this user can enter, in memory where there is room. All of it goes when it is closed, or the agent is
killed; if the keeper is killed as well, the folder stays.

What listens at the endpoint checks passwords from the first moment on, if there is a secret: etcd is told so while it
listens on a socket in the folder alone, and is started again.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from contextlib import ExitStack, suppress

from phalanx._base import clock, files
from phalanx._group.command_group import SubprocessContext
from phalanx._logs.specs import FolderLogsSpecs
from phalanx._logs.std import Std
from phalanx._rendezvous.conf import NOT_FOR_WORKERS
from phalanx._store.etcd import server

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Self

_MEMORY = "/dev/shm"  # noqa: S108 - a folder of our own is made in it
_PATIENCE = 10.0  # seconds until it serves
_GRACE = 2.0  # seconds that its end may take, which is 0.01 s: it is killed
_ORPHAN_GRACE = 0.5  # seconds that its end may take once the agent was killed
_MOST_LOG = 64 << 10
_LOOPBACK = ("127.", "::1")


class HostedEtcd:
    """An etcd that this process hosts.

    Args:
        address: Where it listens: an address of this machine, or a name; all addresses that the name has here.
        port: Its port, 1 to 65535.
        secret: Clients need the password that `server.credentials` makes of it; b"": none is asked for.
        warn: Called with a line that the user should see. By any thread; it must not wait.
    """

    def __init__(self, address: str, port: int, *, secret: bytes, warn: Callable[[str], None]) -> None:
        self._address, self._port = address, port
        self._password = server.credentials(secret)[1]
        self._warn = warn
        self._owner = os.getpid()
        self._group: SubprocessContext | None = None
        self._folder = ""
        self._serves = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def where(self) -> str:
        """Its address and port, in words."""
        return f"[{self._address}]:{self._port}" if ":" in self._address else f"{self._address}:{self._port}"

    def start(self) -> bool:
        """Start it, and return when it serves: after about 0.4 s. Called once.

        Returns:
            True: it serves. False: something else listens there: another agent of this machine hosts it.

        Raises:
            FileNotFoundError: There is no etcd to be hosted. The message says what to install.
            OSError: The name is not known, or is no address of this machine; or etcd has ended or does not serve within
                10 s. The message has what it has logged.
        """
        addresses = self._find_addresses()
        if not addresses:
            return False
        if self._address not in (*addresses, "localhost") and all(one.startswith(_LOOPBACK) for one in addresses):
            self._warn(
                f"{self._address} is {', '.join(addresses)} on this machine, where no other machine reaches the etcd; "
                "give the address by which they do"
            )
        program = server.find_program()
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                self._run(program, addresses)
            except _EndedError as error:
                if not self._find_addresses():  # another one was faster
                    return False
                msg = f"the etcd at {self.where} has not started: {error}"
                raise OSError(msg) from None
            undo.pop_all()
        return True

    def close(self) -> None:
        """End it, and remove its folder. Idempotent. Takes 0.05 s, and 13 s at most."""
        if self._owner != os.getpid():
            return
        self._serves = False
        group, self._group = self._group, None
        folder, self._folder = self._folder, ""
        try:
            if group is not None:
                group.close(signal.SIGTERM, _GRACE)
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _find_addresses(self) -> list[str]:
        """Return the addresses to listen on; none, if something listens on one of them. Raises OSError."""
        import socket

        try:
            known = socket.getaddrinfo(self._address, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            msg = f"{self._address!r}: {getattr(error, 'strerror', None) or error}"
            raise OSError(msg) from None
        found: list[str] = []
        for family, kind, _, _, address in known:
            try:
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as etcd does: a port that was closed
                    probe.bind(address)  # just now can be had. No listen: it would be in the way of another's
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return []
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    msg = f"the etcd cannot listen at {self.where}: {error.strerror}"
                    raise OSError(msg) from None
            else:
                found.append(str(address[0]))
        if not found:
            msg = f"the etcd cannot listen at {self.where}: {self._address!r} is no address of this machine"
            raise OSError(msg)
        return list(dict.fromkeys(found))

    def _run(self, program: str, addresses: list[str]) -> None:
        """Start it, and wait until it serves. Raises _EndedError, OSError."""
        import socket

        self._folder = _make_folder()
        urls = [f"http://[{one}]:{self._port}" if ":" in one else f"http://{one}:{self._port}" for one in addresses]
        arguments = server.arguments(self._folder, program, urls, in_two_steps=bool(self._password))
        until = clock.now() + _PATIENCE
        with ExitStack() as held:
            entry = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, entry)
            inside = f"/proc/self/fd/{entry}"  # a path of any length fits a socket's address so
            told = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            told.bind(f"{inside}/{server.READY_SOCKET}")
            logs = os.path.join(self._folder, "logs")
            os.mkdir(logs)
            group = self._group = SubprocessContext(
                "etcd", "/bin/sh", {0: arguments}, {0: {"NOTIFY_SOCKET": server.READY_SOCKET, **NOT_FOR_WORKERS}},
                FolderLogsSpecs(logs, Std.ALL, Std.NONE), signals=False, orphan_grace=_ORPHAN_GRACE, speak=_say_nothing,
                announces=False,
            )  # fmt: skip
            group.start()
            self._wait_ready(group, told, until)
            if self._password:
                from phalanx._store.etcd import auth

                target = f"unix:{inside}/{server.socket_of(server.SETTING_UP)}"
                auth.enable(target, self._password, max(0.1, until - clock.now()))
                group.signal(signal.SIGUSR1)
                self._wait_ready(group, told, until)
        self._serves = True
        group.when_gone(lambda: self._tell_end(group))

    def _wait_ready(self, group: SubprocessContext, told: socket.socket, until: float) -> None:
        """Wait until etcd says that it serves. Raises _EndedError; TimeoutError."""
        import select

        poll = select.poll()
        poll.register(told, select.POLLIN)
        poll.register(group.fileno(), select.POLLIN)
        while ready := poll.poll(max(0.0, until - clock.now()) * 1000):
            if told.fileno() not in (fd for fd, _ in ready):
                raise _EndedError(_last_words(group))
            if b"READY=1" in told.recv(4096):
                return
        msg = f"the etcd at {self.where} does not serve after {_PATIENCE:g} s: {_last_words(group)}"
        raise TimeoutError(msg)

    def _tell_end(self, group: SubprocessContext) -> None:
        """Say that it has ended, though it was not closed. A thread of the group's calls this."""
        if self._serves:
            self._warn(f"the etcd at {self.where}, which this agent hosts, is gone: {_last_words(group)}")


class _EndedError(Exception):
    """Etcd has ended before it served."""


def _say_nothing(_: str) -> None:
    """Drop what the group has to say of processes: `HostedEtcd` says it of the etcd."""


def _last_words(group: SubprocessContext) -> str:
    """Return what the log says at its end, as a line."""
    data = b""
    with suppress(OSError):
        path = group.stderrs[0]
        data = files.read(path, _MOST_LOG, max(0, os.stat(path).st_size - _MOST_LOG))
    return server.words(data.decode("utf-8", "replace")) or "it has logged nothing"


def _make_folder() -> str:
    """Make a folder that only this user can enter: in memory, if there is room. Raises OSError."""
    with suppress(OSError):
        room = os.statvfs(_MEMORY)
        if room.f_bavail * room.f_frsize >= server.ROOM:
            return tempfile.mkdtemp(prefix="phalanx-etcd-", dir=_MEMORY)
    return tempfile.mkdtemp(prefix="phalanx-etcd-")
