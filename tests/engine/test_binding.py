"""The code of a call: every operand has its place in the key and in the record."""

from __future__ import annotations

import itertools
import linecache
import traceback

import numpy as np
import pytest

from backnorm import addresses
from backnorm.arrays import NUMPY, NumPy
from backnorm.binding import caller, runner
from backnorm.dialects import ngraph
from backnorm.executable import CALLS, forget, operation
from backnorm.interfaces import ADDRESSES
from backnorm.layout import adjacent, extents_of
from backnorm.signature import SIGNATURES
from tests.support.dtypes import FLOAT32, FLOAT64

RUN = [each for each in SIGNATURES.values() if each.public and each.results]


def optional(signature):
    names = [operand.name for operand in signature.operands if not operand.required]
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)


CASES = [(signature, inputs) for signature in RUN for inputs in optional(signature)]


@pytest.mark.parametrize(("signature", "inputs"), CASES, ids=lambda value: str(value)[:60])
def test_runner_passes_each_address_to_its_field(signature, inputs):
    options = [result.option for result in signature.results if result.option is not None]
    present = [o.name for o in signature.operands if o.required or o.name in inputs]
    places = []

    def stage(*found, header=0, **_):
        # NumPy's arrays come as objects, in which machine code finds where their elements are.
        places.append([at and addresses._word(at + header).value if header else at for at in found])
        return -1

    def refuse(*_):
        raise AssertionError

    run = runner(signature, NUMPY, tuple(present), tuple(options))(
        stage, refuse, False, (2, 3), FLOAT32, 3, FLOAT64, 16, bytes(8), 2, 8
    )
    arrays = {o.name: np.ones(3) for o in signature.operands if o.name in present}
    results = run(*(arrays.get(name) for name in signature.names))
    by_field = {o.field: arrays[o.name] for o in signature.operands if o.name in present}
    pairs = list(zip(signature.results, results, strict=True))
    by_field |= {result.field: found for result, found in pairs if result.field}
    expected = [by_field[field].ctypes.data if field in by_field else 0 for field in ADDRESSES]
    assert list(places[0]) == expected
    kinds = {"data": np.float32, "channel": np.float64, "sums": np.float64, "mask": np.uint8}
    for result, found in pairs:
        assert found == 2 if result.kind == "count" else found.dtype == kinds[result.kind]


@pytest.mark.parametrize("signature", SIGNATURES.values(), ids=lambda s: s.operation)
def test_calls_that_differ_in_one_operand_have_different_keys(signature):
    keys = []

    def first(key, *_, **numbers):
        keys.append(key)

    call = caller(signature, NUMPY)({}, first, lambda: 1)
    array = np.ones(3, np.float32)
    others = [None, array[::2], array.astype(np.float64), array.astype(">f4"), array[None]]
    count, options = len(signature.operands), [1.5] * len(signature.options)
    inputs = [[array] * count]
    inputs += [
        [other if k == at else array for k in range(count)]
        for at in range(count)
        for other in others
    ]
    for operands in inputs:
        call(*operands, *options)
    # A call without a required operand has no key.
    required = [k for k, operand in enumerate(signature.operands) if operand.required]
    lacking = [any(operands[k] is None for k in required) for operands in inputs]
    assert [key is None for key in keys] == lacking
    found = [key for key in keys if key is not None]
    assert len(set(found)) == len(found)
    # Equal options of different types (True == 1 == 1.0) have different keys.
    for at, value in itertools.product(range(len(options)), (1, 1.0, True)):
        call(*inputs[0], *(value if k == at else 1.5 for k in range(len(options))))
    assert len(set(keys)) == len(set(found)) + any(lacking) + 3 * len(options)


def test_caller_with_non_array_operand_or_unhashable_option_makes_no_key():
    keys = []
    call = caller(SIGNATURES["inference"], NUMPY)({}, lambda key, *_: keys.append(key), lambda: 1)
    array = np.ones(3)
    call([1.0], None, array, array, None, None, 1e-5, "NCX", None, None)
    call(array, None, array, array, None, None, [1e-5], "NCX", None, None)
    assert keys == [None, None]


def test_traceback_shows_generated_code():
    def first(*_):
        raise ValueError("here")

    call = caller(SIGNATURES["reduce"], NUMPY)({}, first, lambda: 1)
    linecache.checkcache()
    with pytest.raises(ValueError, match="here") as raised:
        call(None, None, None, None, "NCX", None, False)
    text = "".join(traceback.format_exception(raised.value))
    assert "return first(key, (x, dy, mask, mean,)" in text


@pytest.mark.parametrize(
    ("shape", "axes", "order", "expected"),
    [
        ((2, 3, 4), (1,), (0, 1, 2), (2, 3, 4)),
        ((2, 3, 4), (1, 2), (0, 1, 2), (2, 12, 1)),
        ((2, 3, 4), (0, 1), (0, 1, 2), (1, 6, 4)),
        ((2, 3, 4), (0, 1, 2), (0, 1, 2), (1, 24, 1)),
        ((2, 3, 4), (), (0, 1, 2), (1, 1, 24)),
        ((2, 1, 4), (0, 2), (0, 1, 2), (1, 8, 1)),
        # Not side by side in this order: in another, for which arrays are copied.
        ((2, 3, 4), (0, 2), (0, 1, 2), (3, 8, 1)),
        ((2, 3, 4), (1, 2), (0, 2, 1), (2, 12, 1)),
        ((5,), (0,), (0,), (1, 5, 1)),
        ((2, 0, 4), (1,), (0, 1, 2), (2, 0, 4)),
    ],
)
def test_extents_of_any_channel_axes_are_outer_channels_inner(shape, axes, order, expected):
    assert extents_of(shape, axes, adjacent(shape, axes, order)) == expected


def test_call_cache_separates_calls_of_frameworks():
    """TensorFlow's adapter takes NumPy arrays too, but aligns results otherwise."""

    class Others(NumPy):
        code = NumPy.code._replace(arrays="others")

    forget()
    x, ones = np.ones((2, 3, 4), np.float32), np.ones(3, np.float32)
    found = []
    for arrays in (NUMPY, Others()):
        operation("inference", arrays)(x, None, ones, ones, None, None, 1e-5, "NCX", None, None)
        found.append(len(CALLS))
    assert found == [1, 2]
    assert {each._arrays for each in CALLS.values()} > {NUMPY}


class ExpiredError(Exception):
    """What a program's own signal handler raises."""


def test_caller_raises_exception_of_signal_handler():
    def settings():
        # Python runs a signal handler between two instructions of a function.
        raise ExpiredError

    called = []
    make = caller(SIGNATURES["reduce"], NUMPY)
    call = make({}, lambda *arguments: called.append(arguments), settings)
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ExpiredError):
        call(x, x, None, x[0], "NCX", None, False)
    ((key, operands, options, out),) = called
    assert (key, out) == (None, None)
    assert operands[0] is x
    assert options == ("NCX", None, False)


def test_dialect_call_raises_exception_of_signal_handler(monkeypatch):
    def settings():
        raise ExpiredError

    operator = ngraph.BatchNormTrainingBackprop

    x, channels = np.ones((2, 3, 4), np.float32), np.ones(3, np.float32)
    names = type(operator)._run.__globals__
    monkeypatch.setitem(names, "settings", settings)
    with pytest.raises(ExpiredError):
        operator(x, channels, channels, channels, channels, x, 1e-5)
