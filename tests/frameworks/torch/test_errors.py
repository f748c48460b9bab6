"""What is refused, in PyTorch's names and with PyTorch's classes of error."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import backnorm
import backnorm.torch


def arguments(**changed):
    given = {
        "input": torch.randn(4, 3, 5),
        "running_mean": torch.zeros(3),
        "running_var": torch.ones(3),
        "weight": torch.ones(3),
        "bias": torch.zeros(3),
        "training": True,
    }
    return given | changed


REFUSED = {
    "one value a channel": ({"input": torch.randn(1, 3)}, "input", "more than 1 value per channel"),
    "eps 0": ({"eps": 0.0}, "eps", "eps must be positive during training"),
    "eps negative": ({"eps": -1.0, "training": False}, "eps", "eps must be non-negative"),
    "eps nan": ({"eps": float("nan"), "training": False}, "eps", "eps must be non-negative"),
    "no momentum": ({"momentum": None}, "momentum", "number"),
    "rank 1": ({"input": torch.randn(3)}, "input", "channel axis"),
    "integers": ({"input": torch.ones(4, 3, dtype=torch.int64)}, "input", "int64"),
    "complex": ({"input": torch.ones(4, 3, dtype=torch.complex64)}, "input", "complex64"),
    "float8": ({"input": torch.ones(4, 3).to(torch.float8_e5m2)}, "input", "float8_e5m2"),
    "sparse": ({"input": torch.randn(4, 3).to_sparse()}, "input", "sparse"),
    "mkldnn": ({"input": torch.randn(4, 3).to_mkldnn()}, "input", "mkldnn"),
    "weight too short": ({"weight": torch.ones(2)}, "weight", r"shape \(3,\)"),
    "weight of rank 0": ({"weight": torch.ones(())}, "weight", r"shape \(3,\)"),
    "bias of rank 2": ({"bias": torch.ones(3, 1)}, "bias", r"shape \(3,\)"),
    "bias wider": ({"bias": torch.ones(3).double()}, "bias", "float64"),
    "weight narrower": ({"weight": torch.ones(3).bfloat16()}, "weight", "bfloat16"),
    "integer weight": ({"weight": torch.ones(3).long()}, "weight", "int64"),
    "mean too long": ({"running_mean": torch.zeros(4)}, "running_mean", r"shape \(3,\)"),
    "mean of one": ({"running_mean": torch.zeros(1)}, "running_mean", r"shape \(3,\)"),
    "variance wider": ({"running_var": torch.ones(3).double()}, "running_var", "float64"),
    "integer variance": ({"running_var": torch.ones(3).long()}, "running_var", "int64"),
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
def test_refused(case, grad):
    changed, name, text = REFUSED[case]
    given = arguments(**changed)
    if grad and isinstance(given["bias"], torch.Tensor) and given["bias"].is_floating_point():
        given["bias"] = given["bias"].clone().requires_grad_()
    before = given["running_mean"].clone() if given["running_mean"] is not None else None
    with pytest.raises(backnorm.ArgumentError, match=text) as raised:
        backnorm.torch.batch_norm(**given)
    assert raised.value.argument == name
    assert before is None or torch.equal(given["running_mean"], before)


# PyTorch computes something: NaN, a tensor in MKL-DNN's layout, or from the elements of a matrix.
OURS_ALONE = {"variance negative", "eps nan", "mkldnn", "bias of rank 2"}


def error_of(function, given):
    try:
        function(**given)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("case", sorted(set(REFUSED) - OURS_ALONE))
def test_the_error_is_of_the_class_of_pytorchs(case):
    changed, *_ = REFUSED[case]
    theirs = error_of(functional.batch_norm, arguments(**changed))
    ours = error_of(backnorm.torch.batch_norm, arguments(**changed))
    kinds = ValueError, TypeError, RuntimeError, IndexError
    assert theirs is not None
    for kind in kinds:
        # It may be of more classes: a type that PyTorch calls a RuntimeError is a TypeError too.
        assert isinstance(ours, kind) or not isinstance(theirs, kind), (type(ours), repr(theirs))


def test_other_devices_are_refused_clearly():
    x, weight = torch.randn(4, 3), torch.ones(3, device="meta")
    with pytest.raises(backnorm.torch.TensorValueError, match=r"weight: .*where input is"):
        backnorm.torch.batch_norm(x, None, None, weight, None, True)
    # Of shapes alone there is a result.
    y = backnorm.torch.batch_norm(x.to("meta"), None, None, weight, None, True)
    assert y.is_meta
    assert y.shape == x.shape


def test_a_device_without_kernels():
    from backnorm.torch import checks

    class Elsewhere(torch.Tensor):
        device = torch.device("xpu:0")

    with pytest.raises(backnorm.torch.TensorValueError, match=r"input: is on a device.*revert"):
        checks.check(torch.randn(4, 3).as_subclass(Elsewhere), None, None, None, None, True)


@pytest.mark.parametrize(
    "residual",
    [torch.randn(4, 3, 1), torch.randn(4, 3, 5).double(), None],
    ids=["shape", "type", "none"],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_residual_must_be_like_the_input(residual, training):
    given = arguments(training=training)
    with pytest.raises(backnorm.ArgumentError, match=r"^residual: "):
        backnorm.torch.batch_norm_add_relu(given.pop("input"), residual, **given)
    with pytest.raises(backnorm.ArgumentError, match=r"^weight: "):
        backnorm.torch.batch_norm_relu(**arguments(training=training, weight=torch.ones(2)))
