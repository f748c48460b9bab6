"""The data of the contract of front doors show each option: without it, bits differ."""

from __future__ import annotations

import numpy as np
import pytest

from .fronts import DIMENSIONS, OPTIONS, data_of, options_of, truth, within

DEFAULTS = {name: values[0] for name, values in DIMENSIONS.items()}


def results(options):
    case = DEFAULTS | options
    data = data_of(case)
    with within(case["block"]):
        found = truth(data, options_of(case))
        with within(case["backward_in"]):
            of_backward = truth(data, options_of(case))
    return found, of_backward


# An argument decides whatever the block is, and a residual comes with a ReLU.
ROWS = [
    (options, name)
    for options in OPTIONS
    for name in options
    if name not in ("dtype", "narrow")
    and not (name == "block" and "arithmetic" in options)
    and not (name == "activation" and "residual" in options)
]


@pytest.mark.parametrize(("options", "name"), ROWS, ids=str)
def test_row_without_an_option_has_other_bits(options, name):
    found, of_backward = results(options)
    if name == "backward_in":
        assert not np.array_equal(found["dx"], of_backward["dx"])
        return
    other, _ = results({each: value for each, value in options.items() if each != name})
    assert any(
        name not in other or not np.array_equal(each, other[name]) for name, each in found.items()
    )
