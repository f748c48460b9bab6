"""`backnorm verify` judges layers of Keras, with each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.verify.cases import DTYPES, Selection
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from tests.conformance import keras_layers
from tests.conformance.in_process import verified
from tests.conformance.layer_steps import WRONG

FILE = Path(keras_layers.__file__)


@pytest.fixture(autouse=True)
def _policy(set_policy):
    """Restore the policy of types, which `verify` sets for each case."""
    set_policy("float32")


def found_in(subject, dtypes, *only):
    results = verified(Job(subject, Selection(dtypes=dtypes, only=only, operation="layer")))
    return results, findings(results)


def test_verify_of_layer_of_keras_has_no_finding_in_any_type(backend):
    subject = "keras.layers:BatchNormalization"
    results, found = found_in(subject, tuple(DTYPES), "training-[fb]*", "evaluation-*")
    assert found == []
    refused = {v.dtype for v in results.verdicts if v.status == "refused"}
    # With the other backends, layers of Keras promote float64 to float32.
    assert refused <= {"float64"}
    assert not (refused and backend == "tensorflow")
    assert {v.status for v in results.verdicts} <= {*RUNGS, "refused"}


@pytest.mark.parametrize("name", ["Right", "OfChannels", "instance"])
def test_verify_of_own_layer_of_keras_has_no_finding(name):
    dtypes = ("float32", "bfloat16") if name == "instance" else ("float32",)
    results, found = found_in(f"{FILE}:{name}", dtypes, "diagnostic-*")
    assert found == []
    texts = {v.text for v in results.verdicts if v.status not in RUNGS}
    assert (
        texts
        == {
            "Right": set(),
            "OfChannels": {"the case has no gamma"},
            "instance": {"the layer computes in float32, and its variables are float32"},
        }[name]
    )


@pytest.mark.parametrize("name", WRONG)
def test_verify_of_wrong_layer_of_keras_names_its_mistake(name):
    _, found = found_in(f"{FILE}:{name}", ("float32",), "diagnostic-*")
    assert [each.says for each in found if each.id != "not_written"] == [WRONG[name]]
