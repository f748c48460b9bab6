"""The network in PyTorch: plain modules, eager, channels first; 16-bit types under autocast."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from backnorm.training.frameworks import LOSS_SCALE, DType, Layer
from backnorm.training.network import (
    BLOCKS,
    CLASSES,
    EPSILON,
    MOMENTUM,
    STEM,
    WIDTH,
    Block,
    Convolution,
    Site,
    convolutions,
)

__all__ = ["PyTorch", "time_sites"]

_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


class PyTorch:
    """PyTorch on the CPU."""

    def start(self, threads: int) -> dict[str, str]:
        """Set PyTorch's threads."""
        torch.set_num_threads(threads)
        return {"torch": torch.__version__}

    def build(self, layer: Layer, weights: Mapping[str, np.ndarray], dtype: DType) -> _Trainer:
        """Return the network, converted if the layers are ours."""
        net = _Net()
        if dtype == "float64":
            net = net.double()
        parameters = _parameters(net)
        with torch.no_grad():
            for name, weight in weights.items():
                parameters[name].copy_(torch.from_numpy(_to_torch(weight)))
        return _Trainer(_with(layer, net), dtype)

    def normalise(
        self, layer: Layer, sites: Sequence[Site], dtype: DType
    ) -> Callable[[], list[float]]:
        """Return the layers alone, called one after another."""
        kind = torch.float64 if dtype == "float64" else torch.float32
        calls, inputs, incoming = [], [], []
        generator = torch.Generator().manual_seed(0)
        for site in sites:
            calls.append(_with(layer, nn.Sequential(_norm(site.shape[1]).to(kind)))[0])
            x, dy = (torch.randn(site.shape, generator=generator) for _ in range(2))
            inputs.append((x.to(_TYPES[dtype]).requires_grad_(),))
            incoming.append(dy.to(_TYPES[dtype]))
        return lambda: [sum(both) for both in time_sites(calls, inputs, incoming)]


def time_sites(
    calls: Sequence[nn.Module],
    inputs: Sequence[tuple[torch.Tensor, ...]],
    incoming: Sequence[torch.Tensor],
) -> list[tuple[float, float]]:
    """Run modules forward, then backward from the last to the first, as a step does.

    So what the forward pass has read and kept is as far away by then as it is in a step. Returns
    the seconds of the forward and of the backward pass of each.

    Parameters
    ----------
    calls : sequence of torch.nn.Module
    inputs : sequence of tuple of torch.Tensor
        The arguments of each, which require gradients.
    incoming : sequence of torch.Tensor
        The gradient with respect to the result of each.
    """
    clock = time.perf_counter
    forward, backward, outputs = [0.0] * len(calls), [0.0] * len(calls), []
    for i, (call, arguments) in enumerate(zip(calls, inputs, strict=True)):
        begin = clock()
        y = call(*arguments)
        forward[i] = clock() - begin
        outputs.append(y)
    del y
    for i in reversed(range(len(calls))):
        wanted = (*inputs[i], *calls[i].parameters())
        y = outputs.pop()
        begin = clock()
        found = torch.autograd.grad(y, wanted, incoming[i])
        # What the pass has kept is let go of as in a step.
        del found, y
        backward[i] = clock() - begin
    return list(zip(forward, backward, strict=True))


class _Unit(nn.Module):  # type: ignore[misc]
    """A convolution and its normalisation."""

    def __init__(self, c: Convolution) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(
            c.inputs, c.outputs, c.size, c.stride, padding=c.size // 2, bias=False
        )
        self.norm = _norm(c.outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x))


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.first, self.second = _Unit(block.first), _Unit(block.second)
        self.shortcut = _Unit(block.shortcut) if block.shortcut else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(functional.relu(self.first(x)))
        return functional.relu(y + self.shortcut(x))


class _Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.stem = _Unit(STEM)
        for number, block in enumerate(BLOCKS, 1):
            self.add_module(f"block{number}", _Block(block))
        self.blocks = [f"block{number}" for number in range(1, len(BLOCKS) + 1)]
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.stem(x))
        for name in self.blocks:
            x = self.get_submodule(name)(x)
        return self.head(x.mean((2, 3)))


class _Trainer:
    def __init__(self, net: nn.Module, dtype: DType) -> None:
        self._net = net
        self._wide = _TYPES["float64" if dtype == "float64" else "float32"]
        self._cast = torch.autocast("cpu", _TYPES[dtype], enabled=dtype in ("bfloat16", "float16"))
        self._scale = LOSS_SCALE.get(dtype, 1.0)
        self._optimiser = torch.optim.SGD(net.parameters(), lr=0.0, momentum=MOMENTUM)

    def step(self, images: np.ndarray, labels: np.ndarray, rate: float) -> tuple[float, int]:
        loss, logits, targets = self._backward(images, labels)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        return loss, _right(logits, targets)

    def gradients(
        self, images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        loss, _, _ = self._backward(images, labels)
        found = {
            name: _from_torch(parameter.grad.numpy().astype(np.float64))
            for name, parameter in _parameters(self._net).items()
        }
        return loss, found

    def evaluate(self, images: np.ndarray, labels: np.ndarray) -> int:
        self._net.eval()
        with torch.no_grad(), self._cast:
            logits = self._net(self._images(images))
        return _right(logits, torch.from_numpy(labels))

    def _backward(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, Any, Any]:
        self._net.train()
        self._optimiser.zero_grad()
        targets = torch.from_numpy(labels)
        with self._cast:
            logits = self._net(self._images(images))
        loss = functional.cross_entropy(logits.to(self._wide), targets)
        (loss * self._scale).backward()
        if self._scale != 1:
            for parameter in self._net.parameters():
                parameter.grad.div_(self._scale)
        return loss.item(), logits, targets

    def _images(self, images: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(images).unsqueeze(1).to(self._wide)


def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=EPSILON, momentum=1 - MOMENTUM)


def _with(layer: Layer, net: nn.Module) -> nn.Module:
    """Return a network with the normalisation of `layer`."""
    if layer == "own":
        return net
    from backnorm.torch import convert

    return convert(net)


def _parameters(net: nn.Module) -> dict[str, Any]:
    found = {}
    for c in convolutions():
        unit = net.get_submodule(c.name)
        found[f"{c.name}.weight"] = unit.convolution.weight
        found[f"{c.name}.gamma"] = unit.norm.weight
        found[f"{c.name}.beta"] = unit.norm.bias
    head = net.get_submodule("head")
    return found | {"head.weight": head.weight, "head.bias": head.bias}


def _to_torch(weight: np.ndarray) -> np.ndarray:
    """Return a parameter in PyTorch's order of axes: outputs, inputs, height, width."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[weight.ndim]
    return np.ascontiguousarray(weight.transpose(axes))


def _from_torch(weight: np.ndarray) -> np.ndarray:
    axes = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[weight.ndim]
    return weight.transpose(axes)


def _right(logits: torch.Tensor, targets: torch.Tensor) -> int:
    return int((logits.argmax(1) == targets).sum())
