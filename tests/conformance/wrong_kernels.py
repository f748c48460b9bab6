"""A right backward kernel and ten wrong ones, independent of the catalogue of mistakes.

`backnorm.conformance.formula` names mistakes by its own formula. If tests had only kernels that
this formula makes, a mistake in it would not be found.
"""

from __future__ import annotations

import numpy as np

from backnorm.dtypes import rounded

# `Kernel` computes sums and coefficients in extended precision, so that a kernel without a mistake
# passes with float64 data, too.
Wide = np.longdouble


class Kernel:
    """A kernel without a mistake. Its methods are the steps of the computation. In these methods, x
    and dy have the shape (channels, elements), and per-channel arrays have the shape (channels, 1).
    """

    @np.errstate(all="ignore")
    def __call__(self, x, dy, mean, variance, gamma, *, epsilon, data_format, training):
        axis = 1 if data_format == "NCX" else x.ndim - 1
        others = np.delete(x.shape, axis)

        def rows(tensor):
            return np.moveaxis(tensor, axis, 0).reshape(x.shape[axis], -1)

        def column(values):
            return np.asarray(values, np.float64)[:, None]

        v, d = rows(x).astype(np.float64), rows(dy).astype(np.float64)
        m, w = self.statistics(column(mean), column(variance), v)
        g = np.ones_like(m) if gamma is None else column(gamma)
        count = self.count(d.shape[1], others)
        s = self.inverse_deviation(w.astype(Wide), epsilon, d.shape[1])
        c = v - m
        sum_dy, sum_dy_xmu = self.sums(v, d, c, m)
        mean_dy, slope = self.coefficients(sum_dy, sum_dy_xmu, s, count)
        element = self.training_dx if training else self.frozen_dx
        dx = element(v, d, c, m, g, s, mean_dy, slope)
        dx = np.moveaxis(dx.reshape(x.shape[axis], *others), 0, axis)
        return (
            rounded(dx, x.dtype),
            self.dgamma(s, sum_dy_xmu, g)[:, 0].astype(mean.dtype),
            self.dbeta(sum_dy, s)[:, 0].astype(mean.dtype),
        )

    def statistics(self, mean, variance, x):
        return mean, variance

    def count(self, elements, other_axes):
        return elements

    def inverse_deviation(self, variance, epsilon, elements):
        return 1 / np.sqrt(variance + Wide(epsilon))

    def sums(self, x, dy, c, mean):
        d = dy.astype(Wide)
        return d.sum(1, keepdims=True), (d * c).sum(1, keepdims=True)

    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return sum_dy / count, s * s * sum_dy_xmu / count

    def scale(self, gamma, s):
        return (gamma * s).astype(np.float64)

    def training_dx(self, x, dy, c, mean, gamma, s, mean_dy, slope):
        offset, slope = mean_dy.astype(np.float64), slope.astype(np.float64)
        return self.scale(gamma, s) * (dy - offset - c * slope)

    def frozen_dx(self, x, dy, c, mean, gamma, s, mean_dy, slope):
        return self.scale(gamma, s) * dy

    def dgamma(self, s, sum_dy_xmu, gamma):
        return s * sum_dy_xmu

    def dbeta(self, sum_dy, s):
        return sum_dy


class DropsMeanOfDy(Kernel):
    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return 0 * sum_dy, s * s * sum_dy_xmu / count


class SlopeWithS(Kernel):
    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return sum_dy / count, s * sum_dy_xmu / count


class DividesByOneLess(Kernel):
    def count(self, elements, other_axes):
        return max(elements - 1, 1)


class EpsilonOutsideRoot(Kernel):
    def inverse_deviation(self, variance, epsilon, elements):
        return 1 / (np.sqrt(variance) + Wide(epsilon))


class RecomputesMean(Kernel):
    def statistics(self, mean, variance, x):
        return x.astype(Wide).mean(1, keepdims=True).astype(np.float64), variance


class SkipsLastElement(Kernel):
    def sums(self, x, dy, c, mean):
        d = dy.astype(Wide)[:, :-1]
        return d.sum(1, keepdims=True), (d * c[:, :-1]).sum(1, keepdims=True)


class ForgetsGamma(Kernel):
    def scale(self, gamma, s):
        return s.astype(np.float64)


class DgammaWithGamma(Kernel):
    def dgamma(self, s, sum_dy_xmu, gamma):
        return gamma * s * sum_dy_xmu


class DbetaWithS(Kernel):
    def dbeta(self, sum_dy, s):
        return s * sum_dy


class FrozenWhenTraining(Kernel):
    def training_dx(self, x, dy, c, mean, gamma, s, mean_dy, slope):
        return self.frozen_dx(x, dy, c, mean, gamma, s, mean_dy, slope)


#: Wrong kernel -> the name of its mistake in the catalogue. Each mistake is in another step.
WRONG_KERNELS = {
    DropsMeanOfDy: "no-mean-dy",
    SlopeWithS: "projection-s",
    DividesByOneLess: "count-less-one",
    EpsilonOutsideRoot: "epsilon-outside",
    RecomputesMean: "mean-of-x",
    SkipsLastElement: "last-left-out",
    ForgetsGamma: "no-gamma",
    DgammaWithGamma: "dgamma-gamma",
    DbetaWithS: "dbeta-s",
    FrozenWhenTraining: "frozen",
}
#: Kernels with two of these mistakes.
PAIRS = (
    (ForgetsGamma, DropsMeanOfDy),
    (EpsilonOutsideRoot, DgammaWithGamma),
    (DividesByOneLess, DbetaWithS),
    (SkipsLastElement, EpsilonOutsideRoot),
    (RecomputesMean, SlopeWithS),
)
