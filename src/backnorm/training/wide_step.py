"""A training step of ResNet-50 in PyTorch, timed with PyTorch's normalisation and with ours.

The step is timed as a whole, and within it what lies between the convolutions: normalisation, ReLU
and addition, forward and backward. Each convolution is enclosed by two functions that change
nothing and take the time; so it does not matter what the layers between have become.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from backnorm.errors import BacknormError
from backnorm.training.frameworks import LAYERS, Layer
from backnorm.training.resnet import resnet50
from backnorm.training.wide_model import WideCheck, WideSettings, WideStep
from benchmarks.environment import available_memory
from benchmarks.turns import order

__all__ = ["Stamp", "between", "enclose", "time_steps", "versions"]

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_CLASSES = 1000

# Bytes, measured: two networks with gradients and momentum, and what a float32 step keeps for the
# backward pass, for each image of 224 x 224.
_NETWORKS, _IMAGE = 0.7e9, 0.13e9
_SIDE = 224

# Learning rate: the weights have to stay sensible for a few steps, no more.
_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Stamp:
    """When a module that is not normalisation began or ended, in either pass."""

    name: str
    backward: bool
    begins: bool
    seconds: float


class _Mark(torch.autograd.Function):  # type: ignore[misc]
    """The identity; notes when the forward and the backward pass come by."""

    @staticmethod
    def forward(ctx: Any, x: Any, note: Callable[[bool], None]) -> Any:
        ctx.note = note
        note(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        ctx.note(True)
        return dy, None


class _Enclosed(nn.Module):  # type: ignore[misc]
    """A module between two marks."""

    def __init__(self, name: str, inner: nn.Module, stamps: list[Stamp]) -> None:
        super().__init__()
        self.inner = inner
        self._name, self._stamps = name, stamps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The backward pass begins where the forward pass ends.
        x = _Mark.apply(x, lambda backward: self._note(backward, begins=not backward))
        return _Mark.apply(self.inner(x), lambda backward: self._note(backward, begins=backward))

    def _note(self, backward: bool, begins: bool) -> None:
        self._stamps.append(Stamp(self._name, backward, begins, time.perf_counter()))


def versions() -> dict[str, str]:
    """Return PyTorch's version."""
    return {"torch": torch.__version__}


def time_steps(settings: WideSettings, tell: Callable[[object], None]) -> None:
    """Time steps of both networks in turns, in both memory formats.

    Tells, for each format, a `WideCheck` of the first step and a `WideStep` for every later one.

    Raises
    ------
    BacknormError
        If there is too little memory.
    """
    torch.set_num_threads(settings.threads)
    _require_memory(settings)
    for name in _FORMATS:
        steps = _steps(name, settings)
        found = {layer: step() for layer, step in steps.items()}
        tell(_check(name, {layer: (loss, slopes) for layer, (loss, slopes, _) in found.items()}))
        del found
        for number in range(settings.rounds):
            for layer in order(LAYERS, number):
                gc.collect()
                begin = time.perf_counter()
                _, _, stamps = steps[layer]()
                seconds = time.perf_counter() - begin
                forward, backward = between(stamps)
                tell(WideStep(name, layer, seconds, forward, backward))


def _require_memory(settings: WideSettings) -> None:
    narrow = settings.dtype in ("bfloat16", "float16")
    size = {True: 0.5, False: 1.0}[narrow] * (2.0 if settings.dtype == "float64" else 1.0)
    needed = _NETWORKS + _IMAGE * size * settings.batch * (settings.size / _SIDE) ** 2
    free = available_memory()
    if needed > free:
        raise BacknormError(
            f"--batch {settings.batch}: a step takes about {needed / 1e9:.1f} GB, "
            f"and {free / 1e9:.1f} are free"
        )


def _steps(memory: str, settings: WideSettings) -> dict[Layer, Callable[[], Any]]:
    from backnorm.torch import convert

    kind = torch.float64 if settings.dtype == "float64" else torch.float32
    torch.manual_seed(0)
    own = resnet50(_CLASSES).to(kind).to(memory_format=_FORMATS[memory])
    images = torch.randn(settings.batch, 3, settings.size, settings.size, dtype=kind)
    images = images.to(memory_format=_FORMATS[memory])
    labels = torch.randint(_CLASSES, (settings.batch,))
    networks: dict[Layer, Any] = {"own": own, "backnorm": convert(copy.deepcopy(own), fuse=True)}
    return {layer: _step(network, images, labels, settings) for layer, network in networks.items()}


def _step(net: nn.Module, images: Any, labels: Any, settings: WideSettings) -> Callable[[], Any]:
    """Return a step: its loss, the gradients by name, and the stamps."""
    stamps: list[Stamp] = []
    parameters = dict(net.named_parameters())
    enclose(net, stamps)
    net.train()
    optimiser = torch.optim.SGD(parameters.values(), _RATE, momentum=0.9)
    kind = getattr(torch, settings.dtype)
    cast = torch.autocast("cpu", kind, enabled=settings.dtype in ("bfloat16", "float16"))

    def step() -> Any:
        stamps.clear()
        optimiser.zero_grad()
        with cast:
            logits = net(images)
        loss = functional.cross_entropy(logits.to(next(iter(parameters.values())).dtype), labels)
        loss.backward()
        optimiser.step()
        return loss.item(), {name: p.grad for name, p in parameters.items()}, stamps

    return step


def enclose(net: nn.Module, stamps: list[Stamp]) -> None:
    """Enclose everything that is neither normalisation, ReLU nor addition."""
    others = (nn.Conv2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Linear)
    chosen = [(name, module) for name, module in net.named_modules() if isinstance(module, others)]
    for name, module in chosen:
        place, _, last = name.rpartition(".")
        setattr(net.get_submodule(place), last, _Enclosed(name, module, stamps))


def between(stamps: list[Stamp]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds between enclosed modules, by stage, of the forward and backward pass.

    A stage is the first part of a name; the normalisation after a convolution belongs to its stage.
    """
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for before, after in itertools.pairwise(stamps):
        if before.begins or not after.begins or before.backward != after.backward:
            continue
        # Behind the last block there is nothing to normalise.
        last = after.name if before.backward else before.name
        if last in ("avgpool", "fc"):
            continue
        seconds = backward if before.backward else forward
        # The first convolution is a stage of its own.
        stage = last.split(".")[0].replace("conv1", "stem").replace("maxpool", "stem")
        seconds[stage] = seconds.get(stage, 0.0) + after.seconds - before.seconds
    return forward, backward


def _check(memory: str, found: dict[Layer, tuple[float, dict[str, Any]]]) -> WideCheck:
    (own_loss, own), (our_loss, ours) = (found[layer] for layer in LAYERS)
    whole = sum(float(slope.double().square().sum()) for slope in own.values())
    apart = sum(float((ours[n] - slope).double().square().sum()) for n, slope in own.items())
    return WideCheck(memory, own_loss, our_loss, math.sqrt(apart / whole))
