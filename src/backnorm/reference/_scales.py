"""Magnitudes to which the expected rounding errors of a gradient are proportional."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backnorm.reference._blocks import Blocks
from backnorm.reference._doubledouble import FloatArray
from backnorm.reference._terms import inverse_deviation


@dataclass(frozen=True, slots=True)
class Scale:
    """Three magnitudes (besides T) of each element of an output, as float64 arrays of its shape.

    An element of an output is computed as ``direct + sum_j w_j S_j``. Here ``direct`` is a term
    without a sum. ``S_j = sum_i t_ij`` is a sum over the channel, with one term t_ij for each
    element i, and ``w_j`` is the factor of this sum.

    Attributes
    ----------
    value : numpy.ndarray
        ``|direct| + sum_j |w_j| |S_j|``, which scales the rounding errors after the sums.
    sums : numpy.ndarray
        ``sum_j |w_j| |S_j|``, which scales the systematic errors of partial sums.
    root : numpy.ndarray
        ``sum_j |w_j| sqrt(sum_i t_ij**2)``, which scales the random errors of partial sums.
    """

    value: FloatArray
    sums: FloatArray
    root: FloatArray


@dataclass(frozen=True, slots=True)
class GradientScales:
    """The `Scale` of each gradient that the backward pass returns."""

    dx: Scale
    dgamma: Scale
    dbeta: Scale


def gradient_scales(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    *,
    epsilon: float,
    data_format: str = "NCX",
    training: bool = True,
) -> GradientScales:
    """Return, in float64, the magnitudes to which expected errors of the gradients are
    proportional.

    The parameters are those of :func:`backward`. With M elements per channel, c = x - mean,
    s = 1/sqrt(variance + epsilon), D = sum(dy) and P = sum(dy c), the three numbers of the `Scale`
    of dx are::

        value  |gamma s| (|dy| + |D|/M + |c| s**2 |P|/M)
        sums   |gamma s| (|D|/M + |c| s**2 |P|/M)
        root   |gamma s| (sqrt(sum(dy**2))/M + |c| s**2 sqrt(sum((dy c)**2))/M)

    If the statistics are constants, dx does not depend on sums, so the terms with D, P or a sum are
    left out.
    """
    blocks = Blocks(x.shape, data_format)
    xs, dys, count = blocks.view(x), blocks.view(dy), blocks.count
    size = (blocks.outer, blocks.channels, blocks.inner)
    elements = np.zeros((3, *size))
    channels = np.zeros((2, 2, blocks.channels))
    with np.errstate(all="ignore"):
        for part in blocks.parts():
            m, g = part.channel(mean).plain, part.channel(gamma, 1.0).plain
            s = inverse_deviation(part.channel(variance), epsilon).plain
            gain, slope = np.abs(g * s), s * s / count
            peaks, totals = np.zeros((2, *m.shape)), np.zeros((2, 2, *m.shape))
            for cell in part.cells():
                d, c = part.load(dys, cell).plain, part.load(xs, cell).plain - m
                peaks = np.maximum(peaks, np.abs([d, d * c]).max(2, keepdims=True))
            # The terms of a sum are divided by a power of two near the largest of these terms, so
            # that the squares of the terms neither overflow nor vanish.
            units = np.ldexp(1.0, np.frexp(peaks)[1])
            for cell in part.cells():
                d, c = part.load(dys, cell).plain, part.load(xs, cell).plain - m
                terms = np.stack([d, d * c]) / units
                totals += terms.sum(2, keepdims=True), np.square(terms).sum(2, keepdims=True)
            sums, roots = units * np.abs(totals[0]), units * np.sqrt(totals[1])
            channels[0, :, part.channels] = np.stack([sums[0], s * sums[1]])[..., 0]
            channels[1, :, part.channels] = np.stack([roots[0], s * roots[1]])[..., 0]
            for cell in part.cells():
                d = np.abs(part.load(dys, cell).plain)
                c = np.abs(part.load(xs, cell).plain - m)
                forms = np.zeros((3, *d.shape))
                if training:
                    forms[1] = gain * (sums[0] / count + c * (slope * sums[1]))
                    forms[2] = gain * (roots[0] / count + c * (slope * roots[1]))
                forms[0] = gain * d + forms[1]
                for target, form in zip(elements, forms, strict=True):
                    block = np.moveaxis(target[cell], 1, 0)
                    block[...] = form.reshape(block.shape)
    sums_of, roots_of = channels
    return GradientScales(
        dx=Scale(*(form.reshape(x.shape) for form in elements)),
        dgamma=Scale(sums_of[1], sums_of[1], roots_of[1]),
        dbeta=Scale(sums_of[0], sums_of[0], roots_of[0]),
    )
