"""The floor's measurement: how fast the device copies its own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.model import Timing
from benchmarks.turns import summary

if TYPE_CHECKING:
    from benchmarks.cuda.device import TorchDevice

__all__ = ["measure_copies"]

# Bytes of the copied buffer at the most: far beyond any cache, and long beside a launch.
_MOST = 1 << 30

# The part of the free memory that it may be. The copy is as large.
_SHARE = 3

_WARM = 3
_SAMPLES = 20


def measure_copies(device: TorchDevice, free: float) -> Timing:
    """Return the seconds for each byte that is read or written when memory is copied.

    Copied is 1 GiB, or a third of the free memory, from one buffer of the device to another; every
    byte of it counts twice, since it is read and written.
    """
    torch = device.torch
    size = int(min(_MOST, free // _SHARE))
    source = torch.zeros(size, dtype=torch.uint8, device=device.place)
    target = torch.zeros_like(source)
    pairs = []
    for _ in range(_WARM + _SAMPLES):
        start, end = device.event(), device.event()
        start.record()
        target.copy_(source)
        end.record()
        pairs.append((start, end))
    device.synchronise()
    seconds = [start.elapsed_time(end) / 1e3 for start, end in pairs[_WARM:]]
    return summary([each / (2 * size) for each in seconds])
