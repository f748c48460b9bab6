"""Name the mistake in a formula, and describe outputs that no formula explains.

The numbers that describe a call (`formula.Coefficients`, `forward_diagnosis.Normalization`) are
compared with those of formulas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from backnorm.conformance.formula import Mistake
from backnorm.dtypes import BFLOAT16, FLOAT16

Kind = Literal["right", "formula", "described", "precision", "indexing", "memory"]
# A dataclass with a field for each number: an array of shape (C,), or None if it is not known.
Numbers = Any

# The largest relative difference between the numbers of a call and those of a matching formula, by
# the element type of dx or y. Rounding dx to 8 bits changes a coefficient by about 1e-3.
_NEAR: dict[np.dtype, float] = {BFLOAT16: 2e-2, FLOAT16: 4e-3}
_NEAR_OF_WIDE = 1e-3
# A formula within this multiple of the nearest formula's distance matches as well as that one.
_MARGIN = 2.0
# The residual of a fit, relative to dx or y, that rounding can cause.
_RESIDUAL = {BFLOAT16: 3e-2, FLOAT16: 4e-3}
_RESIDUAL_OF_WIDE = 1e-4

# The error of an element, relative to the largest element, that rounding can cause.
_ROUNDING = {BFLOAT16: 2.0**-6, FLOAT16: 2.0**-9}
_ROUNDING_OF_WIDE = 2.0**-14
# Errors up to this are attributed to precision: of elements, relative to the largest one of the
# channel; of numbers, the norm of the errors relative to that of the right numbers.
_FEW_BITS = 2.0**-6
# The norm of the error of dgamma or dbeta that sums in float32 can cause, relative to its norm.
_FEW_BITS_OF_WIDE = 2.0**-16
# The difference of two numbers is this quantile over the channels. The median could miss |gamma| in
# place of gamma, which is right in half of the channels.
_QUANTILE = 0.75
# The distance of numbers that are not finite.
_FAR = 1e30
# The most channels that a sentence names.
_MOST_CHANNELS = 8
TINY = float(np.finfo(float).tiny)
# Two mistakes in the formula that are one mistake in the code, with its name and sentence.
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
                "memory", ("not-written",), f"{name} is not written: no element is finite"
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
    """Return the largest relative difference from the numbers of a matching formula."""
    return _NEAR.get(dtype, _NEAR_OF_WIDE)


def residual_of_rounding(dtype: np.dtype) -> float:
    """Return the residual of a fit, relative to the output, that rounding to a type can cause."""
    return _RESIDUAL.get(dtype, _RESIDUAL_OF_WIDE)


def _pairs(found: Numbers, formula: Numbers) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for each in fields(type(found)):
        own = getattr(found, each.name)
        if own is not None:
            yield each.name, own, getattr(formula, each.name)


def ratios(found: Numbers, right: Numbers) -> dict[str, float]:
    """Return the median over channels of each number divided by the right one."""
    with np.errstate(all="ignore"):
        return {name: float(np.median(own / good)) for name, own, good in _pairs(found, right)}


def distance(found: Numbers, formula: Numbers, least: Mapping[str, np.ndarray]) -> float:
    """Return the largest relative difference between two sets of numbers.

    The difference of a number is a quantile over the channels. It is relative to the larger of the
    two magnitudes, or to `least` if that is larger.
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
        # Formulas that the data cannot distinguish from the nearest one.
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
    texts: list[str] = []
    # The correct bits of numbers that are nearly right in every channel.
    bits: dict[str, int] = {}
    for name, own, good in _pairs(found, right):
        zero = np.abs(good) <= 1e-6 * least.get(name, 0.0)
        if zero.all():
            with np.errstate(over="ignore"):
                share = np.median(np.abs(own) / least.get(name, TINY))
            if share > near:
                texts.append(f"{terms[name]} is not 0, and should be")
            continue
        ratio = own[~zero] / good[~zero]
        middle = float(np.median(ratio))
        if np.quantile(np.abs(ratio - middle), _QUANTILE) > near * max(1.0, abs(middle)):
            error = _relative_error(own, good)
            if error <= _FEW_BITS:
                bits[terms[name]] = _bits(error)
            else:
                texts.append(f"{terms[name]} {_of_channels(own, good, near)}")
        elif abs(middle - 1.0) > near:
            texts.append(f"{terms[name]} is {middle:.4g} times what it should be in every channel")
    if bits:
        few = _precision(bits)
        if not texts:
            return few
        texts.append(few.says)
    if not texts:
        return Diagnosis("right", (), "the formula is right")
    return Diagnosis("described", (), ", and ".join(texts))


