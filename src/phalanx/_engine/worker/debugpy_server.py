"""Has debugpy listen in this process, for an editor, before the program begins: ``phalanx run --debugpy``.

While the editor holds a thread, the timers of the group rest, as at `breakpoint()`. A worker loads this module if its
environment says so, in whatever Python it runs (3.8 or later).
"""

from __future__ import annotations

import os
import sys

from phalanx._base import std_streams
from phalanx._engine.worker import breakpoints
from phalanx._evidence.error_file import DEBUGPY_ENV

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HOST = "127.0.0.1"


def listen() -> None:
    """Listen, and wait for an editor if that is wanted. Where there can be no debugpy, a line on stderr says why."""
    port, _, waits = os.environ.pop(DEBUGPY_ENV).partition(" ")  # programs that this one starts must not have it
    try:
        import debugpy  # noqa: T100 - what this module is about

        debugpy.listen((_HOST, int(port)))  # noqa: T100 - as above
        pydevd = sys.modules["pydevd"]
        _let_timers_rest(pydevd.PyDB)
    except Exception as error:  # noqa: BLE001 - of another project; the program runs without it
        why = f"{type(error).__name__}: {error}"
        std_streams.write_stderr(f"phalanx: --debugpy: no editor can attach to pid {os.getpid()}: {why}\n")
        return

    def stop(*args: Any, **options: Any) -> None:
        """Stop in the editor; in pdb, if none is attached."""
        frame = sys._getframe(1)  # noqa: SLF001 - it is where the program stops
        if debugpy.is_client_connected():
            pydevd.settrace(
                suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame
            )
        else:
            breakpoints.stop(frame, *args, **options)

    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = stop
    if waits:
        std_streams.write_stderr(f"phalanx: waits for an editor at {_HOST}:{port}\n")
        debugpy.wait_for_client()  # noqa: T100 - as above


def _let_timers_rest(kind: Any) -> None:
    """Wrap the method of pydevd in which a thread waits, held by an editor."""
    wait = kind.do_wait_suspend

    def do_wait_suspend(*args: Any, **options: Any) -> Any:
        with breakpoints.resting():
            return wait(*args, **options)

    kind.do_wait_suspend = do_wait_suspend
