"""Right operators with a ReLU, in steps and slow, and steps of which each makes them wrong."""

from __future__ import annotations

import numpy as np

from backnorm import reference
from backnorm.activations import RELU
from backnorm.conformance.formula import BACKWARD
from tests.support.dtypes import FLOAT32, is_16_bit

Wide = np.longdouble


class WithRelu:
    """The right operators. `steps` replace methods."""

    def __init__(self, **steps):
        vars(self).update(steps)

    @np.errstate(all="ignore")
    def forward(
        self, x, gamma=None, beta=None, *,
        activation=RELU, residual=None, epsilon, data_format="NCX",
    ):  # fmt: skip
        axis = 1 if data_format == "NCX" else x.ndim - 1
        others = tuple(k for k in range(x.ndim) if k != axis)
        v = x.astype(Wide)
        mean = v.mean(others) if v.size else np.zeros(x.shape[axis], Wide)
        c = v - np.expand_dims(mean, others)
        variance = (c * c).mean(others) if v.size else mean
        z = self.normalized(x, mean, variance, gamma, beta, epsilon, axis)
        y, positive = self.output(z, residual, activation.ceiling, x.dtype)
        operands = beta if gamma is None else gamma
        statistics = FLOAT32 if is_16_bit(x.dtype) else x.dtype
        statistics = statistics if operands is None else operands.dtype
        mask = self.pack(positive, x)
        return y, mean.astype(statistics), variance.astype(statistics), mask

    @np.errstate(all="ignore")
    def inference(
        self, x, mean, variance, gamma=None, beta=None, *,
        activation=RELU, residual=None, epsilon, data_format="NCX",
    ):  # fmt: skip
        axis = 1 if data_format == "NCX" else x.ndim - 1
        z = self.normalized(x, mean, variance, gamma, beta, epsilon, axis)
        return self.output(z, residual, activation.ceiling, x.dtype)[0]

    @np.errstate(all="ignore")
    def backward(
        self, x, dy, mean, variance, gamma=None, *,
        mask, residual=False, epsilon, data_format="NCX", training=True,
    ):  # fmt: skip
        positive = self.unpack(mask, x)
        gradient = self.masked(dy, positive)
        options = {"epsilon": epsilon, "data_format": data_format, "training": training}
        dx, dgamma, dbeta = BACKWARD(x, gradient, mean, variance, gamma, **options)
        dx, dgamma, dbeta = self.afterwards(
            (dx, dgamma, dbeta), positive, BACKWARD(x, dy, mean, variance, gamma, **options)
        )
        return dx, dgamma, dbeta, self.dresidual(dy, gradient) if residual else None

    def normalized(self, x, mean, variance, gamma, beta, epsilon, axis):
        others = tuple(k for k in range(x.ndim) if k != axis)

        def column(values, absent):
            values = np.full(x.shape[axis], absent) if values is None else values
            return np.expand_dims(values.astype(Wide), others)

        s = 1 / np.sqrt(column(variance, 0) + Wide(epsilon))
        return column(gamma, 1.0) * s * (x.astype(Wide) - column(mean, 0)) + column(beta, 0.0)

    def output(self, z, residual, ceiling, dtype):
        """Return y and where its bits are set."""
        total, ceiling = self.joined(z, residual), np.inf if ceiling is None else ceiling
        y = self.below(self.relu(total), ceiling).astype(dtype)
        return y, self.positive(z, total, y) & self.unbounded(total, y, ceiling)

    def joined(self, z, residual):
        return z if residual is None else z + residual.astype(Wide)

    def relu(self, total):
        return np.maximum(total, 0)

    def below(self, y, ceiling):
        return np.minimum(y, ceiling)

    def positive(self, z, total, y):
        return y.astype(Wide) > 0

    def unbounded(self, total, y, ceiling):
        return ~(y.astype(Wide) >= ceiling) | np.isinf(ceiling)

    def pack(self, positive, x):
        return reference.pack_mask(positive, x)

    def unpack(self, mask, x):
        return reference.unpack_mask(mask, x)

    def masked(self, dy, positive):
        return np.where(positive, dy, np.zeros((), dy.dtype))

    def afterwards(self, gradients, positive, unmasked):
        return gradients

    def dresidual(self, dy, masked):
        return masked


RIGHT = WithRelu()


def reversed_bits(mask):
    return np.packbits(np.unpackbits(mask, bitorder="little"))


def in_order_of_indices(x):
    return np.empty(x.shape, x.dtype)


