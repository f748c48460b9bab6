"""The metadata of one call, validated once: shapes, element types, options.

One loop over the operation's signature checks the shapes, the types and epsilon. (Calls of dialects
are checked by the package `dialects` instead.) The checks read only the ``shape`` and ``dtype`` of
arrays. The resulting :class:`Problem` is frozen and hashable; plans and kernels do not check it
again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from backnorm.activations import RELU, Activation, check_relu
from backnorm.arithmetics import Arithmetic, resolved
from backnorm.dtypes import ELEMENT_TYPES, FLOAT32, element_type, is_16_bit, statistics_types
from backnorm.errors import ArgumentTypeError, ArgumentValueError, shown
from backnorm.layout import mask_size
from backnorm.reproducible_sums import check_count
from backnorm.scalars import check_flag, check_number, missing
from backnorm.signature import SIGNATURES, Operand, Operation, Signature

_TYPE_NAMES = ", ".join(str(t) for t in ELEMENT_TYPES)

_ALL = slice(None)
_CHANNEL_AXES = {"NCX": 1, "NXC": -1}

#: The argument that says which axes are channel axes: "NCX" (axis 1), "NXC" (the last axis), or a
#: tuple of axes.
Format = Literal["NCX", "NXC"] | tuple[int, ...]


class Metadata(NamedTuple):
    """The shape and element type of an operand. The functions that check the operands of a problem
    accept a `Metadata` in place of an array.
    """

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
    operation : str
        See `signature.SIGNATURES`.
    shape : tuple of int
        Shape of x (and dy, dx, y).
    channel_axes : tuple of int
        The channel axes of `shape`, not negative, ascending. The channels of several axes are
        counted in row-major order.
    dtype : numpy.dtype
        Element type of x, dy, dx and y.
    statistics_dtype : numpy.dtype
        Element type of mean, variance, gamma, beta, dgamma and dbeta.
    has_gamma, has_beta : bool
        Whether the optional scale and offset are given (absent: 1 and 0).
    epsilon : float
    training : bool
        True: the statistics are functions of x; False: they are constants ("frozen").
    activation : Activation or None
        The ReLU after the normalisation; its ceiling is a value of `dtype`. A
        backward pass with a mask has `RELU`: dy is replaced by 0 where y is not positive or has
        reached the ceiling.
    residual : bool
        Whether an array of x's shape and type is added before the ReLU; in a backward pass, whether
        the gradient of this array is a result.
    inverse : bool
        Whether the operand `variance`, or the variance that a forward pass returns, is in fact
        1/sqrt(variance + epsilon).
    running : bool
        Whether running statistics are updated.
    biased : bool
        Whether the running variance averages biased variances; otherwise it averages variances
        with Bessel's correction.
    reproducible : bool
        Whether sums do not depend on how the batch is divided into parts: see `reproducible_sums`.
    arithmetic : {"float32", "float64"}
        The type in which elements are computed and short runs of sums are added up.
    """

    operation: Operation
    shape: tuple[int, ...]
    channel_axes: tuple[int, ...]
    dtype: np.dtype
    statistics_dtype: np.dtype
    has_gamma: bool = False
    has_beta: bool = False
    epsilon: float = 0.0
    training: bool = True
    activation: Activation | None = None
    residual: bool = False
    inverse: bool = False
    running: bool = False
    biased: bool = False
    reproducible: bool = False
    arithmetic: Arithmetic = field(kw_only=True)

    @property
    def signature(self) -> Signature:
        """The signature of the operation."""
        return SIGNATURES[self.operation]

    @property
    def relu(self) -> bool:
        """Whether a ReLU follows the normalisation.

        In a backward pass, this is true if the caller passes the mask of a ReLU.
        """
        return self.activation is not None

    @property
    def ceiling(self) -> float:
        """The upper bound of y, or infinity if there is none."""
        if self.activation is None or self.activation.ceiling is None:
            return math.inf
        return self.activation.ceiling

    @property
    def writes_mask(self) -> bool:
        """Whether the mask of a ReLU is a result."""
        return self.relu and any(result.kind == "mask" for result in self.signature.results)

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return math.prod(self.shape[axis] for axis in self.channel_axes)

    @property
    def size(self) -> int:
        """Number of elements of x."""
        return math.prod(self.shape)

    @property
    def data_bytes(self) -> int:
        """Bytes of x."""
        return self.size * self.dtype.itemsize

    @property
    def count(self) -> int:
        """Number of elements per channel, M, which is defined even if C = 0."""
        return math.prod(
            size for axis, size in enumerate(self.shape) if axis not in self.channel_axes
        )


