"""The battery of the operators with a ReLU accepts right ones and rejects broken ones."""

from __future__ import annotations

import pytest

from backnorm.conformance.relu_battery import examine_relu, relu_cases
from backnorm.dtypes import ELEMENT_TYPES, FLOAT64

from .relu import BROKEN, MaskBeforeRounding, WithRelu

BATTERY = list(relu_cases())


def failures(operators, dtype=None):
    """Yield what is wrong with `operators`, case by case."""
    for case in BATTERY:
        if dtype in (None, case.data.x.dtype):
            for name, verdict in examine_relu(operators, case).items():
                if not verdict.passed:
                    yield case.name, name, verdict.detail


def test_the_right_ones_pass():
    assert list(failures(WithRelu())) == []


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_broken_ones_do_not(broken, dtype):
    if broken is MaskBeforeRounding and dtype == FLOAT64:
        pytest.skip("the oracle ends where float64 does")
    assert next(failures(broken(), dtype), None), broken.wrong
