"""Batch normalisation of tensors, as `torch.nn.functional` has it, alone or with a ReLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.overrides import handle_torch_function, has_torch_function_variadic

from backnorm.activations import MASKLESS, check_activation
from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentError
from backnorm.scalars import check_flag
from backnorm.torch import (
    arithmetics,
    autograd,
    checks,
    empty,
    events,
    kernels,
    lowering,
    moving,
    operations,
    settings,
    sharding,
    state,
    synchronised,
    transforms,
)
from backnorm.torch.activations import activated
from backnorm.torch.classes import PLAIN, as_plain, asked, is_opaque
from backnorm.torch.memory import check_before_pytorch
from backnorm.torch.rectifiers import rectified, settled
from backnorm.torch.tools import unscriptable

__all__ = ["batch_norm", "batch_norm_activation", "batch_norm_add_relu", "batch_norm_relu"]

_Optional: TypeAlias = Tensor | None

# input, running_mean, running_var, weight, bias, training and residual, as `checks.check` has them.
_NAMES = "input", "running_mean", "running_var", "weight", "bias", "training", "residual"
_Arguments: TypeAlias = tuple[Tensor, _Optional, _Optional, _Optional, _Optional, bool, _Optional]


@unscriptable
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
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
        Updated in place in training if given; required otherwise. input's type, or float32 beside a
        16-bit input.
    weight, bias : Tensor, shape (C,), optional
        Scale and offset, 1 and 0 if absent; of the same types.
    training : bool
        Whether the statistics are the batch's own.
    momentum : float
        Share of the batch in the running statistics.
    eps : float
        Added to the variance; positive in training, not negative otherwise.
    arithmetic : {"float32", "float64"}, optional
        What elements are computed in, here and in the backward pass; the second order is computed
        in float64. Without it what `backnorm.arithmetic` says when this is called.
    reproducible : bool
        Whether, in training, y, statistics and gradients have the same bits in every layout and
        however elements are ordered within a channel: sums are then added up as integers, which
        takes longer. There is no second derivative.

    Returns
    -------
    Tensor
        y, of input's shape and type, and in memory as input is.

    Raises
    ------
    ArgumentValueError
        For eps, for an arithmetic that the elements have not, and in training for a batch with one
        value per channel.
    TensorValueError, TensorTypeError
        For tensors of a shape, type or place that is not accepted. Both are RuntimeErrors too, as
        PyTorch's are.
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias):
        tensors = input, running_mean, running_var, weight, bias
        how = training, momentum, eps, arithmetic, reproducible
        return _overridden(batch_norm, tensors, *how)
    arguments = input, running_mean, running_var, weight, bias, training, None
    return _normalise(arguments, momentum, eps, False, arithmetic, reproducible)


@unscriptable
def batch_norm_relu(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    ceiling: float | None = None,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> Tensor:
    """Return relu(batch_norm(input, ...)), without the normalised values in between.

    With a ceiling it is min(that, ceiling): with 6.0, relu6. For the backward pass of training a
    bit an element is kept, beside input. With gradients of given statistics (training=False), and
    under `torch.func`, it is computed in two steps.

    Parameters
    ----------
    input, running_mean, running_var, weight, bias, training, momentum, eps
    ceiling : float, optional
        What y is at most, more than 0; rounded to input's type.
    arithmetic, reproducible
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
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias):
        tensors = input, running_mean, running_var, weight, bias
        how = training, momentum, eps, arithmetic, reproducible, ceiling
        return _overridden(batch_norm_relu, tensors, *how)
    arguments = input, running_mean, running_var, weight, bias, training, None
    return _normalise(arguments, momentum, eps, True, arithmetic, reproducible, ceiling)


