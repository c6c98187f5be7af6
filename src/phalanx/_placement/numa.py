"""Finds the CPUs near the GPU of each local rank, for ``--numa-binding``, without importing a framework.

Reads which PCI device a GPU is from /proc/driver/nvidia/gpus, or else /sys/class/kfd (AMD); its NUMA node from
/sys/bus/pci/devices; CPUs from /sys/devices/system. The readers take a root, so that a test can give a folder as the
machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from phalanx._base.frozen import Value
from phalanx._base.text import how_many
from phalanx._placement import devices, topology

_NVIDIA = "proc/driver/nvidia/gpus"
_CHOOSE_NVIDIA = ("CUDA_VISIBLE_DEVICES",)
_CHOOSE_AMD = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_INSTEAD = "--cpu-bind numa binds by rank"


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
    if mode not in topology.NEAR_GPUS:
        msg = f"{mode!r}: expected one of {', '.join(topology.NEAR_GPUS)}"
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
        self._root = os.path.join(root, topology.SYSTEM.lstrip("/"))
        self._allowed = set(allowed)

    def cpus_of(self, node: int) -> set[int]:
        """Return the CPUs of a NUMA node, at least one."""
        cpus = topology.cpus_of_node(node, self._root)
        if not cpus and topology.node_numbers(self._root) is None:
            cpus = set(self._allowed)
        if not cpus & self._allowed:
            msg = f"no CPU of NUMA node {node} ({topology.format_list(cpus) or 'it has none'}) may be used here"
            raise ValueError(msg)
        return cpus & self._allowed

    def nodes(self) -> list[int]:
        """Return the NUMA nodes that have CPUs which may be used."""
        numbers = topology.node_numbers(self._root)
        if numbers is None:
            return [0]
        return [number for number in numbers if topology.cpus_of_node(number, self._root) & self._allowed]

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
        return min(topology.siblings(cpu, self._root), default=cpu)

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
                highest, sharing = int(level), topology.list_in(f"{folder}/{name}/shared_cpu_list") or {cpu}
        return min(sharing)


def visible_gpus(root: str = "/", environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that a worker sees, in the order of their indices: that of their addresses on the bus.

    CUDA numbers GPUs so if CUDA_DEVICE_ORDER is PCI_BUS_ID, or if all are of one model.

    Raises ValueError: a variable names a device that is none of the machine's.
    """
    for present, variables in ((_nvidia(root), _CHOOSE_NVIDIA), (_amd(root), _CHOOSE_AMD)):
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
