"""Reads which CPUs this process may use, by core and NUMA node, and divides them among workers.

Owns the reading of /sys/devices/system/cpu and node (the kernel's admin-guide/cputopology), of the cgroup's CPU quota,
and the arithmetic. Results are sets of CPU numbers. The readers take a root, so that a test can give a folder as the
machine.

A CPU is what the kernel schedules on: one hardware thread. A core is the CPUs that share one physical core.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence

from phalanx._base import procfs
from phalanx._base.frozen import Value
from phalanx._base.text import format_ranks, how_many
from phalanx._placement import devices

SYSTEM = "/sys/devices/system"
WAYS = ("none", "core", "numa")
"""The divisions that need no list."""

NEAR_GPUS = ("node", "socket", "exclusive", "core-complex")
"""The ways of `phalanx._placement.numa`, which are torchrun's."""


class Topology(Value):
    """The CPUs that may be used, by number; by core, in the order of nodes; and by NUMA node.

    No core and no node is empty: CPUs that may not be used are left out.
    """

    cpus: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, ...], ...]


def read(allowed: Iterable[int], root: str = SYSTEM) -> Topology:
    """Read the topology of the CPUs in ``allowed``, which `os.sched_getaffinity` returns. Never raises.

    The affinity of a process is within its cpuset, so a container's CPUs are respected. A CPU of which /sys has no
    entry is a core of its own, and all CPUs without a node are together one node.
    """
    cpus = set(allowed)
    cpus = cpus.intersection(list_in(os.path.join(root, "cpu/online"))) or cpus
    nodes = _nodes(cpus, root)
    order = {cpu: number for number, node in enumerate(nodes) for cpu in node}
    cores: set[tuple[int, ...]] = set()
    seen: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in seen:
            core = (siblings(cpu, root) & cpus - seen) | {cpu}
            cores.add(tuple(sorted(core)))
            seen |= core
    ordered = sorted(cores, key=lambda core: (order[core[0]], core[0]))
    return Topology(tuple(sorted(cpus)), tuple(ordered), tuple(nodes))


