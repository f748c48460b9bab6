"""A battery of cases that distinguishes a correct backward pass from a wrong one.

Each case detects a plausible mistake that the other cases may miss. The tests run the battery on
backnorm's operator, which must pass, and on broken kernels, which must fail.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.conformance.axes import BATCH_NORM, Axes, Normalization
from backnorm.conformance.data import (
    ExactCase,
    LayerData,
    exact_data,
    read_only,
    realistic_data,
)
from backnorm.conformance.judge import GRADIENTS, Quantity, check_backward, judge
from backnorm.conformance.ladder import Grade
from backnorm.dtypes import ELEMENT_TYPES, FLOAT64, is_16_bit, statistics_types
from backnorm.reference import Exact

__all__ = [
    "BackwardOperator",
    "Case",
    "Recipe",
    "Variant",
    "cases",
    "computed_in",
    "examine",
    "recipes",
    "variants",
    "with_central_start",
    "with_foreign_statistics",
]

_SHAPES = {"NCX": (6, 5, 3, 4), "NXC": (6, 3, 4, 5)}

_Case = TypeVar("_Case", bound=Any)


class BackwardOperator(Protocol):
    """The calling convention of the operator under test, which returns dx, dgamma and dbeta."""

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


class Variant(NamedTuple):
    """The element types and the layout of a case."""

    dtype: np.dtype
    statistics: np.dtype
    data_format: str

    @property
    def name(self) -> str:
        """The part of a case's name that describes types and layout."""
        return "-".join(map(str, self))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for the functions of `data`."""
        return {
            "dtype": self.dtype,
            "data_format": self.data_format,
            "statistics_dtype": self.statistics,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """The inputs and options of one call of the operator that the battery tests.

    Attributes
    ----------
    name : str
        A unique name, made of the purpose of the case, the types and the layout.
    data : LayerData
        An :class:`ExactCase` is judged by its own results, without allowance for cancellation.
    training : bool
    scaled : bool
        Whether gamma is passed.
    arithmetic : {"float32", "float64"} or None
        The compute dtype of the operator, which determines its error budget; None: see
        :func:`judge.budget`.
    repeats : int
        The arrays of a call have this many copies of the channels of `data`, one after the other.
        The results of every copy are the same.
    """

    name: str
    data: LayerData
    training: bool = True
    scaled: bool = True
    arithmetic: Arithmetic | None = None
    repeats: int = 1

    @property
    def operands(
        self,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """x, dy, mean, variance and gamma, read-only; gamma is None if it is not passed."""
        x, dy, mean, variance, gamma = map(read_only, self.data.backward_inputs)
        return x, dy, mean, variance, gamma if self.scaled else None

    @property
    def inputs(self) -> dict[str, np.ndarray | None]:
        """The operands by name."""
        named = dict(zip(("x", "dy", "mean", "variance", "gamma"), self.operands, strict=True))
        if not self.data.normalization.is_centred:
            del named["mean"]
        return named

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the backward pass."""
        if self.data.normalization != BATCH_NORM:
            return self.data.options
        return {"training": self.training, **self.data.options}


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A case whose data are not drawn yet.

    Attributes
    ----------
    purpose : str
        The first part of the name of the case.
    variant : Variant
    shape : tuple of int
        The shape of x.
    make : callable
        Draws the data: a function with the parameters of :func:`data.realistic_data`.
    training, scaled, repeats
        As in :class:`Case`.
    finish : callable, optional
        Takes the case of a backward pass; returns a case of another operation with its data.
    normalization : Normalization
    """

    purpose: str
    variant: Variant
    shape: tuple[int, ...]
    make: Callable[..., LayerData] = realistic_data
    training: bool = True
    scaled: bool = True
    repeats: int = 1
    finish: Callable[[Case], Case] | None = None
    normalization: Normalization = BATCH_NORM

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"{self.purpose}-{self.variant.name}"

    @property
    def count(self) -> int:
        """M, the number of elements of a row: in batch normalisation, of a channel."""
        return Axes(self.normalization, self.shape, self.variant.data_format).size[1]

    def case(self, seed: int = 0) -> Case:
        """Draw the case. Its values depend only on its name and `seed`."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        options = self.variant.options
        if self.normalization != BATCH_NORM:
            options["normalization"] = self.normalization
        data = self.make(self.shape, rng=rng, **options)
        case = Case(self.name, data, self.training, self.scaled, repeats=self.repeats)
        return case if self.finish is None else self.finish(case)


def cases(seed: int = 0, arithmetic: Arithmetic | None = None) -> Iterator[Case]:
    """Yield the battery: small cases for every type and layout; `seed` determines their values.

    Parameters
    ----------
    seed : int
    arithmetic : {"float32", "float64"}, optional
        The compute dtype of the operator, which determines its error budget. Cases whose elements
        cannot be computed in it are left out. None: all cases, each judged by the default compute
        dtype of its elements.
    """
    return computed_in((recipe.case(seed) for recipe in recipes()), arithmetic)


def recipes() -> Iterator[Recipe]:
    """Yield the recipes of the battery's cases."""
    for variant in variants(_SHAPES):
        yield from _of_variant(variant)


