"""The operations on NumPy arrays with any channel axis.

Each function takes the operands of a call and its options. New arrays are aligned, so that
TensorFlow does not copy them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from backnorm import engines
from backnorm.allocation import aligned
from backnorm.arithmetics import Arithmetic, own_arithmetic
from backnorm.arrays import NumPy
from backnorm.dtypes import FLOAT64
from backnorm.engines import Place
from backnorm.errors import BacknormError
from backnorm.executable import operation
from backnorm.reproducible_sums import added, bin_rows, check_count
from backnorm.second_order import arrays

#: The operands of a call (None for an absent operand), or its results.
Arrays = Sequence[Any]


class Options(NamedTuple):
    """The arguments of a call that are not tensors.

    Attributes
    ----------
    epsilon : float
    axis : int
        Not negative if x's rank is known.
    arithmetic : {"float32", "float64"} or None
        The compute dtype of the call and its gradients, set when the call was made or traced.
        None: the default of the element type.
    training : bool
    reproducible : bool
        Whether sums have the same bits for every division, order and layout of the batch.
    """

    epsilon: float
    axis: int
    arithmetic: Arithmetic | None
    training: bool = True
    reproducible: bool = False

    def of_kernels(self, dtype: np.dtype) -> tuple[tuple[int], Arithmetic, bool]:
        """Return the kernels' options: channel axes, compute dtype, whether sums are reproducible.

        The compute dtype does not depend on the `with backnorm.arithmetic(...)` block that is
        active when this method runs.
        """
        return (self.axis,), self.arithmetic or own_arithmetic(dtype), self.reproducible


class _Aligned(NumPy):
    code = NumPy.code._replace(
        arrays="tensorflow",
        new={
            **NumPy.code.new,
            "data": "aligned(shape, dtype)",
            "channel": "empty(channels, statistics)",
        },
    )
    names: ClassVar[dict[str, Any]] = {**NumPy.names, "aligned": aligned}

    def place(self, x: np.ndarray | None) -> Place:
        engines.kernels("tensors of TensorFlow")
        return engines.place()


_ALIGNED = _Aligned()
_forward, _inference = operation("forward", _ALIGNED), operation("inference", _ALIGNED)
_backward = operation("backward", _ALIGNED)
_reduce_forward = operation("reduce_forward", _ALIGNED, exchanged=True)
_apply_forward = operation("apply_forward", _ALIGNED, exchanged=True)
_reduce = operation("reduce", _ALIGNED, exchanged=True)
_apply = operation("apply", _ALIGNED, exchanged=True)
_apply_backward = operation("apply_backward", _ALIGNED, exchanged=True)


def forward(operands: Arrays, options: Options) -> Arrays:
    """Return y, mean and variance from x, gamma and beta."""
    x, gamma, beta = operands
    axis, *sums = options.of_kernels(x.dtype)
    return _forward(x, None, gamma, beta, None, None, options.epsilon, axis, None, *sums)[:3]


def inference(operands: Arrays, options: Options) -> Arrays:
    """Return y from x, mean, variance, gamma and beta."""
    x, *channels = operands
    axis, arithmetic, _ = options.of_kernels(x.dtype)
    return _inference(x, None, *channels, options.epsilon, axis, None, arithmetic)


def backward(operands: Arrays, options: Options) -> Arrays:
    """Return dx, dgamma and dbeta from x, dy, mean, variance and gamma."""
    x, dy, *channels = operands
    axis, *sums = options.of_kernels(x.dtype)
    values = options.epsilon, axis, options.training, False, *sums
    return _backward(x, dy, None, *channels, *values)[:3]


def double_backward(operands: Arrays, options: Options) -> Arrays:
    """Return the second-order gradients with respect to x, dy and gamma.

    They are the gradients of <ddx, dx> + <ddgamma, dgamma> + <ddbeta, dbeta>, where <a, b> is the
    sum of the products a * b of all elements. The operands are those of `backward`, followed by
    ddx, ddgamma and ddbeta.
    """
    x, dy, *channels, ddx, ddgamma, ddbeta = operands
    return arrays.double_backward(
        (x, dy, ddx),
        (*channels, ddgamma, ddbeta),
        epsilon=options.epsilon,
        data_format=(options.axis,),
        training=options.training,
    )


def moments(operands: Arrays, options: Options) -> Arrays:
    """Return the mean and the biased variance of every channel of x, in float64; both are 0 if x is
    empty.

    With reproducible sums, return the bins of x, as in `ReproducibleMoments`.
    """
    (x,) = operands
    return _sums(_reduce_forward(x, *options.of_kernels(x.dtype)), options)


def apply_moments(operands: Arrays, options: Options) -> Arrays:
    """Return y of a part, and mean and variance of the whole batch, each rounded once.

    The operands are x, gamma, beta, and the float64 mean and variance of the whole batch. With
    reproducible sums, one array replaces mean and variance. This array has a row for each part of
    the batch. The row has the bins of the part, and the number of elements that the part has in
    each channel.
    """
    x, gamma, beta, *whole = operands
    axis, *sums = options.of_kernels(x.dtype)
    numbers = _whole(whole[0], x) if options.reproducible else {"sums": tuple(whole)}
    return _apply_forward(x, None, gamma, beta, options.epsilon, axis, None, *sums, **numbers)[:3]


def sums(operands: Arrays, options: Options) -> Arrays:
    """Return the sums of dy and of dy * (x - mean) in float64; the operands are x, dy and mean.

    If the sums are reproducible, return the bins of both sums instead, as `ReproducibleSums` has
    them.
    """
    x, dy, mean = operands
    return _sums(_reduce(x, dy, None, mean, *options.of_kernels(x.dtype)), options)


def apply_sums(operands: Arrays, options: Options) -> Arrays:
    """Return dx of one part of a batch.

    The operands are those of `backward`, followed by the sums of the whole batch and by the number
    of elements per channel of the whole batch. With reproducible sums, one array replaces the two
    sums and the number of elements. This array has one row for each part of the batch, as in
    `apply_moments`. With reproducible sums, the results also include dgamma and dbeta of the whole
    batch, each rounded once.
    """
    x, dy, mean, variance, gamma, *whole = operands
    axis, *sums = options.of_kernels(x.dtype)
    channels, values = (mean, variance, gamma), (options.epsilon, axis, True)
    if options.reproducible:
        return _apply_backward(x, dy, *channels, *values, *sums, **_whole(whole[0], x))
    sum_dy, sum_dy_xmu, count = whole
    numbers = {"sums": (sum_dy, sum_dy_xmu), "count": int(count)}
    return _apply(x, dy, None, *channels, *values, False, sums[0], **numbers)[:1]


def refuse(message: str, count: int, operands: Arrays, options: Options) -> Arrays:
    """Return zeros like the first `count` operands; raise if one of the others is not zero."""
    if any(np.any(each) for each in operands[count:]):
        raise BacknormError(message)
    return [np.zeros_like(each) for each in operands[:count] if each is not None]


def _sums(results: Any, options: Options) -> Arrays:
    """Return the sums or moments that are in `results`.

    `results` was returned by `_reduce` or `_reduce_forward`. With reproducible sums, the sums are
    one array of bins; otherwise they are several float64 arrays.
    """
    return results[:1] if options.reproducible else tuple(results[0])


def _whole(parts: np.ndarray, x: np.ndarray) -> dict[str, Any]:
    """Return the sums of all parts and the number of elements, as keyword arguments of
    `_apply_forward` and `_apply_backward`.

    The sums are rounded in these two functions and not by NumPy, because NumPy would flush
    subnormal numbers to 0 on TensorFlow's threads.
    """
    bins = parts[:, :-1].reshape(len(parts), bin_rows(x.itemsize), -1)
    whole = functools.reduce(functools.partial(added, xp=np), bins)
    count = int(parts[:, -1].sum())
    check_count("x", count)
    # The sums of an empty batch are zero, so their divisor may be any number except 0.
    return {"sums": whole.view(FLOAT64), "count": max(count, 1)}
