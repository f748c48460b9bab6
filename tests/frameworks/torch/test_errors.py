"""Arguments that are refused, in PyTorch's names and with PyTorch's classes of error."""

from __future__ import annotations

import pytest
import torch

import backnorm
import backnorm.torch


def arguments(**changed):
    operands = {
        "input": torch.randn(4, 3, 5),
        "running_mean": torch.zeros(3),
        "running_var": torch.ones(3),
        "weight": torch.ones(3),
        "bias": torch.zeros(3),
        "training": True,
    }
    return operands | changed


REFUSED = {
    "one value a channel": ({"input": torch.randn(1, 3)}, "input", "more than 1 value per channel"),
    "eps 0": ({"eps": 0.0}, "eps", "eps must be positive during training"),
    "eps nan": ({"eps": float("nan"), "training": False}, "eps", "eps must be non-negative"),
    "rank 1": ({"input": torch.randn(3)}, "input", "channel axis"),
    "integers": ({"input": torch.ones(4, 3, dtype=torch.int64)}, "input", "int64"),
    "sparse": ({"input": torch.randn(4, 3).to_sparse()}, "input", "sparse"),
    "other channels": (
        {"input": torch.randn(4, 5, 3)}, "input", "got 5 channels on axis 1, .*expected 3 channels",
    ),
    "other type": (
        {"input": torch.randn(4, 3, 3).double()}, "input", "float64; expected torch.float32, or",
    ),
    "weight too short": ({"weight": torch.ones(2)}, "weight", r"shape \(3,\)"),
    "bias wider": ({"bias": torch.ones(3).double()}, "bias", "float64"),
    "weight narrower": ({"weight": torch.ones(3).bfloat16()}, "weight", "bfloat16"),
    "one running": ({"running_var": None}, "running_var", "both be None"),
    "gradient of mean": (
        {"running_mean": torch.zeros(3, requires_grad=True)}, "running_mean", "constant",
    ),
    "no mean": ({"running_mean": None, "training": False}, "running_mean", "required"),
    "not a tensor": ({"weight": [1.0, 1.0, 1.0]}, "weight", "must be a tensor"),
    "variance negative": (
        {"running_var": -torch.ones(3), "training": False}, "running_var", "channel 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_batch_norm_with_bad_argument_raises_error_naming_it(case, grad):
    changed, name, text = REFUSED[case]
    operands = arguments(**changed)
    if grad and isinstance(operands["bias"], torch.Tensor) and operands["bias"].is_floating_point():
        operands["bias"] = operands["bias"].clone().requires_grad_()
    before = operands["running_mean"].clone() if operands["running_mean"] is not None else None
    with pytest.raises(backnorm.ArgumentError, match=text) as raised:
        backnorm.torch.batch_norm(**operands)
    assert raised.value.argument == name
    assert before is None or torch.equal(operands["running_mean"], before)


def test_batch_norm_rejects_weight_on_another_device():
    x, weight = torch.randn(4, 3), torch.ones(3, device="meta")
    with pytest.raises(
        backnorm.torch.TensorValueError, match=r"weight: must be on the device of input"
    ):
        backnorm.torch.batch_norm(x, None, None, weight, None, True)
    # Of shapes alone there is a result.
    y = backnorm.torch.batch_norm(x.to("meta"), None, None, weight, None, True)
    assert y.is_meta
    assert y.shape == x.shape


def test_tensor_on_device_without_kernels_raises():
    from backnorm.options import Options
    from backnorm.torch import checks

    class Elsewhere(torch.Tensor):
        device = torch.device("xpu:0")

    with pytest.raises(backnorm.torch.TensorValueError, match=r"input: is on a device.*revert"):
        checks.check(checks.Operands(torch.randn(4, 3).as_subclass(Elsewhere)), Options())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("residual", "activation"),
    [
        (torch.randn(4, 3, 1), "relu"),
        (torch.randn(4, 3, 5).double(), "relu"),
        ([1.0], "relu"),
        (torch.randn(4, 3, 5), None),
        (torch.randn(4, 3, 5), "silu"),
    ],
    ids=["shape", "type", "list", "no activation", "silu"],
)
def test_residual_unlike_input_or_without_relu_is_rejected(residual, activation, training):
    for grad in (False, True):
        for reproducible in (False, True):
            operands = arguments(training=training)
            operands["input"].requires_grad_(grad)
            before = operands["running_mean"].clone()
            with pytest.raises(backnorm.ArgumentError, match=r"^residual: "):
                backnorm.torch.batch_norm(
                    **operands, activation=activation, residual=residual, reproducible=reproducible
                )
            assert torch.equal(operands["running_mean"], before)


def test_residual_of_other_type_raises_error_with_conversion():
    layer = backnorm.torch.BatchNorm2d(3, activation="relu")
    x = torch.randn(2, 3, 4, 4)
    with pytest.raises(backnorm.ArgumentError, match=r"call residual\.to\(torch\.bfloat16\)$"):
        layer(x.bfloat16(), x)
    assert layer(x.bfloat16(), x.to(torch.bfloat16)).dtype == torch.bfloat16
