"""How the values of options are read that `phalanx run` alone has, and options of other launchers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from phalanx._base import durations
from phalanx._group.arguments import checked_notice
from phalanx._timers.specs import read_steps
from phalanx.cli._command import meant
from phalanx.cli._options import Folder


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
    """Read ``--notice``: a signal and a time. Raises ValueError.

    >>> read_notice("USR1:60"), read_notice("SIGUSR2:2m")
    ((10, 60.0), (12, 120.0))
    """
    name, _, span = (part.strip() for part in text.partition(":"))
    number = signal.Signals.__members__.get(f"SIG{name.upper().removeprefix('SIG')}", 0)
    try:
        notice = checked_notice((number, durations.parse(span)))
    except ValueError:
        msg = f"{text!r}: expected a signal that a process can handle and a time, more than 0, like USR1:60 or USR1:2m"
        raise ValueError(msg) from None
    assert notice is not None
    return notice


_OF_LAUNCHERS = ("--nproc-per-node", "--nnodes", "--max-restarts", "--standalone", "--no-python", "--rdzv-")
"""Options, or how their names begin, that scripts do not have, as they may have ``--log-dir`` or ``--master-port``."""


def notes_on_args(ctx: click.Context, script: str, args: Sequence[str]) -> list[str]:
    """Return a line on options of a launcher that stand after the script, and that nobody has given before it."""
    unset = {
        name for param in ctx.command.params for name in param.opts
        if name.startswith(_OF_LAUNCHERS) and ctx.get_parameter_source(param.name or "") is ParameterSource.DEFAULT
    }  # fmt: skip
    typed = [arg.partition("=")[0] for arg in args[: args.index("--") if "--" in args else None]]
    found = [name for name in dict.fromkeys(typed) if name.replace("_", "-") in unset]
    if not found:
        return []
    them = "it goes" if len(found) == 1 else "they go"
    return [f"{', '.join(found)} after SCRIPT: {them} to {script}; options of phalanx run stand before SCRIPT"]


_OUR = "PHALANX_"
_OURS = {
    *("PHALANX_JOB_SECRET", "PHALANX_ETCD_PASSWORD", "PHALANX_STACK_SIGNAL", "PHALANX_SHIM_PYTHON"),
    # A worker has them.
    *("PHALANX_GROUP", "PHALANX_STEP", "PHALANX_STOP_FLAG", "PHALANX_TIMERS", "PHALANX_DESCRIPTORS"),
    *("PHALANX_TRACEBACKS", "PHALANX_DEBUGGER"),
}
"""Variables of ours that set no option."""

_OF_TESTS = (
    *("PHALANX_TEST_", "PHALANX_CUTS", "PHALANX_ROUNDS", "PHALANX_INJECTOR"),
    *("PHALANX_BENCHMARK", "PHALANX_PEER_"),
)
_OF_SERVICES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")
"""What Kubernetes calls variables for a service, of which one may be called phalanx."""


def notes_on_variables(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a line on variables that are called as those of options are, and are none. ``PET_`` is not ours alone.

    Nothing in a worker: its launcher has said it.
    """
    if "PHALANX_GROUP" in environ:
        return []
    real, found = {name for name in (*known, *_OURS) if name.startswith(_OUR)}, []
    for name in sorted(environ.keys() - real):
        if not name.startswith(_OUR) or not environ[name] or name.startswith(_OF_TESTS) or _OF_SERVICES.fullmatch(name):
            continue
        near = re.search(r"'(\w+)'", meant(name.removeprefix(_OUR), [each.removeprefix(_OUR) for each in sorted(real)]))
        found.append(f"{name} (did you mean {_OUR}{near[1]}?)" if near else name)
    return [f"set in the environment, and unknown: {', '.join(found)}"] if found else []


ABSENT: dict[str, str] = {}
"""Options of torchrun's that are not there, and why."""

ELSEWHERE = {
    "--name": "it is --run-id here",
    "--env": "workers inherit the environment of phalanx run (A=1 phalanx run ...); a job file (-f) has [env]",
    "--quiet": "-r 3 keeps the output of the workers in files alone; the report of a failure stays",
    "--keep-going": "a command that is to go on when another fails is a run of its own; see Many commands in the guide",
    "--restart": "all workers are started again, see --max-restarts; one that is to start again by itself is a run "
    "of its own, see Many commands in the guide",
    "--no-standby": "restarts have no standby any more; leave it out (--preload makes them fast)",
    "--use-env": "the rank is in LOCAL_RANK, as with torchrun; leave it out",
    **dict.fromkeys(
        ("-n", "--nprocs", "--num-processes", "--num-procs", "--num-workers", "--workers", "--num-gpus", "--gpus"),
        "it is --nproc-per-node here",
    ),
}
"""Options of other launchers and of earlier versions, and what they are here."""
