"""A schema is what the function of an operator declares."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Annotated

import pytest

from backnorm.dialects import ngraph
from backnorm.dialects._attributes import check_attribute
from backnorm.dialects.operator import operator as declared
from backnorm.dialects.registry import DIALECTS, PARTS, operator, operators, parts
from backnorm.dialects.roles import attribute, channel, data, opaque

OPERATORS = [(dialect, op) for dialect in DIALECTS for op in operators(dialect)]
SCHEMAS = [operator(dialect, op).schema for dialect, op in OPERATORS]
FUNCTIONS = [schema for dialect in PARTS for schema in parts(dialect).values()]
SCRIPTS = Path(__file__).parents[2] / "scripts"


def ids(schema):
    return f"{schema.dialect}-{schema.op}"


X, DY = Annotated[object, data("x", "T")], Annotated[object, data("dy", "T")]
MEAN = Annotated[object, channel("mean", "T")]
VARIANCE = Annotated[object, channel("variance", "T")]
EPSILON = Annotated[float, attribute("f32", "epsilon")]
GOOD = {"x": X, "dy": DY, "m": MEAN, "v": VARIANCE, "eps": EPSILON}


@pytest.mark.parametrize(
    ("changes", "results", "words"),
    [
        ({"dy": None}, {}, "an input of the role dy"),
        ({"v": None}, {}, "an input of the role variance"),
        ({"again": X}, {}, "one parameter or result of the role x"),
        ({"again": EPSILON}, {}, "one parameter or result of the role epsilon"),
        ({}, {"y": data("y", "T")}, "results of the roles dbeta, dgamma, dresidual, dx, empty"),
        ({"scale": Annotated[object, opaque("gamma", "T")]}, {},
         "a role that is not used for scale, which is opaque"),
        ({"eps": None}, {}, "an attribute of the role epsilon, which is added to the variance"),
    ],
)  # fmt: skip
def test_operator_with_roles_unlike_its_operation_is_rejected(changes, results, words):
    annotations = {name: each for name, each in (GOOD | changes).items() if each is not None}
    with pytest.raises(ValueError, match=f"^ngraph.grad must have {re.escape(words)}"):
        declared(ngraph.RULES, "backward", **{"dx": data("dx", "T")} | results)(made(annotations))


def made(annotations):
    """Return a function whose parameters have these types."""

    def grad():
        """Gradients."""

    kind = inspect.Parameter.KEYWORD_ONLY
    grad.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=each) for name, each in annotations.items()]
    )
    return grad


def test_operator_with_parameter_without_role_is_rejected():
    with pytest.raises(ValueError, match=r"ngraph\.grad: the parameter layout has no role"):
        declared(ngraph.RULES, "backward", dx=data("dx", "T"))(made(GOOD | {"layout": str}))


def test_call_text_marks_keyword_only_arguments():
    assert operator("onednn_graph", "BatchNormTrainingBackward").schema.call == (
        "BatchNormTrainingBackward(src, diff_dst, mean, variance, gamma, *, epsilon, data_format, "
        "single_output, outputs, diff_src)"
    )


@pytest.mark.parametrize(("dialect", "op"), OPERATORS)
def test_schema_has_the_names_of_its_dialect_and_operator_in_the_registry(dialect, op):
    schema = operator(dialect, op).schema
    assert (schema.dialect, schema.op) == (dialect, op)


@pytest.mark.parametrize("name", sorted({*DIALECTS.values(), *PARTS.values()}))
def test_module_of_a_dialect_exports_its_operators(name):
    module = importlib.import_module(name)
    found = {name for name, each in vars(module).items() if hasattr(each, "operator")}
    assert {each for each in found if each != "backnorm"} <= {*module.__all__}


def test_number_of_dialects_in_readme_and_changelog_equals_registry():
    number = {10: "ten", 11: "eleven", 12: "twelve"}[len(DIALECTS)]
    pages = [(SCRIPTS.parent / name).read_text("utf-8") for name in ("README.md", "CHANGELOG.md")]
    assert f"One operator, {number} specifications" in pages[0]
    assert f"{number.capitalize()} dialects" in pages[1]


def test_registry_lists_expected_operators():
    assert OPERATORS == [
        ("onednn_graph", "BatchNormTrainingBackward"),
        ("onednn_graph", "BatchNormForwardTraining"),
        ("onednn_graph", "BatchNormInference"),
        ("onednn_spec", "BatchNormTrainingBackprop"),
        ("onednn_spec", "BatchNormTrainingBackprop_2020_21"),
        ("onednn_spec", "BatchNormTrainingBackprop_early"),
        ("onednn_spec", "BatchNormForwardTraining"),
        ("onednn_spec", "BatchNormForwardTraining_2020_21"),
        ("onednn_spec", "BatchNormForwardTraining_early"),
        ("onednn_spec", "BatchNormInference"),
        ("onednn_spec", "BatchNormInference_2020_21"),
        ("onednn_spec", "BatchNormInference_early"),
        ("ngraph", "BatchNormTrainingBackprop"),
        ("ngraph", "BatchNormTraining"),
        ("ngraph", "BatchNormInference"),
        ("tensorflow", "FusedBatchNormGradV3"),
        ("tensorflow", "FusedBatchNormGradV2"),
        ("tensorflow", "FusedBatchNormGrad"),
        ("tensorflow", "FusedBatchNormV3"),
        ("tensorflow", "FusedBatchNormV2"),
        ("tensorflow", "FusedBatchNorm"),
        ("aten", "native_batch_norm_backward"),
        ("aten", "_batch_norm_impl_index_backward"),
        ("aten", "batch_norm_backward"),
        ("aten", "cudnn_batch_norm_backward"),
        ("aten", "miopen_batch_norm_backward"),
        ("aten", "native_batch_norm"),
        ("aten", "_native_batch_norm_legit"),
        ("aten", "_native_batch_norm_legit_functional"),
        ("aten", "_native_batch_norm_legit_no_stats"),
        ("aten", "_batch_norm_with_update"),
        ("aten", "cudnn_batch_norm"),
        ("stablehlo", "batch_norm_grad"),
        ("stablehlo", "batch_norm_training"),
        ("stablehlo", "batch_norm_inference"),
        ("onnxruntime", "BatchNormalizationGrad"),
        ("onnxruntime", "BatchNormInternal"),
        ("cudnn", "BatchNormalizationBackward"),
        ("directml", "BATCH_NORMALIZATION_TRAINING_GRAD"),
        ("directml", "BATCH_NORMALIZATION_GRAD"),
        ("paddle", "batch_norm_grad"),
    ]


def test_registry_lists_expected_parts():
    assert [(schema.dialect, schema.op) for schema in FUNCTIONS] == [
        ("aten", "batch_norm_backward_reduce"),
        ("aten", "batch_norm_backward_elemt"),
        ("mpsgraph", "normalizationBetaGradient"),
        ("mpsgraph", "normalizationGammaGradient"),
        ("mpsgraph", "normalizationGradient"),
        ("cann", "BNTrainingUpdateGrad"),
        ("cann", "BNTrainingReduceGrad"),
    ]


@pytest.mark.parametrize("schema", FUNCTIONS, ids=ids)
def test_schema_of_part_has_summaries_of_inputs_and_attributes(schema):
    assert all(each.summary for each in (*schema.inputs, *schema.attributes))


@pytest.mark.parametrize(("dialect", "op"), OPERATORS)
def test_operator_docstring_has_the_defaults_of_the_table(dialect, op):
    found = operator(dialect, op)
    text = inspect.getdoc(found.function)
    for spec in found.schema.attributes:
        for default in re.findall(rf"^{spec.name} : .*, default (.+)$", text, re.MULTILINE):
            assert ast.literal_eval(default) == spec.default, spec.name


def test_operator_repr_is_its_name():
    assert repr(operator("ngraph", "BatchNormInference")) == (
        "backnorm.dialects.ngraph.BatchNormInference"
    )


@pytest.mark.parametrize("schema", [*SCHEMAS, *FUNCTIONS], ids=ids)
def test_schema_to_dict_returns_plain_json(schema):
    described = json.loads(json.dumps(schema.to_dict()))
    assert described["op"] == schema.op
    assert len(described["inputs"]) == len(schema.inputs)
    assert [a["required"] for a in described["attributes"]] == [
        each.required for each in schema.attributes
    ]


@pytest.mark.parametrize("schema", [*SCHEMAS, *FUNCTIONS], ids=ids)
def test_schema_has_unique_names_summary_and_valid_defaults(schema):
    names = [t.name for t in schema.inputs] + [a.name for a in schema.attributes]
    assert len(names) == len(set(names))
    assert len({t.name for t in schema.outputs}) == len(schema.outputs)
    assert schema.summary.endswith(".")
    assert schema.source
    for spec in schema.attributes:
        if not spec.required:
            check_attribute(spec, spec.default)


def test_call_of_tensorflow_operator_takes_keywords_alone():
    schema = operator("tensorflow", "FusedBatchNormV3").schema
    assert schema.keyword_only == schema.order


@pytest.mark.parametrize("schema", [*SCHEMAS, *FUNCTIONS], ids=ids)
def test_page_prints_formula_of_each_operator(schema):
    page = (SCRIPTS.parent / "docs" / "dialects.md").read_text(encoding="utf-8")
    lines = [line for line in schema.formula.splitlines() if line.startswith("    ")]
    # The summary of the gradient of beta, a sum, says all.
    assert lines or schema.op == "normalizationBetaGradient"
    for line in lines:
        assert f"\n{line}\n" in page


def test_page_has_no_operation_without_results():
    page = (SCRIPTS.parent / "docs" / "dialects.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| double_backward |"))
    results = "gradient of `x`, gradient of `dy`, gradient of `gamma`"
    assert row.split(" | ")[2] == results
