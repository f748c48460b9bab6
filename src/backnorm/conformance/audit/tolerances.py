"""Comparisons of a result with the expected result, as in the tests of other software."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from backnorm.conformance.data import LayerData
from backnorm.errors import ArgumentValueError

__all__ = ["MEASURES", "Comparison", "Test", "close", "from_function", "from_text"]


class Comparison(NamedTuple):
    """A result, the expected result, and the inputs."""

    output: str
    actual: np.ndarray
    expected: np.ndarray
    data: LayerData

    @property
    def channel_size(self) -> int:
        """Number of elements per channel, M."""
        return self.data.x.size // self.data.gamma.size


#: A function that returns whether a result is accepted.
Test = Callable[[Comparison], bool]

_Measure = Callable[[np.ndarray, np.ndarray, float], bool]
# The numbers of `close`, and the names of its parameters.
_CLOSE = {"rtol": "rtol", "atol": "atol", "atol/M": "growth", "share": "share"}


def from_text(text: str) -> Test:
    """Return the test that a text describes.

    Parameters
    ----------
    text : str
        ``rtol=..,atol=..,atol/M=..,share=..``, at least one of the first three, as in
        :func:`close` (``atol/M`` is its `growth`); or a name in :data:`MEASURES` with a number.

    Raises
    ------
    ArgumentValueError
        If the text has no valid measure, or a measure has no finite number of at least 0, or a
        share is 0 or more than 1.
    """
    accepted = ", ".join(("rtol=,atol=,atol/M=,share=", *(f"{name}=" for name in MEASURES)))
    try:
        parts = [part.split("=") for part in text.split(",")]
        numbers = {name: float(number) for name, number in parts}
        is_usable = all(0 <= number < math.inf for number in numbers.values())
        if not is_usable or not 0 < numbers.get("share", 1) <= 1:
            raise ValueError
    except ValueError as error:
        raise ArgumentValueError(
            "--audit", "must be a tolerance: a measure and a finite number of at least 0",
            came=repr(text), accepted=f"{accepted}; a share is in (0, 1]",
        ) from error  # fmt: skip
    match sorted(name for name, _ in parts):
        case names if len(numbers) == len(names) and {"share"} < {"share", *names} <= _CLOSE.keys():
            return close(**{_CLOSE[name]: number for name, number in numbers.items()})
        case [name] if name in MEASURES:
            measure, limit = MEASURES[name], numbers[name]
            return lambda c: measure(c.actual, c.expected, limit)
        case names:
            raise ArgumentValueError(
                "--audit", "unknown measure", came=", ".join(names), accepted=accepted
            )


def from_function(function: Callable[[np.ndarray, np.ndarray], object]) -> Test:
    """Return a `Test` that calls `function` with the actual and the expected array.

    The function accepts by returning a true value or None. It rejects by returning a false value,
    or by an AssertionError, like the functions of ``numpy.testing``.
    """

    def test(comparison: Comparison) -> bool:
        try:
            accepted = function(comparison.actual, comparison.expected)
        except AssertionError:
            return False
        return accepted is None or bool(accepted)

    return test


def close(rtol: float = 0.0, atol: float = 0.0, *, growth: float = 0.0, share: float = 1.0) -> Test:
    """Return a test that passes if an error of at most ``atol + growth * M + rtol * abs(expected)``
    is in every element, or in this share of the elements. M is the number of elements per channel.
    """

    def test(comparison: Comparison) -> bool:
        actual, expected = _wide(comparison.actual), _wide(comparison.expected)
        bound = atol + growth * comparison.channel_size + rtol * np.abs(expected)
        return bool((np.abs(actual - expected) <= bound).mean() >= share)

    return test


def _ulp(actual: np.ndarray, expected: np.ndarray, limit: float) -> bool:
    unit = _wide(np.spacing(np.abs(expected)))
    return bool((np.abs(_wide(actual) - _wide(expected)) <= limit * unit).all())


def _rms(actual: np.ndarray, expected: np.ndarray, limit: float) -> bool:
    a, e = _wide(actual), _wide(expected)
    largest = max(np.abs(a).max(), np.abs(e).max(), np.finfo(np.float64).tiny)
    return bool(np.sqrt(np.square(a - e).mean()) <= limit * largest)


def _l2(actual: np.ndarray, expected: np.ndarray, limit: float) -> bool:
    a, e = _wide(actual), _wide(expected)
    return bool(np.linalg.norm(a - e) <= limit * np.linalg.norm(e))


def _cosine(actual: np.ndarray, expected: np.ndarray, limit: float) -> bool:
    return _correlation(_wide(actual), _wide(expected)) >= limit


def _pcc(actual: np.ndarray, expected: np.ndarray, limit: float) -> bool:
    a, e = _wide(actual), _wide(expected)
    return _correlation(a - a.mean(), e - e.mean()) >= limit


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    scale = np.linalg.norm(one) * np.linalg.norm(other)
    return float((one * other).sum() / scale) if scale else 1.0


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


#: Measures by name. Pearson's correlation (`pcc`) and the cosine must be at least the limit (0.99
#: in "pcc 0.99"). The other measures are errors, which must be at most the limit. `ulp` is the
#: error of every element, in ulps of the output's type. `rms` is the root mean square of the
#: errors, divided by the largest magnitude in the actual and the expected array. `l2` is the L2
#: norm of the errors, divided by the L2 norm of the expected array.
MEASURES: dict[str, _Measure] = {
    "pcc": _pcc, "cosine": _cosine, "ulp": _ulp, "rms": _rms, "l2": _l2,
}  # fmt: skip
