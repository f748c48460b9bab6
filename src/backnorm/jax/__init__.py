"""Batch normalisation for JAX: ``import backnorm.jax``.

::

    y, mean, variance = backnorm.jax.batch_norm(x, gamma, beta, epsilon=1e-5)

The functions work under `jax.jit`, `jax.grad` and `jax.jvp` (to any order), `jax.vmap`,
`jax.checkpoint`, `jax.lax.scan`, `jax.pmap` and `jax.shard_map`.
"""

from backnorm.errors import not_installed

try:
    import jax  # noqa: F401 (to raise an error that says what to install)
except ModuleNotFoundError as error:
    raise not_installed(error, "jax", __name__) from error

from backnorm.jax.operators import batch_norm, batch_norm_backward, batch_norm_inference
from backnorm.jax.running import RunningStatistics, batch_norm_with_state

__all__ = [
    "RunningStatistics",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_inference",
    "batch_norm_with_state",
]
