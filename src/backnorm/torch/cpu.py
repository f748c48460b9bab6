"""CPU tensors as `interfaces.Arrays`, and the operations that read and write their memory.

Per-channel tensors have x's type. If x has a 16-bit type, float32 per-channel tensors are accepted,
too. 16-bit per-channel tensors are converted to float32, so that statistics are computed and
returned in float32. Results have the strides of `torch.empty_like(x)`: those of x, if x is dense in
some order of its axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backnorm import engines
from backnorm.allocation import LARGE
from backnorm.arithmetics import check_arithmetic
from backnorm.engines import Place
from backnorm.errors import ArgumentValueError
from backnorm.executable import compute
from backnorm.interfaces import Arrays, Launch, Operands, P, Results
from backnorm.layout import Extents, Order, mask_size
from backnorm.options import Options
from backnorm.problem import Metadata, Problem
from backnorm.reproducible_sums import bin_rows
from backnorm.second_order import arrays
from backnorm.signature import Kind, Operand, Signature
from backnorm.torch.checks import check_device
from backnorm.torch.tensors import (
    PLAIN,
    array_of,
    as_type,
    check_memory,
    check_own_memory,
    dense,
    empty_like,
    has_no_memory,
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

# A function that allocates a result, given the operands as kernels read them.
_Form = Callable[[_Operands], Tensor]

_RUNNING = ("running_mean", "running_variance")

# Less than the addresses of most tensors that have memory.
_LOW = 1 << 40


class Tensors(Arrays[Tensor, P]):
    """The implementation of `Arrays` for strided tensors; CPUs and GPUs have a subclass each."""

    # A tensor of a subclass may report wrong strides.
    classes = (*PLAIN, type(None))

    def new(self, forms: Sequence[_Form], operands: _Operands) -> list[Tensor]:
        return [form(operands) for form in forms]

    def have_no_memory(self, operands: _Operands) -> bool:
        try:
            for tensor in operands:
                if tensor is not None:
                    address = tensor.data_ptr()
                    if address < _LOW and has_no_memory(tensor, address):
                        return True
        except RuntimeError:
            # A tensor without storage, such as that of a transform that is over, has no address.
            return True
        return False

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


# Less than the address of most arrays in memory.
_LOW = 1 << 40


class _CpuTensors(Tensors[Place]):
    def facts(self, operands: Sequence[Any], mask: int | None) -> list[Hashable]:
        return [
            None
            if each is None
            # `is_neg` is true for a lazily negated tensor, whose memory has the elements before
            # negation.
            else (type(each), each.dtype, each.shape, each.stride(), each.is_cpu, each.is_neg())
            for each in operands
        ]

    def forms(self, problem: Problem, order: Order) -> dict[Kind, _Form]:
        make = empty_like if problem.data_bytes >= LARGE else torch.empty_like
        channels, reproducible = problem.channels, problem.reproducible
        rows = bin_rows(problem.dtype.itemsize) if reproducible else 2
        # `empty_like` of a tensor takes 0.2 us less than `empty` with a type.
        statistics = _like((channels,), problem.statistics_dtype.name)
        coefficients = _like((4, channels), problem.arithmetic)
        sums = _like((rows, channels), "int64" if reproducible else "float64")
        size = mask_size(problem.size)
        return {
            "data": lambda operands: make(operands[0]),
            "channel": lambda _: torch.empty_like(statistics),
            "mask": lambda _: torch.empty(size, dtype=torch.uint8),
            "sums": lambda _: torch.empty_like(sums),
            "coefficients": lambda _: torch.empty_like(coefficients),
        }

    def addresses(self, operands: _Operands, results: Sequence[Tensor]) -> list[int]:
        arrays = (*operands, *results)
        return [*(0 if tensor is None else tensor.data_ptr() for tensor in arrays), 0]

    def place(self, x: Tensor | None) -> Place:
        engines.kernels("tensors of PyTorch")
        return engines.place()

    def planned(self, problem: Problem, extents: Extents, place: Place) -> tuple[Any, Launch]:
        return engines.planned(problem, extents, place)


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


def reduce_forward(operands: _Operands, options: Options) -> Results:
    """See `synchronised`."""
    return compute("reduce_forward", operands, options, arrays=TENSORS)


def reduce(operands: _Operands, options: Options) -> Results:
    """See `synchronised`."""
    return compute("reduce", operands, options, arrays=TENSORS)


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
    options = Options(eps, arithmetic=check_arithmetic(arithmetic))
    mean, variance, coefficients = compute(
        "forward_coefficients", (x, weight, bias), options, arrays=TENSORS
    )
    return mean, variance, coefficients


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
    options = Options(eps, training=training, arithmetic=check_arithmetic(arithmetic))
    dweight, dbias, coefficients = compute(
        "backward_coefficients", (x, dy, mean, variance, weight), options, arrays=TENSORS
    )
    return dweight, dbias, coefficients


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
