"""The options of `phalanx run` that say where workers run and within which bounds, and OMP_NUM_THREADS.

Owns their reading. What they mean is the business of `phalanx.multiprocessing.Placement`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import click

from phalanx._base.text import how_many
from phalanx._placement import devices, topology
from phalanx._placement.placement import divide
from phalanx.cli._declare import LIST, PLACEMENT, WHOLE, Declared, Flag, Maybe, Option
from phalanx.cli._options import Whole
from phalanx.multiprocessing import Placement

THREADS = "OMP_NUM_THREADS"


def read_limits(text: str) -> dict[str, str | tuple[str, str]]:
    """Read resource limits. Raises ValueError.

    >>> read_limits("nofile=1024:4096,as=8GiB")
    {'nofile': ('1024', '4096'), 'as': '8GiB'}
    """
    limits: dict[str, str | tuple[str, str]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name in limits:
            msg = f"{text!r}: expected limits, each once, like nofile=4096,as=8GiB; the trouble is with {part!r}"
            raise ValueError(msg)
        soft, colon, hard = value.partition(":")
        limits[name] = (soft, hard) if colon else value
    try:
        Placement(rlimits=limits)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("rlimits: ")) from None
    return limits


class PlacementOptions(Declared, section=PLACEMENT):
    """Where workers run, and within which bounds."""

    cpu_bind = Option(
        str,
        default="none",
        metavar="none|core|numa|LIST",
        sentence="CPUs of each worker: whole cores, a NUMA node, or a list for each, as 0-3;4-7.",
    )
    numa_binding = Maybe(
        str,
        kind=click.Choice(topology.NEAR_GPUS),
        torchrun="--numa-binding",
        sentence="CPUs of each worker near the GPU of its local rank: of its node, its socket, a part of the node.",
    )
    nice = Option(
        int,
        kind=Whole(-20, 19),
        default="0",
        metavar="N",
        written=WHOLE,
        shows_default=False,
        sentence="Add this to the nice value of the workers.",
    )
    rlimit = Maybe(
        read_limits,
        metavar="NAME=VALUE,...",
        written=LIST,
        sentence="Resource limits of each worker, like nofile=4096,as=8GiB.",
    )
    virtual_local_rank = Flag(
        torchrun="--virtual-local-rank", sentence="Each worker sees one device, at index 0, and LOCAL_RANK is 0."
    )


def place(
    chosen: PlacementOptions, nprocs: int, env: Mapping[str, str]
) -> tuple[Placement, dict[int, dict[str, str]], list[str]]:
    """Return what the options say, the variables for each rank that follow from it, and lines for the user.

    ``env`` are variables that all workers get. Raises UsageError.
    """
    cpu_bind, near, virtual = chosen.cpu_bind, chosen.numa_binding, chosen.virtual_local_rank
    if near and cpu_bind != "none":
        raise click.UsageError("--numa-binding and --cpu-bind exclude each other: each says on which CPUs workers run")
    placement = Placement(cpu_bind, chosen.nice, chosen.rlimit or {}, virtual)
    try:
        shares, said = (_near_gpus(near, nprocs), "") if near else divide(cpu_bind, nprocs)
        if near or cpu_bind != "none":  # as found now: what is said below is what will be
            lists = ";".join(topology.format_list(cpus) for cpus in shares)
            placement = placement.replace(cpu_bind=lists)
        placement.resolve(nprocs)
        placement.environment(dict.fromkeys(range(nprocs), env))
        _check_devices(nprocs, virtual=virtual)
    except ValueError as error:
        raise click.UsageError(_by_option(str(error))) from None
    lines = [_by_option(said)] if said else []
    if nprocs == 1 or THREADS in os.environ or THREADS in env:
        return placement, {rank: {} for rank in range(nprocs)}, lines
    threads, line = _threads(shares)
    return placement, {rank: {THREADS: str(count)} for rank, count in enumerate(threads)}, [*lines, line]


def _near_gpus(mode: str, nprocs: int) -> list[tuple[int, ...]]:
    from phalanx._placement import numa

    try:
        return numa.bind(mode, nprocs, os.sched_getaffinity(0))
    except ValueError as error:
        raise ValueError(f"numa_binding: {error}") from None


def _threads(shares: list[tuple[int, ...]]) -> tuple[list[int], str]:
    """How many threads each rank gets, and how that is said."""
    quota = topology.quota()
    threads = topology.threads(shares, quota)
    least, most = min(threads), max(threads)
    cpus = len({cpu for share in shares for cpu in share})
    limited = f", of which the cgroup grants {quota:g}" if quota is not None and quota < cpus else ""
    return threads, (
        f"{THREADS}={least}{f' to {most}' if most > least else ''} for each of {how_many(len(shares), 'worker')} "
        f"({how_many(cpus, 'CPU')}{limited}); set it to choose otherwise"
    )


def _check_devices(nprocs: int, *, virtual: bool) -> None:
    """Refuse more ranks than devices, where these are counted. Where none can be, nobody may want any."""
    if virtual and "CUDA_VISIBLE_DEVICES" not in os.environ:
        present = devices.count_gpus()
        if 0 < present < nprocs:
            msg = f"virtual_local_rank: rank {present} has no device: there are {present} for {nprocs} ranks"
            raise ValueError(msg)


def _by_option(text: str) -> str:
    """Name an option where the library names a field."""
    field, colon, rest = text.partition(":")
    return f"--{'rlimit' if field == 'rlimits' else field.replace('_', '-')}{colon}{rest}"
