"""The operations of backnorm as primitives of JAX.

On each platform (CPU, CUDA), a primitive is compiled to different code. On CPUs, a primitive runs a
kernel if XLA can call the kernels. On CUDA devices, it runs a kernel if jax-triton can launch the
kernels. In all other cases, JAX compiles the formulas of the module `formulas`, which are plain
`jax.numpy` code. The primitive that returns only the statistics uses formulas on all platforms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from backnorm.activations import RELU
from backnorm.jax import check, cuda, ffi, formulas, launches, sharding
from backnorm.jax.activations import activated
from backnorm.jax.batching import lowering, new_primitive, over_batch
from backnorm.jax.problems import Options, is_known
from backnorm.signature import Operation


def bind(primitive: Any, *operands: jax.Array, options: Options) -> tuple[jax.Array, ...]:
    """Return the results of a primitive for one problem, not for a batch of problems."""
    return tuple(primitive.bind(*operands, options=options, batched=False))


def _primitive(
    name: str, operation: Operation, formula: Callable[..., Any], like: tuple[int, ...]
) -> Any:
    """Return a new primitive with its lowerings.

    Parameters
    ----------
    name : str
    operation : str
        The kernels' operation that computes the primitive.
    formula : callable
        The function of one problem that computes the primitive by formulas.
    like : tuple of int
        For every result, the operand that has its shape and type.
    """

    def computed(*operands: jax.Array, options: Options, batched: bool) -> Any:
        if options.reproducible:
            check.check_not_reproducible(operands[like[0]].shape)
        return over_batch(partial(formula, options=options), batched)(*operands)

    def by_kernel(*operands: jax.Array, options: Options) -> Any:
        return ffi.call(operation, operands, [operands[k] for k in like], options)

    by_formula = mlir.lower_fun(computed, multiple_results=True)
    by_triton = lowering(partial(cuda.computed, operation, like))

    def lowered_for_cpu(context: Any, *operands: Any, **parameters: Any) -> Any:
        rule = by_formula
        if is_known(context.avals_in[like[0]].shape) and ffi.is_usable():
            devices = sharding.devices_of(context)
            rule = sharding.split_lowering(operation, by_kernel, devices)
        return rule(context, *operands, **parameters)

    def lowered_for_cuda(context: Any, *operands: Any, **parameters: Any) -> Any:
        shape, devices = context.avals_in[like[0]].shape, context.module_context.axis_context
        # Only CPU kernels have reproducible sums. If a call requests reproducible sums,
        # `by_formula` raises an error.
        if parameters["options"].reproducible or not cuda.by_kernels(shape, devices):
            return by_formula(context, *operands, **parameters)
        with launches.compiling():
            return by_triton(context, *operands, **parameters)

    primitive = new_primitive(f"backnorm_{name}", partial(_types, like), like)
    mlir.register_lowering(primitive, by_formula)
    mlir.register_lowering(primitive, lowered_for_cpu, platform="cpu")
    mlir.register_lowering(primitive, lowered_for_cuda, platform="cuda")
    return primitive


def _types(like: tuple[int, ...], *operands: Any, **_: Any) -> list[Any]:
    return [operands[k].update(weak_type=False) for k in like]


FORWARD = _primitive("forward", "forward", formulas.forward, like=(0, 1, 1))
NORMALIZE = _primitive("normalize", "inference", formulas.normalize, like=(0,))
BACKWARD = _primitive("backward", "backward", formulas.backward, like=(1, 4, 4))


def _forward_relu() -> Any:
    """Return the primitive that computes y = max(0, batch_norm(x) + residual), mean and variance.

    The operands are those of `FORWARD`, and optionally a residual. XLA does not fuse its own loops
    with a custom call, so a separate ReLU would be one more pass over all elements. For the
    derivative, y is saved instead of the mask that the kernel writes, because the next operation
    saves y anyway.
    """
    like = (0, 1, 1)

    def composed(*operands: jax.Array, **parameters: Any) -> Any:
        y, mean, variance = FORWARD.bind(*operands[:3], **parameters)
        return [activated(y, operands[3] if operands[3:] else None, RELU), mean, variance]

    def by_kernel(*operands: jax.Array, options: Options) -> Any:
        results = [operands[k] for k in like]
        return ffi.call("forward", operands, results, options, activation=RELU)

    by_composition = mlir.lower_fun(composed, multiple_results=True)
    by_call = lowering(by_kernel)

    def lowered_for_cpu(context: Any, *operands: Any, **parameters: Any) -> Any:
        known = is_known(context.avals_in[0].shape) and ffi.reason_against() is None
        # A kernel that also computes a ReLU writes a mask. The mask does not have the axes of x, so
        # it cannot be split over devices as x is.
        split = parameters["options"].reproducible or sharding.devices_of(context)
        rule = by_call if known and not split else by_composition
        return rule(context, *operands, **parameters)

    primitive = new_primitive("backnorm_forward_relu", partial(_types, like), like)
    mlir.register_lowering(primitive, by_composition)
    mlir.register_lowering(primitive, lowered_for_cpu, platform="cpu")
    return primitive


def _statistics() -> Any:
    """Return the primitive that computes only mean and variance."""

    def types(x: Any, *, options: Options, batched: bool) -> list[Any]:
        shape = (*x.shape[:batched], x.shape[options.axis + batched])
        dtype = jnp.dtype(formulas.type_for(x, options.arithmetic))
        return [x.update(shape=shape, dtype=dtype)] * 2

    def computed(x: jax.Array, *, options: Options, batched: bool) -> Any:
        return over_batch(partial(formulas.statistics, options=options), batched)(x)

    primitive = new_primitive("backnorm_statistics", types, like=(0,))
    mlir.register_lowering(primitive, mlir.lower_fun(computed, multiple_results=True))
    return primitive


FORWARD_RELU, STATISTICS = _forward_relu(), _statistics()
