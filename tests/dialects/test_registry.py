from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from backnorm.dialects import registry
from backnorm.dialects.registry import DIALECTS, PARTS, operator, operators, parts
from tests.support.calls import SUBJECTS

GRADIENT = SUBJECTS["tensorflow.FusedBatchNormGradV3"]
FORWARD = SUBJECTS["tensorflow.FusedBatchNormV3"]
ONEDNN = SUBJECTS["onednn_graph.BatchNormTrainingBackward"]


def test_canonical_of_tensorflow_forward_without_training_is_inference():
    call = FORWARD.canonical(**FORWARD.good() | {"is_training": False})
    assert call.operation == "inference"
    assert call.outputs == {"y": "y"}


def test_canonical_of_onednn_graph_with_one_output_omits_gamma():
    call = ONEDNN.canonical(**ONEDNN.good(), outputs=1)
    assert "gamma" not in call.inputs
    assert call.outputs == {"dx": "diff_src"}
    assert call.training
    assert not ONEDNN.canonical(**ONEDNN.good(), single_output="onednn", outputs=1).training


def test_canonical_of_inverse_standard_deviation_returns_float64_variance():
    good = GRADIENT.good() | {"reserve_space_2_is": "inverse_standard_deviation"}
    call = GRADIENT.canonical(**good)
    assert call.epsilon == 0
    variance = call.arrays(good)["variance"]
    assert variance.dtype == np.float64
    np.testing.assert_allclose(1 / np.sqrt(variance), good["reserve_space_2"], rtol=4e-16)


@pytest.mark.parametrize("change", [{"gamma": None}, {}])
def test_canonical_does_not_map_absent_optional_input(change):
    good = ONEDNN.good()
    del good["gamma"]
    call = ONEDNN.canonical(**good | change)
    assert call.inputs == {"x": "src", "dy": "diff_dst", "mean": "mean", "variance": "variance"}
    assert list(ONEDNN.invoke(**good | change)) == ["diff_src", "diff_gamma", "diff_beta"]


def test_invoke_writes_first_output_to_out():
    subject = SUBJECTS["ngraph.BatchNormTrainingBackprop"]
    out = np.full_like(subject.good()["input"], np.nan)
    assert subject.invoke(**subject.good(), input_delta=out)["input_delta"] is out
    assert np.isfinite(out).all()


def test_registry_with_unknown_name_raises_error_with_known_names():
    with pytest.raises(ValueError, match=r"dialect.*'caffe'.*onednn_graph"):
        operators("caffe")
    with pytest.raises(ValueError, match=r"op: .*'BatchNorm'.*FusedBatchNormGradV3"):
        operator("tensorflow", "BatchNorm")


@pytest.mark.parametrize("dialect", PARTS)
def test_parts_are_separate_from_operators(dialect):
    assert parts(dialect)
    if dialect in DIALECTS:
        assert not set(parts(dialect)) & set(operators(dialect))
    else:
        with pytest.raises(ValueError, match=f"dialect: unknown dialect; got '{dialect}'"):
            operators(dialect)
    assert parts("cudnn") == parts("nope") == {}
    with pytest.raises(TypeError, match=r"dialect: must be a string"):
        parts(3)


def test_operators_of_dialect_without_module_raises_error_with_its_name(monkeypatch):
    monkeypatch.setattr(registry, "DIALECTS", {"akme": "backnorm.dialects.akme"})
    with pytest.raises(ModuleNotFoundError, match="akme") as error:
        registry.operators("akme")
    assert error.value.__notes__ == ["DIALECTS must have names of modules; got 'akme'"]


def test_dialect_modules_are_imported_on_first_use():
    code = (
        "import sys; import backnorm.dialects.registry as r; "
        "assert 'backnorm.dialects.ngraph' not in sys.modules; r.operators('ngraph'); "
        "assert 'backnorm.dialects.ngraph' in sys.modules; "
        "assert 'backnorm.dialects.tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
