"""Name the mistake in a formula, and describe outputs that no formula explains.

The outputs of a judged call are summarised by a few numbers per channel, such as the coefficients
of a fitted formula (`formula.Formula.numbers`). The functions here compare the numbers that were
found in an implementation's outputs with the numbers that right and wrong formulas give.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from backnorm.conformance._fit import Numbers, Result, relative_error
from backnorm.conformance.formula import FEW_BITS, Mistake, Values

Kind = Literal["right", "formula", "described", "precision", "indexing", "memory", "unknown"]

# If rounding explains the difference from no formula, the results were computed with less precision
# than any rung of the ladder has. A formula then matches if every other formula is at least this
# number of times as far from the results.
MARGIN = 8.0
# A diagnosis names at most this many mistakes that the data cannot distinguish.
_MOST_ALIKE = 4
# Two mistakes cancel in a number if its error is less than this share of the error that it has with
# one of them.
_CANCELLED = 0.25
# The share of errors that must have the rarer sign if errors are those of rounding.
_RARER_SIGN = 0.1

AS_ROUNDED = ", as if rounded, or summed up, in a narrow type"
# A sentence of a diagnosis lists at most this many channels by their numbers.
_MOST_CHANNELS = 8
# One mistake in the code can cause two mistakes in the formula. This table maps the names of the
# two to the name of the one, and to a sentence about it.
_AS_ONE = {
    frozenset(("gain-beta", "offset-gamma")): ("gamma-beta-swapped", "gamma and beta are swapped"),
    frozenset(("dgamma-dbeta", "dbeta-dgamma")): (
        "dgamma-dbeta-swapped", "dgamma and dbeta are swapped",
    ),
}  # fmt: skip


class Term(NamedTuple):
    """A term of the formula in each channel, or a result.

    `unsure` has the largest errors that rounding causes. It is infinite in channels in which the
    data do not determine the term.
    """

    own: np.ndarray
    right: np.ndarray
    unsure: np.ndarray

    @property
    def off(self) -> np.ndarray:
        """Where the term is wrong."""
        off: np.ndarray = np.abs(self.own - self.right) > self.unsure
        return off

    @property
    def is_part(self) -> bool:
        """Whether the term is not 0 in most channels, and the sign of its ratio to the right term
        is the same in all of these, unlike that of rounding errors.
        """
        known = np.abs(self.own) > self.unsure
        signs = np.sign(self.own * self.right)[known]
        return bool(known.mean() > 0.5 and abs(signs.sum()) == signs.size)

    @property
    def relative_error(self) -> float:
        """The relative error of the norm, without the channels that are not determined."""
        sure = np.isfinite(self.unsure)
        return relative_error(self.own[sure], self.right[sure])

    @property
    def errs_in_both_directions(self) -> bool:
        """Whether the magnitudes are often too large and often too small, as by rounding."""
        share = float((np.abs(self.own) > np.abs(self.right))[self.off].mean())
        return min(share, 1.0 - share) >= _RARER_SIGN


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a call.

    Attributes
    ----------
    kind : {"right", "formula", "described", "precision", "indexing", "memory", "unknown"}
        right: the errors are within the bounds of a rung of the ladder. formula: one or two
        mistakes explain all outputs. described: the formula is wrong in a way that has no name.
        precision: outputs have few correct bits. indexing: elements are wrong, or are at wrong
        places. memory: elements are not finite. unknown: none of these is shown.
    names : tuple of str
        The names of the mistakes. If the data cannot distinguish two mistakes, this is one name
        with the word "or".
    says : str
        The diagnosis as a sentence without a full stop.
    evidence : mapping of str to float
        For each number, the median over the channels of its ratio to the right number; and the
        residual of the fit relative to dx or y.
    wrong : frozenset of str
        The names of the coefficients and results that are wrong.
    places : str
        If only a small part of the numbers is wrong, a sentence that says which part; else "".
    """

    kind: Kind
    names: tuple[str, ...]
    says: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    wrong: frozenset[str] = frozenset()
    places: str = ""

    @property
    def is_fitted(self) -> bool:
        """Whether a mistake is named by a number that was read off the results."""
        return any(name.endswith("-other") for name in self.names)

    @property
    def is_firm(self) -> bool:
        """Whether a mistake is named, other than by such a number."""
        return self.kind == "formula" and not self.is_fitted

    @property
    def is_ambiguous(self) -> bool:
        """Whether the data cannot distinguish the mistakes that are named."""
        return "-or-" in "".join(self.names)

    def is_clearer_than(self, other: Diagnosis) -> bool:
        """Whether only the data of the other diagnosis cannot distinguish what it names."""
        return other.is_ambiguous and not self.is_ambiguous

    def agrees(self, other: Diagnosis) -> bool:
        """Whether both diagnoses may be those of one mistake.

        They name the same mistake, or mistakes of which the data of one cannot distinguish it; or
        neither names a mistake of the catalogue, and the same coefficients and results are wrong.
        If more than these are wrong, the terms of dx that constant statistics do not have, and that
        narrow types hide, do not count.
        """
        # A mistake in a part of the results and the same mistake in all can look alike.
        alternatives = [
            {name.partition("-only-")[0] for name in "-".join(each.names).split("-or-")} - {""}
            for each in (self, other)
        ]
        if self.says == other.says or (
            self.kind == other.kind == "formula" and set.intersection(*alternatives)
        ):
            return True
        if self.is_firm or other.is_firm:
            return False
        hidden = {"gain", "offset", "slope"}
        rest, other_rest = self.wrong - hidden, other.wrong - hidden
        return self.wrong == other.wrong or (bool(rest) and rest == other_rest)


