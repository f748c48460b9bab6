"""PyTorch's own backward pass on the ladder of error bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backnorm.conformance.battery import cases
from backnorm.conformance.ladder import grade_backward
from tests.support.dtypes import FLOAT32

# PyTorch returns no dgamma without gamma.
CASES = [
    case
    for case in cases()
    if case.data.x.dtype == FLOAT32 and case.data.data_format == "NCX" and case.scaled
]


def pytorch_gradients(case):
    """Return dx, dgamma and dbeta of PyTorch's kernel."""
    data = case.data
    x, dy, mean, variance, gamma = (torch.from_numpy(a.copy()) for a in data.backward_inputs)
    inverse = torch.rsqrt(variance.double() + data.epsilon).float()
    statistics = (None, None) if case.training else (mean, variance)
    gradients = torch.ops.aten.native_batch_norm_backward(
        dy, x, gamma, *statistics, mean, inverse, case.training, data.epsilon, [True, True, True]
    )
    return tuple(np.ascontiguousarray(gradient.numpy()) for gradient in gradients)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pytorch_contiguous_float32_kernel_reaches_blocked_grade(case):
    options = {"training": case.training, **case.data.options}
    grades = grade_backward(*case.data.backward_inputs, pytorch_gradients(case), **options)
    # Its sums are of float64 on a CPU, or of short runs.
    assert all(found.at_least("blocked") for found in grades.values()), grades
