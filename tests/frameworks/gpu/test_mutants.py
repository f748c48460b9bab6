"""Broken kernels: the batteries must reject each of them."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import triton
import triton.language as tl

from backnorm.conformance.battery import Case, cases, examine
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_forward
from backnorm.executable import forget
from backnorm.gpu.kernels import arithmetic as arithmetics
from backnorm.gpu.kernels import backward, formulas, forward, tiles
from backnorm.gpu.plan import plan_gpu
from backnorm.torch import gpu
from tests.support import internals
from tests.support.dtypes import FLOAT32
from tests.support.relu_battery import examine_relu, relu_case

from .. import interpreter
from . import arrays

pytestmark = pytest.mark.skipif(
    not interpreter.INTERPRETED, reason="what is compiled does not look for another function"
)

TYPES = "float32-float32"
ARITHMETICS = "float64", "float32"


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
def mean_folded(b_x, b_dy, coefficients):
    mean, shift, slope, gain = coefficients
    offset = (mean * slope - shift).to(tl.float32)
    return gain * (b_dy.to(tl.float32) - b_x.to(tl.float32) * slope.to(tl.float32) + offset)


@triton.jit
def one_column_short(b_tile, FORM: tl.constexpr):
    b_last = tl.arange(0, FORM.tile_columns)[None, :] == FORM.tile_columns - 1
    return tiles_collect(tl.where(b_last, 0.0, b_tile), FORM)


@triton.jit
def channel_of_the_next(i_unit, sizes, FORM: tl.constexpr):
    return (tiles_channels_of(i_unit, sizes, FORM) + 1) % sizes.channels


@triton.jit
def every_bit(b_bytes, FORM: tl.constexpr):
    return tl.full((FORM.tile_rows, FORM.tile_columns), 1, tl.int32) != 0


@triton.jit
def bits_turned(b_bytes, FORM: tl.constexpr):
    return ~tiles_bits_of(b_bytes, FORM)


@triton.jit
def bytes_of_the_first_tile(p_bits, i_tile, i_unit, sizes, FORM: tl.constexpr):
    return tiles_load_bytes(p_bits, i_tile * 0, i_unit, sizes, FORM)


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
def pivot_of_zero(p_x, span, sizes, FORM: tl.constexpr):
    b_pivot = forward_pivot(p_x, span, sizes, FORM)
    return (b_pivot * 0.0).to(tl.float64)


@triton.jit
def elements_of_whole_tiles(i_tile, i_unit, sizes, FORM: tl.constexpr):
    return tiles_elements_of(i_tile, i_unit, sizes, FORM) * 0 + FORM.tile_rows


@triton.jit
def nothing_beside(b_mean):
    return b_mean * 0.0


@triton.jit
def turned(b_mean):
    return -formulas_beside(b_mean)


@triton.jit
def lost(b_sum, b_low, b_term):
    return b_sum + b_term, b_low


@triton.jit
def left_out(b_high, b_low, HOW: tl.constexpr):
    return b_high.to(tl.float64)


tiles_collect, tiles_channels_of = tiles.collect, tiles.channels_of
tiles_bits_of, tiles_load_bytes = tiles.bits_of, tiles.load_bytes
tiles_elements_of, tiles_per_column = tiles.elements_of, tiles.per_column
arithmetic_widen, arithmetic_zeros = arithmetics.widen, arithmetics.zeros
forward_pivot, formulas_beside = forward._pivot, formulas._beside

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
    ("_mean", no_rest),
    ("elements_of", elements_of_whole_tiles),
]
OF_RELU = [
    (backward, "bits_of", every_bit),
    (backward, "bits_of", bits_turned),
    (forward, "relu", keeps_what_is_negative),
    (forward, "relu", without_a_ceiling),
    (forward, "passed", passed_at_the_ceiling),
]


# Of float32 arithmetic: what is left of the mean.
OF_THE_MEAN = [nothing_beside, turned]
# And of its sums: the rounding errors.
OF_SUMS = [("add_compensated", lost), ("join", left_out)]


def name_of(value):
    return getattr(getattr(value, "fn", None), "__name__", None)


def few(battery):
    """Return cases of every arithmetic that are enough."""
    return {
        arithmetic: [
            case
            for case in battery(arithmetic=arithmetic)
            if TYPES in case.name and "many" not in case.name
        ]
        for arithmetic in ARITHMETICS
    }


CASES, RELU_CASES = few(cases), few(arrays.relu_cases)


def rejected(verdicts):
    """Whether one has not passed."""
    return any(not verdict.passed for verdict in verdicts.values())


def backward_verdicts(case):
    return examine(partial(arrays.backward, arithmetic=case.arithmetic), case)


def forward_verdicts(case):
    data, options = case.data, {**case.data.options, "arithmetic": case.arithmetic}
    operands = data.x, data.gamma, data.beta
    return check_forward(*operands, arrays.forward(*operands, **options), **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(("name", "broken"), BACKWARD, ids=name_of)
def test_broken_backward_kernel_is_rejected(name, broken, arithmetic, monkeypatch):
    monkeypatch.setattr(backward, name, broken)
    assert any(rejected(backward_verdicts(case)) for case in CASES[arithmetic])


@pytest.mark.covering(1)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(("name", "broken"), FORWARD, ids=name_of)
def test_broken_forward_kernel_is_rejected(name, broken, arithmetic, monkeypatch):
    monkeypatch.setattr(forward, name, broken)
    assert any(rejected(forward_verdicts(case)) for case in CASES[arithmetic])


def test_variance_with_pivot_of_zero_is_rejected(monkeypatch):
    # With a mean far from zero, sums of squares would be differences of large numbers.
    monkeypatch.setattr(forward, "_pivot", pivot_of_zero)
    case = next(case for case in cases() if "mean-over-deviation-1e+06" in case.name)
    assert not forward_verdicts(case)["variance"].passed


def worst(data):
    """Return the largest error of y in float32, in the magnitudes of its terms about the mean."""
    y, *_ = arrays.forward(data.x, data.gamma, data.beta, **data.options, arithmetic="float32")
    x, axes = data.x.astype(np.float64), (0, *range(2, data.x.ndim))
    gamma, beta = (each[:, None, None].astype(np.float64) for each in (data.gamma, data.beta))
    centred = x - x.mean(axes, keepdims=True)
    scaled = gamma * centred / np.sqrt(centred.var(axes, keepdims=True) + data.epsilon)
    return (np.abs(y - (scaled + beta)) / (np.abs(scaled) + np.abs(beta))).max()


# The judge allows for the magnitude of the mean itself.
def test_forward_without_low_part_of_mean_loses_accuracy(monkeypatch):
    rng = np.random.default_rng(4)
    data = realistic_data((6, 5, 3, 4), FLOAT32, data_format="NCX", rng=rng, ratio=1e4)
    assert worst(data) <= 2.0**-20
    for broken in OF_THE_MEAN:
        with monkeypatch.context() as patch:
            patch.setattr(formulas, "_beside", broken)
            assert worst(data) > 2.0**-20, broken.fn.__name__


@pytest.fixture
def in_128_tiles(monkeypatch):
    """Let a program add up 128 tiles of what `long_data` returns."""

    def plan(problem, extents):
        made = plan_gpu(problem, extents)
        rows = made.tiling.rows // 128
        tiling = dataclasses.replace(made.tiling, tile_rows=rows, tiles=128, per_block=128)
        return dataclasses.replace(made, tiling=tiling)

    internals.complete_up_to(monkeypatch, 1 << 20)
    monkeypatch.setattr(gpu, "plan_gpu", plan)
    forget()
    yield
    forget()


def long_data(rows=8192):
    rng = np.random.default_rng(4)
    return realistic_data((rows, 32), FLOAT32, data_format="NXC", rng=rng)


@triton.jit
def widened_to_float32(b_value, HOW: tl.constexpr):
    return arithmetic_widen(b_value, "float32")


@triton.jit
def zeros_of_float32(FORM: tl.constexpr, HOW: tl.constexpr):
    return arithmetic_zeros(FORM, "float32")


@triton.jit
def per_column_in_float32(b_value, FORM: tl.constexpr):
    return tiles_per_column(b_value, FORM).to(tl.float32)


@pytest.mark.long
def test_variance_with_moments_in_float32_is_rejected(in_128_tiles, monkeypatch):
    data = long_data()
    # The first tile, whose mean is the pivot. What float32 does to one of the others, it does to
    # all.
    data.x[:64] += 1000.0
    data.x[64:] = 0.1
    case = Case("", data, arithmetic="float32")
    assert not rejected(forward_verdicts(case))
    monkeypatch.setattr(forward, "widen", widened_to_float32)
    monkeypatch.setattr(forward, "zeros", zeros_of_float32)
    monkeypatch.setattr(forward, "per_column", per_column_in_float32)
    assert not forward_verdicts(case)["variance"].passed


@pytest.fixture
def long_sums(in_128_tiles):
    """Return a case in float32 whose sums lose half of the last bits, unless they are kept."""
    data = long_data()
    data.dy[:] = 1.0 + 2.0**-19
    return Case("", data, arithmetic="float32")


def test_backward_of_long_sums_in_float32_passes_battery(long_sums):
    assert not rejected(backward_verdicts(long_sums))


@pytest.mark.covering(0)
@pytest.mark.parametrize(("name", "broken"), OF_SUMS, ids=name_of)
def test_dbeta_without_rounding_errors_of_long_sums_is_rejected(
    name, broken, long_sums, monkeypatch
):
    monkeypatch.setattr(backward, name, broken)
    assert not backward_verdicts(long_sums)["dbeta"].passed


@pytest.mark.covering(1)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(("module", "name", "broken"), OF_RELU, ids=name_of)
def test_broken_relu_kernel_is_rejected(module, name, broken, arithmetic, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    operators = arrays.WithRelu(arithmetic)
    # Those with a ceiling first: they reject the most kernels.
    ordered = sorted(RELU_CASES[arithmetic], key=lambda case: "ceiling" not in case.name)
    assert any(rejected(examine_relu(operators, case)) for case in ordered)


@pytest.mark.covering(0)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_relu_mask_of_the_first_tile_is_rejected(arithmetic, monkeypatch):
    # A unit of the battery's cases is one tile in float64.
    case = relu_case("", long_data(1024), np.random.default_rng(5))
    case = dataclasses.replace(case, arithmetic=arithmetic)
    operators = arrays.WithRelu(arithmetic)
    assert not rejected(examine_relu(operators, case))
    monkeypatch.setattr(backward, "load_bytes", bytes_of_the_first_tile)
    assert rejected(examine_relu(operators, case))
