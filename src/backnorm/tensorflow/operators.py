"""Batch normalisation on TensorFlow's tensors: the public functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import tensorflow as tf

from backnorm.arithmetics import Arithmetic, requested
from backnorm.errors import BacknormError
from backnorm.options import Options
from backnorm.problem import Problem, check_epsilon, problem_of
from backnorm.scalars import check_flag
from backnorm.signature import SIGNATURES, Operation
from backnorm.tensorflow import differentiable
from backnorm.tensorflow.checks import as_tensors, check_axis, metadata

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Normalized(NamedTuple):
    """The results of a forward pass in training.

    y has the shape of x. mean and variance have the shape (C,); they are the mean and the biased
    variance of the batch.
    """

    y: Any
    mean: Any
    variance: Any


class Gradients(NamedTuple):
    """Gradients of batch normalisation: dx (x's shape and type), dgamma and dbeta (shape (C,))."""

    dx: Any
    dgamma: Any
    dbeta: Any


def _as_written(function: _Function) -> _Function:
    """Keep AutoGraph from rewriting a function that builds its part of a graph itself."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BacknormError as error:
            # Without this attribute, AutoGraph raises its own StagingError instead.
            error.ag_pass_through = True  # type: ignore[attr-defined]
            raise

    return cast(_Function, tf.autograph.experimental.do_not_convert(guarded))


@_as_written
def batch_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    axis: int = -1,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> Normalized:
    r"""Normalise a batch with its own statistics; differentiable twice, or once if reproducible.

    With M elements per channel::

        mean     = sum(x) / M
        variance = sum((x - mean)**2) / M
        y        = gamma * (x - mean) / sqrt(variance + epsilon) + beta

    Parameters
    ----------
    x : tensor, rank 2 or more
        float64, float32, float16 or bfloat16.
    gamma, beta : tensor or variable, shape (C,), optional
        Scale and offset, 1 and 0 if absent; of x's type, for a 16-bit x also float32.
    epsilon : float
        Added to the variance; finite and not negative.
    axis : int
        The axis of the channels: -1 for NHWC, 1 for NCHW, or any other axis.
    arithmetic : {"float32", "float64"}, optional
        The type in which elements are computed and short runs of terms are added up, also in the
        gradient. None: the setting of `backnorm.arithmetic` when the function is called or traced.
    reproducible : bool
        Whether y, statistics and gradients have the same bits in every layout and for every order
        of the elements of a channel. Sums are then computed with integers, which takes longer, and
        y is differentiable once.

    Returns
    -------
    Normalized
        y of x's shape and type; mean and variance, (C,), of gamma's type (without gamma and beta:
        x's type, or float32 for a 16-bit x). Only y has gradients, which treat mean and variance as
        functions of x. The returned mean and variance have passed `tf.stop_gradient`, as in
        `tf.compat.v1.nn.fused_batch_norm`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        For a wrong type, shape, axis or epsilon. With `reproducible`, also if XLA compiles the
        function, and in forward mode.
    BacknormError
        When a gradient of the third order is computed, or of the second with `reproducible`. In a
        `tf.function`, TensorFlow's runtime raises an error with the same text. For a tensor of
        another `tf.function`, TensorFlow raises its own error (TypeError).

    Notes
    -----
    An eager call works on the tensors' own memory and copies no large tensor. In a `tf.function`
    the call is a `tf.numpy_function` with the same computation, which holds Python's lock between
    kernels, and cannot be saved in a SavedModel. If XLA compiles the function, and in forward mode,
    formulas in TensorFlow's operators run, and compute elements in float64 unless float32 is
    requested.
    """
    tensors = as_tensors(x=x, gamma=gamma, beta=beta)
    values = epsilon, axis, arithmetic, True, reproducible
    options, problem = _checked("forward", tensors, *values)
    statistics = None if problem is None else tf.as_dtype(problem.statistics_dtype)
    return Normalized(*differentiable.forward(**tensors, options=options, statistics=statistics))


@_as_written
def batch_norm_inference(
    x: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    axis: int = -1,
    arithmetic: Arithmetic | None = None,
) -> Any:
    """Normalise with given statistics: y = gamma * (x - mean) / sqrt(variance + epsilon) + beta.

    Parameters
    ----------
    x : tensor, rank 2 or more
        float64, float32, float16 or bfloat16.
    mean, variance : tensor or variable, shape (C,)
        Statistics, of x's type; for a 16-bit x also float32.
    gamma, beta : tensor or variable, shape (C,), optional
        Scale and offset, of mean's type; 1 and 0 if absent.
    epsilon : float
        Added to the variance; finite and not negative.
    axis : int
        The axis of the channels.
    arithmetic : {"float32", "float64"}, optional
        As in `batch_norm`.

    Returns
    -------
    tensor
        y, of x's shape and type. It is differentiable twice with respect to all five tensors.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, BacknormError
        As `batch_norm`.
    """
    tensors = as_tensors(x=x, mean=mean, variance=variance, gamma=gamma, beta=beta)
    options, _ = _checked("inference", tensors, epsilon, axis, arithmetic, training=False)
    return differentiable.inference(**tensors, options=options)


@_as_written
def batch_norm_backward(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    *,
    epsilon: float,
    axis: int = -1,
    training: bool = True,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> Gradients:
    r"""Return the gradients of batch normalisation, which can be differentiated once more.

    With M elements per channel, s = 1/sqrt(variance + epsilon) and c = x - mean::

        dbeta  = sum dy
        dgamma = s * sum dy*c
        dx     = gamma*s * (dy - sum(dy)/M - c * s**2 * sum(dy*c)/M)     training
        dx     = gamma*s * dy                                            frozen statistics


    Parameters
    ----------
    x : tensor, rank 2 or more
        Input of the forward pass: float64, float32, float16 or bfloat16.
    dy : tensor
        Gradient of the loss with respect to the output, of x's shape and type.
    mean, variance : tensor or variable, shape (C,)
        Mean and biased variance of the forward pass, of x's type; for a 16-bit x also float32.
    gamma : tensor or variable, shape (C,), optional
        Scale, of mean's type; 1 if absent.
    epsilon : float
        Added to the variance; finite and not negative.
    axis : int
        The axis of the channels.
    training : bool
        True: mean and variance are functions of x. The gradient of x includes the gradients through
        them, and they have no gradients. False: they do not depend on x, and have gradients like
        any other argument.
    arithmetic : {"float32", "float64"}, optional
        As in `batch_norm`.
    reproducible : bool
        Whether the gradients are reproducible, as in `batch_norm`; such gradients are not
        differentiable.

    Returns
    -------
    Gradients
        dx of x's shape and type; dgamma and dbeta, (C,), of mean's type.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, BacknormError
        As `batch_norm`. In an eager call, also for a channel whose variance + epsilon is finite and
        not positive; in a `tf.function`, TensorFlow's runtime raises an error with the same text.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, section 3.
    """
    tensors = as_tensors(x=x, dy=dy, mean=mean, variance=variance, gamma=gamma)
    values = epsilon, axis, arithmetic, check_flag("training", training), reproducible
    options, _ = _checked("backward", tensors, *values)
    return Gradients(*differentiable.backward(**tensors, options=options))


def _checked(
    operation: Operation,
    tensors: dict[str, Any],
    epsilon: Any,
    axis: Any,
    arithmetic: Any,
    training: bool,
    reproducible: Any = False,
) -> tuple[Options, Problem | None]:
    """Return the checked options and the problem of the call. The problem is None in an eager call.

    In an eager call, the function for NumPy arrays computes the results, and that function makes
    the problem.
    """
    epsilon, x = check_epsilon(epsilon), tensors["x"]
    axis, dtype = check_axis(axis, x), np.dtype(x.dtype.as_numpy_dtype)
    reproducible = check_flag("reproducible", reproducible)
    options = Options(
        epsilon, (axis,), training,
        arithmetic=requested(dtype, arithmetic), reproducible=reproducible,
    )  # fmt: skip
    if tf.executing_eagerly():
        return options, None
    known = SIGNATURES[operation].arranged(metadata(tensors, axis))
    values: Any = {"epsilon": epsilon, "data_format": "NXC", "training": training}
    return options, problem_of(operation, *known, **values)
