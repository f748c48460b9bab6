"""Decisions of a GPU's plan."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backnorm.activations import RELU
from backnorm.gpu.plan import plan_gpu
from backnorm.layout import extents_of
from backnorm.problem import Metadata, problem_of
from tests.support import internals
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64, is_16_bit


def problem(
    shape,
    data_format="NCX",
    dtype=FLOAT32,
    *,
    operation="backward",
    relu=False,
    arithmetic=None,
):
    axis = 1 if data_format == "NCX" else -1
    statistics = FLOAT32 if is_16_bit(dtype) else dtype
    x, channel = Metadata(shape, dtype), Metadata((shape[axis],), statistics)
    options = {"epsilon": 1e-5, "data_format": data_format, "arithmetic": arithmetic}
    made = (
        problem_of("backward", x, x, None, channel, channel, channel, **options)
        if operation == "backward"
        else problem_of("forward", x, None, channel, channel, None, None, **options)
    )
    return dataclasses.replace(made, activation=RELU if relu else None, residual=relu)


def planned(made):
    order = tuple(range(len(made.shape)))
    return plan_gpu(made, extents_of(made.shape, made.channel_axes, order))


@pytest.mark.parametrize(
    ("dtype", "requested", "arithmetic", "reason"),
    [
        (FLOAT32, None, "float64", "wider than the elements"),
        (FLOAT32, "float32", "float32", "requested"),
        (FLOAT16, None, "float32", "suffices for 16-bit elements"),
        (BFLOAT16, None, "float32", "suffices for 16-bit elements"),
        (BFLOAT16, "float64", "float64", "wider than the elements"),
        (FLOAT64, None, "compensated", "no type is wider than float64"),
    ],
    ids=str,
)
def test_plan_gpu_chooses_arithmetic_by_element_type_and_request(
    dtype, requested, arithmetic, reason
):
    plan = planned(problem((8, 4, 9), dtype=dtype, arithmetic=requested))
    assert plan.arithmetic == arithmetic
    assert plan.reasons[0] == f"{arithmetic}: {reason}"
    assert f"  arithmetic {arithmetic}\n" in str(plan)


def test_plan_gpu_of_forward_pass_in_float32_computes_moments_in_float64():
    plan = planned(problem((8, 4, 9), operation="forward", arithmetic="float32"))
    assert "  arithmetic float32, mean and variance float64\n" in str(plan)


def test_plan_gpu_in_float32_keeps_tiling_and_schedule():
    for operation in ("forward", "backward"):
        made = problem((256, 64, 56, 56), operation=operation)
        plan = planned(made)
        other = planned(dataclasses.replace(made, arithmetic="float32"))
        assert (other.tiling, other.schedule) == (plan.tiling, plan.schedule)
        assert other.reasons[-1] == plan.reasons[-1]


@pytest.mark.parametrize(
    ("shape", "data_format", "schedule", "columns"),
    [
        # Small: one launch.
        ((8, 16, 8, 8), "NCX", "complete", False),
        ((32, 7, 7, 512), "NXC", "complete", True),
        # Large: the sums of a channel come from many programs.
        ((256, 256, 56, 56), "NCX", "two passes", False),
        ((256, 56, 56, 256), "NXC", "two passes", True),
        # Short runs: rows that hold all channels are read faster.
        ((256, 1024, 14, 14), "NCX", "two passes", True),
        ((64, 1024, 14, 14), "NCX", "complete", False),
        # Runs of 49 and 1225 elements are not aligned, rows of 2048 * 49 and 128 * 1225 are.
        ((256, 2048, 7, 7), "NCX", "two passes", True),
        ((64, 2048, 7, 7), "NCX", "complete", False),
        ((256, 128, 35, 35), "NCX", "two passes", True),
    ],
)
def test_plan_gpu_chooses_schedule_and_columns_by_shape(shape, data_format, schedule, columns):
    plan = planned(problem(shape, data_format))
    assert plan.schedule == schedule
    assert plan.tiling.columns is columns


def test_plan_gpu_of_large_problem_has_three_programs_per_multiprocessor():
    # An H200 has 132 multiprocessors.
    for shape, data_format in [((256, 64, 112, 112), "NCX"), ((256, 7, 7, 2048), "NXC")]:
        tiling = planned(problem(shape, data_format)).tiling
        assert tiling.units * tiling.blocks >= 3 * 132


def test_plan_gpu_with_relu_divides_mask_at_whole_bytes():
    for shape in [(3, 5, 7, 3), (2, 3, 35, 35), (1, 1, 9), (1, 7)]:
        for data_format in ("NCX", "NXC"):
            made = problem(shape, data_format, operation="forward", relu=True)
            tiling = planned(made).tiling
            assert tiling.width % 8 == 0 or tiling.units * tiling.rows == 1
            assert tiling.tile_columns % 8 == 0


def test_plan_gpu_of_joined_rows_takes_two_passes(monkeypatch):
    # Rows are joined to be wide and aligned, so no program can hold a channel.
    internals.complete_up_to(monkeypatch, 1 << 40)
    assert planned(problem((256, 7, 7, 3), "NXC")).schedule == "two passes"
    assert planned(problem((256, 7, 7, 512), "NXC")).schedule == "complete"


@pytest.mark.parametrize(
    ("shape", "data_format", "stages"),
    [
        ((256, 256, 56, 56), "NCX", None),
        ((8, 16, 8, 8), "NCX", 1),
        ((512, 16, 8, 8), "NCX", 3),
        ((64, 2048, 7, 7), "NCX", 1),
        ((32, 7, 7, 512), "NXC", 3),
    ],
)
def test_plan_gpu_of_two_passes_leaves_stages_to_the_autotuner(shape, data_format, stages):
    plan = planned(problem(shape, data_format))
    assert plan.tiling.stages == stages
    assert (f"{stages} stages" if stages else "stages tuned") in str(plan)


SIZES = st.lists(st.integers(0, 40), min_size=2, max_size=4)


@settings(max_examples=300)
@given(
    shape=SIZES,
    scale=st.sampled_from([1, 1, 7, 64]),
    data_format=st.sampled_from(["NCX", "NXC"]),
    dtype=st.sampled_from(ELEMENT_TYPES),
    operation=st.sampled_from(["backward", "forward"]),
    relu=st.booleans(),
    complete_up_to=st.sampled_from([-1, 32768, 1 << 40]),
)
def test_plan_gpu_tiles_cover_all_elements(
    shape, scale, data_format, dtype, operation, relu, complete_up_to
):
    shape[-1] *= scale
    made = problem(tuple(shape), data_format, dtype, operation=operation, relu=relu)
    order = tuple(range(len(shape)))
    extents = extents_of(made.shape, made.channel_axes, order)
    with pytest.MonkeyPatch.context() as patch:
        internals.complete_up_to(patch, complete_up_to)
        plan = plan_gpu(made, extents)
    tiling = plan.tiling
    for power in (tiling.tile_rows, tiling.tile_columns, tiling.warps, tiling.align):
        assert power & (power - 1) == 0
    assert tiling.blocks * tiling.per_block >= tiling.tiles
    assert (tiling.blocks - 1) * tiling.per_block < max(1, tiling.tiles)
    assert tiling.tile_rows * tiling.tile_columns <= 1 << 17
    # A row after the other, and in a row a tile after the other.
    across = tiling.tile_columns * (tiling.units if tiling.columns else tiling.pieces)
    down = tiling.tile_rows * -(-tiling.tiles // tiling.pieces)
    assert across >= tiling.width
    assert down >= tiling.rows
    elements = tiling.rows * tiling.width * (1 if tiling.columns else tiling.units)
    assert elements == made.size or (tiling.partial and 0 < elements - made.size < tiling.width)
    assert tiling.width % tiling.align == made.size % tiling.align == 0
    if plan.schedule == "complete":
        assert tiling.blocks == (1 if made.size else tiling.blocks)
        assert not tiling.columns or extents.inner == tiling.repeats == 1
    if relu and operation == "forward" and made.size and tiling.units * tiling.rows > 1:
        assert tiling.width % 8 == 0


def test_plan_gpu_of_bfloat16_allows_16_byte_accesses():
    tiling = planned(problem((256, 56, 56, 256), "NXC", BFLOAT16)).tiling
    assert tiling.align * 2 >= 16
    assert tiling.tile_rows * tiling.tile_columns % (tiling.warps * 32 * 8) == 0
