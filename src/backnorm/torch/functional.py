"""Batch normalisation of tensors, as `torch.nn.functional` has it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from backnorm.torch import autograd, checks, kernels, library, moving, state, transforms

__all__ = ["batch_norm"]


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel over a batch: `torch.nn.functional.batch_norm`, by our kernels.

    With M elements per channel::

        training:  y = weight * (input - mean) / sqrt(var + eps) + bias
                   running_mean = (1 - momentum) * running_mean + momentum * mean
                   running_var  = (1 - momentum) * running_var  + momentum * var * M / (M - 1)
        else:      y = weight * (input - running_mean) / sqrt(running_var + eps) + bias

    where mean and (biased) var are those of the batch.

    Parameters
    ----------
    input : Tensor, shape (N, C, ...)
        On the CPU; float64, float32, float16 or bfloat16. Contiguous, channels_last and any other
        tensor that is dense in some order of its axes is read where it is; others are copied.
    running_mean, running_var : Tensor, shape (C,), or None
        Moved in place in training if given; required otherwise. input's type, or float32 beside a
        16-bit input.
    weight, bias : Tensor, shape (C,), optional
        Scale and offset, 1 and 0 if absent; of the same types.
    training : bool
        Whether the statistics are the batch's own.
    momentum : float
        Share of the batch in the running statistics.
    eps : float
        Added to the variance; positive in training, not negative otherwise.

    Returns
    -------
    Tensor
        y, of input's shape and type, and in memory as input is.

    Raises
    ------
    ArgumentValueError
        For eps, and in training for a batch with one value per channel.
    TensorValueError, TensorTypeError
        For tensors of a shape, type or place that is not accepted. Both are RuntimeErrors too, as
        PyTorch's are.
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias):
        tensors = (input, running_mean, running_var, weight, bias)
        settings = {"training": training, "momentum": momentum, "eps": eps}
        return handle_torch_function(batch_norm, tensors, *tensors, **settings)
    arguments = input, running_mean, running_var, weight, bias, training
    if state.watched(input):
        if _is_nothing(input):
            return input.clone()
        checks.check(*arguments)
        checks.check_settings(input, training, momentum, eps)
        return _watched(*arguments, momentum, eps)
    checks.check_settings(input, training, momentum, eps)
    try:
        return _eager(*arguments, momentum, eps)
    except checks.REFUSALS as error:
        if _is_nothing(input):
            return input.clone()
        checks.refuse(error, *arguments)


def _is_nothing(input: Tensor) -> bool:
    """Whether PyTorch returns `input`, which has no axis of channels, because it has no element."""
    return isinstance(input, Tensor) and input.dim() == 1 and not input.numel()


def _eager(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Compute on the tensors' memory, through autograd if a gradient may be asked for."""
    statistics = running_of(input, running_mean, running_var, training)
    wanted = wants_gradient(input, weight, bias)
    if not training:
        assert statistics is not None
        if wanted:
            return autograd.freeze(input, weight, bias, eps, statistics)
        return kernels.inference(input, *statistics, weight, bias, eps)
    running = None if statistics is None else kernels.Running(*statistics, momentum)
    if wanted:
        return autograd.train(input, weight, bias, eps, running)
    return kernels.forward(input, weight, bias, eps, running)[0]


def _watched(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Call operators that the dispatcher knows, or functions that transforms know."""
    transformed = state.transformed()
    if transformed and torch.compiler.is_compiling():
        transforms.allow_in_graph()
    if not training:
        assert running_mean is not None
        assert running_var is not None
        normalise = transforms.inference if transformed else library.batch_norm_inference
        return normalise(input, running_mean, running_var, weight, bias, eps)
    forward = transforms.forward if transformed else library.batch_norm
    y, mean, variance = forward(input, weight, bias, eps)
    moving.move(running_mean, running_var, mean, variance, momentum, input)
    return y


def running_of(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, training: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the running statistics, None in training without any, or raise."""
    if running_mean is None or running_var is None:
        if training and running_mean is running_var:
            return None
    elif not (running_mean.requires_grad or running_var.requires_grad):
        return running_mean, running_var
    checks.check(input, running_mean, running_var, None, None, training)
    raise AssertionError("unreachable")


def wants_gradient(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> bool:
    """Whether autograd may ask for the gradient of one of these."""
    return torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
