"""Random cases around the sizes and options at which kernels often change their path, and the
search for the smallest of them that fails.

The name of a drawn case says all that was drawn, for example
``drawn-7x24-frozen-eps0.25-dy.fortran-float32-float32-NCX``: the shape (N, C, space), words for
options that differ from the usual ones, and the variant. So :func:`drawn` makes the recipe again
from its name.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.conformance.axes import BATCH_NORM
from backnorm.conformance.battery import Recipe, Variant
from backnorm.conformance.data import LayerData, in_layout, realistic_data
from backnorm.conformance.verify.names import OperationName
from backnorm.conformance.verify.operations import OPERATIONS
from backnorm.dtypes import ELEMENT_TYPES, rounded
from backnorm.errors import ArgumentValueError

__all__ = ["TimeIsOverError", "described", "drawn", "is_drawn", "search", "storage_of"]

# A row maps words of names to their meaning, and to settings of `realistic_data`. A name has no two
# words of one row.
_Row = dict[str, tuple[str, dict[str, float]]]
_TRAINING: _Row = {"frozen": ("frozen statistics", {})}
_GAMMA: _Row = {
    "nogamma": ("no gamma", {}),
    "gamma1": ("gamma 1", {}),
    "gamma0": ("gamma 0 in every second channel", {}),
}
_STATISTICS: _Row = {"foreign": ("statistics of another batch", {})}
_EPSILON: _Row = {
    f"eps{value:g}": (f"epsilon {value:g}", {"epsilon": value})
    for value in (1.0, 0.25, 1e-3, 1e-12, 0.0)
}
_X: _Row = {
    "small": ("x times 1/64", {"scale": 2.0**-6}),
    "large": ("x times 16", {"scale": 16.0}),
    "far": ("the mean of x 30 times its deviation", {"ratio": 30.0}),
}
_DY: _Row = {
    "sparse": ("dy 0 in every second element", {}),
    "tiny": ("dy times 1e-6", {"gradient_scale": 1e-6}),
    "huge": ("dy times 1000", {"gradient_scale": 1e3}),
}
_STORAGE: _Row = {
    f"{which}.{storage}": (f"{which} {says}", {})
    for storage, says in {
        "readonly": "read-only",
        "misaligned": "one element behind an aligned address",
        "fortran": "in Fortran order",
        "permuted": "a permuted view of the other layout",
        "strided": "a view of every second element",
    }.items()
    for which in ("dy", "x", "inputs")
}
_ROWS = (_TRAINING, _GAMMA, _STATISTICS, _EPSILON, _X, _DY, _STORAGE)
# A forward pass has no dy, takes no statistics, and has no other words for its memory. Its epsilon
# is not 0, because x of one element per channel has the variance 0.
_FORWARD = (_GAMMA, {word: row for word, row in _EPSILON.items() if row[1]["epsilon"]}, _X)
# A layer has its own epsilon, and the statistics of its x. Without "far", because flax computes the
# variance by squares, and without strides, with some of which PyTorch's layers are wrong.
_LAYER = (
    _TRAINING,
    {word: row for word, row in _GAMMA.items() if word != "nogamma"},
    {word: row for word, row in _X.items() if word != "far"},
    _DY,
)
_WORDS = {word: about for row in _ROWS for word, about in row.items()}
_NAME = re.compile(r"drawn-([\dx]+)((?:-[a-z].*?)?)-(\w+)-(\w+)-(NCX|NXC)")

# The largest number of elements of x is one of these, so that most cases take little time.
_ELEMENTS = 1 << 12, 1 << 14, 1 << 16, 1 << 18
_CHANNELS = 4097
# A failing case may be shrunk for this many seconds after the deadline.
_SHRINKING = 3.0
# Numbers at and around powers of two, the next primes, and multiples of lengths of vectors.
_POWERS = [1 << k for k in range(18)]
_PRIMES = [11, 17, 37, 67, 131, 257, 521, 1031, 2053, 4099, 8209, 16411, 32771, 65537, 131101]
_SIZES = sorted(
    {p + d for p in _POWERS for d in (-1, 0, 1) if p + d}
    | {3 * p for p in _POWERS[:-1]}
    | {*_PRIMES, 5, 7, 13, 40, 56, 72, 80, 100, 112, 1000, 200_000}
)
# With an epsilon below this, a variance of 0 has no finite result, so variances are larger.
_SAFE_EPSILON, _SAFE_VARIANCE = 1e-6, 2.0**-12


class TimeIsOverError(BaseException):
    """The time of a search is over. hypothesis takes an Exception for a failure."""


class _FailsError(Exception):
    """A recipe fails."""


def is_drawn(name: str) -> bool:
    """Whether a case with this name was drawn."""
    return name.startswith("drawn-")


def drawn(name: str) -> Recipe:
    """Return the recipe of a name.

    Raises
    ------
    ArgumentValueError
        If no such recipe can be drawn.
    """
    match, dtypes = _NAME.fullmatch(name), {str(dtype): dtype for dtype in ELEMENT_TYPES}
    if match is not None and {match[3], match[4]} <= dtypes.keys():
        words = _words(name)
        shape = tuple(map(int, re.findall(r"\d+", match[1])))
        if set(words) <= _WORDS.keys() and len(shape) > 1 and all(shape):
            variant = Variant(dtypes[match[3]], dtypes[match[4]], match[5])
            return _recipe(shape, words, variant)
    raise ArgumentValueError("--only", "names no drawn case", came=name)


def _words(name: str) -> tuple[str, ...]:
    match = _NAME.fullmatch(name)
    # An exponent of epsilon follows a hyphen, too.
    return tuple(re.split(r"-(?=[a-z])", match[2])[1:]) if match else ()


def _recipe(shape: Sequence[int], words: Sequence[str], variant: Variant) -> Recipe:
    return Recipe(
        "-".join(("drawn", "x".join(map(str, shape)), *words)),
        variant,
        in_layout(tuple(shape), variant.data_format),
        partial(_data, words=words),
        training="frozen" not in words,
        scaled="nogamma" not in words,
    )


def _data(*arguments: Any, words: Sequence[str], **options: Any) -> LayerData:
    for word in words:
        options |= _WORDS[word][1]
    data = realistic_data(*arguments, **options)
    mean, variance = data.mean.astype(float), data.variance.astype(float)
    gamma, dy, kind = data.gamma.copy(), data.dy.copy(), data.mean.dtype
    if "foreign" in words:
        mean, variance = mean + 0.5 * data.normalization.is_centred, 3.0 * variance + 0.5
    if data.epsilon < _SAFE_EPSILON:
        variance = np.maximum(variance, _SAFE_VARIANCE)
    if "gamma1" in words:
        gamma[...] = 1
    if "gamma0" in words:
        gamma[::2] = 0
    if "sparse" in words:
        dy.flat[::2] = 0
    mean, variance = rounded(mean, kind), rounded(variance, kind)
    return replace(data, gamma=gamma, dy=dy, mean=mean, variance=variance)


def storage_of(name: str) -> Mapping[str, str]:
    """Return how inputs of the case are stored, by their names; the others are contiguous."""
    stored = next((word for word in _words(name) if "." in word), None)
    if stored is None:
        return {}
    which, _, storage = stored.partition(".")
    inputs = "x", "dy", "mean", "variance", "gamma", "beta"
    return dict.fromkeys(inputs if which == "inputs" else (which,), storage)


def described(recipe: Recipe) -> str:
    """Describe a drawn recipe in words."""
    dtype, statistics, layout = recipe.variant
    words = [_WORDS[word][0] for word in _words(recipe.name)]
    types = str(dtype) if statistics == dtype else f"{dtype} with parameters of {statistics}"
    return ", ".join([f"x of {'x'.join(map(str, recipe.shape))}", f"{types} {layout}", *words])


def search(
    fails: Callable[[Recipe], bool],
    variants: Sequence[Variant],
    operation: OperationName,
    *,
    deadline: float,
    seed: int,
    folder: Path,
) -> Recipe | None:
    """Draw recipes until one fails; return the smallest that is found to fail.

    Parameters
    ----------
    fails : callable
        Whether a recipe fails.
    variants : sequence of Variant
    operation : {"backward", "forward"}
    deadline : float
        When the clock `time.monotonic` shows this time, no more recipes are drawn.
    seed : int
    folder : Path
        A folder for files of hypothesis.

    Raises
    ------
    ArgumentValueError
        If hypothesis is not installed.
    """
    try:
        import hypothesis
        from hypothesis.configuration import set_hypothesis_home_dir
    except ImportError as error:
        raise ArgumentValueError(
            "--budget", "needs the package hypothesis, which is not installed",
            hint="pip install hypothesis",
        ) from error  # fmt: skip
    set_hypothesis_home_dir(folder)
    failing: list[Recipe] = []

    def check(recipe: Recipe) -> bool:
        if time.monotonic() >= deadline + bool(failing) * _SHRINKING:
            raise TimeIsOverError
        if fails(recipe):
            failing.append(recipe)
            return True
        return False

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=1 << 30,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(_strategy(variants, operation))
    def run(recipe: Recipe) -> None:
        if check(recipe):
            raise _FailsError

    try:
        with contextlib.suppress(_FailsError):
            run()
        if failing:
            _bisect(min(failing, key=_size), check)
    except TimeIsOverError:
        # The smallest case that has failed until now is returned.
        pass
    finally:
        set_hypothesis_home_dir(None)
    return min(failing, key=_size) if failing else None


def _strategy(variants: Sequence[Variant], operation: OperationName) -> Any:
    """Return hypothesis's strategy for recipes."""
    from hypothesis import strategies

    drawn_for, rows = OPERATIONS[operation], tuple(_ROWS)
    if drawn_for.is_forward:
        rows = _FORWARD
    elif operation == "layer":
        rows = _LAYER
    elif drawn_for.normalization != BATCH_NORM:
        rows = tuple(row for row in _ROWS if row is not _TRAINING)

    @strategies.composite
    def recipes(draw: Any) -> Recipe:
        def up_to(largest: int) -> int:
            return int(draw(strategies.integers(1, largest)))

        # The channels and one other axis are long, the rest is short and often 1. The long ones are
        # drawn in either order, because the second has only the room that the first leaves.
        room, rank = draw(strategies.sampled_from(_ELEMENTS)), 1 + up_to(5)
        others = [axis for axis in range(rank) if axis != 1]
        long, shape = others[up_to(rank - 1) - 1], [1] * rank
        for axis in draw(strategies.sampled_from(((1, long), (long, 1)))):
            most = min(room // math.prod(shape), _CHANNELS if axis == 1 else room)
            shape[axis] = _SIZES[up_to(bisect.bisect_right(_SIZES, most)) - 1]
        short = draw(strategies.sampled_from((1, 1, 2, 3, 9)))
        for axis in others:
            if axis != long:
                shape[axis] = up_to(min(short, room // math.prod(shape)))
        words = [draw(strategies.sampled_from(("", *row))) for row in rows]
        variant = draw(strategies.sampled_from(variants))
        return _recipe(shape, [word for word in words if word], variant)

    return recipes()


def _size(recipe: Recipe) -> tuple[Any, ...]:
    """Return a key that is small for small and plain recipes."""
    return len(_words(recipe.name)), math.prod(recipe.shape), len(recipe.shape), recipe.name


def _bisect(recipe: Recipe, fails: Callable[[Recipe], bool]) -> None:
    """Look for smaller sizes, which hypothesis does not draw, with which a recipe fails."""
    variant, words = recipe.variant, _words(recipe.name)
    shape = list(map(int, re.findall(r"\d+", recipe.name.split("-")[1])))
    for axis, size in enumerate(shape):
        low, high = 1, size
        while low < high:
            shape[axis] = (low + high) // 2
            if fails(_recipe(shape, words, variant)):
                high = shape[axis]
            else:
                low = shape[axis] + 1
        shape[axis] = high
