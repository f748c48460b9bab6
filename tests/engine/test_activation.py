"""SiLU and Hardswish in kernels: how exact they are, and at the ends of every type's range."""

from __future__ import annotations

import ml_dtypes
import mpmath
import numpy as np
import pytest

import backnorm
from backnorm.activations import MASKLESS, Activation
from backnorm.errors import ArgumentValueError
from backnorm.executable import operation

FORWARD, INFERENCE = operation("forward"), operation("inference")
BACKWARD = operation("activation_backward")

every_activation = pytest.mark.parametrize("name", MASKLESS)
NARROW = [(dtype, arithmetic) for dtype in (np.float16, ml_dtypes.bfloat16)
          for arithmetic in ("float32", "float64")]  # fmt: skip


def value(name, z):
    """Return an activation of float64 numbers."""
    with np.errstate(all="ignore"):
        if name == "silu":
            e = np.exp(-np.abs(z))
            return np.where(z < 0, z * e, z) / (1 + e)
        return z * np.clip(z + 3, 0, 6) / 6


def derivative(name, z):
    """Return its derivative."""
    with np.errstate(all="ignore"):
        if name == "silu":
            e = np.exp(-np.abs(z))
            s, rest = np.where(z < 0, (e, np.ones_like(e)), (np.ones_like(e), e)) / (1 + e)
            return s * (1 + z * rest)
        return np.where(z <= -3, 0.0, np.where(z < 3, (z + 1.5) / 3, np.where(np.isnan(z), z, 1.0)))


def step(dtype, at):
    """Return the distance of elements of a type near float64 numbers."""
    info = ml_dtypes.finfo(dtype)
    size = np.maximum(np.abs(at), float(info.smallest_normal))
    with np.errstate(invalid="ignore"):
        return 2.0 ** np.floor(np.log2(size)) * float(info.eps)


def alone(x, name, arithmetic, dy=None):
    """Return the activation of x itself, or the gradient: of mean 0, variance 1, epsilon 0."""
    statistics = np.float32 if x.dtype.itemsize == 2 else x.dtype
    x = x.reshape(1, 1, -1)
    arguments = np.zeros(1, statistics), np.ones(1, statistics), None, None, 0.0, "NCX", name
    if dy is None:
        (found,) = INFERENCE(x, None, *arguments, arithmetic)
    else:
        (found,) = BACKWARD(x, np.asarray(dy, x.dtype).reshape(x.shape), *arguments, arithmetic)
    return found.reshape(-1)


