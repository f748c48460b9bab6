"""The operators on the memory of CUDA tensors, by Triton: the only place that launches kernels.

The counterpart of `cpu`, with the same functions. Kernels run on the tensors' device, on its
current stream; nothing here waits for them or reads a value, so a call can be captured in a CUDA
graph once it has been made before. For the same reason variance + epsilon <= 0 is no error here:
the channel becomes infinite or NaN, as PyTorch's does.

What the checks of a call look at is kept with the kernels that came of it, by the tensors'
metadata.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from backnorm.errors import ArgumentValueError
from backnorm.gpu import Gpu
from backnorm.kernels.gpu.launch import BackwardLaunch, ForwardLaunch
from backnorm.layout import Extents, extents_of, mask_size
from backnorm.plan_gpu import Knobs, plan_gpu
from backnorm.problem import (
    Problem,
    backward_problem,
    check_like,
    check_mask_like,
    forward_problem,
    inference_problem,
    with_relu,
)
from backnorm.recall import Kept
from backnorm.torch.memory import dense, order_of, plain
from backnorm.torch.metadata import metadata, wide_metadata
from backnorm.torch.second_order import double_backward
from backnorm.torch.statistics import Running, follows, statistics_type, update_running
from backnorm.torch.steps import facts

__all__ = [
    "Place",
    "backward",
    "backward_place",
    "double_backward",
    "forward_place",
    "gpu_of",
    "inference",
    "on",
    "trained",
    "unpack_mask",
    "use",
]

# Bytes that the compiler takes the arrays to be aligned to. Torch's allocators align to more.
_ALIGNMENT = 16

_NOTHING = nullcontext()

_forwards: Kept[ForwardLaunch] = Kept()
_backwards: Kept[BackwardLaunch] = Kept()
_devices: dict[torch.device, Gpu] = {}

#: A problem as it lies in memory, and where.
Place = tuple[Problem, Extents, Gpu]

# What tuning has found.
_tuned: dict[Place, Knobs] = {}

Kind = TypeVar("Kind", Tensor, Tensor | None)


def trained(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None,
    *,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
    """Return y, mean, variance and mask: see `kernels.trained`. Nothing is to be handed on."""
    x, weight, bias = _readable(x), _channel(weight), _channel(bias)
    residual = _beside("residual", residual, x)
    late = None
    if running is not None and not (
        running.mean.is_contiguous() and running.variance.is_contiguous()
    ):
        late, running = running, None
    channels, dtype = x.shape[1:2], statistics_type(x.dtype)
    y = torch.empty_like(x)
    mean, variance = x.new_empty(channels, dtype=dtype), x.new_empty(channels, dtype=dtype)
    mask = None
    if relu:
        mask = x.new_empty((mask_size(x.numel()),), dtype=torch.uint8)
    key = (
        relu,
        facts(x),
        facts(residual),
        facts(weight),
        facts(bias),
        None if running is None else (facts(running.mean), facts(running.variance)),
        eps,
    )
    launch = _forwards.get(key)
    if launch is None:
        place = forward_place(x, residual, weight, bias, eps, relu=relu)
        if running is not None:
            _check_devices(x, running.mean, running.variance)
            # The kernel moves them whichever of the accepted types they are of.
            follows(running, x)
        launch = ForwardLaunch(*_planned(place, x.device), moving=running is not None)
        _forwards.keep(key, launch)
    if not x.numel():
        return y, mean.zero_(), variance.zero_(), mask, None
    moved = (None, None) if running is None else running[:2]
    momentum = 0.0 if running is None else running.momentum
    with on(x):
        launch.run(x, residual, weight, bias, moved, momentum, y, mask, mean, variance)
    if late is not None:
        count = x.numel() // x.shape[1]
        update_running(late.mean, late.variance, mean, variance, late.momentum, count)
    return y, mean, variance, mask, None


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
    x, mean, variance = _readable(x), _channel(mean), _channel(variance)
    weight, bias = _channel(weight), _channel(bias)
    residual = _beside("residual", residual, x)
    key = (
        "inference",
        relu,
        *(facts(tensor) for tensor in (x, residual, mean, variance, weight, bias)),
        eps,
    )
    launch = _forwards.get(key)
    if launch is None:
        _check_devices(x, mean, variance, weight, bias)
        problem = inference_problem(
            metadata(x),
            wide_metadata(mean, x),
            wide_metadata(variance, x),
            wide_metadata(weight, x),
            wide_metadata(bias, x),
            epsilon=eps,
            data_format="NCX",
        )
        if relu:
            problem = with_relu(problem, residual=residual is not None)
        launch = ForwardLaunch(*_planned(_place(problem, x), x.device), moving=False)
        _forwards.keep(key, launch)
    y = torch.empty_like(x)
    if x.numel():
        with on(x):
            launch.infer(x, residual, mean, variance, weight, bias, y)
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
    step: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight, bias and residual."""
    x, mean, variance, weight = _readable(x), _channel(mean), _channel(variance), _channel(weight)
    dy, mask = _beside("dy", dy, x), _readable(mask)
    key = (
        has_residual,
        training,
        *(facts(tensor) for tensor in (x, dy, mask, mean, variance, weight)),
        eps,
    )
    launch = _backwards.get(key)
    if launch is None:
        place = backward_place(
            x, dy, mask, mean, variance, weight, eps, training, has_residual=has_residual
        )
        launch = BackwardLaunch(*_planned(place, x.device))
        _backwards.keep(key, launch)
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if has_residual else None
    like = mean if weight is None else weight
    dweight, dbias = torch.empty_like(like), torch.empty_like(like)
    if not x.numel():
        return dx, dweight.zero_(), dbias.zero_(), dresidual
    with on(x):
        launch.run(x, dy, mask, mean, variance, weight, dx, dresidual, dweight, dbias)
    return dx, dweight, dbias, dresidual


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask of `kernels.relu_forward` as booleans that lie as x does."""
    x = dense(x)
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits = (mask[:, None] >> shifts & 1).flatten()[: x.numel()].bool()
    return bits.as_strided(x.shape, x.stride())


def gpu_of(device: torch.device) -> Gpu:
    """Return what a plan must know of a device."""
    if device not in _devices:
        facts_of = torch.cuda.get_device_properties(device)
        _devices[device] = Gpu(
            facts_of.name,
            (facts_of.major, facts_of.minor),
            facts_of.multi_processor_count,
            facts_of.L2_cache_size,
        )
    return _devices[device]


def forward_place(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    relu: bool,
) -> Place:
    """Check the tensors of a forward pass, and return what is to be planned."""
    _check_devices(x, weight, bias)
    problem = forward_problem(
        metadata(x), wide_metadata(weight, x), wide_metadata(bias, x), epsilon=eps,
        data_format="NCX",
    )  # fmt: skip
    return _place(with_relu(problem, residual=residual is not None) if relu else problem, x)


def backward_place(
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
) -> Place:
    """Check the tensors of a backward pass, and return what is to be planned."""
    _check_devices(x, dy, mask, mean, variance, weight)
    problem = backward_problem(
        metadata(x),
        metadata(dy),
        wide_metadata(mean, x),
        wide_metadata(variance, x),
        wide_metadata(weight, x),
        epsilon=eps,
        data_format="NCX",
        training=training,
    )
    if mask is not None:
        check_mask_like(metadata(mask), mask_size(problem.size))
        problem = with_relu(problem, residual=has_residual)
    return _place(problem, x)


def use(place: Place, knobs: Knobs) -> None:
    """Plan a problem with these knobs from now on."""
    _tuned[place] = knobs
    _forwards.clear()
    _backwards.clear()


def _place(problem: Problem, x: Tensor) -> Place:
    extents = extents_of(problem.shape, problem.channel_axis, order_of(x))
    return problem, extents, gpu_of(x.device)


def _planned(place: Place, device: torch.device) -> tuple[Any, ...]:
    """Return what a launch is made of."""

    def new(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float64, device=device)

    problem, extents, _ = place
    plan = plan_gpu(*place, _tuned.get(place))
    return problem, extents, plan.tiling, plan.arithmetic, plan.schedule == "complete", new


def on(x: Tensor) -> AbstractContextManager[Any]:
    """Make x's device the current one: kernels are launched there."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def _readable(x: Kind) -> Kind:
    """Return a tensor that is dense, plain and aligned: itself, or a copy."""
    if x is None:
        return None
    x = dense(x)
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.detach().clone()


def _beside(name: str, tensor: Kind, x: Tensor) -> Kind:
    """Return a tensor, which must have x's shape and type, that lies in memory as x does."""
    if tensor is None:
        return None
    if tensor.shape != x.shape or tensor.dtype is not x.dtype or tensor.device != x.device:
        check_like(name, metadata(tensor), metadata(x))
        _check_devices(x, tensor)
    if plain(tensor) and tensor.stride() == x.stride():
        return _readable(tensor)
    return torch.empty_like(x).copy_(tensor)


def _channel(tensor: Kind) -> Kind:
    """Return a per-channel tensor that is contiguous and plain: itself, or a copy."""
    if tensor is None or (tensor.is_contiguous() and plain(tensor)):
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _check_devices(x: Tensor, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.device != x.device:
            raise ArgumentValueError(
                "tensors",
                "must all be on one device",
                came=f"{tensor.device} beside an input on {x.device}",
                accepted=str(x.device),
            )
