"""The layer for flax: ``from backnorm.jax.linen import BatchNorm`` instead of flax's.

This module imports flax; nothing else does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen  # type: ignore[import-not-found,unused-ignore]

from backnorm.errors import ArgumentValueError
from backnorm.jax.operators import batch_norm, batch_norm_inference

__all__ = ["BatchNorm"]


class BatchNorm(linen.BatchNorm):
    """flax's `flax.linen.BatchNorm`, computed by `backnorm.jax`.

    Same fields, same parameters (``scale``, ``bias``) and ``batch_stats`` (``mean``, ``var``), so a
    model's variables fit either layer. The statistics are those of x before any rounding to
    `dtype`, exact whatever `use_fast_variance` says.

    Raises
    ------
    ArgumentValueError
        For several axes of features, for a `mask`, and for `axis_index_groups`, none of which is
        supported.
    """

    @linen.compact
    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Normalise x, of any rank, as flax's layer does; see `flax.linen.BatchNorm`."""
        for name, value in (("mask", mask), ("axis_index_groups", self.axis_index_groups)):
            if value is not None:
                raise ArgumentValueError(
                    name,
                    "is not supported",
                    came=type(value).__name__,
                    accepted="None",
                    hint="use flax.linen.BatchNorm",
                )
        axis = self._one_axis()
        frozen = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        shape = (x.shape[axis],)
        kind = jnp.float32 if self.force_float32_reductions else self.param_dtype
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, kind)
        variance = self.variable("batch_stats", "var", jnp.ones, shape, kind)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)

        out = self.dtype
        if out is None:
            out = jnp.result_type(x, *(each for each in (scale, bias) if each is not None))
        x = x.astype(jnp.promote_types(x.dtype, out))
        work = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        gamma, beta = (None if each is None else each.astype(work) for each in (scale, bias))
        if frozen:
            given = (mean.value.astype(work), variance.value.astype(work), gamma, beta)
            return batch_norm_inference(x, *given, epsilon=self.epsilon, axis=axis).astype(out)
        # The axis need not exist when the layer is made.
        mapped = None if self.is_initializing() else self.axis_name
        y, batch_mean, batch_variance = batch_norm(
            x, gamma, beta, epsilon=self.epsilon, axis=axis, axis_name=mapped
        )
        if not self.is_initializing():
            for average, batch in ((mean, batch_mean), (variance, batch_variance)):
                moved = self.momentum * average.value + (1 - self.momentum) * batch
                average.value = moved.astype(kind)
        return y.astype(out)

    def _one_axis(self) -> int:
        axes = self.axis if isinstance(self.axis, tuple | list) else (self.axis,)
        if len(axes) != 1:
            raise ArgumentValueError(
                "axis", "must be one axis of features", came=self.axis, accepted="an integer"
            )
        return int(axes[0])
