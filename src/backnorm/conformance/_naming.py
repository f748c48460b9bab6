"""Name the mistake in a formula, and describe outputs that no formula explains.

The outputs of a judged call are summarised by a few numbers per channel, such as the coefficients
of a fitted formula (`formula.Coefficients`, `forward_diagnosis.Normalization`). The functions here
compare the numbers that were found in an implementation's outputs with the numbers that right and
wrong formulas give.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from backnorm.conformance.formula import Mistake
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT64

Kind = Literal["right", "formula", "described", "precision", "indexing", "memory"]
# A dataclass whose fields are numbers of a formula, such as the gain. Each field is an array of
# shape (C,), or None if the number is not known.
Numbers = Any
# Maps the name of an output to two arrays: the values that the judged function returned, and the
# right values. The first is None if the output is not judged.
Outputs = Mapping[str, tuple[np.ndarray | None, np.ndarray]]

# A formula matches if the relative differences between its coefficients and those fitted to the
# results are at most this number, which depends on the element type of dx or y. (Rounding dx to the
# 8 bits of bfloat16 changes a coefficient by up to a few thousandths.)
_NEAR: dict[np.dtype, float] = {BFLOAT16: 2e-2, FLOAT16: 4e-3}
_NEAR_OF_WIDE = 1e-3
# A formula counts as no worse than the nearest one if its distance from the results is at most this
# number times the distance of the nearest formula from the results.
_MARGIN = 2.0
# If rounding is the only error of dx or y, the residual of the formula fitted to dx or y is at most
# this number times the norm of dx or y.
_RESIDUAL = {BFLOAT16: 3e-2, FLOAT16: 4e-3}
_RESIDUAL_OF_WIDE = 1e-4

# If the relative errors of a wrong output are at most this number, the diagnosis is low precision.
# Larger errors mean another mistake. The relative error of an element is its error, divided by the
# largest magnitude in the element's channel. The relative error of per-channel numbers is the norm
# of their errors, divided by the norm of the right numbers.
FEW_BITS = 2.0**-6
# If the sums of dgamma and dbeta are computed in float32, the relative errors of dgamma and dbeta
# can be up to this number. (See `FEW_BITS` for the relative error of per-channel numbers.)
_FEW_BITS_OF_WIDE = 2.0**-16
# For float64 data, the relative errors of an output (see `FEW_BITS`) are below this number if all
# sums are in float64, and above it if numbers are rounded to float32.
_FLOAT32_BITS = 2.0**-28
# A number of the formula, such as the gain, has a value in each channel. The difference of a found
# number from an expected one is this quantile of the relative differences in all channels. The
# median is not suitable: a kernel with |gamma| instead of gamma is right in about half of the
# channels, so the median of the differences could be 0.
_QUANTILE = 0.75
# If the relative difference of two values is NaN or infinite, this number replaces it.
_FAR = 1e30
# A sentence of a diagnosis lists at most this many channels by their numbers.
_MOST_CHANNELS = 8
TINY = float(np.finfo(float).tiny)
# One mistake in the code can cause two mistakes in the formula. This table maps the names of the
# two to the name of the one, and to a sentence about it.
_AS_ONE = {
    frozenset(("gain-beta", "offset-gamma")): ("gamma-beta-swapped", "gamma and beta are swapped"),
    frozenset(("dgamma-dbeta", "dbeta-dgamma")): (
        "dgamma-dbeta-swapped", "dgamma and dbeta are swapped",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a call.

    Attributes
    ----------
    kind : {"right", "formula", "described", "precision", "indexing", "memory"}
        formula: one or two mistakes explain all outputs. described: the formula is wrong in a way
        that has no name. precision: outputs have few correct bits. right: the formula is right; the
        ladder grades its precision. indexing: elements are at wrong places. memory: elements are
        not finite.
    names : tuple of str
        The names of the mistakes.
    says : str
        The diagnosis as a sentence without a full stop.
    evidence : mapping of str to float
        For each number, the median over the channels of its ratio to the right number; and the
        residual of the fit relative to dx or y.
    """

    kind: Kind
    names: tuple[str, ...]
    says: str
    evidence: Mapping[str, float] = field(default_factory=dict)


def not_finite(outputs: Mapping[str, np.ndarray | None]) -> Diagnosis | None:
    """Return a diagnosis if an output is not finite, else None."""
    for name, output in outputs.items():
        if output is None:
            continue
        wrong = ~np.isfinite(output.astype(float))
        if wrong.all():
            return Diagnosis(
                "memory",
                ("not-written",),
                f"no element of {name} is finite: {name} is computed as NaN or infinity, is not "
                "written, or is added to its memory",
            )
        if wrong.any():
            first = tuple(map(int, np.argwhere(wrong)[0]))
            return Diagnosis(
                "memory",
                ("partly-written",),
                f"{name} is not finite in {int(wrong.sum())} of {wrong.size} elements, first at "
                f"{first}: it is not written there, or overflows",
            )
    return None


