"""Which wrong kernels a case rejects."""

from __future__ import annotations

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.judge._ulps import absolute_error
from backnorm.conformance.ladder import GradientLadder
from backnorm.conformance.mutants import MUTANTS

__all__ = ["catches"]


def catches(case: Case, ladder: GradientLadder) -> list[str]:
    """Return the names of the wrong kernels of which the case alone rejects an output.

    An output is rejected that is beyond the expected bound of the worst rung, serial sums, as in
    :func:`backnorm.conformance.verify.run.verify`. So kernels that are less accurate than others,
    and no worse than serial sums, are not among them.
    """
    allowed = [list(ladder.allowances(name).values())[-1] for name in GRADIENTS]
    found = []
    for mutant in MUTANTS:
        gradients = mutant()(*case.operands, **case.options)
        with np.errstate(all="ignore"):
            within = (
                absolute_error(actual, ladder.value(name), ladder.element_type(name)) <= bound
                for name, actual, bound in zip(GRADIENTS, gradients, allowed, strict=True)
            )
            if not all(bool(each.all()) for each in within):
                found.append(mutant.__name__)
    return found
