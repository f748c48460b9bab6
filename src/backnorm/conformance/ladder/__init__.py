"""A ladder of error bounds, which grades an output by the arithmetic that explains its errors.

Each rung is an arithmetic, that is, a way to compute elements and sums. An output is on the best
rung whose bound holds for all of its elements. ``docs/tolerance.md`` derives every bound.
"""

from backnorm.conformance._grade import (
    KINDS,
    RUNGS,
    BoundKind,
    Grade,
    Rung,
    Status,
    is_at_least,
    rungs,
)
from backnorm.conformance.ladder._forward import ForwardLadder, grade_forward
from backnorm.conformance.ladder._gradients import Bound, GradientLadder, bound, grade_backward
from backnorm.conformance.ladder._ladder import Ladder
from backnorm.conformance.ladder._layer import LayerLadder
from backnorm.conformance.ladder._rows import forward_ladder, gradient_ladder

__all__ = [
    "KINDS",
    "RUNGS",
    "Bound",
    "BoundKind",
    "ForwardLadder",
    "Grade",
    "GradientLadder",
    "Ladder",
    "LayerLadder",
    "Rung",
    "Status",
    "bound",
    "forward_ladder",
    "grade_backward",
    "grade_forward",
    "gradient_ladder",
    "is_at_least",
    "rungs",
]
