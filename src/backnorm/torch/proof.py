"""Prove on a batch that two forms of a model compute the same in training.

The results of a training step are the model's output, the gradients of its parameters for a random
gradient of the output, and its buffers, such as running statistics. They are computed in float64,
so that two right models differ by roundings only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from backnorm.errors import ArgumentValueError
from backnorm.torch.modules import _BatchNorm

# Two tensors are equal if they differ by at most `_RELATIVE` of their own largest element, or by
# `_ABSOLUTE` of the largest element of all tensors of their kind. The second limit is for gradients
# that are exactly zero, such as that of a bias before a normalisation, of which only rounding
# errors are left.
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9

Model = TypeVar("Model", bound=Module)


class Results(NamedTuple):
    """The results of a training step, in float64."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]


def copied(model: Model) -> Model:
    """Return a deep copy of a model, or raise ArgumentValueError."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module's attributes can raise any
        came = f"{type(error).__name__}: {error}"
        raise ArgumentValueError("model", "cannot be copied", came=came) from error


def call(model: Module, batch: Any) -> Any:
    """Return a model's output for an input, for positional arguments or for keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def to_type(values: Any, dtype: torch.dtype) -> Any:
    """Return nested values with copies of all tensors; those of real numbers are of `dtype`."""

    def copied(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return each.to(dtype, copy=True) if each.is_floating_point() else each.clone()

    return tree_map(copied, values)


def vary(model: Module) -> None:
    """Give the layers of a model random weights and biases.

    With the weights of a trained model, an activation may get only positive values, or zeros. It
    would then compute nothing that could be missed.
    """
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        for name, least in ("weight", 0.5), ("bias", -0.5):
            parameter = layer._parameters.get(name) if isinstance(layer, _BatchNorm) else None
            if parameter is not None:
                parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + least)


def results_of(model: Module, batch: Any) -> Results:
    """Return the results of a training step of a copy of a model whose tensors are float64.

    The random numbers of each call are the same.

    Raises
    ------
    ArgumentValueError
        If the step fails.
    """
    model = copied(model).train()
    parameters = [each for each in model.parameters() if each.is_floating_point()]
    cuda = {each.device for each in (*parameters, *model.buffers()) if each.is_cuda}
    try:
        with torch.random.fork_rng(cuda), torch.enable_grad():
            for generator in (
                torch.default_generator,
                *(torch.cuda.default_generators[device.index] for device in cuda),
            ):
                generator.manual_seed(0)
            for each in parameters:
                each.requires_grad_()
            leaves = tree_leaves(call(model, to_type(batch, torch.float64)))
            outputs = [each for each in leaves if isinstance(each, Tensor)]
            differentiable = [each for each in outputs if each.requires_grad]
            if not differentiable:
                raise TypeError("the output of the model has no tensor with a gradient")
            gradients = torch.autograd.grad(
                differentiable, parameters, [torch.randn_like(each) for each in differentiable],
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
    except Exception as error:  # a model can raise any
        raise ArgumentValueError(
            "example",
            "must be a batch on which the model can train in float64",
            came=f"{type(error).__name__}: {error}",
        ) from error
    kinds = outputs, gradients, model.buffers()
    return Results(*([_wide(each.detach()) for each in kind] for kind in kinds))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def agree(found: Results, expected: Results) -> bool:
    """Whether two results are equal except for roundings."""
    return all(map(_agree, found, expected))


def _agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    if [each.shape for each in found] != [each.shape for each in expected]:
        return False
    heights = [float(each.abs().max()) if each.numel() else 0.0 for each in expected]
    return all(
        ((one - other).abs() <= _RELATIVE * height + _ABSOLUTE * max(heights)).all()
        for one, other, height in zip(found, expected, heights, strict=True)
    )
