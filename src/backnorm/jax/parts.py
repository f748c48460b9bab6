"""The computations of one device, which has a part of a batch, between exchanges with the others.

Each is a function of a part of the operands that a primitive has. A kernel sums up the part, sums
of all parts are made of what devices tell each other (`exchange`), and another kernel takes these.
They are float64, or the integers of reproducible sums, also where JAX has no 64 bits
(`jax_enable_x64`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from backnorm.cpu.scratch import bin_rows
from backnorm.jax import cpu
from backnorm.jax.differentiable import Arrays
from backnorm.jax.exchange import bins_of_all, moments_of_all
from backnorm.signature import Operation

try:
    from jax import enable_x64
except ImportError:
    from jax.experimental import enable_x64  # type: ignore[no-redef,unused-ignore]

__all__ = ["PARTS"]


def _forward(
    x: jax.Array, gamma: jax.Array, beta: jax.Array, *, spread: tuple[bool, ...], **parameters: Any
) -> Arrays:
    sums = _sums("reduce_forward", (x,), spread[:1], _moments, **parameters)
    # Sums are those of an instance, as x is.
    spread = (*spread, spread[0])
    return _finished("apply_forward", (x, gamma, beta, sums), (0, 1, 1), spread, **parameters)


def _backward(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
    *,
    spread: tuple[bool, ...],
    **parameters: Any,
) -> Arrays:
    sums = _sums("reduce", (x, dy, mean), spread[:3], jax.lax.psum, **parameters)
    arrays = (x, dy, mean, variance, gamma, sums)
    return _finished("apply_backward", arrays, (1, 4, 4), (*spread, spread[1]), **parameters)


def _sums(
    operation: Operation,
    operands: Arrays,
    spread: tuple[bool, ...],
    of_all: Callable[..., jax.Array],
    *,
    groups: dict[str, Any],
    reproducible: bool,
    **parameters: Any,
) -> jax.Array:
    """Return the sums of all parts: of every instance, rows of a value for each channel."""
    x, instances = operands[0], parameters["instances"]
    rows = bin_rows(x.dtype.itemsize) if reproducible else 2
    channels = (x.shape[1:] if spread[0] else x.shape)[parameters["axis"]]
    shape = (rows, channels) if instances is None else (instances, rows, channels)
    kind = jax.ShapeDtypeStruct(shape, jnp.int64 if reproducible else jnp.float64)
    parameters["reproducible"] = reproducible
    (own,) = cpu.call(operation, operands, [kind], spread=spread, **parameters)
    return (bins_of_all if reproducible else of_all)(own, **groups)


def _finished(
    operation: Operation,
    operands: Arrays,
    like: tuple[int, ...],
    spread: tuple[bool, ...],
    *,
    groups: dict[str, Any],
    **parameters: Any,
) -> Arrays:
    """Return the results of a part; `like` has for each the operand of its shape and type."""
    parts = len(groups["axis_index_groups"][0])
    kinds = [operands[k] for k in like]
    return tuple(cpu.call(operation, operands, kinds, parts=parts, spread=spread, **parameters))


def _moments(own: jax.Array, **groups: Any) -> jax.Array:
    mean, variance, _ = moments_of_all(own[..., 0, :], own[..., 1, :], None, groups)
    return jnp.stack((mean, variance), axis=-2)


def _with_64_bits(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def computed(*operands: jax.Array, **parameters: Any) -> Arrays:
        with enable_x64(True):
            return function(*operands, **parameters)

    return computed


#: By operation, what a device computes of its part of a batch. `groups` has the arguments of
#: `jax.lax.psum`; the other parameters are the primitive's.
PARTS = {"forward": _with_64_bits(_forward), "backward": _with_64_bits(_backward)}
