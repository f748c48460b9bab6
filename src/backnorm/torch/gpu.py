"""The operations on the memory of CUDA tensors, by Triton kernels.

This module implements, for CUDA, those functions of `backnorm.torch.cpu` that `kernels` and
`synchronised` call. Kernels run on the current stream of the tensors' device. A first call compiles
and tunes kernels. Later calls do not wait for a kernel or read a value from the device, so a CUDA
graph can capture a call that has run before. No function raises an error if variance + epsilon is
not positive in a channel, because this check would need to read values from the device. The results
of such a channel are infinite or NaN, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backnorm.executable import operation
from backnorm.gpu.launch import BackwardLaunch, ForwardLaunch
from backnorm.gpu.plan import GpuPlan, plan_gpu
from backnorm.interfaces import Code, Launch
from backnorm.layout import Extents, Order, extents_of, mask_size
from backnorm.problem import Problem
from backnorm.reproducible_sums import bins_of
from backnorm.second_order import blocks
from backnorm.torch.cpu import Tensors
from backnorm.torch.tensors import as_type, contiguous, dense, order_of, unpack_mask

# The compiler assumes that addresses of arrays are multiples of this number of bytes. PyTorch's
# allocators return addresses that are multiples of a larger power of two.
_ALIGNMENT = 16

_NOTHING = nullcontext()


class _Launches(Launch):
    """The stages of a problem with GPU kernels. For an empty batch, per-channel results are 0.

    The stages of a CPU take addresses, which are integers. These stages take the tensors.
    """

    __slots__ = ("_backward", "_forward")
    _backward: Any
    _forward: Any

    def __init__(self, problem: Problem, plan: GpuPlan, device: torch.device) -> None:
        def new(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.float64, device=device)

        is_backward = "dy" in problem.signature.names
        self._backward = BackwardLaunch(plan, new) if is_backward else None
        self._forward = None if is_backward else ForwardLaunch(plan, new)

    def complete(self, *pointers: Any, momentum: float = 0.0) -> int:
        """Compute all results of a forward or a backward pass.

        Return -1, which stands for "no invalid variance", because the kernels check no variance.

        `pointers` are the tensors in the order of `interfaces.ADDRESSES`, and None in the place of
        an absent one.
        """
        x, dy, out, residual, mask, mean, variance, gamma, beta, *results = pointers
        if not x.numel():
            for result in results[:2]:
                result.zero_()
            return -1
        with on(x):
            if self._forward is None:
                operands = x, dy, mask, mean, variance, gamma
                self._backward.run(operands, out, residual, results[:2])
            else:
                outputs = out, mask, *results[:2]
                self._forward.run((x, residual, gamma, beta), outputs, results[2:4], momentum)
        return -1

    def apply(self, *pointers: Any, sums: Any = None, count: Any = None) -> int:
        """Compute y from given statistics, or dx from the sums of all parts of the batch."""
        x, dy, out, residual, mask, mean, variance, gamma, beta, *_ = pointers
        if x.numel():
            with on(x):
                if self._forward is None:
                    row = torch.cat((*sums, count))
                    operands = x, dy, mask, mean, variance, gamma
                    self._backward.apply(operands, row, out, residual)
                else:
                    self._forward.infer((x, residual, mean, variance, gamma, beta), out)
        return -1

    def sum_all(self, *pointers: Any) -> int:
        """Write the sums of every channel; in a forward pass, write means and variances instead."""
        x, dy, _, _, mask, mean, variance, gamma, *_, sums = pointers
        if not x.numel():
            sums.zero_()
            return -1
        with on(x):
            if self._forward is None:
                found = self._backward.reduce((x, dy, mask, mean, variance, gamma))
                sums.view(-1).copy_(found[:-1])
            else:
                # `reduce` returns each mean as two float64, high + low. The low part is not used
                # here: it is at most half an ulp of the high part, so the mean as one float64 is
                # the high part.
                self._forward.reduce(x, tuple(sums))
        return -1

    def finish(self, *pointers: Any, sums: tuple[Tensor, Tensor], count: Any = None) -> int:
        """Write the output, mean and variance of a forward pass, from the moments of all parts."""
        x, _, out, residual, mask, _, _, gamma, beta, *results = pointers
        for result, value in zip(results[:2], sums, strict=True):
            result.copy_(value)
        if x.numel():
            with on(x):
                mean, variance = sums
                rows = torch.cat((mean, torch.zeros_like(mean), variance))
                self._forward.apply((x, residual, gamma, beta), rows, out, mask)
        return -1


class _CudaTensors(Tensors[torch.device]):
    code = Code(
        arrays="torch, cuda",
        facts="(type({}), {}.dtype, {}.shape, {}.stride(), {}.device, {}.is_neg(), "
        f"{{}}.data_ptr() % {_ALIGNMENT} == 0)",
        lost="({0}.data_ptr() == {0}.storage_offset() * {0}.itemsize and {0}.numel())",
        address="{}",
        absent="None",
        constants=("channels", "statistics", "mask_bytes", "count"),
        new={
            "data": "empty_like(x)",
            "channel": "x.new_empty(channels, dtype=statistics)",
            "mask": "x.new_empty(mask_bytes, dtype=bits)",
            "sums": "x.new_empty((2, channels), dtype=double)",
            "count": "count",
            # GPU kernels can write every accepted type, so dgamma and dbeta are allocated in the
            # type in which they are returned.
            "dgamma": "empty_like(mean if gamma is None else gamma)",
            "dbeta": "empty_like(mean if gamma is None else gamma)",
        },
    )

    def place(self, x: Tensor) -> torch.device:
        return x.device

    def planned(
        self, problem: Problem, extents: Extents, place: torch.device, exchanged: bool
    ) -> tuple[GpuPlan, _Launches]:
        plan = plan_gpu(problem, extents)
        return plan, _Launches(problem, plan, place)

    def values(self, problem: Problem, order: Order) -> tuple[object, ...]:
        statistics = getattr(torch, problem.statistics_dtype.name)
        return problem.channels, statistics, mask_size(problem.size), problem.count

    def data(self, x: Tensor) -> Tensor:
        # Kernels read only tensors that are dense, plain and aligned; other tensors are copied.
        return _aligned(dense(x))

    def channel(self, tensor: Tensor, x: Tensor) -> Tensor:
        # Unlike the kernels for CPUs, these kernels can read per-channel tensors of 16 bits, so
        # such tensors are not converted to float32.
        return _aligned(contiguous(tensor))


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.detach().clone()


TENSORS = _CudaTensors()

_reduce_forward, _reduce = operation("reduce_forward", TENSORS), operation("reduce", TENSORS)

#: See `kernels`.
forward, inference = operation("forward", TENSORS), operation("inference", TENSORS)
backward = operation("backward", TENSORS)

#: See `synchronised`.
apply_forward, apply = operation("apply_forward", TENSORS), operation("apply", TENSORS)


def reduce_forward(
    x: Tensor, data_format: str, arithmetic: str, reproducible: bool
) -> tuple[Tensor, Any]:
    """See `synchronised`."""
    if not reproducible:
        return _reduce_forward(x, data_format, arithmetic, False)
    TENSORS.checked("reduce_forward", (x,))
    terms = _by_channel(x)
    return bins_of(terms, terms, x.element_size(), torch), terms.shape[1]


def reduce(
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    data_format: str,
    arithmetic: str,
    reproducible: bool,
) -> tuple[Tensor, Any]:
    """See `synchronised`."""
    if not reproducible:
        return _reduce(x, dy, mask, mean, data_format, arithmetic, False)
    TENSORS.checked("reduce", (x, dy, mask, mean))
    if mask is not None:
        dy = torch.where(unpack_mask(mask, x), dy, torch.zeros_like(dy))
    terms, factors = _by_channel(dy), _by_channel(x) - mean.double()[:, None]
    return bins_of(terms, factors, x.element_size(), torch), terms.shape[1]


def _by_channel(x: Tensor) -> Tensor:
    """Return the elements of each channel in float64, shape (C, M)."""
    return x.transpose(0, 1).reshape(x.shape[1], -1).double()


def parts(message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split a process's message into two tensors of shape (C,) and one with a count."""
    channels = message.numel() // 2
    return message[:channels], message[channels:-1], message[-1:]


