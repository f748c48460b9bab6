"""Apply a test to right and wrong kernels.

A test compares a kernel's results with a reference. :func:`audit` applies the test, on the test's
own data, to right kernels and to kernels with the mistakes of :mod:`backnorm.conformance.formula`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from backnorm.conformance.audit.data import Run
from backnorm.conformance.audit.tolerances import Comparison, Test
from backnorm.conformance.formula import (
    BACKWARD,
    FORWARD,
    FORWARD_MISTAKES,
    WRONG,
    Channels,
    Formula,
    Mistake,
)
from backnorm.dtypes import FLOAT32, FLOAT64

__all__ = ["RIGHT", "Audit", "audit"]

# The wrong kernels of each formula. FORWARD is the formula of a layer here, which does not return
# the statistics of the batch, and averages variances that are divided by M - 1.
_WRONG: Mapping[Formula, tuple[Mistake, ...]] = {
    BACKWARD: WRONG,
    FORWARD: tuple(
        mistake
        for mistake in FORWARD_MISTAKES
        if mistake.step not in ("mean", "variance", "inverse")
        and mistake.name != "running-variance-unbiased"
    ),
}


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit.

    Attributes
    ----------
    caught, missed : tuple of Mistake
        The mistakes of the wrong kernels that the test rejects, and of those that it accepts.
    invisible : tuple of Mistake
        The mistakes with which the results are right on such data, so that no tolerance rejects
        them.
    false_alarms : dict of str to int
        The number of runs in which the test rejects each right kernel.
    runs : int
        The number of runs of each kernel.
    """

    caught: tuple[Mistake, ...]
    missed: tuple[Mistake, ...]
    invisible: tuple[Mistake, ...]
    false_alarms: Mapping[str, int]
    runs: int


def audit(test: Test, runs: Iterable[Run]) -> Audit:
    """Return which wrong kernels a test would accept, and which right kernels it would reject.

    A wrong kernel is caught if the test rejects at least one of its results in at least one run.

    Parameters
    ----------
    test : callable
        A test of :mod:`backnorm.conformance.audit.tolerances`, or of a policy.
    runs : iterable of Run
        Runs of :mod:`backnorm.conformance.audit.data`, all of one formula.
    """
    runs = list(runs)
    formula = runs[0].formula
    caught, missed, invisible = (list[Mistake]() for _ in range(3))
    for mistake in _WRONG[formula]:
        is_visible = False
        for run in runs:
            results = run.results(formula.wrong(mistake))
            if all(np.array_equal(results[name], right) for name, right in run.right.items()):
                continue
            is_visible = True
            if _rejects(test, results, run):
                caught.append(mistake)
                break
        else:
            (missed if is_visible else invisible).append(mistake)
    alarms = {
        name: sum(
            _rejects(test, run.results(kernel(run.data.x.dtype, formula)), run) for run in runs
        )
        for name, kernel in RIGHT.items()
    }
    return Audit(tuple(caught), tuple(missed), tuple(invisible), alarms, len(runs))


def _narrow(
    add: Callable[[np.ndarray], np.ndarray], data: np.dtype, formula: Formula = BACKWARD
) -> Any:
    """Return a kernel without a mistake. It computes the inverse, x - mean and the terms of sums in
    float32 (in float64 if x is float64), and adds up the terms by `add`.
    """
    own: Any = FLOAT64 if data == FLOAT64 else FLOAT32

    def inverse_deviation(variance: np.ndarray, epsilon: float, channels: Channels) -> np.ndarray:
        s: np.ndarray = 1 / np.sqrt(variance.astype(own) + own.type(epsilon))
        return s

    def deviation(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
        c: np.ndarray = x.astype(own) - mean.astype(own)
        return c.astype(FLOAT64)

    def sums(channels: Channels, mean: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dy = channels.dy.astype(own)
        return add(dy), add(dy * c.astype(own))

    def statistics(channels: Channels) -> tuple[np.ndarray, np.ndarray]:
        x, count = channels.x.astype(own), own.type(channels.count)
        mean: np.ndarray = add(x) / count
        variance: np.ndarray = add(np.square(x - mean[:, None].astype(own))) / count
        return mean.astype(FLOAT64), variance.astype(FLOAT64)

    if formula is FORWARD:
        return replace(FORWARD, inverse_deviation=inverse_deviation, statistics=statistics)
    return replace(BACKWARD, inverse_deviation=inverse_deviation, deviation=deviation, sums=sums)


def _serial(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.add.accumulate(terms, axis=1)[:, -1]
    return total


def _pairwise(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.ascontiguousarray(terms).sum(1)
    return total


def _wide(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = terms.astype(np.longdouble).sum(1)
    return total.astype(np.float64)


#: Kernels without a mistake, which add up terms in different ways. Each key is the name of such a
#: way. Each value is a function that takes an element type and a formula, by default `BACKWARD`,
#: and returns the kernel of this formula for this type.
RIGHT: Mapping[str, Callable[..., Any]] = {
    "serial sums": partial(_narrow, _serial),
    "pairwise sums": partial(_narrow, _pairwise),
    "wider sums": partial(_narrow, _wide),
}


def _rejects(test: Test, results: Mapping[str, np.ndarray], run: Run) -> bool:
    return any(
        not np.isfinite(results[name].astype(np.float64)).all()
        or not test(Comparison(name, results[name], expected, run.data))
        for name, expected in run.right.items()
    )
