r"""Diagnose a wrong backward pass: describe the mistake in one sentence.

`diagnose` first grades the results (:mod:`backnorm.conformance.ladder`). Results that are on a rung
of the ladder are right for any data, and have no mistake.

For every formula, right or wrong, dx is linear in three functions of an element: dy, 1 and
x - mean. For each channel, a least-squares fit gives the coefficients of these three functions.
`diagnose` compares the fit, dgamma and dbeta with the right formula and with formulas that have one
or two mistakes (:mod:`backnorm.conformance.formula`). A mistake is named if rounding explains the
rest of the errors, and if the data distinguish the mistake from others. If no formula explains dx,
elements may be at wrong places, or dx may not be linear in dy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from backnorm.conformance._explain import explained
from backnorm.conformance._fit import Result, relative_error, results_of
from backnorm.conformance._naming import FEW_BITS, MARGIN, Diagnosis, Values, sentence
from backnorm.conformance.data import LayerData, in_layout, realistic_data
from backnorm.conformance.formula import (
    MISTAKES,
    RIGHT,
    Channels,
    Mistake,
    coefficients,
    rows_of,
    tails_left_out,
)
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import GradientLadder, allowances

__all__ = ["Diagnosis", "diagnose", "diagnostic_data"]

Array = np.ndarray
Arrays = tuple[Array | None, Array | None, Array | None]

_WORDS = {
    "": "dy, 1 and x - mean",
    "gain": "the factor of dy in dx",
    "offset": "the term sum(dy)/M of dx",
    "slope": "the term along x - mean of dx",
    "dgamma": "dgamma",
    "dbeta": "dbeta",
}


def diagnostic_data(
    dtype: np.dtype,
    *,
    data_format: str = "NCX",
    statistics_dtype: np.dtype | None = None,
    seed: int = 0,
) -> LayerData:
    """Return inputs for which different mistakes in a formula give different numbers.

    There are 13 channels of 7 x 39 = 273 elements, in all 3549 elements. None of these three
    numbers is a multiple of a vector length. Axes 1 and -1 have equal sizes, so a channel axis that
    is guessed from sizes is wrong in one layout. epsilon is about as large as the smallest
    variances. mean and variance differ from the mean and variance of x, and gamma has both signs.
    The mean of dy is not 0, and dy is correlated with x.
    """
    rng = np.random.default_rng(seed)
    data = realistic_data(
        (7, 13, 3, 13),
        dtype,
        data_format=data_format,
        rng=rng,
        statistics_dtype=statistics_dtype,
        epsilon=0.25,
        scale=0.5,
    )
    mean, variance = data.mean.astype(float), data.variance.astype(float)
    return replace(
        data,
        mean=(mean + rng.uniform(0.2, 0.6, 13)).astype(data.mean.dtype),
        variance=(variance * rng.uniform(1.3, 2.5, 13)).astype(data.variance.dtype),
    )


def diagnose(
    data: LayerData, outputs: Arrays, *, training: bool = True, scaled: bool = True
) -> Diagnosis:
    """Return the diagnosis of the outputs of a backward pass.

    Parameters
    ----------
    data : LayerData
        The inputs. Only inputs like those of :func:`diagnostic_data` distinguish all mistakes.
        If the inputs do not distinguish a mistake from others, the diagnosis names them all, or
        none.
    outputs : tuple of numpy.ndarray or None
        dx, dgamma and dbeta; None for an output that is not judged.
    training : bool
        Whether the statistics depend on x.
    scaled : bool
        Whether gamma was passed.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an output has an element type without bounds, or a wrong shape.

    Examples
    --------
    >>> import numpy as np
    >>> from backnorm import batch_norm_backward
    >>> from backnorm.conformance.data import LayerData
    >>> x, dy = np.random.default_rng(0).standard_normal((2, 8, 4, 6, 6), dtype=np.float32)
    >>> mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    >>> gamma, beta = np.array([2, -1, 3, 0.5], np.float32), np.zeros(4, np.float32)
    >>> dx, dgamma, dbeta = batch_norm_backward(x, dy, mean, variance, gamma, epsilon=1e-5)
    >>> data = LayerData(x, dy, mean, variance, gamma, beta, 1e-5, "NCX")
    >>> diagnose(data, (dx, dgamma, -dbeta)).says
    'dbeta has the wrong sign'
    """
    if not data.x.size:
        return Diagnosis("right", (), "there are no elements")

    def operands(of: LayerData) -> tuple[Array, Array, Array, Array, Array | None]:
        return of.x, of.dy, of.mean, of.variance, of.gamma if scaled else None

    ladder = GradientLadder.of(*operands(data), training=training, **data.options)
    known = ladder.data, ladder.count
    results = results_of(
        dict(zip(GRADIENTS, outputs, strict=True)),
        ladder,
        lambda name, dtype: allowances(
            name, ladder.value(name), ladder.terms(name), getattr(ladder.scales, name), dtype,
            *known,
        ),
        data.channel_axis,
    )  # fmt: skip
    wrong = [each for each in results.values() if each.is_wrong]
    if not wrong:
        return Diagnosis("right", (), "the errors are within the bounds of rounding")
    dx = results.get("dx")
    if dx in wrong and not dx.own.any():
        names = [each.name for each in wrong if not each.own.any()]
        return Diagnosis("formula", tuple(f"{n}-zero" for n in names), sentence(names, "is 0"))

    def channels(of: LayerData) -> Channels:
        return Channels.of(*operands(of), training=training, **of.options)

    this = channels(data)
    centred = this.x - this.mean[:, None]
    return explained(
        results,
        {"gain": this.dy, "offset": np.ones_like(centred), "slope": centred},
        lambda mistakes: _values(this, mistakes),
        [*MISTAKES, *tails_left_out(this)],
        _WORDS,
        lambda: _of_other_inputs(data, results, channels),
    )


def _values(channels: Channels, mistakes: tuple[Mistake, ...] = ()) -> Values:
    """Return the coefficients of dx, dgamma and dbeta of a formula with these mistakes."""
    steps = replace(RIGHT, **{mistake.step: mistake.function for mistake in mistakes})
    found = coefficients(channels, steps)
    return {name: getattr(found, name) for name in _WORDS if name}


def _of_other_inputs(
    data: LayerData, results: Mapping[str, Result], channels: Callable[[LayerData], Channels]
) -> Diagnosis | None:
    """Return the diagnosis if the outputs are right for inputs that differ from `data`.

    The differing inputs are those of two known mistakes: x and dy are swapped, or they are read in
    the other layout.
    """
    layout = "NCX" if data.data_format == "NXC" else "NXC"
    mistakes = {
        "x-dy-swapped": ("x and dy are swapped", replace(data, x=data.dy, dy=data.x)),
        "layout-ignored": (
            f"x and dy are read as {layout}, not as {data.data_format}", _in_layout(data, layout)
        ),
    }  # fmt: skip
    # The results are far from the right ones.
    of_right = max(relative_error(each.own, each.right) for each in results.values())
    for name, (says, other) in mistakes.items():
        of_other = channels(other)
        values = _values(of_other)
        centred = of_other.x - of_other.mean[:, None]
        gain, offset, slope = (values[n][:, None] for n in ("gain", "offset", "slope"))
        predicted = {"dx": gain * of_other.dy + offset + slope * centred, **values}
        error = max(
            relative_error(
                rows_of(each.tensor.reshape(other.x.shape), other.channel_axis)
                if each.name == "dx" else each.own[:, 0],
                predicted[each.name],
            )
            for each in results.values()
        )  # fmt: skip
        if error <= FEW_BITS and error * MARGIN <= of_right:
            return Diagnosis("formula", (name,), says)
    return None


def _in_layout(data: LayerData, layout: str) -> LayerData:
    """Return the data, with the memory of x and dy read as if these arrays were in `layout`."""
    shape = in_layout(np.moveaxis(data.x, data.channel_axis, 1).shape, layout)
    x, dy = data.x.reshape(shape), data.dy.reshape(shape)
    return replace(data, x=x, dy=dy, data_format=layout)
