"""How many workers a machine takes: counts CPUs and accelerators, without importing any framework."""

from __future__ import annotations

import os
import re
from glob import glob


def count(wanted: str) -> int:
    """Read the value of ``--nproc-per-node``: a number of at least 1, "auto", "cpu" or "gpu".

    "cpu" is the number of CPUs that this process may use; "gpu" the number of accelerators; "auto" is "gpu" where
    there is any, else "cpu". Raises ValueError, which says what would be right.

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
    if not re.fullmatch(r"\d+", wanted, re.ASCII) or int(wanted) < 1:
        msg = f"{wanted!r}: expected a number of at least 1, or auto, cpu or gpu"
        raise ValueError(msg)
    return int(wanted)


def count_gpus(root: str = "/") -> int:
    """The accelerators that a worker would see: the visible-devices variables first, then the kernel's devices.

    NVIDIA: one folder each in /proc/driver/nvidia/gpus, or /dev/nvidiaN where a container has only these. AMD: the
    nodes of /sys/class/kfd/kfd/topology with SIMD units (the others are CPUs).
    """
    for variables, present in (
        (("CUDA_VISIBLE_DEVICES",), _nvidia(root)),
        (("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), _amd(root)),
    ):
        if present:
            chosen = next((os.environ[name] for name in variables if name in os.environ), None)
            return present if chosen is None else min(present, _visible(chosen, present))
    return 0


def _visible(value: str, present: int) -> int:
    """The devices that a visible-devices variable lets through: those before the first invalid one (CUDA's rule)."""
    devices = 0
    for device in filter(None, (part.strip() for part in value.split(","))):
        by_index = device.isascii() and device.isdigit()
        if not (int(device) < present if by_index else device.startswith(("GPU-", "MIG-"))):
            break
        devices += 1
    return devices


def _nvidia(root: str) -> int:
    nodes = [path for path in glob(os.path.join(root, "dev/nvidia*")) if re.search(r"nvidia\d+$", path)]
    return len(nodes) or len(glob(os.path.join(root, "proc/driver/nvidia/gpus/*")))


def _amd(root: str) -> int:
    devices = 0
    for path in glob(os.path.join(root, "sys/class/kfd/kfd/topology/nodes/*/properties")):
        try:
            with open(path) as file:
                devices += bool(re.search(r"^simd_count [1-9]", file.read(), re.MULTILINE))
        except OSError:
            continue
    return devices
