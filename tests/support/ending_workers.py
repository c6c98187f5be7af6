"""Workers that end in unusual ways: interrupted, without a file, a stream, an environment or a descriptor.

They stand here, apart from the tests, because a worker that is a fresh interpreter imports the module of its
function: this one costs it little.
"""

from __future__ import annotations

import atexit
import io
import os
import resource
import signal
import socket
import sys
import threading
from multiprocessing.util import Finalize
from typing import NoReturn

from tests.support.helpers import pass_gate, tell


def interrupted_with_work_left(path: str) -> NoReturn:
    def note(line: str) -> None:
        with open(path, "a") as file:
            file.write(line + "\n")

    def last_thread() -> None:
        threading.main_thread().join()  # it counts as ended when the interpreter begins to leave
        note("thread")

    atexit.register(note, "exit handler")
    Finalize(None, note, ("finalizer",), exitpriority=1)
    threading.Thread(target=last_thread).start()
    sys.stdout.write("no line end")
    raise KeyboardInterrupt


def interrupted_where_that_is_blocked() -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    raise KeyboardInterrupt


def clear_and_fail() -> NoReturn:
    os.environ.clear()
    raise ValueError("after that")


def clear_and_leave(ready: str, gate: str) -> NoReturn:
    os.environ.clear()
    atexit.register(pass_gate, gate)
    atexit.register(tell, ready, "leaving")  # before that
    sys.exit(3)


def fail_without_a_byte(stderr: str = "", text: str = "no room") -> NoReturn:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if stderr == "broken":
        sys.stderr = sys.__stderr__ = io.BytesIO()  # type: ignore[misc,assignment]  # it takes no text
    elif stderr == "absent":
        sys.stderr = sys.__stderr__ = None  # type: ignore[misc]  # as in a process without a console
    raise ValueError(text)


def fail_after(ready: str, gate: str) -> NoReturn:
    tell(ready, "up")
    pass_gate(gate)
    raise ValueError("on a full disk")


def fail_in_a_fork_too() -> NoReturn:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    pid = os.fork()
    if pid == 0:
        raise KeyError("of the fork")
    os.waitpid(pid, 0)
    raise ValueError("of the worker")


FILES: list[socket.socket] = []


def close_all_and_return(path: str) -> int:
    os.closerange(3, 64)
    while len(FILES) < 40:
        FILES.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        FILES[-1].connect(path)
    return 7


class Mute:
    def write(self, *_text: str) -> NoReturn:
        raise ValueError("no")

    flush = write


def leave_with_a_text_that_nobody_takes() -> NoReturn:
    sys.stderr = sys.__stderr__ = Mute()  # type: ignore[misc,assignment]  # as a user may
    sys.stdout = sys.stderr
    sys.exit("a last word")
