"""Cases are recipes until they are asked for; events carry results from process to process."""

from __future__ import annotations

import io

import numpy as np
import pytest

from backnorm.conformance.battery import Recipe
from backnorm.conformance.verify import _events as events
from backnorm.conformance.verify.cases import DTYPES, Selection, recipes, selected
from tests.support.dtypes import BFLOAT16

EVERY = Selection("full", tuple(DTYPES), huge=1 << 20)
ONE = "realistic-float32-float32-NXC"


def values(case):
    return [array.tobytes() for array in case.inputs.values() if array is not None]


@pytest.mark.parametrize("operation", ["backward", "forward"])
def test_values_of_a_case_depend_only_on_its_name_and_the_seed(operation):
    names = {"only": ("*-float32-NXC",), "dtypes": ("float32",), "operation": operation}
    before = {case.name: values(case) for case in selected(Selection(**names))}
    (alone,) = selected(Selection(**names | {"only": (ONE,), "tier": "full"}))
    assert values(alone) == before[ONE]
    (other,) = selected(Selection(**names | {"only": (ONE,), "seed": 1}))
    assert values(other)[0] != before[ONE][0]
    # Cases of the same shape have different data.
    assert len({found[0] for found in before.values()}) == len(before)


def test_selected_draws_only_the_cases_that_match(monkeypatch):
    drawn = []
    case = Recipe.case
    monkeypatch.setattr(Recipe, "case", lambda r, seed: drawn.append(r.name) or case(r, seed))
    assert [each.name for each in selected(Selection("full", only=("linear-*-NCX",)))] == drawn
    assert [name.partition("-")[0] for name in drawn] == ["linear"] * 3


def test_names_of_recipes_are_unique_and_shapes_are_those_of_x():
    every = list(recipes(EVERY))
    assert len({recipe.name for recipe in every}) == len(every)
    for recipe in every:
        if recipe.count <= 300:
            data = recipe.case().data
            assert data.x.shape == recipe.shape
            assert data.x.size // data.mean.size == recipe.count


def test_read_of_a_written_outcome_returns_its_arrays(tmp_path):
    dx = np.arange(6.0).astype(BFLOAT16).reshape(2, 3)
    outputs = {"dx": dx, "dgamma": np.zeros((0, 3), ">f4"), "dbeta": None}
    outcome = events.Outcome("a-case", outputs=outputs, again={"dx": -dx}, changed=("dy",))
    stream = io.StringIO()
    events.write(outcome, stream, tmp_path)
    assert stream.getvalue().count("\n") == 1
    found = events.read(stream.getvalue().encode())
    assert (found.case, found.fault, [*found.changed]) == ("a-case", None, ["dy"])
    assert found.outputs["dbeta"] is None
    for name in ("dx", "dgamma"):
        assert found.outputs[name].dtype == outputs[name].dtype
        np.testing.assert_array_equal(found.outputs[name], outputs[name])
    np.testing.assert_array_equal(found.again["dx"], -dx)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("event", [events.Prepares("a-case"), events.Unusable({"argument": "x"})])
def test_read_of_a_written_event_returns_it(event, tmp_path):
    stream = io.StringIO()
    events.write(event, stream, tmp_path)
    assert events.read(stream.getvalue().encode()) == event
