"""The keeper's part in the notice of a planned stop: it sets the stop flag, and sends the notice's signal.

Loaded by groups that give notice. When it is given, and for how long, is decided by the table of `lifecycle`.
"""

from __future__ import annotations

from phalanx._base import procfs
from phalanx._engine.keeper.children import send
from phalanx._engine.protocol import STOP_FLAG

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import signal

    from phalanx._engine.keeper.children import Children
else:
    import _signal as signal  # the C half: `signal` builds enums for 3 ms
    import posix as os  # the C half: `os` itself takes 1 of the 13 ms in which a keeper gets up


class Notice:
    """One group's.

    Attributes:
        number: The signal.
        seconds: From the notice to the death signal.
        page: The descriptor of the page with the stop flag.
    """

    def __init__(self, number: int, seconds: float, page: int) -> None:
        self.number = number
        self.seconds = seconds
        self.page = page

    def set_flag(self) -> None:
        """Have `should_stop` return True in every worker."""
        os.pwrite(self.page, b"\1", STOP_FLAG)

    def give(self, children: Children) -> list[int]:
        """Set the flag, send the signal to each worker that handles it, and wake each one.

        Returns the ranks of all that live. A worker may see the flag, and end, before it can be sent the signal.
        """
        alive = [worker for worker in children.workers.values() if not worker.gone()]
        self.set_flag()
        for worker in alive:
            send(worker.pid, self.number if self._is_handled(worker.pid) else signal.SIGCONT)
        return [worker.rank for worker in alive]

    def _is_handled(self, pid: int) -> bool:
        """Whether a process catches the signal, or blocks it, to wait for it: the default action of most ends it.

        While a thread is in sigwait(3), the kernel shows what it waits for as not blocked. What counts here is the main
        thread: one that has others wait blocks the signal all the time.
        """
        if not procfs.is_shown():  # what /proc has under this number is another process
            return False
        fields = procfs.status(pid)
        handled = procfs.signal_set(fields, "SigCgt") | procfs.signal_set(fields, "SigBlk")
        return bool(handled >> (self.number - 1) & 1)
