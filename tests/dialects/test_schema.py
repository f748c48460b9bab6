"""One description drives calls, validation and the page."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from backnorm.dialects._operator import Operator as Declared
from backnorm.dialects.operator import Operator, by_name
from backnorm.dialects.registry import DIALECTS, PARTS, operator, operators, parts
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    FormatSpec,
    Phrases,
    TensorSpec,
    channel,
    data,
    type_rules,
)

OPERATORS = [(dialect, op) for dialect in DIALECTS for op in operators(dialect)]
UNDECLARED = [each for each in OPERATORS if not isinstance(operator(*each), Declared)]
SCHEMAS = [
    schema
    for dialect, op in OPERATORS
    for schema in (
        getattr(operator(dialect, op), "schemas", None) or {"": operator(dialect, op).schema}
    ).values()
]
FUNCTIONS = [schema for dialect in PARTS for schema in parts(dialect).values()]
SCRIPTS = Path(__file__).parents[2] / "scripts"


def ids(schema):
    return f"{schema.dialect}-{schema.op}-{schema.revision}"


X, DY = data("x", "x", "T"), data("dy", "dy", "T")
EPSILON = AttributeSpec("eps", "f32", "epsilon")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operation": "backwards"}, "operation: got 'backwards'; expected 'backward' or"),
        ({"inputs": (data("dout", "dout", "T"),)},
         "inputs: the role of dout (each role once): got 'dout'"),
        ({"inputs": (TensorSpec("x", "x", "T", "dense"),)}, "inputs: the kind of x: got 'dense'"),
        ({"inputs": (X,)}, "inputs: the roles: got ['x']; expected 'dy'"),
        ({"inputs": (X, DY, data("mean", "mean", "T"), data("scale", "gamma", "T"))},
         "inputs: the roles: got ['dy', 'gamma', 'mean', 'x']; "
         "expected 'variance' or 'inverse_deviation'"),
        ({"inputs": (X, X, DY)},
         "inputs: the role of x (each role once): got 'x'; expected 'dy' or"),
        ({"inputs": X}, "inputs: got 'TensorSpec'; expected 'tuple'"),
        ({"outputs": (data("y", "y", "T"),)},
         "outputs: the role of y (each role once): got 'y'; expected 'empty'"),
        ({"attributes": (AttributeSpec("eps", "f32", role="eps"),)},
         "attributes: the role of eps (each role once): got 'eps'"),
        ({"attributes": (AttributeSpec("eps", "float"),)},
         "attributes: the type of eps: got 'float'; expected 'f32' or"),
        ({"attributes": (AttributeSpec("eps", "f32", range="non-negative"),)},
         "attributes: the range of eps: got 'non-negative'; expected 'positive' or"),
        ({"attributes": (AttributeSpec("eps", "f32", "epsilon"),) * 2},
         "attributes: the role of eps (each role once): got 'epsilon'; expected None or"),
        ({"attributes": (AttributeSpec("mode", "string", choices=("a")),)},
         "attributes: the choices of mode: got 'str'; expected 'tuple'"),
        ({"attributes": (AttributeSpec("format", "string", "data_format"),)},
         "attributes: the choices of format: got set(); expected {'NC...'}"),
        ({"attributes": (AttributeSpec("momentum", "f32", default=REQUIRED),)},
         "attributes: the usual value of momentum: got None; expected 'a value'"),
        ({"inputs": (X, DY, channel("m", "mean", "bf16"), channel("v", "variance", "f32")),
          "type_rules": type_rules(f32="f32")},
         "type_rules: the type of m: got 'bf16'; expected 'f32' or 'float32'"),
        ({"type_rules": type_rules(float="f32")}, "type_rules: got 'float'; expected 'f64' or"),
        ({"formats": (FormatSpec("NHWC", "NHWC"),)},
         "formats: the layout of NHWC: got 'NHWC'; expected 'NCX' or 'NXC'"),
        ({"formats": FormatSpec("NHWC", "NXC")}, "formats: got 'FormatSpec'; expected 'tuple'"),
        ({"formats": ("NHWC",)}, "formats: got 'str'; expected 'FormatSpec'"),
        ({"formats": (FormatSpec("NHWC", "NXC"), FormatSpec("NCHW", "NCX"))},
         "attributes: the roles, with several formats: got ['epsilon']; expected 'data_format'"),
        ({"attributes": ()},
         "attributes: the roles (the role of variance is variance, not inverse_deviation): got []; "
         "expected 'epsilon'"),
        ({"inputs": (X, DY, TensorSpec("scale", "gamma", "T", "opaque"), data("m", "mean", "T"),
                     data("v", "variance", "T"))},
         "inputs: the role of scale, which is opaque: got 'gamma'; expected 'ignored' or"),
        ({"attributes": (EPSILON, AttributeSpec("axis", "f32", "channel_axis"))},
         "attributes: the type of axis, which is the channel_axis: got 'f32'; expected 'i64'"),
        ({"attributes": (EPSILON, AttributeSpec("axis", "i64", "channel_axis", usual=1))},
         "formats: is_any of NC..., whether an attribute is the channel axis: "
         "got False; expected True"),
        ({"formats": (FormatSpec("any axis", "NCX", is_any=True),)},
         "formats: is_any of any axis, whether an attribute is the channel axis: "
         "got True; expected False"),
        ({"ranks": [2, 5]}, "ranks: got 'list'; expected 'tuple'"),
        ({"ranks": (5, 4)}, "ranks (lowest, highest or 0): got (5, 4); expected (4, 5)"),
        ({"ranks": (4, 5, 6)}, "ranks (lowest, highest or 0): got (4, 5, 6); expected (4, 6)"),
        ({"inputs_together": (("gamma", "bta"),)},
         "inputs_together (optional inputs): got 'gamma'; expected none"),
        ({"outputs_together": (("gamma_delta", "beta_delta"),)},
         "outputs_together (optional outputs): got 'gamma_delta'; expected none"),
        ({"source": "nGraph {name}"}, "source: the name in braces: got 'name'; expected 'op'"),
        ({"phrases": Phrases(rank="{x} must have rank {ranks}")},
         "phrases: the name in braces in rank: got 'x'; expected 'ranks'"),
        ({"phrases": Phrases(gradient_shape="needs {channels} channels")},
         "phrases: the name in braces in gradient_shape: got 'channels'; expected 'x'"),
        ({"phrases": Phrases(gradient_type="as {}")},
         "phrases: the name in braces in gradient_type: got ''; expected 'x'"),
        ({"phrases": Phrases(channel_rank="rank 1, {shape}")},
         "phrases: the name in braces in channel_rank: got 'shape'; expected 'x' or 'rank'"),
        ({"phrases": Phrases(channel_size="{channel} channels")},
         "phrases: the name in braces in channel_size: got 'channel'; expected 'x' or"),
        ({"phrases": Phrases(channel_shapes="as {x}")},
         "phrases: the name in braces in channel_shapes: got 'x'; expected none"),
    ],
)  # fmt: skip
def test_schema_with_invalid_field_raises_error_of_field(changes, words):
    schema = operator("ngraph", "BatchNormTrainingBackprop").schema
    with pytest.raises(ValueError, match=re.escape(f"ngraph.{schema.op}: {words}")):
        replace(schema, **changes)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("epsilom",), "got eps; expected epsilom"),
        ((), "got eps; expected no others"),
        (("eps", "layout"), "got too few; expected layout"),
    ],
)
def test_operator_class_with_parameters_unlike_its_schema_is_rejected(names, words):
    specs = tuple(AttributeSpec(name, "f32") for name in names)
    schema = operator("ngraph", "BatchNormTrainingBackprop").schema
    inputs = tuple(
        replace(spec, role="inverse_deviation") if spec.role == "variance" else spec
        for spec in schema.inputs
    )
    schema = replace(schema, dialect="acme", op="grad", inputs=inputs, attributes=specs)

    def call(self, input, gamma, beta, mean, variance, delta, eps, *, arithmetic=None):
        """Gradients."""

    with pytest.raises(ValueError, match=f"^acme.grad: the parameters must .*tables; {words}$"):
        type("Grad", (Operator,), {"rules": (schema,), "__call__": call})


def test_operator_class_with_default_out_of_range_of_schema_is_rejected():
    schema = operator("ngraph", "BatchNormTrainingBackprop").schema
    epsilon = AttributeSpec("eps", "f32", "epsilon", range="not negative")
    schema = replace(schema, dialect="acme", op="grad", attributes=(epsilon,))

    def call(self, input, gamma, beta, mean, variance, delta, eps=-1e-5, *, arithmetic=None):
        """Gradients."""

    message = "^acme.grad: the default of eps: must be finite and not negative; got -1e-05"
    with pytest.raises(ValueError, match=message):
        type("Grad", (Operator,), {"rules": (schema,), "__call__": call})


def test_operator_class_with_epsilon_default_none_is_rejected():
    schema = operator("ngraph", "BatchNormTrainingBackprop").schema
    epsilon = AttributeSpec("eps", "f32", "epsilon", range="not negative")
    schema = replace(schema, dialect="acme", op="grad", attributes=(epsilon,))

    def call(self, input, gamma, beta, mean, variance, delta, eps=None, *, arithmetic=None):
        """Gradients."""

    message = "^acme.grad: the default of eps: must not be None; expected f32, or REQUIRED"
    with pytest.raises(ValueError, match=message):
        type("Grad", (Operator,), {"rules": (schema,), "__call__": call})


def test_by_name_with_duplicate_operator_raises_value_error():
    found = operator("ngraph", "BatchNormTrainingBackprop")
    with pytest.raises(ValueError, match="must have different names; got BatchNormTrainingBackp"):
        by_name(found, found)


def test_call_text_marks_keyword_only_attributes():
    schemas = operator("onednn_spec", "BatchNormTrainingBackprop").schemas
    assert schemas["2020-21"].call.startswith(
        "BatchNormTrainingBackprop(epsilon, data_format, revision, *, is_training)(input, "
    )


@pytest.mark.parametrize(("dialect", "op"), OPERATORS)
def test_schema_has_the_names_of_its_dialect_and_operator_in_the_registry(dialect, op):
    schemas = operator(dialect, op).schemas.values()
    assert {(schema.dialect, schema.op) for schema in schemas} == {(dialect, op)}


@pytest.mark.parametrize("name", sorted({*DIALECTS.values(), *PARTS.values()}))
def test_module_of_a_dialect_exports_its_operators(name):
    module = importlib.import_module(name)
    for table in ("OPERATORS", "PARTS"):
        functions = getattr(module, table, None)
        assert functions is None or {table, *functions} <= {*module.__all__}


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
        ("onednn_spec", "BatchNormForwardTraining"),
        ("onednn_spec", "BatchNormInference"),
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
def test_schema_of_part_matches_signature_and_has_summaries(schema):
    function = getattr(importlib.import_module(PARTS[schema.dialect]), schema.op)
    parameters = dict(inspect.signature(function).parameters)
    assert parameters.pop("arithmetic").default is None
    assert list(schema.order) == list(parameters)
    inputs = [tensor.name for tensor in schema.inputs]
    assert list(parameters)[: len(inputs)] == inputs
    assert all(tensor.summary for tensor in schema.inputs)
    for attribute in schema.attributes:
        default = parameters[attribute.name].default
        assert attribute.default == (REQUIRED if default is inspect.Parameter.empty else default)
        assert attribute.summary


@pytest.mark.parametrize(("dialect", "op"), UNDECLARED)
def test_operator_has_own_docstring_and_literal_types_of_choices(dialect, op):
    found = operator(dialect, op)
    cls = found if isinstance(found, type) else type(found)
    assert cls.__doc__ not in (None, cls.__base__.__doc__)
    method = cls.__init__ if cls.schema.style == "configured" else cls.__call__
    hints = get_type_hints(method)
    for spec in cls.schema.attributes:
        if spec.choices:
            literals = [hints[spec.name], *get_args(hints[spec.name])]
            assert {*spec.choices} in [{*get_args(each)} for each in literals]


@pytest.mark.parametrize(("dialect", "op"), OPERATORS)
def test_operator_docstring_has_the_defaults_of_the_table(dialect, op):
    found = operator(dialect, op)
    cls = found if isinstance(found, type) else type(found)
    text = f"{inspect.getdoc(cls)}\n{inspect.getdoc(cls.__call__)}"
    if isinstance(found, Declared):
        text = inspect.getdoc(found.function)
    for spec in found.schema.attributes:
        for default in re.findall(rf"^{spec.name} : .*, default (.+)$", text, re.MULTILINE):
            assert ast.literal_eval(default) == spec.default, spec.name


def test_operator_repr_is_its_name_and_its_attributes():
    assert repr(operator("ngraph", "BatchNormInference")) == (
        "backnorm.dialects.ngraph.BatchNormInference"
    )
    configured = operator("onednn_graph", "BatchNormInference")(1e-5, "NCX")
    assert "onednn_graph.BatchNormInference(epsilon=" in repr(configured)
    assert "data_format='NCX'" in repr(configured)


@pytest.mark.parametrize("schema", [*SCHEMAS, *FUNCTIONS], ids=ids)
def test_schema_to_dict_returns_plain_json(schema):
    described = json.loads(json.dumps(schema.to_dict()))
    assert described["op"] == schema.op
    assert len(described["inputs"]) == len(schema.inputs)
    assert [a["required"] for a in described["attributes"]] == [
        a.default is REQUIRED for a in schema.attributes
    ]


@pytest.mark.parametrize("schema", [*SCHEMAS, *FUNCTIONS], ids=ids)
def test_schema_has_unique_names_summary_and_valid_defaults(schema):
    names = [t.name for t in schema.inputs] + [a.name for a in schema.attributes]
    assert len(names) == len(set(names))
    assert len({t.name for t in schema.outputs}) == len(schema.outputs)
    assert schema.summary.endswith(".")
    assert schema.source
    for attribute in schema.attributes:
        if attribute.choices and not attribute.required:
            assert attribute.default in attribute.choices


@pytest.mark.parametrize(
    ("dialect", "op"), [c for c in UNDECLARED if not c[0].startswith("onednn")]
)
def test_call_parameters_have_the_names_order_and_defaults_of_the_table(dialect, op):
    found = operator(dialect, op)
    schema = found.schema
    parameters = inspect.signature(found).parameters
    # An attribute may stand between inputs.
    for specs in (schema.inputs, schema.attributes):
        names = [spec.name for spec in specs]
        assert [name for name in parameters if name in names] == names
    described = {spec.name for spec in (*schema.inputs, *schema.attributes)}
    more = {"outputs", "output_mask", schema.outputs[0].name, "arithmetic"}
    assert parameters.keys() - described <= more
    assert parameters["arithmetic"].default is None
    for attribute in schema.attributes:
        assert parameters[attribute.name].default == attribute.default
    kind = inspect.Parameter.KEYWORD_ONLY
    if dialect == "tensorflow":
        assert {p.kind for p in parameters.values()} == {kind}


@pytest.mark.parametrize("op", operators("onednn_graph"))
def test_onednn_graph_signatures_follow_the_schema(op):
    found = operator("onednn_graph", op)
    schema = found.schema
    constructor = inspect.signature(found).parameters
    assert list(constructor) == [a.name for a in schema.attributes]
    for attribute in schema.attributes:
        assert constructor[attribute.name].default == attribute.default
    call = list(inspect.signature(found.__call__).parameters)[1:]
    inputs = [t.name for t in schema.inputs]
    assert call[: len(inputs)] == inputs
    assert set(call[len(inputs) :]) <= {"outputs", schema.outputs[0].name, "arithmetic"}


@pytest.mark.parametrize("op", operators("onednn_spec"))
def test_onednn_spec_constructors_follow_the_schema(op):
    found = operator("onednn_spec", op)
    constructor = inspect.signature(found).parameters
    described = {a.name for schema in found.schemas.values() for a in schema.attributes}
    assert set(constructor) == described


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
