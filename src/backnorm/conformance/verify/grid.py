"""Cases at special values, options and shapes, where kernels often have another path.

Each value, option or shape is a row. A row of shapes has all element types; the layouts alternate,
so that each shape has both layouts and each type half of the combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from backnorm.conformance.battery import (
    Recipe,
    Variant,
    with_central_start,
    with_foreign_statistics,
)
from backnorm.conformance.data import LayerData, in_layout, realistic_data
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, is_16_bit, rounded, statistics_types

__all__ = ["grid"]

# Sizes (N, C, space) of the shapes. Together they have the ranks 2 to 6; one channel, and numbers
# of channels one below and one above 8, 16, 32, 64 and 1024; one pixel and one image; more than 256
# images; odd rows; odd numbers of elements per channel below and beyond 1024 and 65536; axes 1 and
# -1 of equal sizes; no element.
_SHAPES = (
    (4, 7),
    (257, 9),
    (1, 15),
    (9, 9, 5),
    (5, 1, 9),
    (257, 4, 3),
    (3, 1023, 2),
    (2, 1025, 3),
    (5, 3, 1, 1),
    (7, 20, 1, 1),
    (3, 16, 5, 5),
    (2, 24, 9),
    (3, 64, 7, 4),
    (1, 65, 6, 7),
    (7, 8, 8, 8),
    (3, 1, 33, 33),
    (3, 5, 37, 29),
    (2, 63, 16, 9),
    (1, 2, 257, 257),
    (2, 17, 3, 4, 5),
    (1, 33, 5, 5, 5),
    (2, 31, 2, 3, 2, 3),
    (3, 4, 2, 3, 2, 2),
    (0, 5, 4),
)
# The shape (N, C, space) of the cases with special values and options.
_SHAPE = (6, 5, 3, 4)
# A case of a backward pass for each pair of values of two options, and a few more.
_OPTIONS = (
    # gamma, training, foreign statistics, epsilon
    (True, True, False, 0.0),
    (True, True, True, 1.0),
    (True, False, False, 1.0),
    (True, False, True, 1e-12),
    (False, True, False, 1.0),
    (False, True, True, 1e-12),
    (False, False, False, 0.0),
    (False, False, True, 0.25),
    (False, True, False, 0.25),
    (True, True, False, 1e-12),
)
# The same of a forward pass, which has no other options than gamma and epsilon.
_FORWARD_OPTIONS = tuple(
    (scaled, True, False, epsilon) for scaled in (True, False) for epsilon in (0.0, 1e-12, 1.0)
)


def grid(*, forward: bool = False) -> Iterator[Recipe]:
    """Yield the recipes of a backward pass, or of a forward pass."""
    layouts = "NCX", "NXC"
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        widest = statistics_types(dtype)[-1]
        for k, shape in enumerate(_SHAPES):
            # float32 has both layouts, and each 16-bit type one of them.
            one = layouts[(k + (dtype == FLOAT16)) % 2]
            for layout in layouts if dtype == FLOAT32 else (one,):
                variant = Variant(dtype, widest, layout)
                name = f"grid-{'x'.join(map(str, shape))}"
                yield _recipe(name, variant, shape, with_central_start)
        for k, (name, make, settings) in enumerate(_values(dtype, forward=forward)):
            yield _recipe(name, Variant(dtype, widest, layouts[k % 2]), _SHAPE, make, **settings)
        for k, (scaled, training, is_foreign, epsilon) in enumerate(
            _FORWARD_OPTIONS if forward else _OPTIONS
        ):
            make = partial(
                with_foreign_statistics if is_foreign else realistic_data, epsilon=epsilon
            )
            words = "gamma" * scaled, "frozen" * (not training), "foreign" * is_foreign
            name = "-".join(filter(None, ("grid", *words, f"epsilon-{epsilon:g}")))
            types = statistics_types(dtype)
            variant = Variant(dtype, types[k % len(types)], layouts[k // 2 % 2])
            yield _recipe(name, variant, _SHAPE, make, scaled=scaled, training=training)


def _recipe(
    name: str, variant: Variant, shape: tuple[int, ...], *make: Any, **options: Any
) -> Recipe:
    return Recipe(name, variant, in_layout(shape, variant.data_format), *make, **options)


def _values(
    dtype: np.dtype, *, forward: bool
) -> Iterator[tuple[str, Callable[..., LayerData], dict[str, Any]]]:
    """Yield the names of special values, the functions that draw them, and settings of the case."""
    yield "zero-gamma", partial(_changed, change=_zero_gamma), {}
    yield "variances-of-all-sizes", _variances_of_all_sizes, {}
    yield "small-variance", partial(realistic_data, epsilon=1e-5, scale=2.0**-6), {}
    if forward:
        yield "nan-in-x", partial(_changed, change=_nan_in_x), {}
        if is_16_bit(dtype):
            yield "squares-beyond-float16", partial(realistic_data, scale=512.0), {}
        return
    yield "nan-in-dy", partial(_changed, change=_nan_in_dy), {}
    yield "infinities", partial(_changed, change=_infinities), {"training": False}
    yield "small-gradients", partial(realistic_data, gradient_scale=1e-6), {}
    if dtype != FLOAT16:
        yield "gradients-beyond-float16", partial(realistic_data, gradient_scale=1e7), {}
        yield "tiny-gradients", partial(realistic_data, gradient_scale=1e-12), {}


def _changed(
    *arguments: Any, change: Callable[[LayerData], dict[str, Any]], **options: Any
) -> LayerData:
    data = realistic_data(*arguments, **options)
    return replace(data, **change(data))


def _zero_gamma(data: LayerData) -> dict[str, Any]:
    gamma = data.gamma.copy()
    gamma[::2] = 0
    return {"gamma": gamma}


def _nan_in_x(data: LayerData) -> dict[str, Any]:
    return {"x": _with_one(data.x, data, 1, np.nan)}


def _nan_in_dy(data: LayerData) -> dict[str, Any]:
    return {"dy": _with_one(data.dy, data, 1, np.nan)}


def _infinities(data: LayerData) -> dict[str, Any]:
    """Return an infinite x in one channel and an infinite dy in another, whose dx is dy/2.

    Their sums are NaN for every way to add up, because dy is 0 where x is infinite, and because the
    channel with the infinite dy has a NaN, too. Without these, a compensated sum of infinite terms
    is NaN, but a plain one is infinite.
    """
    dy = _with_one(_with_one(data.dy, data, 2, 0.0), data, 3, np.inf)
    gamma = data.gamma.astype(float)
    # If dx were larger than dy, the dx of the largest number in place of infinity would overflow.
    gamma[3] = 0.5 * np.sqrt(float(data.variance[3]) + data.epsilon)
    return {
        "x": _with_one(data.x, data, 2, np.inf),
        "dy": _with_one(dy, data, 3, np.nan, place=0),
        "gamma": rounded(gamma, data.gamma.dtype),
    }


def _with_one(
    tensor: np.ndarray, data: LayerData, channel: int, value: float, place: int | None = None
) -> np.ndarray:
    """Return x or dy with this value in one element of a channel, by default the middle."""
    changed = tensor.copy()
    rows = np.moveaxis(changed, data.channel_axis, 0)
    rows[channel].flat[rows[channel].size // 2 if place is None else place] = value
    return changed


def _variances_of_all_sizes(shape: tuple[int, ...], dtype: np.dtype, **options: Any) -> LayerData:
    """Return data of which the rows have standard deviations from 1e-4 to 1e4, but not beyond the
    precision or the largest number of a 16-bit type.
    """
    data = realistic_data(shape, dtype, **options, epsilon=1e-12)
    largest = 2.0 if is_16_bit(dtype) else 4.0
    scales = 10.0 ** np.linspace(-largest, largest, data.mean.size)
    rows = rounded(data.axes.rows(data.x, float) * scales[:, None], data.x.dtype)
    mean, variance = (rounded(each, data.mean.dtype) for each in data.axes.statistics_of(rows))
    return replace(data, x=data.axes.tensor(rows), mean=mean, variance=variance)
