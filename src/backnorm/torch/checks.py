"""What the tensors of a call may be, and the errors in PyTorch's words.

The operators check what reaches them, once for all calls of the same metadata. So a call on plain
tensors comes here only when it was refused, to be told so in the names of
`torch.nn.functional.batch_norm`; a call that is traced comes here always.

Where PyTorch raises a RuntimeError, the error is a RuntimeError too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError

__all__ = [
    "REFUSALS",
    "TensorTypeError",
    "TensorValueError",
    "UnsupportedTensorError",
    "check",
    "check_device",
    "check_tensor",
    "in_words",
    "not_a_tensor",
    "refuse",
]

#: What reading tensors and the operators raise for tensors that `check` refuses.
REFUSALS = (ArgumentError, AttributeError, TypeError, RuntimeError)

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

#: The operators' names, and PyTorch's.
_NAMES = {
    "x": "input",
    "gamma": "weight",
    "beta": "bias",
    "mean": "running_mean",
    "variance": "running_var",
    "running_variance": "running_var",
    "epsilon": "eps",
}


class TensorValueError(ArgumentValueError, RuntimeError):
    """A tensor of the right type with a shape, value or place that is not accepted."""


class TensorTypeError(ArgumentTypeError, RuntimeError):
    """A tensor of a type, or with an element type, that is not accepted."""


class UnsupportedTensorError(TensorTypeError, NotImplementedError):
    """A tensor with an element type or layout that is not accepted, whatever it is beside."""


def check(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    residual: Tensor | None = None,
) -> None:
    """Raise unless the tensors are ones that batch normalisation takes together.

    Parameters
    ----------
    input, running_mean, running_var, weight, bias, training
        As in `backnorm.torch.batch_norm`.
    residual : Tensor, optional
        As in `backnorm.torch.batch_norm_add_relu`.

    Raises
    ------
    TensorTypeError, TensorValueError
    """
    check_tensor("input", input)
    if input.dim() < 2:
        raise TensorValueError(
            "input",
            "must have a batch axis and a channel axis",
            came=f"shape {tuple(input.shape)}",
            accepted="2 axes or more",
        )
    if residual is not None:
        check_tensor("residual", residual)
        if residual.shape != input.shape or residual.dtype is not input.dtype:
            raise TensorValueError(
                "residual",
                "must have the shape and type of input",
                came=f"shape {tuple(residual.shape)} of {residual.dtype}",
                accepted=f"shape {tuple(input.shape)} of {input.dtype}",
            )
        check_device("residual", residual, "input", input)
    allowed = (input.dtype, torch.float32) if input.dtype.itemsize == 2 else (input.dtype,)
    channels = {
        "running_mean": running_mean,
        "running_var": running_var,
        "weight": weight,
        "bias": bias,
    }
    for name, tensor in channels.items():
        if tensor is not None:
            _check_channels(name, tensor, input, allowed)
        elif name.startswith("running") and not training:
            raise TensorValueError(
                name, "is required where the batch's own statistics are not used (training=False)"
            )
    if (running_mean is None) is not (running_var is None):
        raise TensorValueError(
            "running_mean" if running_mean is None else "running_var",
            "running_mean and running_var must either both be None or neither be None",
        )
    for name, tensor in (("running_mean", running_mean), ("running_var", running_var)):
        if tensor is not None and tensor.requires_grad:
            raise TensorValueError(
                name,
                "is a constant to the gradient, and must not require one",
                hint=f"pass {name}.detach()",
            )


def refuse(error: Exception, arguments: tuple[Any, ...]) -> NoReturn:
    """Raise the error that reading tensors or an operator raised, in PyTorch's names.

    `arguments` are those of `check`.
    """
    check(*arguments)
    if not isinstance(error, ArgumentError) or error.argument not in _NAMES:
        raise error
    raise in_words(error, _NAMES) from error


def in_words(error: ArgumentError, words: Mapping[str, str]) -> ArgumentError:
    """Return an error in other names for the tensors, and of the class of PyTorch's own error."""
    error = error.in_words(words)
    if isinstance(error, RuntimeError):
        return error
    kind = TensorTypeError if isinstance(error, TypeError) else TensorValueError
    parts: dict[str, Any] = error.parts()
    return kind(**parts)


def check_device(name: str, tensor: Tensor, other: str, place: Tensor) -> None:
    """Raise unless a tensor is on the device of another one."""
    if tensor.device != place.device:
        raise TensorValueError(
            name,
            f"must be where {other} is",
            came=f"device {tensor.device}",
            accepted=f"device {place.device}",
        )


def not_a_tensor(name: str, value: object) -> TensorTypeError:
    """Return the error for what is not a tensor."""
    return TensorTypeError(
        name, "must be a tensor", came=type(value).__name__, accepted="torch.Tensor"
    )


def check_tensor(name: str, tensor: object) -> None:
    """Raise unless a tensor is one that batch normalisation takes."""
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
            hint="backnorm.torch.revert(model) gives a model its own layers back",
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
            f"unsupported element type beside an input of {input.dtype}",
            came=tensor.dtype,
            accepted=" or ".join(str(dtype) for dtype in dict.fromkeys(allowed)),
        )
    check_device(name, tensor, "input", input)
