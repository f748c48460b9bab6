"""Right operators with a ReLU, in steps and slow, and broken ones that each get one step wrong."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from backnorm import reference
from backnorm.activations import RELU
from backnorm.conformance.formula import BACKWARD
from tests.support.dtypes import FLOAT32, is_16_bit

Wide = np.longdouble


class WithRelu:
    """The right operators."""

    wrong: ClassVar[str] = ""
    # Whether it is right without a ceiling.
    needs_ceiling: ClassVar[bool] = False

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


class MaskIgnored(WithRelu):
    wrong = "the backward pass ignores the mask"

    def masked(self, dy, positive):
        return dy


class MaskAppliedToDx(WithRelu):
    wrong = "the mask is applied to dx instead of dy"

    def afterwards(self, gradients, positive, unmasked):
        return self.masked(unmasked[0], positive), *gradients[1:]


class MaskAppliedToDxToo(WithRelu):
    wrong = "the mask is applied to dy and again to dx"

    def afterwards(self, gradients, positive, unmasked):
        return self.masked(gradients[0], positive), *gradients[1:]


class SumsOfTheUnmasked(WithRelu):
    wrong = "dgamma and dbeta are sums of dy without the mask"

    def afterwards(self, gradients, positive, unmasked):
        return gradients[0], *unmasked[1:]


class MaskMultiplied(WithRelu):
    wrong = "dy is multiplied by the mask, so that NaN stays"

    def masked(self, dy, positive):
        return dy * positive.astype(dy.dtype)


class MaskInverted(WithRelu):
    wrong = "the backward pass takes dy where the mask is not set"

    def masked(self, dy, positive):
        return np.where(positive, np.zeros((), dy.dtype), dy)


class ResidualGradientUnmasked(WithRelu):
    wrong = "dresidual is dy without the mask"

    def dresidual(self, dy, masked):
        return dy


class ResidualGradientLost(WithRelu):
    wrong = "dresidual is not returned"

    def dresidual(self, dy, masked):
        return None


class ResidualGradientUnwanted(WithRelu):
    wrong = "dresidual is returned though there is no residual"

    def backward(self, *inputs, residual=False, **options):
        return super().backward(*inputs, residual=True, **options)


class BitsReversedForward(WithRelu):
    wrong = "the first element of a byte is its highest bit"

    def pack(self, positive, x):
        mask = reference.pack_mask(positive, x)
        return np.packbits(np.unpackbits(mask, bitorder="little"))


class BitsReversedBackward(WithRelu):
    wrong = "the backward pass reads the highest bit of a byte first"

    def unpack(self, mask, x):
        return reference.unpack_mask(np.packbits(np.unpackbits(mask, bitorder="little")), x)


class MaskInOrderOfIndices(WithRelu):
    wrong = "bits follow the indices of x, and not its memory"

    def pack(self, positive, x):
        return reference.pack_mask(positive, np.empty(x.shape, x.dtype))


class MaskReadInOrderOfIndices(WithRelu):
    wrong = "the backward pass reads bits by the indices of x, and not by its memory"

    def unpack(self, mask, x):
        return reference.unpack_mask(mask, np.empty(x.shape, x.dtype))


class MaskShiftedByOne(WithRelu):
    wrong = "the mask begins a bit late"

    def pack(self, positive, x):
        return reference.pack_mask(np.roll(positive.ravel(), 1).reshape(x.shape), x)


class MaskWithoutItsEnd(WithRelu):
    wrong = "bits after the last whole byte are left out"

    def pack(self, positive, x):
        mask = reference.pack_mask(positive, x)
        mask[x.size // 8 :] = 0
        return mask


class MaskNotPadded(WithRelu):
    wrong = "the mask has no padding"

    def pack(self, positive, x):
        return reference.pack_mask(positive, x)[: -(-x.size // 8)].copy()


class MaskOfBytes(WithRelu):
    wrong = "the mask has a byte for each element"

    def pack(self, positive, x):
        return positive.astype(np.uint8).ravel()


class MaskOfZeroToo(WithRelu):
    wrong = "the bit is set where y is 0"

    def positive(self, z, total, y):
        return y.astype(Wide) >= 0


class MaskBeforeRounding(WithRelu):
    wrong = "the bit is set where y was positive before it was rounded to 0"

    def positive(self, z, total, y):
        return total > 0


class MaskBeforeAddition(WithRelu):
    wrong = "the bit is that of the normalised value without the residual"

    def positive(self, z, total, y):
        return z > 0


class MaskOfNaN(WithRelu):
    wrong = "the bit is set where y is NaN"

    def positive(self, z, total, y):
        return ~(y.astype(Wide) <= 0)


class ReluBeforeAddition(WithRelu):
    wrong = "the residual is added after the ReLU"

    def output(self, z, residual, ceiling, dtype):
        y = self.relu(z) if residual is None else self.relu(z) + residual.astype(Wide)
        return y.astype(dtype), y.astype(dtype).astype(Wide) > 0


class ReluForgotten(WithRelu):
    wrong = "y has no ReLU"

    def relu(self, total):
        return total


class ReluOfNaNIsZero(WithRelu):
    wrong = "NaN becomes 0"

    def relu(self, total):
        return np.where(total > 0, total, 0)


class CeilingIgnored(WithRelu):
    wrong = "y has no ceiling"
    needs_ceiling = True

    def below(self, y, ceiling):
        return y


class CeilingOfNaN(WithRelu):
    wrong = "NaN becomes the ceiling"
    needs_ceiling = True

    def below(self, y, ceiling):
        return y if np.isinf(ceiling) else np.where(y < ceiling, y, ceiling)


class MaskIgnoresCeiling(WithRelu):
    wrong = "the bit is set where y has reached the ceiling"
    needs_ceiling = True

    def unbounded(self, total, y, ceiling):
        return np.ones(y.shape, bool)


class CeilingBeforeRounding(WithRelu):
    wrong = "the bit is set where y was below the ceiling before it was rounded to it"
    needs_ceiling = True

    def unbounded(self, total, y, ceiling):
        return total < ceiling


class ResidualIgnored(WithRelu):
    wrong = "the residual is ignored"

    def joined(self, z, residual):
        return z


class ResidualSubtracted(WithRelu):
    wrong = "the residual is subtracted"

    def joined(self, z, residual):
        return z if residual is None else z - residual.astype(Wide)


class ResidualRounded(WithRelu):
    wrong = "the residual is rounded to 7 bits before it is added"

    def joined(self, z, residual):
        if residual is None:
            return z
        fraction, exponent = np.frexp(residual.astype(np.float64))
        return z + np.ldexp(np.rint(fraction * 128) / 128, exponent).astype(Wide)


BROKEN = WithRelu.__subclasses__()
