"""From a plan to launches: which kernels run, in how many programs, with which sizes.

A launch takes anything that Triton accepts as a pointer, such as a PyTorch tensor, and None in the
place of an absent array. A launch allocates memory with the function `new`, which the caller
passes. The kernels of a launch run on the current device and stream. After the first call, which
may tune kernels, a launch never waits for the device, and reads no values back, so a CUDA graph can
capture it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from backnorm.gpu.geometry import Tiling, power_of_two
from backnorm.gpu.kernels import backward, forward
from backnorm.gpu.kernels.parameters import Form, Parts, PartsForm, Sizes, encoded
from backnorm.gpu.plan import GpuPlan
from backnorm.layout import Extents

#: A function that takes a number n, and returns a pointer to new memory for n float64 on the
#: current device.
New = Callable[[int], Any]

#: Arrays on a device, with None in the place of an absent array.
Pointers = Sequence[Any]

# The compiler must not fuse a product and a sum into one instruction. Such an instruction does not
# round the product, but the rounding error of a sum depends on this rounding (see
# `kernels.arithmetic`).
_OPTIONS = {"enable_fp_fusion": False}

# Sizes of the kernel that adds up partial results. At a time, a program adds up `_PARTS` partial
# results of each of `_TOGETHER` channels. `_TOGETHER` is 4, because 4 float64 numbers, one for each
# channel, fill one memory access of 32 bytes. If there are fewer than `3 * _FEW_CHANNELS` channels
# in all, a program adds up only one or two channels at a time. This makes more programs, which run
# at the same time, so the sums take less time.
_PARTS = 1024
_TOGETHER = 4
_FEW_CHANNELS = 128
_FINISH_WARPS = 4


class Kernel:
    """A kernel for arrays of given sizes. The first call compiles the kernel, and may tune it. The
    sizes are the same in every call, so a caller passes only arrays.

    Parameters
    ----------
    function
        A Triton function. Its parameters are arrays, sizes, and compile-time constants.
    programs, warps : int
    sizes : tuple of int
    constants : dict
        The compile-time constants, except one that the autotuner chooses.
    """

    __slots__ = ("_constants", "_function", "_grid", "_rest", "_run", "_sizes", "_warps")

    def __init__(
        self, function: Any, programs: int, warps: int, sizes: Any, constants: dict[str, Any]
    ) -> None:
        self._function, self._grid, self._warps = function, (programs, 1, 1), warps
        self._sizes, self._constants = encoded(sizes), constants
        self._run: Any = None
        # A compiled kernel takes an argument for each constant, but does not use it.
        self._rest = self._sizes, *(None for name in function.arg_names if name.isupper())

    def __call__(self, *arrays: Any) -> None:
        """Run the kernel, which is compiled in the first call. In later calls, each array must have
        the same type, alignment and device as the array for this argument in the first call.
        """
        if self._run is not None:
            self._run(*arrays, *self._rest)
            return
        compiled = self._function[self._grid](
            *arrays, self._sizes, **self._constants, num_warps=self._warps, **_OPTIONS
        )
        # Triton's interpreter returns None instead of a compiled kernel.
        if compiled is not None:
            self._run = compiled[self._grid]


class _Functions(NamedTuple):
    """The kernels of a pass: see the modules `kernels.backward` and `kernels.forward`.

    `planes` is the number of arrays of partial results that `sums` stores; the partial sums of dy
    are one such array.
    """

    sums: Any
    finish: Any
    apply: Any
    complete: Any
    planes: int


_BACKWARD = _Functions(
    backward.backward_sums,
    backward.backward_finish,
    backward.backward_apply,
    backward.backward_complete,
    planes=2,
)
_FORWARD = _Functions(
    forward.forward_sums,
    forward.forward_finish,
    forward.forward_apply,
    forward.forward_complete,
    planes=4,
)


class _Launch:
    """The base class of `BackwardLaunch` and `ForwardLaunch`.

    Parameters
    ----------
    plan : GpuPlan
        The plan of a problem with at least one element.
    new : New
    """

    __slots__ = ("_apply", "_channels", "_complete", "_finish", "_new", "_partials", "_sums")
    _functions: _Functions

    def __init__(self, plan: GpuPlan, new: New) -> None:
        functions, tiling = self._functions, plan.tiling
        form, sizes = _form(plan), _sizes(plan)

        def kernel(function: Any, **constants: Any) -> Kernel:
            constants = {"FORM": constants_of(form), **constants}
            programs = tiling.units * tiling.blocks
            return Kernel(function, programs, tiling.warps, sizes, constants)

        self._new, self._channels = new, plan.extents.channels
        self._complete: Kernel | None = None
        if plan.schedule == "complete":
            self._complete = kernel(functions.complete, STAGES=tiling.stages)
        key = f"{plan.problem.dtype} {form}"
        self._sums = kernel(functions.sums, KEY=key)
        self._apply = kernel(functions.apply, KEY=key)
        self._partials = functions.planes * _partials(plan.extents, tiling)
        self._finish = _finish(functions.finish, plan)


class BackwardLaunch(_Launch):
    """The launches of a backward pass, or of one of its two phases.

    In all methods, `operands` are x, dy, the bits of a mask, mean, variance and gamma, and
    `per_channel` are dgamma and dbeta.
    """

    __slots__ = ()
    _functions = _BACKWARD

    def run(self, operands: Pointers, dx: Any, dresidual: Any, per_channel: Pointers) -> None:
        """Write dx, dgamma and dbeta, and the gradient of the residual."""
        if self._complete is None:
            self.apply(operands, self.reduce(operands, per_channel), dx, dresidual)
            return
        gradients = backward.Gradients(*per_channel)
        self._complete(*_of_dx(operands, dresidual, None), gradients, dx)

    def reduce(self, operands: Pointers, per_channel: Pointers = ()) -> Any:
        """Return an array of sum_dy, sum_dy_xmu and the element count; write dgamma and dbeta.

        Callers may add up the arrays that `reduce` returns in several processes, and pass the
        result to `apply`.
        """
        x, dy, bits, mean, variance, _ = operands
        gradients = backward.Gradients(*per_channel) if per_channel else None
        partials, sums = self._new(self._partials), self._new(2 * self._channels + 1)
        self._sums(backward.Elements(x, dy, bits, None), mean, partials)
        self._finish(partials, variance, sums, gradients)
        return sums

    def apply(self, operands: Pointers, sums: Any, dx: Any, dresidual: Any = None) -> None:
        """Write dx, and the gradient of the residual, given the results of `reduce`."""
        self._apply(*_of_dx(operands, dresidual, sums), dx)


class ForwardLaunch(_Launch):
    """The launches of a forward pass, or of inference."""

    __slots__ = ()
    _functions = _FORWARD

    def run(
        self, operands: Pointers, outputs: Pointers, running: Pointers, momentum: float
    ) -> None:
        """Write y, the bits of the mask, the mean and the variance; update the running statistics.

        `operands` are x, the residual, gamma and beta. `outputs` are y, the bits of the mask, the
        mean and the variance. `running` are the running mean and variance.
        """
        (x, residual, gamma, beta), (y, bits, *per_channel) = operands, outputs
        if self._complete is None:
            moments = self.reduce(x, per_channel, running, momentum)
            self.apply(operands, moments, y, bits)
            return
        elements = forward.Elements(x, residual, bits)
        statistics = _statistics(per_channel, running, momentum)
        self._complete(elements, forward.Channels(None, None, gamma, beta), statistics, y)

    def reduce(
        self, x: Any, per_channel: Pointers, running: Pointers = (None, None), momentum: float = 0.0
    ) -> Any:
        """Return three float64 rows: the mean, its rounding error (exact minus rounded), the
        variance.

        Also write mean and variance to `per_channel`, and update the `running` statistics.
        """
        partials, moments = self._new(self._partials), self._new(3 * self._channels)
        self._sums(x, partials)
        statistics = _statistics(per_channel, running, momentum)
        self._finish(partials, moments, statistics)
        return moments

    def apply(self, operands: Pointers, moments: Any, y: Any, bits: Any) -> None:
        """Write y to the memory `y`. The argument `moments` is what `reduce` returned.

        If `bits` is not None, the mask of y is written to it.
        """
        x, residual, gamma, beta = operands
        channels = forward.Channels(moments, None, gamma, beta)
        self._apply(forward.Elements(x, residual, bits), channels, y)

    def infer(self, operands: Pointers, y: Any) -> None:
        """Write y, given x, the residual, mean, variance, gamma and beta."""
        x, residual, *channels = operands
        self._apply(forward.Elements(x, residual, None), forward.Channels(*channels), y)


def _of_dx(
    operands: Pointers, dresidual: Any, sums: Any
) -> tuple[backward.Elements, backward.Channels]:
    x, dy, bits, mean, variance, gamma = operands
    elements = backward.Elements(x, dy, bits, dresidual)
    return elements, backward.Channels(mean, variance, gamma, sums)


def _sizes(plan: GpuPlan) -> Sizes:
    tiling, extents = plan.tiling, plan.extents
    return Sizes(
        rows=tiling.rows,
        width_units=tiling.width // tiling.align,
        total_units=plan.problem.size // tiling.align,
        channels=extents.channels,
        inner=extents.inner,
        pieces=tiling.pieces,
        tiles=tiling.tiles,
        per_block=tiling.per_block,
        units=tiling.units,
    )


def _form(plan: GpuPlan) -> Form:
    tiling, problem = plan.tiling, plan.problem
    return Form(
        columns=tiling.columns,
        partial=tiling.partial,
        tile_rows=tiling.tile_rows,
        tile_columns=tiling.tile_columns,
        align=tiling.align,
        arithmetic=plan.arithmetic,
        relu=problem.relu,
        ceiling=problem.ceiling,
        training=problem.training,
        epsilon=problem.epsilon,
    )


def constants_of(form: Any) -> Any:
    """Return a tuple with each value marked as a constant, because older versions of Triton treat
    plain values in a tuple as variables.
    """
    return type(form)(*map(tl.constexpr, form))


def _partials(extents: Extents, tiling: Tiling) -> int:
    """Return the number of partial results of one kind, such as the sums of dy."""
    return tiling.blocks * (tiling.width if tiling.columns else extents.channels)


def _finish(function: Any, plan: GpuPlan) -> Kernel:
    """Return the kernel that adds up partial results."""
    extents, tiling, problem = plan.extents, plan.tiling, plan.problem
    # If `tiling.columns` is true, each column of elements has its own partial results, and a
    # channel has `inner` adjacent columns.
    inner = extents.inner if tiling.columns else 1
    rows = tiling.blocks * tiling.repeats
    together = 1
    if inner == 1:
        together = min(_TOGETHER, power_of_two(max(1, extents.channels // _FEW_CHANNELS)))
    form = PartsForm(together, min(_PARTS // together, power_of_two(rows * inner)), problem.epsilon)
    sizes = Parts(extents.channels, inner, rows, problem.count)
    programs = -(-extents.channels // together)
    return Kernel(function, programs, _FINISH_WARPS, sizes, {"FORM": constants_of(form)})


def _statistics(per_channel: Pointers, running: Pointers, momentum: float) -> forward.Statistics:
    (mean, variance), (running_mean, running_variance) = per_channel, running
    high = float(np.float32(momentum))
    low = momentum - high
    return forward.Statistics(mean, variance, running_mean, running_variance, high, low)
