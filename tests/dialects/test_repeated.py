"""A repeated call finds what the first one left: it is right, refuses the same, and holds nothing.

For every operator, from its schema.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import pydoc
import re
import weakref

import numpy as np
import pytest

import backnorm
from backnorm.dialects import aten, ngraph, stablehlo, tensorflow
from backnorm.dialects.registry import DIALECTS, operators
from backnorm.executable import CALLS
from tests.support.calls import dialect_subjects

SUBJECTS = {subject.name: subject for subject in dialect_subjects()}
ALL = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e, strict=True)


def good_arguments(subject, seed=7):
    """Return arguments of the first of the operator's element types, in new arrays."""
    return subject.good(subject.type_pairs[0], seed)


@ALL
def test_repeated_call_with_other_values_equals_fresh_call(subject):
    for seed in range(4):
        expected = subject.fresh(**good_arguments(subject, seed))
        assert_same(subject.returned(**good_arguments(subject, seed)), expected)


@ALL
def test_repeated_call_is_not_checked_again(subject, monkeypatch):
    good = good_arguments(subject)
    subject.call(**good)
    cls = subject.operator if isinstance(subject.operator, type) else type(subject.operator)
    monkeypatch.setattr(cls, "checked", None)
    subject.call(**good)


@ALL
def test_repeated_calls_return_arrays_without_shared_memory(subject):
    good = good_arguments(subject)
    arrays = [a for a in good.values() if isinstance(a, np.ndarray)]
    arrays += [*subject.returned(**good), *subject.returned(**good)]
    for k, array in enumerate(arrays):
        assert not any(np.may_share_memory(array, other) for other in arrays[:k])


@ALL
def test_repeated_call_with_invalid_variance_raises_same_message(subject):
    good, words = good_arguments(subject), subject.schema.words
    subject.call(**good)
    name = words.get("inverse_deviation", words.get("variance"))
    if name is None:
        pytest.skip("the operator has no input of the variance")
    good[name].reshape(-1)[2] = -3
    said = set()
    for call in (subject.fresh, subject.call, subject.call):
        with pytest.raises(ValueError, match=rf"^{name}: .*channel 2; got .*-3") as error:
            call(**good)
        said.add(str(error.value))
    assert len(said) == 1


@ALL
def test_repeated_call_with_other_thread_count_has_the_same_bits(subject):
    expected = subject.returned(**good_arguments(subject))
    for threads in (1, 2, 1):
        with backnorm.num_threads(threads):
            assert_same(subject.returned(**good_arguments(subject)), expected)


@ALL
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_repeated_call_with_other_arithmetic_equals_fresh_call(subject, name):
    if name == "float32" and subject.type_pairs[0][0] == np.float64:
        with pytest.raises(ValueError, match=r"^arithmetic: float64 elements are computed in"):
            subject.call(**good_arguments(subject), arithmetic=name)
        return
    subject.call(**good_arguments(subject))
    expected = subject.fresh(**good_arguments(subject), arithmetic=name)
    assert_same(subject.returned(**good_arguments(subject), arithmetic=name), expected)
    known = set(CALLS)
    with backnorm.arithmetic(name):
        assert_same(subject.returned(**good_arguments(subject)), expected)
    assert set(CALLS) > known


@pytest.mark.covering(0)
@ALL
def test_operator_call_does_not_keep_input_arrays(subject):
    good = good_arguments(subject)
    references = [weakref.ref(a) for a in good.values() if isinstance(a, np.ndarray)]
    subject.call(**good)
    del good
    gc.collect()
    assert not any(reference() is not None for reference in references)


@ALL
def test_operator_docstring_lists_outputs_and_has_all_sections(subject):
    text = inspect.getdoc(getattr(subject.operator, "function", subject.operator.__call__))
    schema = subject.schema
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


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_repeated_call_with_other_elements_of_output_mask_returns_requested_outputs(batch, make):
    b = batch((2, 3, 4), "NCX")
    inverse = 1 / np.sqrt(b["variance"] + 0.1)
    operands = b["dy"], b["x"], b["gamma"], None, None, b["mean"], inverse, True, 0.1
    for _ in range(2):
        for mask in ([True, True, True], [True, False, True]):
            found = aten.native_batch_norm_backward(*operands, make(mask))
            assert [each is not None for each in found] == mask
    with pytest.raises(TypeError, match="output_mask: must hold booleans"):
        aten.native_batch_norm_backward(*operands, make([1, 1, 1]))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_function_has_the_signature_of_its_specification_and_is_pickled_by_name(dialect):
    for operator in operators(dialect).values():
        function = operator.function
        assert pickle.loads(pickle.dumps(function)) is function
        assert list(inspect.signature(function).parameters) == [
            *operator.schema.order,
            "arithmetic",
        ]
        assert operator.schema.summary in pydoc.render_doc(function)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pickle_and_copy_of_operator_return_same_object(dialect):
    for operator in operators(dialect).values():
        assert pickle.loads(pickle.dumps(operator)) is operator
        assert copy.copy(operator) is operator


def test_pickle_of_named_results_keeps_class_and_fields(batch):
    b = batch()
    out = tensorflow.FusedBatchNormV3(
        x=b["x"], scale=b["gamma"], offset=b["beta"], mean=b["mean"], variance=b["variance"]
    )
    again = pickle.loads(pickle.dumps(out))
    assert type(again) is tensorflow.ForwardV3
    assert again._fields == out._fields
