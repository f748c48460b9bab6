"""The operations on the memory of CUDA tensors, by Triton. Nothing here knows autograd.

The counterpart of `cpu`, with the same functions. Kernels run on the tensors' device, on its
current stream; nothing here waits for them or reads a value, so a call can be captured in a CUDA
graph once the same call has run before. For the same reason variance + epsilon <= 0 is no error
here: the channel becomes infinite or NaN, as PyTorch's does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from backnorm.binding import Code
from backnorm.cpu.record import ADDRESSES
from backnorm.executable import forget, operation
from backnorm.gpu.device import Gpu
from backnorm.gpu.launch import Launches
from backnorm.gpu.plan import GpuPlan, Knobs, plan_gpu
from backnorm.layout import Extents, Order, extents_of, mask_size
from backnorm.problem import Problem
from backnorm.signature import Operation
from backnorm.torch import binned_sums as bins
from backnorm.torch.activations import activated, derivative
from backnorm.torch.memory import (
    check_before_pytorch,
    contiguous,
    dense,
    is_beyond,
    order_of,
    storage_of,
    users_of,
)
from backnorm.torch.second_order import double_backward
from backnorm.torch.tensors import Tensors

__all__ = [
    "TENSORS",
    "Place",
    "activation_backward",
    "apply",
    "apply_forward",
    "backward",
    "double_backward",
    "forward",
    "forward_activated",
    "gpu_of",
    "inference",
    "inference_activated",
    "message",
    "on",
    "parts",
    "place_of",
    "reduce",
    "reduce_bins",
    "reduce_forward",
    "reduce_forward_bins",
    "unpack_mask",
    "use",
]

# Bytes that the compiler takes the arrays to be aligned to. Torch's allocators align to more.
_ALIGNMENT = 16

_NOTHING = nullcontext()

_devices: dict[torch.device, Gpu] = {}

# Where the two results of channels are among the addresses.
_FIRST_RESULT, _AFTER_RESULTS = ADDRESSES.index("result"), ADDRESSES.index("result_2") + 1

#: A problem as it lies in memory, and where.
Place = tuple[Problem, Extents, Gpu]

# What tuning has found.
_tuned: dict[Place, Knobs] = {}


class _Where(NamedTuple):
    """A device, and what a plan must know of it."""

    device: torch.device
    gpu: Gpu


class _Launches(Launches):
    """The launches of a problem on a device; without elements results of channels are zero."""

    def __init__(self, problem: Problem, plan: GpuPlan, device: Any) -> None:
        def new(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.float64, device=device)

        super().__init__(problem, plan, new)

    def complete(self, *places: Any, momentum: float = 0.0) -> int:
        """Compute all results of a forward or a backward pass."""
        x = places[0]
        if x.numel():
            with on(x):
                return super().complete(*places, momentum=momentum)
        for result in places[_FIRST_RESULT:_AFTER_RESULTS]:
            result.zero_()
        return -1

    def apply(self, *places: Any, sums: Any = None, count: Any = None) -> int:
        """Compute an inference, or, from the sums of all parts, the gradients of elements."""
        x = places[0]
        if x.numel():
            with on(x):
                row = None if sums is None else torch.cat((*sums, count))
                return super().apply(*places, sums=row)
        return -1

    def sum_all(self, *places: Any) -> int:
        """Write the sums of every channel, or its mean and variance."""
        x, *_, sums = places
        if not x.numel():
            sums.zero_()
            return -1
        with on(x):
            if self._forward is None:
                sums.view(-1).copy_(self.sums(*places)[:-1])
            else:
                # The mean's rest is less than float64 holds beside it.
                self.moments(x, tuple(sums))
        return -1

    def finish(self, *places: Any, sums: tuple[Tensor, Tensor], count: Any = None) -> int:
        """Write the output of a forward pass, and mean and variance, from those of all parts."""
        for result, value in zip(places[_FIRST_RESULT:_AFTER_RESULTS], sums, strict=True):
            result.copy_(value)
        x, (mean, variance) = places[0], sums
        if x.numel():
            with on(x):
                rows = torch.cat((mean, torch.zeros_like(mean), variance))
                self.normalise(rows, *places)
        return -1


class _Tensors(Tensors):
    """What an executable needs to know of tensors on a CUDA device."""

    code = Code(
        arrays="torch, cuda",
        facts="(type({}), {}.dtype, {}.shape, {}.stride(), {}.device, {}.is_neg(), "
        f"{{}}.data_ptr() % {_ALIGNMENT} == 0)",
        lost="(not {0}.data_ptr() and {0}.numel()) "
        "or (users_of(storage_of({0})) > 1 and {0}.untyped_storage().nbytes() < {0}.nbytes) "
        "or ({0}.storage_offset() and is_beyond({0}))",
        address="{}",
        absent="None",
        constants=("channels", "statistics", "mask_bytes", "count"),
        new={
            "data": "empty_like(x)",
            "channel": "x.new_empty(channels, dtype=statistics)",
            "mask": "x.new_empty(mask_bytes, dtype=bits)",
            "sums": "x.new_empty((2, channels), dtype=double)",
            "count": "count",
            # A kernel writes whichever of the accepted types they are of.
            "dgamma": "empty_like(mean if gamma is None else gamma)",
            "dbeta": "empty_like(mean if gamma is None else gamma)",
        },
    )
    names: ClassVar[dict[str, Any]] = {
        "bits": torch.uint8,
        "double": torch.float64,
        "empty_like": torch.empty_like,
        "is_beyond": is_beyond,
        "storage_of": storage_of,
        "users_of": users_of,
    }

    def values(self, problem: Problem, order: Order) -> tuple[Any, ...]:
        """Return the values of `code.constants`."""
        statistics = getattr(torch, problem.statistics_dtype.name)
        return problem.channels, statistics, mask_size(problem.size), problem.count

    def place(self, x: Tensor) -> _Where:
        """Return the device of x."""
        return _Where(x.device, gpu_of(x.device))

    def planned(
        self, problem: Problem, extents: Extents, where: Any, exchanged: bool
    ) -> tuple[GpuPlan, _Launches]:
        """Return a plan and its launches."""
        place = problem, extents, where.gpu
        plan = plan_gpu(*place, _tuned.get(place))
        return plan, _Launches(problem, plan, where.device)

    def data(self, x: Tensor) -> Tensor:
        """Return a tensor that is dense, plain and aligned: itself, or a copy."""
        x = dense(x)
        return x if x.data_ptr() % _ALIGNMENT == 0 else x.detach().clone()

    def channel(self, tensor: Tensor, x: Tensor) -> Tensor:
        """Return a per-channel tensor as kernels read it: of 16 bits, too."""
        return contiguous(tensor)


TENSORS = _Tensors()

#: See `kernels`.
forward, inference = operation("forward", TENSORS), operation("inference", TENSORS)
backward = operation("backward", TENSORS)


def forward_activated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    eps: float,
    data_format: str,
    activation: str,
    arithmetic: str,
    *,
    momentum: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels`; PyTorch's operator applies the activation."""
    how = eps, data_format, None, arithmetic, False
    moved = {"momentum": momentum}
    z, of_batch, variance, _ = forward(x, None, weight, bias, mean, variance, *how, **moved)
    return activated(z, activation, in_place=True), of_batch, variance