def divide(how: str, count: int, topology: Topology) -> list[tuple[int, ...]]:
    """Divide CPUs among ``count`` ranks. Raises ValueError for a list that does not fit.

    Args:
        how: "none": all CPUs for each. "core": whole cores, evenly, neighbours together; with fewer cores than ranks,
            ranks share cores in turn. "numa": the CPUs of one node each, neighbouring ranks on the same node. Else one
            list of CPUs for each rank, as in ``0-3;4-7``.
        count: How many ranks, at least 1.
        topology: The CPUs to divide.

    >>> machine = Topology((0, 1, 2, 3), ((0, 2), (1, 3)), ((0, 1, 2, 3),))
    >>> divide("core", 2, machine)
    [(0, 2), (1, 3)]
    >>> divide("0;1-2,3", 2, machine)
    [(0,), (1, 2, 3)]
    """
    cores, nodes = topology.cores, topology.nodes
    if how == "none":
        return [topology.cpus] * count
    if how == "numa":
        return [nodes[rank * len(nodes) // count] for rank in range(count)]
    if how != "core":
        return _listed(how, count, topology.cpus)
    if len(cores) < count:
        return [cores[rank % len(cores)] for rank in range(count)]
    bounds = [rank * len(cores) // count for rank in range(count + 1)]
    return [
        tuple(sorted(cpu for core in cores[first:last] for cpu in core)) for first, last in itertools.pairwise(bounds)
    ]


def threads(shares: Sequence[Sequence[int]], quota: float | None = None) -> list[int]:
    """Compute how many CPUs each rank can keep busy, at least 1: its own, and its part of those that it shares.

    ``quota`` is the CPU time of all ranks together, in CPUs.

    >>> threads([(0, 1, 2), (3,)]), threads([(0, 1, 2, 3)] * 2), threads([(0, 1, 2, 3)] * 2, quota=2.5)
    ([3, 1], [2, 2], [1, 1])
    """
    users: dict[int, int] = {}
    for cpus in shares:
        for cpu in cpus:
            users[cpu] = users.get(cpu, 0) + 1
    most = quota / len(shares) if quota is not None else float("inf")
    # Thirds of a CPU must add up to one again.
    return [max(1, int(min(most, sum(1 / users[cpu] for cpu in cpus) + 1e-9))) for cpus in shares]


def parse_list(text: str) -> list[int]:
    """Read a list of CPUs as the kernel writes it (cpuset(7), "List format"). Raises ValueError, which names the part.

    >>> parse_list("0-2,8")
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not (_is_number(first) and _is_number(last if dash else first) and int(first) <= int(last or first)):
            msg = f"{part!r} is no CPU and no range of CPUs"
            raise ValueError(msg)
        cpus.update(range(int(first), int(last or first) + 1))
    return sorted(cpus)


def format_list(cpus: Iterable[int]) -> str:
    """Write a list of CPUs as the kernel does: ``0-2,8``."""
    return format_ranks(cpus, ",")


def quota() -> float | None:
    """Read the CPU time that this process's cgroup may use, in CPUs; None without a limit."""
    return quota_of(procfs.cgroup_folders("cpu"))


def quota_of(folders: Iterable[tuple[str, str]]) -> float | None:
    """Find the smallest quota among cgroups: each a mount point and a folder below it, whose parents count as well.

    v2: cpu.max holds the quota and the period, in microseconds, or "max" (admin-guide/cgroup-v2). v1: cpu.cfs_quota_us,
    -1 for none, and cpu.cfs_period_us (scheduler/sched-bwc).
    """
    found: list[float] = []
    for point, lowest in folders:
        folder = lowest
        while folder.startswith(point) and folder != os.path.dirname(folder):
            limit = devices.read(f"{folder}/cpu.max") or " ".join(
                [devices.read(f"{folder}/cpu.cfs_quota_us"), devices.read(f"{folder}/cpu.cfs_period_us")]
            )
            time, _, period = limit.partition(" ")
            if time.isdecimal() and period.isdecimal() and int(period):
                found.append(int(time) / int(period))
            folder = os.path.dirname(folder)
    return min(found, default=None)


def _listed(how: str, count: int, allowed: tuple[int, ...]) -> list[tuple[int, ...]]:
    parts = how.removeprefix("list:").split(";")
    shares = []
    for rank, part in enumerate(parts):
        try:
            cpus = parse_list(part)
        except ValueError as error:
            msg = f"{how!r}: rank {rank}: {error}; expected {', '.join(WAYS)} or a list for each rank, as 0-3;4-7"
            raise ValueError(msg) from None
        wrong = [cpu for cpu in cpus if cpu not in allowed]
        if not cpus or wrong:
            what = (
                f"CPU {format_ranks(wrong, ',')} is not among those that may be used" if wrong else "no CPU; there are"
            )
            msg = f"{how!r}: rank {rank}: {what}: {format_ranks(allowed, ',')}"
            raise ValueError(msg)
        shares.append(tuple(cpus))
    if len(shares) != count:
        msg = f"{how!r}: {how_many(len(shares), 'list')} for {how_many(count, 'rank')}; expected one each, as 0-3;4-7"
        raise ValueError(msg)
    return shares


def _nodes(cpus: set[int], root: str) -> list[tuple[int, ...]]:
    left = set(cpus)
    nodes = []
    for number in node_numbers(root) or ():
        node = cpus_of_node(number, root) & left
        left -= node
        if node:  # else it has memory alone, or CPUs that may not be used
            nodes.append(tuple(sorted(node)))
    return [*nodes, tuple(sorted(left))] if left else nodes


def node_numbers(root: str) -> list[int] | None:
    """List the NUMA nodes, with CPUs or without; None: a kernel without NUMA."""
    try:
        names = os.listdir(os.path.join(root, "node"))
    except OSError:
        return None
    return sorted(int(name[4:]) for name in names if name.startswith("node") and _is_number(name[4:]))


def cpus_of_node(number: int, root: str) -> set[int]:
    """Read the CPUs of a NUMA node."""
    return list_in(os.path.join(root, f"node/node{number}/cpulist"))


def siblings(cpu: int, root: str) -> set[int]:
    """Read the CPUs that share ``cpu``'s core. ``thread_siblings_list`` is the name before Linux 5.3."""
    folder = os.path.join(root, f"cpu/cpu{cpu}/topology")
    return list_in(f"{folder}/core_cpus_list") or list_in(f"{folder}/thread_siblings_list")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 6  # noqa: PLR2004 - no machine has a million CPUs


def list_in(path: str) -> set[int]:
    """Read a file that holds a list of CPUs; none, if it cannot be read."""
    try:
        return set(parse_list(devices.read(path)))
    except ValueError:
        return set()
