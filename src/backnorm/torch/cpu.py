"""The operators on the memory of CPU tensors: the only place that calls them.

Nothing here knows autograd. Every function takes CPU tensors of strided layout, reads their memory
where it is, and returns new tensors that lie in memory as `x` does (`torch.empty_like(x)`: the
same strides, if `x` is dense in some order of its axes). Per-channel tensors are of x's type, or
float32 beside a 16-bit x; where they are of 16 bits they are widened, so that the statistics keep
the digits of float32.

Calls that came before go straight to the kernels: see `steps`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from backnorm.execute import planned
from backnorm.layout import mask_size
from backnorm.problem import (
    backward_problem,
    check_like,
    check_mask,
    forward_problem,
    inference_problem,
    variance_error,
    with_relu,
)
from backnorm.second_order import batch_norm_double_backward
from backnorm.threads import get_num_threads
from backnorm.torch.memory import (
    array_of,
    as_type,
    dense,
    laid_out_as,
    plain,
    tensor_of,
    wide,
)
from backnorm.torch.reuse import empty_like
from backnorm.torch.statistics import Running, follows, statistics_type, update_running
from backnorm.torch.steps import Step, address, facts, keep, known

__all__ = ["backward", "double_backward", "inference", "trained", "unpack_mask"]

# Addresses of what a call has not: running statistics, and the results of channels before them.
_NO_RUNNING, _NO_RESULTS = (0, 0), (0, 0, 0, 0)


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
    return laid_out_as(gx, x), laid_out_as(gdy, x), as_type(weight, tensor_of(gweight))


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask of `relu_forward` as booleans that lie as x does."""
    x = dense(x)
    bits = np.unpackbits(array_of(mask), count=x.numel(), bitorder="little").view(np.bool_)
    return torch.from_numpy(bits).as_strided(x.shape, x.stride())


def _channels(tensor: Tensor | None, x: Tensor) -> Any:
    """Return a per-channel tensor as an array that the operators take, or None."""
    tensor = wide(tensor, x)
    return None if tensor is None else array_of(tensor)


def trained(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None,
    *,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Step]:
    """Return what `forward` or `relu_forward` returns, and a step for the backward pass."""
    own, of_weight = facts(x), facts(weight)
    key = (
        "forward",
        relu,
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
        if relu:
            problem = with_relu(problem, residual=residual is not None)
        step = Step(planned(problem, array).launch.complete)
        if running is not None and not follows(running, x):
            late, running = running, None
        if keep(key, step, given, (x, residual, weight, bias, running)):
            step.x, step.weight, step.threads = own, of_weight, get_num_threads()
    y = empty_like(x)
    dtype = statistics_type(x.dtype)
    channels = x.shape[1]
    mean, variance = torch.empty(channels, dtype=dtype), torch.empty(channels, dtype=dtype)
    mask = torch.empty(mask_size(x.numel()), dtype=torch.uint8) if relu else None
    places = (
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
    )
    if running is None or not x.numel():
        refused = step.stage((*places, *_NO_RUNNING))
    else:
        moved = running.mean.data_ptr(), running.variance.data_ptr()
        refused = step.stage((*places, *moved), momentum=running.momentum)
    if refused >= 0 and x.numel():
        raise variance_error(array_of(variance), eps, refused)
    if late is not None and x.numel():
        count = x.numel() // channels
        update_running(late.mean, late.variance, mean, variance, late.momentum, count)
    return y, mean, variance, mask, step


def inference(
    x: Tensor,
    residual: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    relu: bool,
) -> Tensor:
    """Return y, normalised with given statistics."""
    key = (
        "inference",
        relu,
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
        if relu:
            problem = with_relu(problem, residual=residual is not None)
        step = Step(planned(problem, array).launch.apply)
        keep(key, step, given, (x, residual, mean, variance, weight, bias))
    y = empty_like(x)
    places = (
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
    refused = step.stage((*places, *_NO_RESULTS))
    if refused >= 0:
        raise variance_error(array_of(variance), eps, refused)
    return y


def backward(
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    *,
    has_residual: bool,
    step: Step | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight, bias and residual: see `kernels.relu_backward`."""
    given_weight = weight
    stage = None
    if step is not None and plain(dy) and facts(dy) == step.x == facts(x):
        same = facts(weight) == step.weight and get_num_threads() == step.threads
        stage = step.backwards.get(has_residual) if same else None
    if stage is None:
        given = x, dy, mean, variance, weight
        x, mean, variance, weight = dense(x), wide(mean, x), wide(variance, x), wide(weight, x)
        dy = _beside("dy", dy, x)
        key = (
            "backward",
            facts(mask),
            has_residual,
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
                check_mask(array_of(mask), mask_size(problem.size))
                problem = with_relu(problem, residual=has_residual)
            found = Step(planned(problem, array).launch.complete)
        stage = found.stage
        used = x, dy, mean, variance, weight
        direct = keep(key, found, given, used)
        if direct and step is not None and step.threads == get_num_threads():
            step.backwards[has_residual] = stage
    dx = empty_like(x)
    dresidual = empty_like(x) if has_residual else None
    dweight, dbias = torch.empty_like(mean), torch.empty_like(mean)
    places = (
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
    refused = stage((*places, *_NO_RUNNING))
    if refused >= 0:
        raise variance_error(array_of(variance), eps, refused)
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
