"""backnorm: the gradient of training-mode batch normalisation, in every dialect.

The canonical operator works on NumPy arrays::

    dx, dgamma, dbeta = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, epsilon=1e-5)

``backnorm.dialects`` has the same operator in the words of four specifications.
"""

from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError, BacknormError
from backnorm.fused import (
    batch_norm_relu_backward,
    batch_norm_relu_forward,
    batch_norm_relu_inference,
)
from backnorm.limits import offer as _offer_limits
from backnorm.operators import (
    apply,
    batch_norm_backward,
    batch_norm_forward,
    batch_norm_inference,
    explain,
    reduce,
)
from backnorm.plan import Plan
from backnorm.results import (
    ChannelSums,
    Gradients,
    Normalized,
    Rectified,
    RectifiedGradients,
    SecondGradients,
)
from backnorm.second_order import batch_norm_double_backward
from backnorm.threads import get_num_threads, num_threads, set_num_threads

__version__ = "0.1.0"

_offer_limits()

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BacknormError",
    "ChannelSums",
    "Gradients",
    "Normalized",
    "Plan",
    "Rectified",
    "RectifiedGradients",
    "SecondGradients",
    "apply",
    "batch_norm_backward",
    "batch_norm_double_backward",
    "batch_norm_forward",
    "batch_norm_inference",
    "batch_norm_relu_backward",
    "batch_norm_relu_forward",
    "batch_norm_relu_inference",
    "explain",
    "get_num_threads",
    "num_threads",
    "reduce",
    "set_num_threads",
]
