"""Cases that distinguish a correct forward pass in training from a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case, Recipe, recipes
from backnorm.conformance.data import read_only
from backnorm.dtypes import FLOAT64

__all__ = ["ForwardCase", "forward_cases", "forward_recipe", "has_forward", "of_backward"]

# The forward battery leaves out cases of the backward battery whose names begin like this. These
# cases test dy, or statistics that the caller passes. A forward pass in training takes neither dy
# nor statistics.
_OF_GRADIENTS = (
    "frozen-", "foreign-statistics-", "exact-statistics-supplied-", "huge-gradients-",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class ForwardCase(Case):
    """One call of a forward pass in training, whose inputs are x, gamma and beta.

    `scaled` says whether gamma and beta are passed. If an operator takes running statistics, it
    gets `data.mean` and `data.variance` as their old values. These differ from the statistics of
    the batch.
    """

    @property
    def inputs(self) -> dict[str, np.ndarray | None]:
        """The operands by name, read-only; gamma and beta are None if they are not passed."""
        x, gamma, beta = map(read_only, (self.data.x, self.data.gamma, self.data.beta))
        named = {"x": x, "gamma": gamma if self.scaled else None}
        if self.data.normalization.is_centred:
            named["beta"] = beta if self.scaled else None
        return named

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the forward pass."""
        return self.data.options


def of_backward(case: Case) -> ForwardCase:
    """Return a forward case with the data of a backward case.

    Its mean and variance, which are passed as running statistics, are not those of the backward
    case.
    """
    mean, variance = _other(case.data.mean), _other(case.data.variance)
    data = replace(case.data, mean=mean, variance=variance)
    return ForwardCase(case.name, data, scaled=case.scaled, repeats=case.repeats)


def _other(statistic: np.ndarray) -> np.ndarray:
    """Return finite values that differ from a statistic, and are positive if it is a variance."""
    return (0.75 * statistic.astype(FLOAT64) + 1.3).astype(statistic.dtype)


def forward_cases(seed: int = 0) -> Iterator[ForwardCase]:
    """Yield small cases for every type and layout; a seed always gives the same cases."""
    for recipe in recipes():
        if has_forward(recipe):
            yield of_backward(recipe.case(seed))


def has_forward(recipe: Recipe) -> bool:
    """Whether a case of the backward battery also tests a forward pass in training."""
    return not recipe.name.startswith(_OF_GRADIENTS)


def forward_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the forward case with the data of a backward case."""
    return replace(recipe, finish=of_backward)