def unexplained(results: Mapping[str, Result]) -> Diagnosis:
    """Return the diagnosis of wrong results of which nothing more is known."""
    wrong = [name for name, result in results.items() if result.is_wrong]
    return Diagnosis("unknown", (), sentence(wrong, "is wrong by an unknown mistake"))


def not_finite(results: Mapping[str, Result]) -> Diagnosis | None:
    """Return a diagnosis if a result is not finite where it should be, else None."""
    for name, result in results.items():
        wrong = ~np.isfinite(result.own) & np.isfinite(result.right) & result.is_wrong
        if wrong.all():
            return Diagnosis(
                "memory",
                ("not-written",),
                f"no element of {name} is finite: {name} is computed as NaN or infinity, is not "
                "written, or is added to its memory",
            )
        if wrong.any():
            finite = np.isfinite(result.tensor.astype(float))
            first = tuple(map(int, np.argwhere(~finite)[0]))
            return Diagnosis(
                "memory",
                ("partly-written",),
                f"{name} is not finite in {int(wrong.sum())} of {wrong.size} elements, first at "
                f"{first}: it is not written there, or overflows",
            )
    return None


def ratios(terms: Mapping[str, Term]) -> dict[str, float]:
    """Return for each term the median of its ratios to the right term, over the channels in which
    the data determine it. A term is omitted if these are less than half of all channels, or if its
    right value is 0 in any channel.
    """
    found = {}
    for name, (own, right, unsure) in terms.items():
        sure = np.isfinite(unsure)
        if right.all() and sure.mean() > 0.5:
            found[name] = float(np.median(own[sure] / right[sure]))
    return found


