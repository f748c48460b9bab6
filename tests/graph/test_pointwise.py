"""ReLU, ReLUBackward, Quantize and Dequantize: definitions, rounding, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backnorm.conformance.judge._pointwise import (
    check_dequantize,
    check_quantize,
    check_relu,
    check_relu_gradient,
)
from backnorm.errors import ArgumentError
from backnorm.graph import parse_graph, run_program
from backnorm.graph.pointwise import POINTWISE

from .conftest import attribute, logical_tensor

TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
INTEGERS = {"s8": np.int8, "u8": np.uint8}


def document(kind, attributes=(), *, src="f32", dst="f32", shape=(2, 3, 4), inputs=1):
    return {
        "version": "3.0.0",
        "graph": [
            {
                "id": 0,
                "name": "op",
                "kind": kind,
                "attrs": dict(attributes),
                "inputs": [logical_tensor(id_, list(shape), src) for id_ in range(inputs)],
                "outputs": [logical_tensor(9, list(shape), dst)],
            }
        ],
    }


def run(graph, *tensors):
    return run_program(parse_graph(graph), {str(i): array for i, array in enumerate(tensors)})["9"]


def quantisation(scale, zero_point=None):
    found = {"scales": attribute("f32[]", [scale]), "qtype": attribute("string", "per_tensor")}
    if zero_point is not None:
        found["zps"] = attribute("s64[]", [zero_point])
    return found


def checked(kind, dtype, **attributes):
    return POINTWISE[kind].check("op", attributes, {"src": dtype, "dst": dtype})


@pytest.mark.parametrize("name", TYPES)
def test_relu_keeps_positive_elements_and_nan(name):
    src = np.array([-np.inf, -1.5, -0.0, 0.0, 1.5, np.inf, np.nan], TYPES[name])
    dst = run(document("ReLU", src=name, dst=name, shape=src.shape), src)
    assert dst.dtype == src.dtype
    assert list(map(str, dst.tolist())) == ["0.0", "0.0", "0.0", "0.0", "1.5", "inf", "nan"]
    assert check_relu(src, dst).passed


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("use_dst", [0, 1, None])
def test_relu_backward_passes_gradient_where_src_or_dst_is_positive(name, use_dst):
    src = np.array([-1.0, -0.0, 0.0, 2.0**-14, 3.0, np.nan], TYPES[name])
    dy = np.array([1, 2, 3, -4, 5, 6], TYPES[name])
    given_ = np.maximum(src.astype(float), 0).astype(src.dtype) if use_dst != 0 else src
    attributes = {} if use_dst is None else {"use_dst": attribute("bool", use_dst)}
    graph = document("ReLUBackward", attributes, src=name, dst=name, shape=src.shape, inputs=2)
    dx = run(graph, given_, dy)
    assert dx.astype(float).tolist() == [0, 0, 0, -4, 5, 0]
    assert check_relu_gradient(given_, dy, dx).passed


def test_pointwise_operators_keep_layout_of_input(rng):
    src = rng.normal(size=(4, 5, 6)).astype(np.float32).transpose(2, 0, 1)
    for kind in ("ReLU", "Quantize"):
        attributes = checked("Quantize", np.dtype(np.int8), scales=[1.0])
        dst = POINTWISE[kind].compute(attributes, np.dtype(np.int8), src)
        assert np.argsort(dst.strides).tolist() == np.argsort(src.strides).tolist()


@pytest.mark.parametrize("name", INTEGERS)
def test_quantize_rounds_halves_to_even_and_saturates(name):
    src = np.float32([-1e30, -0.5, 0.5, 1.5, 2.5, 3.4999998, 200.5, np.inf])
    dst = run(document("Quantize", quantisation(1.0), dst=name, shape=src.shape), src)
    limits = np.iinfo(INTEGERS[name])
    expected = [-0.5, 0.5, 1.5, 2.5, 3.4999998, 200.5]
    expected = [limits.min, *(min(round(v), limits.max) for v in expected), limits.max]
    assert dst.dtype == INTEGERS[name]
    assert dst.tolist() == expected


@pytest.mark.parametrize("name", INTEGERS)
def test_quantize_of_dequantized_integers_returns_them(rng, name):
    scale, zero_point = np.float32(0.3), 77
    integers = rng.integers(0, 127, (2, 3, 4)).astype(INTEGERS[name])
    attributes = quantisation(float(scale), zero_point)
    real = run(document("Dequantize", attributes, src=name), integers)
    expected = (integers.astype(float) - zero_point) * float(scale)
    np.testing.assert_array_equal(real, expected.astype(np.float32))
    back = run(document("Quantize", attributes, dst=name), real)
    np.testing.assert_array_equal(back, integers)


def test_dequantize_without_zero_points_uses_zero():
    src = np.arange(24, dtype=np.int8).reshape(2, 3, 4)
    dst = run(document("Dequantize", quantisation(0.5), src="s8"), src)
    np.testing.assert_array_equal(dst, src * np.float32(0.5))


@given(
    arrays(np.float32, 8, elements=st.floats(-300, 300, width=32)),
    st.floats(2.0**-20, 2.0**20, width=32),
    st.integers(-128, 127),
)
def test_quantize_is_within_its_budget(src, scale, point):
    attributes = checked("Quantize", np.dtype(np.int8), scales=[scale], zps=[point])
    dst = POINTWISE["Quantize"].compute(attributes, np.dtype(np.int8), src)
    verdict = check_quantize(src, dst, attributes, np.dtype(np.int8))
    assert verdict.passed, verdict.detail
    for real, integer in zip(src.tolist(), dst.tolist(), strict=True):
        exact = Fraction(real) / Fraction(scale) + point
        nearest = max(-128, min(127, round(exact)))
        # Another integer only next to a midpoint.
        distance = abs(abs(exact - nearest) - Fraction(1, 2))
        near = 2.0**-23 * (abs(real / scale) + abs(float(exact)) + 1e-30)
        assert integer == nearest or (abs(integer - nearest) == 1 and distance <= near)


@given(arrays(np.uint8, 8), st.floats(2.0**-140, 2.0**120, width=32), st.integers(0, 255))
def test_dequantize_is_correctly_rounded(src, scale, point):
    attributes = checked("Dequantize", np.dtype(np.uint8), scales=[scale], zps=[point])
    dst = POINTWISE["Dequantize"].compute(attributes, np.dtype(np.float32), src)
    verdict = check_dequantize(src, dst, attributes)
    assert verdict.passed, verdict.detail
    exact = [(Fraction(int(i)) - point) * Fraction(scale) for i in src]
    np.testing.assert_array_equal(dst, np.array(exact, float).astype(np.float32))


def test_check_of_each_operator_rejects_a_wrong_element(rng):
    src = rng.normal(size=64).astype(np.float32)
    attributes = checked("Quantize", np.dtype(np.int8), scales=[0.1], zps=[3])
    good = POINTWISE["Quantize"].compute(attributes, np.dtype(np.int8), src)
    assert check_quantize(src, good, attributes, good.dtype).passed
    for wrong in (good + np.int8(good == good.max()), good.astype(np.uint8), good[1:]):
        assert not check_quantize(src, wrong, attributes, np.dtype(np.int8)).passed
    real = POINTWISE["Dequantize"].compute(attributes, np.dtype(np.float32), good)
    assert check_dequantize(good, real, attributes).passed
    assert not check_dequantize(good, np.nextafter(real, np.float32(9)), attributes).passed
    relu = np.maximum(src, 0)
    assert not check_relu(src, np.where(relu == relu.max(), 0, relu).astype(np.float32)).passed
    assert not check_relu_gradient(src, relu, relu + np.float32(src < 0)).passed


def test_check_quantize_rejects_wrong_saturated_element_of_large_src():
    attributes = checked("Quantize", np.dtype(np.int8), scales=[1.0])
    src, dst = np.float32([2.0**30]), np.int8([126])
    assert not check_quantize(src, dst, attributes, dst.dtype).passed


def test_quantize_of_nan_raises_argument_error():
    with pytest.raises(ArgumentError, match="src: cannot be quantised; got NaN"):
        run(document("Quantize", quantisation(1.0), dst="s8", shape=(1,)), np.float32([np.nan]))
