"""A ReLU with a ceiling: y is that of the plain ReLU, cut off, and the mask says where it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backnorm
from backnorm import Activation, reference
from backnorm.activations import check_activation
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT32, FLOAT64
from tests.support.relu_battery import relu_case

from .test_relu import LARGE

BY_TYPE = pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)


def assert_cut_off(result, plain, ceiling, x):
    """Assert that a result is the one without the ceiling, cut off; return how often it is."""
    values = np.minimum(plain.y.astype(np.float64), ceiling)
    np.testing.assert_array_equal(result.y.astype(np.float64), values)
    np.testing.assert_array_equal(result.mean, plain.mean)
    np.testing.assert_array_equal(result.variance, plain.variance)
    # What an infinite ceiling lets pass has none.
    counts = (values > 0) & ((values < ceiling) | np.isinf(ceiling))
    np.testing.assert_array_equal(reference.unpack_mask(result.mask, x), counts)
    return int((values == ceiling).sum())


@pytest.mark.covering(2)
@BY_TYPE
@pytest.mark.parametrize("arithmetic", [None, "float32", "float64"])
@pytest.mark.parametrize(("data_format", "shape"), LARGE)
@pytest.mark.parametrize("with_residual", [True, False])
def test_forward_with_ceiling_equals_plain_relu_clipped_at_ceiling(
    dtype, arithmetic, data_format, shape, with_residual, rng
):
    """Rounding and the ceiling commute, so the bits are known."""
    if dtype == FLOAT64 and arithmetic == "float32":
        pytest.skip("there is none")
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    residual = relu_case("", data, rng, with_residual=with_residual).residual
    options = data.options | {"residual": residual, "arithmetic": arithmetic}
    operands = data.x, data.gamma, data.beta
    plain = backnorm.batch_norm_forward(*operands, **options, activation="relu")
    options["activation"] = Activation("relu", 1.5)
    result = backnorm.batch_norm_forward(*operands, **options)
    assert 0 < assert_cut_off(result, plain, 1.5, data.x) < data.x.size // 2
    whole = backnorm.reduce_forward(data.x, data_format=data_format, arithmetic=arithmetic)
    phases = backnorm.apply_forward(data.x, whole, *operands[1:], **options)
    known = backnorm.batch_norm_inference(
        data.x, data.mean, data.variance, *operands[1:], **options
    )
    for y in (phases.y, known):
        assert y.astype(np.float64).max() == 1.5


@given(
    ceiling=st.floats(min_value=0, exclude_min=True),
    dtype=st.sampled_from(ELEMENT_TYPES),
    data_format=st.sampled_from(["NCX", "NXC"]),
    seed=st.integers(0, 100),
)
def test_ceiling_is_rounded_to_type_of_x_and_rejected_if_zero(ceiling, dtype, data_format, seed):
    rng = np.random.default_rng(seed)
    data = realistic_data((3, 5, 7, 3), dtype, data_format=data_format, rng=rng)
    with np.errstate(over="ignore"):
        rounded = float(np.float64(ceiling).astype(dtype))

    def forward(activation):
        return backnorm.batch_norm_forward(
            data.x, data.gamma, data.beta, **data.options, activation=activation
        )

    if rounded == 0:
        with pytest.raises(backnorm.ArgumentValueError, match=r"^ceiling: "):
            forward(Activation("relu", ceiling))
        return
    results = forward(Activation("relu", ceiling)), forward("relu")
    assert_cut_off(*results, rounded, data.x)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_inference_with_ceiling_returns_y_where_x_minus_mean_overflows_float32(dtype):
    """x - mean overflows float32, but y is finite and below the ceiling."""
    x = np.full((2, 3, 32), 3e38, dtype)
    ones = np.ones(3, np.float32)
    y = backnorm.batch_norm_inference(
        x, -3e38 * ones, ones, 1e-30 * ones, epsilon=0.0, activation=Activation("relu", 2.0**30),
        arithmetic="float32" if dtype == FLOAT32 else None,
    )  # fmt: skip
    np.testing.assert_allclose(y.astype(np.float64), 6e8, rtol=2.0**-7)


@BY_TYPE
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 40)])
def test_forward_with_ceiling_clips_infinity_keeps_nan_and_clears_mask(dtype, shape, rng):
    residual = np.zeros(shape, dtype)
    residual[0, :, :4] = np.inf, -np.inf, np.nan, 6.0
    x = rng.standard_normal(shape).astype(dtype)
    zeros = np.zeros(3, dtype)
    result = backnorm.batch_norm_forward(
        x, zeros, zeros, residual=residual, epsilon=1e-3, activation=Activation("relu", 6)
    )
    np.testing.assert_array_equal(result.y[0, 0, :4].astype(np.float64), [6.0, 0.0, np.nan, 6.0])
    assert not reference.unpack_mask(result.mask, x).any()


@pytest.mark.parametrize("value", [0, 0.0, -1.0, np.nan, -np.inf, -(10**400), 1e-60])
def test_ceiling_not_above_zero_in_type_of_x_is_rejected(value):
    x = np.ones((2, 3), np.float32)
    with pytest.raises(backnorm.ArgumentValueError, match=r"^ceiling: .*more than 0"):
        backnorm.batch_norm_forward(x, epsilon=1e-5, activation=Activation("relu", value))


@pytest.mark.parametrize("value", [True, "6", [6.0], np.ones(3), 6j])
def test_ceiling_of_wrong_type_raises_argument_type_error(value):
    x = np.ones((2, 3), np.float32)
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^ceiling: "):
        backnorm.batch_norm_forward(x, epsilon=1e-5, activation=Activation("relu", value))


def test_ceiling_of_silu_is_rejected():
    with pytest.raises(backnorm.ArgumentValueError, match=r"^activation: must not have a ceiling"):
        check_activation(Activation("silu", 6.0))


@BY_TYPE
def test_relu6_has_the_bits_of_relu_with_ceiling_6(dtype, rng):
    x = (4 * rng.standard_normal((4, 3, 50))).astype(dtype)
    gamma = np.full(3, 9, dtype)
    first, second = (
        backnorm.batch_norm_forward(x, gamma, epsilon=1e-5, activation=activation)
        for activation in ("relu6", Activation("relu", 6.0))
    )
    assert float(first.y.max()) == 6.0
    for one, other in zip(first, second, strict=True):
        assert one.tobytes() == other.tobytes()


def test_call_cache_distinguishes_ceilings(rng):
    x = rng.standard_normal((4, 3, 50)).astype(np.float16)

    def most(ceiling):
        y = backnorm.batch_norm_forward(x, epsilon=1e-5, activation=Activation("relu", ceiling)).y
        return float(y.max())

    for _ in range(2):
        found = [most(ceiling) for ceiling in (None, 1, 1.5, np.float32(0.5), np.inf)]
        assert found[1:4] == [1.0, 1.5, 0.5]
        assert found[0] == found[4] > 1.5
