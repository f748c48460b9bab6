"""The judge of the second order accepts the right closed form and rejects broken ones."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_double_backward
from tests.support.dtypes import ELEMENT_TYPES

from .second_order import RIGHT, WRONG, SecondOrder


def passes(operator, dtype, rng, **arithmetic):
    data = realistic_data((6, 5, 8), dtype, rng=rng)
    cotangents = {
        "ddx": (rng.standard_normal(data.x.shape) + 0.7).astype(dtype),
        "ddgamma": rng.standard_normal(5).astype(data.mean.dtype),
        "ddbeta": rng.standard_normal(5).astype(data.mean.dtype),
    }
    gradients = operator(*data.backward_inputs, **cotangents, training=True, **data.options)
    verdicts = check_double_backward(
        *data.backward_inputs,
        gradients,
        **cotangents,
        training=True,
        **data.options,
        **arithmetic,
    )
    return all(verdict.passed for verdict in verdicts.values())


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_judge_accepts_correct_second_order(dtype, rng):
    assert passes(RIGHT, dtype, rng)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("mistake", WRONG)
def test_judge_rejects_wrong_second_order(mistake, dtype, rng):
    assert not passes(SecondOrder(**WRONG[mistake]), dtype, rng)


def test_judge_rejects_second_order_result_of_wrong_type(rng):
    def wide(*inputs, **options):
        by_x, by_dy, by_gamma = RIGHT(*inputs, **options)
        return by_x.astype(np.float64), by_dy, by_gamma

    assert not passes(wide, np.dtype(np.float32), rng)


@pytest.mark.parametrize("mistake", WRONG)
def test_judge_of_float32_arithmetic_in_parts_rejects_wrong_second_order(mistake, rng):
    options = {"wide": False, "in_parts": True}
    assert passes(RIGHT, np.dtype(np.float32), rng, **options)
    assert not passes(SecondOrder(**WRONG[mistake]), np.dtype(np.float32), rng, **options)
