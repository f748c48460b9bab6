"""Cases that distinguish a correct layer from a wrong one, and the diagnosis of its results.

A layer has parameters and running statistics of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from backnorm import reference
from backnorm.conformance.battery import Case, Recipe, variants
from backnorm.conformance.data import LayerData, read_only, realistic_data
from backnorm.conformance.diagnosis import (
    DIAGNOSTIC,
    Diagnosis,
    diagnose,
    diagnose_forward,
    diagnostic_data,
)
from backnorm.conformance.formula import FORWARD_MISTAKES
from backnorm.conformance.judge import GRADIENTS, LAYER_RESULTS, Quantity
from backnorm.conformance.ladder import LayerLadder
from backnorm.dtypes import FLOAT64, is_16_bit, rounded

__all__ = [
    "LayerCase",
    "diagnose_layer",
    "has_layer",
    "layer_ladder",
    "layer_recipe",
    "layer_recipes",
]

# A case's shape (N, C, spatial axes), in training and in evaluation.
_SHAPE = (6, 5, 3, 4)


@dataclass(frozen=True, slots=True, eq=False)
class LayerCase(Case):
    """A call of a layer: its forward pass, and then its backward pass.

    `data.mean` and `data.variance` are the statistics by which the layer normalises: in training
    the batch's own in float64, otherwise the running statistics.

    Attributes
    ----------
    running : tuple of numpy.ndarray
        The running mean and variance before the call.
    absent : tuple of str
        The parameters, of gamma and beta, that the layer has not.
    """

    running: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.zeros(0))
    absent: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, np.ndarray | None]:
        """The operands by name, read-only; gamma and beta are None if they are absent."""
        data, (mean, variance) = self.data, self.running
        named = {"x": data.x, "dy": data.dy, "gamma": data.gamma, "beta": data.beta}
        named |= {"running_mean": mean, "running_variance": variance}
        return {n: None if n in self.absent else read_only(array) for n, array in named.items()}

    def with_options(self, *, absent: Sequence[str] = (), **options: Any) -> LayerCase:
        """Return the case with a layer's own options: epsilon, momentum (the weight of the batch in
        the running statistics), unbiased, and the parameters that it has not.
        """
        data = replace(self.data, **options)
        if "gamma" in absent:
            data = replace(data, gamma=np.ones_like(data.gamma))
        if "beta" in absent:
            data = replace(data, beta=np.zeros_like(data.beta))
        return replace(self, data=data, absent=tuple(absent))


def layer_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the layer's case with the data of a backward case."""
    return replace(recipe, finish=_of_backward)


def has_layer(recipe: Recipe) -> bool:
    """Whether a case of the backward pass also tests a layer.

    Channels are on axis 1. A layer has its own epsilon, and the statistics of x; a single element
    has no unbiased variance. Layers that are compiled for each shape and type would make the grid
    slow in all types.
    """
    of_passes = "epsilon-", "foreign", "infinities", "variances-of-all-sizes", "mean-over"
    return (
        recipe.variant.data_format == "NCX"
        and recipe.scaled
        and recipe.count > 1
        and not any(word in recipe.purpose for word in of_passes)
        and not (recipe.name.startswith("grid-") and is_16_bit(recipe.variant.dtype))
    )


def layer_recipes() -> Iterator[Recipe]:
    """Yield the recipes of a layer's own cases, with channels on axis 1.

    epsilon is the layer's own, usually 1e-5, so variances are small in the cases that test it.
    """
    small = partial(realistic_data, scale=2.0**-8)
    of_diagnosis = partial(_diagnostic, scale=2.0**-8)
    rows: tuple[tuple[str, tuple[int, ...], Callable[..., LayerData], bool], ...] = (
        ("diagnostic-training", DIAGNOSTIC, of_diagnosis, True),
        ("diagnostic-evaluation", DIAGNOSTIC, of_diagnosis, False),
        ("training", _SHAPE, realistic_data, True),
        ("evaluation", _SHAPE, realistic_data, False),
        ("training-small-variance", _SHAPE, small, True),
        ("evaluation-small-variance", _SHAPE, small, False),
        ("training-one-image", (1, 7, 5, 9), realistic_data, True),
        ("training-many-elements", (40, 2, 25, 20), realistic_data, True),
        ("training-many-channels", (3, 67, 5, 3), realistic_data, True),
    )
    for variant in variants(["NCX"]):
        for purpose, shape, make, training in rows:
            # Parameters of 16 bits change types alone, so they need no other shapes.
            if not is_16_bit(variant.statistics) or purpose in ("training", "evaluation"):
                yield Recipe(purpose, variant, shape, make, training)


