"""The CPUs near the GPU of each rank, on machines that are folders with proc and sys, as the kernel shows them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from phalanx._placement.topology import NEAR_GPUS as MODES
from phalanx._placement.topology import Gpu, bind, visible_gpus
from tests.support.torch_names import torch_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ALL = range(64)
NOTHING: Mapping[str, str] = {}


class Folder:
    """A machine of sockets, nodes, cores and GPUs."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)
        self.folder = folder

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def cpu(self, number: int, socket: int, siblings: str, cache: str) -> None:
        folder = f"sys/devices/system/cpu/cpu{number}"
        self.write(f"{folder}/topology/physical_package_id", str(socket))
        self.write(f"{folder}/topology/core_cpus_list", siblings)
        for index, (level, kind, shared) in enumerate(
            [
                ("1", "Data", siblings),
                ("1", "Instruction", siblings),
                ("3", "Unified", cache),
                ("4", "Instruction", "0"),
            ]
        ):
            self.write(f"{folder}/cache/index{index}/level", level)
            self.write(f"{folder}/cache/index{index}/type", kind)
            self.write(f"{folder}/cache/index{index}/shared_cpu_list", shared)

    def node(self, number: int, cpus: str) -> None:
        self.write(f"sys/devices/system/node/node{number}/cpulist", cpus)

    def nvidia(self, address: str, node: int, uuid: str = "") -> None:
        text = f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 42\nGPU UUID: \t {uuid}\nBus Location: \t {address}"
        self.write(f"proc/driver/nvidia/gpus/{address}/information", text)
        self.write(f"sys/bus/pci/devices/{address}/numa_node", str(node))

    def amd(self, number: int, bus: int, node: int, simds: int = 304, unique: int = 0) -> None:
        text = f"cpu_cores_count 0\nsimd_count {simds}\nlocation_id {bus << 8}\ndomain 0\nunique_id {unique}"
        self.write(f"sys/class/kfd/kfd/topology/nodes/{number}/properties", text)
        self.write(f"sys/bus/pci/devices/0000:{bus:02x}:00.0/numa_node", str(node))

    def bind(
        self, mode: str, count: int, environ: Mapping[str, str] = NOTHING, allowed: Sequence[int] = ALL
    ) -> list[str]:
        shares = bind(mode, count, allowed, self.root, environ)
        return [" ".join(map(str, cpus)) for cpus in shares]


