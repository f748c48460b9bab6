"""The public functions that compute the operator on NumPy arrays."""

from __future__ import annotations

from typing import Any, Literal, Required, TypedDict, Unpack, overload

import numpy as np

from backnorm import weighted
from backnorm.activations import Activation, check_relu
from backnorm.arithmetics import Arithmetic
from backnorm.arrays import NUMPY
from backnorm.errors import ArgumentValueError
from backnorm.executable import compute, executable
from backnorm.interfaces import Plan
from backnorm.options import Format, Options
from backnorm.reproducible_sums import ReproducibleMoments, ReproducibleSums
from backnorm.results import (
    ChannelMoments,
    ChannelSums,
    Gradients,
    GradientsWithResidual,
    Normalized,
    NormalizedWithMask,
    check_of_channels,
    check_whole,
)

# Constructing a named tuple by `tuple.__new__` takes half as long as calling the class of the named
# tuple.
_new = tuple.__new__


class _CommonOptions(TypedDict, total=False):
    """Options that the overloads of a function have in common, for type checkers."""

    data_format: Format
    arithmetic: Arithmetic | None


class _ForwardOptions(_CommonOptions, total=False):
    epsilon: Required[float]
    weights: Any
    reproducible: bool
    out: np.ndarray | None


class _ApplyOptions(_CommonOptions, total=False):
    epsilon: Required[float]
    training: bool
    out: np.ndarray | None


class _BackwardOptions(_ApplyOptions, total=False):
    weights: Any
    reproducible: bool


@overload
def batch_norm_backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any = ..., *,
    mask: Any = ..., residual: Literal[False] = ..., **options: Unpack[_BackwardOptions]
) -> Gradients: ...  # fmt: skip


@overload
def batch_norm_backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any = ..., *,
    mask: Any, residual: bool, **options: Unpack[_BackwardOptions]
) -> GradientsWithResidual: ...  # fmt: skip


