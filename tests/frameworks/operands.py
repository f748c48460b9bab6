"""Calls of a framework's functions with an operand absent, of another kind or in another's place.

From the signatures, each after a good call: an error that names the operand, or what the function
on NumPy's arrays gives for the same elements. Imports no framework.
"""

from __future__ import annotations

import inspect

import numpy as np

import backnorm
from backnorm.signature import SIGNATURES

CHANNELS = 5
CANONICAL = {
    "batch_norm": (backnorm.batch_norm_forward, "forward"),
    "batch_norm_backward": (backnorm.batch_norm_backward, "backward"),
    "batch_norm_inference": (backnorm.batch_norm_inference, "inference"),
}


def good(function):
    """Return good operands of a function by name, and its counterpart on NumPy's arrays."""
    canonical, operation = CANONICAL[function.__name__]
    taken = inspect.signature(function).parameters
    rng = np.random.default_rng(0)
    made = {
        operand.name: rng.uniform(
            0.5, 2, (3, 4, 2, CHANNELS) if operand.kind == "data" else CHANNELS
        ).astype(np.float32)
        for operand in SIGNATURES[operation].operands
        if operand.name in taken
    }
    return made, canonical


def kinds(array, tensor_of):
    """Yield a label, what is passed, and an array of the same elements (or what is no array)."""
    yield "absent", None, None
    yield "a string", "mean", "mean"
    yield "an object", object(), object()
    changed = {
        "itself": array,
        **{f"of {each}": array.astype(each) for each in ("float64", "float16", "int32", "bool")},
        "complex": array.astype(np.complex64),
        "too short": array[:-1],
        "too long": np.concatenate([array, array]),
        "empty": array[:0],
        "of rank 0": array.reshape(-1)[0],
        "of a higher rank": array[None],
        "a column": array[..., None],
        "one element expanded": np.broadcast_to(array[:1], array.shape),
    }
    for label, value in changed.items():
        yield label, tensor_of(value), value


def failures(function, tensor_of, least_rank=2):
    """Return what is wrong, and the number of cases.

    Parameters
    ----------
    function : callable
    tensor_of : callable
        Makes a tensor of the framework of an array.
    least_rank : int
        What the framework takes as x.
    """
    operands, canonical = good(function)
    tensors = {name: tensor_of(array) for name, array in operands.items()}
    wrong, count = [], 0
    for name, array in operands.items():
        swapped = ((f"which is {other}", tensors[other], operands[other])
                   for other in operands if other != name)  # fmt: skip
        for label, tensor, value in [*kinds(array, tensor_of), *swapped]:
            if name == "x" and least_rank <= np.ndim(value) < 2:
                continue
            try:
                wanted = canonical(**operands | {name: value}, epsilon=1e-3, data_format="NXC")
            except backnorm.ArgumentError:
                wanted = None
            function(**tensors, epsilon=1e-3)
            for _ in range(2):
                count += 1
                try:
                    found = function(**tensors | {name: tensor}, epsilon=1e-3)
                except backnorm.ArgumentError as error:
                    # Where x has another shape or type, the others do not go with it.
                    named = name in str(error) or (name == "x" and error.argument in operands)
                    what = None if named and label != "itself" else repr(error)
                except Exception as error:
                    what = f"not ours: {error!r}"
                else:
                    what = differences(found, wanted)
                if what:
                    wrong.append(f"{name} {label}: {what}")
    return list(dict.fromkeys(wrong)), count


def differences(found, wanted):
    """Return what differs between results, None if they are the same."""
    if wanted is None:
        return "a result, but refused on arrays"
    if isinstance(wanted, np.ndarray):
        found, wanted = (found,), (wanted,)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        one = np.asarray(one)
        scale = max(1.0, float(np.abs(other).max(initial=0)))
        tolerance = 8 * float(np.finfo(other.dtype).eps) * scale
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"result {number} is {one.dtype}{one.shape}"
        if not np.allclose(one.astype(float), other.astype(float), rtol=0, atol=tolerance):
            return f"result {number} differs"
    return None