def all_of(dtype):
    """Return every number of a type of 16 bits that is finite."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        return every[np.isfinite(every.astype(np.float64))]


@every_activation
@pytest.mark.parametrize(("dtype", "arithmetic"), NARROW)
def test_activation_of_16_bits_is_rounded_once(name, dtype, arithmetic, rng):
    x = all_of(dtype)
    z = x.astype(np.float64)
    expected = value(name, z)
    off = np.abs(alone(x, name, arithmetic).astype(np.float64) - expected)
    assert np.all(off <= 0.501 * step(dtype, expected))
    with np.errstate(over="ignore"):
        dy = rng.standard_normal(x.shape).astype(dtype)
    slope = derivative(name, z)
    expected = dy.astype(np.float64) * slope
    off = np.abs(alone(x, name, arithmetic, dy).astype(np.float64) - expected)
    # Near the minimum of SiLU the terms of a derivative cancel.
    cancels = name == "silu" and arithmetic == "float32"
    lost = 2.0**-22 * np.abs(dy.astype(np.float64)) if cancels else 0.0
    assert np.all(off <= 0.501 * step(dtype, expected) + lost)


@every_activation
@pytest.mark.parametrize("arithmetic", ["float32", "float64"])
def test_activation_of_float32_is_within_error_bound(name, arithmetic, rng):
    x = np.concatenate([np.linspace(-90, 90, 300_001), 4 * rng.standard_normal(300_001)])
    x = x.astype(np.float32)
    z = x.astype(np.float64)
    expected = value(name, z)
    off = np.abs(alone(x, name, arithmetic) - expected)
    # Kernels compute 0 for a SiLU of smaller numbers.
    near = (z > -87) | (name == "hardswish")
    # The rounding error of z + 3.
    rounded = np.abs(z) * 2.0**-24 if name == "hardswish" else 0.0
    assert np.all(off <= np.where(near, 3.5 * step(np.float32, expected) + rounded, 1.5e-36))
    dy = rng.standard_normal(x.shape).astype(np.float32)
    off = np.abs(alone(x, name, arithmetic, dy) - dy * derivative(name, z))
    assert np.all(off <= 4 * 2.0**-23 * np.abs(dy))


@every_activation
def test_activation_of_float64_matches_mpmath(name, rng):
    # Where e^z is a normal number.
    z = np.concatenate([np.linspace(-708, 30, 1001), rng.uniform(-8, 8, 1001)])
    y, dz = alone(z, name, "float64"), alone(z, name, "float64", np.ones_like(z))
    with mpmath.workdps(40):
        for at, found, slope in zip(z, y, dz, strict=True):
            t = mpmath.mpf(at)
            if name == "silu":
                s = 1 / (1 + mpmath.exp(-t))
                wanted = t * s, s * (1 + t * (1 - s))
            else:
                ramp = mpmath.mpf(min(max(t + 3, 0), 6))
                wanted = t * ramp / 6, 0 if t <= -3 else 1 if t >= 3 else t / 3 + mpmath.mpf(0.5)
            lost = 2.0**-52 * abs(at) if name == "hardswish" else 0.0
            assert abs(found - wanted[0]) <= 3.5 * np.spacing(abs(float(wanted[0]))) + lost
            assert abs(slope - wanted[1]) <= 4 * 2.0**-52


@every_activation
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_activation_of_infinity_and_nan_returns_expected_values(name, dtype):
    """Expected values are those of PyTorch's operators; NaN stays NaN."""
    x = np.array([np.inf, -np.inf, np.nan, 0.0] * 9).astype(dtype)
    y, dz = (alone(x, name, None, dy).astype(float)[:4] for dy in (None, np.full(36, 3)))
    np.testing.assert_array_equal(y, [np.inf, np.nan, np.nan, 0.0])
    ends = [np.nan, np.nan] if name == "silu" else [3.0, 0.0]
    np.testing.assert_array_equal(dz, [*ends, np.nan, 1.5])


@every_activation
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_activation_of_largest_numbers_does_not_overflow(name, dtype):
    most = ml_dtypes.finfo(dtype).max
    x = np.array([most, -most] * 40).astype(dtype)
    np.testing.assert_array_equal(alone(x, name, None)[:2].astype(float), [float(most), 0.0])
    # Nothing overflows on the way to a gradient.
    z = np.linspace(-5, 5, 80).astype(dtype)
    found = alone(z, name, None, np.full(80, most)).astype(float)
    with np.errstate(over="ignore"):
        expected = derivative(name, z.astype(float)) * float(most)
    within = np.abs(expected) < float(most)
    assert within.sum() > 40
    off = np.abs(found[within] - expected[within])
    assert np.all(off <= 4 * float(ml_dtypes.finfo(dtype).eps) * float(most))


SHAPES = [(3, 5, 9001), (40, 6, 1100), (90, 17, 49), (30, 37, 4), (4099, 24), (2011, 3), (1, 1)]


