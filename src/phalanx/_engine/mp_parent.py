"""The launcher as the parent of its workers in terms of `multiprocessing`: their identities, its resource tracker.

`worker/mp_child.py` has the other side.
"""

from __future__ import annotations

import _socket
import os
import sys

from phalanx._base.unpatched import loaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_KINDS = {"spawn": "SpawnProcess", "forkserver": "ForkServerProcess", "fork": "ForkProcess"}
_PREPARATION = (
    *("log_to_stderr", "log_level", "authkey", "name", "sys_path", "sys_argv", "orig_dir", "dir", "start_method"),
    *("init_main_from_name", "init_main_from_path"),
)
"""The keys of what `multiprocessing.spawn.get_preparation_data` returns: our workers have these otherwise."""

_INT = 4

State = tuple[str, tuple[int, ...], str, str, int, bytes, bool, "int | None", bool]
"""What a worker needs to be a child: its name and identity; then the start method, the parent's name and pid, the
authentication key, whether it is a daemon, the level of `multiprocessing`'s logger (None: it has none), and whether
that logs to stderr."""


class ChildIdentities:
    """The identities of a group's workers as children of this process, counted as `multiprocessing` counts them.

    Args:
        method: The start method.
        ranks: The local ranks of the workers.
        daemon: Whether they are daemons, which may have no children of their own by `multiprocessing`.
    """

    def __init__(self, method: str, ranks: Iterable[int], *, daemon: bool = False) -> None:
        from multiprocessing import process

        current: Any = process.current_process()
        counter = process._process_counter  # type: ignore[attr-defined]  # the stubs lack it
        key = bytes(current.authkey)
        self.method = method
        self._identities = {rank: (*current._identity, next(counter)) for rank in ranks}
        util = loaded("multiprocessing.util")
        level = None if util is None or util._logger is None else util._logger.getEffectiveLevel()
        self._shared = (method, current.name, os.getpid(), key, daemon, level, bool(util and util._log_to_stderr))

    def state(self, rank: int) -> State:
        """The state of one worker, which `marshal` can write."""
        return (self.name(rank), self._identities[rank], *self._shared)

    def name(self, rank: int) -> str:
        """The name of one worker, like ``"SpawnProcess-1"``."""
        return f"{_KINDS[self.method]}-{':'.join(map(str, self._identities[rank]))}"


def prepared_by_others() -> bytes:
    """What others have added to what `multiprocessing` sends its children first, pickled; b"" if nobody has.

    coverage.py adds an object that acts as it is unpickled.
    """
    spawn = loaded("multiprocessing.spawn")
    prepare: Any = getattr(spawn, "get_preparation_data", None)
    if spawn is None or prepare is None or prepare.__module__ == spawn.__name__:
        return b""
    import pickle

    return pickle.dumps([value for key, value in prepare("").items() if key not in _PREPARATION])


def resource_tracker() -> int | None:
    """The descriptor on which this process's resource tracker listens, if it has one."""
    module = loaded("multiprocessing.resource_tracker")
    # As multiprocessing.spawn does; but a worker's tracker, asked for the attribute, would request its launcher's.
    return None if module is None else vars(module._resource_tracker).get("_fd")


def send_tracker(fd: int) -> None:
    """Send the descriptor of this process's resource tracker over the socket ``fd``. Starts the tracker if need be.

    Always closes the socket. Where nothing could be sent, EOF tells the worker to start a tracker of its own.
    """
    try:
        from multiprocessing import resource_tracker

        number: Any = resource_tracker.getfd()
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, number.to_bytes(_INT, sys.byteorder))]
        sock = _socket.socket(fileno=os.dup(fd))
        try:
            sock.sendmsg([b"1"], rights, _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL)
        finally:
            sock.close()
    except Exception:  # noqa: BLE001, S110 - it has ended; there is no descriptor, no process; a warning is an error
        pass
    finally:
        os.close(fd)