def nearness(dtype: np.dtype) -> float:
    """Return the relative difference up to which two numbers, such as two gains, count as equal.

    One of the numbers was fitted to the results. The other is that of a formula.
    """
    return _NEAR.get(dtype, _NEAR_OF_WIDE)


def residual_of_rounding(dtype: np.dtype) -> float:
    """Return the largest relative residual that rounding to `dtype` alone can cause.

    The residual is the norm of the difference between dx (or y) and the formula fitted to it,
    divided by the norm of dx (or y).
    """
    return _RESIDUAL.get(dtype, _RESIDUAL_OF_WIDE)


def _pairs(found: Numbers, formula: Numbers) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for each in fields(type(found)):
        own = getattr(found, each.name)
        if own is not None:
            yield each.name, own, getattr(formula, each.name)


def ratios(found: Numbers, right: Numbers) -> dict[str, float]:
    """For each number (such as the gain), divide its values in `found` by those in `right`, and
    return the median of the quotients of all channels. A number whose right value is 0 in any
    channel is omitted.
    """
    with np.errstate(all="ignore"):
        return {
            name: float(np.median(own / good))
            for name, own, good in _pairs(found, right)
            if good.all()
        }


def distance(found: Numbers, formula: Numbers, least: Mapping[str, np.ndarray]) -> float:
    """Return the largest relative difference between two sets of numbers.

    A number, such as the gain, has a value in each channel. The difference of two values is divided
    by the larger of their magnitudes, or by `least` if that is larger. This gives one quotient for
    each channel. The difference of the two numbers is a quantile (`_QUANTILE`) of these quotients.
    """
    worst = 0.0
    with np.errstate(all="ignore"):
        for name, own, other in _pairs(found, formula):
            scale = np.maximum(np.maximum(np.abs(own), np.abs(other)), least.get(name, TINY))
            difference = np.nan_to_num(np.abs(own - other) / scale, nan=_FAR, posinf=_FAR)
            worst = max(worst, float(np.quantile(difference, _QUANTILE)))
    return worst


def named(
    found: Numbers,
    formula: Callable[[tuple[Mistake, ...]], Numbers],
    mistakes_known: Sequence[Mistake],
    least: Mapping[str, np.ndarray],
    near: float,
) -> Diagnosis | None:
    """Return the diagnosis if a formula with at most two mistakes matches the numbers, else None.

    Parameters
    ----------
    found : Coefficients, or another dataclass of arrays of shape (C,)
    formula : callable
        Takes mistakes; returns the numbers of the formula with these mistakes.
    mistakes_known : sequence of Mistake
    least : mapping
        By name, the least magnitude to which the differences of a number are relative.
    near : float
        The largest distance of a formula that matches.
    """
    for sizes in ((0, 1), (2,)):
        distances = sorted(
            (distance(found, formula(mistakes), least), k, mistakes)
            for k, mistakes in enumerate(_combinations(mistakes_known, sizes))
        )
        nearest, _, mistakes = distances[0]
        if nearest > near:
            continue
        of_right = next((other for other, _, each in distances if not each), _FAR)
        if of_right <= min(near, _MARGIN * nearest):
            return Diagnosis("right", (), "the formula is right")
        names = tuple(mistake.name for mistake in mistakes)
        if frozenset(names) in _AS_ONE:
            name, says = _AS_ONE[frozenset(names)]
            return Diagnosis("formula", (name,), says)
        # `same` has those other formulas whose numbers are almost as near to `found` as the numbers
        # of the nearest formula. The data cannot distinguish these formulas from the nearest one.
        same = [each for other, _, each in distances[1:4] if each and other <= _MARGIN * nearest]
        says = ", or ".join(_says(each) for each in (mistakes, *same))
        return Diagnosis("formula", names, says)
    return None


def _combinations(
    known: Sequence[Mistake], sizes: tuple[int, ...]
) -> Iterator[tuple[Mistake, ...]]:
    """Yield combinations of mistakes in different steps, for each number of mistakes in `sizes`."""
    for size in sizes:
        for mistakes in itertools.combinations(known, size):
            if len({mistake.step for mistake in mistakes}) == size:
                yield mistakes


def _says(mistakes: tuple[Mistake, ...]) -> str:
    return " and ".join(mistake.says for mistake in mistakes)


