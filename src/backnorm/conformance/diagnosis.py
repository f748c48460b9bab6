r"""Diagnose a wrong backward pass: describe the mistake in one sentence.

For every formula, right or wrong, dx is linear in three functions of an element: dy, 1 and
x - mean. A least-squares fit gives the three coefficients of every channel; dgamma and dbeta are
two more numbers. `diagnose` compares these five numbers with those of the right formula and of
formulas with one or two mistakes (:mod:`backnorm.conformance.formula`). The nearest formula names
the mistake. A large residual of the fit is an error of indexing or of memory. If the formula is
right, only the precision can be wrong, which `backnorm.conformance.ladder` grades.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np

from backnorm.conformance.data import LayerData, realistic_data
from backnorm.conformance.formula import (
    MISTAKES,
    RIGHT,
    Channels,
    Coefficients,
    Mistake,
    Steps,
    coefficients,
    rows_of,
)
from backnorm.conformance.judge import GRADIENTS
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT64, element_type

__all__ = ["Diagnosis", "diagnose", "diagnostic_data"]

Kind = Literal["right", "formula", "described", "precision", "indexing", "memory"]
Arrays = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]

# A formula matches a call if their numbers differ by at most this, relative, by the element type of
# dx. Rounding dx to 8 bits changes a coefficient by about 1e-3.
_NEAR = {BFLOAT16: 2e-2, FLOAT16: 4e-3}
_NEAR_OF_WIDE = 1e-3
# The data cannot distinguish the nearest formula from formulas within this multiple of its
# distance.
_MARGIN = 2.0
# The residual of a fit, relative to dx, that rounding can cause.
_RESIDUAL = {BFLOAT16: 3e-2, FLOAT16: 4e-3}
_RESIDUAL_OF_WIDE = 1e-4

# The error of an element, relative to the largest element, that rounding can cause.
_ROUNDING = {BFLOAT16: 2.0**-6, FLOAT16: 2.0**-9}
_ROUNDING_OF_WIDE = 2.0**-14
# If no element has a larger error than this, relative to the largest element, precision is the
# cause.
_FEW_BITS = 2.0**-6
# A mistake may affect only half of the channels, as |gamma| instead of gamma does.
_QUANTILE = 0.75
# The distance of numbers that are not finite.
_FAR = 1e30
_TINY = float(np.finfo(float).tiny)
_NAMES = tuple(each.name for each in fields(Coefficients))
_TERMS = {
    "gain": "the factor of dy in dx",
    "offset": "the term sum(dy)/M of dx",
    "slope": "the term along x - mean of dx",
    "dgamma": "dgamma",
    "dbeta": "dbeta",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a call.

    Attributes
    ----------
    kind : {"right", "formula", "described", "precision", "indexing", "memory"}
        formula: one or two mistakes explain all outputs. described: the formula is wrong in a way
        that has no name. precision: the elements of dx have few correct bits. right: the formula is
        right, and dx shows no loss of precision beyond that of the element type.
    names : tuple of str
        The names of the mistakes.
    says : str
        The diagnosis as a sentence without a full stop.
    evidence : mapping of str to float
        The median over channels of each number divided by that of the right formula, and the
        residual of the fit relative to dx.
    """

    kind: Kind
    names: tuple[str, ...]
    says: str
    evidence: Mapping[str, float] = field(default_factory=dict)


def diagnostic_data(
    dtype: np.dtype,
    *,
    data_format: str = "NCX",
    statistics_dtype: np.dtype | None = None,
    seed: int = 0,
) -> LayerData:
    """Return inputs for which every mistake gives different numbers.

    There are 24 channels of 6 x 35 elements. epsilon is as large as the variance, statistics are
    not those of x, gamma has both signs, and dy has a mean and is correlated with x.
    """
    rng = np.random.default_rng(seed)
    shape = (6, 24, 5, 7) if data_format == "NCX" else (6, 5, 7, 24)
    data = realistic_data(
        shape,
        dtype,
        data_format=data_format,
        rng=rng,
        statistics_dtype=statistics_dtype,
        epsilon=0.25,
    )
    mean, variance = data.mean.astype(float), data.variance.astype(float)
    return replace(
        data,
        mean=(mean + rng.uniform(0.2, 0.6, 24)).astype(data.mean.dtype),
        variance=(variance * rng.uniform(1.3, 2.5, 24)).astype(data.variance.dtype),
    )


