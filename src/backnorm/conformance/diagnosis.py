r"""Diagnose a wrong backward pass: describe the mistake in one sentence.

For every formula, right or wrong, dx is linear in three functions of an element: dy, 1 and
x - mean. A least-squares fit gives the three coefficients of every channel; dgamma and dbeta are
two more numbers. `diagnose` compares these five numbers with those of the right formula and of
formulas with one or two mistakes (:mod:`backnorm.conformance.formula`). The nearest formula names
the mistake. A large residual of the fit means an error of indexing or of memory. The precision of a
right formula is graded by `backnorm.conformance.ladder`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backnorm.conformance._naming import (
    TINY,
    Diagnosis,
    described,
    imprecise,
    misplaced,
    named,
    nearness,
    not_finite,
    ratios,
    residual_of_rounding,
)
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
    """Return inputs for which every mistake gives different numbers.

    There are 24 channels of 7 x 35 elements, which no vector length divides. epsilon is of the size
    of the smallest variances. mean and variance are not those of x, and gamma has both signs. dy
    has a mean and is correlated with x.
    """
    rng = np.random.default_rng(seed)
    shape = (7, 24, 5, 7) if data_format == "NCX" else (7, 5, 7, 24)
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
        The inputs. Only inputs like those of :func:`diagnostic_data` distinguish all mistakes.
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
    unwritten = not_finite(dict(zip(GRADIENTS, outputs, strict=True)))
    if unwritten is not None:
        return unwritten
    if outputs[0] is not None and not outputs[0].any():
        names = [
            n for n, a in zip(GRADIENTS, outputs, strict=True) if a is not None and not a.any()
        ]
        says = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} 0"
        return Diagnosis("formula", tuple(f"{name}-zero" for name in names), says)
    found, residual = _fitted(channels, outputs, data.data_format)
    right = coefficients(channels)
    evidence = ratios(found, right) | {"residual": residual}
    dtype = FLOAT64 if outputs[0] is None else element_type(outputs[0].dtype) or FLOAT64
    if residual > residual_of_rounding(dtype):
        assert outputs[0] is not None
        gain, offset, slope = (each[:, None] for each in right.all[:3])
        expected = gain * channels.dy + offset + slope * (channels.x - channels.mean[:, None])
        rows = rows_of(outputs[0], data.channel_axis)
        diagnosis = misplaced("dx", "dy, 1 and x - mean", rows, expected, dtype)
    else:
        near, least = nearness(dtype), _least_scales(channels)
        known = [*MISTAKES, *tails_left_out(channels)]
        diagnosis = named(
            found, lambda each: coefficients(channels, _steps(each)), known, least, near
        ) or described(found, right, least, near, _TERMS)
        if diagnosis.kind == "right":
            # The fitted numbers of dx are too inaccurate to be judged by the bits that are right.
            parameters = replace(found, gain=None, offset=None, slope=None)
            diagnosis = imprecise(parameters, right, mean.dtype, _TERMS) or diagnosis
    return replace(diagnosis, evidence=evidence)


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
        norm = float(np.linalg.norm(row))
        # A row of zeros is fitted by zeros.
        residual.append(float(rest) / norm if norm else 0.0)
        for values, value in zip((gain, offset, slope), fit, strict=True):
            values.append(float(value))
    found = Coefficients(*map(np.array, (gain, offset, slope)), *of_parameters)
    return found, float(np.median(residual))


def _least_scales(channels: Channels) -> dict[str, np.ndarray]:
    """Return the scales to which differences of small offsets and slopes are relative."""
    scale = np.abs(coefficients(channels).all[0]) * np.sqrt(np.square(channels.dy).mean(1))
    # The slope of a constant x cannot be judged: its scale is infinite.
    with np.errstate(over="ignore"):
        return {"offset": 0.2 * scale, "slope": 0.2 * scale / (channels.x.std(1) + TINY)}


def _steps(mistakes: tuple[Mistake, ...]) -> Steps:
    return replace(RIGHT, **{mistake.step: mistake.function for mistake in mistakes})
