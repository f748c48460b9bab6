"""Conditions that all failing cases of a run meet, and no passing case."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from backnorm.conformance.battery import Case

__all__ = ["Facts", "condition"]


class Facts(NamedTuple):
    """The facts of a case by which kernels choose a path.

    N is the number of images, C that of channels, M that of the elements of a row (in
    batch normalisation, of a channel), and W the
    size of the last spatial axis; `variance` is the least one that is not 0, and `dy` the largest
    finite magnitude. Parameters are narrow if they have 16 bits; `has_nan` is about dy.
    """

    purpose: str
    gamma: bool
    training: bool
    dtype: str
    is_narrow: bool
    has_nan: bool
    layout: str
    N: int
    C: int
    M: int
    W: int
    pixels: int
    rank: int
    epsilon: float
    variance: float
    dy: float

    @classmethod
    def of(cls, case: Case, purpose: str) -> Facts:
        """Return the facts of a case."""
        data = case.data
        shape, axis, channels = data.x.shape, data.channel_axis, data.gamma.size
        space = 1, *shape[1:axis], *shape[axis + 1 :]
        return cls(
            purpose, case.scaled, case.training, str(data.x.dtype), data.mean.itemsize == 2,
            bool(np.isnan(data.dy).any()), data.data_format, shape[0], channels, data.axes.size[1],
            space[-1], math.prod(space), len(shape), data.epsilon,
            _least(data.variance), _largest(data.dy),
        )  # fmt: skip


def _least(variance: np.ndarray) -> float:
    positive = variance[variance > 0]
    return float(positive.min()) if positive.size else 0.0


def _largest(dy: np.ndarray) -> float:
    finite = np.abs(dy[np.isfinite(dy)])
    return float(finite.max()) if finite.size else 0.0


class _Condition(NamedTuple):
    field: str
    says: str
    holds: Callable[[Any], bool]

    def is_met(self, facts: Facts) -> bool:
        return self.holds(getattr(facts, self.field))


#: The words for a fact that has no order, by its value; `True` also stands for words with a value.
_WORDS: dict[str, dict[object, str]] = {
    "gamma": {True: "gamma is passed", False: "gamma is absent"},
    "training": {True: "the statistics are variables", False: "the statistics are constants"},
    "dtype": {True: "the elements are {}"},
    "is_narrow": {True: "the parameters have 16 bits", False: "the parameters are wider"},
    "has_nan": {True: "dy has a NaN", False: "dy has no NaN"},
    "layout": {True: "the layout is {}"},
}
_SIZES = "epsilon", "rank", "pixels", "N", "C", "M", "W", "variance", "dy"
# Sizes that are no integers.
_REAL = "epsilon", "variance", "dy"
# Sizes that differ from case to case by chance.
_MEASURED = "variance", "dy"


def condition(failing: Collection[Facts], passing: Collection[Facts]) -> str | None:
    """Return the words of the simplest condition that separates cases.

    A condition is about one fact, or about two.

    Parameters
    ----------
    failing, passing : collection of Facts

    Returns
    -------
    str or None
        Each failing case meets the condition, and no passing case. None: there is no such
        condition, or no passing case, so that every condition would separate them.
    """
    if not passing:
        return None
    met = [(each, {k for k, case in enumerate(passing) if each.is_met(case)})
           for each in _conditions(failing)]  # fmt: skip
    for each, wrongly in met:
        if not wrongly:
            return each.says
    # Two conditions on one size are simpler than conditions on two facts.
    pairs = sorted(itertools.combinations(met, 2), key=lambda pair: len({p.field for p, _ in pair}))
    for (one, first), (other, second) in pairs:
        if not first & second:
            return f"{one.says} and {other.says}"
    return None


def _conditions(failing: Collection[Facts]) -> Iterator[_Condition]:
    """Yield the conditions that each of these cases meets."""

    def equal(field: str, says: str, value: object) -> _Condition:
        return _Condition(field, says, partial(operator.eq, value))

    for field, words in _WORDS.items():
        values = {getattr(facts, field) for facts in failing}
        if len(values) == 1:
            (value,) = values
            yield equal(field, words.get(value, words[True]).format(value), value)
    for field in _SIZES:
        sizes = {getattr(facts, field) for facts in failing}
        least, largest = min(sizes), max(sizes)
        if field in _MEASURED and len(failing) == 1:
            continue
        if least == largest:
            yield equal(field, f"{field} = {least:g}", least)
            continue
        yield _Condition(field, f"{field} >= {least:g}", partial(operator.le, least))
        yield _Condition(field, f"{field} <= {largest:g}", partial(operator.ge, largest))
        if field in _REAL:
            continue
        for divisor in (2, 4, 8, 16):
            if all(size % divisor for size in sizes):
                says = f"{field} is odd" if divisor == 2 else f"{divisor} does not divide {field}"
                yield _Condition(field, says, partial(_divides, False, divisor))
        for divisor in (16, 8, 4, 2):
            if not any(size % divisor for size in sizes):
                says = f"{divisor} divides {field}"
                yield _Condition(field, says, partial(_divides, True, divisor))
    purposes = {facts.purpose for facts in failing}
    if len(purposes) == 1:
        (purpose,) = purposes
        yield equal("purpose", f"the data are {purpose}", purpose)


def _divides(expected: bool, divisor: int, size: int) -> bool:
    return (size % divisor == 0) == expected
