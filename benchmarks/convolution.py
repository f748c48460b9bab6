"""The CPU as a layer of a network finds it: right after a convolution of PyTorch's."""

from __future__ import annotations

import importlib.util

from backnorm.errors import ArgumentValueError
from benchmarks.device import Host
from benchmarks.turns import AfterWatch

__all__ = ["AfterConvolution"]

# Of the size of a layer in a small network, float32: 1.3 ms with two threads of an Intel Xeon. All
# threads take part, and it is little beside the turns of a run.
_INPUT = (4, 64, 28, 28)
_WEIGHT = (64, 64, 3, 3)


class AfterConvolution(Host):
    """The CPU, with a convolution of PyTorch's right before every call that is timed.

    PyTorch's threads are OpenMP's. They do not sleep at once when a convolution is done, but look
    for more work for some milliseconds; whoever has threads of his own then finds the processors
    taken. Calls in a row never meet this.
    """

    def start(self, threads: int) -> None:
        """Import PyTorch, and make the convolution ready.

        Raises
        ------
        ArgumentValueError
            If PyTorch is not installed.
        """
        if importlib.util.find_spec("torch") is None:
            raise ArgumentValueError(
                "--condition after-convolution",
                "PyTorch, whose convolution it is, is not installed",
                came="no torch",
                accepted="quiet; or after-convolution where PyTorch is installed",
                hint="pip install torch",
            )
        import torch

        torch.set_num_threads(threads)
        x, weight = torch.ones(_INPUT), torch.ones(_WEIGHT)
        self.watch = AfterWatch(lambda: torch.nn.functional.conv2d(x, weight, padding=1))
