"""Apply a test to right and wrong kernels.

A test compares a kernel's gradients with a reference. :func:`audit` applies the test, on the test's
own data, to right kernels and to kernels with the mistakes of :mod:`backnorm.conformance.formula`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backnorm.conformance.audit.data import Run
from backnorm.conformance.audit.tolerances import Comparison, Test
from backnorm.conformance.battery import BackwardOperator
from backnorm.conformance.formula import BACKWARD, WRONG, Channels, Mistake
from backnorm.conformance.judge import GRADIENTS
from backnorm.dtypes import FLOAT32, FLOAT64

__all__ = ["RIGHT", "Audit", "audit"]


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

    A wrong kernel is caught if the test rejects at least one of its gradients in at least one run.

    Parameters
    ----------
    test : callable
        A test of :mod:`backnorm.conformance.audit.tolerances`, or of a policy.
    runs : iterable of Run
        Runs of :mod:`backnorm.conformance.audit.data`.
    """
    runs = list(runs)
    caught, missed, invisible = [], [], []
    for mistake in WRONG:
        results = [_of(BACKWARD.wrong(mistake), run) for run in runs]
        if all(map(_is_right, results, runs)):
            invisible.append(mistake)
        elif any(_rejects(test, *each) for each in zip(results, runs, strict=True)):
            caught.append(mistake)
        else:
            missed.append(mistake)
    alarms = {
        name: sum(_rejects(test, _of(kernel(run.inputs[0].dtype), run), run) for run in runs)
        for name, kernel in RIGHT.items()
    }
    return Audit(tuple(caught), tuple(missed), tuple(invisible), alarms, len(runs))


def _narrow(add: Callable[[np.ndarray], np.ndarray], data: np.dtype) -> BackwardOperator:
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
#: way. Each value is a function that takes an element type and returns the kernel for this type.
RIGHT: Mapping[str, Callable[[np.dtype], BackwardOperator]] = {
    "serial sums": lambda data: _narrow(_serial, data),
    "pairwise sums": lambda data: _narrow(_pairwise, data),
    "wider sums": lambda data: _narrow(_wide, data),
}


def _of(kernel: BackwardOperator, run: Run) -> tuple[np.ndarray, ...]:
    return kernel(*run.inputs, **run.options)


def _rejects(test: Test, gradients: Iterable[np.ndarray], run: Run) -> bool:
    return any(
        not np.isfinite(actual.astype(np.float64)).all()
        or not test(Comparison(name, actual, expected, run.inputs, run.options["epsilon"]))
        for name, actual, expected in zip(GRADIENTS, gradients, run.right, strict=True)
    )


def _is_right(gradients: Iterable[np.ndarray], run: Run) -> bool:
    """Whether gradients are equal to the right gradients in every element."""
    return all(map(np.array_equal, gradients, run.right))
