"""Subjects that are right and compute in different ways, and how much a case tells of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from backnorm.conformance.data import ExactCase
from backnorm.conformance.ladder import rungs
from tests.conformance.right_kernels import RIGHT, RightKernel

_U = {False: 2.0**-24, True: 2.0**-53}
# Root mean square of the rounding error of an operation, in roundoffs.
_ROUNDING = 0.425
_NORMAL = np.array([NormalDist().inv_cdf((k + 0.5) / 64) for k in range(32, 64)])


@dataclass(frozen=True)
class RightSubject:
    """A kernel of rows, called as an operator.

    float64 data is computed in float64 throughout, whatever the kernel computes in.
    """

    kernel: RightKernel

    def __call__(self, x, dy, mean, variance, gamma, *, epsilon, data_format, training):
        axis = 1 if data_format == "NCX" else x.ndim - 1
        channels_first = np.moveaxis(x, axis, 0).shape
        tensors = [np.moveaxis(each, axis, 0).reshape(len(mean), -1) for each in (x, dy)]
        gamma = np.ones_like(mean) if gamma is None else gamma
        columns = [each[:, None] for each in (mean, variance, gamma)]
        kernel = self.kernel
        if x.dtype == np.float64:
            kernel = replace(kernel, elements=np.float64, deviation=np.float64)
        dx, *parameters = kernel(*tensors, *columns, epsilon, training)
        return np.moveaxis(dx.reshape(channels_first), 0, axis), *parameters

    def rung(self, data):
        """Return the rung of the kernel for data of a type."""
        return "float64" if self.kernel.rung not in rungs(data) else self.kernel.rung


_BY_NAME = {kernel.name: RightSubject(kernel) for kernel in RIGHT}
float64 = _BY_NAME["float64"]
rounded_inverse_deviation = _BY_NAME["rounded inverse deviation"]
float64_sums = _BY_NAME["float64 sums"]
normalised = _BY_NAME["normalised, float64 sums"]
kahan = _BY_NAME["Kahan"]
folded = _BY_NAME["folded, centred"]
pairwise = _BY_NAME["pairs"]
numpy_sum = _BY_NAME["NumPy's sum"]
blocked = _BY_NAME["blocks of 256"]
serial = _BY_NAME["serial"]
serial_strided = _BY_NAME["serial, strided"]
atomics = _BY_NAME["atomics"]

SUBJECTS = {
    name: value for name, value in list(globals().items()) if isinstance(value, RightSubject)
}


def partial_sums(kernel, count):
    """Return A and B: the squared partial sums of a method are A S**2 + B R**2.

    The last addition is left out: it may be the rounding to the output's type.
    """
    if count < 2:
        return 0.0, 0.0
    row = count / 3 - 1, count / 2
    if kernel.rung == "serial":
        return row
    if kernel.rung == "pairwise":
        run = min(count, 16)
        levels = math.log2(count / run)
        return run * run / (3 * count) + (1 if levels else -1), run / 2 + levels
    size = min(kernel.sums.size, count)
    blocks = count / size
    return size * size / (3 * count) + blocks / 3 - 1, size / 2 + blocks / 2


def probability_of_own_rung(subject, case, ladder):
    """Return how likely a case shows that a subject is not on the next better rung.

    An output exceeds the better bound if the errors that its method adds, of normal distribution,
    and the rounding to the output's type, of uniform distribution, do.
    """
    own = subject.rung(ladder.data)
    known = rungs(ladder.data)
    # float64 is on `exact` where nothing cancels. Exact data, and one element, are not rounded.
    if known.index(own) < 2 or isinstance(case.data, ExactCase) or ladder.count < 2:
        return 0.0
    better = known[known.index(own) - 1]
    unit = _ROUNDING * _U[ladder.data == np.float64]
    of_elements = own == "float32"
    outputs = ["dgamma", "dx" if of_elements else "dbeta"]
    if not of_elements and ladder.data.itemsize == 2:
        # Most sums of elements of 16 bits are exact in float32.
        outputs.remove("dbeta")
    kept = 1.0
    for name in outputs:
        scale = getattr(ladder.scales, name)
        bounds = ladder.allowances(name, ladder.element_type(name))
        if of_elements:
            error = unit * scale.value
        else:
            of_sums, of_terms = partial_sums(subject.kernel, ladder.count)
            error = unit * np.hypot(
                math.sqrt(max(of_sums, 0)) * scale.sums, math.sqrt(of_terms) * scale.root
            )
        error, half, allowed = (
            each.ravel()[:: max(each.size // 4096, 1), None]
            for each in (error, bounds["exact"], bounds[better])
        )
        beyond = np.clip((error * _NORMAL - (allowed - half)) / (2 * half), 0.0, 1.0).mean(1)
        kept *= float(np.prod(1.0 - beyond))
    return 1.0 - kept
