"""CPU tensors as `interfaces.Arrays`, and the operations that read and write their memory.

Per-channel tensors have x's type. If x has a 16-bit type, float32 per-channel tensors are accepted,
too. 16-bit per-channel tensors are converted to float32, so that statistics are computed and
returned in float32. Results have the strides of `torch.empty_like(x)`: those of x, if x is dense in
some order of its axes.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from backnorm import engines
from backnorm.allocation import LARGE
from backnorm.engines import Place
from backnorm.errors import ArgumentValueError
from backnorm.executable import operation
from backnorm.interfaces import Arrays, Code, Launch, Operands, P, Results
from backnorm.layout import Extents, Order, mask_size
from backnorm.problem import Metadata, Problem, problem_of
from backnorm.reproducible_sums import bin_rows
from backnorm.second_order import arrays
from backnorm.signature import SIGNATURES, Operand, Operation, Signature
from backnorm.torch.checks import check_device
from backnorm.torch.tensors import (
    PLAIN,
    array_of,
    as_type,
    check_memory,
    check_own_memory,
    dense,
    empty_like,
    in_memory,
    inverse_deviation,
    metadata,
    order_of,
    plain,
    tensor_of,
    wide,
    wide_metadata,
)

_Operands = Operands[Tensor]

_RUNNING = ("running_mean", "running_variance")


class Tensors(Arrays[Tensor, P]):
    """The implementation of `Arrays` for strided tensors; CPUs and GPUs have a subclass each."""

    names: ClassVar[dict[str, Any]] = {
        "bits": torch.uint8,
        "double": torch.float64,
        "empty": torch.empty,
        "empty_like": torch.empty_like,
        "integers": torch.int64,
        "large_empty_like": empty_like,
    }

    def order_of(self, x: Tensor) -> Order:
        return order_of(x)

    def read(self, operands: Sequence[Any], signature: Signature) -> _Operands:
        read: list[Tensor | None] = []
        for tensor, operand in zip(operands, signature.operands, strict=True):
            if tensor is None and not operand.required:
                read.append(None)
                continue
            tensor = in_memory(tensor, operand.name)
            read.append(tensor)
            check_device(operand.name, tensor, "x", read[0])
            check_memory(tensor, operand.name)
            if operand.name in _RUNNING:
                check_own_memory(tensor, operand.name)
        return read

    def checked(
        self, name: Operation, operands: Sequence[object], **options: Any
    ) -> tuple[Problem, Sequence[Any]]:
        """Return the problem and the tensors of a call.

        The errors are those of `read` and `problem_of`.
        """
        signature = SIGNATURES[name]
        read = self.read(operands, signature)
        return problem_of(name, *self.described(read, signature), **options), read

    def described(self, read: _Operands, signature: Signature) -> Operands[Metadata]:
        x = read[0]
        return [
            None
            if tensor is None
            else wide_metadata(tensor, x)
            if operand.kind == "channel"
            else metadata(tensor)
            for tensor, operand in zip(read, signature.operands, strict=True)
        ]

    def ready(self, read: _Operands, problem: Problem, order: Order) -> _Operands:
        x = self.data(read[0])
        rest = zip(read[1:], problem.signature.operands[1:], strict=True)
        return [x, *(self._ready(tensor, operand, x) for tensor, operand in rest)]

    def data(self, x: Tensor) -> Tensor:
        """Return x if kernels can read it in place, otherwise a copy."""
        return dense(x)

    def channel(self, tensor: Tensor, x: Tensor) -> Tensor:
        """Return a per-channel tensor in the form that kernels read."""
        return wide(tensor, x)

    def _ready(self, tensor: Tensor | None, operand: Operand, x: Tensor) -> Tensor | None:
        if tensor is None:
            return None
        if operand.kind == "channel":
            return self.channel(tensor, x)
        if operand.kind == "mask":
            return self.data(tensor)
        if plain(tensor) and tensor.stride() == x.stride():
            return self.data(tensor)
        return torch.empty_like(x).copy_(tensor)

    def layouts(self, operands: Sequence[object]) -> Hashable:
        # The key of a cached call contains the strides of the call's tensors. A tensor of a
        # subclass may report wrong strides, so calls with such a tensor are not cached.
        plain_classes = (*PLAIN, type(None))
        return () if all(type(operand) in plain_classes for operand in operands) else None

    def finished(
        self,
        results: Results,
        operands: _Operands,
        ready: _Operands,
        problem: Problem,
        order: Order,
    ) -> Results:
        signature = problem.signature
        for tensor, copy, operand in zip(operands, ready, signature.operands, strict=True):
            if tensor is not None and operand.name in _RUNNING and copy is not tensor:
                # Writing to `data` does not change the tensor's version counter. As in PyTorch,
                # autograd must not detect the update of running statistics.
                tensor.data.copy_(copy)
        if not signature.operation.startswith("backward"):
            return results
        weight = operands[signature.names.index("gamma")]
        return tuple(
            as_type(weight, tensor) if result.kind == "channel" else tensor
            for tensor, result in zip(results, signature.results, strict=True)
        )

    def shown(self, channels: Tensor) -> np.ndarray:
        return array_of(channels)


class _CpuTensors(Tensors[Place]):
    code = Code(
        arrays="torch, cpu",
        # `is_neg` is true for a lazily negated tensor, whose memory has the elements before
        # negation.
        facts="(type({}), {}.dtype, {}.shape, {}.stride(), {}.is_cpu, {}.is_neg())",
        # Kernels read a per-channel tensor in place if it is contiguous and has one axis. The
        # length of such a tensor follows from `nbytes`, so the shape need not be one of the facts.
        channel_facts="(type({}), {}.dtype, {}.ndim, {}.nbytes, {}.is_contiguous(), {}.is_cpu, "
        "{}.is_neg())",
        # A tensor has no memory if PyTorch treats it as zeros (`_is_zerotensor`), or if its storage
        # has been freed. The storage of a tensor without memory is at address 0. The comparison
        # with 0x10000000000 is false for most addresses, so the rest of the expression is seldom
        # evaluated.
        lost="((at_{0} := {0}.data_ptr()) < 0x10000000000 "
        "and at_{0} == {0}.storage_offset() * {0}.itemsize and {1}_bytes)",
        known_address="at_{}",
        address="{}.data_ptr()",
        stage="stage.__call__",
        constants=(
            "is_large",
            "statistics",
            "table",
            "data_bytes",
            "channel_bytes",
            "mask_bytes",
            "channels",
            "count",
            "rows",
        ),
        new={
            "data": "(large_empty_like if is_large else empty_like)(x)",
            # `empty_like(statistics)` takes 0.2 us less than `empty(channels, dtype=...)`.
            "channel": "empty_like(statistics)",
            "mask": "empty(mask_bytes, dtype=bits)",
            "coefficients": "empty_like(table)",
            "bins": "empty((rows, channels), dtype=integers)",
            "sums": "empty((2, channels), dtype=double)",
            "count": "count",
        },
    )

    def place(self, x: Tensor | None) -> Place:
        engines.kernels("tensors of PyTorch")
        return engines.place()

    def planned(
        self, problem: Problem, extents: Extents, place: Place, exchanged: bool
    ) -> tuple[Any, Launch]:
        return engines.planned(problem, extents, place, exchanged)

    def values(self, problem: Problem, order: Order) -> tuple[object, ...]:
        return (
            problem.data_bytes >= LARGE,
            _like((problem.channels,), problem.statistics_dtype.name),
            _like((4, problem.channels), problem.arithmetic),
            problem.data_bytes,
            problem.channels * problem.statistics_dtype.itemsize,
            mask_size(problem.size),
            problem.channels,
            problem.count,
            bin_rows(problem.dtype.itemsize),
        )


@functools.lru_cache(maxsize=256)
def _like(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return a tensor without memory, as the argument of `torch.empty_like`.

    All executables whose results have this shape and type share one such tensor. When each
    executable had a tensor of its own, the C library's heap became fragmented: after batches of 300
    sizes, 1.5 GiB were resident, against 0.6 GiB with shared tensors.
    """
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    tensor.untyped_storage().resize_(0)
    return tensor


