"""Plans, with made-up machines and no kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.problem import Problem
from backnorm_kernels.geometry import Columns, Segments
from backnorm_kernels.plan import plan

_MACHINE = Machine(threads=8, cache_per_core=1 << 20, cache_shared=32 << 20, name="made up")


def _problem(extents, **changes):
    shape = (extents.outer, extents.channels, extents.inner)
    problem = Problem("backward", shape, (1,), *[np.dtype(np.float32)] * 2, arithmetic="float64")
    return dataclasses.replace(problem, **changes)


def _plan(outer, channels, inner, machine=_MACHINE, **changes):
    extents = Extents(outer, channels, inner)
    return plan(_problem(extents, **changes), extents, machine)


extents = st.builds(
    Extents,
    st.integers(0, 70000),
    st.integers(0, 3000),
    st.one_of(st.integers(0, 70), st.integers(1, 300000)),
)


@given(extents)
def test_geometry_chunks_cover_all_elements(extents):
    geometry = plan(_problem(extents), extents, _MACHINE).geometry
    outer, channels, inner = extents
    if isinstance(geometry, Segments):
        pieces = -(-inner // geometry.length)
        assert geometry.rows == 1 or pieces <= 1
        assert geometry.chunks == -(-outer // geometry.rows) * pieces
        # Sixteen running sums take at most 130 elements each.
        assert geometry.rows * (-(-geometry.length // 16)) <= 130
        assert geometry.block * geometry.blocks >= geometry.chunks
        # A vector across a border belongs to two channels, not three.
        assert inner >= 8 or channels == 1
        assert geometry.group >= 1
    else:
        assert geometry.rows * geometry.width + geometry.rest == outer * channels * inner
        assert geometry.rest < max(1, geometry.width)
        assert geometry.width >= 16 or geometry.rows * geometry.width == 0
        assert geometry.block * geometry.blocks >= geometry.rows
        assert geometry.share >= 1


@given(extents, st.integers(1, 128), st.sampled_from([1 << 18, 1 << 20]), st.integers(20, 28))
def test_geometry_that_decides_bits_does_not_depend_on_the_machine(
    extents, threads, private, shared
):
    other = Machine(threads, private, 1 << shared, "another")
    problem = _problem(extents)
    one = plan(problem, extents, _MACHINE).geometry
    two = plan(problem, extents, other).geometry
    assert type(one) is type(two)
    # The fields that only speed depends on.
    free = (
        {"group", "batch", "share"}
        if isinstance(one, Segments)
        else {"tile", "depth", "share", "abreast"}
    )
    fixed = {field.name for field in dataclasses.fields(one)} - free
    assert [getattr(one, name) for name in fixed] == [getattr(two, name) for name in fixed]


@given(extents)
def test_geometry_limits_memory_of_partial_sums(extents):
    geometry = plan(_problem(extents), extents, _MACHINE).geometry
    width = extents.channels if isinstance(geometry, Segments) else geometry.width
    assert geometry.blocks * 4 * width * 8 <= max(1 << 20, 2 * 4 * width * 8)


def test_geometry_is_segments_or_columns_by_run_length():
    assert isinstance(_plan(50, 64, 112 * 112).geometry, Segments)
    assert isinstance(_plan(50, 512, 49).geometry, Segments)
    assert isinstance(_plan(50, 512, 9).geometry, Columns)
    assert isinstance(_plan(50 * 49, 512, 1).geometry, Columns)
    assert isinstance(_plan(1, 1, 5).geometry, Segments)


def test_geometry_joins_rows_shorter_than_two_vectors():
    geometry = _plan(1000, 3, 1).geometry
    assert (geometry.repeats, geometry.width, geometry.rows, geometry.rest) == (6, 18, 166, 12)


def test_plan_is_grouped_only_if_channel_group_fits_cache():
    assert _plan(50, 64, 112 * 112, machine=dataclasses.replace(_MACHINE, threads=2)).grouped
    small_cache = Machine(2, 1 << 18, 1 << 21, "small")
    assert not _plan(50, 64, 112 * 112, machine=small_cache).grouped


def test_plan_with_too_few_channel_groups_for_threads_is_not_grouped():
    assert not _plan(8, 3, 8192).grouped
    assert _plan(8, 3, 8192, machine=dataclasses.replace(_MACHINE, threads=1)).grouped


def test_plan_with_exchanged_sums_takes_two_passes():
    assert _plan(50, 64, 3136, training=False).grouped
    extents = Extents(50, 64, 3136)
    assert plan(_problem(extents), extents, _MACHINE).grouped
    assert not plan(_problem(extents, operation="reduce"), extents, _MACHINE).grouped


@pytest.mark.parametrize(("columns", "many"), [(1024, 4), (2048, 4), (128, 1)])
def test_geometry_for_small_core_cache_writes_only_short_rows_abreast(columns, many):
    small = dataclasses.replace(_MACHINE, cache_per_core=1 << 19)
    rows = (64 << 20) // columns
    one, other = (_plan(rows, columns, 1, machine=each).geometry for each in (small, _MACHINE))
    assert (one.abreast, other.abreast) == (1, many)
    assert one.depth == (1 if columns == 128 else 4)
    # But short ones, which lie beside one another.
    assert _plan(1 << 20, 64, 1, machine=small).geometry.abreast == 4


def test_plan_of_small_problem_uses_one_thread():
    assert _plan(8, 16, 64).threads == 1
    assert _plan(50, 64, 3136).threads == 8


@pytest.mark.parametrize("extents", [(32, 64, 196), (6272, 64, 1), (256, 1000, 1)])
def test_geometry_share_for_one_thread_fits_core_cache(extents):
    extents = Extents(*extents)
    machine = dataclasses.replace(_MACHINE, threads=1)
    geometry = plan(_problem(extents, operation="apply"), extents, machine).geometry
    width = geometry.width if isinstance(geometry, Columns) else 1
    # Items are taken from the last one on, of x and dy each.
    assert 2 * 4 * geometry.share * width <= machine.cache_per_core


def test_plan_streams_only_outputs_larger_than_cache():
    assert _plan(50, 64, 112 * 112).streaming
    assert not _plan(50, 512, 49).streaming


@pytest.mark.parametrize("inner", [1, 49, 12544])
def test_plan_text_contains_problem_extents_and_reasons(inner):
    text = str(_plan(50, 64, inner))
    assert "backward float32 50x64x" in text
    assert "because" in text
    assert f"inner {inner}" in text
