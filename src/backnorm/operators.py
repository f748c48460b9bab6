"""The canonical operator on NumPy arrays: thin front doors (documentation, Problem, execution)."""

from __future__ import annotations

from typing import Any

import numpy as np

from backnorm import execute
from backnorm.execute import planned
from backnorm.plan import Plan
from backnorm.problem import (
    apply_problem,
    as_array,
    as_optional_array,
    backward_problem,
    forward_problem,
    inference_problem,
    reduce_problem,
)
from backnorm.recall import Recall, metadata
from backnorm.results import ChannelSums, Gradients, Normalized, check_sums

__all__ = [
    "apply",
    "batch_norm_backward",
    "batch_norm_forward",
    "batch_norm_inference",
    "explain",
    "reduce",
]

# Half as long as calling the class.
_gradients = Gradients._make

_backward_calls, _forward_calls, _inference_calls = Recall(), Recall(), Recall()


def batch_norm_backward(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
    out: np.ndarray | None = None,
) -> Gradients:
    r"""Return the gradients of batch normalisation.

    With M elements per channel, s = 1/sqrt(variance + epsilon) and c = x - mean::

        dbeta  = sum dy
        dgamma = s * sum dy*c
        dx     = gamma*s * (dy - sum(dy)/M - c * s**2 * sum(dy*c)/M)     training
        dx     = gamma*s * dy                                            frozen statistics

    Parameters
    ----------
    x : array, rank 2 or more
        Input of the forward pass: float64, float32, float16 or (ml_dtypes) bfloat16. Any strides
        and byte order; an array that is not dense in some order of its axes is copied.
    dy : array
        Gradient of the loss with respect to the output, of x's shape and type.
    mean, variance : array, shape (C,)
        The statistics of the forward pass, used as they are. The variance is the biased one. x's
        type, or float32 beside a 16-bit x.
    gamma : array, shape (C,), optional
        Scale, of mean's type; 1 if absent.
    epsilon : float
        Added to the variance; finite and not negative.
    data_format : {"NCX", "NXC"}
        Channel axis 1, or last.
    training : bool
        True: the statistics depend on x. False: they are constants.
    out : array, optional
        Where to write dx, of x's shape and type. ``out=dy`` works in place; any other overlap with
        an input is an error.

    Returns
    -------
    Gradients
        dx of x's shape, type and memory order; dgamma and dbeta, (C,), of mean's type. Each
        element is the exact value rounded once (see ``backnorm.conformance.judge.budget``), with
        the same bits for any number of threads.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        For a wrong type, shape, format or `out`, or a channel whose variance + epsilon is finite
        and not positive. NaN and infinity propagate.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, section 3.
    """
    key = metadata(x, dy, mean, variance, gamma, None, epsilon, data_format, training)
    call = _backward_calls.get(key)
    if call is None:
        given = x, dy, mean, variance, gamma
        x, dy = as_array("x", x), as_array("dy", dy)
        mean, variance = as_array("mean", mean), as_array("variance", variance)
        gamma = as_optional_array("gamma", gamma)
        problem = backward_problem(
            x,
            dy,
            mean,
            variance,
            gamma,
            epsilon=epsilon,
            data_format=data_format,
            training=training,
        )
        call = planned(problem, x)
        _backward_calls.remember(key, call, given)
    dx, dgamma, dbeta, _ = execute.backward(call, x, dy, mean, variance, gamma, out=out)
    return _gradients((dx, dgamma, dbeta))


def batch_norm_forward(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
    out: np.ndarray | None = None,
) -> Normalized:
    """Normalise a batch with its own statistics.

    mean and variance are those of each channel of x, the variance being the biased one
    (divided by M), and y = gamma * (x - mean) / sqrt(variance + epsilon) + beta, computed from
    the mean and variance before they are rounded to their output type.

    Parameters
    ----------
    x : array, rank 2 or more
        float64, float32, float16 or bfloat16, of any strides.
    gamma, beta : array, shape (C,), optional
        Scale and offset, 1 and 0 if absent; x's type, or float32 beside a 16-bit x.
    epsilon : float
        Added to the variance; finite and not negative.
    data_format : {"NCX", "NXC"}
        Channel axis 1, or last.
    out : array, optional
        Where to write y; may not overlap x.

    Returns
    -------
    Normalized
        y of x's shape and type; mean and variance, (C,), of gamma's type (without gamma and beta:
        x's, or float32 beside a 16-bit x). Of an empty batch they are 0.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`.
    """
    key = metadata(x, None, None, None, gamma, beta, epsilon, data_format, True)
    call = _forward_calls.get(key)
    if call is None:
        given = x, gamma, beta
        x = as_array("x", x)
        gamma, beta = as_optional_array("gamma", gamma), as_optional_array("beta", beta)
        problem = forward_problem(x, gamma, beta, epsilon=epsilon, data_format=data_format)
        call = planned(problem, x)
        _forward_calls.remember(key, call, given)
    y, mean, variance, _ = execute.forward(call, x, gamma, beta, out=out)
    return Normalized(y, mean, variance)


