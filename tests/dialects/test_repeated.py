"""A repeated call finds what the first one left: it is right, refuses the same, and holds nothing.

For every operator, from its schema.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
import weakref

import numpy as np
import pytest

import backnorm
from backnorm import BacknormError
from backnorm.dialects import ngraph, onednn_graph, onednn_spec, stablehlo, tensorflow
from backnorm.dialects.registry import DIALECTS, operators
from backnorm.executable import CALLS

from .absent_operands import subjects

SUBJECTS = {subject.name: subject for subject in subjects()}
ALL = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e, strict=True)


@ALL
def test_repeated_call_with_other_values_equals_fresh_call(subject):
    for seed in range(4):
        inputs = subject.good(seed)
        expected = subject.fresh({n: a.copy() for n, a in inputs.items()})
        assert_same(subject.call(inputs), expected)


@ALL
def test_repeated_call_does_not_call_bind(subject, monkeypatch):
    inputs = subject.good()
    subject.call(inputs)
    monkeypatch.setattr(type(subject.callable), "bind", None)
    subject.call(inputs)


@ALL
def test_repeated_calls_return_arrays_without_shared_memory(subject):
    inputs = {t.name: subject.good()[t.name] for t in subject.schema.inputs if t.required}
    arrays = [*inputs.values(), *subject.call(inputs), *subject.call(inputs)]
    for k, array in enumerate(arrays):
        assert not any(np.may_share_memory(array, other) for other in arrays[:k])


@ALL
def test_repeated_call_with_invalid_variance_raises_same_message(subject):
    inputs = subject.good()
    subject.call(inputs)
    roles = {tensor.role: tensor.name for tensor in subject.schema.inputs}
    name = roles.get("inverse_deviation", roles.get("variance"))
    if name is None:
        pytest.skip("the operator has no input of the variance")
    inputs[name].reshape(-1)[2] = -3
    said = []
    for call in (subject.fresh, subject.call, subject.call):
        with pytest.raises(ValueError, match=rf"^{name}: .*channel 2; got .*-3") as error:
            call(dict(inputs))
        assert isinstance(error.value, BacknormError)
        said.append(str(error.value))
    assert len(set(said)) == 1


@ALL
def test_repeated_call_with_other_thread_count_has_the_same_bits(subject):
    inputs = subject.good()
    expected = subject.call({n: a.copy() for n, a in inputs.items()})
    for threads in (1, 2, 1):
        with backnorm.num_threads(threads):
            assert_same(subject.call({n: a.copy() for n, a in inputs.items()}), expected)


@ALL
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_repeated_call_with_other_arithmetic_equals_fresh_call(subject, name):
    inputs = subject.good()
    data = next(tensor.name for tensor in subject.schema.inputs if tensor.role == "x")
    if name == "float32" and inputs[data].dtype == np.float64:
        with pytest.raises(ValueError, match=r"^arithmetic: float64 elements are computed in"):
            subject.call(inputs, arithmetic=name)
        return

    def call(**options):
        return subject.call({n: a.copy() for n, a in inputs.items()}, **options)

    call()
    expected = subject.fresh({n: a.copy() for n, a in inputs.items()}, arithmetic=name)
    assert_same(call(arithmetic=name), expected)
    known = set(CALLS)
    with backnorm.arithmetic(name):
        assert_same(call(), expected)
    assert set(CALLS) > known


@pytest.mark.covering(0)
@ALL
def test_operator_call_does_not_keep_input_arrays(subject):
    inputs = subject.good(7)
    references = [weakref.ref(array) for array in inputs.values()]
    subject.call(inputs)
    del inputs
    gc.collect()
    assert not any(reference() is not None for reference in references)


@ALL
def test_operator_docstring_lists_outputs_and_has_all_sections(subject):
    call = subject.callable.__call__
    text = inspect.getdoc(call)
    schema = subject.schema
    if schema.revision in (None, "latest"):
        # The summaries are the entries of the docstring.
        specs = (*schema.inputs, *schema.outputs, *schema.attributes)
        absent = [spec.name for spec in specs if not spec.summary]
        assert not absent, f"the docstring of {subject.name} has no entry for {absent}"
        _, _, results = text.partition("\nReturns\n")
        listed = re.findall(r"^(\w+) : ", results.partition("\nRaises\n")[0], re.MULTILINE)
        assert listed == [tensor.name for tensor in schema.outputs]
    assert "\narithmetic : " in text
    for section in ("Parameters", "Returns", "Raises", "Notes"):
        assert f"\n{section}\n{'-' * len(section)}\n" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("epsilon", [1, True, np.float32(1), 1.0])
def test_repeated_call_rejects_epsilon_true_after_epsilon_1(batch, epsilon):
    b = batch((2, 3, 4), "NCX")
    args = [b[name] for name in ("x", "gamma", "beta", "mean", "variance", "dy")]
    ngraph.BatchNormTrainingBackprop(*args, 1.0)
    if epsilon is True:
        with pytest.raises(TypeError, match="epsilon: must be a real number"):
            ngraph.BatchNormTrainingBackprop(*args, epsilon)
    else:
        ngraph.BatchNormTrainingBackprop(*args, epsilon)


def test_repeated_call_rejects_feature_index_true_after_index_1(batch):
    b = batch((2, 3, 4), "NCX")
    args = [b[name] for name in ("x", "gamma", "mean", "variance", "dy")]
    for _ in range(2):
        stablehlo.batch_norm_grad(*args, 0.1, 1)
    with pytest.raises(TypeError, match="feature_index: must be an integer"):
        stablehlo.batch_norm_grad(*args, 0.1, True)


def test_repeated_call_from_node_order_equals_documented_order(batch, same):
    b = batch((2, 3, 4), "NCX")
    documented = [b[name] for name in ("x", "gamma", "beta", "mean", "variance", "dy")]
    node = [b[name] for name in ("gamma", "beta", "x", "mean", "variance", "dy")]
    call = ngraph.BatchNormTrainingBackprop
    for _ in range(2):
        same(call.from_node_order(*node, 0.1), call(*documented, 0.1))
    names = list(inspect.signature(call.from_node_order).parameters)
    assert names[:3] == ["gamma", "beta", "input"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pickle_and_copy_of_operator_return_same_object(dialect):
    for operator in operators(dialect).values():
        assert pickle.loads(pickle.dumps(operator)) is operator
        assert copy.copy(operator) is operator


def test_pickle_and_deepcopy_of_configured_operator_keep_attributes_and_results(batch, same):
    b = batch((2, 4, 3))
    args = [b[name] for name in ("x", "dy", "mean", "variance", "gamma")]
    for operator in (
        onednn_graph.BatchNormTrainingBackward(1e-3, single_output="onednn"),
        onednn_spec.BatchNormTrainingBackprop(1e-3, revision="latest"),
    ):
        expected = operator(*args)
        for other in (pickle.loads(pickle.dumps(operator)), copy.deepcopy(operator)):
            assert type(other) is type(operator)
            assert other.attributes == operator.attributes
            same(other(*args), expected)
    with pytest.raises(TypeError):
        operator.attributes["epsilon"] = 1.0


def test_pickle_of_named_results_keeps_class_and_fields(batch):
    b = batch()
    out = tensorflow.FusedBatchNormV3(
        x=b["x"], scale=b["gamma"], offset=b["beta"], mean=b["mean"], variance=b["variance"]
    )
    again = pickle.loads(pickle.dumps(out))
    assert type(again) is tensorflow.ForwardV3
    assert again._fields == out._fields
