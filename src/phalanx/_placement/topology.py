"""Reads which CPUs this process may use, by core, NUMA node and GPU, and divides them among workers.

Owns the reading of /sys/devices/system/cpu and node (the kernel's admin-guide/cputopology), of the cgroup's CPU quota,
and the arithmetic; and for ``--numa-binding``, which PCI device a GPU is (/proc/driver/nvidia/gpus, or else
/sys/class/kfd), and its node (/sys/bus/pci/devices). Results are sets of CPU numbers. The readers take a root, so that
a test can give a folder as the machine.

A CPU is what the kernel schedules on: one hardware thread. A core is the CPUs that share one physical core.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from phalanx._base import procfs
from phalanx._base.frozen import Value
from phalanx._base.text import format_ranks, how_many
from phalanx._placement import devices

SYSTEM = "/sys/devices/system"
WAYS = ("none", "core", "numa")
"""The divisions that need no list."""

NEAR_GPUS = ("node", "socket", "exclusive", "core-complex")
"""The ways of `bind`, which are torchrun's."""

_NVIDIA = "proc/driver/nvidia/gpus"
_INSTEAD = "--cpu-bind numa binds by rank"


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


class Gpu(Value):
    """A GPU.

    Attributes:
        address: Its address on the PCI bus, as /sys writes it: ``0000:dc:00.0``.
        uuid: Its UUID, with ``GPU-`` in front; "" if that is not told.
        node: The NUMA node that it is attached to; 0 where the kernel tells none, as on a machine with one node.
    """

    address: str
    uuid: str
    node: int


def bind(
    mode: str, count: int, allowed: Collection[int], root: str = "/", environ: Mapping[str, str] = os.environ
) -> list[tuple[int, ...]]:
    """Return the CPUs of each of ``count`` local ranks: those near the GPU with the rank's index.

    Args:
        mode: "node": all CPUs of the GPU's NUMA node. "socket": those of all nodes of its socket. "exclusive": the
            node's cores are divided evenly among its visible GPUs; the first ones get those that are over.
            "core-complex": the CPUs that share one last-level cache on the node, those with the most CPUs first, and
            another one for each of its visible GPUs, as far as there are enough.
        count: How many ranks there are.
        allowed: The CPUs that may be used.
        root: The folder that has proc and sys.
        environ: What says which GPUs are visible.

    Raises ValueError: a rank has no GPU, or no CPU near it.
    """
    if mode not in NEAR_GPUS:
        msg = f"{mode!r}: expected one of {', '.join(NEAR_GPUS)}"
        raise ValueError(msg)
    gpus = visible_gpus(root, environ)
    if not gpus:
        msg = f"{mode}: this machine shows no GPU of NVIDIA or AMD (or *_VISIBLE_DEVICES hides all); {_INSTEAD}"
        raise ValueError(msg)
    if len(gpus) < count:
        have = f"there {'is' if len(gpus) == 1 else 'are'} {len(gpus)} for {count} ranks"
        msg = f"{mode}: rank {len(gpus)} has no GPU: {have}; {_INSTEAD}"
        raise ValueError(msg)
    share = {"node": _node, "socket": _socket, "exclusive": _exclusive, "core-complex": _core_complex}[mode]
    machine = Machine(root, allowed)
    found = []
    for rank in range(count):
        try:
            found.append(tuple(sorted(share(machine, gpus, rank))))
        except ValueError as error:
            msg = f"{mode}: rank {rank}, GPU {gpus[rank].address}: {error}"
            raise ValueError(msg) from None
    return found


class Machine:
    """The CPUs of a machine that may be used, by node, socket, core and cache. Raises ValueError for what is not told.

    Args:
        root: The folder that has sys.
        allowed: The CPUs that may be used.
    """

    def __init__(self, root: str, allowed: Collection[int]) -> None:
        self._root = os.path.join(root, SYSTEM.lstrip("/"))
        self._allowed = set(allowed)

    def cpus_of(self, node: int) -> set[int]:
        """Return the CPUs of a NUMA node, at least one."""
        cpus = cpus_of_node(node, self._root)
        if not cpus and node_numbers(self._root) is None:
            cpus = set(self._allowed)
        if not cpus & self._allowed:
            msg = f"no CPU of NUMA node {node} ({format_list(cpus) or 'it has none'}) may be used here"
            raise ValueError(msg)
        return cpus & self._allowed

    def nodes(self) -> list[int]:
        """Return the NUMA nodes that have CPUs which may be used."""
        numbers = node_numbers(self._root)
        if numbers is None:
            return [0]
        return [number for number in numbers if cpus_of_node(number, self._root) & self._allowed]

    def socket_of(self, node: int) -> str:
        """Return the physical package of a node's CPUs."""
        cpu = min(self.cpus_of(node))
        number = devices.read(os.path.join(self._root, f"cpu/cpu{cpu}/topology/physical_package_id"))
        if not number:
            msg = f"/sys tells no socket of CPU {cpu}"
            raise ValueError(msg)
        return number

    def core_of(self, cpu: int) -> int:
        """Return the first of the CPUs that share a physical core."""
        return min(siblings(cpu, self._root), default=cpu)

    def cache_of(self, cpu: int) -> int:
        """Return the first of the CPUs that share the cache of the highest level; the CPU itself, if none is told."""
        folder = os.path.join(self._root, f"cpu/cpu{cpu}/cache")
        highest, sharing = 0, {cpu}
        try:
            names = os.listdir(folder)
        except OSError:
            names = []
        for name in sorted(names):
            level, kind = devices.read(f"{folder}/{name}/level"), devices.read(f"{folder}/{name}/type")
            if kind in ("Unified", "Data") and level.isdecimal() and int(level) > highest:
                highest, sharing = int(level), list_in(f"{folder}/{name}/shared_cpu_list") or {cpu}
        return min(sharing)