TENSORS = _CpuTensors()

#: See `kernels`.
forward, inference = operation("forward", TENSORS), operation("inference", TENSORS)
backward = operation("backward", TENSORS)

#: See `synchronised`.
reduce_forward = operation("reduce_forward", TENSORS, exchanged=True)
apply_forward = operation("apply_forward", TENSORS, exchanged=True)
reduce = operation("reduce", TENSORS, exchanged=True)
apply = operation("apply", TENSORS, exchanged=True)

_forward_coefficients = operation("forward_coefficients", TENSORS, exchanged=True)
_backward_coefficients = operation("backward_coefficients", TENSORS, exchanged=True)


def parts(message: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """Split a message into two arrays of one number per channel, and the number of elements."""
    first, second, count = np.split(array_of(message), (message.numel() // 2, -1))
    if not 0.0 <= count[0] < 2.0**63:
        raise ArgumentValueError(
            "sums",
            "must end with the number of elements per channel",
            came=count[0],
            accepted="a number from 0 to 2**63 - 1",
        )
    return first, second, int(count[0])


def forward_coefficients(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and the biased variance of x, and the coefficients that give y.

    `arithmetic` is the type of the coefficients.
    """
    return _forward_coefficients(x, weight, bias, eps, "NCX", arithmetic)


def backward_coefficients(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of weight and bias, and the coefficients that give dx.

    `arithmetic` is the type of the coefficients.
    """
    options = eps, "NCX", training, arithmetic
    return _backward_coefficients(x, dy, mean, variance, weight, *options)


def inference_coefficients(
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str,
) -> Tensor:
    """Return the coefficients from which inference computes y.

    `arithmetic` is the type of the coefficients.
    """
    gain = inverse_deviation(variance, eps)
    gain = gain if weight is None else weight.double() * gain
    slope = torch.zeros_like(gain) if bias is None else bias.double()
    dtype = getattr(torch, arithmetic)
    # `arithmetic` is the name of a type, to which the mean is rounded. The slope is corrected for
    # this rounding error.
    slope = slope + gain * (mean.to(dtype).double() - mean)
    return torch.stack((mean.double(), torch.zeros_like(gain), slope, gain)).to(dtype)


def double_backward(
    elements: Sequence[Any], channels: Sequence[Any], eps: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given the gradients of the results of `backward`.

    `elements` are x, dy and ddx; `channels` are mean, variance, weight, ddweight and ddbias.
    """
    x, dy, ddx = elements
    x = dense(x)
    gx, gdy = empty_like(x), empty_like(x)
    result = arrays.double_backward(
        [array_of(x), array_of(dy), None if ddx is None else array_of(ddx)],
        [None if tensor is None else array_of(wide(tensor, x)) for tensor in channels],
        epsilon=eps,
        data_format="NCX",
        training=training,
        out=(array_of(gx), array_of(gdy)),
    )
    return gx, gdy, as_type(channels[2], tensor_of(result.gamma))