def named(
    numbers: Mapping[str, Numbers],
    formula: Callable[[tuple[Mistake, ...]], Values],
    predicted: Callable[[str, Values], np.ndarray],
    agrees: Callable[[Values], bool],
    mistakes_known: Sequence[Mistake],
    *,
    special: Callable[[], Diagnosis | None] = lambda: None,
    terms: Mapping[str, Term] | None = None,
) -> Diagnosis | None:
    """Return the diagnosis if a formula with a mistake, or with two, explains the results.

    A formula explains the results if rounding can cause all differences. If the right formula does
    so, or if too many formulas do, there is no diagnosis.

    Parameters
    ----------
    numbers : mapping
        The numbers of each result.
    formula : callable
        Takes mistakes; returns the coefficients of the formula with these mistakes, by name.
    predicted : callable
        Takes the name of a result and the coefficients of a formula; returns the numbers that it
        predicts.
    agrees : callable
        Takes the coefficients of a formula whose numbers are near those of the results; returns
        whether rounding explains the difference of every element.
    mistakes_known : sequence of Mistake
    special : callable
        Returns a diagnosis, or None, if no formula with one mistake explains the results.
    terms : mapping, optional
        The coefficients in the results. A formula with two mistakes must change those that are
        wrong in most channels. None: two mistakes cannot explain the results.
    """
    right = formula(())
    alone = {mistake: formula((mistake,)) for mistake in mistakes_known}

    def distance(values: Values) -> float:
        return max(each.distance(predicted(name, values)) for name, each in numbers.items())

    def is_near(name: str, values: Values) -> bool:
        return numbers[name].distance(predicted(name, values)) <= 1.0

    def explains(values: Values) -> bool:
        return all(is_near(name, values) for name in numbers) and agrees(values)

    expected = {name: each._replace(found=predicted(name, right)) for name, each in numbers.items()}

    def is_visible(values: Values) -> bool:
        return any(each.distance(predicted(name, values)) > 1.0 for name, each in expected.items())

    candidates: dict[tuple[Mistake, ...], Values] = {(): right}
    candidates |= {(mistake,): values for mistake, values in alone.items()}
    same = [mistakes for mistakes, values in candidates.items() if explains(values)]
    # If only the numbers, but no element, contradict the right formula, a mistake that alone
    # changes no more than rounding does is no explanation.
    if () not in same and agrees(right):
        same = [mistakes for mistakes in same if is_visible(candidates[mistakes])]
    if not same:
        found = special()
        if found is not None:
            return found
    if not same and terms is not None:
        wrong = {name for name, term in terms.items() if term.off.mean() > 0.5}
        # A result that is right, because two mistakes in it cancel, has no name (see `_cancel`).
        are_right = [name for name in numbers if is_near(name, right)]
        # By mistake, the coefficients that it leaves as they are, and those of them that it must
        # change. A mistake that changes none is not one of two.
        kept = {
            mistake: {name for name in wrong if np.allclose(values[name], right[name], 1e-9)}
            for mistake, values in alone.items()
            if all(is_near(name, values) for name in are_right)
        }
        for one, other in itertools.combinations(kept, 2):
            if one.step == other.step or kept[one] & kept[other]:
                continue
            values = formula((one, other))
            if explains(values) and not _cancel(values, alone[one], alone[other], right):
                same.append((one, other))
    if not same:
        # No formula explains the results: look for one mistake of which the results have less
        # precision than the ladder allows. In any precision, a term that the formula lacks is 0.
        distances = {mistakes: distance(values) for mistakes, values in candidates.items()}
        nearest = min(distances, key=lambda mistakes: distances[mistakes])
        same = [k for k, each in distances.items() if each <= MARGIN * distances[nearest]]
        errors = [
            relative_error(each.found, predicted(name, candidates[nearest]))
            for name, each in numbers.items()
        ]
        if max(errors) > FEW_BITS:
            return None
        present = [name for name, term in (terms or {}).items() if term.is_part]
        same = [k for k in same if all(candidates[k][name].any() for name in present)]
    if not same or () in same or len(same) > _MOST_ALIKE:
        return None
    names = [tuple(mistake.name for mistake in mistakes) for mistakes in same]
    if len(names) == 1:
        as_one = _AS_ONE.get(frozenset(names[0]))
        if as_one is not None:
            return Diagnosis("formula", (as_one[0],), as_one[1])
        return Diagnosis("formula", names[0], _says(same[0]))
    # The data cannot distinguish these mistakes.
    either = "-or-".join("-".join(each) for each in names)
    return Diagnosis("formula", (either,), ", or ".join(map(_says, same)))


def _cancel(both: Values, first: Values, second: Values, right: Values) -> bool:
    """Whether two mistakes cancel in a coefficient: then no implementation is likely to have both.

    A single mistake that is not known can give the same results.
    """
    for name, good in right.items():
        errors = [np.linalg.norm(each[name] - good) for each in (both, first, second)]
        # Different orders of evaluation cause smaller errors.
        if max(errors) > 1e-9 * np.linalg.norm(good) and errors[0] < _CANCELLED * max(errors):
            return True
    return False


def _says(mistakes: tuple[Mistake, ...]) -> str:
    return " and ".join(mistake.says for mistake in mistakes)


