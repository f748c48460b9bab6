"""What is asked for: the metadata of one call, validated once.

All shape, type and epsilon checks of the canonical operator live here. The functions take
arrays but read only their ``shape`` and ``dtype``; the resulting :class:`Problem` is frozen and
hashable, and everything after it (plan, kernels) trusts it.

A dialect passes ``words``, its own names for the canonical ones (``{"x": "src", ...}``), and
the errors speak them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal, NamedTuple

import numpy as np

from backnorm.dtypes import ELEMENT_TYPES, FLOAT32, element_type, is_16_bit, statistics_types
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "DATA_FORMATS",
    "Metadata",
    "Operation",
    "Problem",
    "Words",
    "apply_problem",
    "as_array",
    "as_optional_array",
    "backward_problem",
    "channel_axis_of",
    "check_flag",
    "check_like",
    "check_mask",
    "check_mask_like",
    "forward_problem",
    "inference_problem",
    "reduce_problem",
    "variance_error",
    "with_relu",
]

Operation = Literal["backward", "reduce", "apply", "forward", "inference"]
Words = Mapping[str, str]

DATA_FORMATS = ("NCX", "NXC")
_CANONICAL: Words = {}
_TYPE_NAMES = ", ".join(str(t) for t in ELEMENT_TYPES)


class Metadata(NamedTuple):
    """Shape and type of an array that is not there: all that the functions here look at."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Problem:
    """One batch-normalisation problem: metadata only.

    Attributes
    ----------
    operation : {"backward", "reduce", "apply", "forward", "inference"}
    shape : tuple of int
        Shape of x (and dy, dx, y).
    channel_axis : int
        Non-negative position of the channel axis in `shape`.
    dtype : numpy.dtype
        Element type of x, dy, dx and y.
    statistics_dtype : numpy.dtype
        Element type of mean, variance, gamma, beta, dgamma and dbeta.
    has_gamma, has_beta : bool
        Whether the optional scale and offset are given (absent: 1 and 0).
    epsilon : float
    training : bool
        True: the statistics are functions of x; False: they are constants ("frozen").
    relu : bool
        Whether y = max(0, ...), and dy counts where y > 0.
    residual : bool
        Whether an array of x's shape and type is added before that.
    """

    operation: Operation
    shape: tuple[int, ...]
    channel_axis: int
    dtype: np.dtype
    statistics_dtype: np.dtype
    has_gamma: bool = False
    has_beta: bool = False
    epsilon: float = 0.0
    training: bool = True
    relu: bool = False
    residual: bool = False

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return self.shape[self.channel_axis]

    @property
    def size(self) -> int:
        """Number of elements of x."""
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """Number of elements per channel, M (also defined when C = 0)."""
        axis = self.channel_axis
        return math.prod(self.shape[:axis]) * math.prod(self.shape[axis + 1 :])


def backward_problem(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    training: bool,
    words: Words = _CANONICAL,
) -> Problem:
    """Validate a backward call and return its Problem."""
    axis = channel_axis_of(data_format, words)
    dtype = _check_input("x", x, words)
    _check_like("dy", dy, x, dtype, words)
    statistics_dtype = _check_channel_arrays(
        {"mean": mean, "variance": variance, "gamma": gamma}, x.shape[axis], dtype, words
    )
    return Problem(
        "backward",
        x.shape,
        axis % x.ndim,
        dtype,
        statistics_dtype,
        has_gamma=gamma is not None,
        epsilon=_check_epsilon(epsilon, words),
        training=check_flag("training", training, words),
    )


def reduce_problem(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    *,
    data_format: str,
    words: Words = _CANONICAL,
) -> Problem:
    """Validate a reduction call and return its Problem."""
    axis = channel_axis_of(data_format, words)
    dtype = _check_input("x", x, words)
    _check_like("dy", dy, x, dtype, words)
    statistics_dtype = _check_channel_arrays({"mean": mean}, x.shape[axis], dtype, words)
    return Problem("reduce", x.shape, axis % x.ndim, dtype, statistics_dtype)


