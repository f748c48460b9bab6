"""Random graphs in which our layers stand between other operations, beside PyTorch's layers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, find, given, settings

from .random_graphs import judge, programs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "examples",
    [
        150,
        pytest.param(1_000, marks=pytest.mark.long),
        pytest.param(20_000, marks=pytest.mark.sweep),
    ],
)
def test_random_graphs_match_layers_of_pytorch(examples):
    @settings(max_examples=examples, suppress_health_check=[*HealthCheck])
    @given(programs)
    def attempt(program):
        verdict = judge(program)
        assert verdict.kind != "different", verdict.text
        assume(verdict.kind != "unjudged")

    attempt()


def test_program_with_frozen_sequential_shrinks_to_one_step():
    def is_wanted(program):
        layers = program.layers.values()
        return any(layer.mode == "frozen" and layer.form == "sequential" for layer in layers)

    program = find(programs, is_wanted)
    (step,) = program.steps
    (layer,) = step.calls
    assert (layer.children, layer.hook, layer.copied) == (("norm",), None, False)
    assert (step.watches, program.plan, program.packing) == ((), "backward", None)
