"""Digests of what every operation returns, for problems whose inputs are the same everywhere.

Inputs and statistics are integers times powers of two, from raw random bits, so that neither a
library's random distributions nor its elementary functions show in them. Each problem is computed
for several made-up machines, that is with several schedules and numbers of threads, and in each
arithmetic that its elements may have.

``python -m tests.engine.bits.compute`` prints the digests as JSON; ``expected.json`` beside this
file holds those of the first engine that had the operation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import backnorm
from backnorm import engines
from backnorm.arithmetics import own_arithmetic
from backnorm.conformance.battery import cases
from backnorm.dtypes import ELEMENT_TYPES, statistics_types
from backnorm.layout import memory_order, order_mark
from backnorm.machine import Machine
from backnorm_kernels import plan
from tests.support.relu_battery import relu_cases

#: Problems of each element type and layout.
PROBLEMS = 25

_LAYOUTS = ("NCX", "NXC", "strided")
_MIB = 1 << 20

# Caches that hold everything, and none that hold anything; one thread and several.
_MACHINES = (
    Machine(1, 1024 * _MIB, 1024 * _MIB, "one thread, large caches"),
    Machine(1, 0, 0, "one thread, no caches"),
    Machine(2, 1024 * _MIB, 1024 * _MIB, "two threads, large caches"),
    Machine(3, 0, 0, "three threads, no caches"),
)


@dataclass(frozen=True, eq=False)
class Arrays:
    """The inputs of every operation."""

    x: np.ndarray
    dy: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    gamma: np.ndarray | None
    beta: np.ndarray | None
    mask: np.ndarray
    epsilon: np.float64
    data_format: str


class Bits:
    """Integers from raw random bits, whose stream NumPy keeps for ever."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.PCG64(seed)

    def below(self, limit: int, size: int | None = None) -> Any:
        """Return an integer, or an array of them, of 0 .. limit-1."""
        raw = self._generator.random_raw(1 if size is None else size)
        drawn = (raw >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)
        return int(drawn[0]) if size is None else drawn.astype(np.int64)

    def between(self, low: int, high: int, size: int | None = None) -> Any:
        """Return an integer, or an array of them, of low .. high."""
        return low + self.below(high - low + 1, size)


