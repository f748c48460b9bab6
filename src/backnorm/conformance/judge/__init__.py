"""How far a result may be from the exact one, and whether it is.

Errors are counted in units in the last place (ulp) of the output's type at the exact value. The
one statement of what is allowed is :func:`budget`.
"""

from backnorm.conformance.judge._budget import Budget, Quantity, budget
from backnorm.conformance.judge._passes import (
    check_backward,
    check_double_backward,
    check_forward,
    check_inference,
)
from backnorm.conformance.judge._relu import (
    check_relu_backward,
    check_relu_forward,
    check_relu_inference,
)
from backnorm.conformance.judge._ulps import ulp_error
from backnorm.conformance.judge._verdict import Verdict, judge

__all__ = [
    "Budget",
    "Quantity",
    "Verdict",
    "budget",
    "check_backward",
    "check_double_backward",
    "check_forward",
    "check_inference",
    "check_relu_backward",
    "check_relu_forward",
    "check_relu_inference",
    "judge",
    "ulp_error",
]