def visible_gpus(root: str = "/", environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that a worker sees, in the order of their indices: that of their addresses on the bus.

    CUDA numbers GPUs so if CUDA_DEVICE_ORDER is PCI_BUS_ID, or if all are of one model.

    Raises ValueError: a variable names a device that is none of the machine's.
    """
    for present, variables in ((_nvidia(root), devices.CHOOSE_NVIDIA), (_amd(root), devices.CHOOSE_AMD)):
        if present:
            name = next((name for name in variables if name in environ), None)
            return present if name is None else _chosen(name, environ[name], present)
    return []


def _chosen(name: str, value: str, present: Sequence[Gpu]) -> list[Gpu]:
    found: list[Gpu] = []
    for device in devices.visible(value):
        if device.isdecimal():
            if int(device) >= len(present):  # as for CUDA: those before it are visible
                break
            found.append(present[int(device)])
            continue
        uuid = device.removeprefix("MIG-").partition("/")[0]  # of a driver before R470, the GPU's and the instance's
        alike = [gpu for gpu in present if uuid.startswith("GPU-") and gpu.uuid.startswith(uuid)]
        if len(alike) != 1:
            what = "instances of GPUs are not told apart here" if device.startswith("MIG-") else "no GPU, or several"
            msg = f"{name}: {device}: {what}; --cpu-bind takes a list of CPUs for each rank"
            raise ValueError(msg)
        found += alike
    return found


def _nvidia(root: str) -> list[Gpu]:
    """List the GPUs of NVIDIA's driver: one folder each, named by the address. In a container, those that it has."""
    try:
        names = os.listdir(os.path.join(root, _NVIDIA))
    except OSError:
        return []
    gpus = []
    for name in sorted(names, key=lambda name: [int(part, 16) for part in re.findall(r"[0-9a-fA-F]+", name)]):
        told = re.search(
            r"^GPU UUID:\s*(GPU-\S+)", devices.read(os.path.join(root, _NVIDIA, name, "information")), re.MULTILINE
        )
        gpus.append(Gpu(name, told[1] if told else "", _node_of(root, name)))
    return gpus


def _amd(root: str) -> list[Gpu]:
    """List the GPUs among the nodes of AMD's driver."""
    gpus = []
    for told in devices.amd_nodes(root):
        place = told.get("location_id", 0)  # bus, device and function, in 8, 5 and 3 bits
        address = f"{told.get('domain', 0):04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.{place & 7}"
        gpus.append(Gpu(address, f"GPU-{told.get('unique_id', 0):x}", _node_of(root, address)))
    return gpus


def _node_of(root: str, address: str) -> int:
    text = devices.read(os.path.join(root, "sys/bus/pci/devices", address.lower(), "numa_node"))
    return max(0, int(text)) if re.fullmatch(r"-?\d+", text, re.ASCII) else 0


def _node(machine: Machine, gpus: Sequence[Gpu], rank: int) -> set[int]:
    return machine.cpus_of(gpus[rank].node)


def _socket(machine: Machine, gpus: Sequence[Gpu], rank: int) -> set[int]:
    machine.cpus_of(gpus[rank].node)  # its own, to say so if there is none
    own = machine.socket_of(gpus[rank].node)
    return {cpu for node in machine.nodes() if machine.socket_of(node) == own for cpu in machine.cpus_of(node)}


def _exclusive(machine: Machine, gpus: Sequence[Gpu], rank: int) -> set[int]:
    place, count = _place(gpus, rank)
    cores = [cpus for _, cpus in sorted(_group(machine.cpus_of(gpus[rank].node), machine.core_of).items())]
    if len(cores) < count:
        msg = f"NUMA node {gpus[rank].node} has {how_many(len(cores), 'core')} for {how_many(count, 'GPU')}"
        raise ValueError(msg)
    each, over = divmod(len(cores), count)
    first = place * each + min(place, over)
    return set().union(*cores[first : first + each + (place < over)])


def _core_complex(machine: Machine, gpus: Sequence[Gpu], rank: int) -> set[int]:
    groups = _group(machine.cpus_of(gpus[rank].node), machine.cache_of)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return ordered[_place(gpus, rank)[0] % len(ordered)][1]


def _place(gpus: Sequence[Gpu], rank: int) -> tuple[int, int]:
    """Return which of the visible GPUs of its node a rank's is, and how many these are."""
    beside = [index for index, gpu in enumerate(gpus) if gpu.node == gpus[rank].node]
    return beside.index(rank), len(beside)


def _group(cpus: Collection[int], key: Callable[[int], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), set()).add(cpu)
    return groups
