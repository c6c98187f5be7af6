"""Functions that `phalanx.spawn` calls in the tests, in a module that its processes import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from phalanx import timer


def put(index: int, queue: Any, value: object) -> None:
    queue.put((index, value))


def nothing(index: int, *_args: object) -> object:
    """Do nothing, and return what cannot be pickled."""
    return index, threading.Lock()


def hang(_index: int) -> None:
    with timer.expires(0.1, "step"):
        threading.Event().wait()  # goes on where it was when a signal has asked for the stack


def fail(index: int, failing: int, text: str) -> None:
    if index == failing:
        raise ValueError(text)
    signal.pause()


def fail_at_once(_index: int, text: str) -> None:
    raise ValueError(text)


def fail_one_after_the_other(index: int, failed: Any) -> None:
    """Rank 0 fails, and takes for ever to end; then rank 1."""
    if index == 0:
        import atexit

        atexit.register(signal.pause)
        atexit.register(failed.set)
        raise ValueError("in rank 0")
    failed.wait()
    if index == 1:
        raise ValueError("because of rank 0")
    signal.pause()


def leave(index: int, code: Any) -> None:
    if index == 1:
        sys.exit(code)
    signal.pause()


def leave_of_an_error(_index: int, code: int) -> None:
    try:
        raise ValueError("loss is nan")  # noqa: TRY301 - as programs do
    except ValueError:
        sys.exit(code)


def leave_at_once(_index: int, code: int) -> None:
    os._exit(code)


def die(index: int, number: int) -> None:
    if index == 1:
        os.kill(os.getpid(), number)
    signal.pause()


def leave_unless_loaded(_index: int, module: str) -> None:
    sys.exit(module not in sys.modules)


def touch(index: int, prefix: str) -> None:
    with open(f"{prefix}-{index}", "x"):
        pass


def spawn_again(index: int, folder: str) -> None:
    """Be a host oneself."""
    import phalanx.spawn as mp

    mp.spawn(touch, (f"{folder}/{index}",), 2)


def wait(index: int, address: str, gate: str) -> None:
    """Say who we are, and wait at the gate."""
    from tests.support.helpers import pass_gate, tell

    tell(address, f"{index} {os.getpid()}")
    pass_gate(gate)


def wait_for_ever(index: int, address: str, ignored: tuple[int, ...] = ()) -> None:
    """Say who we are when deaf to some signals, and live for ever."""
    from tests.support.helpers import rest, tell

    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    tell(address, f"{index} {os.getpid()}")
    rest()


def fail_one_after_another(index: int, address: str, gates: list[str]) -> None:
    """Fail when one's gate opens: by an exception, an exit code, a signal."""
    from tests.support.helpers import pass_gate, tell

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(address, str(index))
    pass_gate(gates[index])
    if index == 0:
        os._exit(7)
    if index == 1:
        raise ValueError("the second")
    if index == 2:
        raise ValueError("the first")
    os.kill(os.getpid(), signal.SIGUSR1)


def linger(index: int, address: str, gate: str) -> None:
    """Wait at the gate, and say how that ended."""
    from tests.support.helpers import tell

    def stopped(*_: object) -> None:
        tell(address, f"{index} stopped")
        sys.exit()

    signal.signal(signal.SIGTERM, stopped)
    try:
        wait(index, address, gate)
    except KeyboardInterrupt:
        tell(address, f"{index} interrupted")
    else:
        tell(address, f"{index} done")


def host(_index: int, address: str, gate: str, what: str, host_gate: str, method: str = "spawn") -> None:
    """Start a group that nobody joins, and say when we are about to leave."""
    import phalanx.spawn as mp
    from tests.support.helpers import pass_gate, tell

    if what == "failing":
        mp.spawn(fail, (1, "nobody joined me"), 2, join=False, start_method=method)
        return
    mp.spawn(linger, (address, gate), 2, join=False, daemon=what == "daemon", start_method=method)
    pass_gate(host_gate)
    tell(address, f"leaving {os.getpid()}")
    if what == "interrupted":
        raise KeyboardInterrupt
