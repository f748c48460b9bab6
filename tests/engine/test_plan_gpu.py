"""What a GPU's plan decides, on devices that are made up."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backnorm.activations import RELU
from backnorm.gpu.device import KNOWN
from backnorm.gpu.plan import candidates, plan_gpu
from backnorm.layout import extents_of
from backnorm.problem import Metadata, problem_of
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64, is_16_bit

H200, L40S = KNOWN["h200"], KNOWN["l40s"]


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


def planned(made, gpu=H200, knobs=None):
    order = tuple(range(len(made.shape)))
    return plan_gpu(made, extents_of(made.shape, made.channel_axes, order), gpu, knobs)


def test_plan_gpu_chooses_arithmetic_by_float64_speed_of_device():
    assert planned(problem((8, 4, 9))).arithmetic == "float64"
    assert planned(problem((8, 4, 9)), L40S).arithmetic == "pairs"
    for gpu in (H200, L40S):
        assert planned(problem((8, 4, 9), dtype=FLOAT64), gpu).arithmetic == "compensated"
    text = str(planned(problem((8, 4, 9)), L40S))
    assert "pairs of float32: NVIDIA L40S is slow at float64" in text


class TestFloat32Arithmetic:
    def test_plan_gpu_uses_float32_when_requested(self):
        for gpu in KNOWN.values():
            plan = planned(problem((8, 4, 9), arithmetic="float32"), gpu)
            assert plan.arithmetic == "float32"
            assert plan.reasons[0] == "float32: requested"
            assert "  arithmetic float32\n" in str(plan)

    @pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
    def test_plan_gpu_of_16_bit_elements_uses_float32_by_default(self, dtype):
        for gpu in KNOWN.values():
            plan = planned(problem((8, 4, 9), dtype=dtype), gpu)
            assert plan.arithmetic == "float32"
            assert plan.reasons[0] == "float32: suffices for 16-bit elements"
            assert plan == planned(problem((8, 4, 9), dtype=dtype, arithmetic="float32"), gpu)
        for gpu, expected in ((H200, "float64"), (L40S, "pairs")):
            plan = planned(problem((8, 4, 9), dtype=dtype, arithmetic="float64"), gpu)
            assert plan.arithmetic == plan.moments == expected

    @pytest.mark.parametrize(
        ("gpu", "moments", "reason"),
        [
            (H200, "float64", "float64: NVIDIA H200 computes it at memory speed"),
            (L40S, "pairs", "pairs of float32: NVIDIA L40S is slow at float64"),
        ],
        ids=["h200", "l40s"],
    )
    def test_plan_gpu_in_float32_computes_moments_in_wider_arithmetic(self, gpu, moments, reason):
        plan = planned(problem((8, 4, 9), operation="forward", arithmetic="float32"), gpu)
        assert (plan.arithmetic, plan.moments) == ("float32", moments)
        assert plan.reasons[1] == f"mean and variance in {reason}"
        assert f"  arithmetic float32, mean and variance {moments}\n" in str(plan)

    def test_plan_gpu_in_float32_keeps_tiling_and_schedule(self):
        for operation in ("forward", "backward"):
            made = problem((256, 64, 56, 56), operation=operation)
            plan = planned(made)
            other = planned(dataclasses.replace(made, arithmetic="float32"))
            assert (other.tiling, other.schedule) == (plan.tiling, plan.schedule)
            assert other.reasons[-1] == plan.reasons[-1]


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("shape", [(8, 16, 8, 8), (256, 64, 56, 56), (32, 512, 7, 7)], ids=str)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_plan_parts_that_decide_bits_are_equal_on_every_device(shape, data_format, gpu):
    made = problem(shape, data_format)
    assert planned(made, gpu).tiling == planned(made).tiling
    assert planned(made, gpu).schedule == planned(made).schedule


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


def test_plan_gpu_with_complete_schedule_of_joined_rows_raises_value_error():
    # Rows are joined to be wide and aligned.
    made = problem((256, 7, 7, 3), "NXC")
    whole = next(
        knobs
        for knobs in candidates(
            problem((8, 16, 8, 8)), extents_of((8, 16, 8, 8), (1,), (0, 1, 2, 3))
        )
        if knobs.schedule == "complete"
    )
    with pytest.raises(ValueError, match="no program can hold a channel"):
        planned(made, knobs=whole)


SIZES = st.lists(st.integers(0, 40), min_size=2, max_size=4)


@settings(max_examples=300)
@given(
    shape=SIZES,
    scale=st.sampled_from([1, 1, 7, 64]),
    data_format=st.sampled_from(["NCX", "NXC"]),
    dtype=st.sampled_from(ELEMENT_TYPES),
    operation=st.sampled_from(["backward", "forward"]),
    relu=st.booleans(),
    choice=st.integers(0, 200),
)
def test_plan_gpu_tiles_cover_all_elements(
    shape, scale, data_format, dtype, operation, relu, choice
):
    shape[-1] *= scale
    made = problem(tuple(shape), data_format, dtype, operation=operation, relu=relu)
    order = tuple(range(len(shape)))
    extents = extents_of(made.shape, made.channel_axes, order)
    options = [None, *candidates(made, extents)]
    plan = planned(made, knobs=options[choice % len(options)])
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
