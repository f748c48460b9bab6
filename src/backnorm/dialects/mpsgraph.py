"""Apple's MPSGraph: normalizationGradient, normalizationGammaGradient, normalizationBetaGradient.

Source: MPSGraphNormalizationOps.h of the macOS 11 SDK and Apple's documentation of the three
methods. Neither source gives formulas or element types. The element types are those with which
PyTorch calls the methods (aten/src/ATen/native/mps/operations/Normalization.mm, commit 013c316).
The formulas are chosen so that PyTorch's calls return the gradients of training-mode batch
normalisation. Arguments are named after the labels of the Objective-C selectors. Statistics and
parameters have the rank of the source, and size 1 in the reduced axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._call import Call
from backnorm.dialects._parts import input_gradient, parameter_gradients
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, data, kept
from backnorm.dialects.schema import FormatSpec, Phrases, Rules, type_rules

__all__ = [
    "normalizationBetaGradient",
    "normalizationGammaGradient",
    "normalizationGradient",
]

RULES = Rules(
    dialect="mpsgraph",
    source="Metal Performance Shaders Graph, {op} (macOS 11)",
    type_rules=type_rules(f32="f32", f16="f16", bf16="bf16"),
    formats=(FormatSpec("any axes", "NCX", is_any=True),),
    ranks=(1, 0),
    phrases=Phrases(
        channel_rank="must have the rank of {x}",
        channel_size="must have size 1 in reductionAxes, and the size of {x} in the other axes",
    ),
)

Gradient = Annotated[ArrayLike, data("dy", "T")]
Source = Annotated[ArrayLike, data("x", "T")]
Mean = Annotated[ArrayLike, kept("mean", "T")]
Variance = Annotated[ArrayLike, kept("variance", "T")]
Axes = Annotated[Sequence[int], attribute("axes", "reduced_axes")]
Epsilon = Annotated[float, attribute("f32", "epsilon", range="not negative")]
Name = Annotated[str | None, attribute("string")]


def _beta_gradient(call: Call) -> np.ndarray:
    return parameter_gradients(call)[1]


def _gamma_gradient(call: Call) -> np.ndarray:
    return parameter_gradients(call)[0]


@operator(RULES, "reduce", compute=_beta_gradient, betaGradient=kept("dbeta", "T"))
def normalizationBetaGradient(
    incomingGradientTensor: Gradient,
    sourceTensor: Source,
    reductionAxes: Axes,
    name: Name = None,
    *,
    arithmetic: Arithmetic | None = None,
) -> np.ndarray:
    """Return the gradient of the offset: the sum of incomingGradientTensor.

    Parameters
    ----------
    incomingGradientTensor, sourceTensor : array of rank 1 or more
        Gradient of the output, and input of the forward: of one shape and element type (f32, f16
        or bf16). The values of `sourceTensor` are not used.
    reductionAxes : sequence of int
        The axes that are reduced: different, and not negative. For batch normalisation, all axes
        but the channel axis.
    name : str, optional
        Name of the operation; ignored.
    arithmetic : {"float32", "float64"}, optional
        An extension of backnorm: the compute type of elements; see `backnorm.arithmetic`.

    Returns
    -------
    numpy.ndarray
        The type is that of `sourceTensor`, and the size is 1 in the reduced axes. The sum is
        computed in a wider type and rounded once.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument does not match its description; the error names the argument.
    """


@operator(RULES, "reduce", compute=_gamma_gradient, gammaGradient=kept("dgamma", "T"))
def normalizationGammaGradient(
    incomingGradientTensor: Gradient,
    sourceTensor: Source,
    meanTensor: Mean,
    varianceTensor: Variance,
    reductionAxes: Axes,
    epsilon: Epsilon,
    name: Name = None,
    *,
    arithmetic: Arithmetic | None = None,
) -> np.ndarray:
    """Return the gradient of the scale.

    ::

        sum incomingGradientTensor * (sourceTensor - meanTensor) / sqrt(varianceTensor + epsilon)

    Parameters
    ----------
    incomingGradientTensor, sourceTensor, reductionAxes, name, arithmetic
        As `normalizationBetaGradient`; here the values of `sourceTensor` are used.
    meanTensor, varianceTensor : array, size 1 in the reduced axes
        Mean and biased variance of `sourceTensor`, of its type and rank.
    epsilon : float, finite and not negative, rounded to float32
        Added to the variance.

    Returns
    -------
    numpy.ndarray
        As `normalizationBetaGradient`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an argument does not match its description, or the sum of a variance and epsilon is not
        positive; the error names the argument.
    """


@operator(RULES, "apply", compute=input_gradient, gradient=data("dx", "T"))
def normalizationGradient(
    incomingGradientTensor: Gradient,
    sourceTensor: Source,
    meanTensor: Mean,
    varianceTensor: Variance,
    gammaTensor: Annotated[ArrayLike, kept("gamma", "T")] | None,
    gammaGradientTensor: Annotated[ArrayLike, kept("dgamma", "T")] | None,
    betaGradientTensor: Annotated[ArrayLike, kept("dbeta", "T")] | None,
    reductionAxes: Axes,
    epsilon: Epsilon,
    name: Name = None,
    *,
    arithmetic: Arithmetic | None = None,
) -> np.ndarray:
    """Return the gradient with respect to sourceTensor, in training.

    With M elements per channel, s = 1 / sqrt(varianceTensor + epsilon) and
    c = sourceTensor - meanTensor::

        gammaTensor*s * (incomingGradientTensor - betaGradientTensor/M
                         - c*s * gammaGradientTensor/M)

    Parameters
    ----------
    incomingGradientTensor, sourceTensor, meanTensor, varianceTensor
        As `normalizationGammaGradient`.
    reductionAxes, epsilon, name, arithmetic
        As `normalizationGammaGradient`.
    gammaTensor : array, size 1 in the reduced axes, optional
        Scale. None: 1.
    gammaGradientTensor, betaGradientTensor : array, size 1 in the reduced axes, optional
        The results of `normalizationGammaGradient` and `normalizationBetaGradient`. None: that
        gradient is computed from the other arguments, without rounding. Apple's documentation only
        says that None is accepted.

    Returns
    -------
    numpy.ndarray
        The shape, type and memory order are those of `sourceTensor`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `normalizationGammaGradient`.

    Notes
    -----
    The gradients of the parameters are rounded to the element type, which loses digits in 16 bits.
    A dialect with one operator for all gradients does not round them before it computes the
    gradient of x.
    """
