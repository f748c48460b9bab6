"""The CPU as the device of a run: NumPy's arrays, calls that are done when they return."""

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

# A layer of a small network, float32: 1.3 ms with two threads of an Intel Xeon. All
# threads take part.
_INPUT = (4, 64, 28, 28)
_WEIGHT = (64, 64, 3, 3)


class Host:
    """The CPU."""

    watch: Watch = HostWatch()

    def start(self, threads: int) -> dict[str, Any]:
        """Return no facts: the environment has them."""
        return {}

    def free_memory(self) -> float:
        """Return the bytes that the machine, or the container, can still give."""
        return available_memory()

    def hold(self, data: Data | None) -> None:
        """Do nothing: the arrays are here."""

    def spoil(self, data: Data) -> None:
        """Fill the output with NaN: all bits set is one in every type."""
        data.out.reshape(-1).view(np.uint8).fill(0xFF)

    def timed(self, cell: Cell, prepared: Prepared) -> Callable[[], Any]:
        """Return the call in the form that `watch` takes."""
        return prepared.call

    def once(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Make a call; return what it returned, and the seconds."""
        begin = time.perf_counter()
        returned = call()
        return returned, time.perf_counter() - begin

    def whole_watch(self, cell: Cell) -> Watch | None:
        """Return None: whole calls are all that is timed."""
        return None

    def survived(self) -> None:
        """Do nothing: an exception leaves a CPU as it was."""


class AfterConvolution(Host):
    """The CPU, with a convolution of PyTorch's right before every call that is timed.

    PyTorch's threads are OpenMP's. After a convolution they look for more work for some
    milliseconds; a contestant with threads of its own then finds the processors taken. Calls in a
    row never meet this.
    """

    def start(self, threads: int) -> dict[str, Any]:
        """Import PyTorch, and make the convolution ready.

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
