"""A battery of cases that tells a right backward pass from a wrong one.

Each case is there because some plausible mistake shows in it and perhaps nowhere else. The
tests run it on backnorm's operator, which must pass, and on broken kernels, which must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from backnorm._doubledouble import Exact
from backnorm.arithmetics import Arithmetic
from backnorm.conformance._chosen import computed_in
from backnorm.conformance.data import ExactCase, LayerData, exact_data, realistic_data
from backnorm.conformance.judge import Quantity, Verdict, check_backward, judge
from backnorm.dtypes import ELEMENT_TYPES, FLOAT64, is_16_bit, statistics_types

__all__ = ["BackwardOperator", "Case", "cases", "examine"]

_SHAPES = {"NCX": (6, 5, 3, 4), "NXC": (6, 3, 4, 5)}


class BackwardOperator(Protocol):
    """The calling convention of what is examined; returns dx, dgamma, dbeta."""

    def __call__(
        self,
        x: np.ndarray,
        dy: np.ndarray,
        mean: np.ndarray,
        variance: np.ndarray,
        gamma: np.ndarray | None,
        *,
        epsilon: float,
        data_format: str,
        training: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute the gradients; the inputs are read-only."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One call of the operator.

    Attributes
    ----------
    name : str
        Unique; says what the case is about, the types and the layout.
    data : LayerData
        An :class:`ExactCase` is judged by its own results with no allowance for cancellation.
    training : bool
    scaled : bool
        Whether gamma is passed.
    arithmetic : {"float32", "float64"} or None
        What the operator computes in, by which it is judged; None: see :func:`judge.budget`.
    """

    name: str
    data: LayerData
    training: bool = True
    scaled: bool = True
    arithmetic: Arithmetic | None = None


def cases(seed: int = 0, arithmetic: Arithmetic | None = None) -> Iterator[Case]:
    """Yield the battery, small cases for every type and layout; the same for the same seed.

    Parameters
    ----------
    seed : int
    arithmetic : {"float32", "float64"}, optional
        What the operator computes in, and is judged by: those cases whose elements may be computed
        so. None: all, each judged as what its elements are usually computed in.
    """
    return computed_in(_all_cases(seed), arithmetic)


def _all_cases(seed: int) -> Iterator[Case]:
    rng = np.random.default_rng(seed)
    for dtype in ELEMENT_TYPES:
        for statistics in statistics_types(dtype):
            for data_format in _SHAPES:
                yield from _of_types(dtype, statistics, data_format, rng)


def examine(operator: BackwardOperator, case: Case) -> dict[str, Verdict]:
    """Run `operator` on `case` and judge dx, dgamma and dbeta."""
    data = case.data
    x, dy, mean, variance, scale = (_read_only(array) for array in data.backward_inputs)
    gamma = scale if case.scaled else None
    gradients = operator(
        x,
        dy,
        mean,
        variance,
        gamma,
        epsilon=data.epsilon,
        data_format=data.data_format,
        training=case.training,
    )
    if isinstance(data, ExactCase) and case.training and case.scaled:
        dx, dgamma, dbeta = gradients
        return {
            "dx": _judge_known("dx", dx, data.dx, case),
            "dgamma": _judge_known("dgamma", dgamma, data.dgamma, case),
            "dbeta": _judge_known("dbeta", dbeta, data.dbeta, case),
        }
    how = {"training": case.training, "arithmetic": case.arithmetic, **data.options}
    return check_backward(x, dy, mean, variance, gamma, gradients, **how)


def _judge_known(
    quantity: Quantity, actual: np.ndarray, expected: np.ndarray, case: Case
) -> Verdict:
    """Judge against a result known beforehand: one rounding, and no allowance for cancellation."""
    known = Exact.of(expected), np.zeros(expected.shape), case.data.x.dtype
    return judge(quantity, actual, *known, arithmetic=case.arithmetic)


def _of_types(
    dtype: np.dtype, statistics: np.dtype, data_format: str, rng: np.random.Generator
) -> Iterator[Case]:
    types = f"{dtype}-{statistics}-{data_format}"
    shape = _SHAPES[data_format]
    exact = partial(
        exact_data, dtype=dtype, data_format=data_format, rng=rng, statistics_dtype=statistics
    )
    real = partial(
        realistic_data, dtype=dtype, data_format=data_format, rng=rng, statistics_dtype=statistics
    )

    yield Case(f"exact-{types}", exact(shape))
    yield Case(f"exact-statistics-supplied-{types}", exact(shape, epsilon=2.0**-6))
    plain = real(shape)
    yield Case(f"realistic-{types}", plain)
    yield Case(f"no-gamma-{types}", plain, scaled=False)
    yield Case(f"frozen-{types}", plain, training=False)
    yield Case(f"epsilon-weighs-{types}", real(shape, epsilon=0.25, scale=0.25))
    yield Case(
        f"foreign-statistics-{types}",
        replace(
            plain,
            mean=(plain.mean.astype(float) + 0.5).astype(statistics),
            variance=(plain.variance.astype(float) * 3.0).astype(statistics),
        ),
    )
    yield Case(f"one-element-{types}", real((1, 7) if data_format == "NCX" else (1, 1, 1, 7)))
    yield Case(
        f"constant-channels-{types}",
        replace(
            plain,
            x=np.full_like(plain.x, 3.0),
            mean=np.full_like(plain.mean, 3.0),
            variance=np.zeros_like(plain.variance),
        ),
    )
    many = (40, 2, 500) if data_format == "NCX" else (40, 500, 2)
    if is_16_bit(dtype):
        # Sums of dy and of dy * c beyond 65,504, the largest float16.
        yield Case(f"large-sums-{types}", real(many, gradient_scale=1000.0))
    else:
        yield Case(f"many-elements-{types}", real(many))
        ratio = 1e6 if dtype == FLOAT64 else 1e4
        yield Case(f"mean-over-deviation-{ratio:g}-{types}", real(shape, ratio=ratio))
        yield Case(f"huge-gradients-{types}", real(shape, gradient_scale=1e30))


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
