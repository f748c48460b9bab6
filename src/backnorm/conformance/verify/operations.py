"""The operations that are judged, with functions that grade and diagnose their results, and the
wrong formulas that a case rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast, get_args

import numpy as np

from backnorm.conformance.axes import BATCH_NORM, NORMALIZATIONS, Normalization
from backnorm.conformance.battery import Case
from backnorm.conformance.diagnosis import Diagnosis, diagnose, diagnose_forward
from backnorm.conformance.formula import (
    FEW_BITS,
    WRONG,
    Formula,
    Mistake,
    backward_formula,
    forward_formula,
)
from backnorm.conformance.forward_battery import ForwardCase
from backnorm.conformance.judge import (
    FORWARD_RESULTS,
    GRADIENTS,
    LAYER_RESULTS,
    MORE_FORWARD_RESULTS,
    Quantity,
)
from backnorm.conformance.ladder import BoundKind, Ladder, Rung, forward_ladder, gradient_ladder
from backnorm.conformance.layers import LayerCase, diagnose_layer, layer_ladder
from backnorm.conformance.verify.names import OperationName
from backnorm.dtypes import FLOAT32, FLOAT64, is_16_bit

__all__ = [
    "OPERATIONS",
    "VARIED",
    "Operation",
    "RefusedError",
    "catches",
    "nonlinear",
    "operation_of",
    "proves",
    "varied",
    "wrong_kernels",
]

Outputs = Mapping[str, np.ndarray | None]

#: The factor by which an array is varied, except a variance. It is not -1, because `verify` calls a
#: kernel with dy, then with the varied dy, then with dy. If the varied dy were -dy, a kernel that
#: wrongly adds up the results of these three calls would return the correct result.
VARIED = -0.5


class RefusedError(Exception):
    """A subject does not support a case."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: its results, and the functions that judge them.

    Attributes
    ----------
    name : str
    results : tuple of str
        The results, in their order.
    varied : str
        The input that is changed (`varied`) in each case to detect results of an earlier call.
    ladder : callable
        Takes a case; returns the exact results and their bounds.
    types : callable
        Takes a case and the name of a result; returns the element types that it may have.
    diagnosis : callable
        Takes a case and the outputs by name; returns their diagnosis.
    more : tuple of str
        The results that only operators of specifications have.
    normalization : Normalization
    """

    name: OperationName
    results: tuple[Quantity, ...]
    varied: str
    ladder: Callable[[Case], Ladder]
    types: Callable[[Case, str], tuple[np.dtype, ...]]
    diagnosis: Callable[[Case, Outputs], Diagnosis]
    more: tuple[Quantity, ...] = ()
    normalization: Normalization = BATCH_NORM

    @property
    def is_forward(self) -> bool:
        """Whether this is a forward pass."""
        return self.name.endswith("forward")

    @property
    def outputs(self) -> tuple[Quantity, ...]:
        """All results."""
        return self.results + self.more


def varied(case: Case, name: str) -> Case:
    """Return a case with another value of one input, or of epsilon.

    An array is multiplied by :data:`VARIED`, but a variance by 3.
    """
    changed: Any = 4.0 * case.data.epsilon + 0.25
    if name != "epsilon":
        array = getattr(case.data, name)
        factor = 3.0 if name == "variance" else VARIED
        changed = (factor * array.astype(float)).astype(array.dtype)
    values: dict[str, Any] = {name: changed}
    return replace(case, data=replace(case.data, **values))


@np.errstate(all="ignore")
def nonlinear(first: Outputs, second: Outputs) -> dict[str, tuple[float, float]]:
    """Return the gradients that are not linear in dy, with the element that shows it best.

    Parameters
    ----------
    first, second : mapping
        The outputs of a call, and of one with :data:`VARIED` times dy. If they are linear in dy,
        rounding alone can make the second ones differ from this multiple of the first ones.
    """
    found = dict[str, tuple[float, float]]()
    for name in GRADIENTS:
        one, other = first.get(name), second.get(name)
        if one is None or other is None or one.shape != other.shape or not one.size:
            continue
        one, other = one.astype(FLOAT64), other.astype(FLOAT64)
        gap = np.abs(other - VARIED * one)
        if gap.max() > FEW_BITS * np.abs(other).max():
            at = int(gap.argmax())
            found[name] = float(one.flat[at]), float(other.flat[at])
    return found


def operation_of(case: Case) -> Operation:
    """Return the operation of a case."""
    if isinstance(case, LayerCase):
        return OPERATIONS["layer"]
    return OPERATIONS[_name_of(case.data.normalization, isinstance(case, ForwardCase))]


def _ladder_of_gradients(case: Case) -> Ladder:
    return gradient_ladder(case.data, training=case.training, scaled=case.scaled)


def _ladder_of_forward(case: Case) -> Ladder:
    return forward_ladder(case.data, scaled=case.scaled)


def _diagnose_forward(case: Case, outputs: Outputs) -> Diagnosis:
    return diagnose_forward(case.data, outputs, scaled=case.scaled)


def _diagnose_backward(case: Case, outputs: Outputs) -> Diagnosis:
    arrays = outputs.get("dx"), outputs.get("dgamma"), outputs.get("dbeta")
    return diagnose(case.data, arrays, training=case.training, scaled=case.scaled)


def _types_of_gradient(case: Case, name: str) -> tuple[np.dtype, ...]:
    return (case.data.like(name).dtype,)


def _types_of_result(case: Case, name: str) -> tuple[np.dtype, ...]:
    if name == "y":
        return (case.data.x.dtype,)
    statistics = case.data.mean.dtype
    return (statistics, FLOAT32) if is_16_bit(statistics) else (statistics,)


def _types_of_layer(case: Case, name: str) -> tuple[np.dtype, ...]:
    x, statistics = case.data.x.dtype, cast("LayerCase", case).running[0].dtype
    if name == "y":
        # Frameworks that promote types return y in the type of the parameters.
        return (x,) if x == statistics else (x, statistics)
    own = x if name == "dx" else statistics
    return (own, FLOAT32) if is_16_bit(own) and name.startswith("running") else (own,)


def _name_of(kind: Normalization, is_forward: bool) -> OperationName:
    usual = "forward" if is_forward else "backward"
    name = f"{kind.name}-forward" if is_forward else kind.name
    return cast("OperationName", usual if kind == BATCH_NORM else name)


def _operations() -> Iterator[Operation]:
    for kind in NORMALIZATIONS.values():
        yield Operation(
            _name_of(kind, is_forward=False),
            GRADIENTS if kind.is_centred else GRADIENTS[:2],
            "dy",
            _ladder_of_gradients,
            _types_of_gradient,
            _diagnose_backward,
            normalization=kind,
        )
        yield Operation(
            _name_of(kind, is_forward=True),
            FORWARD_RESULTS if kind.is_centred else ("y", "variance"),
            "x",
            _ladder_of_forward,
            _types_of_result,
            _diagnose_forward,
            MORE_FORWARD_RESULTS if kind == BATCH_NORM else ("inverse_deviation",),
            kind,
        )
    yield Operation(
        "layer",
        LAYER_RESULTS,
        "dy",
        lambda case: layer_ladder(cast("LayerCase", case)),
        _types_of_layer,
        lambda case, outputs: diagnose_layer(cast("LayerCase", case), outputs),
    )


#: The operations by name.
OPERATIONS: Mapping[str, Operation] = MappingProxyType({each.name: each for each in _operations()})
assert set(OPERATIONS) == set(get_args(OperationName))


def wrong_kernels(case: Case) -> Sequence[Mistake]:
    """Return the mistakes of wrong kernels that :func:`catches` tries on a backward case."""
    if case.data.normalization == BATCH_NORM:
        return WRONG
    formula = _formula_of(case)
    known = formula.known_mistakes(formula.inputs(case.data, scaled=case.scaled))
    return tuple({mistake.name: mistake for mistake in known}.values())


def catches(case: Case, ladder: Ladder) -> list[str]:
    """Return the names of the mistakes with which a backward pass, on its own, fails this case.

    As in :func:`backnorm.conformance.verify.run.verify`, a kernel is rejected if the error of an
    output exceeds the expected bound of the ladder's worst rung, serial sums. Inaccurate kernels
    that are no worse than serial sums therefore pass.
    """
    rejected = _rejected(wrong_kernels(case), case, ladder, "serial", "expected")
    return [mistake.name for mistake in rejected]


def proves(case: Case, ladder: Ladder, rung: Rung = "serial", kind: BoundKind = "expected") -> bool:
    """Whether a case rejects at least one kernel with a wrong formula.

    In a forward pass, only y counts: a wrong mean or variance that is returned says nothing about
    the formula of y.

    Parameters
    ----------
    case : Case
    ladder : Ladder
        The exact results and bounds of the case.
    rung : Rung
        The worst rung that passes.
    kind : {"expected", "guaranteed"}
        The kind of bounds.
    """
    # Most cases reject a wrong dbeta or dgamma, which are quickly computed and judged.
    quick = [name for name in ("dbeta", "dgamma") if name in operation_of(case).results]
    mistakes = [m for m in _formula_of(case).mistakes if m.step != "dbeta" or m.step in quick]
    ordered = sorted(mistakes, key=lambda m: quick.index(m.step) if m.step in quick else 2)
    return any(True for _ in _rejected(ordered, case, ladder, rung, kind))


def _rejected(
    mistakes: Iterable[Mistake], case: Case, ladder: Ladder, rung: Rung, kind: BoundKind
) -> Iterator[Mistake]:
    if not case.data.x.size:
        # If x has no elements, every formula gives 0, so the case rejects no mistake.
        return
    is_forward, formula = isinstance(case, ForwardCase), _formula_of(case)
    channels = formula.inputs(case.data, training=case.training, scaled=case.scaled, wide=True)
    for mistake in mistakes:
        outputs = formula.wrong(mistake).outputs(case.data, channels)
        judged = ((name, a) for name, a in outputs if name == "y" or not is_forward)
        if not all(ladder.grade(name, a, kind=kind).at_least(rung) for name, a in judged):
            yield mistake


def _formula_of(case: Case) -> Formula:
    is_forward = isinstance(case, ForwardCase)
    return (forward_formula if is_forward else backward_formula)(case.data.normalization)
