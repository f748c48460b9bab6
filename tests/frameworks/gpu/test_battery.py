"""The batteries that tell right operators from wrong ones, on the GPU's kernels."""

from __future__ import annotations

from functools import partial

import pytest

from backnorm.arithmetics import own_arithmetic
from backnorm.conformance.battery import cases, examine
from backnorm.conformance.judge import check_forward, check_inference
from tests.support.battery import facets_of
from tests.support.dtypes import FLOAT32
from tests.support.relu_battery import examine_relu

from . import arrays

# The interpreter takes its time: of the other types the sweep runs everything.
USUAL = ("float64-float64", "float32-float32", "bfloat16-float32")
# Others are apart in what only the backward pass sees.
SEEN = (
    "realistic",
    "exact-float",
    "exact-bf",
    "no-gamma",
    "epsilon",
    "one",
    "constant",
    "many",
    "mean",
)


def in_every_arithmetic(battery):
    """Return the cases of a battery by name: as they are, and in the other arithmetic."""
    found = {case.name: case for case in battery()}
    for arithmetic in ("float32", "float64"):
        for case in battery(arithmetic=arithmetic):
            if own_arithmetic(case.data.x.dtype) != arithmetic:
                found[f"{case.name}-in-{arithmetic}"] = case
    return found


BATTERY, RELU_BATTERY = in_every_arithmetic(cases), in_every_arithmetic(arrays.relu_cases)
FORWARD = [name for name in BATTERY if name.startswith(SEEN)]


def usual_first(names, types=USUAL):
    """Return parameters, those of other than the usual types for the sweep."""
    return [
        name if any(pair in name for pair in types) else pytest.param(name, marks=pytest.mark.sweep)
        for name in names
    ]


@pytest.mark.covering(2, facets={"name": facets_of})
@pytest.mark.parametrize("name", usual_first(BATTERY))
def test_backward_passes_battery(name):
    case = BATTERY[name]
    operator = partial(arrays.backward, arithmetic=case.arithmetic)
    for quantity, verdict in examine(operator, case).items():
        assert verdict.passed, f"{quantity}: {verdict}"


@pytest.mark.covering(2, facets={"name": facets_of})
@pytest.mark.parametrize("name", usual_first(FORWARD, USUAL[1:]))
def test_forward_and_inference_pass_judge(name):
    case, data = BATTERY[name], BATTERY[name].data
    options = {**data.options, "arithmetic": case.arithmetic}
    scale = (data.gamma, data.beta) if case.scaled else (None, None)
    verdicts = check_forward(data.x, *scale, arrays.forward(data.x, *scale, **options), **options)
    operands = data.x, data.mean, data.variance, *scale
    verdicts["inferred"] = check_inference(
        *operands, arrays.inference(*operands, **options), **options
    )["y"]
    for quantity, verdict in verdicts.items():
        assert verdict.passed, f"{quantity}: {verdict}"


@pytest.mark.covering(2, facets={"name": facets_of})
@pytest.mark.parametrize("name", usual_first(RELU_BATTERY, USUAL[1:]))
def test_relu_passes_battery(name):
    case = RELU_BATTERY[name]
    if "vanishing" in name and not holds_what_vanishes(case):
        pytest.skip("the gain is less than float32's least normal number, and rounded to few bits")
    for quantity, verdict in examine_relu(arrays.WithRelu(case.arithmetic), case).items():
        assert verdict.passed, f"{quantity}: {verdict}"


def holds_what_vanishes(case):
    """Whether results are rounded once whose gain is the least of its type, and s."""
    # What is so rounded is still near enough for 16 bits.
    return case.data.x.dtype != FLOAT32 or case.arithmetic != "float32"
