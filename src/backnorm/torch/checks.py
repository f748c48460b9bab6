"""Checks of the tensors of a call, and errors with PyTorch's argument names.

The operations of `engines` check their operands, once for all calls with the same metadata. An
eager call runs `check` only after an operation has raised, so that the error has the argument names
of `torch.nn.functional.batch_norm`. A call through the dispatcher runs `check` before the
operation.

Where PyTorch raises a RuntimeError for a mistake, this module raises a RuntimeError, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from backnorm.activations import Activation
from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from backnorm.options import Options
from backnorm.problem import residual_alone

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Maps argument names of backnorm's operations to PyTorch's.
_NAMES = {
    "gamma": "weight", "beta": "bias", "epsilon": "eps",
    "ddgamma": "ddweight", "ddbeta": "ddbias",
}  # fmt: skip
# The same for `batch_norm`, whose mean and variance are running statistics.
_NAMES_OF_BATCH_NORM = _NAMES | {
    "x": "input", "mean": "running_mean",
    "variance": "running_var", "running_variance": "running_var",
}  # fmt: skip


class TensorValueError(ArgumentValueError, RuntimeError):
    """A tensor of the right type with a shape, value or device that is not accepted."""


class TensorTypeError(ArgumentTypeError, RuntimeError):
    """An argument that is not a tensor, or a tensor whose element type is not accepted."""


class UnsupportedTensorError(TensorTypeError, NotImplementedError):
    """A tensor with an element type or layout that is not accepted in any call."""


class Operands(NamedTuple):
    """The tensors of a call of `batch_norm`, by PyTorch's names."""

    input: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None


def check(operands: Operands, options: Options) -> None:
    """Raise unless batch normalisation accepts these tensors together.

    Raises
    ------
    TensorTypeError, TensorValueError
    """
    input, residual, *others = operands
    check_tensor("input", input)
    if input.dim() < 2:
        raise TensorValueError(
            "input",
            "must have a batch axis and a channel axis",
            came=f"shape {tuple(input.shape)}",
            accepted="2 axes or more",
        )
    check_residual(residual, input, options.activation)
    allowed = (input.dtype, torch.float32) if input.dtype.itemsize == 2 else (input.dtype,)
    channels = dict(zip(Operands._fields[2:], others, strict=True))
    # Nested tensors are left out here, because they have no shape; `_check_channels` rejects them.
    tensors = [t for t in channels.values() if isinstance(t, Tensor) and not t.is_nested]
    alike = (t.shape == tensors[0].shape and t.dtype == tensors[0].dtype for t in tensors)
    if len(tensors) > 1 and all(alike):
        _check_input(input, tensors[0], allowed)
    for name, tensor in channels.items():
        if tensor is not None:
            _check_channels(name, tensor, input, allowed)
    check_statistics(operands, options.training)


def check_statistics(operands: Operands, training: bool) -> None:
    """Raise if one of the running statistics is absent or requires a gradient.

    In training, both may be absent.
    """
    *_, running_mean, running_var = operands
    if training and running_mean is None and running_var is None:
        return
    for name, tensor in (("running_mean", running_mean), ("running_var", running_var)):
        if tensor is None:
            raise TensorValueError(
                name,
                "running_mean and running_var must either both be None or neither be None"
                if training
                else "is required with training=False",
            )
        # A value that is not a tensor passes here; the checks of shapes and types report it.
        if getattr(tensor, "requires_grad", False):
            raise TensorValueError(
                name,
                "must not require a gradient, because it is treated as a constant",
                hint=f"pass {name}.detach()",
            )


def check_residual(residual: Tensor | None, input: Tensor, activation: Activation | None) -> None:
    """Raise if there is a residual that cannot be added to the normalised input.

    A residual needs a ReLU after it, and must have the shape, the type and the device of `input`.
    """
    if residual is None:
        return
    if activation is None or activation.name != "relu":
        raise residual_alone("forward")
    check_tensor("residual", residual)
    if residual.shape != input.shape or residual.dtype is not input.dtype:
        raise TensorValueError(
            "residual",
            "must have the shape and type of input",
            came=f"shape {tuple(residual.shape)} of {residual.dtype}",
            accepted=f"shape {tuple(input.shape)} of {input.dtype}",
            hint=f"call residual.to({input.dtype})" if residual.shape == input.shape else None,
        )
    check_device("residual", residual, "input", input)


