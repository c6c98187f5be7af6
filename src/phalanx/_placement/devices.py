"""Parses visible-devices variables, by the rules of CUDA and of the frameworks. Looks at no device."""

from __future__ import annotations

import re

_NAMED = ("GPU-", "MIG-")


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