def batch_norm_backward(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    *,
    epsilon: float,
    data_format: Format = "NCX",
    training: bool = True,
    mask: Any = None,
    residual: bool = False,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
    weights: Any = None,
    out: np.ndarray | None = None,
) -> Gradients | GradientsWithResidual:
    r"""Return the gradients of batch normalisation, optionally followed by a ReLU.

    With M elements per channel, s = 1/sqrt(variance + epsilon) and c = x - mean::

        dbeta  = sum dy
        dgamma = s * sum dy*c
        dx     = gamma*s * (dy - sum(dy)/M - c * s**2 * sum(dy*c)/M)     training
        dx     = gamma*s * dy                                            frozen statistics

    If a ReLU follows, y = min(ceiling, max(0, batch_norm(x) + residual)), and dy is first set to 0
    except where 0 < y < ceiling. The resulting dy is also the gradient of the residual.

    Parameters
    ----------
    x : array, rank 2 or more
        Input of the forward pass: float64, float32, float16 or (ml_dtypes) bfloat16, of any strides
        and byte order. An array that is not dense in some order of its axes is copied.
    dy : array
        Gradient of the loss with respect to the output, of x's shape and type.
    mean, variance : array, shape (C,)
        The statistics of the forward pass, used unchanged. The variance is the biased one. The
        type is x's; for a 16-bit x also float32.
    gamma : array, shape (C,), optional
        Scale, of mean's type; 1 if absent.
    epsilon : float
        Added to the variance; finite and not negative.
    data_format : {"NCX", "NXC"} or tuple of int
        NCX: channel axis 1. NXC: the last axis. A tuple: the channel axes, not negative and
        ascending, of an x of any rank. With several axes, C is the product of their lengths, and
        each combination of indices is a channel, in row-major order. Axes that are not adjacent in
        memory cost a copy.
    training : bool
        True: the statistics depend on x. False: they are constants.
    mask : uint8 array, optional
        The mask that `batch_norm_forward` returned with a ReLU. The mask stores the order of its
        bits. If x now has another order of axes in memory, the mask is copied.
    residual : bool
        Whether to also return the gradient of the residual.
    arithmetic : {"float32", "float64"}, optional
        The type in which elements are computed and short runs of sums are added up; see
        `backnorm.arithmetic`, which also describes the default. float64 elements are always
        computed in float64.
    reproducible : bool
        Whether results have the same bits in every layout and for every order of the elements of a
        channel. The results of `reduce` and `apply` then also have the same bits for every division
        of the batch into parts. Sums are added up as integers, which takes longer and allows fewer
        than 2^31 elements per channel.
    weights : array, optional
        In training, which elements count in mean and variance, in all channels: booleans, or
        floating-point weights, not negative, that say how often an element counts. The shape is
        x's with 1 in place of channels; any other size may be 1, too. With an element's weight w
        and the sum W of a channel's weights, w/W takes the place of 1/M. The sums of dy are over
        all elements. Weights other than booleans are not accepted if `reproducible`.
    out : array, optional
        The array for dx, of x's shape and type. ``out=dy`` works in place; any other overlap with
        an input is an error. Not accepted with `weights`.

    Returns
    -------
    Gradients, or with `residual` GradientsWithResidual
        dx of x's shape, type and memory order; dgamma and dbeta, (C,), of mean's type; dresidual
        like dx. In float64 arithmetic each element is the exact value rounded once, up to a small
        error that ``backnorm.conformance.judge.budget`` states. In both arithmetics the bits are
        the same for any number of threads.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        For a wrong type, shape, format, mask or `out`, or a channel whose variance + epsilon is
        finite and not positive. NaN and infinity propagate.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, section 3.
    """
    operands = x, dy, mask, mean, variance, gamma
    options = _new(
        Options, (epsilon, data_format, training, None, residual, arithmetic, reproducible)
    )
    if weights is None:
        dx, dgamma, dbeta, dresidual = compute("backward", operands, options, out)
    elif out is None:
        dx, dgamma, dbeta, dresidual = weighted.backward(operands, weights, options)
    else:
        raise ArgumentValueError("out", "is not accepted with weights", accepted="None")
    if dresidual is None:
        return _new(Gradients, (dx, dgamma, dbeta))
    return GradientsWithResidual(dx, dgamma, dbeta, dresidual)


@overload
def batch_norm_forward(
    x: Any, gamma: Any = ..., beta: Any = ..., *,
    activation: None = ..., **options: Unpack[_ForwardOptions]
) -> Normalized: ...  # fmt: skip


@overload
def batch_norm_forward(
    x: Any, gamma: Any = ..., beta: Any = ..., *,
    activation: str | Activation, residual: Any = ..., **options: Unpack[_ForwardOptions]
) -> NormalizedWithMask: ...  # fmt: skip


