"""backnorm: the gradient of training-mode batch normalisation, in every dialect.

The canonical operator works on NumPy arrays::

    dx, dgamma, dbeta = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, epsilon=1e-5)

``backnorm.dialects`` has the same operator in the forms that other specifications define.
"""

from backnorm.activations import Activation
from backnorm.arithmetics import arithmetic
from backnorm.engines import engine
from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError, BacknormError
from backnorm.interfaces import Plan
from backnorm.operators import (
    apply,
    apply_forward,
    batch_norm_backward,
    batch_norm_forward,
    batch_norm_inference,
    explain,
    reduce,
    reduce_forward,
)
from backnorm.reproducible_sums import ReproducibleMoments, ReproducibleSums
from backnorm.results import (
    ChannelMoments,
    ChannelSums,
    Gradients,
    GradientsWithResidual,
    Normalized,
    NormalizedWithMask,
    SecondGradients,
)
from backnorm.second_order import batch_norm_double_backward
from backnorm.threads import get_num_threads, num_threads, set_num_threads
from backnorm.version import __version__ as __version__

__all__ = [
    "Activation",
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BacknormError",
    "ChannelMoments",
    "ChannelSums",
    "Gradients",
    "GradientsWithResidual",
    "Normalized",
    "NormalizedWithMask",
    "Plan",
    "ReproducibleMoments",
    "ReproducibleSums",
    "SecondGradients",
    "apply",
    "apply_forward",
    "arithmetic",
    "batch_norm_backward",
    "batch_norm_double_backward",
    "batch_norm_forward",
    "batch_norm_inference",
    "engine",
    "explain",
    "get_num_threads",
    "num_threads",
    "reduce",
    "reduce_forward",
    "set_num_threads",
]
