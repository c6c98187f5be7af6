"""What processes use of this machine's GPUs, as NVIDIA's driver tells it through NVML.

Owns the thread that asks: a driver in trouble may not answer for minutes, and nobody waits for it. The library is
nvidia-ml-py; without it, or without a driver, nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from phalanx._base import clock
from phalanx._base.threads import SerialExecutor

_FRESH = 1.0  # seconds for which the driver is not asked again
_STALE = 30.0  # seconds after which an old answer is none


class GpuUse(NamedTuple):
    """What is used of GPUs: percent of the time of one, and bytes of memory; None: it is not known.

    The driver does not tell the time of a GPU that is divided (MIG).
    """

    gpu: float | None = None
    gpu_memory: int | None = None


def total(uses: Iterable[GpuUse]) -> GpuUse:
    """Return the sums of what is known.

    >>> total([GpuUse(50.0, 1024), GpuUse(None, 1024)])
    GpuUse(gpu=50.0, gpu_memory=2048)
    >>> total([])
    GpuUse(gpu=None, gpu_memory=None)
    """
    known = [[number for number in numbers if number is not None] for numbers in zip(*uses, strict=True)]
    return GpuUse(*(sum(numbers) if numbers else None for numbers in known))


class Gpus:
    """Knows what each process uses of the GPUs."""

    def __init__(self) -> None:
        self._thread = SerialExecutor("phalanx-gpus")
        self._found: tuple[float, dict[int, GpuUse]] = -math.inf, {}
        self._asked, self._asks = -math.inf, False
        self._has_any = True  # until it is known better
        self._devices: list[Any] = []
        self._last: dict[int, int] = {}  # by device: the time of its latest sample, in the driver's microseconds

    def use(self) -> dict[int, GpuUse]:
        """Return what was found last, by pid, and have the driver asked anew. Does not wait for it."""
        now = clock.now()
        if self._has_any and not self._asks and now - self._asked >= _FRESH:
            self._asks, self._asked = True, now
            if not self._thread.submit(self._ask):
                self._asks = False
        moment, found = self._found
        return found if now - moment < _STALE else {}

    # --- the thread that may wait

    def _ask(self) -> None:
        try:
            self._read()
        except BaseException:  # once is enough: what is raised is logged
            self._has_any = False
            raise
        finally:
            self._asks = False

    def _read(self) -> None:
        import ctypes

        try:
            ctypes.CDLL("libnvidia-ml.so.1")  # the driver's: without one, the megabyte of its names is not loaded
            import pynvml
        except (OSError, ImportError):
            self._has_any = False
            return
        try:
            if not self._devices:
                pynvml.nvmlInit()
                self._devices = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
            uses: dict[int, list[GpuUse]] = {}
            for index, device in enumerate(self._devices):
                times = self._times(pynvml, index, device)
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                    share = None if times is None else times.get(process.pid, 0.0)
                    uses.setdefault(process.pid, []).append(GpuUse(share, process.usedGpuMemory))
            self._found = clock.now(), {pid: total(each) for pid, each in uses.items()}
        except pynvml.NVMLError:
            self._has_any = bool(self._devices)  # no driver, or no GPU; one in trouble may answer the next time

    def _times(self, pynvml: Any, index: int, device: Any) -> dict[int, float] | None:
        """Return the percent of a device's time that processes have used, on average since the last time.

        None: the driver does not tell it.
        """
        last, samples = self._last.get(index, 0), dict[int, list[int]]()
        try:
            with suppress(pynvml.NVMLError_NotFound):  # there is no sample since then
                for sample in pynvml.nvmlDeviceGetProcessUtilization(device, last):
                    if sample.timeStamp > last:  # the driver fills up with zeros
                        samples.setdefault(sample.pid, []).append(sample.smUtil)
                        self._last[index] = max(self._last.get(index, 0), sample.timeStamp)
        except pynvml.NVMLError_NotSupported:
            return None
        return {pid: sum(values) / len(values) for pid, values in samples.items()}
