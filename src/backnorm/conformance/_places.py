"""Describe outputs that are wrong at some places, or whose elements are at wrong places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backnorm.conformance._fit import Result
from backnorm.conformance._naming import (
    Diagnosis,
    channel_numbers,
    right_bits,
    sentence,
)
from backnorm.conformance._ulps import ulp_at
from backnorm.conformance.formula import FEW_BITS
from backnorm.dtypes import FLOAT64
from backnorm.reference import Exact

# An output is partly wrong if at most the share `_PART` of its elements is wrong, and if there is a
# gap between the errors of these and those of the rest: the share `_GAP` of the least error of a
# wrong element is the largest error of the rest, but for a few elements that are nearly right by
# accident (at most the share `_GAP` of the wrong ones). A mistake in a formula causes errors of all
# sizes.
_PART, _GAP = 0.25, 0.25
# A run of elements in memory, or a set of channels, counts as wrong if at least this share of its
# elements is wrong. This share is less than 1, because a mistake can give some elements their right
# value by accident.
_MOST = 0.8
# The end of a tensor consists of at most the share `_SHORT` of the tensor's elements. The end
# counts as wrong if at least the share `_MOST_OF_END` of its elements is wrong. This share is only
# one half, because a short end can have several elements that are right by accident. The errors of
# the elements before the end are at most the share `_OF_REST` of the largest element.
_SHORT, _MOST_OF_END, _OF_REST = 0.05, 0.5, 2.0**-14
# An output counts as truncated if this share of its elements has the error of truncation, with at
# most this error, in ulps, of all roundings before.
_NEARLY_ALL, _OTHER_ROUNDINGS = 0.99, 0.02


def misplaced(result: Result, functions: str) -> Diagnosis:
    """Diagnose a tensor that no formula explains, by comparing it with the right tensor.

    Parameters
    ----------
    result : Result
    functions : str
        The functions of an element, in words; every formula's tensor is a sum of their multiples.
    """
    name, own, right = result.name, result.own, result.right
    allowed = result.allowed.max(1, keepdims=True)

    def is_as(other: np.ndarray, expected: np.ndarray, allowed: np.ndarray = allowed) -> bool:
        return bool((np.abs(other - expected) <= allowed).all())

    unknown = Diagnosis(
        "described", (), f"{name} is not a sum of multiples of {functions} in most channels"
    )
    if is_as(own, right):
        return unknown
    for shift in (1, -1):
        if is_as(own, np.roll(right, shift, axis=0), np.maximum(allowed, np.roll(allowed, shift))):
            text = f"channels are shifted: {name} of channel c is that of channel c {-shift:+d}"
            return Diagnosis("indexing", ("channels-shifted",), text)
    order = {1: "in a wrong order within their channel", None: "at wrong places"}
    for axis, where in order.items():
        if is_as(np.sort(own, axis), np.sort(right, axis), allowed.max(axis, keepdims=True)):
            text = f"the elements of {name} are right, {where}"
            return Diagnosis("indexing", ("elements-permuted",), text)
    low, high = own.min(1, keepdims=True), own.max(1, keepdims=True)
    beyond = np.count_nonzero((right < low - allowed) | (right > high + allowed))
    if (low < high).all() and is_as(own, np.clip(right, low, high)) and beyond > 2 * len(own):
        text = f"{name} is clipped: many elements have the least or the largest value of a channel"
        return Diagnosis("described", (), text)
    return unknown


def partly_wrong(tensor: Result | None, parameters: Sequence[Result]) -> Diagnosis | None:
    """Return a diagnosis if a small part of the numbers of the results is wrong, else None."""
    texts = []
    # Numbers of a result whose errors are large count as wrong; the rest count as right. This list
    # has the largest relative errors of the numbers that count as right, for results of which not
    # all of these numbers are right.
    others = [0.0]

    def check_rest(result: Result, rest: np.ndarray) -> None:
        if (result.off & rest).any():
            error = np.abs(result.own - result.right)[rest]
            others.append(float(error.max() / np.abs(result.right).max()))

    if tensor is not None:
        wrong, end = _clearly_wrong(tensor), wrong_end(tensor)
        between = _clearly_wrong(tensor, _GAP) & ~wrong
        if wrong.mean() > _PART or (not end and between.sum() > _GAP * wrong.sum()):
            return None
        if wrong.any():
            texts.append(_wrong_elements(tensor, wrong, end))
            # The rest has the elements before a wrong end, or those of the channels without a wrong
            # element. If every channel has a wrong element, find the first index at which any
            # channel is wrong, and take the elements before it in all channels.
            rest = np.broadcast_to(~wrong.any(1, keepdims=True), wrong.shape)
            if end:
                rest = _in_memory(tensor) < wrong.size - end
            elif not rest.any():
                rest = np.broadcast_to(np.cumsum(wrong.any(0)) == 0, wrong.shape)
            check_rest(tensor, rest)
    channels: dict[tuple[int, ...], list[str]] = {}
    for each in parameters:
        wrong = np.abs(each.own - each.right) > FEW_BITS * np.abs(each.right).max()
        wrong &= each.off
        if wrong.mean() > _PART:
            return None
        check_rest(each, ~wrong)
        channels.setdefault(tuple(np.flatnonzero(wrong).tolist()), []).append(each.name)
    channels.pop((), None)
    for places, names in channels.items():
        texts.append(sentence(names, f"is wrong in {channel_numbers(places)}"))
    if not texts or max(others) > _GAP * FEW_BITS:
        return None
    rest_says = "; the rest is right"
    if any(others):
        rest_says += f" to {right_bits(max(others))} bits"
    return Diagnosis("indexing", ("partly-wrong",), ", and ".join(texts) + rest_says)


def truncated(tensor: Result) -> Diagnosis | None:
    """Return the diagnosis if a tensor is rounded toward zero, else None.

    The right values are not exact enough to tell how a float64 tensor is rounded, so such a tensor
    gets None.
    """
    if tensor.dtype == FLOAT64:
        return None
    ulp = ulp_at(Exact.of(tensor.right), tensor.dtype)
    lost = (np.abs(tensor.right) - np.abs(tensor.own)) / ulp
    # Truncation loses 0 to 1 ulp, on average 1/2. Elements whose terms cancel have larger errors.
    is_lost = (lost > -_OTHER_ROUNDINGS) & (lost < 1.0 + _OTHER_ROUNDINGS)
    if is_lost.mean() < _NEARLY_ALL or lost[is_lost].mean() < 0.4:
        return None
    text = f"{tensor.name} is rounded toward zero, not to the nearest number"
    return Diagnosis("precision", ("truncated",), text)


def wrong_end(tensor: Result) -> int:
    """Return how many elements at the end of a tensor's memory are wrong, if all others are right.

    If elements elsewhere are wrong, too, or if the wrong end is more than 5 % of the tensor, return
    0.
    """
    if not _clearly_wrong(tensor).any():
        return 0
    # The elements before the end may have few bits.
    few_bits = _OF_REST * np.abs(tensor.right).max()
    wrong = np.abs(tensor.own - tensor.right) > np.maximum(tensor.allowed, few_bits)
    if not wrong.any():
        # The wrong elements are small beside those of other channels.
        return 0
    places, size = _in_memory(tensor)[wrong], wrong.size
    end = size - int(places.min())
    return end if end <= _SHORT * size and places.size >= _MOST_OF_END * end else 0


def _clearly_wrong(tensor: Result, share: float = 1.0) -> np.ndarray:
    """Return where the errors are larger than this share of those that low precision can cause."""
    few_bits = share * FEW_BITS * np.abs(tensor.right).max(1, keepdims=True)
    wrong: np.ndarray = np.abs(tensor.own - tensor.right) > np.maximum(tensor.allowed, few_bits)
    return wrong


def _in_memory(tensor: Result) -> np.ndarray:
    """Return the index of each element of a tensor in row-major memory, as an array (C, M)."""
    places = np.arange(tensor.tensor.size).reshape(tensor.tensor.shape)
    return tensor.axes.rows(places)


def _wrong_elements(tensor: Result, wrong: np.ndarray, end: int) -> str:
    """Return a sentence that says which elements of a tensor are wrong.

    `wrong` has the shape (C, M). It is True for each wrong element, and at least one element is
    wrong. `end` is the number of elements at the end of the tensor that are wrong if all others are
    right, else 0 (see `wrong_end`).
    """
    name, size = tensor.name, tensor.tensor.size
    tail = end or size - int(_in_memory(tensor)[wrong].min())
    state = "wrong" if tensor.own[wrong].any() else "0"
    if end or int(wrong.sum()) >= _MOST * tail:
        if tail == 1:
            return f"the last element of {name} in memory is {state}"
        return f"the last {tail} of the {size} elements of {name} in memory are {state}"
    channels = np.flatnonzero(wrong.any(1))
    if len(channels) > len(wrong) // 2:
        place = f"from element {np.flatnonzero(wrong.any(0))[0]} of a channel on"
    elif wrong[channels].mean() >= _MOST:
        return f"{name} is {state} in {channel_numbers(channels.tolist())}"
    else:
        place = f"in {channel_numbers(channels.tolist())}"
    channel, element = np.argwhere(wrong)[0]
    return (
        f"{wrong.mean():.1%} of the elements of {name} are {state}, {place}; the first is element "
        f"{element} of channel {channel}"
    )
