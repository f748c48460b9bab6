"""Subjects that are right and compute in different ways."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from backnorm.conformance.ladder import rungs
from tests.conformance.right_kernels import RIGHT, RightKernel


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
