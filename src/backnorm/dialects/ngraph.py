"""nGraph, opset v0.

Source: the nGraph documentation of BatchNormTrainingBackprop, BatchNormTraining and
BatchNormInference, and the checks in the code of nGraph's nodes of these names.

In the documentation, input is the first argument; in the nodes, and therefore in serialised graphs,
gamma and beta come first. The operators here take the inputs in the documented order; the function
`from_node_order` takes the inputs in the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data
from backnorm.dialects.schema import FormatSpec, Phrases, Rules, type_rules

__all__ = [
    "BatchNormInference",
    "BatchNormTraining",
    "BatchNormTrainingBackprop",
    "from_node_order",
]

R = TypeVar("R")

RULES = Rules(
    dialect="ngraph",
    source="nGraph 0.x documentation, {op} v0",
    type_rules=type_rules(f16="f16", bf16="bf16", f32="f32", f64="f64"),
    formats=(FormatSpec("NC...", "NCX"),),
    min_channels=1,
    phrases=Phrases(
        rank="must have rank of at least 2",
        gradient_shape="shape of delta does not match the shape of the input data",
        gradient_type="element type for input does not match element type for delta",
        channel_rank="shape for gamma/beta/mean/variance does not have rank 1",
        channel_size=(
            "input channel dimension ({channels}) does not match shape for "
            "gamma/beta/mean/variance {shape}"
        ),
        channel_shapes="shapes for gamma/beta/mean/variance do not match",
    ),
)

Input = Annotated[ArrayLike, data("x", "T")]
Gamma = Annotated[ArrayLike, channel("gamma", "T")]
Beta = Annotated[ArrayLike, channel("beta", "T")]
Mean = Annotated[ArrayLike, channel("mean", "T")]
Variance = Annotated[ArrayLike, channel("variance", "T")]
Epsilon = Annotated[float, attribute("f64", "epsilon", range="not negative")]


@operator(
    RULES,
    "backward",
    input_delta=data("dx", "T"),
    gamma_delta=channel("dgamma", "T"),
    beta_delta=channel("dbeta", "T"),
)
def BatchNormTrainingBackprop(
    input: Input,
    gamma: Gamma,
    beta: Beta,
    mean: Mean,
    variance: Variance,
    delta: Annotated[ArrayLike, data("dy", "T")],
    epsilon: Epsilon,
    *,
    input_delta: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of batch normalisation in training.

    With M elements per channel, s = 1 / sqrt(variance + epsilon) and c = input - mean::

        beta_delta  = sum delta
        gamma_delta = s * sum delta*c
        input_delta = gamma*s * (delta - beta_delta/M - c*s * gamma_delta/M)

    Parameters
    ----------
    input : array of T, rank 2 or more
        input data, (•, C, …)
    gamma : array of T, shape (C,)
        scale
    beta : array of T, shape (C,)
        offset; checked, but not used
    mean : array of T, shape (C,)
        mean of the batch
    variance : array of T, shape (C,)
        biased
    delta : array of T
        gradient of the output; the documentation also calls it normalized_delta
    epsilon : float, finite and not negative
        added to the variance, as a double
    input_delta : numpy.ndarray, optional
        memory for this output; may be delta, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    input_delta : array of T
        gradient of input
    gamma_delta : array of T, shape (C,)
        gradient of gamma
    beta_delta : array of T, shape (C,)
        gradient of beta

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f16 with f16, bf16 with bf16, f32 with
    f32, f64 with f64.

    - The function from_node_order takes arguments in the order of nGraph's node: gamma, beta,
      input, mean, variance, delta.
    - An empty batch (N = 0) gives zeros for gamma_delta and beta_delta.
    """


@operator(
    RULES,
    "forward",
    normalized=data("y", "T"),
    batch_mean=channel("mean", "T"),
    batch_variance=channel("variance", "T"),
)
def BatchNormTraining(
    input: Input,
    gamma: Gamma,
    beta: Beta,
    epsilon: Epsilon,
    *,
    normalized: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batch normalisation in training.

    ::

        normalized = gamma * (input - batch_mean) / sqrt(batch_variance + epsilon) + beta

    Parameters
    ----------
    input : array of T, rank 2 or more
        input data, (•, C, …)
    gamma : array of T, shape (C,)
        scale
    beta : array of T, shape (C,)
        offset
    epsilon : float, finite and not negative
        added to the variance, as a double
    normalized : numpy.ndarray, optional
        memory for this output; may be input, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    normalized : array of T
        normalised output
    batch_mean : array of T, shape (C,)
        mean of the batch
    batch_variance : array of T, shape (C,)
        biased

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f16 with f16, bf16 with bf16, f32 with
    f32, f64 with f64.

    - The function from_node_order takes arguments in the order of nGraph's node: gamma, beta,
      input.
    """


@operator(RULES, "inference", normalized=data("y", "T"))
def BatchNormInference(
    input: Input,
    gamma: Gamma,
    beta: Beta,
    mean: Mean,
    variance: Variance,
    epsilon: Epsilon,
    *,
    normalized: np.ndarray | None = None,
    arithmetic: Arithmetic | None = None,
) -> np.ndarray:
    """Batch normalisation with given statistics.

    ::

        normalized = gamma * (input - mean) / sqrt(variance + epsilon) + beta

    Parameters
    ----------
    input : array of T, rank 2 or more
        input data, (•, C, …)
    gamma : array of T, shape (C,)
        scale
    beta : array of T, shape (C,)
        offset
    mean : array of T, shape (C,)
        mean to normalise with
    variance : array of T, shape (C,)
        biased variance to normalise with
    epsilon : float, finite and not negative
        added to the variance, as a double
    normalized : numpy.ndarray, optional
        memory for this output; may be input, which is then overwritten
    arithmetic : {"float32", "float64"}, optional
        an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

    Returns
    -------
    normalized : array of T
        normalised output

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        if an argument does not match its description; the error names the argument

    Notes
    -----
    Element types of data and of per-channel tensors: f16 with f16, bf16 with bf16, f32 with
    f32, f64 with f64.

    - The function from_node_order takes arguments in the order of nGraph's node: gamma, beta,
      input, mean, variance.
    """


def from_node_order(
    operator: Callable[..., R],
    gamma: ArrayLike,
    beta: ArrayLike,
    input: ArrayLike,
    *others: Any,
    **options: Any,
) -> R:
    """Call an operator of nGraph with the inputs in the order of its node.

    Parameters
    ----------
    operator : callable
        An operator of this module, such as `BatchNormTraining`.
    gamma, beta, input : array
        As the operator's.
    *others, **options
        The operator's arguments that follow these three.

    Returns
    -------
    numpy.ndarray or tuple of numpy.ndarray
        As the operator.
    """
    return operator(input, gamma, beta, *others, **options)
