"""The computations on a CUDA device: our Triton kernels, launched by jax-triton.

`computed` is traced when a primitive is lowered for a CUDA device and `choice.by_kernels` says
so. Several instances are one problem, in which their channels lie side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from backnorm.executable import executable
from backnorm.gpu.device import Gpu
from backnorm.gpu.plan import GpuPlan, plan_gpu
from backnorm.interfaces import Arrays, Code, Launch
from backnorm.jax import choice
from backnorm.jax.launches import Call, Memory
from backnorm.jax.problems import OPERANDS, problem_of
from backnorm.layout import Extents, Order
from backnorm.problem import Problem
from backnorm.signature import SIGNATURES, Operation

__all__ = ["computed"]


def computed(
    operation: Operation, like: Sequence[int], *operands: jax.Array, **parameters: Any
) -> Sequence[jax.Array]:
    """Return the results of an operation; `like` has for each the operand of its shape and type."""
    names, signature = OPERANDS[operation], SIGNATURES[operation]
    x, gamma = operands[0], operands[names.index("gamma")]
    together = _Together(problem_of(operation, x, gamma, **parameters), parameters)
    wide = sum(o.kind == "data" for o in signature.operands if o.name in names)
    memories = dict(zip(names, together.memories(operands, wide), strict=True))
    found = executable(together.problem, arrays=_MEMORIES)
    results = found.plain(*signature.arranged(memories))
    written = [result for result in results if result is not None]
    return together.results(operands[like[0]].shape, *written)


class _Memories(Arrays[Memory, Gpu]):
    """Operands of the shape (outer, channels, inner), for kernels that XLA launches."""

    code = Code(
        arrays="jax, cuda",
        facts="",
        address="{}",
        absent="None",
        constants=(),
        new={"data": "Memory(x.kind)", "channel": "Memory(gamma.kind)"},
    )
    names: ClassVar[dict[str, Any]] = {"Memory": Memory}

    def place(self, x: Memory | None) -> Gpu:
        gpu = choice.device()
        assert gpu is not None
        return gpu

    def planned(
        self, problem: Problem, extents: Extents, place: Gpu, exchanged: bool
    ) -> tuple[GpuPlan, Launch]:
        from backnorm.gpu.launch import Launches

        plan = plan_gpu(problem, extents, place)
        major, minor = place.capability
        return plan, Launches(problem, plan, _new, partial(Call, 10 * major + minor))

    def values(self, problem: Problem, order: Order) -> tuple[object, ...]:
        return ()

    def order_of(self, x: Memory) -> Order:
        return (0, 1, 2)


_MEMORIES = _Memories()


def _new(count: int) -> Memory:
    return Memory(jax.ShapeDtypeStruct((count,), np.float64))


class _Together:
    """One problem, or several instances as one: (outer, instances * channels, inner).

    Where outer is not 1 this transposes the arrays of several.

    Parameters
    ----------
    one : Problem
        Of one instance.
    parameters : dict
        With `instances`, their number or None, and `spread`, which operands have a leading axis
        of them.
    """

    def __init__(self, one: Problem, parameters: dict[str, Any]) -> None:
        self._one = one.shape
        self._spread, self._instances = parameters["spread"], parameters["instances"]
        outer, channels, inner = one.shape
        self.problem = dataclasses.replace(
            one, shape=(outer, (self._instances or 1) * channels, inner)
        )

    def memories(self, operands: Sequence[jax.Array], wide: int) -> list[Memory]:
        """Return the operands of the whole problem, the first `wide` of them of x's shape."""
        pairs = list(zip(operands, self._spread, strict=True))
        values = [self._wide(*pair) for pair in pairs[:wide]]
        values += [self._narrow(*pair) for pair in pairs[wide:]]
        return [Memory(value, value) for value in values]

    def results(self, shape: tuple[int, ...], wide: Memory, *narrow: Memory) -> list[jax.Array]:
        """Return the results of all instances, the first one of `shape`."""
        outer, channels, inner = self._one
        found = [_value(each) for each in (wide, *narrow)]
        if self._instances is not None:
            apart = found[0].reshape(outer, self._instances, channels, inner)
            found[0] = jnp.moveaxis(apart, 1, 0)
            found[1:] = [each.reshape(self._instances, channels) for each in found[1:]]
        return [found[0].reshape(shape), *found[1:]]

    def _wide(self, array: jax.Array, is_spread: bool) -> jax.Array:
        if self._instances is not None:
            apart = array.reshape(self._instances if is_spread else 1, *self._one)
            array = jnp.moveaxis(jnp.broadcast_to(apart, (self._instances, *self._one)), 0, 1)
        return array.reshape(self.problem.shape)

    def _narrow(self, array: jax.Array, is_spread: bool) -> jax.Array:
        if self._instances is None:
            return array
        channels = self._one[1]
        apart = array.reshape(self._instances if is_spread else 1, channels)
        return jnp.broadcast_to(apart, (self._instances, channels)).reshape(-1)


def _value(memory: Memory) -> jax.Array:
    assert memory.value is not None
    return memory.value
