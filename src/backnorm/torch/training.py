"""A training step of a model, in two memory formats: its gradients, and its profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from backnorm.steps import MOMENTUM, RATE
from backnorm.torch.conversion import LayerReport, convert
from backnorm.torch.modules import _BatchNorm

#: Maps numbers of axes to the channels_last memory format of such tensors.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# The profiler's names of normalisation, activations and additions, without their callers.
_OF_NORMALIZATION = (
    "backnorm::", "aten::native_batch_norm", "aten::relu", "aten::clamp_min", "aten::threshold",
    "aten::hardtanh", "aten::hardswish", "aten::silu", "aten::add",
)  # fmt: skip


class Profile(NamedTuple):
    """Medians over profiled steps: seconds in normalisation, activations and additions; their share
    of a step; and the most bytes that a step holds at once.
    """

    normalization: float
    share: float
    memory: int


class TrainingStep:
    """A training step of a variant; see `backnorm.steps.Step`.

    Parameters
    ----------
    model : torch.nn.Module
        With PyTorch's layers; a variant whose name begins with "backnorm" converts it in place.
    variant : str
    loss : callable
        Returns the model's loss on a batch.
    fuse : bool or list of (str, str)
        The argument of `convert` for a variant whose name contains "fused".
    example : optional
        The argument of `convert`, which named pairs require.
    """

    def __init__(
        self,
        model: nn.Module,
        variant: str,
        loss: Callable[[], Tensor],
        fuse: bool | list[tuple[str, str]] = True,
        example: Any = None,
    ) -> None:
        reports: list[LayerReport] = []
        if variant.startswith("backnorm"):
            fuse = "fused" in variant and fuse
            convert(model, fuse, reports.append, example=example if fuse else None)
        self.layers = sum(isinstance(each, _BatchNorm) for each in model.modules())
        self.fused = sum(report.fused for report in reports)
        self._loss = loss
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.SGD(self._parameters, lr=RATE, momentum=MOMENTUM)

    def __call__(self) -> None:
        """Make a step."""
        self._optimizer.zero_grad()
        self._loss().backward()
        self._optimizer.step()

    def gradients(self) -> list[np.ndarray]:
        """Return the gradients of all parameters."""
        # The random numbers of functions, such as dropout, are the same in each variant.
        torch.default_generator.manual_seed(0)
        self._loss().backward()
        return [each.grad.double().numpy() for each in self._parameters if each.grad is not None]

    def profile(self, number: int) -> Profile:
        """Profile a number of eager steps, without the optimizer."""
        found = []
        for _ in range(number):
            self._optimizer.zero_grad()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
                begin = time.perf_counter()
                self._loss().backward()
                seconds = time.perf_counter() - begin
            events = sorted(watched.events(), key=lambda event: event.time_range.end)
            spent = 1e-6 * sum(
                each.self_cpu_time_total for each in events
                if each.name.startswith(_OF_NORMALIZATION)
            )  # fmt: skip
            allocated = np.cumsum([each.self_cpu_memory_usage for each in events])
            found.append((spent, spent / seconds, allocated.max()))
        normalization, share, memory = np.median(found, axis=0)
        return Profile(float(normalization), float(share), int(memory))


def disable_dropout(model: nn.Module) -> None:
    """Let dropout modules and stochastic depth pass everything."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if type(module).__name__ in ("StochasticDepth", "DropPath"):
            module.p = module.drop_prob = 0.0


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """Return a contiguous tensor, or one in channels_last memory if it has four or five axes."""
    last = CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format)
    return tensor.contiguous(
        memory_format=last if layout == "channels_last" else torch.contiguous_format
    )


def lay_out(model: nn.Module, layout: str) -> None:
    """Change the memory format of a model's parameters and buffers: see `in_layout`."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = in_layout(tensor.data, layout)
