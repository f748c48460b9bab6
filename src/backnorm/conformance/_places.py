"""Describe outputs that are wrong at some places, or whose elements are at wrong places."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backnorm._doubledouble import Exact
from backnorm.conformance._naming import (
    FEW_BITS,
    Diagnosis,
    channel_numbers,
    precision,
    relative_error,
    right_bits,
    sentence,
)
from backnorm.conformance.formula import rows_of
from backnorm.conformance.judge._ulps import ulp_at
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, element_type

# For outputs of each type: the largest error that rounding can cause in an element of the output,
# divided by the largest magnitude of all elements of the output.
_ROUNDING = {BFLOAT16: 2.0**-6, FLOAT16: 2.0**-9}
_ROUNDING_OF_WIDE = 2.0**-14
# A diagnosis calls numbers right if their relative error is at most this limit.
_RIGHT = {**_ROUNDING, FLOAT32: _ROUNDING_OF_WIDE, FLOAT64: 2.0**-43}
# A run of elements in memory, or a set of channels, counts as wrong if at least this share of its
# elements is wrong. This share is less than 1, because a mistake can give some elements their right
# value by accident.
_MOST = 0.8
# The end of a tensor consists of at most the share `_SHORT` of the tensor's elements. The end
# counts as wrong if at least the share `_MOST_OF_END` of its elements is wrong. This share is only
# one half, because a short end can have several elements that are right by accident.
_SHORT, _MOST_OF_END = 0.05, 0.5
# An output counts as truncated if this share of its elements has the error of truncation, with at
# most this error, in ulps, of all roundings before.
_NEARLY_ALL, _OTHER_ROUNDINGS = 0.99, 0.02


def misplaced(
    name: str, functions: str, tensor: np.ndarray, right: np.ndarray, axis: int
) -> Diagnosis:
    """Diagnose an output that no formula explains, by comparing it with the right output.

    Parameters
    ----------
    name : str
        The output.
    functions : str
        The functions of an element, in words; every formula's output is a sum of their multiples.
    tensor : numpy.ndarray
        The output, with channels on `axis`.
    right : numpy.ndarray
        The right output, as a float64 array of shape (C, M).
    axis : int
    """
    rows = rows_of(tensor, axis)
    error = np.abs(rows - right)
    if (error <= FEW_BITS * np.abs(right).max(1, keepdims=True)).all():
        return precision({name: right_bits(relative_error(rows, right))})
    allowed = _allowed(tensor, right)
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
    return partly_wrong(name, tensor, right, axis, {}) or Diagnosis(
        "indexing",
        ("indexing",),
        f"{name} is not a sum of multiples of {functions} in most channels: elements are read or "
        "written at wrong places",
    )


def partly_wrong(
    name: str,
    tensor: np.ndarray | None,
    right: np.ndarray,
    axis: int,
    parameters: Mapping[str, tuple[np.ndarray | None, np.ndarray]],
) -> Diagnosis | None:
    """Return a diagnosis if at most half of the numbers of an output are wrong, else None.

    Parameters
    ----------
    name, tensor, right, axis
        As in :func:`misplaced`.
    parameters : mapping
        By name, other outputs and their right values, of shape (C,).
    """
    texts = []
    # Numbers of an output whose errors are large count as wrong; the rest count as right. For each
    # output, this list has the largest relative error of the numbers that count as right.
    others = [0.0]
    if tensor is not None:
        error = np.abs(rows_of(tensor, axis) - right)
        wrong = error > np.maximum(_allowed(tensor, right), _few_bits(right))
        if 0 < wrong.mean() <= 0.5:
            end = wrong_end(tensor, right, axis)
            texts.append(_wrong_elements(name, tensor, wrong, axis, end))
            # `of_rest` has the errors of elements that count as right: those before a wrong end, or
            # those of the channels without a wrong element. If every channel has a wrong element,
            # find the first index at which any channel is wrong, and take the elements before it in
            # all channels.
            of_rest = error[~wrong.any(1)]
            if end:
                of_rest = error[_in_memory(tensor, axis) < tensor.size - end]
            elif not of_rest.size:
                of_rest = error[:, : wrong.any(0).argmax()]
            others.append(float(of_rest.max(initial=0.0) / np.abs(right).max()))
    channels: dict[tuple[int, ...], list[str]] = {}
    for parameter, (own, good) in parameters.items():
        if own is not None:
            relative = np.abs(own - good) / np.abs(good).max()
            wrong = relative > FEW_BITS
            if wrong.mean() <= 0.5:
                others.append(float(relative[~wrong].max()))
                channels.setdefault(tuple(np.flatnonzero(wrong).tolist()), []).append(parameter)
    channels.pop((), None)
    for places, names in channels.items():
        texts.append(sentence(names, f"is wrong in {channel_numbers(places)}"))
    if not texts:
        return None
    dtype = FLOAT32 if tensor is None else element_type(tensor.dtype) or FLOAT64
    rest = "; the rest is right"
    if max(others) > _RIGHT[dtype]:
        rest += f" to {right_bits(max(others))} bits"
    return Diagnosis("indexing", ("partly-wrong",), ", and ".join(texts) + rest)


def truncated(
    name: str, tensor: np.ndarray | None, right: np.ndarray, axis: int
) -> Diagnosis | None:
    """Return the diagnosis if an output is rounded toward zero, else None.

    Parameters are as in :func:`misplaced`. The right values are not exact enough to tell how a
    float64 output is rounded, so such an output gets None.
    """
    dtype = FLOAT64 if tensor is None else element_type(tensor.dtype) or FLOAT64
    if tensor is None or dtype == FLOAT64:
        return None
    lost = (np.abs(right) - np.abs(rows_of(tensor, axis))) / ulp_at(Exact.of(right), dtype)
    # Truncation loses 0 to 1 ulp, on average 1/2. Elements whose terms cancel have larger errors.
    is_lost = (lost > -_OTHER_ROUNDINGS) & (lost < 1.0 + _OTHER_ROUNDINGS)
    if is_lost.mean() < _NEARLY_ALL or lost[is_lost].mean() < 0.4:
        return None
    text = f"{name} is rounded toward zero, not to the nearest number"
    return Diagnosis("precision", ("truncated",), text)


def wrong_end(tensor: np.ndarray, right: np.ndarray, axis: int) -> int:
    """Return how many elements at the end of a tensor's memory are wrong, if all others are right.

    If elements elsewhere are wrong, too, or if the wrong end is more than 5 % of the tensor, return
    0. `tensor` is the output to examine, with channels on `axis`. `right` has the right values, in
    shape (C, M).
    """
    allowed = _allowed(tensor, right)
    error = np.abs(rows_of(tensor, axis) - right)
    if not (error > np.maximum(allowed, _few_bits(right))).any():
        return 0
    places = _in_memory(tensor, axis)[error > allowed]
    end = tensor.size - int(places.min())
    return end if end <= _SHORT * tensor.size and places.size >= _MOST_OF_END * end else 0


def _few_bits(right: np.ndarray) -> np.ndarray:
    """Return the largest error that low precision alone can cause, by channel, shape (C, 1)."""
    error: np.ndarray = FEW_BITS * np.abs(right).max(1, keepdims=True)
    return error


def _in_memory(tensor: np.ndarray, axis: int) -> np.ndarray:
    """Return the index of each element of a tensor in row-major memory, as an array (C, M)."""
    return rows_of(np.arange(tensor.size).reshape(tensor.shape), axis).astype(int)


def _allowed(tensor: np.ndarray, right: np.ndarray) -> float:
    """Return the largest error that rounding can cause in an element."""
    dtype = element_type(tensor.dtype) or FLOAT64
    return _ROUNDING.get(dtype, _ROUNDING_OF_WIDE) * float(np.abs(right).max())


def _wrong_elements(name: str, tensor: np.ndarray, wrong: np.ndarray, axis: int, end: int) -> str:
    """Return a sentence that says which elements of a tensor are wrong.

    `wrong` has the shape (C, M). It is True for each wrong element, and at least one element is
    wrong. `end` is the number of elements at the end of the tensor that are wrong if all others are
    right, else 0 (see `wrong_end`).
    """
    tail = end or tensor.size - int(_in_memory(tensor, axis)[wrong].min())
    state = "wrong" if rows_of(tensor, axis)[wrong].any() else "0"
    if end or int(wrong.sum()) >= _MOST * tail:
        if tail == 1:
            return f"the last element of {name} in memory is {state}"
        return f"the last {tail} of the {tensor.size} elements of {name} in memory are {state}"
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
