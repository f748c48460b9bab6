"""Vectors in memory: every element type against NumPy and ml_dtypes, exhaustively for 16 bits."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backnorm_kernels.kernels.memory import (
    aligned_head,
    load,
    load_first,
    load_like,
    load_one,
    load_singles,
    load_singles_first,
    store,
    store_first,
    store_one,
    stored_sound,
    stream,
)
from backnorm_kernels.kernels.vector import (
    blend,
    both_sound,
    even_odd,
    high_half,
    in_order,
    low_half,
    marked,
    multiply_add,
    sound,
    splat,
    splat_single,
)

# Kernels cannot be called from Python, but what is compiled here can, and calls them.
compiled = numba.njit(nogil=True, error_model="numpy")


def stored(values):
    """Return an array as the kernels know its elements."""
    kinds = {"float16": np.uint16, "bfloat16": np.int16}
    return values.view(kinds.get(values.dtype.name, values.dtype))


@compiled
def _widen(source, target):
    for i in range(0, source.shape[0] - 7, 8):
        store(target, i, load(source, i))


@compiled
def _copy_one_by_one(source, target):
    for i in range(source.shape[0]):
        store_one(target, i, load_one(source, i))


@compiled
def _stream(source, target, start):
    for i in range(start, source.shape[0] - 7, 8):
        stream(target, i, load(source, i))


@compiled
def _first(source, start, count, target):
    store_first(target, start, count, load_first(source, start, count))


@compiled
def _widen_first(source, start, count, target):
    store(target, 0, load_first(source, start, count))


@compiled
def _blend(count, left, right, target):
    store(target, 0, blend(count, load(left, 0), load(right, 0)))


@compiled
def _head(target, index):
    return aligned_head(target, index, 8)


@compiled
def _arithmetic(left, right, target):
    a, b = load(left, 0), load(right, 0)
    store(target, 0, (a - b) * (a + splat(2.0)))


@compiled
def _copy_singles(source, target):
    for i in range(0, source.shape[0] - 15, 16):
        store(target, i, load_singles(source, i))


@compiled
def _copy_even_odd(source, target):
    """Load pairs of bfloat16."""
    for i in range(0, source.shape[0] - 15, 16):
        pairs = even_odd(load_singles(source, i))
        store(target, i, in_order(load_like(source, i, None, pairs)))


@compiled
def _store_even_odd(source, target):
    """Store pairs of bfloat16."""
    for i in range(0, source.shape[0] - 15, 16):
        store(target, i, even_odd(load_singles(source, i)))


@compiled
def _stream_singles(source, target):
    for i in range(0, source.shape[0] - 15, 16):
        stream(target, i, load_singles(source, i))


@compiled
def _first_singles(source, start, count, target):
    store_first(target, start, count, load_singles_first(source, start, count))


@compiled
def _halves(source, target):
    store(target, 0, low_half(load_singles(source, 0)))
    store(target, 8, high_half(load_singles(source, 0)))


@compiled
def _marked(source, target):
    value = load_singles(source, 0)
    store(target, 0, marked(value))
    return sound(value)


@compiled
def _both_sound(left, right):
    return both_sound(load_singles(left, 0), load_singles(right, 0))


@compiled
def _told_by_what_is_stored(target, left, right):
    return stored_sound(target, load_singles(left, 0), load_singles(right, 0))


@compiled
def _told_by_pairs(target, left, right):
    left, right = load_singles(left, 0), load_singles(right, 0)
    return stored_sound(target, even_odd(left), even_odd(right))


@compiled
def _arithmetic_of_singles(count, left, right, target):
    a, b = load_singles(left, 0), load_singles(right, 0)
    store(target, 0, blend(count, multiply_add(a - b, a, b), splat_single(0.1)))


def _all_16_bit_values(dtype):
    """Return all values, and the same as float64 (signalling NaN among them: no warning)."""
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        return values, values.astype(np.float64)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("copy", [_widen, _copy_one_by_one], ids=["vector", "scalar"])
def test_load_and_store_keep_each_16_bit_value(dtype, copy):
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
def test_store_rounds_float64_to_16_bits_once(dtype, copy):
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
def test_store_narrows_overflow_and_special_values_by_ieee_rules(dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.array([np.inf, -np.inf, np.nan, 1e300, -1e300, largest, -largest, 1e-300])
    got = np.zeros(8, dtype)
    _widen(values, stored(got))
    expected = np.array([np.inf, -np.inf, np.nan, np.inf, -np.inf, largest, -largest, 0.0])
    np.testing.assert_array_equal(got.astype(np.float64), expected)


def test_store_rounds_float64_to_nearest_even_float32(rng):
    values = rng.standard_normal(4096) * 10.0 ** rng.integers(-40, 38, 4096)
    got = np.zeros(4096, np.float32)
    _widen(values, got)
    np.testing.assert_array_equal(got, values.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_stream_writes_source_bytes(dtype, rng):
    source = rng.standard_normal(256).astype(dtype)
    target = np.zeros(256 + 64, dtype)
    head = _head(stored(target), 0)
    aligned = target[head : head + 256]
    assert aligned.__array_interface__["data"][0] % (8 * source.itemsize) == 0
    _stream(stored(source), stored(aligned), 0)
    np.testing.assert_array_equal(aligned.view(np.uint8), source.view(np.uint8))


@pytest.mark.parametrize("count", [*range(9), 11])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_load_first_and_store_first_copy_only_count_elements(dtype, count, rng):
    source = rng.standard_normal(20).astype(dtype)
    target = np.zeros(20, dtype)
    _first(stored(source), 3, count, stored(target))
    expected = np.zeros(20, dtype)
    expected[3 : 3 + min(count, 8)] = source[3 : 3 + min(count, 8)]
    np.testing.assert_array_equal(target.view(np.uint8), expected.view(np.uint8))
    wide = np.full(8, np.nan)
    _widen_first(stored(source), 3, count, wide)
    np.testing.assert_array_equal(wide[: min(count, 8)], expected[3 : 3 + min(count, 8)])
    assert (wide[min(count, 8) :] == 0).all()


@pytest.mark.skipif(sys.platform == "win32", reason="mmap with a protected page is POSIX's")
@pytest.mark.parametrize("dtype", [pytest.param(np.float32, marks=pytest.mark.long), np.float16])
def test_load_first_and_store_first_do_not_touch_memory_after_elements(dtype):
    """The elements end where the process's memory does; touching more would end the process."""
    code = f"""
import ctypes, mmap
import numba
import numpy as np
from backnorm_kernels.kernels.memory import load_first, store, store_first

@numba.njit
def first(values, wide):
    n = values.shape[0]
    value = load_first(values, n - 5, 5)
    store(wide, 0, value)
    store_first(values, n - 5, 5, value)

size = mmap.PAGESIZE
pages = mmap.mmap(-1, 2 * size)
base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + size), size, 0) == 0
dtype, stored = np.dtype("{np.dtype(dtype).name}"), "{stored(np.zeros(0, dtype)).dtype.name}"
values = np.frombuffer(pages, dtype, size // dtype.itemsize)
values[-5:] = [1, 2, 3, 4, 5]
wide = np.zeros(8)
first(values.view(stored), wide)
print(wide.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]"


@pytest.mark.parametrize("count", [0, 1, 7, 8, 12])
def test_blend_selects_first_lanes_from_left(count):
    left, right, target = np.arange(8.0), -np.arange(8.0) - 1, np.full(8, np.nan)
    _blend(count, left, right, target)
    np.testing.assert_array_equal(target, np.where(np.arange(8) < count, left, right))


def test_vector_operators_match_numpy(rng):
    left, right, target = rng.standard_normal(8), rng.standard_normal(8), np.zeros(8)
    _arithmetic(left, right, target)
    np.testing.assert_allclose(target, (left - right) * (left + 2.0), rtol=1e-15)


# In order, or the even ones of pairs before the odd ones.
both_orders = pytest.mark.parametrize(
    ("dtype", "take", "give"),
    [
        (np.float16, _copy_singles, _copy_singles),
        (ml_dtypes.bfloat16, _copy_singles, _copy_singles),
        (ml_dtypes.bfloat16, _copy_even_odd, _store_even_odd),
    ],
    ids=["float16", "bfloat16", "bfloat16-even_odd"],
)


@both_orders
def test_load_of_16_bits_as_float32_is_exact_and_reversible(dtype, take, give):
    values, exact = _all_16_bit_values(dtype)
    wide = np.full(values.size, np.nan, np.float32)
    take(stored(values), wide)
    np.testing.assert_array_equal(wide, exact)
    back = np.zeros_like(values)
    give(wide, stored(back))
    # What is not zero or normal in float32 is not stored this way.
    kept = (exact == 0) | (np.isfinite(exact) & (np.abs(exact) >= 2.0**-126))
    np.testing.assert_array_equal(back[kept].view(np.uint16), values[kept].view(np.uint16))


@both_orders
def test_store_rounds_float32_to_nearest_even_16_bits(dtype, take, give):
    _, values = _all_16_bit_values(dtype)
    finite = np.unique(np.abs(values[np.isfinite(values)]))
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    middle = middle[middle >= 2.0**-126]
    every = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(3e38))]
    singles = np.concatenate([sign * each for each in every for sign in (1, -1)])
    singles = np.resize(singles[np.abs(singles) >= 2.0**-126], -(-singles.size // 16) * 16)
    got = np.zeros(singles.size, dtype)
    give(singles, stored(got))
    with np.errstate(over="ignore"):
        expected = singles.astype(dtype)
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("count", [-3, 0, 1, 7, 8, 9, 15, 16, 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_load_singles_first_and_store_first_copy_only_count_elements(dtype, count, rng):
    source = rng.standard_normal(32).astype(dtype)
    target = np.zeros(32, dtype)
    _first_singles(stored(source), 3, count, stored(target))
    expected = np.zeros(32, dtype)
    expected[3 : 3 + min(max(count, 0), 16)] = source[3 : 3 + min(max(count, 0), 16)]
    np.testing.assert_array_equal(target.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_stream_of_singles_writes_source_bytes(dtype, rng):
    source = rng.standard_normal(256).astype(dtype)
    target = np.zeros(256 + 64, dtype)
    head = -target.ctypes.data % 32 // 2
    _stream_singles(stored(source), stored(target[head : head + 256]))
    np.testing.assert_array_equal(target[head : head + 256].view(np.uint8), source.view(np.uint8))


def test_low_half_and_high_half_return_lanes_in_order():
    source, target = np.arange(16, dtype=np.float32), np.zeros(16)
    _halves(source, target)
    np.testing.assert_array_equal(target, np.arange(16.0))


def test_marked_replaces_lanes_neither_zero_nor_normal_by_nan():
    least, most = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    above = np.nextafter(np.float32(least), np.float32(1))
    good = np.array([0.0, -0.0, 2.0, -2.0, above, -above, most, -most] * 2, np.float32)
    target = np.zeros(16, np.float32)
    assert _marked(good, target)
    np.testing.assert_array_equal(target.view(np.uint32), good.view(np.uint32))
    for bad in (np.nan, -np.nan, np.inf, -np.inf, least / 2, -least / 2, 1e-45, -1e-45):
        for place in (0, 9, 15):
            values = good.copy()
            values[place] = bad
            assert not _marked(values, target)
            np.testing.assert_array_equal(np.isnan(target), np.arange(16) == place)
            assert not _both_sound(values, good)
            assert not _both_sound(good, values)


def test_marked_keeps_least_normal_number():
    values, target = np.full(16, np.finfo(np.float32).tiny), np.zeros(16, np.float32)
    _marked(values, target)
    np.testing.assert_array_equal(target, values)


@example(0x7F800001)
@given(st.integers(0, 2**32 - 1))
def test_sound_returns_true_only_for_zero_or_normal_patterns(pattern):
    values = np.full(16, pattern, np.uint32).view(np.float32)
    # Of a signalling NaN NumPy says that it quiets it.
    with np.errstate(invalid="ignore"):
        size = abs(values[0].astype(np.float64))
    good = size == 0 or np.finfo(np.float32).tiny <= size <= np.finfo(np.float32).max
    told = _marked(values, np.zeros(16, np.float32))
    assert told == good or (good and size == np.finfo(np.float32).tiny)
    assert _both_sound(values, values) == told


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [-70, -1, *range(18), 1 << 40])
def test_load_first_with_any_count_zeroes_remaining_lanes(dtype, count, rng):
    """Also fewer than none, and of 16 bits odd numbers of lanes, which some load as pairs."""
    source = rng.standard_normal(min(max(count, 0), 8)).astype(dtype)
    target = np.full(8, np.nan)
    _widen_first(stored(source), 0, count, target)
    expected = np.zeros(8)
    expected[: len(source)] = source
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("count", [0, 5, 16])
def test_singles_operators_match_numpy(count, rng):
    left, right = rng.standard_normal((2, 16)).astype(np.float32)
    target = np.zeros(16, np.float32)
    _arithmetic_of_singles(count, left, right, target)
    expected = ((left - right).astype(float) * left + right).astype(np.float32)
    expected[count:] = np.float32(0.1)
    np.testing.assert_allclose(target, expected, rtol=2e-7)


# Of float32: signs, exponents and the last bits of the least and the largest numbers of each type.
_patterns = st.builds(
    lambda sign, exponent, low: (sign << 31) + (exponent << 23) + low,
    st.integers(0, 1),
    st.sampled_from([0, 1, 2, 101, 102, 103, 127, 142, 143, 253, 254, 255]),
    st.one_of(st.integers(0, 2**16), st.integers(2**23 - 2**16, 2**23 - 1)),
)


@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        (np.float16, _told_by_what_is_stored),
        (ml_dtypes.bfloat16, _told_by_what_is_stored),
        (ml_dtypes.bfloat16, _told_by_pairs),
    ],
    ids=["float16", "bfloat16", "bfloat16-even_odd"],
)
@given(pattern=_patterns, place=st.integers(0, 15))
def test_stored_sound_returns_true_only_if_stored_float32_was_normal(dtype, told, pattern, place):
    value = np.array(pattern, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        size = abs(value.astype(dtype).astype(np.float64))
    # Of float16 what was rounded to zero is in doubt, of bfloat16 subnormal numbers are, too.
    least = 0.0 if dtype == np.float16 else 2.0**-126
    good, values = np.full(16, np.float32(-1.5)), np.full(16, np.float32(1.0))
    values[place] = value
    target = stored(np.zeros(16, dtype))
    expected = bool(least < size < np.inf)
    assert (told(target, values, good), told(target, good, values)) == (expected, expected)
    assert not expected or np.finfo(np.float32).tiny <= abs(value) < np.inf
