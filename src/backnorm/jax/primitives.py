"""The operations of backnorm as primitives of JAX.

If a primitive is lowered for one CPU device, and the shape of x is known, a kernel computes it. In
all other cases, JAX compiles the formulas of the module `formulas`, which are plain `jax.numpy`
code: XLA splits them over devices and fuses them. The primitive that returns only the statistics
always uses formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from backnorm.activations import RELU, Activation
from backnorm.jax import check, ffi, formulas
from backnorm.jax.batching import lowering, new_primitive, over_batch
from backnorm.jax.problems import is_known
from backnorm.options import Options
from backnorm.signature import Operation


def bind(primitive: Any, *operands: jax.Array, options: Options) -> tuple[jax.Array, ...]:
    """Return the results of a primitive for one problem, not for a batch of problems."""
    return tuple(primitive.bind(*alike(*operands), options=options, batched=False))


def alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays, all marked as varying over the same mapped axes of `jax.shard_map`: those
    over which at least one of the arrays varies.

    JAX marks the operands of its own operations in this way, too. JAX sums the cotangent of a value
    over the axes that the value does not vary over. The operands of a function with a custom
    derivative rule must all vary over the same axes; otherwise the types of their cotangents differ
    from the types that JAX expects.
    """
    axes = [_varying(array) for array in arrays]
    union = frozenset().union(*axes)
    return tuple(
        _cast(array, tuple(sorted(union - own, key=str))) if union - own else array
        for array, own in zip(arrays, axes, strict=True)
    )


def _varying(array: jax.Array) -> frozenset[Any]:
    kind: Any = jax.typeof(array)
    # The axes over which an array varies are in `vma` in versions of JAX before 0.9, and in
    # `mat.varying` in later ones.
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else kind.vma)


def _cast(array: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)


def _primitive(
    name: str,
    operation: Operation,
    operands: tuple[str, ...],
    formula: Callable[..., Any],
    like: tuple[int, ...],
    activation: Activation | None = None,
) -> Any:
    """Return a new primitive with its lowerings.

    Parameters
    ----------
    name : str
    operation : str
        The kernels' operation that computes the primitive.
    operands : tuple of str
        Their names in the operation's signature. A primitive may be bound without the last ones.
    formula : callable
        The function of one problem that computes the primitive by formulas.
    like : tuple of int
        For every result, the operand that has its shape and type.
    activation : Activation, optional
        The activation that the kernel computes.
    """

    def computed(*arrays: jax.Array, options: Options, batched: bool) -> Any:
        shape = arrays[like[0]].shape
        if options.reproducible and 0 not in shape:
            raise check.not_reproducible(f"for a shape {tuple(shape)}")
        return over_batch(partial(formula, options=options), batched)(*arrays)

    def called(*arrays: jax.Array, options: Options) -> Any:
        named = dict(zip(operands, arrays, strict=False))
        return ffi.call(operation, named, [arrays[k] for k in like], options, activation)

    by_formula, by_kernel = mlir.lower_fun(computed, multiple_results=True), lowering(called)

    def lowered_for_cpu(context: Any, *arrays: Any, **parameters: Any) -> Any:
        known = is_known(context.avals_in[like[0]].shape)
        rule = by_kernel if known and _on_one_device(context) and ffi.is_usable() else by_formula
        return rule(context, *arrays, **parameters)

    primitive = new_primitive(f"backnorm_{name}", partial(_types, like), like)
    mlir.register_lowering(primitive, by_formula)
    mlir.register_lowering(primitive, lowered_for_cpu, platform="cpu")
    return primitive


def _types(like: tuple[int, ...], *operands: Any, **_: Any) -> list[Any]:
    return [operands[k].update(weak_type=False) for k in like]


def _on_one_device(context: Any) -> bool:
    """Whether a function is lowered for a single device.

    Within `jax.shard_map` and `jax.pmap`, the context has a mesh instead of a number of devices.
    """
    return getattr(context.module_context.axis_context, "num_devices", None) == 1


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


_CHANNELS = ("mean", "variance", "gamma")

FORWARD = _primitive("forward", "forward", ("x", "gamma", "beta"), formulas.forward, (0, 1, 1))
#: y = max(0, batch_norm(x) + residual), mean and variance; the residual may be left out. XLA does
#: not fuse its own loops with a custom call, so a separate ReLU would be one more pass over all
#: elements. For the derivative, y is saved instead of the mask that the kernel writes, because the
#: next operation saves y anyway.
FORWARD_RELU = _primitive(
    "forward_relu",
    "forward",
    ("x", "gamma", "beta", "residual"),
    formulas.forward_relu,
    (0, 1, 1),
    RELU,
)
NORMALIZE = _primitive(
    "normalize", "inference", ("x", *_CHANNELS, "beta"), formulas.normalize, (0,)
)
BACKWARD = _primitive("backward", "backward", ("x", "dy", *_CHANNELS), formulas.backward, (1, 4, 4))
STATISTICS = _statistics()