def batch_norm_forward(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    data_format: Format = "NCX",
    activation: str | Activation | None = None,
    residual: Any = None,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
    weights: Any = None,
    out: np.ndarray | None = None,
) -> Normalized | NormalizedWithMask:
    """Normalise a batch with its own statistics, optionally with a residual and a ReLU.

    mean and variance are statistics of each channel of x; the variance is the biased one (divided
    by M, the number of elements per channel). y = gamma * (x - mean) / sqrt(variance + epsilon) +
    beta is computed from the mean and variance before they are rounded to their output type. If a
    residual is given, it is added before the ReLU, while y is computed; this takes no further pass
    over y.

    Parameters
    ----------
    x : array, rank 2 or more
        float64, float32, float16 or bfloat16, of any strides.
    gamma, beta : array, shape (C,), optional
        Scale and offset, 1 and 0 if absent. The type is x's; for a 16-bit x also float32.
    epsilon : float
        Added to the variance; finite and not negative.
    data_format : {"NCX", "NXC"} or tuple of int
        Channel axis 1, or last, or the channel axes: see `batch_norm_backward`.
    activation : {"relu", "relu6"} or Activation, optional
        ``backnorm.Activation("relu", ceiling)`` is min(ceiling, max(0, y)) with the ceiling rounded
        to x's type. NaN stays NaN.
    residual : array, optional
        Added before the ReLU; of x's shape and type; 0 if absent.
    arithmetic : {"float32", "float64"}, optional
        As `batch_norm_backward`.
    reproducible : bool
        Whether mean, variance and y have the same bits for every order of the elements: see
        `batch_norm_backward`. Mean and variance are then rounded to float64 before y is computed.
    weights : array, optional
        Which elements count, and how often: see `batch_norm_backward`. y is computed for all
        elements. An element that does not count may be NaN or infinite. Mean and variance are
        rounded to float64 before y is computed.
    out : array, optional
        The array for y. ``out=x`` works in place; any other overlap with an input is an error. The
        error for a channel whose variance + epsilon is not positive comes after y is written.

    Returns
    -------
    Normalized, or with a ReLU NormalizedWithMask
        y of x's shape, type and memory order. mean and variance, (C,), of the type of gamma and
        beta (without them: x's type, or float32 for a 16-bit x), 0 for an empty batch. mask, for
        `batch_norm_backward`, is one-dimensional uint8: bit ``i % 8`` of byte ``i // 8`` says
        whether element i of y, in memory order, is more than zero and less than the ceiling.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`; also for other activations, and for a residual without a ReLU.
    """
    if activation is not None:
        activation = check_relu(activation)
    operands = x, residual, gamma, beta
    options = _new(
        Options, (epsilon, data_format, True, activation, False, arithmetic, reproducible)
    )
    if weights is None:
        y, mean, variance, mask = compute("forward", (*operands, None, None), options, out)
    else:
        y, mean, variance, mask = weighted.forward(operands, weights, options, out)
    if mask is None:
        return _new(Normalized, (y, mean, variance))
    return NormalizedWithMask(y, mean, variance, mask)


