"""The oracle: the formulas of batch normalisation in double-double arithmetic, slow and simple.

With M elements per channel, c = x - mean and s = 1 / sqrt(variance + epsilon)::

    dbeta  = sum(dy)
    dgamma = s * sum(dy * c)
    dx     = gamma * s * (dy - sum(dy)/M - c * s**2 * sum(dy * c)/M)      training
    dx     = gamma * s * dy                                               statistics are constants

    y      = gamma * s * c + beta

For each element of a result, T is the sum of the magnitudes of its formula's terms. If the terms
cancel, the element is much smaller than T. Therefore the judge (:mod:`backnorm.conformance.judge`)
allows rounding errors in proportion to T.

The oracle computes with about 106 significant bits, so it can judge float64 results. The oracle
works in small blocks, so memory beyond the results does not grow with the problem. If a result is
not finite, it is the infinity or NaN that the same formula gives in float64.
"""

from backnorm.reference._doubledouble import Exact, FloatArray
from backnorm.reference._masks import counting, masked, pack_mask, unpack_mask
from backnorm.reference._options import BackwardOptions, ForwardOptions, SecondOptions
from backnorm.reference._passes import backward, forward, inference
from backnorm.reference._results import (
    ExactGradients,
    ExactNormalized,
    ExactOutput,
    ExactSecondGradients,
)
from backnorm.reference._rows import backward_of_rows, forward_of_rows
from backnorm.reference._scales import GradientScales, Scale, gradient_scales
from backnorm.reference._second_order import double_backward

__all__ = [
    "BackwardOptions",
    "Exact",
    "ExactGradients",
    "ExactNormalized",
    "ExactOutput",
    "ExactSecondGradients",
    "FloatArray",
    "ForwardOptions",
    "GradientScales",
    "Scale",
    "SecondOptions",
    "backward",
    "backward_of_rows",
    "counting",
    "double_backward",
    "forward",
    "forward_of_rows",
    "gradient_scales",
    "inference",
    "masked",
    "pack_mask",
    "unpack_mask",
]
