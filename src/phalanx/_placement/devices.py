"""Counts this machine's CPUs and accelerators, and divides them by visible-devices variables; imports no framework.

The variables are read by the rules of CUDA and of the frameworks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_OTHERS = ("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES")
VARIABLES = (_CUDA, _HIP, *_OTHERS)
"""The variables that `one_each` chooses by."""

CHOOSE_NVIDIA, CHOOSE_AMD = (_CUDA,), (_HIP, "ROCR_VISIBLE_DEVICES", _CUDA)
"""The variables that choose among the devices of a maker: the first that is set does."""

_NAMED = ("GPU-", "MIG-")


def one_each(environ: Mapping[str, str], count: int) -> dict[str, list[str]]:
    """Return the variables that leave each of so many ranks one device, and their values by rank; fewer: devices lack.

    These are all that ``environ`` has, each an entry of its own list, and always CUDA_VISIBLE_DEVICES: without one, as
    HIP_VISIBLE_DEVICES, whose other name it is, or else a count. ROCR_VISIBLE_DEVICES stays as it is: HIP counts the
    devices that it leaves, so an index into these would be wrong with less of them.

    >>> one_each({"HIP_VISIBLE_DEVICES": "4,5", "ZE_AFFINITY_MASK": "0.1,1.0"}, 2)
    {'CUDA_VISIBLE_DEVICES': ['4', '5'], 'ZE_AFFINITY_MASK': ['0.1', '1.0'], 'HIP_VISIBLE_DEVICES': ['4', '5']}
    """
    found = {name: [part.strip() for part in environ[name].split(",") if part.strip()]
             for name in _OTHERS if name in environ}  # fmt: skip
    found |= {name: visible(environ[name]) for name in (_HIP, _CUDA) if name in environ}
    return {_CUDA: found.get(_HIP, [str(rank) for rank in range(count)]), **found}


def visible(value: str) -> list[str]:
    """Parse the value of CUDA_VISIBLE_DEVICES: the devices that it selects, in its order.

    It is a list of indices, or of UUIDs that all begin with ``GPU-``, or with ``MIG-``; its first characters tell
    which. The list ends before the first entry of another kind; a device that is named twice hides all. An index is
    parsed as by strtoul(3): what follows the digits is ignored.

    >>> visible("2, 0,-1,3"), visible("0 1"), visible("GPU-5a,GPU-7c,1"), visible("1,1")
    (['2', '0'], ['0'], ['GPU-5a', 'GPU-7c'], [])
    """
    kind = next((kind for kind in _NAMED if value.startswith(kind)), None)
    devices: list[str] = []
    for entry in value.split(","):
        device = _index(entry) if kind is None else entry if entry.startswith(kind) else None
        if device in devices:
            return []
        if device is None:
            break
        devices.append(device)
    return devices


def _index(entry: str) -> str | None:
    found = re.match(r"\s*([+-]?[0-9]+)", entry)
    number = int(found[1]) if found else -1
    return None if number < 0 else str(number)


_WSL = "usr/lib/wsl/lib"  # where WSL2 has the libraries of the host's driver
_DIGITS = 6  # of a number of workers: Linux has no more than 4 million processes


def count(wanted: str) -> int:
    """Read the value of ``--nproc-per-node``: a number of at least 1, "auto", "cpu" or "gpu".

    "cpu" is the number of CPUs that this process may use; "gpu" the number of accelerators; "auto" is "gpu" where
    there is any, else "cpu". Raises ValueError, whose message gives the values that are allowed.

    >>> count("4")
    4
    """
    if wanted == "cpu":
        return len(os.sched_getaffinity(0))
    if wanted == "gpu":
        gpus = count_gpus()
        if not gpus:
            raise ValueError("gpu: this machine shows no NVIDIA or AMD device (or *_VISIBLE_DEVICES hides all)")
        return gpus
    if wanted == "auto":
        return count_gpus() or count("cpu")
    if not re.fullmatch(r"0*[1-9]\d*", wanted, re.ASCII):
        msg = f"{wanted!r}: expected a number of at least 1, or auto, cpu or gpu"
        raise ValueError(msg)
    if len(wanted) > _DIGITS:  # a typing error would fill the memory
        msg = f"{wanted!r}: there cannot be so many workers"
        raise ValueError(msg)
    return int(wanted)


def count_gpus(root: str = "/") -> int:
    """Count the accelerators that a worker would see: the kernel's devices, limited by the visible-devices variables.

    NVIDIA: one folder each in /proc/driver/nvidia/gpus, or /dev/nvidiaN where a container has only these. Under WSL2
    there is one /dev/dxg, which counts as one. AMD: the nodes of /sys/class/kfd/kfd/topology with SIMD units (the
    others are CPUs).
    """
    for variables, present in (
        (CHOOSE_NVIDIA, _nvidia(root)),
        (CHOOSE_AMD, len(amd_nodes(root))),
    ):
        if present:
            chosen = next((os.environ[name] for name in variables if name in os.environ), None)
            named = [str(number) for number in range(present)] if chosen is None else visible(chosen)
            # Those before the first that does not exist.
            beyond = (index for index, device in enumerate(named) if device.isdigit() and int(device) >= present)
            return min(present, next(beyond, len(named)))
    return 0


def _nvidia(root: str) -> int:
    nodes = [name for name in _names(os.path.join(root, "dev")) if re.fullmatch(r"nvidia\d+", name)]
    return len(nodes) or len(_names(os.path.join(root, "proc/driver/nvidia/gpus"))) or _wsl(root)


def _wsl(root: str) -> int:
    """Count the NVIDIA devices of WSL2. Without the driver's libraries, /dev/dxg is for devices of other makers."""
    libraries = (os.path.join(root, _WSL, name) for name in ("libcuda.so.1", "libnvidia-ml.so.1"))
    return int(os.path.exists(os.path.join(root, "dev/dxg")) and any(map(os.path.exists, libraries)))


def amd_nodes(root: str) -> list[dict[str, int]]:
    """Read the properties of the nodes of AMD's driver that have SIMD units, in its order."""
    folder = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    nodes = []
    for number in sorted(int(name) for name in _names(folder) if name.isdecimal()):
        text = read(os.path.join(folder, str(number), "properties"))
        told = {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
        if told.get("simd_count", 0):
            nodes.append(told)
    return nodes


def read(path: str) -> str:
    """Read a file; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