def _of_channels(own: np.ndarray, good: np.ndarray, near: float) -> str:
    """Return the predicate of a sentence about a number that is wrong in some channels."""
    wrong = np.abs(own - good) > near * np.abs(good)
    if (np.abs(own + good) <= near * np.abs(good))[wrong].all():
        channels = np.flatnonzero(wrong).tolist()
        named = ", ".join(map(str, channels[:_MOST_CHANNELS]))
        more = ", ..." * (len(channels) > _MOST_CHANNELS)
        return f"has the wrong sign in {len(channels)} of {own.size} channels: {named}{more}"
    return "differs from channel to channel"


def imprecise(
    found: Numbers, right: Numbers, dtype: np.dtype, terms: Mapping[str, str]
) -> Diagnosis | None:
    """Return the diagnosis if a number has fewer right bits than `dtype` allows, else None."""
    bits = {}
    for name, own, good in _pairs(found, right):
        error = _relative_error(own, good)
        if _NEAR.get(dtype, _FEW_BITS_OF_WIDE) < error <= _FEW_BITS:
            bits[terms[name]] = _bits(error)
    return _precision(bits) if bits else None


def _precision(bits: Mapping[str, int]) -> Diagnosis:
    """Return the diagnosis of outputs or terms that have few right bits."""
    *names, last = bits
    subject = f"{', '.join(names)} and {last} are" if names else f"{last} is"
    text = f"{subject} right to {min(bits.values())} bits: rounded, or summed up, in a narrow type"
    return Diagnosis("precision", ("few-bits",), text)


def _relative_error(own: np.ndarray, good: np.ndarray) -> float:
    """Return the norm of the numbers' error over that of the right numbers."""
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(own - good) / np.linalg.norm(good))


def _bits(error: float) -> int:
    """Return how many bits of numbers with this relative error are right."""
    return round(-math.log2(error)) - 1


def misplaced(
    name: str, functions: str, rows: np.ndarray, right: np.ndarray, dtype: np.dtype
) -> Diagnosis:
    """Return a diagnosis of an output that no formula explains, from its wrong elements.

    Parameters
    ----------
    name : str
        The output.
    functions : str
        The functions of an element, in words; every formula's output is a sum of their multiples.
    rows, right : numpy.ndarray
        The output and the right output, as float64 arrays of shape (C, M).
    dtype : numpy.dtype
        The element type of the output.
    """
    error = np.abs(rows - right)
    if (error <= _FEW_BITS * np.abs(right).max(1, keepdims=True)).all():
        return _precision({name: _bits(_relative_error(rows, right))})
    allowed = _ROUNDING.get(dtype, _ROUNDING_OF_WIDE) * np.abs(right).max()
    wrong = np.abs(rows - right) > allowed
    for shift in (1, -1):
        if not (np.abs(rows - np.roll(right, shift, axis=0)) > allowed).any():
            return Diagnosis(
                "indexing",
                ("channels-shifted",),
                f"channels are shifted: {name} of channel c is that of channel c {-shift:+d}",
            )
    if not (np.abs(np.sort(rows, axis=1) - np.sort(right, axis=1)) > allowed).any():
        return Diagnosis(
            "indexing",
            ("elements-permuted",),
            f"the elements of {name} are right, in a wrong order within their channel",
        )
    share = wrong.mean()
    if not share or share > 0.5:
        return Diagnosis(
            "indexing",
            ("indexing",),
            f"{name} is not a sum of multiples of {functions} in most channels: elements are read "
            "or written at wrong places",
        )
    where = np.argwhere(wrong)
    channel, element = map(int, where[0])
    of_channels = sorted({int(each) for each in where[:, 0]})
    if len(of_channels) <= len(rows) // 2:
        place = f"in channels {', '.join(map(str, of_channels[:_MOST_CHANNELS]))}"
    else:
        place = f"from element {int(where[:, 1].min())} of a channel on"
    return Diagnosis(
        "indexing",
        ("partly-wrong",),
        f"{share:.1%} of the elements of {name} are wrong, {place}; the first is element {element} "
        f"of channel {channel}, and the rest is right",
    )