def of_terms(terms: Mapping[str, Term]) -> Diagnosis | None:
    """Return a diagnosis that says which terms are wrong, or None if none is wrong.

    Parameters
    ----------
    terms : mapping
        The words that name a term, and the term.
    """
    # Maps a predicate, such as "is not 0, and should be", to the terms of which it is true.
    wrong: dict[str, list[str]] = {}
    # The right bits of each term that is nearly right, and whether its errors are like those of
    # rounding.
    bits: dict[str, int] = {}
    is_rounded = True
    for name, term in terms.items():
        if not term.off.any():
            continue
        predicate = _predicate(term)
        if predicate is None:
            bits[name] = right_bits(term.relative_error)
            is_rounded = is_rounded and term.errs_in_both_directions
        else:
            wrong.setdefault(predicate, []).append(name)
    texts = [sentence(names, predicate) for predicate, names in wrong.items()]
    if bits:
        few = precision(bits, is_rounded)
        if not texts:
            return few
        texts.append(few.says)
    return Diagnosis("described", (), ", and ".join(texts)) if texts else None


def _predicate(term: Term) -> str | None:
    """Return what is wrong with a term, or None if it has few right bits."""
    own, right, unsure = term
    if not right.any():
        return "is not 0, and should be"
    known = np.abs(right) > unsure
    ratio, doubt = own[known] / right[known], unsure[known] / np.abs(right[known])
    middle = float(np.median(ratio)) if known.any() else 1.0
    # How much the ratios may differ if they are one factor.
    spread = doubt * max(1.0, abs(middle)) + 0.01 * abs(middle - 1.0)
    if term.off[known].mean() > 0.5 and (np.abs(ratio - middle) <= spread).all():
        where = "every channel" if known.all() else channel_numbers(np.flatnonzero(known).tolist())
        if f"{middle:.4g}" != "1":
            return f"is {_factor(middle)} times what it should be in {where}"
    if term.relative_error > FEW_BITS or (own.ndim == 1 and term.off.mean() <= 0.25):
        return _of_channels(own, right, term.off, unsure)
    low, high = float(ratio.min()), float(ratio.max())
    if term.errs_in_both_directions or low <= 1.0 <= high or f"{low:.4g}" == f"{high:.4g}":
        return None
    return f"is {low:.4g} to {high:.4g} times what it should be"


def _factor(value: float) -> str:
    """Return a factor in words, without digits that rounding changes."""
    nearest = round(value)
    if nearest != 1 and abs(value - nearest) <= 1e-3 * abs(value):
        return str(nearest)
    return f"{value:.3g}" if abs(value - 1.0) > FEW_BITS else f"{value:.4g}"


def sentence(names: Sequence[str], predicate: str) -> str:
    """Return a sentence about `names`. The predicate is given in the singular."""
    *others, last = names
    if not others:
        return f"{last} {predicate}"
    verb, _, rest = predicate.partition(" ")
    rest = rest.replace(" it should", " they should")
    return f"{', '.join(others)} and {last} {'are' if verb == 'is' else 'have'} {rest}"


def _of_channels(own: np.ndarray, right: np.ndarray, off: np.ndarray, unsure: np.ndarray) -> str:
    """Return the predicate of a sentence about a term that is wrong in some channels."""
    channels = np.flatnonzero(off).tolist()
    if (np.abs(own + right) <= unsure)[off].all():
        return f"has the wrong sign in {channel_numbers(channels)}"
    if off.mean() > 0.5 and len(channels) > 1:
        return "is wrong by different factors in most channels"
    return f"is {'wrong' if own[off].any() else '0'} in {channel_numbers(channels)}"


def channel_numbers(channels: Sequence[int]) -> str:
    """Return channel numbers in words, as a range if they have no gap."""
    first, last = channels[0], channels[-1]
    if first == last:
        return f"channel {first}"
    if last - first == len(channels) - 1:
        return f"channels {first} to {last}"
    more = f", ... ({len(channels)} channels)" * (len(channels) > _MOST_CHANNELS)
    return f"channels {', '.join(map(str, channels[:_MOST_CHANNELS]))}{more}"


def precision(bits: Mapping[str, int], is_rounded: bool) -> Diagnosis:
    """Return the diagnosis of results or terms that have few right bits.

    `is_rounded` says whether their errors are like those of rounding.
    """
    predicate = f"is right to {min(bits.values())} bits"
    predicate += AS_ROUNDED * is_rounded
    return Diagnosis("precision", ("few-bits",), sentence(list(bits), predicate))


def right_bits(error: float) -> int:
    """Return how many leading bits are right in numbers with this relative error."""
    return round(-math.log2(error)) - 1
