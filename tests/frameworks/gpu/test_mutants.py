"""Broken kernels: the batteries must reject each of them."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from backnorm.conformance.battery import cases, examine
from backnorm.conformance.judge import check_forward
from backnorm.conformance.relu_battery import examine_relu, relu_cases
from backnorm.gpu.device import KNOWN
from backnorm.gpu.kernels import backward, forward, tiles

from .. import interpreter
from . import arrays

pytestmark = pytest.mark.skipif(
    not interpreter.INTERPRETED, reason="what is compiled does not look for another function"
)

TYPES = "float32-float32"


@triton.jit
def no_shift(b_sum_dy, b_sum_dy_xmu, b_scale, count):
    return b_sum_dy * 0.0, b_scale * (b_scale * b_sum_dy_xmu / count)


@triton.jit
def no_slope(b_sum_dy, b_sum_dy_xmu, b_scale, count):
    return b_sum_dy / count, b_sum_dy_xmu * 0.0


@triton.jit
def slope_of_one_scale(b_sum_dy, b_sum_dy_xmu, b_scale, count):
    return b_sum_dy / count, b_scale * b_sum_dy_xmu / count


@triton.jit
def count_less_one(b_sum_dy, b_sum_dy_xmu, b_scale, count):
    return b_sum_dy / (count - 1.0), b_scale * (b_scale * b_sum_dy_xmu / (count - 1.0))


@triton.jit
def epsilon_outside(b_variance, EPSILON: tl.constexpr):
    return 1.0 / (tl.sqrt(b_variance) + tl.full((), EPSILON, tl.float64))


@triton.jit
def no_epsilon(b_variance, EPSILON: tl.constexpr):
    return 1.0 / tl.sqrt(b_variance)


@triton.jit
def mean_folded(b_x, b_dy, mean, shift, slope, gain, FORM: tl.constexpr):
    offset = (mean[0] * slope[0] - shift[0]).to(tl.float32)
    return gain[0] * (b_dy.to(tl.float32) - b_x.to(tl.float32) * slope[0].to(tl.float32) + offset)


@triton.jit
def one_column_short(b_tile, FORM: tl.constexpr):
    b_last = tl.arange(0, FORM.tile_columns)[None, :] == FORM.tile_columns - 1
    return tiles_collect(tl.where(b_last, 0.0, b_tile), FORM)


@triton.jit
def channel_of_the_next(i_unit, frame, FORM: tl.constexpr):
    return (tiles_channels_of(i_unit, frame, FORM) + 1) % frame.channels


@triton.jit
def every_bit(p_bits, i_tile, i_unit, frame, FORM: tl.constexpr):
    return tl.full((FORM.tile_rows, FORM.tile_columns), 1, tl.int32) != 0


@triton.jit
def bits_turned(p_bits, i_tile, i_unit, frame, FORM: tl.constexpr):
    return ~tiles_load_bits(p_bits, i_tile, i_unit, frame, FORM)


@triton.jit
def keeps_what_is_negative(b_y, FORM: tl.constexpr):
    return b_y


@triton.jit
def without_a_ceiling(b_y, FORM: tl.constexpr):
    return tl.where(b_y <= 0.0, tl.zeros_like(b_y), b_y)


@triton.jit
def passed_at_the_ceiling(b_y, FORM: tl.constexpr):
    return b_y.to(tl.float32) > 0.0


@triton.jit
def no_rest(b_pivot, b_offset):
    return b_pivot + b_offset * 0.5, b_offset * 0.0


@triton.jit
def pivot_of_zero(p_x, i_unit, i_tile, frame, FORM: tl.constexpr):
    b_pivot = forward_pivot(p_x, i_unit, i_tile, frame, FORM)
    return (b_pivot * 0.0).to(tl.float64)


@triton.jit
def elements_of_whole_tiles(i_tile, i_unit, frame, FORM: tl.constexpr):
    return tiles_elements_of(i_tile, i_unit, frame, FORM) * 0 + FORM.tile_rows


tiles_collect, tiles_channels_of = tiles.collect, tiles.channels_of
tiles_load_bits, tiles_elements_of = tiles.load_bits, tiles.elements_of
forward_pivot = forward._pivot

BACKWARD = [
    ("solve_backward", no_shift),
    ("solve_backward", no_slope),
    ("solve_backward", slope_of_one_scale),
    ("solve_backward", count_less_one),
    ("inverse_deviation", epsilon_outside),
    ("inverse_deviation", no_epsilon),
    ("derivative", mean_folded),
    ("collect", one_column_short),
    ("channels_of", channel_of_the_next),
]
FORWARD = [
    ("inverse_deviation", epsilon_outside),
    ("collect", one_column_short),
    ("channels_of", channel_of_the_next),
    ("_two_sum", no_rest),
    ("elements_of", elements_of_whole_tiles),
]
OF_RELU = [
    (backward, "load_bits", every_bit),
    (backward, "load_bits", bits_turned),
    (forward, "relu", keeps_what_is_negative),
    (forward, "relu", without_a_ceiling),
    (forward, "passed", passed_at_the_ceiling),
]


@pytest.fixture(autouse=True)
def h200():
    with interpreter.standing_in_for(KNOWN["h200"]):
        yield


def name_of(value):
    return getattr(getattr(value, "fn", None), "__name__", None)


def few(battery):
    return [case for case in battery if TYPES in case.name and "many" not in case.name]


CASES, RELU_CASES = few(cases()), few([*relu_cases(), *relu_cases(ceiling=1.0)])


@pytest.mark.parametrize(("name", "broken"), BACKWARD, ids=name_of)
def test_backward(name, broken, monkeypatch):
    monkeypatch.setattr(backward, name, broken)
    assert any(
        not verdict.passed for case in CASES for verdict in examine(arrays.backward, case).values()
    )


@pytest.mark.parametrize(("name", "broken"), FORWARD, ids=name_of)
def test_forward(name, broken, monkeypatch):
    monkeypatch.setattr(forward, name, broken)

    def verdicts(data):
        given = data.x, data.gamma, data.beta
        result = arrays.forward(*given, **data.options)
        return check_forward(*given, result, **data.options).values()

    assert any(not verdict.passed for case in CASES for verdict in verdicts(case.data))


def test_a_pivot_of_zero_loses_digits(monkeypatch):
    # With a mean far from zero, sums of squares would be differences of large numbers.
    monkeypatch.setattr(forward, "_pivot", pivot_of_zero)
    data = next(case.data for case in cases() if "mean-over-deviation-1e+06" in case.name)
    given = data.x, data.gamma, data.beta
    result = arrays.forward(*given, **data.options)
    assert not check_forward(*given, result, **data.options)["variance"].passed


@pytest.mark.parametrize(("module", "name", "broken"), OF_RELU, ids=name_of)
def test_relu(module, name, broken, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    assert any(
        not verdict.passed
        for case in RELU_CASES
        for verdict in examine_relu(arrays.WithRelu, case).values()
    )