def diagnose(
    data: LayerData, outputs: Arrays, *, training: bool = True, scaled: bool = True
) -> Diagnosis:
    """Return the diagnosis of the outputs of a backward pass.

    Parameters
    ----------
    data : LayerData
        The inputs. Those of :func:`diagnostic_data` distinguish all mistakes.
    outputs : tuple of numpy.ndarray or None
        dx, dgamma and dbeta; None for an output that is not judged.
    training : bool
        Whether the statistics depend on x.
    scaled : bool
        Whether gamma was passed.
    """
    x, dy, mean, variance, gamma = data.backward_inputs
    channels = Channels.of(
        x, dy, mean, variance, gamma if scaled else None, training=training, **data.options
    )
    if not channels.x.size:
        return Diagnosis("right", (), "there are no elements")
    not_finite = _not_finite(outputs)
    if not_finite is not None:
        return not_finite
    if outputs[0] is not None and not outputs[0].any():
        names = [
            n for n, a in zip(GRADIENTS, outputs, strict=True) if a is not None and not a.any()
        ]
        says = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} 0"
        return Diagnosis("formula", tuple(f"{name}-zero" for name in names), says)
    found, residual = _fitted(channels, outputs, data.data_format)
    right = coefficients(channels)
    evidence = _ratios(found, right) | {"residual": residual}
    dtype = FLOAT64 if outputs[0] is None else element_type(outputs[0].dtype) or FLOAT64
    if residual > _RESIDUAL.get(dtype, _RESIDUAL_OF_WIDE):
        diagnosis = _misplaced(channels, outputs, data.data_format)
    else:
        near = _NEAR.get(dtype, _NEAR_OF_WIDE)
        diagnosis = _named(channels, found, near) or _described(
            found, right, _least_scales(channels), near
        )
    return replace(diagnosis, evidence=evidence)


def _not_finite(outputs: Arrays) -> Diagnosis | None:
    for name, output in zip(GRADIENTS, outputs, strict=True):
        if output is None:
            continue
        wrong = ~np.isfinite(output.astype(float))
        if wrong.all():
            return Diagnosis("memory", ("not-written",), f"{name} is not written: all is NaN")
        if wrong.any():
            first = tuple(map(int, np.argwhere(wrong)[0]))
            return Diagnosis(
                "memory",
                ("partly-written",),
                f"{name} is not finite in {int(wrong.sum())} of {wrong.size} elements, first at "
                f"{first}: it is not written there, or overflows",
            )
    return None


def _fitted(channels: Channels, outputs: Arrays, data_format: str) -> tuple[Coefficients, float]:
    """Return the numbers of each channel, and the residual of the fit relative to dx."""
    dx, dgamma, dbeta = outputs
    of_parameters = [None if each is None else each.astype(float) for each in (dgamma, dbeta)]
    if dx is None:
        return Coefficients(None, None, None, *of_parameters), 0.0
    rows = rows_of(dx, 1 if data_format == "NCX" else dx.ndim - 1)
    gain: list[float] = []
    offset: list[float] = []
    slope: list[float] = []
    residual: list[float] = []
    for x, dy, mean, row in zip(channels.x, channels.dy, channels.mean, rows, strict=True):
        functions = np.stack([dy, np.ones_like(dy), x - mean], axis=1)
        fit, *_ = np.linalg.lstsq(functions, row, rcond=None)
        rest = np.linalg.norm(row - functions @ fit)
        residual.append(float(rest) / max(float(np.linalg.norm(row)), _TINY))
        for values, value in zip((gain, offset, slope), fit, strict=True):
            values.append(float(value))
    found = Coefficients(*map(np.array, (gain, offset, slope)), *of_parameters)
    return found, float(np.median(residual))


