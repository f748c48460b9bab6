"""Second-order gradients, block by block in float64, for arrays that can be written to.

Besides the memory of the results, the functions need memory for only a few blocks (parts of the
arrays). Apart from Python's operators, the code uses only the array API standard, which NumPy
implements and array-api-compat provides for PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from backnorm.second_order.formulas import (
    ABSENT,
    Array,
    Channels,
    Factors,
    Reduce,
    by_dy,
    by_x,
    factors,
)

_Cell = tuple[slice, slice, slice]


def double_backward(
    elements: Sequence[Array | None],
    channels: Sequence[Array | None],
    *,
    epsilon: float,
    training: bool,
    reduce: Reduce,
    block: int,
    results: Sequence[Array],
) -> Array:
    """Write the gradients of x and dy, and return the gradient of gamma.

    Parameters
    ----------
    elements : arrays, shape (outer, channels, inner)
        x, dy and ddx; ddx may be None.
    channels : arrays, shape (channels,)
        mean, variance, gamma, ddgamma and ddbeta, of which the last three may be None.
    epsilon : float
    training : bool
    reduce : callable
        Computes sums: takes two arrays like x and a float64 pivot of shape (channels, 1), and
        returns two float64 arrays of that shape.
    block : int
        Elements in a block.
    results : arrays
        The arrays for the gradients of x and dy.

    Returns
    -------
    array, shape (channels,)
        The gradient of gamma, float64.
    """
    x, dy, ddx = (ABSENT if each is None else each for each in elements)
    mean, variance, gamma, ddgamma, ddbeta = map(_column, channels)
    xp = _namespace(x)
    s = 1.0 / xp.sqrt(variance + epsilon)
    values = Channels(mean, s, 1.0 if gamma is ABSENT else gamma, ddgamma, ddbeta)
    share = 1.0 / max(x.shape[0] * x.shape[2], 1) if training else ABSENT
    found = factors(reduce, x, dy, ddx, values, share=share)
    for cell in _cells(x.shape, block):
        part = cell[1]
        k = Factors(*(each[part] for each in found))
        h = k.s * (_wide(x[cell]) - mean[part])
        d, e = _wide(dy[cell]) - k.mean_dy, _wide(ddx[cell]) - k.mean_ddx
        for result, value in zip(results, (by_x(k, h, d, e), by_dy(k, h, e)), strict=True):
            result[cell] = 0.0 if value is ABSENT else value
    return (xp.zeros_like(s) if found.gamma is ABSENT else found.gamma)[:, 0]


def sums(left: Array, right: Array, pivot: Array, block: int) -> tuple[Array, Array]:
    """Return sum(right) and sum(right * (left - pivot)) of each channel, shape (channels, 1)."""
    xp = _namespace(right)
    shape = (right.shape[1], 1)
    total = xp.zeros((2, *shape), dtype=xp.float64, device=right.device)
    for cell in _cells(right.shape, block):
        part = cell[1]
        value = _wide(right[cell])
        total[0, part, 0] += xp.sum(value, axis=(0, 2))
        total[1, part, 0] += xp.sum(value * (_wide(left[cell]) - pivot[part]), axis=(0, 2))
    return total[0], total[1]


def _namespace(array: Array) -> Any:
    """Return the functions of the array API for an array."""
    if hasattr(array, "__array_namespace__"):
        # The array's own method is preferred to array-api-compat. For a NumPy array,
        # array-api-compat would first import a wrapper of NumPy, which takes 0.2 seconds.
        return array.__array_namespace__()
    from array_api_compat import array_namespace

    return array_namespace(array)


def _wide(array: Array) -> Array:
    """Return elements in float64; ABSENT stays ABSENT."""
    if array is ABSENT:
        return ABSENT
    xp = _namespace(array)
    return xp.astype(array, xp.float64, copy=False)


def _column(array: Array | None) -> Array:
    """Return a per-channel array as a column of float64; ABSENT stays ABSENT."""
    return ABSENT if array is None else _wide(array)[:, None]


def _cells(extents: tuple[int, int, int], block: int) -> Iterator[_Cell]:
    """Yield blocks that together cover an array."""
    inner_step = max(1, min(extents[2], block))
    channel_step = max(1, min(extents[1], block // inner_step))
    outer_step = max(1, block // (inner_step * channel_step))
    steps = outer_step, channel_step, inner_step
    ranges = [range(0, size, step) for size, step in zip(extents, steps, strict=True)]
    for starts in itertools.product(*ranges):
        outer, channel, inner = (slice(k, k + n) for k, n in zip(starts, steps, strict=True))
        yield outer, channel, inner
