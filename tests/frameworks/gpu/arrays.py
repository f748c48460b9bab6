"""The GPU's operators as functions of NumPy arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from backnorm.activations import RELU, Activation
from backnorm.executable import compute
from backnorm.layout import mask_size
from backnorm.options import Options
from backnorm.results import Gradients, GradientsWithResidual, Normalized, NormalizedWithMask
from backnorm.torch import gpu
from backnorm.torch.memory import array_of, tensor_of
from tests.support import relu_battery

from ..interpreter import DEVICE


def tensor(array, data_format="NCX"):
    """Return a tensor on a copy of an array, with its channels second and its memory as it was."""
    if array is None:
        return None
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    copy = array.transpose(order).copy(order="C").transpose(np.argsort(order))
    # 16-bit types reach PyTorch as integers; a transposed view is no problem to that.
    value = tensor_of(copy).to(DEVICE)
    return value.movedim(-1, 1) if data_format == "NXC" and value.dim() > 1 else value


def array(value, data_format="NCX"):
    """Undo `tensor`."""
    if value is None:
        return None
    value = value.cpu()
    return array_of(value.movedim(1, -1) if data_format == "NXC" and value.dim() > 1 else value)


def backward(*inputs, arithmetic=None, **options):
    gradients = WithRelu(arithmetic).backward(*inputs, mask=None, **options)
    return Gradients(*gradients[:3])


def forward(*inputs, arithmetic=None, **options):
    return Normalized(*WithRelu(arithmetic).forward(*inputs, activation=None, **options)[:3])


def inference(*inputs, arithmetic=None, **options):
    return WithRelu(arithmetic).inference(*inputs, activation=None, **options)


class WithRelu:
    """The operators with a ReLU, as `tests.support.relu_battery` calls them."""

    def __init__(self, arithmetic=None):
        self.arithmetic = arithmetic

    def forward(
        self, x, gamma=None, beta=None, *,
        activation=RELU, residual=None, epsilon, data_format="NCX",
    ):  # fmt: skip
        data = tensor(x, data_format), tensor(residual, data_format)
        options = Options(epsilon, activation=activation, arithmetic=self.arithmetic)
        y, mean, variance, mask = compute(
            "forward", (*data, tensor(gamma), tensor(beta), None, None), options, arrays=gpu.TENSORS
        )
        return NormalizedWithMask(array(y, data_format), array(mean), array(variance), array(mask))

    def inference(
        self,
        x,
        mean,
        variance,
        gamma=None,
        beta=None,
        *,
        activation=RELU,
        residual=None,
        epsilon,
        data_format="NCX",
    ):
        data = tensor(x, data_format), tensor(residual, data_format)
        channels = map(tensor, (mean, variance, gamma, beta))
        options = Options(epsilon, activation=activation, arithmetic=self.arithmetic)
        (y,) = compute("inference", (*data, *channels), options, arrays=gpu.TENSORS)
        return array(y, data_format)

    def backward(
        self,
        x,
        dy,
        mean,
        variance,
        gamma=None,
        *,
        mask,
        residual=False,
        epsilon,
        data_format="NCX",
        training=True,
    ):
        assert mask is None or mask.size == mask_size(x.size)
        operands = (
            tensor(x, data_format),
            tensor(dy, data_format),
            None if mask is None else torch.from_numpy(mask.copy()).to(DEVICE),
            *map(tensor, (mean, variance, gamma)),
        )
        options = Options(epsilon, training=training, residual=residual, arithmetic=self.arithmetic)
        dx, dgamma, dbeta, dresidual = compute("backward", operands, options, arrays=gpu.TENSORS)
        return GradientsWithResidual(
            array(dx, data_format),
            array(dgamma),
            array(dbeta),
            array(dresidual, data_format),
        )


def relu_cases(arithmetic=None):
    """Yield the battery of ReLUs, and again with a ceiling."""
    yield from relu_battery.relu_cases(arithmetic=arithmetic)
    activation = Activation("relu", 1.0)
    for case in relu_battery.relu_cases(arithmetic=arithmetic, activation=activation):
        yield dataclasses.replace(case, name=f"ceiling-{case.name}")