def inference_activated(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    data_format: str,
    activation: str,
    arithmetic: str,
) -> tuple[Tensor]:
    """See `kernels`; PyTorch's operator applies the activation."""
    how = eps, data_format, None, arithmetic
    (z,) = inference(x, None, mean, variance, weight, bias, *how)
    return (activated(z, activation, in_place=True),)


def activation_backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    data_format: str,
    activation: str,
    arithmetic: str,
    _out: None,
) -> tuple[Tensor]:
    """See `kernels`; PyTorch's operator makes the gradient of what it was applied to."""
    how = eps, data_format, None, arithmetic
    (z,) = inference(x, None, mean, variance, weight, bias, *how)
    check_before_pytorch(dy=dy, input=z)
    return (derivative(dy, z, activation, overwrite=True),)


#: See `phases`.
reduce_forward, apply_forward = (
    operation("reduce_forward", TENSORS),
    operation("apply_forward", TENSORS),
)
reduce, apply = operation("reduce", TENSORS), operation("apply", TENSORS)


def reduce_forward_bins(x: Tensor, _arithmetic: str) -> tuple[Tensor, int]:
    """Return the sums of x and of x^2 as integers, and the elements of a channel: see `bins`."""
    TENSORS.checked("reduce_forward", (x,))
    return bins.of_forward(x)


def reduce_bins(
    x: Tensor, dy: Tensor, mask: Tensor | None, mean: Tensor, _arithmetic: str
) -> tuple[Tensor, int]:
    """Return what `reduce` sums as integers, and the elements of a channel: see `bins`."""
    TENSORS.checked("reduce", (x, dy, mask, mean))
    counts = None if mask is None else unpack_mask(mask, x)
    return bins.of_backward(x, dy, counts, mean)


def message(sums: Tensor, count: int) -> Tensor:
    """Return what a phase tells the next as one tensor; the count, too, without a wait."""
    return torch.cat((sums.flatten(), sums.new_full((1,), count)))


def parts(message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `message` was made of."""
    channels = message.numel() // 2
    return message[:channels], message[channels:-1], message[-1:]


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask of a forward pass as booleans that lie as x does."""
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


def place_of(name: Operation, *operands: Tensor | None, **options: Any) -> Place:
    """Check the tensors of a call, and return what is planned."""
    problem, (x, *_) = TENSORS.checked(name, operands, **options)
    extents = extents_of(problem.shape, problem.channel_axes, order_of(x))
    return problem, extents, gpu_of(x.device)


def use(place: Place, knobs: Knobs) -> None:
    """Plan a problem with these knobs from now on."""
    _tuned[place] = knobs
    forget()


def on(x: Tensor) -> AbstractContextManager[Any]:
    """Make x's device the current one: kernels are launched there."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)
