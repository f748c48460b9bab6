"""Memory beyond inputs and outputs: the size of records, and the peak of calls."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backnorm
from backnorm.conformance.data import realistic_data
from backnorm.executable import CALLS, forget
from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.problem import Problem
from backnorm.signature import SIGNATURES
from backnorm_kernels import stage
from backnorm_kernels.geometry import Columns
from backnorm_kernels.launch import Launch
from backnorm_kernels.plan import plan
from tests.support import internals
from tests.support.dtypes import ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64

MB, COLUMN, THREAD = 10**6, 64, 1 << 17
#: Reproducible sums: bytes more of a column, digits instead of pairs; and of a thread, for terms.
BINS, TERMS = 256, 6144

#: Columns and threads up to which there is a megabyte and 64 bytes a column and thread.
FEW_COLUMNS, FEW_THREADS = 20000, 4


def columns_of(decided):
    """Return the columns of a plan's tables: channels, or places of rows that hold several."""
    geometry, extents = decided.geometry, decided.extents
    of_rows = geometry.width if isinstance(geometry, Columns) else 0
    return max(extents.channels, of_rows)


def bound(columns, threads):
    """Return the bytes that a call may take."""
    if columns <= FEW_COLUMNS and threads <= FEW_THREADS:
        return MB + COLUMN * columns * threads
    return MB + COLUMN * columns * (threads + 1) + THREAD * threads


def bytes_of(kernel):
    """Return the bytes of a stage's record."""
    head = stage.head_of(kernel.template, kernel.kind.geometry)
    return int(head["bytes"][0])


extents = st.builds(
    Extents,
    st.one_of(st.integers(1, 70), st.integers(1, 200000)),
    st.one_of(st.integers(1, 4096), st.integers(1, 200000)),
    st.one_of(st.just(1), st.integers(1, 70), st.integers(1, 300000)),
)
machines = st.builds(
    Machine,
    threads=st.one_of(st.integers(1, 4), st.integers(1, 128)),
    cache_per_core=st.sampled_from([1 << 18, 1 << 21]),
    cache_shared=st.sampled_from([1 << 20, 1 << 25, 1 << 29]),
    name=st.just("made up"),
)


@given(
    extents,
    machines,
    st.sampled_from(ELEMENT_TYPES),
    st.sampled_from(
        [(name, False) for name in ("backward", "forward", "inference", "reduce", "apply")]
        + [(name, True) for name, each in SIGNATURES.items() if "reproducible" in each.options]
    ),
    st.sampled_from(["float32", "float64"]),
    st.booleans(),
    st.booleans(),
)
def test_record_size_of_kernel_does_not_exceed_bound(
    extents, machine, dtype, operation, arithmetic, grouped, training
):
    operation, reproducible = operation
    statistics = dtype if dtype in (FLOAT32, FLOAT64) else FLOAT32
    problem = Problem(
        operation,
        tuple(extents),
        (1,),
        dtype,
        statistics,
        arithmetic="float64" if dtype == FLOAT64 else arithmetic,
        training=training,
        reproducible=reproducible,
    )
    decided = plan(problem, extents, machine)
    # Grouped or not: both are legal, whatever is chosen.
    if not isinstance(decided.geometry, Columns) and operation.startswith(("backward", "forward")):
        decided = dataclasses.replace(decided, grouped=grouped)
    launch = Launch(problem, decided, 0)
    for kernel in (launch.whole, launch.sum, launch.sum_and_solve, launch.write):
        most = bound(columns_of(decided), kernel.participants)
        if reproducible:
            most += BINS * columns_of(decided) + TERMS * kernel.participants
        assert bytes_of(kernel) <= most, (decided, kernel.participants)


def test_apply_with_other_count_reuses_record_and_restores_its_count(rng):
    data = realistic_data((4, 3, 5), FLOAT32, rng=rng)
    inputs, options = data.backward_inputs, data.options
    sums = backnorm.reduce(*inputs[:3], data_format=data.data_format)
    forget()
    other = backnorm.ChannelSums(sums.sum_dy, sums.sum_dy_xmu, 2 * sums.count)
    backnorm.apply(*inputs, other, **options)
    (cached,) = CALLS.values()
    (record,) = cached.stage._spare
    assert record.view[stage.SLOTS["count"]] == sums.count == 20
    part, whole = (backnorm.apply(*inputs, each, **options) for each in (sums, other))
    assert cached.stage._spare == [record]
    assert not np.array_equal(part, whole)
    np.testing.assert_array_equal(part, backnorm.batch_norm_backward(*inputs, **options).dx)


CASES = {
    "grouped segments": ("NCX", (6, 40, 300)),
    "segments in two passes": ("NCX", (2, 3, 5000)),
    "short planes as columns": ("NCX", (60, 300, 9)),
    "rows of channels": ("NXC", (600, 70)),
    "narrow rows": ("NXC", (9000, 3)),
}


@pytest.fixture
def peak(monkeypatch):
    """Return a function: the most bytes that a second call takes, its results among them."""
    # Nothing that a first call has left is there for the second.
    internals.keep_no_records(monkeypatch)
    forget()

    def measured(call):
        call()
        tracemalloc.start()
        try:
            results = call()
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        arrays = (results,) if isinstance(results, np.ndarray) else results
        return most - sum(array.nbytes for array in arrays)

    yield measured
    forget()


# Objects of Python, and the beginning of a record at a cache line.
_OBJECTS = 8192


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_call_allocates_only_its_record_beyond_results(
    name, dtype, threads, peak, rng, monkeypatch
):
    data_format, shape = CASES[name]
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=4.0)
    machine = Machine(threads, 1 << 21, 1 << 25, "made up")
    internals.plan_for(monkeypatch, machine)
    sizes = internals.sizes_of_records(monkeypatch)
    decided = backnorm.explain(*data.backward_inputs, **data.options)
    per_channel = data.mean, data.variance, data.gamma, data.beta
    calls = {
        "backward": lambda: backnorm.batch_norm_backward(*data.backward_inputs, **data.options),
        "forward": lambda: backnorm.batch_norm_forward(data.x, *per_channel[2:], **data.options),
        "inference": lambda: backnorm.batch_norm_inference(data.x, *per_channel, **data.options),
    }
    for operation, call in calls.items():
        sizes.clear()
        most = peak(call)
        first, second = sizes
        assert first == second, operation
        assert second <= most <= second + _OBJECTS, operation
        assert second <= bound(columns_of(decided), threads), operation
