"""The computations on a CUDA device: our Triton kernels, launched by jax-triton.

Each function is traced when a primitive is lowered for a CUDA device and `choice.by_kernels` says
so. Several instances are one problem, in which their channels lie side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backnorm.jax import choice
from backnorm.jax.launches import Call, Memory
from backnorm.jax.problems import problem_of
from backnorm.layout import extents_of
from backnorm.plan_gpu import plan_gpu
from backnorm.problem import Problem

__all__ = ["backward", "forward", "normalize"]


def forward(*operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return y, mean and variance of x, gamma, beta."""
    from backnorm.kernels.gpu.launch import ForwardLaunch

    together = _Together(problem_of("forward", operands[0], operands[1], **how), how)
    x, gamma, beta = together.memories(operands, 1)
    y, mean, variance = Memory(x.kind), Memory(gamma.kind), Memory(gamma.kind)
    launch = ForwardLaunch(*_planned(together.problem), moving=False)
    launch.run(x, None, gamma, beta, (None, None), 0.0, y, None, mean, variance)
    return together.results(operands[0].shape, y, mean, variance)


def normalize(*operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return y of x, mean, variance, gamma, beta."""
    from backnorm.kernels.gpu.launch import ForwardLaunch

    together = _Together(problem_of("inference", operands[0], operands[1], **how), how)
    x, mean, variance, gamma, beta = together.memories(operands, 1)
    y = Memory(x.kind)
    launch = ForwardLaunch(*_planned(together.problem), moving=False)
    launch.infer(x, None, mean, variance, gamma, beta, y)
    return together.results(operands[0].shape, y)


def backward(*operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return dx, dgamma and dbeta of x, dy, mean, variance, gamma."""
    from backnorm.kernels.gpu.launch import BackwardLaunch

    together = _Together(problem_of("backward", operands[0], operands[4], **how), how)
    x, dy, mean, variance, gamma = together.memories(operands, 2)
    dx, dgamma, dbeta = Memory(x.kind), Memory(gamma.kind), Memory(gamma.kind)
    launch = BackwardLaunch(*_planned(together.problem))
    launch.run(x, dy, None, mean, variance, gamma, dx, None, dgamma, dbeta)
    return together.results(operands[1].shape, dx, dgamma, dbeta)


def _planned(problem: Problem) -> tuple[Any, ...]:
    """Return what a launch is made of."""
    gpu = choice.device()
    assert gpu is not None
    extents = extents_of(problem.shape, problem.channel_axis, (0, 1, 2))
    plan = plan_gpu(problem, extents, gpu)
    major, minor = gpu.capability
    make = partial(Call, 10 * major + minor)
    return problem, extents, plan.tiling, plan.arithmetic, plan.schedule == "complete", _new, make


def _new(count: int) -> Memory:
    return Memory(jax.ShapeDtypeStruct((count,), np.float64))


class _Together:
    """One problem, or several instances as one: (outer, instances * channels, inner).

    Where outer is not 1 this transposes the arrays of several.

    Parameters
    ----------
    one : Problem
        Of one instance.
    how : dict
        With `instances`, their number or None, and `spread`, which operands have a leading axis
        of them.
    """

    def __init__(self, one: Problem, how: dict[str, Any]) -> None:
        self._one, self._spread, self._instances = one.shape, how["spread"], how["instances"]
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
