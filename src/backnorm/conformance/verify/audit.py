"""Audit a test's tolerance: find wrong kernels that it accepts and right kernels that it rejects.

A test compares a kernel's gradients with a reference. :func:`audit` applies the test, on the test's
own data, to right kernels and to the kernels of `backnorm.conformance.mutants`, which are wrong on
purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.mutants import MUTANTS, Kernel
from backnorm.conformance.verify.audit_data import Run
from backnorm.conformance.verify.tolerances import Comparison, Test
from backnorm.dtypes import FLOAT64

__all__ = ["RIGHT", "Audit", "audit"]


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit.

    Attributes
    ----------
    caught, missed : tuple of type
        The wrong kernels that the test rejects, and those that it accepts.
    invisible : tuple of type
        The wrong kernels whose results are right on such data, so that no tolerance rejects them.
    false_alarms : dict of str to int
        The number of runs in which the test rejects each right kernel.
    runs : int
        The number of runs of each kernel.
    """

    caught: tuple[type[Kernel], ...]
    missed: tuple[type[Kernel], ...]
    invisible: tuple[type[Kernel], ...]
    false_alarms: Mapping[str, int]
    runs: int


def audit(test: Test, runs: Iterable[Run]) -> Audit:
    """Return which wrong kernels a test would accept, and which right kernels it would reject.

    A wrong kernel is caught if the test rejects at least one of its gradients in at least one run.

    Parameters
    ----------
    test : callable
        A test of :mod:`backnorm.conformance.verify.tolerances`, or of a policy.
    runs : iterable of Run
        Runs of :mod:`backnorm.conformance.verify.audit_data`.
    """
    runs = list(runs)
    caught, missed, invisible = [], [], []
    for mutant in MUTANTS:
        results = [_of(mutant(), run) for run in runs]
        if all(map(_is_right, results, runs)):
            invisible.append(mutant)
        elif any(_rejects(test, *each) for each in zip(results, runs, strict=True)):
            caught.append(mutant)
        else:
            missed.append(mutant)
    alarms = {
        name: sum(_rejects(test, _of(kernel(run.inputs[0].dtype), run), run) for run in runs)
        for name, kernel in RIGHT.items()
    }
    return Audit(tuple(caught), tuple(missed), tuple(invisible), alarms, len(runs))


class _Narrow(Kernel):
    """A kernel without a mistake. It computes the inverse, x - mean and the terms of sums in
    float32 (in float64 if x is float64), and adds up the terms by `add`.
    """

    def __init__(self, add: Callable[[np.ndarray], np.ndarray], data: np.dtype) -> None:
        self._add = add
        self._type: Any = np.float64 if data == FLOAT64 else np.float32

    def inverse_deviation(self, variance: Any, epsilon: float, elements: int) -> Any:
        return 1 / np.sqrt(variance.astype(self._type) + self._type(epsilon))

    def deviation(self, x: Any, mean: Any) -> Any:
        return x.astype(self._type) - mean.astype(self._type)

    def sums(self, x: Any, dy: Any, c: Any, mean: Any) -> Any:
        d = dy.astype(self._type)
        return self._add(d), self._add(d * c)


def _serial(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.add.accumulate(terms, axis=1)[:, -1:]
    return total


def _pairwise(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.ascontiguousarray(terms).sum(1, keepdims=True)
    return total


def _wide(terms: np.ndarray) -> np.ndarray:
    total: np.ndarray = terms.astype(np.longdouble).sum(1, keepdims=True)
    return total.astype(np.float64)


#: Kernels without a mistake, which add up terms in different ways. Each key is the name of such a
#: way. Each value is a function that takes an element type and returns the kernel for this type.
RIGHT: Mapping[str, Callable[[np.dtype], Kernel]] = {
    "serial sums": lambda data: _Narrow(_serial, data),
    "pairwise sums": lambda data: _Narrow(_pairwise, data),
    "wider sums": lambda data: _Narrow(_wide, data),
}


def _of(kernel: Kernel, run: Run) -> tuple[np.ndarray, ...]:
    return tuple(kernel(*run.inputs, **run.options))


def _rejects(test: Test, gradients: Iterable[np.ndarray], run: Run) -> bool:
    return any(
        not np.isfinite(actual.astype(np.float64)).all()
        or not test(Comparison(name, actual, expected, run.inputs, run.options["epsilon"]))
        for name, actual, expected in zip(GRADIENTS, gradients, run.right, strict=True)
    )


def _is_right(gradients: Iterable[np.ndarray], run: Run) -> bool:
    """Whether gradients are equal to the right gradients in every element."""
    return all(map(np.array_equal, gradients, run.right))
