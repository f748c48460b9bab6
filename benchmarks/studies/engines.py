"""Time the gradient by both engines on NumPy arrays, and by PyTorch's operator: float32.

The results are judged first. The arrays are the same; the kernels and PyTorch use the given number
of threads, the NumPy engine uses one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch

import backnorm
from backnorm.conformance.judge import check_backward
from backnorm.engines import Name
from backnorm.results import Gradients
from benchmarks.studies import arguments, show
from benchmarks.turns import Settings, in_turns, median

_SHAPES = ((8, 16, 8, 8), (32, 16, 8, 8), (8, 64, 56, 56), (50, 64, 112, 112), (4096, 512))
_EPSILON = 1e-5
_SETTINGS = Settings(rounds=6, samples=3, warm=0.005, least=0.001, limit=8.0)


def _calls(shape: tuple[int, ...], layout: str) -> dict[str, Callable[[], object]]:
    """Return the calls by name, all with memory for their results."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape, np.float32) for _ in range(2))
    tensors = [torch.from_numpy(each) for each in (x, dy)]
    if layout == "NXC":
        x, dy = (np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in (x, dy))
        if x.ndim == 4:
            tensors = [t.contiguous(memory_format=torch.channels_last) for t in tensors]
    axes = tuple(axis for axis in range(x.ndim) if axis != (1 if layout == "NCX" else x.ndim - 1))
    mean, variance = x.mean(axes), x.var(axes)
    gamma, out = np.ones_like(mean), np.empty_like(x)
    options: dict[str, Any] = {"epsilon": _EPSILON, "data_format": layout}

    def ours(engine: Name) -> Gradients:
        with backnorm.engine(engine):
            found: Gradients = backnorm.batch_norm_backward(
                x, dy, mean, variance, gamma, out=out, **options
            )
            return found

    for engine in get_args(Name):
        gradients = ours(engine)
        verdicts = check_backward(x, dy, mean, variance, gamma, gradients, **options)
        assert all(verdict.passed for verdict in verdicts.values()), engine
    inverse = 1 / np.sqrt(variance + np.float32(_EPSILON))
    scale, center, deviation = map(torch.from_numpy, (gamma, mean, inverse))
    operands = (*tensors[::-1], scale, None, None, center, deviation)
    theirs = torch.ops.aten.native_batch_norm_backward
    return {
        "numpy": partial(ours, "numpy"),
        "kernels": partial(ours, "kernels"),
        "PyTorch": lambda: theirs(*operands, True, _EPSILON, [True, True, True]),
    }


def _rows() -> Iterator[Sequence[object]]:
    """Yield milliseconds of the NumPy engine, and its ratios to the others, for each cell."""
    yield "x", "layout", "engine numpy", "over engine kernels", "over PyTorch"
    for shape, layout in itertools.product(_SHAPES, ("NCX", "NXC")):
        samples = in_turns(_calls(shape, layout), _SETTINGS)
        own, *others = (median(each) for each in samples.values())
        yield shape, layout, f"{1e3 * own:.3g} ms", *(f"{own / each:.1f}" for each in others)


if __name__ == "__main__":
    threads = arguments(__doc__, threads=2).threads
    torch.set_num_threads(threads)
    backnorm.set_num_threads(threads)
    show(_rows())