def variants(formats: Iterable[str]) -> Iterator[Variant]:
    """Yield each combination of element type, statistics type and format."""
    for dtype in ELEMENT_TYPES:
        for statistics in statistics_types(dtype):
            for data_format in formats:
                yield Variant(dtype, statistics, data_format)


def computed_in(cases: Iterable[_Case], arithmetic: object) -> Iterator[_Case]:
    """Yield the cases that can be computed in `arithmetic`, as cases of this arithmetic. If
    `arithmetic` is None, yield all cases unchanged.
    """
    name = None if arithmetic is None else check_arithmetic(arithmetic)
    for case in cases:
        if name is None:
            yield case
        elif name == "float64" or case.data.x.dtype != FLOAT64:
            yield replace(case, arithmetic=name)


def examine(operator: BackwardOperator, case: Case) -> dict[str, Grade]:
    """Run `operator` on `case` and judge dx, dgamma and dbeta."""
    data = case.data
    gradients = operator(*case.operands, **case.options)
    if isinstance(data, ExactCase) and case.training and case.scaled:
        known = data.dx, data.dgamma, data.dbeta
        judged = zip(GRADIENTS, gradients, known, strict=True)
        return {name: _judge_known(name, came, right, case) for name, came, right in judged}
    return check_backward(*case.operands, gradients, arithmetic=case.arithmetic, **case.options)


def _judge_known(quantity: Quantity, actual: np.ndarray, expected: np.ndarray, case: Case) -> Grade:
    """Judge a gradient whose exact value is known: one rounding is allowed, and nothing more."""
    known = Exact.of(expected), np.zeros(expected.shape), case.data.x.dtype
    return judge(quantity, actual, *known, arithmetic=case.arithmetic)


def _of_variant(variant: Variant) -> Iterator[Recipe]:
    dtype, _, data_format = variant
    shape = _SHAPES[data_format]
    yield Recipe("exact", variant, shape, exact_data)
    supplied = partial(exact_data, epsilon=2.0**-6)
    yield Recipe("exact-statistics-supplied", variant, shape, supplied)
    yield Recipe("realistic", variant, shape)
    yield Recipe("no-gamma", variant, shape, scaled=False)
    yield Recipe("frozen", variant, shape, training=False)
    weighty = partial(realistic_data, epsilon=0.25, scale=0.25)
    yield Recipe("epsilon-weighs", variant, shape, weighty)
    yield Recipe("foreign-statistics", variant, shape, with_foreign_statistics)
    yield Recipe("one-element", variant, (1, 7) if data_format == "NCX" else (1, 1, 1, 7))
    yield Recipe("constant-channels", variant, shape, _with_constant_channels)
    many = (40, 2, 500) if data_format == "NCX" else (40, 500, 2)
    if is_16_bit(dtype):
        # In this case, the sums of dy and of dy * (x - mean) exceed 65,504, the largest float16.
        large = partial(with_central_start, gradient_scale=1000.0)
        yield Recipe("large-sums", variant, many, large)
    else:
        yield Recipe("many-elements", variant, many, with_central_start)
        ratio = 1e6 if dtype == FLOAT64 else 1e4
        far = partial(realistic_data, ratio=ratio)
        yield Recipe(f"mean-over-deviation-{ratio:g}", variant, shape, far)
        huge = partial(realistic_data, gradient_scale=1e30)
        yield Recipe("huge-gradients", variant, shape, huge)


def with_foreign_statistics(*arguments: Any, **options: Any) -> LayerData:
    """Return data with other statistics than those of x."""
    data = realistic_data(*arguments, **options)
    statistics = data.mean.dtype
    return replace(
        data,
        mean=(data.mean.astype(float) + 0.5 * data.normalization.is_centred).astype(statistics),
        variance=(data.variance.astype(float) * 3.0).astype(statistics),
    )


def with_central_start(*arguments: Any, **options: Any) -> LayerData:
    """Return data in which the first element of each row is the one nearest to the mean.

    A right kernel may subtract the first element before it adds up. The ladder's expected bounds
    hold if this element is at most two standard deviations away from the mean.
    """
    data = realistic_data(*arguments, **options)
    if not data.x.size:
        return data
    rows = [data.axes.rows(array).copy() for array in (data.x, data.dy)]
    wide = rows[0].astype(np.float64)
    nearest = np.abs(wide - wide.mean(1, keepdims=True)).argmin(1)
    each = np.arange(len(wide))
    for array in rows:
        array[each, 0], array[each, nearest] = array[each, nearest], array[:, 0].copy()
    x, dy = map(data.axes.tensor, rows)
    return replace(data, x=x, dy=dy)


def _with_constant_channels(*arguments: Any, **options: Any) -> LayerData:
    data = realistic_data(*arguments, **options)
    kind = data.normalization
    return replace(
        data,
        x=np.full_like(data.x, 3.0),
        mean=np.full_like(data.mean, 3.0 * kind.is_centred),
        variance=np.full_like(data.variance, 9.0 * (not kind.is_centred)),
    )
