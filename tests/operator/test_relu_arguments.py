"""Arguments of the operators with a ReLU, besides those of the table of refusals."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import FLOAT32


@pytest.fixture
def data(rng):
    return realistic_data((3, 5, 7, 3), FLOAT32, rng=rng)


def test_activation_without_own_kernel_is_rejected_as_object_and_by_phases(data):
    expected = r"^activation: .*'relu6', backnorm\.Activation\('relu', ceiling\).*to y"
    silu = backnorm.Activation("silu")
    with pytest.raises(backnorm.ArgumentValueError, match=expected):
        backnorm.batch_norm_forward(data.x, **data.options, activation=silu)
    moments = backnorm.reduce_forward(data.x)
    with pytest.raises(backnorm.ArgumentValueError, match=expected):
        backnorm.apply_forward(data.x, moments, epsilon=1e-3, activation=silu)


def test_backward_with_strided_mask_equals_contiguous_mask(data):
    mask = backnorm.batch_norm_forward(data.x, **data.options, activation="relu").mask
    options = data.options | {"residual": True}
    expected = backnorm.batch_norm_backward(*data.backward_inputs, **options, mask=mask)
    strided = np.repeat(mask, 2)[::2]
    actual = backnorm.batch_norm_backward(*data.backward_inputs, **options, mask=strided)
    for values, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(values, other)
