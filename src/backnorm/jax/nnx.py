"""The layer for flax.nnx: import `BatchNorm` from ``backnorm.jax.nnx`` instead of from flax."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx  # type: ignore[import-not-found,unused-ignore]
from flax.nnx.nn import dtypes  # type: ignore[import-not-found,unused-ignore]

from backnorm.activations import Activation
from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentValueError
from backnorm.jax import layers
from backnorm.jax.running import moved

__all__ = ["BatchNorm"]


class BatchNorm(nnx.BatchNorm):
    """flax's `flax.nnx.BatchNorm`, computed by `backnorm.jax`.

    The layer has the arguments of flax's layer and two more. Parameters (``scale``, ``bias``) and
    statistics (``mean``, ``var``) are those of flax's layer, so a model's state fits either layer.
    `use_fast_variance` has no effect on the accuracy of the statistics. When a call updates the
    running statistics, they keep their element type.

    Parameters
    ----------
    *args, **kwargs
        The arguments of `flax.nnx.BatchNorm`.
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

    def __init__(
        self,
        *args: Any,
        arithmetic: Arithmetic | None = None,
        reproducible: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.arithmetic, self.reproducible = arithmetic, reproducible

    def __call__(
        self,
        x: Any,
        use_running_average: bool | None = None,
        *,
        mask: Any = None,
        activation: str | Activation | None = None,
        residual: Any = None,
    ) -> jax.Array:
        """Normalise x, of any rank, like flax's layer; see `flax.nnx.BatchNorm`.

        `activation` and `residual` are those of `backnorm.jax.batch_norm`.
        """
        frozen = self.use_running_average if use_running_average is None else use_running_average
        if frozen is None:
            raise ArgumentValueError(
                "use_running_average", "must be given to the layer or to its call",
                came=None, accepted="True or False",
                hint="or use flax.nnx.view(model, use_running_average=...)",
            )  # fmt: skip
        scale, bias = (None if each is None else each[...] for each in (self.scale, self.bias))
        x, mean, variance, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype
        )
        out = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        groups = {"axis_name": self.axis_name, "axis_index_groups": self.axis_index_groups}
        statistics, parameters = (mean, variance), (scale, bias)
        y, batch = layers.normalised(
            self, x, statistics, parameters, out, frozen=frozen, groups=groups,
            mask=mask, activation=activation, residual=residual,
        )  # fmt: skip
        for average, each in zip((self.mean, self.var), batch, strict=not frozen):
            now = moved(average[...], each, self.momentum)
            # If flax can update the average in place, the new value must not carry derivatives, so
            # `stop_gradient` removes them.
            in_place = getattr(average, "_can_update", False)
            average[...] = jax.lax.stop_gradient(now) if in_place else now
        return y
