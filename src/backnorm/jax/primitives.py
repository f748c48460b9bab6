"""The computations as primitives of JAX: our kernels on a CPU and, where they can be launched, on
CUDA devices; elsewhere the formulas. Statistics alone are formulas everywhere.

Which it is is decided when a function is lowered for its platform. Under `jax.vmap` a primitive
takes several instances of its problem at once, along a leading axis of its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from backnorm.jax import check, choice, cpu, cuda, formulas, launches, sharding
from backnorm.jax.instances import new_primitive, of_instances, one_by_one
from backnorm.signature import Operation

__all__ = ["BACKWARD", "FORWARD", "NORMALIZE", "STATISTICS", "bind"]


def bind(primitive: Any, *operands: jax.Array, **parameters: Any) -> tuple[jax.Array, ...]:
    """Return the results of a primitive, of one instance."""
    return tuple(primitive.bind(*operands, **one_by_one(len(operands)), **parameters))


def _primitive(
    name: str,
    formula: Callable[..., tuple[jax.Array, ...]],
    operation: Operation,
    like: tuple[int, ...],
) -> Any:
    """Return a new primitive.

    Parameters
    ----------
    name : str
    formula : callable
        What it computes.
    operation : str
        The same by kernels, of any number of instances (`backnorm.jax.instances`).
    like : tuple of int
        For every result, the operand that has its shape and type.
    """

    def results(*kinds: Any, **_: Any) -> list[Any]:
        return [kinds[k].update(weak_type=False) for k in like]

    made = new_primitive(f"backnorm_{name}", results, like)

    def elsewhere(
        *operands: jax.Array,
        instances: int | None,
        spread: Any,
        reproducible: bool = False,
        **setting: Any,
    ) -> Any:
        if reproducible:
            check.check_not_reproducible(operands[like[0]].shape)
        return of_instances(partial(formula, **setting), instances, spread)(*operands)

    by_formulas = mlir.lower_fun(elsewhere, multiple_results=True)
    mlir.register_lowering(made, by_formulas)
    on_cpu = partial(cpu.computed, operation, like, elsewhere)
    by_kernel = mlir.lower_fun(on_cpu, multiple_results=True)
    lowered_for_cpu = sharding.splitting(operation, on_cpu, by_kernel)
    mlir.register_lowering(made, lowered_for_cpu, platform="cpu")
    on_cuda = partial(cuda.computed, operation, like)
    by_kernels = mlir.lower_fun(on_cuda, multiple_results=True)

    def lowered_for_cuda(
        context: Any, *operands: Any, reproducible: bool = False, **parameters: Any
    ) -> Any:
        shape, devices = context.avals_in[like[0]].shape, context.module_context.axis_context
        # Kernels on these devices have no reproducible sums, either.
        if reproducible or not choice.by_kernels(shape, devices):
            return by_formulas(context, *operands, reproducible=reproducible, **parameters)
        with launches.compiling():
            return by_kernels(context, *operands, **parameters)

    mlir.register_lowering(made, lowered_for_cuda, platform="cuda")
    return made


def _alone(formula: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array]]:
    return lambda *operands, **setting: (formula(*operands, **setting),)


FORWARD = _primitive("forward", formulas.forward, "forward", like=(0, 1, 1))
NORMALIZE = _primitive("normalize", _alone(formulas.normalize), "inference", like=(0,))
BACKWARD = _primitive("backward", formulas.backward, "backward", like=(1, 4, 4))


def _statistics() -> Any:
    """Return the primitive of mean and variance alone."""

    def results(
        x: Any, *, axis: int, arithmetic: Any, instances: int | None, spread: Any
    ) -> list[Any]:
        shape = (x.shape[axis],) if instances is None else (instances, x.shape[1:][axis])
        kind = x.update(shape=shape, dtype=jnp.dtype(formulas.type_for(x, arithmetic)))
        return [kind, kind]

    def computed(x: jax.Array, *, instances: int | None, spread: Any, **parameters: Any) -> Any:
        return of_instances(partial(formulas.statistics, **parameters), instances, spread)(x)

    made = new_primitive("backnorm_statistics", results, like=(0,))
    mlir.register_lowering(made, mlir.lower_fun(computed, multiple_results=True))
    return made


STATISTICS = _statistics()
