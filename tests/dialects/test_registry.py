from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from backnorm import BacknormError, batch_norm_backward, batch_norm_forward, batch_norm_inference
from backnorm.dialects import registry
from backnorm.dialects.registry import (
    DIALECTS,
    PARTS,
    canonical,
    invoke,
    operator,
    operators,
    parts,
)
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES

CANONICAL_NAMES = {"dx", "dgamma", "dbeta", "y", "mean", "variance"}


def tensors(schema, b, layout="NCX"):
    roles = {"running_mean": "mean", "running_variance": "variance", "ignored": "mean"}
    # A power of two, whose square is exact: the canonical call with the variance it stands for is
    # the same, bit for bit.
    inverse = 2 ** np.round(np.log2(1 / np.sqrt(b["variance"].astype("d"))))
    b = b | {"inverse_deviation": inverse.astype(b["variance"].dtype)}
    operands = {
        t.name: b[roles.get(t.role, t.role)]
        for t in schema.inputs
        if not t.role.startswith("memory_")
    }
    kept = [1] * b["x"].ndim
    kept[1 if layout == "NCX" else -1] = -1
    spread = [t.name for t in schema.inputs if t.kind == "kept" and t.name in operands]
    return operands | {name: operands[name].reshape(kept) for name in spread}


def run_canonically(call, inputs):
    arrays = call.arrays(inputs)
    if call.inverse_std and "variance" in arrays:
        # The variance of an inverse deviation is float64; those of `tensors` are powers of two.
        arrays["variance"] = arrays["variance"].astype(arrays["mean"].dtype)
    common = {"epsilon": call.epsilon, "data_format": call.data_format}
    if call.operation == "backward":
        arrays.setdefault("gamma", None)
        result = batch_norm_backward(**arrays, **common, training=call.training)
    elif call.operation == "forward":
        result = batch_norm_forward(**arrays, **common)
    else:
        return {"y": batch_norm_inference(**arrays, **common)}
    return result._asdict()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("layout", [0, 1])
def test_canonical_call_has_the_bits_of_operator(batch, dialect, layout, required):
    for op, found in operators(dialect).items():
        for revision, schema in (getattr(found, "schemas", None) or {None: found.schema}).items():
            data_format = schema.formats[layout % len(schema.formats)]
            attributes = required(schema, 0.01)
            if len(schema.formats) > 1:
                attributes[schema.words["data_format"]] = data_format.name
            if revision:
                attributes["revision"] = revision
            takes_inverse = "inverse_deviation" in {t.role for t in schema.inputs}
            b = batch((2, 5, 3, 4), data_format.layout, "f32")
            inputs = tensors(schema, b, data_format.layout)
            call = canonical(dialect, op, inputs, attributes)
            assert call.operation == schema.operation
            assert call.data_format == data_format.layout
            types = {a.type for a in schema.attributes if a.role == "epsilon"}
            epsilon = np.float32(0.01) if types == {"f32"} else 0.01
            assert call.epsilon == (0.0 if takes_inverse else epsilon)
            assert set(call.outputs) <= CANONICAL_NAMES
            out = invoke(dialect, op, inputs, attributes)
            for tensor in schema.outputs:
                # Other types are symbols, such as T1.
                if tensor.type in ELEMENT_TYPE_NAMES:
                    assert out[tensor.name].dtype == ELEMENT_TYPE_NAMES[tensor.type], tensor
            expected = run_canonically(call, inputs)
            for role, name in call.outputs.items():
                np.testing.assert_array_equal(
                    out[name].reshape(expected[role].shape), expected[role]
                )


def test_canonical_of_tensorflow_without_training_uses_given_statistics(batch):
    b = batch()
    schema = operator("tensorflow", "FusedBatchNormGradV3").schema
    attributes = {"is_training": False}
    call = canonical("tensorflow", schema.op, tensors(schema, b), attributes)
    assert call.training is False
    schema = operator("tensorflow", "FusedBatchNormV3").schema
    inputs = tensors(schema, b)
    call = canonical("tensorflow", schema.op, inputs, attributes)
    assert call.operation == "inference"
    assert call.outputs == {"y": "y"}
    out = invoke("tensorflow", schema.op, inputs, attributes)
    np.testing.assert_array_equal(out["y"], run_canonically(call, inputs)["y"])


def test_canonical_of_onednn_graph_with_one_output_omits_gamma(batch):
    b = batch()
    schema = operator("onednn_graph", "BatchNormTrainingBackward").schema
    inputs = tensors(schema, b)
    call = canonical("onednn_graph", schema.op, inputs, {"epsilon": 1}, outputs=1)
    assert "gamma" not in call.inputs
    assert call.outputs == {"dx": "diff_src"}
    assert call.training
    frozen = {"epsilon": 1, "single_output": "onednn"}
    assert not canonical("onednn_graph", schema.op, inputs, frozen, outputs=1).training


def test_canonical_of_inverse_standard_deviation_returns_float64_variance(batch):
    b = batch()
    schema = operator("tensorflow", "FusedBatchNormGradV3").schema
    inputs = tensors(schema, b)
    attributes = {"reserve_space_2_is": "inverse_standard_deviation"}
    call = canonical("tensorflow", schema.op, inputs, attributes)
    assert call.epsilon == 0
    variance = call.arrays(inputs)["variance"]
    assert variance.dtype == np.float64
    np.testing.assert_allclose(1 / np.sqrt(variance), inputs["reserve_space_2"], rtol=4e-16)


def test_canonical_does_not_map_absent_optional_input(batch):
    b = batch()
    inputs = {"src": b["x"], "diff_dst": b["dy"], "mean": b["mean"], "variance": b["variance"]}
    op = ("onednn_graph", "BatchNormTrainingBackward")
    for operands in (inputs, inputs | {"gamma": None}):
        call = canonical(*op, operands, {"epsilon": 1e-5})
        assert call.inputs == {"x": "src", "dy": "diff_dst", "mean": "mean", "variance": "variance"}
        assert list(invoke(*op, operands, {"epsilon": 1e-5})) == [
            "diff_src",
            "diff_gamma",
            "diff_beta",
        ]


def test_invoke_writes_first_output_to_out(batch):
    b = batch((2, 3, 4), "NCX")
    schema = operator("ngraph", "BatchNormTrainingBackprop").schema
    out = np.full_like(b["x"], np.nan)
    got = invoke("ngraph", schema.op, tensors(schema, b), {"epsilon": 0.1}, out=out)
    assert got["input_delta"] is out
    assert np.isfinite(out).all()


def test_registry_with_unknown_name_raises_error_with_known_names(batch):
    with pytest.raises(ValueError, match=r"dialect.*'caffe'.*onednn_graph"):
        operators("caffe")
    with pytest.raises(ValueError, match=r"op: .*'BatchNorm'.*FusedBatchNormGradV3"):
        operator("tensorflow", "BatchNorm")
    b = batch((2, 3), "NCX")
    schema = operator("ngraph", "BatchNormTrainingBackprop").schema
    inputs = tensors(schema, b)
    with pytest.raises(TypeError, match=r"src: .*no such input.*input, gamma") as error:
        invoke("ngraph", schema.op, inputs | {"src": b["x"]}, {"epsilon": 0.1})
    assert isinstance(error.value, BacknormError)
    with pytest.raises(TypeError, match=r"eps: .*no such attribute.*epsilon") as error:
        invoke("ngraph", schema.op, inputs, {"eps": 0.1})
    assert isinstance(error.value, BacknormError)


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