def without_its_end(positive, x):
    mask = reference.pack_mask(positive, x)
    mask[x.size // 8 :] = 0
    return mask


def relu_before_addition(z, residual, ceiling, dtype):
    y = RIGHT.joined(RIGHT.relu(z), residual).astype(dtype)
    return y, y.astype(Wide) > 0


def of_seven_bits(z, residual):
    if residual is None:
        return z
    fraction, exponent = np.frexp(residual.astype(np.float64))
    return z + np.ldexp(np.rint(fraction * 128) / 128, exponent).astype(Wide)


#: A mistake -> the wrong steps.
WRONG = {
    "the backward pass ignores the mask": {"masked": lambda dy, positive: dy},
    "the mask is applied to dx instead of dy": {
        "afterwards": lambda right, positive, unmasked: (
            RIGHT.masked(unmasked[0], positive),
            *right[1:],
        ),
    },
    "the mask is applied to dy and again to dx": {
        "afterwards": lambda right, positive, _: (RIGHT.masked(right[0], positive), *right[1:]),
    },
    "dgamma and dbeta are sums of dy without the mask": {
        "afterwards": lambda right, positive, unmasked: (right[0], *unmasked[1:]),
    },
    "dy is multiplied by the mask, so that NaN stays": {
        "masked": lambda dy, positive: dy * positive.astype(dy.dtype),
    },
    "the backward pass takes dy where the mask is not set": {
        "masked": lambda dy, positive: RIGHT.masked(dy, ~positive),
    },
    "dresidual is dy without the mask": {"dresidual": lambda dy, masked: dy},
    "dresidual is not returned": {"dresidual": lambda dy, masked: None},
    "dresidual is returned though there is no residual": {
        "backward": lambda *inputs, residual, **options: RIGHT.backward(
            *inputs, residual=True, **options
        ),
    },
    "the first element of a byte is its highest bit": {
        "pack": lambda positive, x: reversed_bits(reference.pack_mask(positive, x)),
    },
    "the backward pass reads the highest bit of a byte first": {
        "unpack": lambda mask, x: reference.unpack_mask(reversed_bits(mask), x),
    },
    "bits follow the indices of x, and not its memory": {
        "pack": lambda positive, x: reference.pack_mask(positive, in_order_of_indices(x)),
    },
    "the backward pass reads bits by the indices of x, and not by its memory": {
        "unpack": lambda mask, x: reference.unpack_mask(mask, in_order_of_indices(x)),
    },
    "the mask begins a bit late": {
        "pack": lambda positive, x: reference.pack_mask(
            np.roll(positive.ravel(), 1).reshape(x.shape), x
        ),
    },
    "bits after the last whole byte are left out": {"pack": without_its_end},
    "the mask has no padding": {
        "pack": lambda positive, x: reference.pack_mask(positive, x)[: -(-x.size // 8)].copy(),
    },
    "the mask has a byte for each element": {
        "pack": lambda positive, x: positive.astype(np.uint8).ravel(),
    },
    "the bit is set where y is 0": {"positive": lambda z, total, y: y.astype(Wide) >= 0},
    "the bit is set where y was positive before it was rounded to 0": {
        "positive": lambda z, total, y: total > 0,
    },
    "the bit is that of the normalised value without the residual": {
        "positive": lambda z, total, y: z > 0,
    },
    "the bit is set where y is NaN": {"positive": lambda z, total, y: ~(y.astype(Wide) <= 0)},
    "the residual is added after the ReLU": {"output": relu_before_addition},
    "y has no ReLU": {"relu": lambda total: total},
    "NaN becomes 0": {"relu": lambda total: np.where(total > 0, total, 0)},
    "the residual is ignored": {"joined": lambda z, residual: z},
    "the residual is subtracted": {
        "joined": lambda z, residual: z if residual is None else z - residual.astype(Wide),
    },
    "the residual is rounded to 7 bits before it is added": {"joined": of_seven_bits},
}
#: The same, of steps that are right without a ceiling.
WRONG_WITH_CEILING = {
    "y has no ceiling": {"below": lambda y, ceiling: y},
    "NaN becomes the ceiling": {
        "below": lambda y, ceiling: y if np.isinf(ceiling) else np.where(y < ceiling, y, ceiling),
    },
    "the bit is set where y has reached the ceiling": {
        "unbounded": lambda total, y, ceiling: np.ones(y.shape, bool),
    },
    "the bit is set where y was below the ceiling before it was rounded to it": {
        "unbounded": lambda total, y, ceiling: total < ceiling,
    },
}