def _pairs(
    found: Coefficients, formula: Coefficients
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for name in _NAMES:
        own = getattr(found, name)
        if own is not None:
            yield name, own, getattr(formula, name)


def _ratios(found: Coefficients, right: Coefficients) -> dict[str, float]:
    with np.errstate(all="ignore"):
        return {name: float(np.median(own / good)) for name, own, good in _pairs(found, right)}


def _least_scales(channels: Channels) -> dict[str, np.ndarray]:
    """Return the scales that offset and slope are compared with if the right values are 0."""
    scale = np.abs(coefficients(channels).all[0]) * np.sqrt(np.square(channels.dy).mean(1))
    return {"offset": 0.2 * scale, "slope": 0.2 * scale / (channels.x.std(1) + _TINY)}


def _distance(found: Coefficients, formula: Coefficients, least: Mapping[str, np.ndarray]) -> float:
    """Return the largest relative difference between numbers, a quantile over the channels."""
    worst = 0.0
    with np.errstate(all="ignore"):
        for name, own, other in _pairs(found, formula):
            scale = np.maximum(np.maximum(np.abs(own), np.abs(other)), least.get(name, _TINY))
            difference = np.nan_to_num(np.abs(own - other) / scale, nan=_FAR, posinf=_FAR)
            worst = max(worst, float(np.quantile(difference, _QUANTILE)))
    return worst


def _named(channels: Channels, found: Coefficients, near: float) -> Diagnosis | None:
    """Return the diagnosis by a formula with at most two mistakes that matches the numbers."""
    least = _least_scales(channels)
    for sizes in ((0, 1), (2,)):
        distances = sorted(
            (_distance(found, coefficients(channels, _steps(mistakes)), least), k, mistakes)
            for k, mistakes in enumerate(_combinations(sizes))
        )
        distance, _, mistakes = distances[0]
        if distance > near:
            continue
        of_right = next((other for other, _, each in distances if not each), _FAR)
        if of_right <= min(near, _MARGIN * distance):
            return Diagnosis("right", (), "the formula is right")
        # Formulas that the data cannot distinguish.
        same = [each for other, _, each in distances[1:4] if each and other <= _MARGIN * distance]
        says = ", or ".join(_says(each) for each in (mistakes, *same))
        return Diagnosis("formula", tuple(mistake.name for mistake in mistakes), says)
    return None


def _combinations(sizes: tuple[int, ...]) -> Iterator[tuple[Mistake, ...]]:
    """Yield the combinations of mistakes in different steps; `sizes` are their numbers."""
    for size in sizes:
        for mistakes in itertools.combinations(MISTAKES, size):
            if len({mistake.step for mistake in mistakes}) == size:
                yield mistakes


def _steps(mistakes: tuple[Mistake, ...]) -> Steps:
    return replace(RIGHT, **{mistake.step: mistake.function for mistake in mistakes})


def _says(mistakes: tuple[Mistake, ...]) -> str:
    return " and ".join(mistake.says for mistake in mistakes)


def _described(
    found: Coefficients, right: Coefficients, least: Mapping[str, np.ndarray], near: float
) -> Diagnosis:
    """Return a diagnosis if no formula fits: numbers that are wrong by a factor, or by channel."""
    texts = []
    for name, own, good in _pairs(found, right):
        zero = np.abs(good) <= 1e-6 * least.get(name, 0.0)
        if zero.all():
            if np.median(np.abs(own) / least[name]) > near:
                texts.append(f"dx has {_TERMS[name].removesuffix(' of dx')}, and should not")
            continue
        ratio = own[~zero] / good[~zero]
        middle = float(np.median(ratio))
        if np.quantile(np.abs(ratio - middle), _QUANTILE) > near * max(1.0, abs(middle)):
            texts.append(f"{_TERMS[name]} differs from channel to channel")
        elif abs(middle - 1.0) > near:
            texts.append(f"{_TERMS[name]} is {middle:.3g} of what it should be in every channel")
    if not texts:
        return Diagnosis("right", (), "the formula is right")
    return Diagnosis("described", (), ", and ".join(texts))


def _misplaced(channels: Channels, outputs: Arrays, data_format: str) -> Diagnosis:
    """Return a diagnosis of a dx that no formula explains, from its wrong elements."""
    dx = outputs[0]
    assert dx is not None
    rows = rows_of(dx, 1 if data_format == "NCX" else dx.ndim - 1)
    gain, offset, slope = (each[:, None] for each in coefficients(channels).all[:3])
    right = gain * channels.dy + offset + slope * (channels.x - channels.mean[:, None])
    dtype = element_type(dx.dtype) or FLOAT64
    error = np.abs(rows - right)
    if (error <= _FEW_BITS * np.abs(right).max(1, keepdims=True)).all():
        bits = int(np.round(-np.log2(np.linalg.norm(error) / np.linalg.norm(right)))) - 1
        text = f"dx is right to {bits} bits: it is rounded, or summed up, in a narrow type"
        return Diagnosis("precision", ("few-bits",), text)
    allowed = _ROUNDING.get(dtype, _ROUNDING_OF_WIDE) * np.abs(right).max()
    wrong = np.abs(rows - right) > allowed
    for shift in (1, -1):
        if not (np.abs(rows - np.roll(right, shift, axis=0)) > allowed).any():
            return Diagnosis(
                "indexing",
                ("channels-shifted",),
                f"channels are shifted: dx of channel c is that of channel c {-shift:+d}",
            )
    if not (np.abs(np.sort(rows, axis=1) - np.sort(right, axis=1)) > allowed).any():
        return Diagnosis(
            "indexing",
            ("elements-permuted",),
            "the elements of dx are right, in a wrong order within their channel",
        )
    share = wrong.mean()
    if not share or share > 0.5:
        return Diagnosis(
            "indexing",
            ("indexing",),
            "dx is no sum of multiples of dy, 1 and x - mean in any channel: its elements are read "
            "or written at wrong places",
        )
    where = np.argwhere(wrong)
    channel, element = map(int, where[0])
    of_channels = sorted({int(each) for each in where[:, 0]})
    if len(of_channels) <= len(rows) // 2:
        place = f"in channels {', '.join(map(str, of_channels[:8]))}"
    else:
        place = f"from element {int(where[:, 1].min())} of a channel on"
    return Diagnosis(
        "indexing",
        ("partly-wrong",),
        f"{share:.1%} of the elements of dx are wrong, {place}; the first is element {element} of "
        f"channel {channel}, and the rest is right",
    )
