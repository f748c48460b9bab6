"""The operations on the memory of CUDA tensors, by Triton kernels.

This module implements, for CUDA, those functions of `backnorm.torch.cpu` that `engines` and
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
from typing import Any, cast

import torch
from torch import Tensor

from backnorm.executable import compute
from backnorm.gpu.launch import BackwardLaunch, ForwardLaunch
from backnorm.gpu.plan import GpuPlan, plan_gpu
from backnorm.interfaces import Launch, Operands, Results
from backnorm.layout import Extents, Order, extents_of, mask_size
from backnorm.options import Options
from backnorm.problem import Problem
from backnorm.reproducible_sums import bins_of
from backnorm.second_order import blocks
from backnorm.signature import Kind, Operation
from backnorm.torch.arrays import TensorOperands, Tensors, is_aligned
from backnorm.torch.memory import as_type, contiguous, dense, order_of, unpack_mask

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

    def whole(self, pointers: Sequence[Any], *, momentum: float = 0.0) -> int:
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

    def write(self, pointers: Sequence[Any], *, sums: Any = None, count: Any = None) -> int:
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

    def sum(self, pointers: Sequence[Any]) -> int:
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

    def write_and_finish(self, pointers: Sequence[Any], *, sums: tuple[Tensor, Tensor]) -> int:
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
    absent = None

    def forms(self, problem: Problem, order: Order) -> dict[Kind, Any]:
        channels, size = problem.channels, mask_size(problem.size)
        statistics = getattr(torch, problem.statistics_dtype.name)
        names = problem.signature.names

        def of_gamma(operands: Any) -> Tensor:
            # GPU kernels can write every accepted type, so dgamma and dbeta are allocated in the
            # type in which they are returned.
            gamma = operands[names.index("gamma")]
            return torch.empty_like(operands[names.index("mean")] if gamma is None else gamma)

        def of_statistics(operands: Any) -> Tensor:
            made: Tensor = operands[0].new_empty(channels, dtype=statistics)
            return made

        return {
            "data": lambda operands: torch.empty_like(operands[0]),
            "channel": of_gamma if problem.operation == "backward" else of_statistics,
            "mask": lambda operands: operands[0].new_empty(size, dtype=torch.uint8),
            "sums": lambda operands: operands[0].new_empty((2, channels), dtype=torch.float64),
        }

    def addresses(self, arrays: TensorOperands) -> list[Any] | None:
        # Triton takes tensors in place of addresses.
        return None if super().addresses(arrays) is None else [*arrays]

    def place(self, x: Tensor) -> torch.device:
        return x.device

    def planned(
        self, problem: Problem, extents: Extents, place: torch.device
    ) -> tuple[GpuPlan, _Launches]:
        plan = plan_gpu(problem, extents)
        return plan, _Launches(problem, plan, place)

    def data(self, x: Tensor) -> Tensor:
        # Kernels read only tensors that are dense, plain and aligned; other tensors are copied.
        return _aligned(dense(x))

    def channel(self, tensor: Tensor, x: Tensor) -> Tensor:
        # Unlike the kernels for CPUs, these kernels can read per-channel tensors of 16 bits, so
        # such tensors are not converted to float32.
        return _aligned(contiguous(tensor))


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if is_aligned(tensor) else tensor.detach().clone()


TENSORS = _CudaTensors()


def reduce(operation: Operation, operands: Operands[Tensor], options: Options) -> Results:
    """Return what "reduce" or "reduce_forward" of `signature` returns."""
    if not options.reproducible:
        return compute(operation, operands, options, arrays=TENSORS)
    _, read = TENSORS.checked(operation, operands, options)
    x, *others = cast("Sequence[Any]", read)
    terms = factors = _by_channel(x)
    if others:
        dy, mask, mean = others
        if mask is not None:
            dy = torch.where(unpack_mask(mask, x), dy, torch.zeros_like(dy))
        terms, factors = _by_channel(dy), factors - mean.double()[:, None]
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
