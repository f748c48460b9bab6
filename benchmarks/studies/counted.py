"""Time masks of a layer, and the recomputation of running statistics, as ratios to doing without.

Times are processor time of one thread, in turns. The ranges are the 20th and 80th percentile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import backnorm
import backnorm.torch
from backnorm.steps import take_turns
from benchmarks.studies import arguments, show

_SHAPES = ((32, 64, 400), (32, 256, 400))


def _ratios(calls: Mapping[str, Callable[[], object]], rounds: int) -> Iterator[str]:
    """Yield the ratio of each call's times to those of the first call, which is not named."""

    def turn(call: Callable[[], object]) -> list[float]:
        begun = time.process_time()
        call()
        return [time.process_time() - begun]

    turns = {name: (lambda call=call: turn(call)) for name, call in calls.items()}
    take_turns(turns, 2)
    first, *others = map(np.array, take_turns(turns, rounds).values())
    for samples in others:
        low, middle, high = np.percentile(samples / first, (20, 50, 80))
        yield f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _masks(rounds: int) -> Iterator[Sequence[object]]:
    """Yield the ratios of a training step of a layer with a mask that counts half the frames."""
    yield "x", "`lengths`", "boolean `mask`", "weights"
    for shape in _SHAPES:
        x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
        lengths = torch.linspace(1, shape[2], shape[0]).long()
        mask = torch.arange(shape[2]) < lengths[:, None]
        step = partial(_step, backnorm.torch.BatchNorm1d(shape[1]), x, dy)
        calls = {
            "all": step,
            "lengths": partial(step, lengths=lengths),
            "mask": partial(step, mask=mask),
            "weights": partial(step, mask=mask * 0.5),
        }
        yield shape, *_ratios(calls, rounds)


def _step(layer: nn.Module, x: Tensor, dy: Tensor, **counted: Tensor) -> None:
    torch.autograd.grad(layer(x, **counted), [x, *layer.parameters()], dy)


def _recomputation(rounds: int) -> Iterator[Sequence[object]]:
    """Yield the ratios to an evaluation of a model on the same images."""
    blocks = [[nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()] for _ in range(4)]
    model = nn.Sequential(*(layer for block in blocks for layer in block)).eval()
    loader = list(torch.randn(4, 8, 64, 56, 56))

    def evaluate() -> None:
        with torch.no_grad():
            for images in loader:
                model(images)

    calls = {
        "evaluation": evaluate,
        "update_bn": lambda: update_bn(loader, model),
        "recompute": lambda: backnorm.torch.recompute_statistics(model, loader),
    }
    yield "four blocks, batches (8, 64, 56, 56)", "`update_bn`", "`recompute_statistics`"
    yield "over an evaluation", *_ratios(calls, rounds)


if __name__ == "__main__":
    options = arguments(__doc__, rounds=30)
    torch.set_num_threads(1)
    backnorm.set_num_threads(1)
    show(_masks(options.rounds))
    show(_recomputation(options.rounds))