def _shape(bits: Bits) -> tuple[int, int, tuple[int, ...]]:
    """Return N, C and the space: runs of all lengths, few channels and many, now and then empty."""
    space = (
        (),
        (bits.between(1, 15),),
        (bits.between(16, 80),),
        (bits.between(2, 9), bits.between(2, 9)),
        (bits.between(500, 5000),),
    )[bits.below(5)]
    channels = (bits.between(1, 4), bits.between(5, 40), bits.between(41, 300))[bits.below(3)]
    most = max(1, 60_000 // (channels * max(1, math.prod(space))))
    outer = bits.between(1, min(most, 400)) if bits.below(25) else 0
    return outer, channels, space


def _problem(dtype: np.dtype, layout: str, seed: int) -> Arrays:
    bits = Bits(seed)
    outer, channels, space = _shape(bits)
    statistics = statistics_types(dtype)[bits.below(len(statistics_types(dtype)))]
    small = dtype.itemsize == 2 or statistics.itemsize == 2
    # Now and then channels for which float32, or half precision, has not the range.
    reach = (0, 0, 0, 8 if dtype.name == "float16" else 60)[bits.below(4)]
    exponent = bits.between(-reach, reach, channels)
    exponent_dy = bits.between(-reach, reach, channels)
    ratio = (0, 1, 1, 20)[bits.below(4)]

    mean = bits.between(-ratio * 64, ratio * 64, channels)
    variance = bits.between(1, 255, channels)
    count = outer * math.prod(space)
    deviation = bits.between(-127, 127, channels * count).reshape(channels, count)
    gradient = bits.between(-127, 127, channels * count).reshape(channels, count)
    zero = np.flatnonzero(bits.below(12, channels) == 0)
    gradient[zero] = 0
    x = np.ldexp((deviation + mean[:, None]).astype(float), (exponent - 6)[:, None])
    dy = np.ldexp(gradient.astype(float), (exponent_dy - 4)[:, None])

    def tensor(rows: np.ndarray) -> np.ndarray:
        array = rows.reshape(channels, outer, *space).astype(dtype)
        if layout == "NXC":
            return np.ascontiguousarray(np.moveaxis(array, 0, -1))
        array = np.ascontiguousarray(np.moveaxis(array, 0, 1))
        # Dense in another order than that of the axes.
        return np.asfortranarray(array) if layout == "strided" else array

    limit = 3 if small else reach
    power = np.clip(exponent, -limit, limit)
    return Arrays(
        x=tensor(x),
        dy=tensor(dy),
        mean=np.ldexp(mean.astype(float), power - 6).astype(statistics),
        variance=np.ldexp(variance.astype(float), 2 * power - 7).astype(statistics),
        gamma=(bits.between(-63, 63, channels) / 32).astype(statistics) if bits.below(4) else None,
        beta=(bits.between(-63, 63, channels) / 32).astype(statistics) if bits.below(4) else None,
        mask=bits.below(256, -(-x.size // 8) + 8).astype(np.uint8),
        epsilon=np.float64(2.0 ** -bits.between(4, 17)),
        data_format="NXC" if layout == "NXC" else "NCX",
    )


def _few_digits(array: np.ndarray) -> np.ndarray:
    """Return an array with its elements rounded to eight binary digits."""
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 256), exponent - 8).astype(array.dtype)


def _of_batteries() -> Iterator[tuple[str, Arrays]]:
    """Yield the cases of the batteries, their numbers shortened."""
    for case in (*cases(), *relu_cases()):
        data = case.data
        per_channel = {
            name: _few_digits(getattr(data, name)) for name in ("mean", "variance", "gamma", "beta")
        }
        arrays = Arrays(
            x=_few_digits(data.x),
            dy=_few_digits(data.dy),
            **per_channel,
            mask=np.resize(np.uint8([0x5A, 0xFF, 0x03, 0xC4]), -(-data.x.size // 8) + 8),
            epsilon=np.float64(2.0**-16 if data.epsilon < 0.01 else data.epsilon),
            data_format=data.data_format,
        )
        yield f"{data.x.dtype} battery", arrays


def problems() -> Iterator[tuple[str, Arrays]]:
    """Yield the name of a group and a problem of it."""
    yield from _of_batteries()
    seed = 0
    for dtype in ELEMENT_TYPES:
        for layout in _LAYOUTS:
            for _ in range(PROBLEMS):
                seed += 1
                yield f"{dtype} {layout}", _problem(dtype, layout, seed)


def results(arguments: Arrays) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name of every operation and what it returns."""
    # Not a float of Python: such a call is planned anew every time, and not looked up.
    settings: dict[str, Any] = {"epsilon": arguments.epsilon, "data_format": arguments.data_format}
    inputs = arguments.x, arguments.dy, arguments.mean, arguments.variance, arguments.gamma
    known = arguments.mean, arguments.variance, arguments.gamma, arguments.beta
    yield "backward", backnorm.batch_norm_backward(*inputs, **settings)
    yield "frozen", backnorm.batch_norm_backward(*inputs, training=False, **settings)
    sums = backnorm.reduce(*inputs[:3], data_format=arguments.data_format)
    yield "reduce", (sums.sum_dy, sums.sum_dy_xmu)
    yield "apply", (backnorm.apply(*inputs, sums, **settings),)
    # Without the parameters the results are of x's own statistics type.
    yield (
        "forward",
        backnorm.batch_norm_forward(arguments.x, arguments.gamma, arguments.beta, **settings),
    )
    yield "inference", (backnorm.batch_norm_inference(arguments.x, *known, **settings),)
    mark = order_mark(arguments.x.shape, memory_order(arguments.x))
    mask = np.concatenate((arguments.mask, np.frombuffer(mark, np.uint8)))
    for has_residual in (False, True):
        added: dict[str, Any] = {"residual": arguments.dy if has_residual else None, **settings}
        name = " + residual" if has_residual else ""
        forward = backnorm.batch_norm_forward(
            arguments.x, arguments.gamma, arguments.beta, **added, activation="relu"
        )
        used = -(-arguments.x.size // 8)
        yield f"relu forward{name}", (*forward[:3], forward.mask[:used])
        yield (
            f"relu inference{name}",
            (backnorm.batch_norm_inference(arguments.x, *known, **added, activation="relu"),),
        )
        for training in (True, False):
            gradients = backnorm.batch_norm_backward(
                *inputs, mask=mask, residual=has_residual, training=training, **settings
            )
            kind = "backward" if training else "frozen"
            yield f"relu {kind}{name}", tuple(g for g in gradients if g is not None)


def _arithmetics(dtype: np.dtype) -> Iterator[tuple[str, contextlib.AbstractContextManager[Any]]]:
    """Yield the name, and the block, of the usual arithmetic of elements and of the other."""
    yield "", contextlib.nullcontext()
    if dtype != np.float64:
        other = "float32" if own_arithmetic(dtype) == "float64" else "float64"
        yield f" in {other}", backnorm.arithmetic(other)


def add(digest: Any, array: np.ndarray | None) -> None:
    """Add an array to a digest: type, shape, and elements in the order of axes; all NaN alike."""
    if array is None:
        digest.update(b"none")
        return
    digest.update(f"{array.dtype} {array.shape}".encode())
    if array.dtype != np.uint8:
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    digest.update(np.ascontiguousarray(array).tobytes())


def digests() -> dict[str, Any]:
    """Return the digest of all inputs, and those of the results by operation and group."""
    inputs = hashlib.sha256()
    found: dict[str, dict[str, Any]] = {}
    plan._SERIAL = 0
    with np.errstate(all="ignore"):
        for group, arguments in problems():
            for array in (
                arguments.x, arguments.dy, arguments.mean, arguments.variance, arguments.gamma,
                arguments.beta, arguments.mask,
            ):  # fmt: skip
                add(inputs, array)
            for made in _MACHINES:
                engines._machine = lambda threads, made=made: made
                for settings, arithmetic in _arithmetics(arguments.x.dtype):
                    with arithmetic:
                        computed = [*results(arguments)]
                    for operation, arrays in computed:
                        digest = found.setdefault(f"{operation}{settings}, {group}", {}).setdefault(
                            made.name, hashlib.sha256()
                        )
                        for array in arrays:
                            add(digest, array)
    return {
        "inputs": inputs.hexdigest(),
        "results": {
            name: " or ".join(sorted({digest.hexdigest()[:32] for digest in of.values()}))
            for name, of in sorted(found.items())
        },
    }


if __name__ == "__main__":
    json.dump(digests(), sys.stdout, indent=1)
    print()