@every_activation
@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [(np.float64, None), (np.float32, "float64"), (np.float32, "float32"), *NARROW],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_activation_bits_do_not_depend_on_layout_or_split(name, dtype, arithmetic, shape, rng):
    x, dy = ((3 * rng.standard_normal(shape)).astype(dtype) for _ in range(2))
    statistics = np.float32 if x.dtype.itemsize == 2 else dtype
    parameters = [
        (0.5 + rng.random(shape[1])).astype(statistics)
        for _ in ("mean", "variance", "gamma", "beta")
    ]
    settings = 1e-5, "NCX", name, arithmetic
    found = INFERENCE(x, None, *parameters, *settings) + BACKWARD(x, dy, *parameters, *settings)

    def last(array):
        return np.ascontiguousarray(np.moveaxis(array, 1, -1))

    settings = 1e-5, "NXC", name, arithmetic
    others = INFERENCE(last(x), None, *parameters, *settings)
    others += BACKWARD(last(x), last(dy), *parameters, *settings)
    for one, other in zip(found, others, strict=True):
        assert last(one).tobytes() == other.tobytes()
    half = shape[0] // 2
    parts = [
        INFERENCE(part, None, *parameters, 1e-5, "NCX", name, arithmetic)[0]
        for part in (x[:half], x[half:])
    ]
    assert np.concatenate(parts).tobytes() == found[0].tobytes()


@every_activation
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_forward_with_activation_matches_activation_of_plain_forward(name, data_format, dtype, rng):
    x = (2 + 3 * rng.standard_normal((9, 20, 20, 20))).astype(dtype)
    statistics = np.float32 if x.dtype.itemsize == 2 else dtype
    gamma, beta = ((0.5 + rng.random(20)).astype(statistics) for _ in range(2))
    moved, also = ([np.zeros(20, statistics), np.ones(20, statistics)] for _ in range(2))
    settings = 1e-5, data_format, name, None
    operands = x, None, gamma, beta
    y, mean, variance, mask = FORWARD(*operands, *moved, *settings, False, momentum=0.25)
    assert mask is None
    plain = backnorm.batch_norm_forward(x, gamma, beta, epsilon=1e-5, data_format=data_format)
    for one, other in zip((mean, variance), plain[1:3], strict=True):
        assert one.tobytes() == other.tobytes()
    FORWARD(*operands, *also, 1e-5, data_format, None, None, False, momentum=0.25)
    assert [each.tobytes() for each in moved] == [each.tobytes() for each in also]
    wide = backnorm.batch_norm_forward(
        x.astype(np.float64), *(each.astype(np.float64) for each in (gamma, beta)),
        epsilon=1e-5, data_format=data_format,
    )  # fmt: skip
    expected = value(name, wide.y)
    error = np.abs(y.astype(np.float64) - expected)
    # z is rounded to float32 before the activation, whose slope is 1.1 at most (Hardswish: 1.5).
    lost = {8: 2.0**-48, 4: 2.0**-22, 2: 2.0**-20}[x.dtype.itemsize]
    assert np.all(error <= 0.51 * step(dtype, expected) + lost * (1 + np.abs(wide.y)))


@every_activation
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_apply_forward_of_own_moments_has_the_bits_of_forward(name, data_format, rng):
    x = (2 + 3 * rng.standard_normal((9, 20, 5, 20))).astype(np.float32)
    gamma, beta = ((0.5 + rng.random(20)).astype(np.float32) for _ in range(2))
    options = 1e-5, data_format, name, "float64"
    # Reproducible, because those moments are rounded once, also where a forward pass has them.
    whole = FORWARD(x, None, gamma, beta, None, None, *options, True)
    moments = backnorm.reduce_forward(x, data_format=data_format, reproducible=True).rounded()
    apply = operation("apply_forward", exchanged=True)
    sums = moments.mean, moments.variance
    found = apply(x, None, gamma, beta, *options, False, sums=sums)
    assert whole[3] is found[3] is None
    for one, other in zip(whole[:3], found[:3], strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("activation", ["relu", Activation("relu", 6.0), None, 3, "gelu"])
def test_activation_backward_of_unsupported_activation_is_rejected(activation):
    x, channel = np.ones((2, 3, 4)), np.ones(3)
    with pytest.raises(ArgumentValueError, match=r"^activation: must be .*'silu'.*'hardswish'"):
        BACKWARD(x, x, channel, channel, None, None, 1e-5, "NCX", activation, None)
