"""From a plan to launches: which kernels run, in how many programs, with which sizes.

A launch takes anything that Triton accepts as a pointer, such as a PyTorch tensor. A launch
allocates memory with the function `new`, which the caller passes. The kernels of a launch run on
the current device and stream. A launch never waits for the device, and reads no values back, so a
CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from backnorm.gpu.geometry import Tiling, power_of_two
from backnorm.gpu.kernels import backward, forward
from backnorm.gpu.kernels.frame import Form
from backnorm.gpu.plan import GpuPlan
from backnorm.interfaces import Launch
from backnorm.layout import Extents
from backnorm.problem import Problem

#: A function that takes a number n, and returns a pointer to new memory for n float64 on the
#: current device.
New = Callable[[int], Any]

#: Arrays on a device, with None in the place of an absent array.
Pointers = Sequence[Any]

#: A function that takes the same arguments as the class `Kernel`. It returns a `Kernel`, or another
#: object that is called in the same way.
Make = Callable[..., Any]

#: The compiler must not fuse a product and a sum into one instruction. Such an instruction does not
#: round the product, but error-free transformations depend on this rounding (see
#: `kernels.arithmetic`).
OPTIONS = {"enable_fp_fusion": False}

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
    """A kernel for arrays of given sizes. The first call compiles the kernel. The sizes are the
    same in every call, so a caller passes only pointers and numbers.

    Parameters
    ----------
    function
        A Triton function. Its arguments are inputs, sizes, numbers, outputs and constants.
    programs : int
    sizes : tuple of int
    constants : dict
        Arguments that are known at compile time.
    warps : int
    """

    __slots__ = ("_constants", "_function", "_grid", "_run", "_sizes", "_values", "_warps")

    def __init__(
        self,
        function: Any,
        programs: int,
        sizes: tuple[int, ...],
        constants: dict[str, Any],
        warps: int,
    ) -> None:
        self._function, self._grid, self._sizes = function, (programs, 1, 1), sizes
        self._constants, self._values = constants, tuple(constants.values())
        self._warps = warps
        self._run: Any = None

    def __call__(
        self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], numbers: tuple[float, ...] = ()
    ) -> None:
        """Run the kernel, which is compiled in the first call. In later calls, each pointer must
        have the same type, alignment and device as the pointer for this argument in the first call.
        """
        if self._run is not None:
            self._run(*inputs, *self._sizes, *numbers, *outputs, *self._values)
            return
        compiled = self._function[self._grid](
            *inputs,
            *self._sizes,
            *numbers,
            *outputs,
            **self._constants,
            num_warps=self._warps,
            **OPTIONS,
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
    problem : Problem
        A problem with at least one element.
    plan : GpuPlan
    new : New
    make : Make
        Makes the kernels: `Kernel`, or a function for another way to launch them.
    finishing, completing : dict
        Constants of the kernel that adds up partial results, and of the kernel that computes
        everything.
    """

    __slots__ = ("_apply", "_channels", "_complete", "_finish", "_new", "_partials", "_sums")
    _functions: _Functions

    def __init__(
        self,
        problem: Problem,
        plan: GpuPlan,
        new: New,
        make: Make,
        finishing: dict[str, Any],
        completing: dict[str, Any],
    ) -> None:
        functions, extents, tiling = self._functions, plan.extents, plan.tiling
        form = {"FORM": _form(problem, plan)}
        sizes = _sizes(problem, extents, tiling)

        def kernel(function: Any, **constants: Any) -> Any:
            programs = tiling.units * tiling.blocks
            return make(function, programs, sizes, {**form, **constants}, tiling.warps)

        whole = plan.schedule == "complete"
        self._new, self._channels = new, extents.channels
        self._complete = kernel(functions.complete, **completing) if whole else None
        self._sums, self._apply = kernel(functions.sums), kernel(functions.apply)
        self._partials = functions.planes * _places(extents, tiling)
        self._finish = _finish(make, functions.finish, problem, extents, tiling, finishing)