def described(
    found: Numbers,
    right: Numbers,
    least: Mapping[str, np.ndarray],
    near: float,
    terms: Mapping[str, str],
) -> Diagnosis:
    """Return a diagnosis that names the wrong numbers, for a call that no known formula matches."""
    # Maps a predicate, such as "is not 0, and should be", to the terms of which it is true.
    wrong: dict[str, list[str]] = {}
    # For each number that is nearly right in every channel: maps the number's term (the words that
    # name it) to the count of its right bits.
    bits: dict[str, int] = {}
    for name, own, good in _pairs(found, right):
        zero = np.abs(good) <= 1e-6 * least.get(name, 0.0)
        if zero.all():
            with np.errstate(over="ignore"):
                share = np.median(np.abs(own) / least.get(name, TINY))
            if share > near:
                wrong.setdefault("is not 0, and should be", []).append(terms[name])
            continue
        ratio = own[~zero] / good[~zero]
        middle = float(np.median(ratio))
        if np.quantile(np.abs(ratio - middle), _QUANTILE) > near * max(1.0, abs(middle)):
            error = relative_error(own, good)
            if error <= FEW_BITS:
                bits[terms[name]] = right_bits(error)
            else:
                wrong.setdefault(_of_channels(own, good, near), []).append(terms[name])
        elif abs(middle - 1.0) > near:
            predicate = f"is {middle:.4g} times what it should be in every channel"
            wrong.setdefault(predicate, []).append(terms[name])
    texts = [sentence(names, predicate) for predicate, names in wrong.items()]
    if bits:
        few = precision(bits)
        if not texts:
            return few
        texts.append(few.says)
    if not texts:
        return Diagnosis("right", (), "the formula is right")
    return Diagnosis("described", (), ", and ".join(texts))


def sentence(names: Sequence[str], predicate: str) -> str:
    """Return a sentence about `names`. The predicate is given in the singular."""
    *others, last = names
    if not others:
        return f"{last} {predicate}"
    verb, _, rest = predicate.partition(" ")
    rest = rest.replace(" it should", " they should")
    return f"{', '.join(others)} and {last} {'are' if verb == 'is' else 'have'} {rest}"


def _of_channels(own: np.ndarray, good: np.ndarray, near: float) -> str:
    """Return the predicate of a sentence about a number that is wrong in some channels."""
    wrong = np.abs(own - good) > near * np.abs(good)
    channels = np.flatnonzero(wrong).tolist()
    if (np.abs(own + good) <= near * np.abs(good))[wrong].all():
        return f"has the wrong sign in {channel_numbers(channels)}"
    if 0 < len(channels) <= own.size // 2:
        return f"is {'wrong' if own[wrong].any() else '0'} in {channel_numbers(channels)}"
    return "is wrong by another factor in each channel"


def channel_numbers(channels: Sequence[int]) -> str:
    """Return channel numbers in words, as a range if they have no gap."""
    first, last = channels[0], channels[-1]
    if first == last:
        return f"channel {first}"
    if last - first == len(channels) - 1:
        return f"channels {first} to {last}"
    more = f", ... ({len(channels)} channels)" * (len(channels) > _MOST_CHANNELS)
    return f"channels {', '.join(map(str, channels[:_MOST_CHANNELS]))}{more}"


def imprecise(outputs: Outputs, dtype: np.dtype) -> Diagnosis | None:
    """Return the diagnosis if outputs are less exact than float32 sums would make them, else None.

    Parameters
    ----------
    outputs : mapping
        Each output by name, and its right values; None for an output that is not judged.
    dtype : numpy.dtype
        Element type of the outputs.
    """
    return _of_few_bits(outputs, _NEAR.get(dtype, _FEW_BITS_OF_WIDE))


def computed_in_float32(outputs: Outputs, dtype: np.dtype) -> Diagnosis | None:
    """Return the diagnosis if float64 outputs have only the accuracy of float32, else None."""
    return _of_few_bits(outputs, _FLOAT32_BITS) if dtype == FLOAT64 else None


def _of_few_bits(outputs: Outputs, least: float) -> Diagnosis | None:
    bits = {}
    for name, (own, good) in outputs.items():
        error = 0.0 if own is None else relative_error(own.astype(float), good)
        if least < error <= FEW_BITS:
            bits[name] = right_bits(error)
    return precision(bits) if bits else None


def precision(bits: Mapping[str, int]) -> Diagnosis:
    """Return the diagnosis of outputs or terms that have few right bits."""
    predicate = f"is right to {min(bits.values())} bits: rounded, or summed up, in a narrow type"
    text = sentence(list(bits), predicate)
    return Diagnosis("precision", ("few-bits",), text)


def relative_error(own: np.ndarray, good: np.ndarray) -> float:
    """Return the norm of `own` - `good`, divided by the norm of `good`, the right numbers."""
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(own - good) / np.linalg.norm(good))


def right_bits(error: float) -> int:
    """Return how many leading bits are right in numbers with this relative error."""
    return round(-math.log2(error)) - 1
