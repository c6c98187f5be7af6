"""How the values of options are read that `phalanx run` alone has, and options of other launchers."""

from __future__ import annotations

import os
import signal

from phalanx._group.arguments import checked_notice
from phalanx._timers.specs import read_steps
from phalanx.cli._options import Folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import click


class LogDir(Folder):
    """A folder, or /dev/null, which torchrun's users give to have no logs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        return value if value == os.devnull else super().convert(value, param, ctx)


def steps(text: str) -> tuple[tuple[str, float], ...]:
    """Read ``--on-expiry``. Raises ValueError."""
    try:
        return read_steps(text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("on_expiry: ")) from None


def read_notice(text: str) -> tuple[int, float]:
    """Read ``--notice``: a signal and seconds. Raises ValueError.

    >>> read_notice("USR1:60"), read_notice("SIGUSR2:0.5")
    ((10, 60.0), (12, 0.5))
    """
    name, colon, span = (part.strip() for part in text.partition(":"))
    number = signal.Signals.__members__.get(f"SIG{name.upper().removeprefix('SIG')}", 0)
    try:
        notice = checked_notice((number, float(span if colon else "nan")))
    except ValueError:
        msg = f"{text!r}: expected a signal that a process can handle and seconds, more than 0, like USR1:60"
        raise ValueError(msg) from None
    assert notice is not None
    return notice


ABSENT: dict[str, str] = {}
"""Options of torchrun's that are not there, and why."""

ELSEWHERE = {
    "--use-env": "the rank is in LOCAL_RANK, as with torchrun; leave it out",
    **dict.fromkeys(
        ("-n", "--nprocs", "--num-processes", "--num-procs", "--num-workers", "--workers", "--num-gpus", "--gpus"),
        "it is --nproc-per-node here",
    ),
}
"""Options of other launchers, and what they are here."""