def problem_of(
    operation: Operation,
    *operands: Any,
    epsilon: object = 0.0,
    data_format: Format = "NCX",
    training: object = True,
    residual: object = False,
    activation: object = None,
    arithmetic: object = None,
    reproducible: object = False,
) -> Problem:
    """Validate a call and return its Problem.

    Parameters
    ----------
    operation : str
    *operands : array, Metadata or None
        In the signature's order. Without gamma and beta the statistics of a forward pass are of x's
        type, but float32 for a 16-bit x, because a mean has more digits than its terms.
    epsilon, training, residual, reproducible
        Options; those that the signature does not name are ignored. In a backward pass `residual`
        requests the gradient of the residual.
    data_format : {"NCX", "NXC"} or tuple of int
        The channel axis, or several in ascending order.
    activation : None, str or Activation
        The ceiling of a ReLU is rounded to x's type.
    arithmetic : {"float32", "float64"}, optional
        None: see `arithmetics.resolved`. If the signature does not have this option, float64.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
    """
    signature = SIGNATURES[operation]
    if issubclass(type(data_format), tuple):
        # A subclass of tuple may override the access to its elements, so the elements are read by
        # the method of tuple itself.
        axes: tuple[int, ...] | None = tuple.__getitem__(cast("tuple[int, ...]", data_format), _ALL)
    else:
        axes, axis = None, channel_axis_of(data_format)
    present: dict[str, Any] = {}
    common: tuple[str, np.dtype] | None = None
    for operand, array in zip(signature.operands, operands, strict=True):
        if array is None:
            if operand.required:
                raise missing(operand.name)
            continue
        if not present:
            dtype = _check_input(operand.name, array, least=2 if axes is None else 0)
            shape = tuple(array.shape)
            if axes is None:
                axes = (axis % len(shape),)
            else:
                _check_axes(axes, len(shape))
            channels = math.prod(shape[each] for each in axes)
            allowed = statistics_types(dtype)
        elif operand.kind == "data":
            check_like(operand.name, array, shape, dtype)
        elif operand.kind == "mask":
            check_mask(array, mask_size(math.prod(shape)))
        else:
            common = _check_channels(operand, array, channels, dtype, allowed, common)
        present[operand.name] = array
    options = signature.options
    flags = {"training": training, "residual": residual, "reproducible": reproducible}
    flags = {name: check_flag(name, value) for name, value in flags.items() if name in options}
    if "activation" in options:
        follows = check_relu(activation, dtype)
    else:
        follows = RELU if "mask" in present else None
    added = bool(flags.get("residual", "residual" in present))
    if added and follows is None:
        raise residual_alone(operation)
    assert axes is not None
    default = FLOAT32 if is_16_bit(dtype) else dtype
    problem = Problem(
        operation,
        shape,
        axes,
        dtype,
        default if common is None else common[1],
        has_gamma="gamma" in present,
        has_beta="beta" in present,
        epsilon=check_epsilon(epsilon) if "epsilon" in options else 0.0,
        training=bool(flags.get("training", not operation.startswith("inference"))),
        activation=follows,
        residual=added,
        running="running_mean" in present,
        reproducible=bool(flags.get("reproducible", False)),
        arithmetic=resolved(dtype, arithmetic) if "arithmetic" in options else "float64",
    )
    if problem.reproducible:
        check_count("x", problem.count)
    return problem


def unsupported_type(name: str, came: object, hint: str | None = None) -> ArgumentTypeError:
    """Return the error for data whose element type is not one of `ELEMENT_TYPES`."""
    return ArgumentTypeError(
        name, "unsupported element type", came=came, accepted=_TYPE_NAMES, hint=hint
    )


def variance_error(variance: Any, problem: Problem, channel: int) -> ArgumentValueError:
    """Return the error for `channel`, whose variance + epsilon is finite and not positive."""
    if problem.inverse and problem.operation != "forward":
        return ArgumentValueError(
            "variance",
            f"an inverse standard deviation cannot be negative, but is in channel {channel}",
            came=variance[channel],
            accepted="values >= 0 (infinity and NaN propagate)",
        )
    return ArgumentValueError(
        "moments" if problem.operation == "apply_forward" else "variance",
        f"variance + epsilon must be positive in every channel, but is not in channel {channel}",
        # If `problem.inverse` is true, a forward pass returns the inverse standard deviation
        # instead of the variance. The variance itself is 0 here. A forward pass never computes a
        # negative variance, and epsilon is never negative, so if their sum is not positive, both
        # are 0.
        came=f"variance {0.0 if problem.inverse else variance[channel]} with epsilon "
        f"{problem.epsilon}",
        accepted="variance + epsilon > 0 (infinity and NaN propagate)",
    )