class BackwardLaunch(_Launch):
    """The launches of a backward pass, or of one of its two phases.

    In all methods, `operands` are x, dy, the bits of a mask, mean, variance and gamma, and
    `per_channel` are dgamma and dbeta. If an array is absent, None takes its place.
    """

    __slots__ = ()
    _functions = _BACKWARD

    def __init__(self, problem: Problem, plan: GpuPlan, new: New, make: Make = Kernel) -> None:
        finishing = {"EPSILON": problem.epsilon, "GRADIENTS": problem.operation == "backward"}
        super().__init__(problem, plan, new, make, finishing, {})

    def run(self, operands: Pointers, dx: Any, dresidual: Any, per_channel: Pointers) -> None:
        """Write dx, dgamma and dbeta, and the gradient of the residual."""
        if self._complete is not None:
            self._complete(_filled(operands), (dx, _some(dresidual, dx), *per_channel))
            return
        self.apply(operands, self.reduce(operands, per_channel), dx, dresidual)

    def reduce(self, operands: Pointers, per_channel: Pointers = (None, None)) -> Any:
        """Return an array of sum_dy, sum_dy_xmu and the element count; write dgamma and dbeta.

        Callers may add up the arrays that `reduce` returns in several processes, and pass the
        result to `apply`.
        """
        x, dy, bits, mean, variance, _ = operands
        partials, sums = self._new(self._partials), self._new(2 * self._channels + 1)
        self._sums((x, dy, _some(bits, x), mean), (partials,))
        written = (_some(each, sums) for each in per_channel)
        self._finish((partials, _some(variance, mean)), (sums, *written))
        return sums

    def apply(self, operands: Pointers, sums: Any, dx: Any, dresidual: Any = None) -> None:
        """Write dx, and the gradient of the residual, given the results of `reduce`."""
        self._apply((*_filled(operands), sums), (dx, _some(dresidual, dx)))


class ForwardLaunch(_Launch):
    """The launches of a forward pass, or of inference."""

    __slots__ = ()
    _functions = _FORWARD

    def __init__(self, problem: Problem, plan: GpuPlan, new: New, make: Make = Kernel) -> None:
        constants = {"MOVING": problem.running}
        super().__init__(problem, plan, new, make, constants, constants)

    def run(
        self, operands: Pointers, outputs: Pointers, running: Pointers, momentum: float
    ) -> None:
        """Write y, the bits of the mask, the mean and the variance; update the running statistics.

        `operands` are x, the residual, gamma and beta. `outputs` are y, the bits of the mask, the
        mean and the variance. `running` are the running mean and variance. Absent arrays are None.
        """
        operands, (y, bits, mean, variance) = _filled(operands), outputs
        if self._complete is None:
            moments = self.reduce(operands[0], (mean, variance), running, momentum)
            self.apply(operands, moments, y, bits)
            return
        old = tuple(_some(one, mean) for one in running)
        written = y, _some(bits, y), mean, variance
        self._complete((*operands, *old), (*written, *old), _in_two(momentum))

    def reduce(
        self, x: Any, per_channel: Pointers, running: Pointers = (None, None), momentum: float = 0.0
    ) -> Any:
        """Return three float64 rows: the mean, its rounding error (exact minus rounded), the
        variance.

        Also write mean and variance to `per_channel`, and update the `running` statistics.
        """
        mean, variance = per_channel
        old = tuple(_some(one, mean) for one in running)
        partials, moments = self._new(self._partials), self._new(3 * self._channels)
        self._sums((x,), (partials,))
        self._finish((partials, *old), (moments, mean, variance, *old), _in_two(momentum))
        return moments

    def apply(self, operands: Pointers, moments: Any, y: Any, bits: Any) -> None:
        """Write y to the memory `y`. The argument `moments` is what `reduce` returned.

        If `bits` is not None, the mask of y is written to it.
        """
        x, residual, gamma, beta = _filled(operands)
        self._apply((x, residual, moments, moments, gamma, beta), (y, _some(bits, y)))

    def infer(self, operands: Pointers, y: Any) -> None:
        """Write y, given x, the residual, mean, variance, gamma and beta."""
        self._apply(_filled(operands), (y, y))


