"""The operators on the memory of tensors: the only place that calls them.

Nothing here knows autograd. Every function takes CPU tensors of strided layout, reads their memory
where it is, and returns new tensors that lie in memory as `x` does (`torch.empty_like(x)`: the
same strides, if `x` is dense in some order of its axes). Per-channel tensors are of x's type, or
float32 beside a 16-bit x; where they are of 16 bits they are widened, so that the statistics keep
the digits of float32.

Calls that came before go straight to the kernels: see `steps`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from backnorm.errors import ArgumentValueError
from backnorm.execute import planned
from backnorm.layout import mask_size
from backnorm.problem import (
    backward_problem,
    check_like,
    check_mask,
    forward_problem,
    inference_problem,
    rectified,
    variance_error,
)
from backnorm.second_order import batch_norm_double_backward
from backnorm.threads import get_num_threads
from backnorm.torch.memory import array_of, as_type, dense, empty_like, laid_out_as, plain, wide
from backnorm.torch.steps import Step, address, facts, keep, known

__all__ = [
    "Running",
    "backward",
    "double_backward",
    "forward",
    "inference",
    "mask_size",
    "relu_backward",
    "relu_forward",
    "relu_inference",
    "statistics_type",
    "trained",
    "unpack_mask",
    "update_running",
]


class Running(NamedTuple):
    """Running statistics, and the share of a batch that they move by."""

    mean: Tensor
    variance: Tensor
    momentum: float


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and biased variance of the batch, of `statistics_type(x.dtype)`.

    Running statistics move towards those of the batch, unless it is empty; the variance goes in
    unbiased. Autograd is not told, as in PyTorch: a graph that needs the values of before has kept
    them.
    """
    return trained(x, None, weight, bias, eps, running, rectifier=False)[:3]


def relu_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return relu(normalised x + residual), mean and variance, and a mask of its positive elements.

    The mask has a bit an element in x's order in memory, and `mask_size(x.numel())` bytes.
    """
    y, mean, variance, mask, _ = trained(x, residual, weight, bias, eps, running, rectifier=True)
    assert mask is not None
    return y, mean, variance, mask


def inference(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return y, normalised with given statistics."""
    return _inference(x, None, mean, variance, weight, bias, eps, rectifier=False)


