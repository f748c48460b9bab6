"""Time a single layer, PyTorch's `BatchNorm2d` or ours: forward, backward, and both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import backnorm
import backnorm.torch
from benchmarks.studies import arguments, show
from benchmarks.turns import Settings, in_turns, median

# A small layer, in which the cost of the call itself shows, and one with 1.6 MB of x.
_SHAPES = ((8, 16, 8, 8), (32, 64, 14, 14))
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "torch": torch.nn.BatchNorm2d,
    "backnorm": backnorm.torch.BatchNorm2d,
    "backnorm-float32": lambda channels: backnorm.torch.BatchNorm2d(channels, arithmetic="float32"),
}
_SETTINGS = Settings(rounds=30, samples=5, warm=0.002, least=0.002, limit=10.0)


def _calls(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls of a layer by pass."""
    inputs = [x, *layer.parameters()]
    y = layer(x)
    return {
        "forward": lambda: layer(x),
        "backward": lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True),
        "both": lambda: torch.autograd.grad(layer(x), inputs, dy),
    }


def _rows() -> Iterator[Sequence[object]]:
    """Yield a row for each shape, layout and pass: µs, and ratios to PyTorch."""
    yield "x", "layout", "pass", *_LAYERS
    for shape, (layout, form) in itertools.product(_SHAPES, _FORMATS.items()):
        x, dy = (torch.randn(shape).contiguous(memory_format=form) for _ in range(2))
        calls = {
            name: _calls(make(shape[1]), x.clone().requires_grad_(), dy)
            for name, make in _LAYERS.items()
        }
        for part in ("forward", "backward", "both"):
            samples = in_turns({name: each[part] for name, each in calls.items()}, _SETTINGS)
            own, *ours = (1e6 * median(each) for each in samples.values())
            texts = (f"{each:.1f} ({each / own:.2f})" for each in ours)
            yield shape, layout, part, f"{own:.1f}", *texts


if __name__ == "__main__":
    threads = arguments(__doc__, threads=1).threads
    torch.set_num_threads(threads)
    backnorm.set_num_threads(threads)
    show(_rows())
