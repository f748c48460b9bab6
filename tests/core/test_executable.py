"""Calls: every operand has its place in the key and in the record."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from backnorm import executable
from backnorm.addresses import HEADER, data_of
from backnorm.arrays import NUMPY, NumPy
from backnorm.dialects import ngraph
from backnorm.executable import CALLS, Executable, compute, forget
from backnorm.interfaces import ADDRESSES
from backnorm.options import Options
from backnorm.problem import problem_of
from backnorm.signature import SIGNATURES
from tests.support.dtypes import FLOAT32, FLOAT64

RUN = [each for each in SIGNATURES.values() if each.results]
OPERANDS = {
    "data": np.ones((2, 3, 4), np.float32),
    "channel": np.ones(3, np.float32),
    "mask": np.zeros(19, np.uint8),
}


def optional(signature):
    names = [operand.name for operand in signature.operands if not operand.required]
    for count in range(len(names) + 1):
        for inputs in itertools.combinations(names, count):
            # Running statistics are given together, and only a ReLU has a residual or a mask.
            if ("running_mean" in inputs) == ("running_variance" in inputs):
                yield inputs


CASES = [(signature, inputs) for signature in RUN for inputs in optional(signature)]


class Recorded:
    """Records the addresses of a call, in the place of a problem's stages."""

    def __init__(self):
        self.addresses = []

    def stage(self, operation):
        return self._run

    def _run(self, addresses, **numbers):
        # NumPy's arrays come as objects, in which machine code finds where their elements are.
        found = [at and data_of(at, HEADER) for at in addresses] if HEADER else addresses
        self.addresses.append(list(found))
        return -1


@pytest.mark.parametrize(("signature", "inputs"), CASES, ids=lambda value: str(value)[:60])
def test_executable_passes_each_address_to_its_field(signature, inputs):
    operands = [
        OPERANDS[o.kind].copy() if o.required or o.name in inputs else None
        for o in signature.operands
    ]
    options = {"epsilon": 1e-5}
    if "activation" in signature.options:
        options["activation"] = "silu" if signature.operation == "activation_backward" else "relu"
    if "residual" in signature.options:
        options["residual"] = "mask" in inputs
    problem = problem_of(signature.operation, *operands, **options)
    launch = Recorded()
    found = Executable(problem, (0, 1, 2), NUMPY, None, launch)
    results = found.plain(operands)
    by_field = {
        operand.field: array
        for operand, array in zip(signature.operands, operands, strict=True)
        if array is not None
    }
    pairs = list(zip(signature.results, results, strict=True))
    by_field |= {r.field: array for r, array in pairs if r.field and array is not None}
    expected = [by_field[field].ctypes.data if field in by_field else 0 for field in ADDRESSES]
    assert launch.addresses == [expected]
    types = {"data": FLOAT32, "channel": FLOAT32, "sums": FLOAT64, "mask": np.uint8}
    types["coefficients"] = np.dtype(problem.arithmetic)
    for result, array in pairs:
        if result.kind == "count":
            assert array == 8
        elif result.option is None or getattr(problem, result.option):
            assert array.dtype == types[result.kind]
        else:
            assert array is None


def test_executable_of_empty_batch_passes_no_running_statistics():
    x, channel = np.ones((0, 3, 4), np.float32), np.ones(3, np.float32)
    operands = x, None, None, None, channel, channel
    launch = Recorded()
    problem = problem_of("forward", *operands)
    Executable(problem, (0, 1, 2), NUMPY, None, launch).plain(operands, None, {"momentum": 0.5})
    named = dict(zip(ADDRESSES, launch.addresses[0], strict=True))
    assert named["running_mean"] == named["running_variance"] == 0


@pytest.fixture
def keys(monkeypatch):
    """The keys that calls are kept under. The calls are not computed."""

    class Nothing:
        def plain(self, *_, **__):
            return ()

    monkeypatch.setattr(executable, "planned", lambda *_: Nothing())
    forget()
    yield CALLS
    forget()


@pytest.mark.parametrize("signature", SIGNATURES.values(), ids=lambda s: s.operation)
def test_calls_that_differ_in_one_operand_have_different_keys(signature, keys):
    array = np.ones(32, np.float32)
    others = [None, array[::2], array.astype(np.float64), array.astype(">f4"), array[None]]
    count, options = len(signature.operands), Options(*(1.5,) * len(Options._fields))
    inputs = [[array] * count]
    inputs += [
        [other if k == at else array for k in range(count)]
        for at in range(count)
        for other in others
    ]
    for operands in inputs:
        compute(signature.operation, operands, options)
    assert len(keys) == len(inputs)
    # Equal options of different types (True == 1 == 1.0) have different keys.
    for name, value in itertools.product(Options._fields, (1, 1.0, True)):
        compute(signature.operation, inputs[0], options._replace(**{name: value}))
    assert len(keys) == len(inputs) + 3 * len(Options._fields)


def test_calls_with_masks_of_different_orders_have_different_keys(keys):
    x, channel = OPERANDS["data"], OPERANDS["channel"]
    for last in (0, 1):
        mask = OPERANDS["mask"].copy()
        mask[-1] = last
        compute("reduce", (x, x, mask, channel), Options())
    assert len(keys) == 2


def test_call_with_non_array_operand_or_unhashable_option_has_no_key(keys):
    array = np.ones(3)
    compute("inference", ([1.0], None, array, array, None, None), Options())
    compute("inference", (array, None, array, array, None, None), Options([1e-5]))
    assert not keys


def test_call_cache_separates_calls_of_frameworks():
    """TensorFlow's adapter takes NumPy arrays too, but aligns results otherwise."""

    class Others(NumPy):
        pass

    forget()
    x, ones = np.ones((2, 3, 4), np.float32), np.ones(3, np.float32)
    found = []
    for arrays in (NUMPY, Others()):
        compute("inference", (x, None, ones, ones, None, None), Options(1e-5), arrays=arrays)
        found.append(len(CALLS))
    assert found == [1, 2]
    assert {each._arrays for each in CALLS.values()} > {NUMPY}


def test_repeated_call_on_transposed_array_follows_its_order_of_axes(rng):
    """The key of a call that is not row-major does not say in which order the axes are."""
    forget()
    values, ones = rng.standard_normal((2, 3, 4, 5)).astype(np.float32), np.ones(3, np.float32)
    expected = compute("inference", (values, None, ones, ones, None, None), Options())[0]
    for order in itertools.permutations(range(4)):
        x = np.ascontiguousarray(values.transpose(order)).transpose(np.argsort(order))
        (y,) = compute("inference", (x, None, ones, ones, None, None), Options())
        np.testing.assert_array_equal(y, expected)
        assert y.strides == x.strides


class ExpiredError(Exception):
    """The exception that a program's own signal handler raises."""


def expire():
    # Python runs a signal handler between two instructions of a function.
    raise ExpiredError


def test_call_raises_exception_of_signal_handler(monkeypatch, keys):
    monkeypatch.setattr(executable, "settings", expire)
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ExpiredError):
        compute("reduce", (x, x, None, x[0]), Options())
    assert not keys


def test_dialect_call_raises_exception_of_signal_handler(monkeypatch):
    operator = ngraph.BatchNormTrainingBackprop
    x, channels = np.ones((2, 3, 4), np.float32), np.ones(3, np.float32)
    monkeypatch.setitem(type(operator.operator).__call__.__globals__, "settings", expire)
    with pytest.raises(ExpiredError):
        operator(x, channels, channels, channels, channels, x, 1e-5)
