"""The batteries that tell right operators from wrong ones, on the GPU's kernels."""

from __future__ import annotations

import pytest

from backnorm.conformance.battery import cases, examine
from backnorm.conformance.judge import check_forward, check_inference
from backnorm.conformance.relu_battery import examine_relu, relu_cases

from . import arrays

BATTERY = {case.name: case for case in cases()}
RELU_BATTERY = {case.name: case for case in relu_cases()}
RELU_BATTERY |= {f"ceiling-{case.name}": case for case in relu_cases(ceiling=1.0)}

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
FORWARD = [name for name in BATTERY if name.startswith(SEEN)]


def usual_first(names, types=USUAL):
    """Return parameters, those of other than the usual types for the sweep."""
    return [
        name if any(pair in name for pair in types) else pytest.param(name, marks=pytest.mark.sweep)
        for name in names
    ]


@pytest.mark.parametrize("name", usual_first(BATTERY))
def test_backward(name, gpu):
    for quantity, verdict in examine(arrays.backward, BATTERY[name]).items():
        assert verdict.passed, f"{quantity}: {verdict}"


@pytest.mark.parametrize("name", usual_first(FORWARD, USUAL[1:]))
def test_forward_and_inference(name, gpu):
    data, options = BATTERY[name].data, BATTERY[name].data.options
    scale = (data.gamma, data.beta) if BATTERY[name].scaled else (None, None)
    verdicts = check_forward(data.x, *scale, arrays.forward(data.x, *scale, **options), **options)
    given = data.x, data.mean, data.variance, *scale
    verdicts["inferred"] = check_inference(*given, arrays.inference(*given, **options), **options)[
        "y"
    ]
    for quantity, verdict in verdicts.items():
        assert verdict.passed, f"{quantity}: {verdict}"


@pytest.mark.parametrize("name", usual_first(RELU_BATTERY, USUAL[1:]))
def test_relu(name, gpu):
    if "vanishing" in name and not gpu.fast_float64 and "float64" not in name:
        pytest.skip("a pair of float32 cannot hold what is less than float32's least normal number")
    for quantity, verdict in examine_relu(arrays.WithRelu, RELU_BATTERY[name]).items():
        assert verdict.passed, f"{quantity}: {verdict}"
