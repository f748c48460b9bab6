"""Batch normalisation, a residual and ReLU in one pass each way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from backnorm.torch import autograd, checks, functional, kernels, moving, state
from backnorm.torch import library_fused as library

__all__ = ["batch_norm_add_relu", "batch_norm_relu"]


def batch_norm_relu(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return relu(batch_norm(input, ...)), without the normalised values in between.

    For the backward pass of training a bit an element is kept, beside input. With gradients of
    given statistics (training=False), and under `torch.func`, it is computed in two steps.

    Parameters
    ----------
    input, running_mean, running_var, weight, bias, training, momentum, eps
        As in `batch_norm`.

    Returns
    -------
    Tensor
        y, of input's shape and type, and in memory as input is.

    Raises
    ------
    ArgumentValueError, TensorValueError, TensorTypeError
        As in `batch_norm`.
    """
    tensors = input, running_mean, running_var, weight, bias
    if has_torch_function_variadic(*tensors):
        settings = {"training": training, "momentum": momentum, "eps": eps}
        return handle_torch_function(batch_norm_relu, tensors, *tensors, **settings)
    return _rectified(None, *tensors, training, momentum, eps)


def batch_norm_add_relu(
    input: Tensor,
    residual: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return relu(batch_norm(input, ...) + residual), without the values in between.

    Parameters
    ----------
    input, running_mean, running_var, weight, bias, training, momentum, eps
        As in `batch_norm`.
    residual : Tensor, shape (N, C, ...)
        What is added before the ReLU, of input's shape and type.

    Returns
    -------
    Tensor
        y, of input's shape and type, and in memory as input is.

    Raises
    ------
    ArgumentValueError, TensorValueError, TensorTypeError
        As in `batch_norm`.
    """
    if residual is None:
        raise checks.TensorTypeError("residual", "is required", accepted="torch.Tensor")
    tensors = input, residual, running_mean, running_var, weight, bias
    if has_torch_function_variadic(*tensors):
        settings = {"training": training, "momentum": momentum, "eps": eps}
        return handle_torch_function(batch_norm_add_relu, tensors, *tensors, **settings)
    return _rectified(residual, input, *tensors[2:], training, momentum, eps)


def _rectified(
    residual: Tensor | None,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    arguments = input, running_mean, running_var, weight, bias, training
    if state.watched(input):
        checks.check(*arguments, residual)
        checks.check_settings(input, training, momentum, eps)
        run = _watched
        # Transforms know no bits, and no mask comes of given statistics.
        if state.transformed() or (
            not training and functional.wants_gradient(input, weight, bias, residual)
        ):
            run = _composed
        return run(*arguments, residual, momentum, eps)
    checks.check_settings(input, training, momentum, eps)
    try:
        wanted = functional.wants_gradient(input, weight, bias, residual)
        if wanted and not training:
            return _composed(*arguments, residual, momentum, eps)
        return _eager(*arguments, residual, momentum, eps, wanted)
    except checks.REFUSALS as error:
        checks.refuse(error, *arguments, residual)


def _composed(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    residual: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Compute in steps what has a derivative of every kind."""
    arguments = input, running_mean, running_var, weight, bias, training
    checks.check(*arguments, residual)
    y = functional.batch_norm(*arguments, momentum, eps)
    return torch.relu(y if residual is None else y + residual)


def _eager(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    residual: Tensor | None,
    momentum: float,
    eps: float,
    wanted: bool,
) -> Tensor:
    """Compute on the tensors' memory, through autograd if a gradient may be asked for."""
    statistics = functional.running_of(input, running_mean, running_var, training)
    if not training:
        assert statistics is not None
        return kernels.relu_inference(input, residual, *statistics, weight, bias, eps)
    running = None if statistics is None else kernels.Running(*statistics, momentum)
    if wanted:
        return autograd.rectify(input, weight, bias, residual, eps, running)
    return kernels.relu_forward(input, residual, weight, bias, eps, running)[0]


def _watched(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    residual: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Call operators that the dispatcher knows."""
    if not training:
        assert running_mean is not None
        assert running_var is not None
        return library.batch_norm_relu_inference(
            input, residual, running_mean, running_var, weight, bias, eps
        )
    y, mean, variance, _ = library.batch_norm_relu(input, residual, weight, bias, eps)
    moving.move(running_mean, running_var, mean, variance, momentum, input)
    return y
