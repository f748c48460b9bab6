"""What reproducible sums cost, beside the plain ones.

``python -m benchmarks.reproducible``, by hand: both passes and both reductions of ResNet-50's
layers at batch 50 and of others, in turns on the same arrays; medians, in ns an element. A table in
Markdown goes to standard output.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import backnorm

__all__ = ["main"]

# Samples, channels, space. The last two lie in caches.
_SHAPES = (
    (32, 64, 112, 112), (50, 256, 56, 56), (50, 64, 56, 56), (50, 512, 28, 28), (50, 1024, 14, 14),
    (128, 2048, 7, 7), (32, 128, 28, 28), (8, 64, 32, 32),
)  # fmt: skip
_TYPES = {
    "float32": np.float32, "float64": np.float64,
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip
_ROUNDS = 9


def _calls(shape: tuple[int, ...], data_format: str, dtype: Any) -> dict[str, Callable[..., Any]]:
    """Return the passes of a layer as functions that take `reproducible`."""
    rng = np.random.default_rng(0)
    place = shape if data_format == "NCX" else (shape[0], *shape[2:], shape[1])
    x, dy = (rng.standard_normal(place, np.float32).astype(dtype) for _ in range(2))
    out = np.empty_like(x)
    wide = np.float64 if x.itemsize == 8 else np.float32
    mean, variance = np.zeros(shape[1], wide), np.ones(shape[1], wide)
    where: dict[str, Any] = {"data_format": data_format}
    how = where | {"epsilon": 1e-5, "out": out}
    return {
        "backward": lambda **more: backnorm.batch_norm_backward(
            x, dy, mean, variance, **how, **more
        ),
        "forward": lambda **more: backnorm.batch_norm_forward(x, **how, **more),
        "reduce": lambda **more: backnorm.reduce(x, dy, mean, **where, **more),
        "reduce_forward": lambda **more: backnorm.reduce_forward(x, **where, **more),
    }


def _medians(call: Callable[..., Any]) -> tuple[float, float]:
    """Return seconds without and with reproducible sums."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for reproducible in found:
        call(reproducible=reproducible)
    for _ in range(_ROUNDS):
        for reproducible, times in found.items():
            begun = time.perf_counter()
            call(reproducible=reproducible)
            times.append(time.perf_counter() - begun)
    return statistics.median(found[False]), statistics.median(found[True])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What reproducible sums cost.")
    parser.add_argument("--dtype", choices=_TYPES, default="float32")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads:
        backnorm.set_num_threads(given.threads)
    print("| shape | layout | backward | forward | reduce | reduce_forward |")
    print("|---|---|---|---|---|---|")
    for shape in _SHAPES:
        for data_format in ("NCX", "NXC"):
            cells = []
            for call in _calls(shape, data_format, _TYPES[given.dtype]).values():
                plain, reproducible = (1e9 * each / np.prod(shape) for each in _medians(call))
                cells.append(f"{plain:.2f} → {reproducible:.2f} ({reproducible / plain:.2f})")
            print(f"| {shape} | {data_format} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