@unscriptable
def batch_norm_activation(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> Tensor:
    """Return activation(batch_norm(input, ...)), without keeping the normalised values.

    The backward pass of training computes them again from input and the batch's mean and variance,
    as those are kept (float32 has them rounded). On the CPU kernels compute the activation with
    them; with gradients of given statistics (training=False), with `reproducible`, and under
    `torch.func` and `torch.compile`, it is two steps.

    Parameters
    ----------
    input, running_mean, running_var, weight, bias, training, momentum, eps
    activation : {"silu", "hardswish"}
        `torch.nn.functional.silu` or `hardswish`, whose elements and derivatives these are.
    arithmetic, reproducible
        As in `batch_norm`.

    Returns
    -------
    Tensor
        y, of input's shape and type, and in memory as input is.

    Raises
    ------
    ArgumentValueError
        As in `batch_norm`, and for another activation.
    TensorValueError, TensorTypeError
        As in `batch_norm`.
    """
    tensors = input, running_mean, running_var, weight, bias
    if has_torch_function_variadic(*tensors):
        how = training, momentum, eps, arithmetic, reproducible
        return _overridden(batch_norm_activation, tensors, *how, activation=activation)
    hint = "for a ReLU there is batch_norm_relu"
    checked = check_activation(activation, accepted=MASKLESS, required=True, hint=hint)
    assert checked is not None
    activation = checked.name
    watched = isinstance(input, Tensor) and state.watched(input)
    if not watched and type(training) is bool and reproducible is False:
        y = _activated_at_once(tensors, training, momentum, eps, activation, arithmetic)
        if y is not None:
            return y
    y = _normalise((*tensors, training, None), momentum, eps, False, arithmetic, reproducible)
    if watched or not y.requires_grad:
        return activated(y, activation, in_place=not watched)
    return autograd.activate(y, activation)


def _activated_at_once(
    tensors: tuple[Any, ...],
    training: bool,
    momentum: float,
    eps: float,
    activation: str,
    arithmetic: Arithmetic | None,
) -> Tensor | None:
    """Compute by kernels with the activation; None if that cannot be."""
    input, running_mean, running_var, weight, bias = tensors
    try:
        wanted = _wants_gradient(input, weight, bias, None)
        if wanted and not training:
            return None
        _, momentum, eps = settings.read(training, momentum, eps)
        settings.check_settings(input, training, eps)
        computed_in = arithmetics.decided(input.dtype, arithmetic)
        statistics = _statistics_of(input, running_mean, running_var, training)
        how = activation, computed_in
        if training:
            running = None if statistics is None else (*statistics, momentum)
            if wanted:
                return autograd.train_activated(input, None, weight, bias, eps, running, *how)
            forward = kernels.forward_activated
            if profiler._is_profiler_enabled:
                forward = events.shown(forward, "batch_norm_activation")
            return forward(input, weight, bias, eps, running, *how)[0]
        assert statistics is not None
        inference = kernels.inference_activated
        if profiler._is_profiler_enabled:
            inference = events.shown(inference, "batch_norm_activation_inference")
        return inference(input, weight, bias, *statistics, eps, *how)
    except (*checks.REFUSALS, ArgumentError):
        # In two steps, which know more tensors, or say what is wrong.
        return None


@unscriptable
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
    *,
    ceiling: float | None = None,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> Tensor:
    """Return relu(batch_norm(input, ...) + residual), without the values in between.

    Parameters
    ----------
    input, running_mean, running_var, weight, bias, training, momentum, eps
    ceiling, arithmetic, reproducible
        As in `batch_norm_relu`.
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
        raise checks.not_a_tensor("residual", residual)
    if has_torch_function_variadic(input, residual, running_mean, running_var, weight, bias):
        tensors = input, residual, running_mean, running_var, weight, bias
        how = training, momentum, eps, arithmetic, reproducible, ceiling
        return _overridden(batch_norm_add_relu, tensors, *how)
    arguments = input, running_mean, running_var, weight, bias, training, residual
    return _normalise(arguments, momentum, eps, True, arithmetic, reproducible, ceiling)


def _overridden(
    function: Callable[..., Tensor],
    tensors: tuple[Tensor | None, ...],
    training: bool,
    momentum: float,
    eps: float,
    arithmetic: Arithmetic | None,
    reproducible: bool,
    ceiling: float | None = None,
    activation: str | None = None,
) -> Tensor:
    """Call what a class of tensors has in the place of one of the functions above."""
    options: dict[str, Any] = {"training": training, "momentum": momentum, "eps": eps}
    if arithmetic is not None:
        # PyTorch's own function, which a class may call in our place, has no such argument.
        options["arithmetic"] = arithmetic
    if reproducible is not False:
        options["reproducible"] = reproducible
    if ceiling is not None:
        options["ceiling"] = ceiling
    if activation is not None:
        options["activation"] = activation
    result: Tensor = handle_torch_function(function, tensors, *tensors, **options)
    return result


def _normalise(
    arguments: _Arguments,
    momentum: float,
    eps: float,
    relu: bool,
    arithmetic: Arithmetic | None,
    reproducible: bool = False,
    ceiling: float | None = None,
) -> Tensor:
    """Compute on the tensors' memory, through autograd if a gradient may be asked for.

    Where the operators are watched it is `_watched` that computes.
    """
    input, running_mean, running_var, weight, bias, training, residual = arguments
    if not (type(training) is bool and type(momentum) is float and type(eps) is float):
        training, momentum, eps = settings.read(training, momentum, eps)
        arguments = (*arguments[:5], training, residual)
    if ceiling is not None and isinstance(input, Tensor):
        ceiling = settled(ceiling, input.dtype)
    if reproducible is not False and check_flag("reproducible", reproducible) and training:
        settings.check_settings(input, training, eps)
        return synchronised.batch_norm(
            input, residual, running_mean, running_var, weight, bias, momentum, eps,
            relu=relu, ceiling=ceiling, arithmetic=arithmetic, reproducible=True,
            group=None, layer="",
        )  # fmt: skip
    if state.watched(input):
        return _by_operators(arguments, momentum, eps, relu, ceiling, arithmetic)
    settings.check_settings(input, training, eps)
    computed_in = arithmetics.decided(input.dtype, arithmetic)
    try:
        wanted = _wants_gradient(input, weight, bias, residual)
        statistics = _statistics_of(input, running_mean, running_var, training)
        if training:
            running = None if statistics is None else (*statistics, momentum)
            if wanted:
                train = autograd.train
                if relu:
                    train = autograd.train_relu if residual is None else autograd.train_add_relu
                return train(
                    input, residual, weight, bias, eps, running, relu, ceiling, computed_in
                )
            forward = kernels.forward
            if profiler._is_profiler_enabled:
                forward = events.shown(forward, events.name_of(relu, residual, training))
            given = input, residual, weight, bias, eps, running
            return forward(*given, relu, ceiling, computed_in)[0]
        assert statistics is not None
        if not wanted:
            inference = kernels.inference
            if profiler._is_profiler_enabled:
                inference = events.shown(inference, events.name_of(relu, residual, training))
            given = input, residual, weight, bias, *statistics
            return inference(*given, eps, relu, ceiling, computed_in)
        if residual is not None:
            if not _are_memory(arguments):
                return _by_operators(arguments, momentum, eps, relu, ceiling, arithmetic)
            # The addition would take others.
            checks.check(*arguments)
        y = autograd.freeze(input, None, weight, bias, eps, *statistics, computed_in)
        return _add_and_relu(y, residual, ceiling, autograd.rectify) if relu else y
    except checks.REFUSALS as error:
        if any(isinstance(each, Tensor) and is_opaque(each) for each in arguments):
            return _by_operators(arguments, momentum, eps, relu, ceiling, arithmetic)
        nothing = empty.result(arguments, relu, ceiling)
        if nothing is not None:
            return nothing
        checks.refuse(error, arguments)


def _by_operators(
    arguments: _Arguments,
    momentum: float,
    eps: float,
    relu: bool,
    ceiling: float | None,
    arithmetic: Arithmetic | None,
) -> Tensor:
    """Compute where something watches the operators, or tensors are no memory."""
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        plain: Any = tuple(as_plain(each) for each in arguments)
        if any(one is not other for one, other in zip(plain, arguments, strict=True)):
            # What a class that is memory says of itself is not asked.
            return _normalise(plain, momentum, eps, relu, arithmetic, ceiling=ceiling)
    input, *_, training, _ = arguments
    try:
        checks.check(*arguments)
    except ArgumentError:
        nothing = empty.result(arguments, relu, ceiling)
        if nothing is None:
            raise
        return nothing
    settings.check_settings(input, training, eps)
    named = {} if is_compiling else dict(zip(_NAMES, arguments, strict=True))
    computed_in = arithmetics.of_call(input.dtype, arithmetic)
    y: Tensor = asked(_watched, arguments, momentum, eps, relu, ceiling, computed_in, **named)
    return y


def _are_memory(arguments: _Arguments) -> bool:
    """Whether what is a tensor is PyTorch's own, in memory."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    return all(type(each) in PLAIN and not is_opaque(each) for each in tensors)


def _watched(
    arguments: _Arguments,
    momentum: float,
    eps: float,
    relu: bool,
    ceiling: float | None,
    arithmetic: Arithmetic | None,
) -> Tensor:
    """Call operators that the dispatcher knows, or functions that transforms know."""
    input, running_mean, running_var, weight, bias, training, residual = arguments
    deployed = not training and arithmetic is None and state.exporting()
    if state.exporting_to_onnx() or (deployed and _share_a_type(*arguments[1:5])):
        # Tools that read the program know only PyTorch's operators.
        y = torch.nn.functional.batch_norm(*arguments[:6], momentum, eps)
        return _add_and_relu(y, residual, ceiling) if relu else y
    if torch.compiler.is_compiling():
        lowering.register()
    transformed = state.transformed()
    # Forward mode has no rule of the ReLU. A residual may be sharded otherwise than y.
    if relu and (transformed or sharding.is_distributed(input)):
        y = _watched((*arguments[:6], None), momentum, eps, False, None, arithmetic)
        return _add_and_relu(y, residual, ceiling)
    if transformed and torch.compiler.is_compiling():
        transforms.allow_in_graph()
    if not training:
        assert running_mean is not None
        assert running_var is not None
        if transformed:
            given = input, running_mean, running_var, weight, bias
            return transforms.inference(*given, eps, arithmetic)
        normalised: Tensor = operations.batch_norm_inference(
            input, residual, weight, bias, running_mean, running_var, eps, relu, arithmetic,
            ceiling,
        )  # fmt: skip
        return normalised
    if transformed:
        y, mean, variance = transforms.forward(input, weight, bias, eps, arithmetic)
    else:
        y, mean, variance = operations.batch_norm(
            input, residual, weight, bias, eps, relu, arithmetic, ceiling
        )
    moving.move(running_mean, running_var, mean, variance, momentum, input)
    return y


def _share_a_type(*parameters: Tensor | None) -> bool:
    """Whether parameters and statistics have one element type, as PyTorch's operator requires."""
    return len({each.dtype for each in parameters if each is not None}) == 1


def _add_and_relu(
    y: Tensor,
    residual: Tensor | None,
    ceiling: float | None,
    relu: Callable[[Tensor, float | None], Tensor] = rectified,
) -> Tensor:
    """Add and apply the ReLU by PyTorch's operators, which have derivatives of every kind."""
    check_before_pytorch(residual=residual)
    return relu(y if residual is None else y + residual, ceiling)


def _statistics_of(
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


def _wants_gradient(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> bool:
    """Whether autograd may ask for the gradient of one of these."""
    return torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