# `double_backward` computes one block after the other. This is the number of elements in a block,
# which takes 8 MiB in float64. While the GPU computes a block of this size, the CPU has enough time
# to launch the next kernel.
_BLOCK = 1 << 20


def double_backward(
    elements: Sequence[Any], channels: Sequence[Any], eps: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given the gradients of dx, dweight and dbias.

    `elements` are x, dy and ddx. `channels` are mean, variance, weight, ddweight and ddbias.

    `backnorm.second_order` has the formulas. Everything is computed in float64. PyTorch computes
    the sums, whose errors stay within the error budget (`conformance.judge.check_double_backward`
    says why). The function allocates memory for the results, for copies of tensors whose order of
    axes differs from x's, and for eight float64 blocks of at most `_BLOCK` elements each.
    """
    x, dy, ddx = elements
    x = dense(x).detach()
    order = order_of(x)
    extents = extents_of(tuple(x.shape), (1,), order)

    def flat(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().permute(order).reshape(extents)

    gx, gdy = torch.empty_like(x), torch.empty_like(x)
    gweight = blocks.double_backward(
        [flat(tensor) for tensor in (x, dy, ddx)],
        [None if tensor is None else tensor.detach() for tensor in channels],
        epsilon=eps,
        training=training,
        reduce=partial(blocks.sums, block=_BLOCK),
        block=_BLOCK,
        results=[flat(gx), flat(gdy)],
    )
    return gx, gdy, as_type(channels[2], gweight.to(channels[0].dtype))


def on(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which x's device is current; kernels are launched on that device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)