@pytest.fixture
def machine(tmp_path: Path) -> Folder:
    """Two sockets of two nodes each, a node of four cores of two threads; pairs of cores share a cache. Four GPUs.

    Node 0: CPUs 0-3 and 16-19, and so on. The first GPU on the bus is on node 1, the second and third on 3, the fourth
    on none that the kernel tells.
    """
    it = Folder(tmp_path)
    for cpu in range(16):
        first = cpu // 2 * 2
        for thread in (cpu, cpu + 16):
            it.cpu(thread, cpu // 8, f"{cpu},{cpu + 16}", f"{first}-{first + 1},{first + 16}-{first + 17}")
    for node in range(4):
        it.node(node, f"{4 * node}-{4 * node + 3},{4 * node + 16}-{4 * node + 19}")
    it.node(4, "")  # of memory alone
    it.nvidia("0000:0a:00.0", 1, "GPU-aaaa1111")
    it.nvidia("0000:9b:00.0", 3, "GPU-bbbb2222")
    it.nvidia("0001:01:00.0", -1, "GPU-dddd4444")
    it.nvidia("0000:dc:00.0", 3, "GPU-bbcc3333")
    return it


NEAR_1, NEAR_3, NEAR_0 = "4 5 6 7 20 21 22 23", "12 13 14 15 28 29 30 31", "0 1 2 3 16 17 18 19"
HALVES = [" ".join(map(str, (*range(first, first + 8), *range(first + 16, first + 24)))) for first in (0, 8)]


@pytest.mark.parametrize(
    "mode, visible, allowed, shares",
    [
        ("node", None, ALL, [NEAR_1, NEAR_3, NEAR_3, NEAR_0]),
        ("node", None, ALL, [NEAR_1]),
        ("socket", None, ALL, [HALVES[0], HALVES[1], HALVES[1], HALVES[0]]),
        ("exclusive", None, ALL, [NEAR_1, "12 13 28 29", "14 15 30 31"]),
        ("exclusive", None, ALL, [NEAR_1, "12 13 28 29"]),  # among the GPUs of the node, with a rank or without
        ("exclusive", None, [4, 12, 13, 28, 14], ["4", "12 13 28", "14"]),  # three cores: the first has one more
        ("core-complex", None, ALL, ["4 5 20 21", "12 13 28 29", "14 15 30 31"]),
        ("core-complex", None, [4, 12, 14, 15], ["4", "14 15", "12"]),  # the one with more CPUs comes first
        ("core-complex", None, [4, 12], ["4", "12", "12"]),  # fewer than GPUs: shared in turn
        ("exclusive", "0,2", ALL, [NEAR_1, NEAR_3]),
        ("node", "MIG-GPU-dddd4444/1/0", ALL, [NEAR_0]),
    ],
)
def test_each_rank_has_cpus_near_its_gpu(
    machine: Folder, mode: str, visible: str | None, allowed: Sequence[int], shares: list[str]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine.bind(mode, len(shares), environ, allowed) == shares


@pytest.mark.parametrize(
    "visible, nodes",
    [
        ("3,0", [0, 1]),
        ("GPU-bbcc,GPU-aaaa1111", [3, 1]),
        ("1,9,0", [3]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_that_are_visible(machine: Folder, visible: str, nodes: list[int]) -> None:
    assert [gpu.node for gpu in visible_gpus(machine.root, {"CUDA_VISIBLE_DEVICES": visible})] == nodes


def test_gpus_of_amd(tmp_path: Path) -> None:
    it = Folder(tmp_path)
    it.node(0, "0-1")
    it.node(1, "2-3")
    it.amd(0, 0, 0, simds=0)  # a CPU
    it.amd(1, 0xC1, 1, unique=0xAB)
    it.amd(2, 0x03, 0)
    assert visible_gpus(it.root, {}) == [Gpu("0000:c1:00.0", "GPU-ab", 1), Gpu("0000:03:00.0", "GPU-0", 0)]
    assert it.bind("node", 2) == ["2 3", "0 1"]
    assert it.bind("node", 1, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}) == ["0 1"]


@pytest.mark.parametrize("mode", MODES)
def test_without_a_gpu(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match=f"{mode}: this machine shows no GPU .*--cpu-bind numa"):
        bind(mode, 1, ALL, str(tmp_path), {})


@pytest.mark.parametrize(
    "mode, count, visible, allowed, what",
    [
        ("node", 1, "GPU-bb", ALL, "CUDA_VISIBLE_DEVICES: GPU-bb: no GPU, or several"),
        ("node", 1, "GPU-ffff", ALL, "CUDA_VISIBLE_DEVICES: GPU-ffff: no GPU, or several"),
        ("node", 1, "MIG-0a1b", ALL, "CUDA_VISIBLE_DEVICES: MIG-0a1b: instances of GPUs are not told apart"),
        ("node", 5, "0,1,2,3", ALL, "node: rank 4 has no GPU: there are 4 for 5 ranks"),
        ("node", 2, "2", ALL, "node: rank 1 has no GPU: there is 1 for 2 ranks"),
        *(
            (mode, 1, "0", range(4), "GPU 0000:0a:00.0: no CPU of NUMA node 1 (4-7,20-23) may be used")
            for mode in MODES
        ),
        ("exclusive", 2, "0,1,2", [4, 12, 28], "NUMA node 3 has 1 core for 2 GPUs"),
        ("nodes", 1, "0", ALL, "'nodes': expected one of node, socket, exclusive, core-complex"),
    ],
)
def test_what_cannot_be_bound_is_refused(
    machine: Folder, mode: str, count: int, visible: str, allowed: Sequence[int], what: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        machine.bind(mode, count, {"CUDA_VISIBLE_DEVICES": visible}, allowed)


def test_a_kernel_without_numa_and_without_caches(tmp_path: Path) -> None:
    it = Folder(tmp_path)
    it.nvidia("0000:01:00.0", -1)
    it.write("sys/devices/system/cpu/cpu0/topology/physical_package_id", "0")
    assert [it.bind(mode, 1, allowed=[0, 1]) for mode in ("node", "socket", "exclusive")] == [["0 1"]] * 3
    assert it.bind("core-complex", 1, allowed=[0, 1]) == ["0"]


@pytest.mark.torch
def test_the_modes_are_torchs() -> None:
    from torch.numa.binding import AffinityMode

    assert tuple(mode.value for mode in AffinityMode) == MODES


@pytest.mark.torch
@pytest.mark.parametrize("mode", MODES)
def test_the_cpus_are_torchs(machine: Folder, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own functions, given the same folder, and what CUDA would tell of these GPUs."""
    import builtins
    import os
    from types import SimpleNamespace

    from torch.numa import binding

    places = [(0, 0x0A), (0, 0x9B), (0, 0xDC), (1, 0x01)]
    told = [SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=0) for domain, bus in places]
    real_open, real_listdir = builtins.open, os.listdir
    here = machine.root

    def there(path: Any) -> Any:
        return here + path if isinstance(path, str) and path.startswith("/sys/") else path

    machine.write("sys/devices/system/node/possible", "0-3")
    for cpu in range(32):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        machine.write(f"{folder}/thread_siblings_list", (machine.folder / folder / "core_cpus_list").read_text())
    with monkeypatch.context() as patched:
        patched.setattr(binding.torch.cuda, "get_device_properties", lambda index: told[index])
        patched.setattr(binding.torch.cuda, "device_count", lambda: len(told))
        if torch_version() >= (2, 14):
            patched.setattr(binding.torch.accelerator, "is_available", lambda: True)
            patched.setattr(binding.torch.accelerator, "device_count", lambda: len(told))
            patched.setattr(binding.torch.accelerator, "current_accelerator", lambda: "cuda")
        patched.setattr(binding, "_get_allowed_cpu_indices_for_current_thread", lambda: set(range(32)))
        patched.setattr(builtins, "open", lambda path, *more, **options: real_open(there(path), *more, **options))
        patched.setattr(os, "listdir", lambda path=".": real_listdir(there(path)))
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        choose = binding._get_logical_cpus_to_bind_to
        index = "gpu_index" if torch_version() < (2, 14) else "device_index"
        theirs = [tuple(sorted(choose(**{index: rank, "numa_options": options}))) for rank in range(4)]
    assert bind(mode, 4, ALL, here, {}) == theirs
