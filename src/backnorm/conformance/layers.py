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
from backnorm.conformance.battery import Case, Recipe, Variant
from backnorm.conformance.data import LayerData, read_only, realistic_data
from backnorm.conformance.diagnosis import (
    DIAGNOSTIC,
    Diagnosis,
    diagnose,
    diagnose_forward,
    diagnostic_data,
)
from backnorm.conformance.judge import GRADIENTS, LAYER_RESULTS, Quantity
from backnorm.conformance.ladder import LayerLadder
from backnorm.dtypes import FLOAT32, FLOAT64

__all__ = ["LayerCase", "diagnose_layer", "layer_ladder", "layer_recipes"]

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
    momentum : float
        The weight of the batch in the running statistics.
    """

    running: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.zeros(0))
    momentum: float = 0.1

    @property
    def inputs(self) -> dict[str, np.ndarray | None]:
        """The operands by name, read-only; gamma and beta are None if they are not passed."""
        data, (mean, variance) = self.data, self.running
        named = {"x": data.x, "dy": data.dy, "gamma": data.gamma, "beta": data.beta}
        named |= {"running_mean": mean, "running_variance": variance}
        is_absent = {"gamma", "beta"} if not self.scaled else set[str]()
        return {n: None if n in is_absent else read_only(array) for n, array in named.items()}

    def with_options(self, *, epsilon: float, momentum: float, scaled: bool) -> LayerCase:
        """Return the case with a layer's own options."""
        data = replace(self.data, epsilon=epsilon)
        return replace(self, data=data, momentum=momentum, scaled=self.scaled and scaled)


def layer_recipes(shapes: Sequence[tuple[int, ...]] = ()) -> Iterator[Recipe]:
    """Yield the recipes of cases of layers with channels on axis 1; of training with random data
    of `shapes`, if there are any.

    epsilon is the layer's own, usually 1e-5, so variances are small in the cases that test it. x
    and parameters have one type. It has at least 32 bits, because layers differ in what they round
    to 16 bits.
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
    if shapes:
        rows = tuple(
            (f"shape-{'x'.join(map(str, shape))}", shape, realistic_data, True) for shape in shapes
        )
    for dtype in (FLOAT32, FLOAT64):
        for purpose, shape, make, training in rows:
            variant = Variant(dtype, dtype, "NCX")
            yield Recipe(purpose, variant, shape, make, training, finish=_of_backward)


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
    mean = (data.mean.astype(FLOAT64) + 0.5 * deviation).astype(data.mean.dtype)
    variance = (1.75 * data.variance.astype(FLOAT64)).astype(data.variance.dtype)
    used = mean, variance
    if case.training:
        values = reference.forward(data.x, None, None, epsilon=1.0)
        used = values.mean.hi, values.variance.hi
    data = replace(data, mean=used[0], variance=used[1], epsilon=1e-5)
    return LayerCase(case.name, data, case.training, running=(mean, variance))


def layer_ladder(case: LayerCase, **changed: Any) -> LayerLadder:
    """Return the exact results of a layer and their bounds. `changed` has other values of gamma,
    beta or `training`.
    """
    inputs = case.inputs
    values: dict[str, Any] = {name: inputs[name] for name in ("x", "dy", "gamma", "beta")}
    values |= {"running": case.running, "momentum": case.momentum, "training": case.training}
    return LayerLadder.of(**values | {"epsilon": case.data.epsilon} | changed)


def diagnose_layer(case: LayerCase, outputs: Mapping[str, np.ndarray | None]) -> Diagnosis:
    """Return the first mistake that has a name: of y, of the gradients, of the running statistics.

    Parameters
    ----------
    case : LayerCase
    outputs : mapping
        The layer's results by name; None or absent for one that is not judged.
    """
    ladder = layer_ladder(case)
    wrong: dict[str, np.ndarray] = {
        name: array for name in LAYER_RESULTS
        if (array := outputs.get(name)) is not None and not _is_right(ladder, name, array)
    }  # fmt: skip
    found = []
    if "y" in wrong and case.training:
        mean, variance = case.running
        data = replace(case.data, mean=mean, variance=variance)
        found.append(diagnose_forward(data, {"y": wrong["y"]}, scaled=case.scaled))
    elif "y" in wrong:
        found += _of_evaluation(case, wrong["y"])
    if any(name in wrong for name in GRADIENTS):
        dx, dgamma, dbeta = (outputs.get(name) for name in GRADIENTS)
        options: Any = {"training": case.training, "scaled": case.scaled}
        found.append(diagnose(case.data, (dx, dgamma, dbeta), **options))
    found += _of_running_statistics(case, wrong)
    found.sort(key=lambda each: (each.kind == "right", each.kind != "formula"))
    return found[0] if found else Diagnosis("unknown", (), "")


def _is_right(ladder: LayerLadder, name: Quantity, array: np.ndarray) -> bool:
    return ladder.grade(name, array).at_least("serial")


def _of_evaluation(case: LayerCase, y: np.ndarray) -> Iterator[Diagnosis]:
    """Yield the mistake with which y of an evaluation is computed."""
    absent: dict[str, Any] = {"gamma": None, "beta": None}
    for name, says, changed in (
        ("gamma-left-out", "y is not multiplied by gamma", {"gamma": None}),
        ("beta-left-out", "y lacks beta", {"beta": None}),
        ("gamma-left-out-beta-left-out", "y is not multiplied by gamma and y lacks beta", absent),
        ("batch-in-evaluation", "evaluation has the statistics of the batch", {"training": True}),
    ):
        if _is_right(layer_ladder(case, **changed), "y", y):
            yield Diagnosis("formula", (name,), says)
            return


def _of_running_statistics(case: LayerCase, wrong: Mapping[str, np.ndarray]) -> Iterator[Diagnosis]:
    """Yield the mistake by which running statistics are wrong."""
    batch = reference.forward(case.data.x, None, None, epsilon=1.0)
    count = case.data.x.size // max(case.data.x.shape[1], 1)
    old = np.stack(case.running).astype(FLOAT64)
    biased = np.stack([batch.mean.hi, batch.variance.hi])
    new = biased * [[1.0], [count / max(count - 1, 1)]]

    def average(weight: float, of: np.ndarray) -> np.ndarray:
        result: np.ndarray = (1.0 - weight) * old + weight * of
        return result

    momentum = case.momentum
    right = average(momentum, new) if case.training else old
    for name, says, values in (
        ("running-biased", "the running variance gets the batch's biased variance",
         average(momentum, biased)),
        ("running-not-updated", "the running statistics are not updated", old),
        ("running-momentum", "momentum weighs the old running statistics, not the batch",
         average(1.0 - momentum, new)),
        ("running-of-batch", "the running statistics are those of the batch alone", new),
        ("running-in-evaluation", "evaluation updates the running statistics",
         average(momentum, new)),
    ):  # fmt: skip
        gaps = np.abs(values - right).max(1)
        if gaps.any() and all(
            (gap > 0) == (n in wrong) and (n not in wrong or np.abs(wrong[n] - v).max() < 0.1 * gap)
            for n, v, gap in zip(("running_mean", "running_variance"), values, gaps, strict=True)
        ):
            yield Diagnosis("formula", (name,), says)
            return
