"""The layer for flax.linen: import `BatchNorm` from ``backnorm.jax.linen`` instead of from flax.

Only this module and `backnorm.jax.nnx` import flax.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen  # type: ignore[import-not-found,unused-ignore]

from backnorm.activations import Activation
from backnorm.arithmetics import Arithmetic
from backnorm.jax import layers
from backnorm.jax.running import moved

__all__ = ["BatchNorm"]


class BatchNorm(linen.BatchNorm):
    """flax's `flax.linen.BatchNorm`, computed by `backnorm.jax`.

    The layer has the fields of flax's layer, and the two that are described below. Its parameters
    (``scale``, ``bias``) and ``batch_stats`` (``mean``, ``var``) are those of flax's layer, so a
    model's variables fit either layer. The statistics are computed before x is rounded to `dtype`;
    `use_fast_variance` has no effect on their accuracy. An update of the running statistics does
    not change their type.

    Attributes
    ----------
    arithmetic : {"float32", "float64"}, optional
        As in `backnorm.jax.batch_norm`.
    reproducible : bool
        As in `backnorm.jax.batch_norm`, in training.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `backnorm.jax.batch_norm`. An x of complex numbers is also an error.
    """

    arithmetic: Arithmetic | None = None
    reproducible: bool = False

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: Any = None,
        activation: str | Activation | None = None,
        residual: Any = None,
    ) -> jax.Array:
        """Normalise x, of any rank, like flax's layer; see `flax.linen.BatchNorm`.

        `activation` and `residual` are those of `backnorm.jax.batch_norm`.
        """
        axes = layers.feature_axes(self.axis, x.ndim)
        frozen = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        shape = tuple(x.shape[axis] for axis in axes)
        kind = jnp.float32 if self.force_float32_reductions else self.param_dtype
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, kind)
        variance = self.variable("batch_stats", "var", jnp.ones, shape, kind)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)

        out = linen.dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        groups = {}
        # While the variables are initialised, the mapped axis may not exist yet. So the devices do
        # not exchange statistics then.
        if self.axis_name is not None and not self.is_initializing():
            groups = {"axis_name": self.axis_name, "axis_index_groups": self.axis_index_groups}
        statistics, parameters = (mean.value, variance.value), (scale, bias)
        y, batch = layers.normalised(
            self, x, statistics, parameters, out, frozen=frozen, groups=groups,
            mask=mask, activation=activation, residual=residual,
        )  # fmt: skip
        if not self.is_initializing():
            for average, each in zip((mean, variance), batch, strict=not frozen):
                average.value = moved(average.value, each.reshape(shape), self.momentum)
        return y
