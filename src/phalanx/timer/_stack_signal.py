"""`move_stack_signal`: chooses the signal on which a worker shows its stacks. `_evidence.stack_signals` installs it."""

from __future__ import annotations

import operator
import os

from phalanx._evidence.error_file import ERROR_FILE_ENV
from phalanx._evidence.stack_signals import can_show_stacks, offer_stacks, stacks_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import SupportsIndex


def move_stack_signal(number: SupportsIndex) -> None:
    """Have this worker show its stack on another signal, or on none.

    A Python worker that cannot be read from outside is asked by SIGRTMIN+18 (52) to append the stack of its main thread
    to ``error.json.stacks`` in its log directory; one that is about to be killed, by SIGRTMIN+19 (53), to append those
    of all threads. Code that needs the first signal for itself moves it out of its way first. From outside,
    ``PHALANX_STACK_SIGNAL=N`` does the same for a whole group. The signal that is left has its default disposition
    again, but for a handler that was put on it with `signal.signal` meanwhile: that one stays. The second signal is
    left alone where it has a handler or is ignored.

    Args:
        number: The signal, whatever it does now: a handler that is there is replaced. 0: show no stacks, on the
            second one neither. Nobody is asked on another one than SIGUSR1, SIGUSR2 and the real-time signals, unless
            ``PHALANX_STACK_SIGNAL`` named it when the process was executed.

    Raises:
        ValueError: There is no such signal, or it cannot be caught (SIGKILL, SIGSTOP), or it is one that ends a process
            for a fault (SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL): its stack is kept anyway.
        RuntimeError: This process has no ``TORCHELASTIC_ERROR_FILE``, so there is no place for stacks; or that place
            cannot be written to.

    >>> move_stack_signal(9)
    Traceback (most recent call last):
    ValueError: signal 9 cannot be caught, or is taken: expected 0, or the number of another signal
    """
    number = operator.index(number)
    if not can_show_stacks(number):
        msg = f"signal {number} cannot be caught, or is taken: expected 0, or the number of another signal"
        raise ValueError(msg)
    path = os.environ.get(ERROR_FILE_ENV)
    if not path:
        msg = f"there is no place for stacks: this process has no {ERROR_FILE_ENV}, so it is no worker"
        raise RuntimeError(msg)
    if not offer_stacks(path, number) and number:
        msg = f"stacks cannot be shown on signal {number}: {stacks_path(path)} cannot be written"
        raise RuntimeError(msg)
