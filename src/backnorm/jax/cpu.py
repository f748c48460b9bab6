"""The computations on a CPU: our kernels, called by XLA itself.

`computed` is traced when a primitive is lowered for a CPU. `elsewhere` is the primitive as plain
formulas; they are also taken for arrays without elements, for shapes that are not known
(`jax.export` with symbolic dimensions), for which no kernel can be planned ahead, and with a jaxlib
whose foreign function interface is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from backnorm.jax import ffi
from backnorm.jax.deviations import is_refused
from backnorm.jax.problems import OPERANDS, is_known, problem_of
from backnorm.signature import Operation

__all__ = ["call", "computed"]


def computed(
    operation: Operation,
    like: Sequence[int],
    elsewhere: Callable[..., Sequence[jax.Array]],
    *operands: jax.Array,
    reproducible: bool = False,
    **parameters: Any,
) -> Sequence[jax.Array]:
    """Return the results of an operation; `like` has for each the operand of its shape and type."""
    kinds = [operands[k] for k in like]
    if not is_known(kinds[0].shape) or not ffi.is_usable():
        return elsewhere(*operands, reproducible=reproducible, **parameters)
    return call(operation, operands, kinds, reproducible=reproducible, **parameters)


def call(
    operation: Operation,
    operands: Sequence[jax.Array],
    kinds: Sequence[Any],
    *,
    parts: int = 1,
    **parameters: Any,
) -> Sequence[jax.Array]:
    """Return the results of an operation by its kernel.

    Parameters
    ----------
    operation : str
    operands : sequence of arrays
        Those of `problems.OPERANDS`, and the residual if there is one.
    kinds : sequence
        For every result that a kernel writes, an array, or another value, of its shape and type.
    parts : int
        How many parts like x a batch has, which the sums among the operands are over.
    **parameters
        The parameters of the primitive.
    """
    names = (*OPERANDS[operation], *(("residual",) if parameters.get("residual") else ()))
    arrays = dict(zip(names, operands, strict=True))
    statistics = arrays.get("mean", arrays.get("gamma", arrays["x"]))
    problem = problem_of(operation, arrays["x"], statistics, **parameters)
    if "variance" in arrays:
        arrays["variance"] = _not_refused(arrays["variance"], parameters["epsilon"])
    several = {"instances": parameters["instances"], "spread": parameters["spread"]}
    return ffi.call(problem, arrays, kinds, count=parts * problem.count, **several)


def _not_refused(variance: jax.Array, epsilon: float) -> jax.Array:
    """Return the variance with NaN where a kernel would refuse it.

    A kernel reports a variance + epsilon that is not positive, but compiled code looks at no
    values: they propagate.
    """
    return jnp.where(is_refused(variance, epsilon), jnp.nan, variance)