def batch_norm_inference(
    x: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Normalise with given statistics: y = gamma * (x - mean) / sqrt(variance + epsilon) + beta.

    Parameters
    ----------
    x : array, rank 2 or more
        float64, float32, float16 or bfloat16, of any strides.
    mean, variance : array, shape (C,)
        Statistics; x's type, or float32 beside a 16-bit x.
    gamma, beta : array, shape (C,), optional
        Scale and offset, of mean's type; 1 and 0 if absent.
    epsilon : float
        Added to the variance; finite and not negative.
    data_format : {"NCX", "NXC"}
        Channel axis 1, or last.
    out : array, optional
        Where to write y; may not overlap x.

    Returns
    -------
    numpy.ndarray
        y, of x's shape and type.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`.
    """
    key = metadata(x, None, mean, variance, gamma, beta, epsilon, data_format, False)
    call = _inference_calls.get(key)
    if call is None:
        given = x, mean, variance, gamma, beta
        x, mean, variance = as_array("x", x), as_array("mean", mean), as_array("variance", variance)
        gamma, beta = as_optional_array("gamma", gamma), as_optional_array("beta", beta)
        problem = inference_problem(
            x, mean, variance, gamma, beta, epsilon=epsilon, data_format=data_format
        )
        call = planned(problem, x)
        _inference_calls.remember(key, call, given)
    return execute.inference(call, x, mean, variance, gamma, beta, out=out)


def reduce(x: Any, dy: Any, mean: Any, *, data_format: str = "NCX") -> ChannelSums:
    """Return the first phase of the backward pass: sum dy and sum dy*(x - mean) per channel.

    Sums of parts of a batch add up to those of the batch; `apply` takes the total.

    Parameters
    ----------
    x, dy : array, rank 2 or more
        Part of the input and of the gradient, of one shape and type.
    mean : array, shape (C,)
        Mean of the whole batch; x's type, or float32 beside a 16-bit x.
    data_format : {"NCX", "NXC"}
        Channel axis 1, or last.

    Returns
    -------
    ChannelSums
        float64 sums and the number of elements per channel.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`.
    """
    x, dy, mean = as_array("x", x), as_array("dy", dy), as_array("mean", mean)
    problem = reduce_problem(x, dy, mean, data_format=data_format)
    return execute.reduce(planned(problem, x, exchanged=True), x, dy, mean)


def apply(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any,
    sums: ChannelSums,
    *,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the second phase of the backward pass: dx of a part, from the sums of the whole.

    Parameters
    ----------
    x, dy, mean, variance, gamma, epsilon, data_format, training, out
        As `batch_norm_backward` (gamma may be None).
    sums : ChannelSums
        From `reduce`, added up over all parts of the batch.

    Returns
    -------
    numpy.ndarray
        dx, of x's shape and type.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`, and for sums of another number of channels.
    """
    x, dy = as_array("x", x), as_array("dy", dy)
    mean, variance = as_array("mean", mean), as_array("variance", variance)
    gamma = as_optional_array("gamma", gamma)
    sums = check_sums(sums)
    problem = apply_problem(
        x,
        dy,
        mean,
        variance,
        gamma,
        sums_shapes=(sums.sum_dy.shape, sums.sum_dy_xmu.shape),
        epsilon=epsilon,
        data_format=data_format,
        training=training,
    )
    call = planned(problem, x, exchanged=True)
    return execute.apply(call, x, dy, mean, variance, gamma, sums, out=out)


def explain(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
    out: np.ndarray | None = None,
) -> Plan:
    """Return the plan that `batch_norm_backward` follows for the same arguments.

    Returns
    -------
    Plan
        ``print`` it to read which kernels run, how the arrays are cut, and why. `out` does not
        change it.
    """
    x, dy = as_array("x", x), as_array("dy", dy)
    mean, variance = as_array("mean", mean), as_array("variance", variance)
    gamma = as_optional_array("gamma", gamma)
    problem = backward_problem(
        x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format, training=training
    )
    return planned(problem, x).plan