def relu_inference(
    x: Tensor,
    residual: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return relu(normalised x + residual), with given statistics."""
    return _inference(x, residual, mean, variance, weight, bias, eps, rectifier=True)


def backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    step: Step | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, and of weight and bias, the last two of weight's type.

    `step` is what `trained` returned, if that was the forward pass.
    """
    return _backward(x, dy, None, mean, variance, weight, eps, training, sided=False, step=step)[:3]


def relu_backward(
    x: Tensor,
    dy: Tensor,
    mask: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    has_residual: bool,
    step: Step | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight, bias and residual, in training: see `backward`."""
    return _backward(x, dy, mask, mean, variance, weight, eps, True, sided=has_residual, step=step)


def double_backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    ddx: Tensor | None,
    ddweight: Tensor | None,
    ddbias: Tensor | None,
    eps: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given those of what `backward` returns."""
    x = dense(x)
    gx, gdy, gweight = batch_norm_double_backward(
        array_of(x),
        array_of(dy),
        _channels(mean, x),
        _channels(variance, x),
        _channels(weight, x),
        ddx=None if ddx is None else array_of(ddx),
        ddgamma=_channels(ddweight, x),
        ddbeta=_channels(ddbias, x),
        epsilon=eps,
        training=training,
    )
    return laid_out_as(gx, x), laid_out_as(gdy, x), as_type(weight, torch.from_numpy(gweight))


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask of `relu_forward` as booleans that lie as x does."""
    x = dense(x)
    bits = np.unpackbits(mask.numpy(), count=x.numel(), bitorder="little").view(np.bool_)
    return torch.from_numpy(bits).as_strided(x.shape, x.stride())


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    count: int,
) -> None:
    """Move the running statistics towards those of a batch of `count` elements a channel.

    In float64, rounded once, as `forward` does.
    """
    _move(running_mean, mean, momentum, momentum)
    _move(running_var, variance, momentum, momentum * count / (count - 1))


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the mean and variance of an x of `dtype`."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _channels(tensor: Tensor | None, x: Tensor) -> Any:
    """Return a per-channel tensor as an array that the operators take, or None."""
    tensor = wide(tensor, x)
    return None if tensor is None else tensor.detach().numpy()


def _move(running: Tensor, value: Tensor, momentum: float, share: float) -> None:
    target = array_of(running)
    moved = np.multiply(value.detach().numpy(), share, dtype=np.float64)
    moved += np.multiply(target, 1.0 - momentum, dtype=np.float64)
    target[...] = moved


def trained(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None,
    *,
    rectifier: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Step]:
    """Return what `forward` or `relu_forward` returns, and a step for the backward pass."""
    own, of_weight = facts(x), facts(weight)
    key = (
        "forward",
        rectifier,
        plain(x) and (residual is None or plain(residual)),
        own,
        facts(residual),
        of_weight,
        facts(bias),
        None if running is None else (facts(running.mean), facts(running.variance)),
        eps,
        get_num_threads(),
    )
    step = known.get(key)
    late = None
    if step is None:
        given = x, residual, weight, bias, running
        x, weight, bias = dense(x), wide(weight, x), wide(bias, x)
        if residual is not None:
            residual = _beside("residual", residual, x)
        array = array_of(x)
        problem = forward_problem(
            array, _channels(weight, x), _channels(bias, x), epsilon=eps, data_format="NCX"
        )
        if rectifier:
            problem = rectified(problem, sided=residual is not None)
        step = Step(planned(problem, array).launch.complete)
        if running is not None and not _follows(running, x):
            late, running = running, None
        if keep(key, step, given, (x, residual, weight, bias, running)):
            step.x, step.weight = own, of_weight
    y = empty_like(x)
    dtype = statistics_type(x.dtype)
    channels = x.shape[1]
    mean, variance = torch.empty(channels, dtype=dtype), torch.empty(channels, dtype=dtype)
    mask = torch.empty(mask_size(x.numel()), dtype=torch.uint8) if rectifier else None
    moves = running is not None and x.numel() > 0
    refused = step.stage(
        x.data_ptr(),
        0,
        y.data_ptr(),
        address(residual),
        address(mask),
        0,
        0,
        address(weight),
        address(bias),
        mean.data_ptr(),
        variance.data_ptr(),
        running.mean.data_ptr() if moves else 0,  # type: ignore[union-attr]
        running.variance.data_ptr() if moves else 0,  # type: ignore[union-attr]
        momentum=running.momentum if moves else None,  # type: ignore[union-attr]
    )
    if refused >= 0 and x.numel():
        raise variance_error(variance.numpy(), eps, refused)
    if late is not None and x.numel():
        count = x.numel() // channels
        update_running(late.mean, late.variance, mean, variance, late.momentum, count)
    return y, mean, variance, mask, step


def _inference(
    x: Tensor,
    residual: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    rectifier: bool,
) -> Tensor:
    key = (
        "inference",
        rectifier,
        plain(x) and (residual is None or plain(residual)),
        facts(x),
        facts(residual),
        facts(mean),
        facts(variance),
        facts(weight),
        facts(bias),
        eps,
        get_num_threads(),
    )
    step = known.get(key)
    if step is None:
        given = x, residual, mean, variance, weight, bias
        x, mean, variance, weight, bias = (
            dense(x),
            wide(mean, x),
            wide(variance, x),
            wide(weight, x),
            wide(bias, x),
        )
        if residual is not None:
            residual = _beside("residual", residual, x)
        array = array_of(x)
        problem = inference_problem(
            array,
            _channels(mean, x),
            _channels(variance, x),
            _channels(weight, x),
            _channels(bias, x),
            epsilon=eps,
            data_format="NCX",
        )
        if rectifier:
            problem = rectified(problem, sided=residual is not None)
        step = Step(planned(problem, array).launch.apply)
        keep(key, step, given, (x, residual, mean, variance, weight, bias))
    y = empty_like(x)
    refused = step.stage(
        x.data_ptr(),
        0,
        y.data_ptr(),
        address(residual),
        0,
        mean.data_ptr(),
        variance.data_ptr(),
        address(weight),
        address(bias),
    )
    if refused >= 0:
        raise variance_error(variance.detach().numpy(), eps, refused)
    return y


def _backward(
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    *,
    sided: bool,
    step: Step | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    given_weight = weight
    stage = None
    if step is not None and plain(dy) and facts(dy) == step.x == facts(x):
        stage = step.backwards.get(sided) if facts(weight) == step.weight else None
    if stage is None:
        given = x, dy, mean, variance, weight
        x, mean, variance, weight = dense(x), wide(mean, x), wide(variance, x), wide(weight, x)
        dy = _beside("dy", dy, x)
        key = (
            "backward",
            facts(mask),
            sided,
            training,
            facts(x),
            dy.dtype,
            dy.shape,
            facts(mean),
            facts(variance),
            facts(weight),
            eps,
            get_num_threads(),
        )
        found = known.get(key)
        if found is None:
            array = array_of(x)
            problem = backward_problem(
                array,
                array_of(dy),
                _channels(mean, x),
                _channels(variance, x),
                _channels(weight, x),
                epsilon=eps,
                data_format="NCX",
                training=training,
            )
            if mask is not None:
                check_mask(mask.numpy(), mask_size(problem.size))
                problem = rectified(problem, sided=sided)
            found = Step(planned(problem, array).launch.complete)
        stage = found.stage
        used = x, dy, mean, variance, weight
        if keep(key, found, given, used) and step is not None:
            step.backwards[sided] = stage
    dx = empty_like(x)
    dresidual = empty_like(x) if sided else None
    dweight, dbias = torch.empty_like(mean), torch.empty_like(mean)
    refused = stage(
        x.data_ptr(),
        dy.data_ptr(),
        dx.data_ptr(),
        address(dresidual),
        address(mask),
        mean.data_ptr(),
        variance.data_ptr(),
        address(weight),
        0,
        dweight.data_ptr(),
        dbias.data_ptr(),
    )
    if refused >= 0:
        raise variance_error(variance.detach().numpy(), eps, refused)
    if given_weight is not weight:
        dweight, dbias = as_type(given_weight, dweight), as_type(given_weight, dbias)
    return dx, dweight, dbias, dresidual


def _beside(name: str, tensor: Tensor, x: Tensor) -> Tensor:
    """Return a tensor, which must have x's shape and type, that lies in memory as x does."""
    if tensor.shape != x.shape or tensor.dtype is not x.dtype:
        check_like(name, array_of(tensor), array_of(x))
    if plain(tensor) and tensor.stride() == x.stride():
        return tensor
    return torch.empty_like(x).copy_(tensor)


def _follows(running: Running, x: Tensor) -> bool:
    """Whether the kernel can move running statistics, or raise if they do not fit x."""
    dtype = statistics_type(x.dtype)
    for tensor in (running.mean, running.variance):
        # Nobody else checks them in training.
        if tensor.shape != x.shape[1:2] or tensor.dtype not in (dtype, x.dtype):
            raise ArgumentValueError("running_mean, running_var", "do not fit input")
    return all(
        tensor.dtype is dtype and tensor.is_contiguous()
        for tensor in (running.mean, running.variance)
    )
