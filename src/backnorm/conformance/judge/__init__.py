"""Judge results by their distance from the exact results.

Errors are in units in the last place (ulp) of the output's type at the exact value. Only
:func:`budget` defines the allowed error.
"""

from backnorm.conformance._ulps import ulp_error
from backnorm.conformance.judge._budget import (
    FORWARD_RESULTS,
    GRADIENTS,
    LAYER_RESULTS,
    MORE_FORWARD_RESULTS,
    Budget,
    Quantity,
    budget,
)
from backnorm.conformance.judge._judge import judge
from backnorm.conformance.judge._passes import (
    check_backward,
    check_double_backward,
    check_forward,
    check_inference,
)

__all__ = [
    "FORWARD_RESULTS",
    "GRADIENTS",
    "LAYER_RESULTS",
    "MORE_FORWARD_RESULTS",
    "Budget",
    "Quantity",
    "budget",
    "check_backward",
    "check_double_backward",
    "check_forward",
    "check_inference",
    "judge",
    "ulp_error",
]
