"""Loads and stores of every element type against NumPy and ml_dtypes, exhaustively for 16 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from backnorm.kernels.cpu.jit import inlined
from backnorm.kernels.cpu.launch import stored
from backnorm.kernels.cpu.vector import (
    aligned_head,
    last_lanes,
    load,
    load_one,
    splat,
    store,
    store_one,
    stream,
)


@inlined
def _widen(source, target):
    for i in range(0, source.shape[0] - 7, 8):
        store(target, i, load(source, i))


@inlined
def _copy_one_by_one(source, target):
    for i in range(source.shape[0]):
        store_one(target, i, load_one(source, i))


@inlined
def _stream(source, target, start):
    for i in range(start, source.shape[0] - 7, 8):
        stream(target, i, load(source, i))


@inlined
def _last(source, count, target):
    store(target, 0, last_lanes(load(source, 0), count))


@inlined
def _head(target, index):
    return aligned_head(target, index)


@inlined
def _arithmetic(left, right, target):
    a, b = load(left, 0), load(right, 0)
    store(target, 0, (a - b) * (a + splat(2.0)))


def _all_16_bit_values(dtype):
    """Return all values, and the same as float64 (signalling NaN among them: no warning)."""
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        return values, values.astype(np.float64)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("copy", [_widen, _copy_one_by_one], ids=["vector", "scalar"])
def test_every_16_bit_value_survives_widening_and_narrowing(dtype, copy):
    values, exact = _all_16_bit_values(dtype)
    wide = np.full(values.size, np.nan)
    copy(stored(values), wide)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(wide[~nan], exact[~nan])
    assert np.isnan(wide[nan]).all()
    back = np.zeros_like(values)
    copy(wide, stored(back))
    np.testing.assert_array_equal(back[~nan].view(np.uint16), values[~nan].view(np.uint16))
    assert np.isnan(back[nan].astype(np.float64)).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("copy", [_widen, _copy_one_by_one], ids=["vector", "scalar"])
def test_float64_is_rounded_to_16_bits_once(dtype, copy):
    """Values on, just above and just below every midpoint: rounded twice, they would move."""
    _, values = _all_16_bit_values(dtype)
    finite = np.unique(np.abs(values[np.isfinite(values)]))
    low, high = finite[:-1], finite[1:]
    middle = (low + high) / 2
    even_is_low = low.astype(dtype).view(np.uint16) % 2 == 0
    tiny = np.spacing(middle)
    exact = np.concatenate([middle, middle + tiny, middle - tiny])
    expected = np.concatenate([np.where(even_is_low, low, high), high, low]).astype(dtype)
    padded = np.resize(exact, -(-exact.size // 8) * 8)
    for sign in (1.0, -1.0):
        got = np.zeros(padded.size, dtype)
        copy(sign * padded, stored(got))
        np.testing.assert_array_equal(
            got[: exact.size].astype(np.float64), sign * expected.astype(np.float64)
        )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_overflow_and_special_values_narrow_by_ieee_rules(dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.array([np.inf, -np.inf, np.nan, 1e300, -1e300, largest, -largest, 1e-300])
    got = np.zeros(8, dtype)
    _widen(values, stored(got))
    expected = np.array([np.inf, -np.inf, np.nan, np.inf, -np.inf, largest, -largest, 0.0])
    np.testing.assert_array_equal(got.astype(np.float64), expected)


def test_float32_rounds_to_nearest_even(rng):
    values = rng.standard_normal(4096) * 10.0 ** rng.integers(-40, 38, 4096)
    got = np.zeros(4096, np.float32)
    _widen(values, got)
    np.testing.assert_array_equal(got, values.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_streaming_writes_what_a_store_writes(dtype, rng):
    source = rng.standard_normal(256).astype(dtype)
    target = np.zeros(256 + 64, dtype)
    head = _head(stored(target), 0)
    aligned = target[head : head + 256]
    assert aligned.__array_interface__["data"][0] % 64 == 0
    _stream(stored(source), stored(aligned), 0)
    np.testing.assert_array_equal(aligned.view(np.uint8), source.view(np.uint8))


@pytest.mark.parametrize("count", range(9))
def test_last_lanes_keeps_the_last(count):
    source = np.arange(1.0, 9.0)
    target = np.full(8, np.nan)
    _last(source, count, target)
    np.testing.assert_array_equal(target, np.where(np.arange(8) >= 8 - count, source, 0.0))


def test_operators_on_vectors(rng):
    left, right, target = rng.standard_normal(8), rng.standard_normal(8), np.zeros(8)
    _arithmetic(left, right, target)
    np.testing.assert_allclose(target, (left - right) * (left + 2.0), rtol=1e-15)


def test_a_read_only_array_is_seen_without_a_copy():
    values = np.arange(8, dtype=np.float32)
    values.flags.writeable = False
    seen = stored(values)
    assert seen.flags.writeable
    assert seen.__array_interface__["data"][0] == values.__array_interface__["data"][0]
