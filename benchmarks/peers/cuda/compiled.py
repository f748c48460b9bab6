"""``torch.compile`` of the formula as one writes it, at its default settings.

Elements of 16 bits are widened to float32 first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.cuda.device import TorchDevice
from benchmarks.model import Cell, Form, Operation
from benchmarks.peers.base import Data, Prepared
from benchmarks.peers.formula import INPUTS, OUTPUTS
from benchmarks.tensors import named_arrays

__all__ = ["Compiled"]


class Compiled:
    """Allocating, compiled anew for every cell."""

    name = "compile"
    temporaries = 3.0
    options: Mapping[str, Any] = {"dynamic": False, "fullgraph": True}

    def __init__(self, device: TorchDevice) -> None:
        self._device = device

    def start(self, threads: int) -> dict[str, str]:
        """Do nothing: it is PyTorch."""
        return {}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form; it is compiled when it is first called."""
        torch, last = self._device.torch, cell.layout == "NXC"
        # After a few shapes of one function it would no longer compile, and say nothing.
        torch.compiler.reset()
        function = torch.compile(_formula(torch, cell.op, data.epsilon), **self.options)
        arguments = [getattr(self._device.tensors, name) for name in INPUTS[cell.op]]

        def results(returned: Any) -> Any:
            return named_arrays(torch, OUTPUTS[cell.op], returned, last)

        return {"allocate": Prepared(partial(function, *arguments), results)}


def _formula(torch: Any, op: Operation, epsilon: float) -> Callable[..., tuple[Any, ...]]:
    """Return a function of tensors (N, C, spatial ...)."""

    def wide(x: Any) -> Any:
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

    def column(vector: Any, x: Any) -> Any:
        return vector.reshape(1, -1, *(1,) * (x.dim() - 2))

    def axes(x: Any) -> tuple[int, ...]:
        return (0, *range(2, x.dim()))

    def backward(x: Any, dy: Any, mean: Any, variance: Any, gamma: Any) -> Any:
        centred, gradient = wide(x) - column(mean, x), wide(dy)
        count = x.numel() // x.shape[1]
        s = torch.rsqrt(variance + epsilon)
        sum_dy = gradient.sum(axes(x))
        sum_dy_xmu = (gradient * centred).sum(axes(x))
        slope = s * s * sum_dy_xmu / count
        dx = column(gamma * s, x) * (
            gradient - column(sum_dy / count, x) - centred * column(slope, x)
        )
        return dx.to(x.dtype), s * sum_dy_xmu, sum_dy

    def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
        gain = gamma * torch.rsqrt(variance + epsilon)
        y = column(gain, x) * (wide(x) - column(mean, x)) + column(beta, x)
        return (y.to(x.dtype),)

    def forward(x: Any, gamma: Any, beta: Any) -> Any:
        mean = wide(x).mean(axes(x))
        variance = torch.square(wide(x) - column(mean, x)).mean(axes(x))
        return (*inference(x, mean, variance, gamma, beta), mean, variance)

    functions: dict[Operation, Callable[..., tuple[Any, ...]]] = {
        "backward": backward,
        "forward": forward,
        "inference": inference,
    }
    return functions[op]