def channel_axis_of(data_format: object) -> int:
    """Return the channel axis of a data format: 1 for NCX, -1 for NXC."""
    if issubclass(type(data_format), str):
        known = _CHANNEL_AXES.get(str.__str__(data_format))
        if known is not None:
            return known
    raise ArgumentValueError(
        "data_format",
        "unknown data format",
        came=shown(data_format),
        accepted="'NCX' (channel axis 1), 'NXC' (channel axis last), or a tuple of axes",
    )


def check_epsilon(epsilon: object) -> float:
    """Return epsilon as a float, or raise if it is negative or not finite."""
    accepted = "a finite float >= 0"
    value = check_number("epsilon", epsilon, accepted=accepted)
    if not (math.isfinite(value) and value >= 0.0):
        raise ArgumentValueError(
            "epsilon", "must be finite and not negative", came=shown(epsilon), accepted=accepted
        )
    return value


def _check_axes(axes: tuple[object, ...], rank: int) -> None:
    """Raise unless `axes` are different integers from 0 to `rank` - 1 in ascending order."""
    expected = sorted({axis for axis in axes if type(axis) is int and 0 <= axis < rank})
    if list(axes) != expected:
        raise ArgumentValueError(
            "data_format",
            "must be channel axes of {x}, in ascending order",
            came=shown(axes),
            accepted=f"'NCX', 'NXC', or different integers from 0 to {rank - 1}",
        )


def residual_alone(operation: Operation) -> ArgumentValueError:
    """Return the error for a residual that no ReLU follows."""
    if operation.startswith(("backward", "apply")) and operation != "apply_forward":
        return ArgumentValueError(
            "residual",
            "must be False without a mask, which its gradient depends on",
            accepted="residual=True with the mask of the forward pass",
        )
    return ArgumentValueError(
        "residual",
        "must be absent without a ReLU after it",
        accepted="a residual with activation='relu'",
    )


def _check_input(name: str, array: Any, least: int) -> np.dtype:
    dtype = element_type(array.dtype)
    if dtype is None:
        hint = f"convert it first, e.g. {{{name}}}.astype('float32')"
        raise unsupported_type(name, array.dtype, hint)
    if array.ndim < least:
        raise ArgumentValueError(
            name,
            "must have rank 2 or more: a batch axis and a channel axis",
            came=f"rank {array.ndim}, shape {tuple(array.shape)}",
            accepted="rank >= 2",
        )
    return dtype


def check_like(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise unless an array has x's shape and element type."""
    if array.shape != shape:
        raise ArgumentValueError(
            name,
            "must have the shape of {x}",
            came=f"shape {tuple(array.shape)}",
            accepted=f"shape {shape}",
        )
    own = element_type(array.dtype)
    # None is checked on its own, because NumPy's float64 type equals None.
    if own is None or own != dtype:
        raise ArgumentTypeError(
            name, "must have the element type of {x}", came=array.dtype, accepted=dtype
        )


def check_mask(array: Any, size: int) -> None:
    """Raise unless a mask is a uint8 array of `size` bytes."""
    if array.dtype != np.uint8:
        raise ArgumentTypeError(
            "mask",
            "must be the mask that batch_norm_forward returned",
            came=array.dtype,
            accepted="uint8",
        )
    if array.shape != (size,):
        raise ArgumentValueError(
            "mask",
            "must be the mask that batch_norm_forward returned for an x of this shape",
            came=f"shape {tuple(array.shape)}",
            accepted=f"shape ({size},)",
        )


def _check_channels(
    operand: Operand,
    array: Any,
    channels: int,
    dtype: np.dtype,
    allowed: tuple[np.dtype, ...],
    common: tuple[str, np.dtype] | None,
) -> tuple[str, np.dtype]:
    """Check the shape and type of a per-channel array. All per-channel arrays of a call must have
    the same type, that of the first one.

    `common` is the name and type of the first per-channel array, or None if `array` is the first
    one. Return the name and type of the first per-channel array.
    """
    if array.shape != (channels,):
        raise ArgumentValueError(
            operand.name,
            "must hold one value per channel of {x}",
            came=f"shape {tuple(array.shape)}",
            accepted=f"shape ({channels},)",
        )
    own = element_type(array.dtype)
    if own is None or own not in allowed:
        raise ArgumentTypeError(
            operand.name,
            f"unsupported element type for {{x}} of type {dtype}",
            came=array.dtype,
            accepted=" or ".join(str(t) for t in allowed),
        )
    if common is None:
        return operand.name, own
    if own != common[1]:
        raise ArgumentTypeError(
            operand.name,
            f"must have the element type of {{{common[0]}}}",
            came=array.dtype,
            accepted=common[1],
        )
    return common
