"""A formula in steps, and mistakes in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from backnorm.conformance.data import LayerData
from backnorm.conformance.formula._channels import Channels
from backnorm.conformance.judge import Quantity
from backnorm.dtypes import FLOAT64, rounded

Array = np.ndarray
#: Arrays by name: numbers of shape (C,) by the name of a coefficient or of a result.
Values = Mapping[str, Array]

#: If the relative errors of a wrong output are at most this number, the diagnosis is low precision.
#: Larger errors mean another mistake. The relative error of an element is its error, divided by the
#: largest magnitude in the element's channel. The relative error of per-channel numbers is the norm
#: of their errors, divided by the norm of the right numbers.
FEW_BITS = 2.0**-6


@dataclass(frozen=True, slots=True, eq=False)
class Mistake:
    """A wrong step.

    Attributes
    ----------
    name : str
        The identifier in machine-readable reports.
    says : str
        The mistake as a sentence without a full stop.
    step : str
        The field of the formula.
    function : callable
        Replaces the right step.
    also : mapping
        Further steps that the same mistake replaces, by their fields.
    """

    name: str
    says: str
    step: str
    function: Callable[..., Any]
    also: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def _round(tensor: Array, dtype: np.dtype) -> Array:
    return rounded(tensor.astype(FLOAT64), dtype)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Formula(ABC):
    """A formula of an operation, whose fields are its steps.

    One result is a tensor; the others have a number in each channel. The tensor is a sum of
    multiples of a few functions of an element, for right steps and for wrong ones.

    Attributes
    ----------
    round : callable
        Takes the tensor and its element type; returns the tensor in this type.
    """

    #: The mistakes that implementations make, each in one step of the formula.
    mistakes: ClassVar[tuple[Mistake, ...]]
    #: By name, the words for a coefficient or a result. The key "" has the words for all functions.
    words: ClassVar[Mapping[str, str]]

    round: Callable[[Array, np.dtype], Array] = _round

    def wrong(self, *mistakes: Mistake) -> Self:
        """Return the formula with these mistakes."""
        steps: dict[str, Callable[..., Any]] = {}
        for mistake in mistakes:
            steps |= {mistake.step: mistake.function, **mistake.also}
        return replace(self, **steps)

    def inputs(self, data: LayerData, **options: Any) -> Channels:
        """Return the inputs of a call, as :meth:`Channels.of` does."""
        return Channels.of(data, **options)

    def known_mistakes(self, channels: Channels) -> Sequence[Mistake]:
        """Return the mistakes that a diagnosis of these inputs looks for, alone and in pairs."""
        return self.mistakes

    def partial_mistakes(self, channels: Channels) -> Sequence[Mistake]:
        """Return the same mistakes in a part of the results, for which it looks afterwards."""
        return ()

    def fitted_mistakes(self, channels: Channels, own: Values) -> Iterator[Mistake]:
        """Yield mistakes with a number that is computed from wrong results.

        Parameters
        ----------
        channels : Channels
            The inputs.
        own : mapping
            The coefficients of the functions and the other results, as far as they are known.
        """
        return iter(())

    @abstractmethod
    def functions(self, channels: Channels) -> Values:
        """Return the functions of an element, of shape (C, M), by their coefficients' names."""

    @abstractmethod
    def numbers(self, channels: Channels) -> Values:
        """Return the coefficients of the functions, and the other results, of shape (C,)."""

    @abstractmethod
    def rows(self, channels: Channels) -> Iterator[tuple[Quantity, Array]]:
        """Yield the results by name, of shape (C, M) or (C,), before they are rounded."""

    def outputs(self, data: LayerData, channels: Channels) -> Iterator[tuple[Quantity, Array]]:
        """Yield the results of the formula as a kernel, each computed when it is asked for.

        Parameters
        ----------
        data : LayerData
            The inputs.
        channels : Channels
            The same inputs; in extended precision, a kernel without a mistake is right.
        """
        for name, rows in self.rows(channels):
            with np.errstate(all="ignore"):
                if rows.ndim == 1:
                    output = _round(rows, data.mean.dtype).reshape(data.like(name).shape)
                else:
                    output = self.round(data.axes.tensor(rows), data.x.dtype)
            yield name, output


#: Mistakes in s = 1/sqrt(variance + epsilon), which both formulas have, as arguments of `Mistake`.
INVERSE_DEVIATION_MISTAKES = (
    ("epsilon-outside", "epsilon is added outside of the root", "inverse_deviation",
     lambda w, e, _: 1.0 / (np.sqrt(w) + e)),
    ("epsilon-left-out", "epsilon is left out, or is a constant of at most 1e-5",
     "inverse_deviation", lambda w, e, _: 1.0 / np.sqrt(w)),
    ("epsilon-constant", "epsilon is the constant 0.001, not the one that was passed",
     "inverse_deviation", lambda w, e, _: 1.0 / np.sqrt(w + 1e-3)),
    ("epsilon-twice", "epsilon is added twice", "inverse_deviation",
     lambda w, e, _: 1.0 / np.sqrt(w + 2.0 * e)),
    ("epsilon-squared", "the square of epsilon is added", "inverse_deviation",
     lambda w, e, _: 1.0 / np.sqrt(w + e * e)),
    ("roots-added", "the roots of variance and epsilon are added", "inverse_deviation",
     lambda w, e, _: 1.0 / (np.sqrt(w) + np.sqrt(e))),
    ("root-twice", "the root is taken twice: the fourth root of variance + epsilon is used",
     "inverse_deviation", lambda w, e, _: 1.0 / np.sqrt(np.sqrt(w + e))),
    ("variance-squared", "the square of the variance is used for the variance",
     "inverse_deviation", lambda w, e, _: 1.0 / np.sqrt(w * w + e)),
    ("no-root", "the root is left out: 1/(variance + epsilon) is used for s",
     "inverse_deviation", lambda w, e, _: 1.0 / (w + e)),
    ("deviation-for-inverse", "the standard deviation is used instead of its inverse",
     "inverse_deviation", lambda w, e, _: np.sqrt(w + e)),
)  # fmt: skip
