"""A correct backward kernel in steps, and broken kernels with one wrong step each."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np

# `Kernel` computes sums and coefficients in extended precision, so that a kernel without a mistake
# passes with float64 data, too.
Wide = np.longdouble


class Kernel:
    """A kernel without a mistake. Its methods are the steps of the computation. In these methods, x
    and dy have the shape (channels, elements), and per-channel arrays have the shape (channels, 1).
    """

    wrong: ClassVar[str] = ""
    #: Whether the mistake is in the formula; otherwise it is in the precision.
    is_of_formula: ClassVar[bool] = True

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
        c = self.deviation(v, m)
        sum_dy, sum_dy_xmu = self.sums(v, d, c, m)
        mean_dy, slope = self.coefficients(sum_dy, sum_dy_xmu, s, count)
        element = self.training_dx if training else self.frozen_dx
        dx = element(v, d, c, m, g, s, mean_dy, slope)
        dx = np.moveaxis(dx.reshape(x.shape[axis], *others), 0, axis)
        return (
            self.round(dx, x.dtype),
            self.dgamma(s, sum_dy_xmu, g)[:, 0].astype(mean.dtype),
            self.dbeta(sum_dy, s)[:, 0].astype(mean.dtype),
        )

    def statistics(self, mean, variance, x):
        return mean, variance

    def count(self, elements, other_axes):
        return elements

    def inverse_deviation(self, variance, epsilon, elements):
        return 1 / np.sqrt(variance + Wide(epsilon))

    def deviation(self, x, mean):
        return x - mean

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

    def round(self, dx, dtype):
        return dx.astype(dtype)


class DropsMeanOfDy(Kernel):
    wrong = "dx lacks sum(dy)/M"

    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return 0 * sum_dy, s * s * sum_dy_xmu / count


class DropsProjection(Kernel):
    wrong = "dx lacks the term along x"

    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return sum_dy / count, 0 * sum_dy_xmu


class SlopeWithS(Kernel):
    wrong = "s instead of s**2 in the term along x"

    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return sum_dy / count, s * sum_dy_xmu / count


class SlopeWithCubedS(Kernel):
    wrong = "s**3 instead of s**2 in the term along x"

    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return sum_dy / count, s * s * s * sum_dy_xmu / count


class SlopeWithWrongSign(Kernel):
    wrong = "the term along x is added, not subtracted"

    def coefficients(self, sum_dy, sum_dy_xmu, s, count):
        return sum_dy / count, -s * s * sum_dy_xmu / count


class DividesByOneLess(Kernel):
    wrong = "the means divide by M - 1"

    def count(self, elements, other_axes):
        return max(elements - 1, 1)


class DividesByBatch(Kernel):
    wrong = "the means divide by the batch size alone"

    def count(self, elements, other_axes):
        return other_axes[0]


class UnbiasedVariance(Kernel):
    wrong = "the supplied variance is given Bessel's correction"

    def inverse_deviation(self, variance, epsilon, elements):
        return 1 / np.sqrt(variance * elements / Wide(max(elements - 1, 1)) + Wide(epsilon))


class EpsilonOutsideRoot(Kernel):
    wrong = "epsilon is added to the deviation, not to the variance"

    def inverse_deviation(self, variance, epsilon, elements):
        return 1 / (np.sqrt(variance) + Wide(epsilon))


class EpsilonLeftOut(Kernel):
    wrong = "epsilon is ignored unless the variance is zero"

    def inverse_deviation(self, variance, epsilon, elements):
        return 1 / np.sqrt(np.where(variance > 0, variance, Wide(epsilon)))


class VarianceTakenForInverseDeviation(Kernel):
    wrong = "the variance is used as if it were the inverse deviation"

    def inverse_deviation(self, variance, epsilon, elements):
        return variance


class SwapsStatistics(Kernel):
    wrong = "mean and variance are swapped (the mean by magnitude)"

    def statistics(self, mean, variance, x):
        return variance, np.abs(mean)


class RecomputesMean(Kernel):
    wrong = "the mean of x instead of the mean supplied"

    def statistics(self, mean, variance, x):
        return x.astype(Wide).mean(1, keepdims=True).astype(np.float64), variance


class RecomputesVariance(Kernel):
    wrong = "the variance of x instead of the variance supplied"

    def statistics(self, mean, variance, x):
        return mean, x.astype(Wide).var(1, keepdims=True).astype(np.float64)


class FoldsMeanIntoConstant(Kernel):
    wrong = "dx = A dy + B x + K, which cancels where the mean is large"
    is_of_formula = False

    def training_dx(self, x, dy, c, mean, gamma, s, mean_dy, slope):
        constant = (slope * mean - mean_dy).astype(np.float64)
        return self.scale(gamma, s) * (dy - slope.astype(np.float64) * x + constant)


class SumsProductBeforeMean(Kernel):
    wrong = "sum(dy x) - mean sum(dy) instead of sum(dy (x - mean))"
    is_of_formula = False

    def sums(self, x, dy, c, mean):
        d = dy.astype(Wide)
        total = d.sum(1, keepdims=True)
        return total, (d * x).sum(1, keepdims=True) - mean * total


class SumsInFloat32(Kernel):
    wrong = "the sums are accumulated in float32"
    is_of_formula = False

    def sums(self, x, dy, c, mean):
        narrow = {"axis": 1, "keepdims": True, "dtype": np.float32}
        return dy.sum(**narrow).astype(Wide), (dy * c).sum(**narrow).astype(Wide)


class SumsInFloat16(Kernel):
    wrong = "the sums are accumulated in float16"
    is_of_formula = False

    def sums(self, x, dy, c, mean):
        narrow = {"axis": 1, "keepdims": True, "dtype": np.float16}
        with np.errstate(all="ignore"):
            return dy.sum(**narrow).astype(Wide), (dy * c).sum(**narrow).astype(Wide)


class DeviatesInFloat32(Kernel):
    wrong = "x - mean is rounded to float32"
    is_of_formula = False

    def deviation(self, x, mean):
        return (x - mean).astype(np.float32).astype(np.float64)


class SkipsLastElement(Kernel):
    wrong = "the sums leave out the last element of a channel"

    def sums(self, x, dy, c, mean):
        d = dy.astype(Wide)[:, :-1]
        return d.sum(1, keepdims=True), (d * c[:, :-1]).sum(1, keepdims=True)


class ForgetsGamma(Kernel):
    wrong = "dx lacks gamma"

    def scale(self, gamma, s):
        return s.astype(np.float64)


class TakesMagnitudeOfGamma(Kernel):
    wrong = "dx has |gamma|"

    def scale(self, gamma, s):
        return np.abs(gamma * s).astype(np.float64)


class DgammaWithoutS(Kernel):
    wrong = "dgamma lacks s"

    def dgamma(self, s, sum_dy_xmu, gamma):
        return sum_dy_xmu


class DgammaWithGamma(Kernel):
    wrong = "dgamma is multiplied by gamma"

    def dgamma(self, s, sum_dy_xmu, gamma):
        return gamma * s * sum_dy_xmu


class DbetaWithS(Kernel):
    wrong = "dbeta is multiplied by s"

    def dbeta(self, sum_dy, s):
        return s * sum_dy


class TrainsWhenFrozen(Kernel):
    wrong = "the training formula where the statistics are constants"

    def frozen_dx(self, x, dy, c, mean, gamma, s, mean_dy, slope):
        return self.training_dx(x, dy, c, mean, gamma, s, mean_dy, slope)


class FrozenWhenTraining(Kernel):
    wrong = "the frozen formula in training"

    def training_dx(self, x, dy, c, mean, gamma, s, mean_dy, slope):
        return self.frozen_dx(x, dy, c, mean, gamma, s, mean_dy, slope)


class Truncates(Kernel):
    wrong = "dx is rounded toward zero"
    is_of_formula = False

    def round(self, dx, dtype):
        nearest = dx.astype(dtype)
        beyond = np.abs(nearest.astype(np.float64)) > np.abs(dx)
        return np.where(beyond, np.nextafter(nearest, dtype.type(0)), nearest)


class RoundsTwice(Kernel):
    wrong = "dx is rounded to bfloat16 before its own type"
    is_of_formula = False

    def round(self, dx, dtype):
        return dx.astype(ml_dtypes.bfloat16).astype(dtype)


MUTANTS = tuple(Kernel.__subclasses__())
FORMULA_MUTANTS = tuple(mutant for mutant in MUTANTS if mutant.is_of_formula)