def _diagnostic(shape: tuple[int, ...], *, rng: np.random.Generator, **options: Any) -> LayerData:
    scale = options.pop("scale")
    data = diagnostic_data(shape=shape, seed=rng, **options)
    x = (data.x.astype(FLOAT64) * scale).astype(data.x.dtype)
    mean = (data.mean.astype(FLOAT64) * scale).astype(data.mean.dtype)
    variance = (data.variance.astype(FLOAT64) * scale**2).astype(data.variance.dtype)
    return replace(data, x=x, mean=mean, variance=variance)


def _of_backward(case: Case) -> LayerCase:
    """Return a layer's case with the data of a backward case, whose running statistics differ from
    those of the batch.
    """
    data = case.data
    deviation = np.sqrt(data.variance.astype(FLOAT64))
    mean = rounded(data.mean.astype(FLOAT64) + 0.5 * deviation, data.mean.dtype)
    variance = rounded(1.75 * data.variance.astype(FLOAT64), data.variance.dtype)
    used = mean, variance
    if case.training:
        values = reference.forward(data.x, None, None, epsilon=1.0)
        used = values.mean.hi, values.variance.hi
    data = replace(data, mean=used[0], variance=used[1], epsilon=1e-5, momentum=0.1, unbiased=True)
    return LayerCase(case.name, data, case.training, running=(mean, variance))


def layer_ladder(case: LayerCase) -> LayerLadder:
    """Return the exact results of a layer and their bounds."""
    return LayerLadder.of(case.data, case.running, training=case.training)


def diagnose_layer(case: LayerCase, outputs: Mapping[str, np.ndarray | None]) -> Diagnosis:
    """Return the first mistake that has a name: of y, of the running statistics, of the gradients.

    Parameters
    ----------
    case : LayerCase
    outputs : mapping
        The layer's results by name; None or absent for one that is not judged.
    """
    ladder = layer_ladder(case)
    wrong: dict[Any, np.ndarray] = {
        name: array for name in LAYER_RESULTS
        if (array := outputs.get(name)) is not None and not _is_right(ladder, name, array)
    }  # fmt: skip
    found = []
    if case.training:
        mean, variance = case.running
        data = replace(case.data, mean=mean, variance=variance)
        running = {name: wrong[name] for name in wrong if name.startswith("running")}
        if "y" in wrong:
            found.append(diagnose_forward(data, {"y": wrong["y"]}))
        if running:
            # A right y excludes mistakes of the variance.
            found.append(diagnose_forward(data, ({} if "y" in wrong else dict(outputs)) | running))
    else:
        found += _of_evaluation(case, wrong)
    if any(name in wrong for name in GRADIENTS):
        dx, dgamma, dbeta = (outputs.get(name) for name in GRADIENTS)
        found.append(diagnose(case.data, (dx, dgamma, dbeta), training=case.training))
    found.sort(key=lambda each: (each.kind == "right", each.kind != "formula"))
    return found[0] if found else Diagnosis("unknown", (), "")


def _is_right(ladder: LayerLadder, name: Quantity, array: np.ndarray) -> bool:
    return ladder.grade(name, array).at_least("serial")


def _of_evaluation(case: LayerCase, wrong: Mapping[Any, np.ndarray]) -> Iterator[Diagnosis]:
    """Yield the mistake with which y or the running statistics of an evaluation are computed."""
    data = case.data
    without_gamma = replace(data, gamma=np.ones_like(data.gamma))
    no_beta = np.zeros_like(data.beta)
    says = {mistake.name: mistake.says for mistake in FORWARD_MISTAKES}
    says["batch-in-evaluation"] = "evaluation has the statistics of the batch"
    says["running-in-evaluation"] = "evaluation updates the running statistics"
    for names, changed, training in (
        (("gamma-left-out",), without_gamma, False),
        (("beta-left-out",), replace(data, beta=no_beta), False),
        (("gamma-left-out", "beta-left-out"), replace(without_gamma, beta=no_beta), False),
        (("batch-in-evaluation",), data, True),
        (("running-in-evaluation",), data, True),
    ):
        judged = "running" if names == ("running-in-evaluation",) else "y"
        own = [name for name in wrong if name.startswith(judged)]
        ladder = LayerLadder.of(changed, case.running, training=training)
        if own and all(_is_right(ladder, name, wrong[name]) for name in own):
            yield Diagnosis("formula", names, " and ".join(says[name] for name in names))
            return
