"""The operations that are judged, with functions that grade and diagnose their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.diagnosis import Diagnosis, diagnose
from backnorm.conformance.formula import rows_of
from backnorm.conformance.forward_battery import ForwardCase
from backnorm.conformance.forward_diagnosis import (
    FORWARD_MISTAKES,
    diagnose_forward,
    normalization,
)
from backnorm.conformance.judge import FORWARD_RESULTS, GRADIENTS, Quantity
from backnorm.conformance.ladder import ForwardLadder, Grade, GradientLadder
from backnorm.conformance.verify.proof import proves
from backnorm.dtypes import FLOAT32, is_16_bit, rounded
from backnorm.reference import Exact

__all__ = ["OPERATIONS", "Ladder", "Operation", "OperationName", "operation_of"]

OperationName = Literal["backward", "forward"]
Outputs = Mapping[str, np.ndarray | None]


class Ladder(Protocol):
    """The exact results of a call, by which other results are graded."""

    def value(self, name: Quantity) -> Exact:
        """Return the exact value of a result."""

    def grade(self, name: Quantity, actual: np.ndarray) -> Grade:
        """Return the best rung whose bound holds for every element of `actual`."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: its results, and the functions that judge them.

    Attributes
    ----------
    name : {"backward", "forward"}
    results : tuple of str
        The results, in their order.
    varied : str
        The input that is changed (`varied_input`) to detect results of an earlier call.
    judged : callable
        Takes a case; returns the exact results and their bounds, and a function that says whether a
        wrong formula fails the case.
    types : callable
        Takes a case and the name of a result; returns the element types that it may have.
    diagnosis : callable
        Takes a case and the outputs by name; returns their diagnosis.
    """

    name: OperationName
    results: tuple[Quantity, ...]
    varied: str
    judged: Callable[[Case], tuple[Ladder, Callable[[], bool]]]
    types: Callable[[Case, str], tuple[np.dtype, ...]]
    diagnosis: Callable[[Case, Outputs], Diagnosis]


def varied_input(array: np.ndarray) -> np.ndarray:
    """Return -0.5 * `array`, an input with other gradients, and another mean and variance.

    The factor is not -1, because `verify` calls a kernel with dy, then with the varied dy, then
    with dy. If the varied dy were -dy, a kernel that wrongly adds up the results of these three
    calls would return the correct result.
    """
    return (-0.5 * array.astype(float)).astype(array.dtype)


def operation_of(case: Case) -> Operation:
    """Return the operation of a case."""
    return OPERATIONS["forward" if isinstance(case, ForwardCase) else "backward"]


def _judged_backward(case: Case) -> tuple[Ladder, Callable[[], bool]]:
    ladder = GradientLadder.of(*case.operands, **case.options)
    return ladder, lambda: proves(case, ladder)


def _diagnose_backward(case: Case, outputs: Outputs) -> Diagnosis:
    arrays = outputs.get("dx"), outputs.get("dgamma"), outputs.get("dbeta")
    return diagnose(case.data, arrays, training=case.training, scaled=case.scaled)


def _judged_forward(case: Case) -> tuple[Ladder, Callable[[], bool]]:
    inputs = case.inputs
    ladder = ForwardLadder.of(case.data.x, inputs["gamma"], inputs["beta"], **case.options)
    return ladder, lambda: _proves_forward(case, ladder)


def _proves_forward(case: Case, ladder: ForwardLadder) -> bool:
    """Whether at least one mistake in the formula of y makes a forward pass fail the case."""
    return bool(case.data.x.size) and any(
        not ladder.grade(name, actual).at_least("serial") for name, actual in _mistaken(case)
    )


def _mistaken(case: Case) -> Iterator[tuple[Quantity, np.ndarray]]:
    """For each mistake in the formula of y, yield the y of a forward pass with this mistake."""
    data, axis = case.data, case.data.channel_axis
    first = np.moveaxis(data.x, axis, 0)
    rows = rows_of(data.x, axis)
    centred = rows - rows.mean(1, keepdims=True)
    for mistake in FORWARD_MISTAKES:
        if mistake.step in ("mean", "variance"):
            continue
        numbers = normalization(data, (mistake,), scaled=case.scaled)
        assert numbers.gain is not None
        assert numbers.offset is not None
        with np.errstate(all="ignore"):
            y = numbers.gain[:, None] * centred + numbers.offset[:, None]
        yield "y", rounded(np.moveaxis(y.reshape(first.shape), 0, axis), data.x.dtype)


def _types_of_gradient(case: Case, name: str) -> tuple[np.dtype, ...]:
    return (case.data.like(name).dtype,)


def _types_of_result(case: Case, name: str) -> tuple[np.dtype, ...]:
    if name == "y":
        return (case.data.x.dtype,)
    statistics = case.data.mean.dtype
    return (statistics, FLOAT32) if is_16_bit(statistics) else (statistics,)


#: The operations by name.
OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "backward": Operation(
            "backward", GRADIENTS, "dy", _judged_backward, _types_of_gradient, _diagnose_backward
        ),
        "forward": Operation(
            "forward",
            FORWARD_RESULTS,
            "x",
            _judged_forward,
            _types_of_result,
            lambda case, outputs: diagnose_forward(case.data, outputs, scaled=case.scaled),
        ),
    }
)
assert tuple(OPERATIONS) == get_args(OperationName)