def check_batch(input: Tensor) -> None:
    """Raise for a batch with one value per channel, as PyTorch does."""
    if input.is_nested:
        check_tensor("input", input)
    shape = input.shape
    # In most calls the number of elements differs from the number of channels, so the first two
    # comparisons are enough. The product of the other sizes takes longer to compute than these
    # comparisons, so it comes last.
    if len(shape) > 1 and input.numel() == shape[1] and math.prod(shape[2:], start=shape[0]) == 1:
        raise ArgumentValueError(
            "input",
            "Expected more than 1 value per channel when training",
            came=f"input size {tuple(shape)}",
            hint="in a model, call eval() to use the running statistics",
        )


def refusal(error: ArgumentError, operands: Operands, options: Options) -> ArgumentError:
    """Return an error that an operation raised, with PyTorch's names of arguments. If `check` finds
    an error in the same arguments, raise that error instead.
    """
    check(operands, options)
    names = _NAMES_OF_BATCH_NORM
    return renamed(error, names) if error.argument in names else error


def renamed(error: ArgumentError, names: Mapping[str, str] = _NAMES) -> ArgumentError:
    """Return the error as a RuntimeError, like PyTorch's, with PyTorch's names of arguments."""
    error = error.in_words(names)
    if isinstance(error, RuntimeError):
        return error
    kind = TensorTypeError if isinstance(error, TypeError) else TensorValueError
    parts: dict[str, Any] = error.parts()
    return kind(**parts)


def check_device(name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """Raise unless `tensor` is on the same device as `reference`."""
    if tensor.device != reference.device:
        raise TensorValueError(
            name,
            f"must be on the device of {reference_name}",
            came=f"device {tensor.device}",
            accepted=f"device {reference.device}",
        )


def not_a_tensor(name: str, value: object) -> TensorTypeError:
    """Return the error for an argument that is not a tensor."""
    return TensorTypeError(
        name, "must be a tensor", came=type(value).__name__, accepted="torch.Tensor"
    )


def check_tensor(name: str, tensor: object) -> Tensor:
    """Return a tensor, or raise if batch normalisation does not accept it."""
    if not isinstance(tensor, Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.is_nested:
        raise UnsupportedTensorError(
            name, "unsupported layout", came="a nested tensor", accepted="torch.strided"
        )
    if isinstance(tensor, MaskedTensor):
        raise UnsupportedTensorError(
            name,
            "masked tensors are not supported: the mask would be lost",
            accepted="torch.Tensor",
            hint=f"pass {name}.to_tensor(value)",
        )
    if tensor.dtype not in _TYPES:
        raise UnsupportedTensorError(
            name,
            "unsupported element type",
            came=tensor.dtype,
            accepted=", ".join(str(dtype) for dtype in _TYPES),
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedTensorError(
            name,
            "unsupported layout",
            came=tensor.layout,
            accepted="torch.strided",
            hint="convert it first, e.g. with .to_dense()",
        )
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise TensorValueError(
            name,
            "is on a device that backnorm has no kernels for",
            came=f"device {tensor.device}",
            accepted="cpu or cuda",
            hint="backnorm.torch.revert(model) restores a model's original layers",
        )
    return tensor


def _check_input(input: Tensor, parameter: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise unless the input fits the shape and type that all per-channel tensors have."""
    shape, dtype = parameter.shape, parameter.dtype
    if dtype not in allowed and dtype.is_floating_point:
        raise TensorTypeError(
            "input",
            "must have the element type of the statistics and parameters",
            came=input.dtype,
            accepted=f"{dtype}" + ", or 16 bits" * (dtype is torch.float32),
            hint=f"call input.to({dtype})",
        )
    if len(shape) == 1 and shape[0] != input.shape[1]:
        raise TensorValueError(
            "input",
            "must have as many channels as the statistics and parameters",
            came=f"{input.shape[1]} channels on axis 1, shape {tuple(input.shape)}",
            accepted=f"{shape[0]} channels",
        )


def _check_channels(
    name: str, tensor: Tensor, input: Tensor, allowed: tuple[torch.dtype, ...]
) -> None:
    check_tensor(name, tensor)
    if tensor.shape != (input.shape[1],):
        raise TensorValueError(
            name,
            "must hold one value per channel of input",
            came=f"shape {tuple(tensor.shape)}",
            accepted=f"shape ({input.shape[1]},)",
        )
    if tensor.dtype not in allowed:
        raise TensorTypeError(
            name,
            f"unsupported element type for an input of {input.dtype}",
            came=tensor.dtype,
            accepted=" or ".join(str(dtype) for dtype in dict.fromkeys(allowed)),
        )
    check_device(name, tensor, "input", input)
