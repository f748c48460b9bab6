"""Find the mutants (kernels with a known mistake) that a case rejects, and whether it rejects a
mutant whose mistake is in the formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from backnorm.conformance.battery import Case
from backnorm.conformance.judge import GRADIENTS, Quantity
from backnorm.conformance.ladder import BoundKind, GradientLadder, Rung
from backnorm.conformance.mutants import (
    FORMULA_MUTANTS,
    MUTANTS,
    DbetaWithS,
    ForgetsGamma,
    Kernel,
)

__all__ = ["catches", "proves"]

# `proves` tries the wrong kernels in the order `_ORDER`, and returns at the first that the case
# rejects. Most cases reject the kernels that come first in this order. The outputs of a kernel are
# judged in the order `_OUTPUTS`: first dbeta and dgamma, which are small and so quickly judged, and
# then dx.
_ORDER = sorted(FORMULA_MUTANTS, key=lambda mutant: mutant not in (DbetaWithS, ForgetsGamma))
_OUTPUTS: tuple[Quantity, ...] = "dbeta", "dgamma", "dx"


def catches(case: Case, ladder: GradientLadder) -> list[str]:
    """Return the names of the wrong kernels that this case, on its own, rejects.

    As in :func:`backnorm.conformance.verify.run.verify`, a kernel is rejected if the error of an
    output exceeds the expected bound of the ladder's worst rung, serial sums. Inaccurate kernels
    that are no worse than serial sums therefore pass.
    """
    return [mutant.__name__ for mutant in _rejected(MUTANTS, case, ladder, "serial", "expected")]


def proves(
    case: Case, ladder: GradientLadder, rung: Rung = "serial", kind: BoundKind = "expected"
) -> bool:
    """Whether a case rejects at least one kernel with a wrong formula.

    Parameters
    ----------
    case : Case
    ladder : GradientLadder
        The exact gradients and bounds of the case.
    rung : Rung
        The worst rung that passes.
    kind : {"expected", "guaranteed"}
        The kind of bounds.
    """
    return any(True for _ in _rejected(_ORDER, case, ladder, rung, kind))


def _rejected(
    mutants: Iterable[type[Kernel]],
    case: Case,
    ladder: GradientLadder,
    rung: Rung,
    kind: BoundKind,
) -> Iterator[type[Kernel]]:
    if not case.data.x.size:
        # If x has no elements, every formula gives 0, so the case rejects no mutant.
        return
    for mutant in mutants:
        outputs = mutant()(*case.operands, **case.options)
        named = dict(zip(GRADIENTS, outputs, strict=True))
        if not all(ladder.grade(o, named[o], kind=kind).at_least(rung) for o in _OUTPUTS):
            yield mutant
