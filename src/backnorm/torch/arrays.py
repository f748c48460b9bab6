"""Strided tensors as `interfaces.Arrays`; `cpu` and `gpu` have a subclass each.

Per-channel tensors have x's type. If x has a 16-bit type, float32 per-channel tensors are accepted,
too. Results have the strides of `torch.empty_like(x)`: those of x, if x is dense in some order of
its axes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backnorm.interfaces import Arrays, Operands, P, Results
from backnorm.layout import Order
from backnorm.problem import Metadata, Problem
from backnorm.signature import Operand, Signature
from backnorm.torch.checks import check_device
from backnorm.torch.dispatch import PLAIN, in_memory, is_functional
from backnorm.torch.memory import (
    array_of,
    as_type,
    check_memory,
    check_own_memory,
    dense,
    has_no_memory,
    metadata,
    order_of,
    plain,
    wide,
    wide_metadata,
)

TensorOperands = Operands[Tensor]

# A function that allocates a result, given the operands as kernels read them.
Form = Callable[[TensorOperands], Tensor]

_RUNNING = ("running_mean", "running_variance")

# Triton assumes that addresses of arrays are multiples of this number of bytes. PyTorch's
# allocators return addresses that are multiples of a larger power of two.
_ALIGNMENT = 16

# Less than the addresses of most tensors that have memory.
_LOW = 1 << 40


def is_aligned(tensor: Tensor) -> bool:
    """Whether kernels of a GPU can read a tensor in place: whether its address is aligned."""
    return tensor.data_ptr() % _ALIGNMENT == 0


class Tensors(Arrays[Tensor, P]):
    """`Arrays` of strided tensors on a device of one kind."""

    # A tensor of a subclass may report wrong strides.
    classes = (*PLAIN, type(None))

    def facts(self, operands: Sequence[Any], mask: int | None = None) -> list[Hashable]:
        return [
            None
            if each is None
            else (
                type(each),
                each.dtype,
                each.shape,
                each.stride(),
                each.is_cpu or (each.device, is_aligned(each)),
                # Whether the memory of a tensor has its elements before a negation.
                each.is_neg(),
                is_functional(each),
                each.requires_grad,
            )
            for each in operands
        ]

    def new(self, forms: Sequence[Form], operands: TensorOperands) -> list[Tensor]:
        return [form(operands) for form in forms]

    def addresses(self, arrays: TensorOperands) -> list[Any] | None:
        try:
            addresses = [_LOW if each is None else each.data_ptr() for each in arrays]
            is_lost = min(addresses) < _LOW and any(
                each is not None and has_no_memory(each, address)
                for each, address in zip(arrays, addresses, strict=True)
            )
        except RuntimeError:
            # A tensor without storage, such as that of a transform that is over, has no address.
            return None
        return None if is_lost else addresses

    def order_of(self, x: Tensor) -> Order:
        return order_of(x)

    def read(self, operands: Sequence[Any], signature: Signature) -> TensorOperands:
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

    def described(self, read: TensorOperands, signature: Signature) -> Operands[Metadata]:
        x = read[0]
        return [
            None
            if tensor is None
            else wide_metadata(tensor, x)
            if operand.kind == "channel"
            else metadata(tensor)
            for tensor, operand in zip(read, signature.operands, strict=True)
        ]

    def ready(self, read: TensorOperands, problem: Problem, order: Order) -> TensorOperands:
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

    def finished(
        self,
        results: Results,
        operands: TensorOperands,
        ready: TensorOperands,
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
