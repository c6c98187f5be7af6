"""Functions that the tests of large arguments run as workers, and the classes that they are sent."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.helpers import pass_gate, tell


@dataclass
class Box:
    """What something may lie in."""

    inside: Any
    notes: list[str] = field(default_factory=list)


def arrays_in(value: Any) -> Iterator[Any]:
    """The arrays in lists, tuples, dicts and boxes, in order."""
    if type(value).__name__ in {"ndarray", "memmap"}:
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from arrays_in(part)
    elif isinstance(value, dict):
        yield from arrays_in(list(value.values()))
    elif isinstance(value, Box):
        yield from arrays_in(value.inside)


def describe(*values: Any) -> list[tuple[Any, ...]]:
    """What each array is: enough to tell it from any other."""
    return [
        (array.dtype.str if array.dtype.names is None else array.dtype.descr, array.shape, array.strides,
         array.flags.f_contiguous, array.flags.writeable, digest(array))
        for array in arrays_in(values)
    ]  # fmt: skip


def digest(array: Any) -> int:
    """A number that depends on every element and its place."""
    import zlib

    data = pickle.dumps(array.tolist()) if array.dtype.hasobject else array.tobytes()
    return zlib.crc32(data)


def places(*values: Any) -> list[str]:
    """The memfd that each array lies in, as "inode", or "" if it is memory of our own."""
    return [place_of(array.__array_interface__["data"][0]) for array in arrays_in(values)]


class Pages:
    """A callable that holds an array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __call__(self) -> list[str]:
        return places(self.array)


def place_of(address: int) -> str:
    with open("/proc/self/maps") as file:
        for line in file:
            span, _mode, _offset, _device, inode, *name = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                return inode if name and "memfd:phalanx" in name[0] else ""
    raise AssertionError(address)


def write_to(*values: Any) -> list[str]:
    """Write to each array, and return what became of it."""
    found = []
    for array in arrays_in(values):
        try:
            array[(0,) * array.ndim] = 1
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("written")
    return found


def write_own(array: Any, address: str, gate: str) -> tuple[int, float]:
    """Write our pid into the array, wait until all have done so, and return what is there."""
    array[-1] = os.getpid()
    tell(address, "")
    pass_gate(gate)
    return os.getpid(), float(array[-1])


def touch_and_stay(array: Any, address: str, gate: str) -> float:
    """Read all of an array, say so, and stay."""
    total = float(array.sum())
    tell(address, str(os.getpid()))
    pass_gate(gate)
    return total


def use_later(array: Any, address: str, gate: str) -> int:
    """Keep an array for longer than the launcher has it."""
    touch_and_stay(array[:1], address, gate)
    return digest(array)


def give_back(*values: Any) -> Any:
    return values


def descriptors(*_values: Any) -> int:
    return len(os.listdir("/proc/self/fd"))


def memfds() -> str:
    """Whether a payload is "mapped" or "open" in this process; "" if neither."""
    with open("/proc/self/maps") as file:
        mapped = "mapped " * any("memfd:phalanx-payload" in line for line in file)
    opened = False
    for name in os.listdir("/proc/self/fd"):
        try:
            opened |= "memfd:phalanx-payload" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return mapped + "open " * opened


class Counter:
    """Holds a large array, and changes it."""

    def __init__(self, size: int) -> None:
        import numpy as np

        self.array = np.zeros(size)

    def add(self) -> float:
        self.array += 1
        return float(self.array[0])


class Pager:
    """An object that pickles to a large buffer by itself (PEP 574), and is no array."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (pickle.PickleBuffer(self.data),)


def send_all(own: Any, common: Any) -> None:
    own.send("own")
    common.send("common")


def overwrite(array: Any) -> list[str]:
    """Try to change the memory that all workers read, in every way that its file has. What became of each try."""
    import mmap

    array.sum()
    said: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if "phalanx-payload" not in (os.readlink(path) if os.path.lexists(path) else ""):
            continue
        fd = os.open(path, os.O_RDWR)
        size = os.fstat(fd).st_size

        def write(fd: int = fd, size: int = size) -> None:
            os.pwrite(fd, b"\xff" * 4096, size - 4096)

        def mapped(fd: int = fd, size: int = size) -> None:
            mmap.mmap(fd, size)[size - 4096 :] = b"\xff" * 4096

        def cut(fd: int = fd) -> None:
            os.ftruncate(fd, 4096)

        def grow(fd: int = fd, size: int = size) -> None:
            os.ftruncate(fd, size + 4096)

        for attempt in (write, mapped, cut, grow):
            try:
                attempt()
            except PermissionError:
                said.append("refused")
            else:
                said.append(f"{attempt.__name__} was possible")
        os.close(fd)
    return said
