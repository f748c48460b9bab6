"""More than 2^31 elements: no index is computed in 32 bits."""

from __future__ import annotations

import os

import numpy as np
import pytest

import backnorm

_GIB = 2**30


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_backward_of_more_than_2_31_elements_matches_result_of_one_period(data_format):
    if _memory() < 12 * _GIB:
        pytest.skip("needs 12 GiB of free memory")
    # Two channels of 2^30 + 2^20 float16 elements, periods of a pattern.
    period, repeats = 2**20, 2**10 + 1
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, period)).astype(np.float16)
    dy = (rng.standard_normal((2, period)) + x.astype(np.float32)).astype(np.float16)
    if data_format == "NXC":
        x, dy = np.ascontiguousarray(x.T), np.ascontiguousarray(dy.T)
        big_x, big_dy = np.tile(x, (repeats, 1)), np.tile(dy, (repeats, 1))
        small_x, small_dy = x, dy
    else:
        big_x, big_dy = np.tile(x, (1, repeats))[None], np.tile(dy, (1, repeats))[None]
        small_x, small_dy = x[None], dy[None]
    assert big_x.size > 2**31
    mean = np.array([0.1, -0.2], np.float32)
    variance = np.array([1.5, 0.5], np.float32)
    # Every mean of a period is that of the whole, so dx is the same in every period.
    expected = backnorm.batch_norm_backward(
        small_x, small_dy, mean, variance, epsilon=1e-3, data_format=data_format
    )
    got = backnorm.batch_norm_backward(
        big_x, big_dy, mean, variance, epsilon=1e-3, data_format=data_format, out=big_dy
    )
    assert got.dx is big_dy
    np.testing.assert_allclose(got.dgamma, expected.dgamma * repeats, rtol=1e-6)
    np.testing.assert_allclose(got.dbeta, expected.dbeta * repeats, rtol=1e-6)
    for k in (0, repeats // 2, repeats - 1):
        part = slice(k * period, (k + 1) * period)
        here = got.dx[part] if data_format == "NXC" else got.dx[:, :, part]
        np.testing.assert_array_equal(here, expected.dx)
