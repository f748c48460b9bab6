"""The battery of the operators with a ReLU accepts right ones and rejects broken ones."""

from __future__ import annotations

import pytest

from backnorm.activations import Activation
from tests.support.dtypes import ELEMENT_TYPES, FLOAT64
from tests.support.relu_battery import examine_relu, relu_cases

from .relu import RIGHT, WRONG, WRONG_WITH_CEILING, WithRelu

PLAIN, WITH_CEILING = list(relu_cases()), list(relu_cases(activation=Activation("relu", 1.0)))


def failures(operators, dtype=None, battery=PLAIN):
    """Yield what is wrong with `operators`, case by case."""
    for case in battery:
        if dtype in (None, case.data.x.dtype):
            for name, verdict in examine_relu(operators, case).items():
                if not verdict.passed:
                    yield case.name, name, verdict.detail


@pytest.mark.parametrize("battery", [PLAIN, WITH_CEILING], ids=["plain", "ceiling"])
def test_relu_battery_accepts_correct_operators(battery):
    assert list(failures(RIGHT, battery=battery)) == []


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("mistake", [*WRONG, *WRONG_WITH_CEILING])
def test_relu_battery_rejects_each_mistake(mistake, dtype):
    if "before it was rounded to 0" in mistake and dtype == FLOAT64:
        pytest.skip("the oracle ends where float64 does")
    battery = WITH_CEILING if mistake in WRONG_WITH_CEILING else PLAIN
    operators = WithRelu(**(WRONG | WRONG_WITH_CEILING)[mistake])
    assert next(failures(operators, dtype, battery), None)


@pytest.mark.parametrize("mistake", WRONG_WITH_CEILING)
def test_relu_battery_without_ceiling_accepts_mistakes_of_ceiling(mistake):
    assert list(failures(WithRelu(**WRONG_WITH_CEILING[mistake]))) == []
