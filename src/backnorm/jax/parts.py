"""The computations of one device, which has a part of a batch, between exchanges with the others.

Each is a function of a part of the operands that a primitive has. Kernels sum up the part; what is
exchanged are the moments of every channel forward, and dgamma and dbeta backward, float64 also
where JAX has no 64 bits (`jax_enable_x64`), as between processes in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backnorm.arithmetics import own_arithmetic
from backnorm.jax import cpu, formulas
from backnorm.jax.deviations import inverse_deviation, narrowed, widened
from backnorm.jax.differentiable import Arrays
from backnorm.jax.exchange import moments_of_all
from backnorm.jax.instances import of_instances

try:
    from jax import enable_x64
except ImportError:
    from jax.experimental import enable_x64  # type: ignore[no-redef,unused-ignore]

__all__ = ["PARTS"]


def _forward(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, *, groups: dict[str, Any], **how: Any
) -> Arrays:
    spread = how.pop("spread")
    moments = _of_channels(x, how["axis"], how["instances"])
    mean, variance = cpu.call("forward_coefficients", (x,), [moments] * 2, spread=spread[:1], **how)
    mean, variance, _ = moments_of_all(mean, variance, None, groups)
    (y,) = cpu.call(
        "inference",
        (x, mean, variance, widened(gamma), widened(beta)),
        [x],
        # The statistics are those of an instance, as x is.
        spread=(spread[0], spread[0], *spread),
        **how,
    )
    return y, narrowed(mean, gamma.dtype), narrowed(variance, gamma.dtype)


def _backward(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
    *,
    groups: dict[str, Any],
    spread: tuple[bool, ...],
    **how: Any,
) -> Arrays:
    kind, sums = gamma.dtype, [_of_channels(dy, how["axis"], how["instances"])] * 2
    mean, variance, gamma = map(widened, (mean, variance, gamma))
    if how["training"]:
        given = (x, dy, mean, variance)
        parts = cpu.call("backward_coefficients", given, sums, spread=spread[:-1], **how)
        dgamma, dbeta = jax.lax.psum(tuple(parts), **groups)
        number = jax.lax.psum(1, **groups)
        write = partial(_written, number=number, axis=how["axis"], epsilon=how["epsilon"],
            arithmetic=how["arithmetic"])  # fmt: skip
        each = of_instances(write, how["instances"], (*spread, True, True))
        dx = each(x, dy, mean, variance, gamma, dgamma, dbeta)
    else:
        # What is written depends on no sum.
        every = (x, dy, mean, variance, gamma)
        dx, *of_part = cpu.call("backward", every, [dy, *sums], spread=spread, **how)
        dgamma, dbeta = jax.lax.psum(tuple(of_part), **groups)
    return dx, narrowed(dgamma, kind), narrowed(dbeta, kind)


def _written(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
    dgamma: jax.Array,
    dbeta: jax.Array,
    *,
    number: int,
    axis: int,
    epsilon: float,
    arithmetic: Any,
) -> jax.Array:
    """Return dx of one of so many parts, given the sums of all: no kernel takes these from XLA."""
    total = number * formulas.count_of(x, axis)
    shift, slope = dbeta / total, dgamma / total
    s = inverse_deviation(variance, epsilon)
    # What kernels compute in.
    wide = jnp.dtype(arithmetic or own_arithmetic(np.dtype(x.dtype)))
    if wide == jnp.float32:
        # What x loses by a mean of that type is known. XLA may leave out two conversions.
        near = jax.lax.reduce_precision(mean, 8, 23)
        shift = shift - (mean - near) * s * slope
        mean, s = near, jnp.minimum(s, float(jnp.finfo(wide).max))
    each = (array.astype(wide) for array in (mean, s, gamma, shift, slope))
    return formulas.elements(x, dy, *each, axis=axis)


def _of_channels(x: jax.Array, axis: int, instances: int | None) -> jax.ShapeDtypeStruct:
    """Return the shape and type of sums, for every instance of its own."""
    shape = (x.shape[axis],) if instances is None else (instances, x.shape[1:][axis])
    return jax.ShapeDtypeStruct(shape, jnp.float64)


def _with_64_bits(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def computed(*operands: jax.Array, **how: Any) -> Arrays:
        with enable_x64(True):
            return function(*operands, **how)

    return computed


#: By operation, what a device computes of its part of a batch. `groups` has the arguments of
#: `jax.lax.psum`; the other parameters are the primitive's.
PARTS = {"forward": _with_64_bits(_forward), "backward": _with_64_bits(_backward)}
