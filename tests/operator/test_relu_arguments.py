"""Bad arguments of the operators with a ReLU: each error names the argument and what came."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import FLOAT32
from tests.support.relu_battery import relu_case

OPERANDS = {
    "forward": ("x", "gamma", "beta", "residual"),
    "inference": ("x", "mean", "variance", "gamma", "beta", "residual"),
    "backward": ("x", "mean", "variance", "dy", "gamma", "mask"),
}
OPERATORS = tuple(OPERANDS)
EACH = [(operator, name) for operator, names in OPERANDS.items() for name in names]


@pytest.fixture
def arguments(rng):
    """Arguments of the three operators, by the operator's name."""
    data = realistic_data((3, 5, 7, 3), FLOAT32, rng=rng)
    case = relu_case("", data, rng)
    x = {"x": data.x} | data.options
    affine = {"gamma": data.gamma, "beta": data.beta, "residual": case.residual}
    statistics = {"mean": data.mean, "variance": data.variance}
    return {
        "forward": x | affine,
        "inference": x | statistics | affine,
        "backward": x | statistics | {"dy": data.dy, "gamma": data.gamma, "mask": case.mask},
    }


def call(operator, arguments, **changes):
    activation = {} if operator == "backward" else {"activation": "relu"}
    return getattr(backnorm, f"batch_norm_{operator}")(**arguments[operator] | activation | changes)


@pytest.mark.parametrize(("operator", "name"), EACH)
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, np.longdouble, object, "U3"])
def test_relu_operators_reject_unsupported_element_types(operator, name, dtype, arguments):
    wrong = np.ones(arguments[operator][name].shape, dtype)
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: "):
        call(operator, arguments, **{name: wrong})


@pytest.mark.parametrize(
    ("operator", "name"), [each for each in EACH if each[1] in ("dy", "residual")]
)
def test_dy_or_residual_of_other_type_or_shape_than_x_is_rejected(operator, name, arguments):
    right = arguments[operator][name]
    with pytest.raises(backnorm.ArgumentTypeError, match=f"^{name}: .*float16"):
        call(operator, arguments, **{name: right.astype(np.float16)})
    for wrong in (right[..., :-1], right[:1], right[0], right[..., None], right.ravel()):
        with pytest.raises(backnorm.ArgumentValueError, match=f"^{name}: ") as raised:
            call(operator, arguments, **{name: wrong})
        assert str(wrong.shape) in str(raised.value)
        assert str(right.shape) in str(raised.value)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float32, np.bool_, np.int64, object])
def test_mask_of_other_type_than_uint8_is_rejected(dtype, arguments):
    mask = arguments["backward"]["mask"].astype(dtype)
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^mask: ") as raised:
        call("backward", arguments, mask=mask)
    assert str(mask.dtype) in str(raised.value)
    assert "uint8" in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask[:0],
        lambda mask: mask[: mask.size // 2],
        lambda mask: mask[:-9],
        lambda mask: mask[None],
        lambda mask: mask.reshape(-1, 1),
        lambda mask: mask[0],
    ],
    ids=["empty", "half", "a bit too short", "(1, n)", "(n, 1)", "scalar"],
)
def test_mask_of_wrong_shape_is_rejected(change, arguments):
    wrong = np.asarray(change(arguments["backward"]["mask"]))
    with pytest.raises(backnorm.ArgumentValueError, match=r"^mask: ") as raised:
        call("backward", arguments, mask=wrong)
    assert str(wrong.shape) in str(raised.value)


def test_residual_gradient_without_mask_is_rejected(arguments):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^residual: .*without a mask"):
        call("backward", arguments, mask=None, residual=True)
    del arguments["backward"]["mask"]
    with pytest.raises(backnorm.ArgumentValueError, match=r"^residual: .*without a mask"):
        call("backward", arguments, residual=True)


@pytest.mark.parametrize("operator", ["forward", "inference"])
def test_residual_without_relu_is_rejected(operator, arguments):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^residual: .*activation='relu'"):
        call(operator, arguments, activation=None)


@pytest.mark.parametrize("activation", ["silu", "hardswish", backnorm.Activation("silu")])
def test_activation_other_than_relu_is_rejected(activation, arguments):
    expected = r"^activation: .*'relu6', backnorm\.Activation\('relu', ceiling\).*to y"
    for operator in ("forward", "inference"):
        with pytest.raises(backnorm.ArgumentValueError, match=expected):
            call(operator, arguments, activation=activation, residual=None)
    moments = backnorm.reduce_forward(arguments["forward"]["x"])
    with pytest.raises(backnorm.ArgumentValueError, match=expected):
        backnorm.apply_forward(
            arguments["forward"]["x"], moments, epsilon=1e-3, activation=activation
        )


@pytest.mark.parametrize("operator", ["forward", "inference"])
@pytest.mark.parametrize("value", ["gelu", "", True, 6.0, ("relu", 6.0), np.ones(3)])
def test_unknown_activation_is_rejected(operator, value, arguments):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^activation: "):
        call(operator, arguments, activation=value)


def test_backward_with_strided_mask_equals_contiguous_mask(arguments):
    expected = call("backward", arguments, residual=True)
    wide = np.repeat(arguments["backward"]["mask"], 2)
    actual = call("backward", arguments, residual=True, mask=wide[::2])
    for values, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(values, other)


@pytest.mark.parametrize("value", [1, "yes", None, np.ones(3)])
def test_backward_rejects_residual_that_is_not_bool(value, arguments):
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^residual: "):
        call("backward", arguments, residual=value)


@pytest.mark.parametrize("operator", OPERATORS)
def test_relu_operators_reject_invalid_epsilon_data_format_x_and_gamma(operator, arguments):
    with pytest.raises(backnorm.ArgumentValueError, match=r"^epsilon: .*-1"):
        call(operator, arguments, epsilon=-1.0)
    with pytest.raises(backnorm.ArgumentValueError, match=r"^data_format: .*NHWC"):
        call(operator, arguments, data_format="NHWC")
    with pytest.raises(backnorm.ArgumentValueError, match=r"^x: must have rank 2"):
        call(operator, arguments, x=np.ones(5, np.float32))
    with pytest.raises(backnorm.ArgumentValueError, match=r"^gamma: .*\(4,\)"):
        call(operator, arguments, gamma=np.ones(4, np.float32))
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^gamma: "):
        call(operator, arguments, gamma=np.ones(5))
    with pytest.raises(backnorm.ArgumentTypeError, match=r"^x: .*masked"):
        call(operator, arguments, x=np.ma.masked_array(arguments[operator]["x"]))


@pytest.mark.parametrize("operator", ["inference", "backward"])
def test_negative_variance_raises_error_with_its_channel(operator, arguments):
    variance = arguments[operator]["variance"].copy()
    variance[3] = -1.0
    with pytest.raises(backnorm.ArgumentValueError, match=r"^variance: .*channel 3"):
        call(operator, arguments, variance=variance)
