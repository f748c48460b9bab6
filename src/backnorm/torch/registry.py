"""Register operators with the dispatcher (``torch.ops.backnorm.*``).

An operator declares the kinds of its results (`Result`). The kinds determine the shapes that fake
kernels return, and the axes along which DTensor may shard results.

Channels are independent of each other, so the vmap rule computes B problems of C channels in one
call, as a problem of B * C channels. A tensor that vmap does not map over is repeated for each
problem. Tensors that DTensor shards over channels stay sharded. DTensor gathers tensors that are
sharded over batch or space, because statistics are those of the whole batch. DTensor treats
PyTorch's own operators in the same way.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import (
    infer_schema,
    register_autograd,
    register_fake,
    register_kernel,
    register_vmap,
)

from backnorm.errors import ArgumentError
from backnorm.torch.checks import check_device, renamed
from backnorm.torch.tensors import statistics_type

_LIBRARY = torch.library.Library("backnorm", "FRAGMENT")

#: The kind of a result determines the result's shape and type. data: the shape and type of x.
#: statistics: one value per channel, in the type of a mean that is computed from x. parameter: one
#: value per channel, in the type of the weight; without a weight, in the type of statistics.
#: coefficients: four numbers per channel (see `lowering`).
Result = Literal["data", "statistics", "parameter", "coefficients"]


def register(
    name: str,
    kernel: Callable[..., Any],
    results: tuple[Result, ...] | Callable[..., Any],
    *,
    function: type[Any] | None = None,
    backward: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Register an operator with the dispatcher, autograd, vmap and DTensor, and return it.

    Parameters
    ----------
    name : str
    kernel : callable
        Computes the results, on any device; its annotations are the operator's types. All tensors
        must be on the device of the first.
    results : tuple of str, or callable
        The kinds of the results, if vmap may merge problems along the channels and DTensor may
        shard tensors over the channels. Otherwise a function with the kernel's arguments, which
        returns new tensors like the kernel's results.
    function : type of Function, optional
        A class whose `setup_context` and `backward` differentiate the operator. Its `forward`
        becomes the operator, so that `torch.func` can differentiate the class. If `results` is a
        tuple, the class must also have `jvp`, and gets the operator's vmap rule.
    backward : callable, optional
        The backward pass of an operator without `function`; this pass raises.
    tags : tuple of torch.Tag
        Tags that tell Inductor which layouts of operands the operator accepts.
    """
    # The operator is not defined by `torch.library.custom_op`, because every call would then take 3
    # us longer than with the registration below (AMD EPYC, Zen 3).
    schema = infer_schema(kernel, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    # The argument `None` registers the kernel for all devices. Dynamo does not trace the Python
    # code of kernels registered in this way.
    register_kernel(f"backnorm::{name}", None, _with_names(kernel), lib=_LIBRARY)
    # The kernels themselves handle tensors that PyTorch negates lazily, and tensors of zeros
    # without memory. Without the two fallthroughs below, PyTorch would copy a tensor of either kind
    # before the call. If the tensor's storage had been shortened, PyTorch would read beyond the end
    # of the storage.
    for key in ("Negative", "ZeroTensor"):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    operator = getattr(torch.ops.backnorm, name).default
    register_fake(operator, _fake_kernel(kernel, results))
    if function is not None:
        function.forward = operator
        register_autograd(operator, function.backward, setup_context=function.setup_context)
    elif backward is not None:
        register_autograd(operator, backward)
    if callable(results):
        return operator
    register_vmap(operator, _batching_rule(operator, results))
    _split_by_channels.append((operator, results))
    if function is not None:
        function.jvp = staticmethod(_differentiable(function.jvp))
        function.vmap = staticmethod(_batching_rule(function.apply, results))
    return operator


def _with_names(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel whose errors name the arguments of the operator."""

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        try:
            return kernel(*arguments)
        except ArgumentError as error:
            raise renamed(error) from None

    return call


# Fake kernels compute only the shapes and types of results.


def _fake_kernel(
    kernel: Callable[..., Any], results: tuple[Result, ...] | Callable[..., Any]
) -> Callable[..., Any]:
    """Return a fake kernel, which raises an error if tensors are on different devices.

    The dispatcher calls the fake kernel if any tensor is on the meta device.
    """
    parameters = list(inspect.signature(kernel).parameters)

    def call(*arguments: Any) -> Any:
        operands = dict(zip(parameters, arguments, strict=False))
        for name, value in operands.items():
            if isinstance(value, Tensor):
                check_device(name, value, parameters[0], arguments[0])
        if callable(results):
            return results(*arguments)
        new = tuple(_new_result(result, **operands) for result in results)
        return new if len(new) > 1 else new[0]

    return call


def _new_result(
    result: Result,
    x: Tensor,
    weight: Tensor | None = None,
    arithmetic: str = "",
    **_: Any,
) -> Tensor:
    if result == "data":
        return torch.empty_like(x)
    if result == "coefficients":
        return x.new_empty((4, x.shape[1]), dtype=getattr(torch, arithmetic))
    if result == "parameter" and weight is not None:
        return weight.new_empty((x.shape[1],))
    return x.new_empty((x.shape[1],), dtype=statistics_type(x.dtype))


# Rules of `torch.func`.


def _differentiable(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `jvp` rule that forward mode can differentiate again.

    While a rule runs, PyTorch disables forward mode at all levels of nested `jvp` calls, so the
    outer levels would get a tangent of 0. The returned wrapper enables forward mode while the rule
    runs. The rule itself ignores the tangents of its own level.
    """

    @functools.wraps(jvp)
    def call(*arguments: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            return jvp(*arguments)

    return call


def _batching_rule(function: Callable[..., Any], kinds: Sequence[Result]) -> Callable[..., Any]:
    """Return the vmap rule of `function`, for `torch.library` and `torch.autograd.Function`.

    In one problem (that is, without the vmap axis), a tensor with one axis has one value per
    channel. In a tensor with more axes, the second axis is the channel axis.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        size, axis_of_x = info.batch_size, in_dims[0]
        # Without its vmap axis, x has the shape of the x of one problem: the first axis is the
        # batch, and the second axis has the channels.
        _, channels, *_ = (n for k, n in enumerate(arguments[0].shape) if k != axis_of_x)
        merged = [
            _merge(argument, axis, size) if isinstance(argument, Tensor) else argument
            for argument, axis in zip(arguments, in_dims, strict=True)
        ]
        results = function(*merged)
        if isinstance(results, Tensor):
            return _split(results, size, channels)
        split = [_split(result, size, channels) for result in results]
        batched = [
            # If x has no vmap axis, all problems have the same x and the same statistics, which are
            # then returned once, without a vmap axis.
            (result.select(axis, 0), None)
            if kind == "statistics" and axis_of_x is None and size
            else (result, axis)
            for kind, (result, axis) in zip(kinds, split, strict=True)
        ]
        tensors, axes = zip(*batched, strict=True)
        return tensors, axes

    return vmap


def _merge(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """Join the tensors of all problems that `vmap` maps over, along the channel axis.

    The channels of the first problem come first, then those of the second problem, and so on.
    """
    if axis is None:
        tensor, axis = tensor.expand(size, *tensor.shape), 0
    channels = 0 if tensor.dim() == 2 else 1
    return tensor.movedim(axis, channels).flatten(channels, channels + 1)


def _split(tensor: Tensor, size: int, channels: int) -> tuple[Tensor, int]:
    """Undo `_merge`; return the tensor and its vmap axis."""
    axis = 0 if tensor.dim() == 1 else 1
    return tensor.unflatten(axis, (size, channels)), axis


# Distributed tensors.

_split_by_channels: list[tuple[Any, tuple[Result, ...]]] = []


def register_sharding() -> None:
    """Register the sharding rules of backnorm's operators if DTensor is imported.

    DTensor is not imported here, because that takes longer than importing backnorm.
    """
    if "torch.distributed.tensor" in sys.modules:
        _register_sharding()


# With this mark, Dynamo calls `register_sharding` when it traces a caller, instead of tracing the
# code of `register_sharding`.
register_sharding._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register_sharding() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for operator, results in _split_by_channels:
        register_sharding(operator)(functools.partial(_placements, results))


def _placements(results: Sequence[Result], *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return the two accepted placements of results and arguments: all sharded over channels, or
    all replicated.
    """
    from torch.distributed.tensor import Replicate, Shard

    # An argument is the specification of a tensor, None for an absent tensor, or an option.
    ranks = [getattr(argument, "ndim", None) for argument in arguments]
    replicated = [Replicate()] * len(results), [None if n is None else Replicate() for n in ranks]
    axes = [1 if result in ("data", "coefficients") else 0 for result in results]
    by_channels = [None if n is None else Shard(1 if n > 1 else 0) for n in ranks]
    return [([Shard(axis) for axis in axes], by_channels), replicated]
