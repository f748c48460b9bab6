"""Huge pages are requested for outputs in new memory, by the native function that runs a kernel."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from backnorm import engines
from backnorm.layout import extents_of
from backnorm.problem import Problem
from backnorm_kernels.record import ADDRESSES
from tests.support.dtypes import FLOAT32
from tests.support.memory_maps import mapped_memory

MB = 1 << 20

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="no huge pages",
)


@pytest.mark.parametrize(
    ("begin", "size", "expected"),
    [
        (0, 2 * MB, [(0, 2 * MB)]),
        (4, 2 * MB, []),
        (0, 2 * MB - 4, []),
        (-4, 8, []),
        (2 * MB + 4, 9 * MB, [(4 * MB, 10 * MB)]),
    ],
)
def test_run_requests_whole_huge_pages_of_output_only(begin, size, expected):
    memory = mmap.mmap(-1, 18 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own = np.frombuffer(memory, np.uint8)
    first = own.ctypes.data + -own.ctypes.data % (2 * MB) + 2 * MB
    shape = 1, 1, size // 4
    problem = Problem(
        "inference", shape, (1,), FLOAT32, FLOAT32, False, False, 0.5, arithmetic="float64"
    )
    place = engines.place()._replace(engine="kernels")
    _, launch = engines.planned(problem, extents_of(shape, (1,), (0, 1, 2)), place)
    x, mean, variance = np.full(shape, 3.0, FLOAT32), np.ones(1, FLOAT32), np.full(1, 0.5, FLOAT32)
    operands = {"x": x, "mean": mean, "variance": variance}
    addresses = {name: array.ctypes.data for name, array in operands.items()}
    addresses["out"] = first + begin
    stage = launch.stage("inference")
    assert stage([addresses.get(name, 0) for name in ADDRESSES]) == -1
    out = own[first + begin - own.ctypes.data :][:size].view(FLOAT32)
    np.testing.assert_array_equal(out, 2.0)
    assert advised(first, own.ctypes.data, own.ctypes.data + own.nbytes) == expected


def advised(first, low, high):
    """Return the parts of a memory for which huge pages were requested, relative to `first`."""
    return [
        (begin - first, end - first)
        for begin, end, is_advised in mapped_memory()
        if is_advised and low <= begin < high
    ]
