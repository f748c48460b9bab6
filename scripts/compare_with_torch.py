"""Time `batch_norm_backward` beside PyTorch's own operator: same arrays and threads, in turns.

``python scripts/compare_with_torch.py [--rounds N] [--threads N] [--form out|allocate]``

PyTorch runs ``native_batch_norm_backward`` (channels_last memory for NXC). Results are judged
first, on two channels, against exact arithmetic. GB/s count five passes over x: x and dy read
twice, dx written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import backnorm
from backnorm.conformance.judge import check_backward
from backnorm.execute import allocate

_SHAPES = [
    (50, 64, 112, 112),
    (50, 256, 56, 56),
    (50, 128, 28, 28),
    (50, 1024, 14, 14),
    (50, 512, 7, 7),
    (50, 2048, 7, 7),
]
_EPSILON = 1e-5

# Seconds of calls before those that count.
_WARM = 0.02


def main() -> None:
    """Print a line for every shape and layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=backnorm.get_num_threads())
    parser.add_argument("--form", choices=("out", "allocate"), default="out")
    options = parser.parse_args()
    backnorm.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(f"backnorm {backnorm.__version__}, torch {torch.__version__}, {options.threads} threads")
    for shape in _SHAPES:
        for data_format in ("NCX", "NXC"):
            _compare(shape, data_format, options.rounds, options.form)


def _compare(shape: tuple[int, ...], data_format: str, rounds: int, form: str) -> None:
    rng = np.random.default_rng(0)
    channels = shape[1]
    if data_format == "NXC":
        shape = (shape[0], *shape[2:], channels)
    x = rng.standard_normal(shape, dtype=np.float32) + 1
    dy = rng.standard_normal(shape, dtype=np.float32) * x
    axes = tuple(i for i in range(4) if i != (1 if data_format == "NCX" else 3))
    mean, variance = x.mean(axes), x.var(axes)
    gamma = rng.standard_normal(channels, dtype=np.float32)
    arguments = (x, dy, mean, variance, gamma)
    out = allocate(shape, x.dtype) if form == "out" else None

    def ours() -> Any:
        return backnorm.batch_norm_backward(
            *arguments, epsilon=_EPSILON, data_format=data_format, out=out
        )

    _judge(arguments, ours(), data_format)
    times = _interleaved({"ours": ours, "torch": _torch(arguments, data_format, form)}, rounds)
    a, b = np.median(times["ours"]), np.median(times["torch"])
    traffic = 5 * x.nbytes / 1e9
    print(
        f"{data_format} {'x'.join(map(str, shape)):16} ours {a * 1e3:7.2f} ms"
        f" {traffic / a:5.1f} GB/s   torch {b * 1e3:7.2f} ms {traffic / b:5.1f} GB/s"
        f"   ratio {a / b:.2f}",
        flush=True,
    )


def _judge(arguments: tuple[np.ndarray, ...], gradients: Any, data_format: str) -> None:
    axis = 1 if data_format == "NCX" else 3
    two = [np.ascontiguousarray(a.take([0, 1], axis if a.ndim == 4 else 0)) for a in arguments]
    part = backnorm.Gradients(
        gradients.dx.take([0, 1], axis), gradients.dgamma[:2], gradients.dbeta[:2]
    )
    for name, verdict in check_backward(
        *two, part, epsilon=_EPSILON, data_format=data_format
    ).items():
        assert verdict.passed, f"{name}: {verdict.detail}"


def _torch(arguments: tuple[np.ndarray, ...], data_format: str, form: str) -> Callable[[], Any]:
    x, dy, mean, variance, gamma = (torch.from_numpy(a) for a in arguments)
    if data_format == "NXC":
        x, dy = x.permute(0, 3, 1, 2), dy.permute(0, 3, 1, 2)
    saved = (gamma, None, None, mean, 1 / torch.sqrt(variance + _EPSILON), True, _EPSILON)
    if form == "allocate":
        operator = torch.ops.aten.native_batch_norm_backward
        return lambda: operator(dy, x, *saved, [True] * 3)
    outs = {"out0": torch.empty_like(x), "out1": gamma.clone(), "out2": gamma.clone()}
    operator = torch.ops.aten.native_batch_norm_backward.out
    return lambda: operator(dy, x, *saved, [True] * 3, **outs)


def _interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time the calls in turns.

    A turn begins with calls that do not count: OpenMP's threads spin for some milliseconds after
    their last region and would take a processor from whoever comes next.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            turn = time.perf_counter()
            while time.perf_counter() - turn < _WARM:
                call()
            for _ in range(3):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
