"""Parses visible-devices variables, by the rules of CUDA and of the frameworks. Looks at no device."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_OTHERS = ("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES")
VARIABLES = (_CUDA, _HIP, *_OTHERS)
"""The variables that `one_each` chooses by."""

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
