"""The floor of a GPU: the bytes that a cell's operation must move, at the speed of copying.

Counted is what no order of work saves: inputs read once, output written once. That is 3 arrays of
x's size for a backward pass (x, dy, dx), and 2 for a forward pass and for inference. A backward
pass in two passes over the data, sums first and dx afterwards, moves 5, and a forward pass 3; where
arrays do not stay in the L2 between the two, such a kernel at the full speed of memory takes 5/3
(3/2) of the floor.
"""

from __future__ import annotations

from benchmarks.cuda.device import TorchDevice
from benchmarks.model import FLOOR, Cell, Form, Timing
from benchmarks.peers.base import Data

__all__ = ["Floor"]


class Floor:
    """Not timed in turns: it follows from the bandwidth of copying, measured at the start."""

    name = FLOOR
    temporaries = 0.0

    def __init__(self, device: TorchDevice) -> None:
        self._device = device

    def start(self, threads: int) -> dict[str, str]:
        """Do nothing: the device has measured."""
        return {}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Timing]:
        """Return the time of the form "out"."""
        each, moved = self._device.copies, cell.least_traffic
        return {
            "out": Timing(each.median * moved, each.p20 * moved, each.p80 * moved, each.samples)
        }
