"""Find the wrong formulas, as kernels, that a case rejects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from backnorm.conformance.battery import Case
from backnorm.conformance.formula import BACKWARD, FORWARD, WRONG, Channels, Mistake
from backnorm.conformance.forward_battery import ForwardCase
from backnorm.conformance.ladder import BoundKind, Ladder, Rung

__all__ = ["catches", "proves"]


def catches(case: Case, ladder: Ladder) -> list[str]:
    """Return the names of the mistakes with which a backward pass, on its own, fails this case.

    As in :func:`backnorm.conformance.verify.run.verify`, a kernel is rejected if the error of an
    output exceeds the expected bound of the ladder's worst rung, serial sums. Inaccurate kernels
    that are no worse than serial sums therefore pass.
    """
    return [mistake.name for mistake in _rejected(WRONG, case, ladder, "serial", "expected")]


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
    mistakes = (FORWARD if isinstance(case, ForwardCase) else BACKWARD).mistakes
    # Most cases reject a wrong dbeta, which is quickly computed and judged.
    ordered = sorted(mistakes, key=lambda mistake: mistake.step != "dbeta")
    return any(True for _ in _rejected(ordered, case, ladder, rung, kind))


def _rejected(
    mistakes: Iterable[Mistake], case: Case, ladder: Ladder, rung: Rung, kind: BoundKind
) -> Iterator[Mistake]:
    if not case.data.x.size:
        # If x has no elements, every formula gives 0, so the case rejects no mistake.
        return
    is_forward = isinstance(case, ForwardCase)
    formula = FORWARD if is_forward else BACKWARD
    channels = Channels.of(case.data, training=case.training, scaled=case.scaled, wide=True)
    for mistake in mistakes:
        outputs = formula.wrong(mistake).outputs(case.data, channels)
        judged = ((name, a) for name, a in outputs if name == "y" or not is_forward)
        if not all(ladder.grade(name, a, kind=kind).at_least(rung) for name, a in judged):
            yield mistake