def apply_problem(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    sums_shapes: Sequence[tuple[int, ...]],
    epsilon: float,
    data_format: str,
    training: bool,
    words: Words = _CANONICAL,
) -> Problem:
    """Validate an apply call (`sums_shapes`: of sum_dy and sum_dy_xmu) and return its Problem."""
    base = backward_problem(
        x,
        dy,
        mean,
        variance,
        gamma,
        epsilon=epsilon,
        data_format=data_format,
        training=training,
        words=words,
    )
    for shape in sums_shapes:
        if shape != (base.channels,):
            raise ArgumentValueError(
                _word("sums", words),
                "its per-channel sums must match the channels of x",
                came=f"sums of shape {shape}",
                accepted=f"shape ({base.channels},)",
            )
    return Problem(
        "apply",
        base.shape,
        base.channel_axis,
        base.dtype,
        base.statistics_dtype,
        has_gamma=base.has_gamma,
        epsilon=base.epsilon,
        training=base.training,
    )


def forward_problem(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    statistics_dtype: np.dtype | None = None,
    words: Words = _CANONICAL,
) -> Problem:
    """Validate a training-forward call and return its Problem.

    Without gamma and beta the statistics come in `statistics_dtype`, by default float32 beside a
    16-bit x (the mean of many 16-bit values deserves more digits than they have), else x's type.
    """
    axis = channel_axis_of(data_format, words)
    dtype = _check_input("x", x, words)
    default = statistics_dtype or (FLOAT32 if is_16_bit(dtype) else dtype)
    statistics = _check_channel_arrays(
        {"gamma": gamma, "beta": beta}, x.shape[axis], dtype, words, default=default
    )
    return Problem(
        "forward",
        x.shape,
        axis % x.ndim,
        dtype,
        statistics,
        has_gamma=gamma is not None,
        has_beta=beta is not None,
        epsilon=_check_epsilon(epsilon, words),
    )


def inference_problem(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    words: Words = _CANONICAL,
) -> Problem:
    """Validate an inference call and return its Problem."""
    axis = channel_axis_of(data_format, words)
    dtype = _check_input("x", x, words)
    statistics_dtype = _check_channel_arrays(
        {"mean": mean, "variance": variance, "gamma": gamma, "beta": beta},
        x.shape[axis],
        dtype,
        words,
    )
    return Problem(
        "inference",
        x.shape,
        axis % x.ndim,
        dtype,
        statistics_dtype,
        has_gamma=gamma is not None,
        has_beta=beta is not None,
        epsilon=_check_epsilon(epsilon, words),
        training=False,
    )


def with_relu(problem: Problem, *, residual: bool) -> Problem:
    """Return the problem with a ReLU behind it, and a residual before that if asked for."""
    return replace(problem, relu=True, residual=residual)


def variance_error(
    variance: np.ndarray, epsilon: float, channel: int, words: Words = _CANONICAL
) -> ArgumentValueError:
    """Return the error for `channel`, whose variance + epsilon is finite and not positive."""
    return ArgumentValueError(
        _word("variance", words),
        f"variance + epsilon must be positive in every channel, but is not in channel {channel}",
        came=f"variance {variance[channel]} with epsilon {epsilon}",
        accepted="variance + epsilon > 0 (infinity and NaN propagate)",
    )


def as_array(name: str, value: object, words: Words = _CANONICAL) -> np.ndarray:
    """Return `value` as a plain array without copying, or raise if it cannot be one.

    A masked array is refused: its mask would be lost.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentTypeError(
            _word(name, words),
            "masked arrays are not supported: the mask would be lost",
            came=type(value).__name__,
            accepted="an array",
            hint="fill it first, e.g. with .filled(0)",
        )
    if value is None:
        raise ArgumentTypeError(_word(name, words), "is required", came="None", accepted="an array")
    try:
        return np.asarray(value)
    except Exception as error:
        raise ArgumentTypeError(
            _word(name, words),
            f"cannot be read as an array ({error})",
            came=type(value).__name__,
            accepted="an array",
        ) from error


def as_optional_array(name: str, value: object) -> np.ndarray | None:
    """Return `as_array` of a value, or None for None."""
    return None if value is None else as_array(name, value)


def check_like(name: str, array: np.ndarray, x: np.ndarray) -> None:
    """Raise if `array` has not the shape and type of x, or x is none that is accepted."""
    _check_like(name, array, x, _check_input("x", x, _CANONICAL), _CANONICAL)


def check_mask(mask: object, size: int) -> np.ndarray:
    """Return `mask` as an array, or raise if it is not one of `size` bytes."""
    array = as_array("mask", mask)
    check_mask_like(array, size)
    return np.ascontiguousarray(array)


def check_mask_like(array: np.ndarray | Metadata, size: int) -> None:
    """Raise if a mask is not of `size` bytes."""
    if array.dtype != np.uint8:
        raise ArgumentTypeError(
            "mask",
            "must be the mask that batch_norm_relu_forward returned",
            came=array.dtype,
            accepted="uint8",
        )
    if array.shape != (size,):
        raise ArgumentValueError(
            "mask",
            "must be the mask that batch_norm_relu_forward returned for an x of this shape",
            came=f"shape {array.shape}",
            accepted=f"shape ({size},)",
        )


def channel_axis_of(data_format: str, words: Words = _CANONICAL) -> int:
    """Return the channel axis of a data format: 1 for NCX, -1 for NXC."""
    if data_format == "NCX":
        return 1
    if data_format == "NXC":
        return -1
    raise ArgumentValueError(
        _word("data_format", words),
        "unknown data format",
        came=repr(data_format),
        accepted="'NCX' (channel axis 1) or 'NXC' (channel axis last)",
    )


def check_flag(name: str, value: object, words: Words = _CANONICAL) -> bool:
    """Return `value` as a bool, or raise if it is not one."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ArgumentTypeError(
        _word(name, words),
        "must be a boolean",
        came=f"{value!r} of type {type(value).__name__}",
        accepted="True or False",
    )


