"""Batch normalisation for JAX: ``import backnorm.jax``.

::

    y, mean, variance = backnorm.jax.batch_norm(x, gamma, beta, epsilon=1e-5)

Usable under `jax.jit`, `jax.grad` and `jax.jvp` (to any order), `jax.vmap`, `jax.checkpoint`,
`jax.lax.scan`, `jax.pmap` and `jax.shard_map`.
"""

from backnorm.jax.operators import batch_norm, batch_norm_backward, batch_norm_inference

__all__ = ["batch_norm", "batch_norm_backward", "batch_norm_inference"]
