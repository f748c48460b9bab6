r"""Diagnose a wrong backward pass: describe the mistake in one sentence.

For every formula, right or wrong, dx is linear in three functions of an element: dy, 1 and
x - mean. For each channel, a least-squares fit gives the coefficients of these three functions.
Together with the channel's dgamma and dbeta, these are five numbers. `diagnose` compares them with
the five numbers of the right formula and of formulas with one or two mistakes
(:mod:`backnorm.conformance.formula`). The formula whose five numbers are nearest to those of the
backward pass determines which mistake is named. If the residual of the fit is large, no formula
explains dx: the mistake is then one of indexing or of memory access. This module does not judge the
precision of a right formula; `backnorm.conformance.ladder` does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backnorm.conformance._naming import (
    TINY,
    Diagnosis,
    computed_in_float32,
    described,
    imprecise,
    named,
    nearness,
    not_finite,
    ratios,
    relative_error,
    residual_of_rounding,
    sentence,
)
from backnorm.conformance._places import misplaced, partly_wrong, truncated, wrong_end
from backnorm.conformance.data import LayerData, in_layout, realistic_data
from backnorm.conformance.formula import (
    MISTAKES,
    RIGHT,
    Channels,
    Coefficients,
    Mistake,
    Steps,
    coefficients,
    rows_of,
    tails_left_out,
)
from backnorm.conformance.judge import GRADIENTS
from backnorm.dtypes import FLOAT64, element_type

__all__ = ["Diagnosis", "diagnose", "diagnostic_data"]

Arrays = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]

_TERMS = {
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
    outputs : tuple of numpy.ndarray or None
        dx, dgamma and dbeta; None for an output that is not judged.
    training : bool
        Whether the statistics depend on x.
    scaled : bool
        Whether gamma was passed.

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
    x, dy, mean, variance, gamma = data.backward_inputs
    channels = Channels.of(
        x, dy, mean, variance, gamma if scaled else None, training=training, **data.options
    )
    if not channels.x.size:
        return Diagnosis("right", (), "there are no elements")
    unwritten = not_finite(dict(zip(GRADIENTS, outputs, strict=True)))
    if unwritten is not None:
        return unwritten
    if outputs[0] is not None and not outputs[0].any():
        names = [
            n for n, a in zip(GRADIENTS, outputs, strict=True) if a is not None and not a.any()
        ]
        names_of_zero = tuple(f"{name}-zero" for name in names)
        return Diagnosis("formula", names_of_zero, sentence(names, "is 0"))
    found, residual = _fitted(channels, outputs, data.data_format)
    right = coefficients(channels)
    evidence = ratios(found, right) | {"residual": residual}
    dtype = FLOAT64 if outputs[0] is None else element_type(outputs[0].dtype) or FLOAT64
    near, least = nearness(dtype), _least_scales(channels)
    expected, axis = _dx(channels), data.channel_axis
    parameters = {n: (getattr(found, n), getattr(right, n)) for n in ("dgamma", "dbeta")}
    diagnosis = None
    # The end of dx is tested first, because wrong elements at the end of memory also change the
    # fitted coefficients of a few channels.
    if outputs[0] is not None and wrong_end(outputs[0], expected, axis):
        diagnosis = partly_wrong("dx", outputs[0], expected, axis, parameters)
    elif residual <= residual_of_rounding(dtype):
        known = [*MISTAKES, *tails_left_out(channels)]
        diagnosis = named(
            found, lambda each: coefficients(channels, _steps(each)), known, least, near
        )
    diagnosis = diagnosis or _of_other_inputs(data, outputs, near, training=training, scaled=scaled)
    if diagnosis is None and residual > residual_of_rounding(dtype):
        assert outputs[0] is not None
        diagnosis = misplaced("dx", "dy, 1 and x - mean", outputs[0], expected, axis)
    diagnosis = diagnosis or described(found, right, least, near, _TERMS)
    if diagnosis.kind == "right":
        # `found` and `right` were compared by a quantile of their differences in all channels, so a
        # few channels can still be wrong.
        rows = None if outputs[0] is None else rows_of(outputs[0], axis)
        diagnosis = (
            imprecise(parameters, mean.dtype)
            or partly_wrong("dx", outputs[0], expected, axis, parameters)
            or computed_in_float32({"dx": (rows, expected), **parameters}, x.dtype)
            or truncated("dx", outputs[0], expected, axis)
            or diagnosis
        )
    return replace(diagnosis, evidence=evidence)


def _dx(channels: Channels) -> np.ndarray:
    """Return the right dx of shape (C, M)."""
    gain, offset, slope = (each[:, None] for each in coefficients(channels).all[:3])
    dx: np.ndarray = gain * channels.dy + offset + slope * (channels.x - channels.mean[:, None])
    return dx


def _of_other_inputs(
    data: LayerData, outputs: Arrays, near: float, *, training: bool, scaled: bool
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
    dx, *of_channels = outputs
    for name, (says, other) in mistakes.items():
        x, dy, mean, variance, gamma = other.backward_inputs
        channels = Channels.of(
            x, dy, mean, variance, gamma if scaled else None, training=training, **other.options
        )
        pairs = list(zip(of_channels, coefficients(channels).all[3:], strict=True))
        if dx is not None:
            pairs.append((rows_of(dx.reshape(x.shape), other.channel_axis), _dx(channels)))
        if all(own is None or relative_error(own.astype(float), good) <= near
               for own, good in pairs):  # fmt: skip
            return Diagnosis("formula", (name,), says)
    return None


def _in_layout(data: LayerData, layout: str) -> LayerData:
    """Return the data, with the memory of x and dy read as if these arrays were in `layout`."""
    shape = in_layout(np.moveaxis(data.x, data.channel_axis, 1).shape, layout)
    x, dy = data.x.reshape(shape), data.dy.reshape(shape)
    return replace(data, x=x, dy=dy, data_format=layout)


def _fitted(channels: Channels, outputs: Arrays, data_format: str) -> tuple[Coefficients, float]:
    """In each channel, fit dx by a sum of three terms: a multiple of dy, a constant, and a multiple
    of x - mean. Return two values. The first has the three coefficients of each channel, and also
    dgamma and dbeta. The second is the median of the relative residuals of all channels.
    """
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
        # Without scaling, `lstsq` would take columns much smaller than the largest one for zeros.
        norms = np.linalg.norm(functions, axis=0) + TINY
        fit = np.linalg.lstsq(functions / norms, row, rcond=None)[0] / norms
        rest = np.linalg.norm(row - functions @ fit)
        norm = float(np.linalg.norm(row))
        # If a row has only zeros, the fit is exact, and the relative residual is 0. (Computed as a
        # quotient, it would be 0/0.)
        residual.append(float(rest) / norm if norm else 0.0)
        for values, value in zip((gain, offset, slope), fit, strict=True):
            values.append(float(value))
    found = Coefficients(*map(np.array, (gain, offset, slope)), *of_parameters)
    return found, float(np.median(residual))


def _least_scales(channels: Channels) -> dict[str, np.ndarray]:
    """Return, for offset and slope, the least numbers by which `distance` divides differences."""
    scale = np.abs(coefficients(channels).all[0]) * np.sqrt(np.square(channels.dy).mean(1))
    # If x is constant in a channel, the slope cannot be judged. Dividing by `TINY` then gives a
    # huge or infinite number, so that every difference of slopes counts as about 0.
    with np.errstate(over="ignore"):
        return {"offset": 0.2 * scale, "slope": 0.2 * scale / (channels.x.std(1) + TINY)}


def _steps(mistakes: tuple[Mistake, ...]) -> Steps:
    return replace(RIGHT, **{mistake.step: mistake.function for mistake in mistakes})