def _word(name: str, words: Words) -> str:
    return words.get(name, name)


def _check_input(name: str, array: np.ndarray, words: Words) -> np.dtype:
    dtype = element_type(array.dtype)
    if dtype is None:
        raise ArgumentTypeError(
            _word(name, words),
            "unsupported element type",
            came=array.dtype,
            accepted=_TYPE_NAMES,
            hint=f"convert it first, e.g. {_word(name, words)}.astype('float32')",
        )
    if array.ndim < 2:
        raise ArgumentValueError(
            _word(name, words),
            "must have rank 2 or more: a batch axis and a channel axis",
            came=f"rank {array.ndim}, shape {array.shape}",
            accepted="rank >= 2",
        )
    return dtype


def _check_like(name: str, array: np.ndarray, x: np.ndarray, dtype: np.dtype, words: Words) -> None:
    """Raise if an array has not x's shape and type."""
    if array.shape != x.shape:
        raise ArgumentValueError(
            _word(name, words),
            f"must have the shape of {_word('x', words)}",
            came=f"shape {array.shape}",
            accepted=f"shape {x.shape}",
        )
    own = element_type(array.dtype)
    # NumPy takes None for float64 in a comparison.
    if own is None or own != dtype:
        raise ArgumentTypeError(
            _word(name, words),
            f"must have the element type of {_word('x', words)}",
            came=array.dtype,
            accepted=dtype,
        )


def _check_channel_arrays(
    arrays: Mapping[str, np.ndarray | None],
    channels: int,
    dtype: np.dtype,
    words: Words,
    *,
    default: np.dtype | None = None,
) -> np.dtype:
    """Check the per-channel arrays and return their common type (`default` if none is given)."""
    allowed = statistics_types(dtype)
    common: tuple[str, np.dtype] | None = None
    for name, array in arrays.items():
        if array is None:
            continue
        if array.shape != (channels,):
            raise ArgumentValueError(
                _word(name, words),
                f"must hold one value per channel of {_word('x', words)}",
                came=f"shape {array.shape}",
                accepted=f"shape ({channels},)",
            )
        own = element_type(array.dtype)
        if own is None or own not in allowed:
            raise ArgumentTypeError(
                _word(name, words),
                f"unsupported element type beside {_word('x', words)} of type {dtype}",
                came=array.dtype,
                accepted=" or ".join(str(t) for t in allowed),
            )
        if common is None:
            common = (name, own)
        elif own != common[1]:
            raise ArgumentTypeError(
                _word(name, words),
                f"must have the element type of {_word(common[0], words)}",
                came=array.dtype,
                accepted=common[1],
            )
    if common is not None:
        return common[1]
    assert default is not None
    return default


def _check_epsilon(epsilon: object, words: Words) -> float:
    if isinstance(epsilon, bool | np.bool_) or not isinstance(epsilon, Real | np.floating):
        raise ArgumentTypeError(
            _word("epsilon", words),
            "must be a real number",
            came=f"{epsilon!r} of type {type(epsilon).__name__}",
            accepted="a finite float >= 0",
        )
    value = float(epsilon)
    if not (math.isfinite(value) and value >= 0.0):
        raise ArgumentValueError(
            _word("epsilon", words),
            "must be finite and not negative",
            came=value,
            accepted="a finite float >= 0",
        )
    return value
