"""A layer alone: ``python -m benchmarks.models.layer [--threads N]``, by hand.

PyTorch's `BatchNorm2d` and ours in training, called as a module: forward, backward, and both. All
take turns. A table in Markdown, that of docs/performance.md, goes to standard output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import backnorm
import backnorm.torch
from benchmarks.turns import HOST, Settings, summary, take_turns

__all__ = ["LAYERS", "SHAPES", "measured"]

#: The smallest layer that anyone times, and one that fits in a core's cache with its gradients.
SHAPES = ((8, 16, 8, 8), (32, 64, 14, 14))

#: Those that are compared; the last has elements computed in float32, as PyTorch's.
LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "torch": torch.nn.BatchNorm2d,
    "backnorm": backnorm.torch.BatchNorm2d,
    "backnorm-float32": lambda channels: backnorm.torch.BatchNorm2d(channels, arithmetic="float32"),
}

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_PASSES = ("forward", "backward", "both")

# Turns are short: the machine is shared.
_SETTINGS = Settings(rounds=30, samples=5, warm=0.002, least=0.002, limit=10.0)

#: By shape, layout, pass and whose the layer is: seconds of a call.
Found = dict[tuple[tuple[int, ...], str, str, str], float]


def measured(shapes: tuple[tuple[int, ...], ...] = SHAPES, settings: Settings = _SETTINGS) -> Found:
    """Return the median of every layer's calls in every cell."""
    found: Found = {}
    for shape in shapes:
        for layout, form in _FORMATS.items():
            rng = np.random.default_rng(0)
            drawn = (torch.tensor(rng.standard_normal(shape, np.float32)) for _ in range(2))
            x, dy = (each.contiguous(memory_format=form) for each in drawn)
            calls = {
                (name, whole): call
                for name, make in LAYERS.items()
                for whole, call in _calls(make(shape[1]), x.clone().requires_grad_(), dy).items()
            }
            for whole in _PASSES:
                chosen: dict[str, Any] = {name: calls[name, whole] for name in LAYERS}
                estimates = dict.fromkeys(chosen, 0.0)
                samples = take_turns(chosen, settings, lambda _: None, estimates, HOST)
                for name, each in samples.items():
                    found[shape, layout, whole, name] = summary(each).median
    return found


def _calls(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed, by the pass."""
    inputs = [x, *layer.parameters()]
    y = layer(x)

    def backward() -> object:
        return torch.autograd.grad(y, inputs, dy, retain_graph=True)

    def both() -> object:
        return torch.autograd.grad(layer(x), inputs, dy)

    return {"forward": lambda: layer(x), "backward": backward, "both": both}


def main() -> None:
    """Measure all, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    backnorm.set_num_threads(threads)
    found = measured()
    print(f"| x | layout | pass | {' | '.join(LAYERS)} | {' | '.join(list(LAYERS)[1:])} |")
    print("|---" * (3 + 2 * len(LAYERS) - 1) + "|")
    for shape, layout, whole in dict.fromkeys(key[:3] for key in found):
        times = [found[shape, layout, whole, name] for name in LAYERS]
        texts = [f"{1e6 * each:.1f}" for each in times]
        texts += [f"{each / times[0]:.2f}" for each in times[1:]]
        print(f"| {shape} | {layout} | {whole} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
