"""The CPU as the device of a run: NumPy arrays, and calls that are complete when they return."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.cells import Cell
from benchmarks.environment import available_memory
from benchmarks.peers.base import Data, Missing, Prepared
from benchmarks.turns import HostWatch, Watch

__all__ = ["AfterConvolution", "Host"]

# A layer of a small network, float32, which uses all threads: 1.3 ms with two threads of an Intel
# Xeon.
_INPUT = (4, 64, 28, 28)
_WEIGHT = (64, 64, 3, 3)


class Host:
    """The CPU."""

    watch: Watch = HostWatch()

    def start(self, threads: int) -> dict[str, Any]:
        """Return no facts: the environment has them."""
        return {}

    def free_memory(self) -> float:
        """Return the free memory of the machine or container, in bytes."""
        return available_memory()

    def hold(self, data: Data | None) -> None:
        """Do nothing: the arrays are already in memory."""

    def spoil(self, data: Data) -> None:
        """Fill the output with NaN, which has all bits set in every type."""
        data.out.reshape(-1).view(np.uint8).fill(0xFF)

    def timed(self, cell: Cell, prepared: Prepared) -> Callable[[], Any]:
        """Return the call in the form that `watch` takes."""
        return prepared.call

    def once(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Make a call; return its result and the seconds."""
        begin = time.perf_counter()
        returned = call()
        return returned, time.perf_counter() - begin

    def whole_watch(self, cell: Cell) -> Watch | None:
        """Return None, because `watch` times whole calls."""
        return None

    def survived(self) -> None:
        """Do nothing: an exception does not disable a CPU."""


class AfterConvolution(Host):
    """The CPU, with a PyTorch convolution right before every timed call.

    PyTorch's threads are OpenMP's. After a convolution they spin for some milliseconds, so a
    contestant with its own threads finds the processors occupied. Calls in a row, as in the
    condition "quiet", find the processors free.
    """

    def start(self, threads: int) -> dict[str, Any]:
        """Import PyTorch and prepare the convolution.

        Raises
        ------
        Missing
            If PyTorch is not installed.
        """
        if importlib.util.find_spec("torch") is None:
            raise Missing("the convolution needs torch, which is not installed: pip install torch")
        import torch

        torch.set_num_threads(threads)
        x, weight = torch.ones(_INPUT), torch.ones(_WEIGHT)
        self.watch = HostWatch(lambda: torch.nn.functional.conv2d(x, weight, padding=1))
        return {}
