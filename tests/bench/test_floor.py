"""The kernel of the floor moves the memory that it says."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("backnorm_kernels", reason="backnorm-kernels is not installed")
pytest.importorskip("numba", reason="Numba is not installed")

from benchmarks.peers.floor import move

# Elements that the ends of an item may skip.
_SKIPPED = 16


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("has_dy", [False, True])
@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_move_writes_sum_of_arrays_to_all_items(streaming, has_dy, reads_first, threads, rng):
    x, dy = rng.standard_normal((2, 200_003))
    out = np.full(x.size, np.nan)
    options = {"reads_first": reads_first, "streaming": streaming, "threads": threads}
    move(x, dy if has_dy else None, out, **options)
    expected = x + dy if has_dy else x
    written = ~np.isnan(out)
    assert np.array_equal(out[written], expected[written])
    skipped = np.flatnonzero(~written)
    # The ends of an item are skipped where they do not fill a vector; an item has 2^16 elements.
    items = -(-x.size // (1 << 16)) + 8 * threads
    assert skipped.size < _SKIPPED * items


def test_move_of_fewer_elements_than_a_vector_writes_nothing():
    out = np.zeros(7)
    move(np.ones(7), None, out, reads_first=True, streaming=False, threads=1)
    assert not out.any()