def batch_norm_inference(
    x: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    data_format: Format = "NCX",
    activation: str | Activation | None = None,
    residual: Any = None,
    arithmetic: Arithmetic | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Normalise with given statistics: y = gamma * (x - mean) / sqrt(variance + epsilon) + beta.

    The residual is added to y, then the activation is applied. A residual requires a ReLU.

    Parameters
    ----------
    x : array, rank 2 or more
        float64, float32, float16 or bfloat16, of any strides.
    mean, variance : array, shape (C,)
        Statistics, of x's type; for a 16-bit x also float32.
    gamma, beta : array, shape (C,), optional
        Scale and offset, of mean's type; 1 and 0 if absent.
    epsilon : float
        Added to the variance; finite and not negative.
    data_format : {"NCX", "NXC"} or tuple of int
        Channel axis 1, or last, or the channel axes: see `batch_norm_backward`.
    activation : {"relu", "relu6"} or Activation, optional
        ``backnorm.Activation("relu", ceiling)`` is min(ceiling, max(0, y)) with the ceiling rounded
        to x's type. NaN stays NaN.
    residual : array, optional
        Added before a ReLU; of x's shape and type; 0 if absent.
    arithmetic : {"float32", "float64"}, optional
        As `batch_norm_backward`.
    out : array, optional
        The array for y. ``out=x`` works in place; any other overlap with an input is an error.

    Returns
    -------
    numpy.ndarray
        y, of x's shape and type.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`; also for other activations, and for a residual without a ReLU.
    """
    y: np.ndarray
    operands = x, residual, mean, variance, gamma, beta
    follows = check_relu(activation)
    options = Options(epsilon, data_format, activation=follows, arithmetic=arithmetic)
    (y,) = compute("inference", operands, options, out)
    return y


@overload
def reduce_forward(
    x: Any, *, reproducible: Literal[False] = ..., **options: Unpack[_CommonOptions]
) -> ChannelMoments: ...


@overload
def reduce_forward(
    x: Any, *, reproducible: bool, **options: Unpack[_CommonOptions]
) -> ChannelMoments | ReproducibleMoments: ...


def reduce_forward(
    x: Any,
    *,
    data_format: Format = "NCX",
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> ChannelMoments | ReproducibleMoments:
    """Return the moments of a part of a batch: mean and biased variance per channel.

    This is the first phase of the forward pass.

    Add up the moments of all parts of the batch, and pass the result to `apply_forward`.

    Parameters
    ----------
    x : array, rank 2 or more
        Part of the input: float64, float32, float16 or bfloat16, of any strides.
    data_format : {"NCX", "NXC"} or tuple of int
        Channel axis 1, or last, or the channel axes: see `batch_norm_backward`.
    arithmetic : {"float32", "float64"}, optional
        As `batch_norm_backward`.
    reproducible : bool
        Whether the moments of the batch have the same bits for every division into parts.

    Returns
    -------
    ChannelMoments, or if reproducible ReproducibleMoments
        float64 means and variances, 0 for an empty batch, and the number of elements per channel.
        ReproducibleMoments have the sums of x and x**2 as integers instead.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`.
    """
    options = Options(data_format=data_format, arithmetic=arithmetic, reproducible=reproducible)
    sums, count = compute("reduce_forward", (x,), options)
    if reproducible:
        return ReproducibleMoments(sums, count)
    return ChannelMoments(sums[0], sums[1], count)


def apply_forward(
    x: Any,
    moments: ChannelMoments | ReproducibleMoments,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    data_format: Format = "NCX",
    activation: str | Activation | None = None,
    residual: Any = None,
    arithmetic: Arithmetic | None = None,
    out: np.ndarray | None = None,
) -> Normalized | NormalizedWithMask:
    """Normalise a part of a batch: the second phase of the forward pass.

    Parameters
    ----------
    x, gamma, beta, epsilon, data_format, activation, residual, arithmetic, out
        As `batch_norm_forward`.
    moments : ChannelMoments or ReproducibleMoments
        From `reduce_forward`, added up over all parts of the batch, including this one.

    Returns
    -------
    Normalized, or with a ReLU NormalizedWithMask
        As `batch_norm_forward`; mean and variance are those of the whole batch.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_forward`; also for moments that are not numbers, that have another number of
        channels than x, or fewer elements.
    """
    moments = moments.rounded() if type(moments) is ReproducibleMoments else moments
    moments = check_of_channels(moments, ChannelMoments)
    follows = check_relu(activation)
    operands = x, residual, gamma, beta
    options = Options(epsilon, data_format, activation=follows, arithmetic=arithmetic)
    problem, _ = NUMPY.checked("apply_forward", operands, options)
    check_whole(moments, problem.channels, problem.count)
    sums = moments.mean, moments.variance
    y, mean, variance, mask = compute("apply_forward", operands, options, out, sums=sums)
    if mask is None:
        return Normalized(y, mean, variance)
    return NormalizedWithMask(y, mean, variance, mask)


@overload
def reduce(
    x: Any, dy: Any, mean: Any, *,
    mask: Any = ..., reproducible: Literal[False] = ..., **options: Unpack[_CommonOptions]
) -> ChannelSums: ...  # fmt: skip


@overload
def reduce(
    x: Any, dy: Any, mean: Any, *,
    mask: Any = ..., reproducible: bool, **options: Unpack[_CommonOptions]
) -> ChannelSums | ReproducibleSums: ...  # fmt: skip


def reduce(
    x: Any,
    dy: Any,
    mean: Any,
    *,
    data_format: Format = "NCX",
    mask: Any = None,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> ChannelSums | ReproducibleSums:
    """Return sum dy and sum dy*(x - mean) per channel: the first phase of the backward pass.

    Next, add up the sums of all parts of the batch, and pass the total to `apply` for each part.

    Parameters
    ----------
    x, dy : array, rank 2 or more
        A part of the input and of the gradient, of one shape and type.
    mean : array, shape (C,)
        Mean of the whole batch, of x's type; for a 16-bit x also float32.
    data_format : {"NCX", "NXC"} or tuple of int
        Channel axis 1, or last, or the channel axes: see `batch_norm_backward`.
    mask : uint8 array, optional
        The mask that `apply_forward` returned for this part with a ReLU.
    arithmetic : {"float32", "float64"}, optional
        As `batch_norm_backward`.
    reproducible : bool
        Whether the sums of the batch have the same bits for every division into parts.

    Returns
    -------
    ChannelSums, or if reproducible ReproducibleSums
        The sums, and the number of elements per channel. The sums are float64; those of
        ReproducibleSums are integers.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`.
    """
    options = Options(data_format=data_format, arithmetic=arithmetic, reproducible=reproducible)
    sums, count = compute("reduce", (x, dy, mask, mean), options)
    if reproducible:
        return ReproducibleSums(sums, count)
    return ChannelSums(sums[0], sums[1], count)


@overload
def apply(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, sums: ChannelSums | ReproducibleSums, *,
    mask: Any = ..., residual: Literal[False] = ..., **options: Unpack[_ApplyOptions]
) -> np.ndarray: ...  # fmt: skip


@overload
def apply(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, sums: ChannelSums | ReproducibleSums, *,
    mask: Any, residual: bool, **options: Unpack[_ApplyOptions]
) -> np.ndarray | tuple[np.ndarray, np.ndarray]: ...  # fmt: skip


def apply(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any,
    sums: ChannelSums | ReproducibleSums,
    *,
    epsilon: float,
    data_format: Format = "NCX",
    training: bool = True,
    mask: Any = None,
    residual: bool = False,
    arithmetic: Arithmetic | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Return dx of a part of a batch: compute the second phase of the backward pass.

    Parameters
    ----------
    x, dy, mean, variance, gamma, epsilon, data_format, training, residual, arithmetic, out
        As `batch_norm_backward` (gamma may be None).
    sums : ChannelSums or ReproducibleSums
        From `reduce`, added up over all parts of the batch, including this one.
    mask : uint8 array, optional
        The mask that `apply_forward` returned for this part with a ReLU.

    Returns
    -------
    numpy.ndarray, or with `residual` a tuple of two
        dx, of x's shape and type, and the gradient of the residual.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`; also for sums that are not numbers, that have another number of
        channels than x, or fewer elements.
    """
    sums = sums.rounded() if type(sums) is ReproducibleSums else sums
    sums = check_of_channels(sums, ChannelSums)
    operands = x, dy, mask, mean, variance, gamma
    options = Options(epsilon, data_format, training, None, residual, arithmetic)
    # If x and mean are NumPy arrays, these comparisons replace the checks below, which take longer
    # because they construct a problem.
    usual = (
        type(x) is type(mean) is np.ndarray
        and mean.shape == sums.sum_dy.shape
        and sums.count * mean.size >= x.size
    )
    if not usual:
        # The other arguments are checked before the sums. If one of them is wrong, the error then
        # names it, and does not say that the sums do not match x.
        problem, _ = NUMPY.checked("apply", operands, options)
        check_whole(sums, problem.channels, problem.count)
    both = sums.sum_dy, sums.sum_dy_xmu
    dx, dresidual = compute("apply", operands, options, out, sums=both, count=sums.count)
    return dx if dresidual is None else (dx, dresidual)


def explain(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    *,
    epsilon: float,
    data_format: Format = "NCX",
    training: bool = True,
    mask: Any = None,
    residual: bool = False,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
    out: np.ndarray | None = None,
) -> Plan:
    """Return the plan that `batch_norm_backward` follows for the same arguments, without weights.

    Returns
    -------
    Plan
        ``print`` it to read which kernels run, how the arrays are divided, and why. The plan does
        not depend on `out`.
    """
    operands = x, dy, mask, mean, variance, gamma
    options = Options(epsilon, data_format, training, None, residual, arithmetic, reproducible)
    problem, read = NUMPY.checked("backward", operands, options)
    plan: Plan = executable(problem, read[0]).plan
    return plan