class Launches(Launch):
    """The stages of a problem on a GPU, for any framework.

    The stages of a CPU take addresses, which are integers. These stages take the arrays themselves
    (`Pointers`), such as tensors of PyTorch.

    Parameters
    ----------
    problem, plan, new, make
        As in `_Launch`.
    """

    __slots__ = ("_backward", "_forward")
    _backward: Any
    _forward: Any

    def __init__(self, problem: Problem, plan: GpuPlan, new: New, make: Make = Kernel) -> None:
        self._backward = self._forward = None
        if "dy" in problem.signature.names:
            self._backward = BackwardLaunch(problem, plan, new, make)
        else:
            self._forward = ForwardLaunch(problem, plan, new, make)

    def complete(self, *places: Any, momentum: float = 0.0) -> int:
        """Compute all results of a forward or a backward pass.

        Return -1, which stands for "no invalid variance", because the kernels check no variance.

        `places` has a pointer for each name in `interfaces.ADDRESSES`, in the same order. It has
        None for an array that is absent.
        """
        x, dy, out, residual, mask, mean, variance, gamma, beta, *results = places
        if self._forward is None:
            self._backward.run((x, dy, mask, mean, variance, gamma), out, residual, results[:2])
        else:
            outputs = out, mask, *results[:2]
            self._forward.run((x, residual, gamma, beta), outputs, results[2:4], momentum)
        return -1

    def apply(self, *places: Any, sums: Any = None) -> int:
        """Compute y from given statistics, or dx from the results of `sums`."""
        x, dy, out, residual, mask, mean, variance, gamma, beta, *_ = places
        if self._forward is None:
            self._backward.apply((x, dy, mask, mean, variance, gamma), sums, out, residual)
        else:
            self._forward.infer((x, residual, mean, variance, gamma, beta), out)
        return -1

    def sums(self, *places: Any) -> Any:
        """Return an array of sum_dy, sum_dy_xmu and the element count."""
        x, dy, _, _, mask, mean, variance, gamma, *_ = places
        return self._backward.reduce((x, dy, mask, mean, variance, gamma))

    def moments(self, x: Any, per_channel: Pointers) -> Any:
        """Write mean and variance to `per_channel`; return the rows of `ForwardLaunch.reduce`."""
        return self._forward.reduce(x, per_channel)

    def normalise(self, moments: Any, *places: Any) -> None:
        """Write y. The argument `moments` is what the method `moments` returned.

        If there is memory for a mask, the mask of y is written to it.
        """
        x, _, out, residual, mask, _, _, gamma, beta, *_ = places
        self._forward.apply((x, residual, gamma, beta), moments, out, mask)


def _sizes(problem: Problem, extents: Extents, tiling: Tiling) -> tuple[int, ...]:
    """Return the values of a kernel's size arguments, in the order of `frame.SIZES`."""
    return (
        tiling.rows,
        tiling.width // tiling.align,
        problem.size // tiling.align,
        extents.channels,
        extents.inner,
        tiling.pieces,
        tiling.tiles,
        tiling.per_block,
        tiling.units,
    )


def _form(problem: Problem, plan: GpuPlan) -> Form:
    tiling = plan.tiling
    values = Form(
        columns=tiling.columns,
        partial=tiling.partial,
        tile_rows=tiling.tile_rows,
        tile_columns=tiling.tile_columns,
        stages=tiling.stages,
        align=tiling.align,
        arithmetic=plan.arithmetic,
        moments=plan.moments,
        relu=problem.relu,
        residual=problem.residual,
        training=problem.training,
        has_gamma=problem.has_gamma,
        has_beta=problem.has_beta,
        epsilon=problem.epsilon,
        ceiling=problem.ceiling,
    )
    # Each value is marked as a constant, because older versions of Triton treat plain values in a
    # tuple as variables.
    return Form(*map(tl.constexpr, values))


def _places(extents: Extents, tiling: Tiling) -> int:
    """Return the number of partial results of one kind, such as the sums of dy."""
    return tiling.blocks * (tiling.width if tiling.columns else extents.channels)


def _finish(
    make: Make,
    function: Any,
    problem: Problem,
    extents: Extents,
    tiling: Tiling,
    constants: dict[str, Any],
) -> Any:
    """Return the kernel that adds up partial results."""
    # If `tiling.columns` is true, each column of elements has its own partial results, and a
    # channel has `inner` adjacent columns.
    inner = extents.inner if tiling.columns else 1
    parts = tiling.blocks * tiling.repeats
    together = 1
    if inner == 1:
        together = min(_TOGETHER, power_of_two(max(1, extents.channels // _FEW_CHANNELS)))
    tile = {
        "TILE_CHANNELS": together,
        "TILE_PARTS": min(_PARTS // together, power_of_two(parts * inner)),
    }
    sizes = extents.channels, inner, parts, problem.count
    programs = -(-extents.channels // together)
    return make(function, programs, sizes, {**tile, **constants}, _FINISH_WARPS)


def _filled(operands: Pointers) -> Pointers:
    """Return the operands, with the first operand in place of each absent one (None).

    The kernel does not use the pointer that it gets for an absent operand.
    """
    return tuple(_some(each, operands[0]) for each in operands)


def _some(pointer: Any, otherwise: Any) -> Any:
    """Return `pointer`, or `otherwise` if `pointer` is None, which kernels do not accept."""
    return otherwise if pointer is None else pointer


def _in_two(value: float) -> tuple[float, float]:
    """Return two numbers whose sum is `value`.

    Triton passes a Python float to a kernel as a float32, which has 24 significant bits. Two such
    numbers together have 48.
    """
    high = float(np.float32(value))
    return high, value - high
