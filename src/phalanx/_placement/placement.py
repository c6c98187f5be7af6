"""Checks the user's `Placement` (CPUs, nice value, resource limits, devices), and resolves it on this machine.

CPUs are divided by `topology`. The keeper places each worker before its first instruction.
"""

from __future__ import annotations

import os
from resource import RLIM_INFINITY as UNLIMITED  # -1; the largest number there is, since Python 3.15

from phalanx._base import procfs
from phalanx._base.frozen import Value
from phalanx._base.text import how_many, parse_size
from phalanx._placement.devices import VARIABLES, one_each

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Self

    Limit = int | str | tuple[int | str, int | str]

WorkerBounds = tuple[list[int], int, list[tuple[str, int, int, int]]]
"""Where one worker runs and within which bounds, as sent to the keeper: its CPUs ([]: those of the keeper), what is
added to its nice value, and resource limits: name, number, soft, hard."""

_BYTES = ("as", "core", "data", "fsize", "memlock", "msgqueue", "rss", "stack")  # setrlimit(2): these count bytes
_CAP_SYS_NICE, _CAP_SYS_RESOURCE = 23, 24
_NICEST, _LEAST_NICE = 19, -20


class Placement(Value):
    """Where the workers of a group run, and within which limits. It is in effect from a worker's first instruction on.

    Args:
        cpu_bind: The CPUs of each worker, among those that the caller may use. "none": all. "core": the physical cores
            are divided evenly, SMT siblings and neighbours stay together; with fewer cores than workers, workers share
            cores in turn, which a RuntimeWarning says. "numa": the CPUs of one NUMA node each; neighbouring ranks are
            on the same node. Or a list of CPUs for each local rank, as in ``"0-3;4-7"``.
        nice: What is added to the caller's nice value, -20 to 19. A negative number takes a privilege.
        rlimits: Resource limits by name, as in setrlimit(2), in lower case: ``{"nofile": 4096, "as": "8GiB", "core":
            (0, "unlimited")}``. One value sets the soft and the hard limit, a pair the one and the other. Names that
            count bytes take units.
        virtual_local_rank: Whether each worker sees one device, at index 0: ``LOCAL_RANK`` is 0 and
            ``CUDA_VISIBLE_DEVICES`` the local-rank-th of the caller's, or the local rank itself if that is not set. The
            same holds for ``HIP_VISIBLE_DEVICES``, ``ZE_AFFINITY_MASK``, ``ASCEND_RT_VISIBLE_DEVICES``,
            ``MUSA_VISIBLE_DEVICES`` and ``MLU_VISIBLE_DEVICES``, if the caller has them.

    Raises:
        TypeError, ValueError: A value that is none of these. The message names the field.

    >>> Placement(cpu_bind="core", rlimits={"nofile": 4096})
    Placement(cpu_bind='core', nice=0, rlimits=(('nofile', 4096),), virtual_local_rank=False)
    """

    cpu_bind: str
    nice: int
    rlimits: tuple[tuple[str, Limit], ...]
    virtual_local_rank: bool

    def __init__(
        self,
        cpu_bind: str = "none",
        nice: int = 0,
        rlimits: Mapping[str, Limit] | tuple[tuple[str, Limit], ...] = (),
        virtual_local_rank: bool = False,  # noqa: FBT001, FBT002 - a field, given by name
    ) -> None:
        if not isinstance(cpu_bind, str):
            raise TypeError(f"cpu_bind: expected none, core, numa, or lists of CPUs as 0-3;4-7, got {cpu_bind!r}")
        if isinstance(nice, bool) or not isinstance(nice, int):
            raise TypeError(f"nice: expected a whole number, got {nice!r}")
        if not _LEAST_NICE <= nice <= _NICEST:
            raise ValueError(f"nice: expected {_LEAST_NICE} to {_NICEST}, got {nice}")
        limits = dict(rlimits)
        for name, limit in limits.items():
            _read_limit(name, limit)
        self._store(
            cpu_bind=cpu_bind, nice=nice, rlimits=tuple(limits.items()), virtual_local_rank=bool(virtual_local_rank)
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the fields in ``changes`` replaced. They are checked as those of a new one are."""
        return type(self)(**super().replace(**changes).__getstate__())

    __replace__ = replace

    def resolve(self, nprocs: int) -> tuple[dict[int, WorkerBounds | None], str]:
        """Return what the keeper has to do for each of ``nprocs`` workers, and a warning for the user, or "".

        Raises ValueError for a value that this machine does not allow.
        """
        shares: list[tuple[int, ...]] = [()] * nprocs
        warning = ""
        if self.cpu_bind != "none":
            shares, warning = divide(self.cpu_bind, nprocs)
        limits = [_allowed_limit(name, limit) for name, limit in self.rlimits]
        self._check_nice()
        if not (limits or self.nice or any(shares)):
            return dict.fromkeys(range(nprocs)), warning
        # Plain numbers: `marshal` takes no subclass of int.
        plain = [(str(name), int(number), int(soft), int(hard)) for name, number, soft, hard in limits]
        return {rank: (list(map(int, cpus)), int(self.nice), plain) for rank, cpus in enumerate(shares)}, warning

    def environment(self, envs: Mapping[int, Mapping[str, str]]) -> dict[int, dict[str, str]]:
        """Compute the environment variables that this adds to each rank's ``envs``. Raises ValueError."""
        if not self.virtual_local_rank:
            return {rank: {} for rank in envs}
        for rank, env in envs.items():
            for name in VARIABLES:
                if name in env:
                    raise ValueError(f"virtual_local_rank: it sets {name}, which envs sets for rank {rank} as well")
        chosen = one_each(os.environ, len(envs))
        for name, devices in chosen.items():
            if len(devices) < len(envs) and name in os.environ:
                raise ValueError(
                    f"virtual_local_rank: rank {len(devices)} has no device: {name}={os.environ[name]} names "
                    f"{len(devices)} for {how_many(len(envs), 'rank')}"
                )
        return {rank: {"LOCAL_RANK": "0", **{name: devices[rank] for name, devices in chosen.items()}} for rank in envs}

    def _check_nice(self) -> None:
        if self.nice < 0 and not procfs.has_capability(_CAP_SYS_NICE):
            import resource

            # The limit counts from 20 (nice value 0 is 20, -20 is 40): a limit cannot be negative (getrlimit(2)).
            limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
            least = _LEAST_NICE if limit == UNLIMITED else 20 - limit
            wanted = max(_LEAST_NICE, os.getpriority(os.PRIO_PROCESS, 0) + self.nice)
            if wanted < least and wanted < os.getpriority(os.PRIO_PROCESS, 0):
                raise ValueError(f"nice: {self.nice} takes CAP_SYS_NICE, or a limit 'nice' of {20 - wanted}")


def divide(cpu_bind: str, nprocs: int) -> tuple[list[tuple[int, ...]], str]:
    """Divide this machine's CPUs: those of each rank; and a warning for the user, or "". Raises ValueError."""
    from phalanx._placement import topology

    allowed = os.sched_getaffinity(0)
    needed = cpu_bind in ("core", "numa")  # a machine of 256 CPUs has as many files to read
    machine = topology.read(allowed) if needed else topology.Topology(tuple(sorted(allowed)), (), ())
    try:
        shares = topology.divide(cpu_bind, nprocs, machine)
    except ValueError as error:
        raise ValueError(f"cpu_bind: {error}") from None
    cores = len(machine.cores)
    short = cpu_bind == "core" and cores < nprocs
    return shares, f"cpu_bind: {nprocs} workers share {how_many(cores, 'core')}" if short else ""


def limit_names() -> dict[str, int]:
    """List the resource limits of this system: name → number."""
    import resource

    names = {name[7:].lower(): getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    names.pop("ofile", None)  # the older name of nofile
    return names


def _read_limit(name: Any, limit: Any) -> tuple[str, int, int, int]:
    """Check a limit: name, number, soft, hard. Raises TypeError, ValueError."""
    known = limit_names()
    if name not in known:
        raise ValueError(f"rlimits: {name!r} is no resource limit; there are {', '.join(sorted(known))}")
    pair = limit if isinstance(limit, (tuple, list)) else (limit, limit)
    if len(pair) != 2:  # noqa: PLR2004 - soft and hard
        raise ValueError(f"rlimits: {name}: expected one value, or a soft and a hard one, got {limit!r}")
    soft, hard = (_read_value(name, value) for value in pair)
    if hard != UNLIMITED and not 0 <= soft <= hard:
        raise ValueError(f"rlimits: {name}: the soft limit {pair[0]} is above the hard limit {pair[1]}")
    return name, known[name], soft, hard


def _read_value(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"rlimits: {name}: expected a number, or 'unlimited', got {value!r}")
    if value == "unlimited":
        return UNLIMITED
    try:
        number = value if isinstance(value, int) else parse_size(value) if name in _BYTES else int(value)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 63:
        units = " with or without a unit (8GiB)" if name in _BYTES else ""
        raise ValueError(f"rlimits: {name}: expected a number{units}, or 'unlimited', got {value!r}")
    return number


def _allowed_limit(name: str, limit: Limit) -> tuple[str, int, int, int]:
    """Read a limit that a worker of ours can have. Raises ValueError."""
    import resource

    name, number, soft, hard = _read_limit(name, limit)
    highest = resource.getrlimit(number)[1]
    above = highest != UNLIMITED and (hard == UNLIMITED or hard > highest)
    if above and not procfs.has_capability(_CAP_SYS_RESOURCE):
        raise ValueError(
            f"rlimits: {name}: the hard limit is {highest} here, and takes CAP_SYS_RESOURCE to be raised to "
            f"{'unlimited' if hard == UNLIMITED else hard}"
        )
    if name == "nofile" and above:
        with open("/proc/sys/fs/nr_open", encoding="utf-8") as file:
            most = int(file.read())
        if hard == UNLIMITED or hard > most:
            raise ValueError(f"rlimits: nofile: nobody may have more than {most} (fs.nr_open)")
    return name, number, soft, hard
