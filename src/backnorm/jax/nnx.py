"""The layer for flax.nnx: ``from backnorm.jax.nnx import BatchNorm`` instead of flax's."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx  # type: ignore[import-not-found,unused-ignore]
from flax.nnx.nn import dtypes  # type: ignore[import-not-found,unused-ignore]

from backnorm.activations import Activation
from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentValueError
from backnorm.jax import layers
from backnorm.jax.formulas import promoted
from backnorm.jax.running import moved

__all__ = ["BatchNorm"]


class BatchNorm(nnx.BatchNorm):
    """flax's `flax.nnx.BatchNorm`, computed by `backnorm.jax`.

    Same arguments and two more, same parameters (``scale``, ``bias``) and statistics (``mean``,
    ``var``), so a model's state fits either layer. The statistics are exact whatever
    `use_fast_variance` says, and keep their type.

    Parameters
    ----------
    *args, **kwargs
        As of `flax.nnx.BatchNorm`.
    arithmetic : {"float32", "float64"}, optional
        As of `backnorm.jax.batch_norm`.
    reproducible : bool
        As of `backnorm.jax.batch_norm`, in training.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `backnorm.jax.batch_norm`; x of complex numbers is one.
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
        """Normalise x, of any rank, as flax's layer does; see `flax.nnx.BatchNorm`.

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
        axes = layers.feature_axes(self.axis, x.ndim)
        out = dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        x = x.astype(promoted(x.dtype, out))
        options: dict[str, Any] = {"epsilon": self.epsilon, "arithmetic": self.arithmetic}
        options["activation"] = activation
        if frozen:
            operands = (x, mean, variance, scale, bias, residual)
            return layers.with_running_statistics(operands, axes, **options).astype(out)
        y, *batch = layers.trained(
            (x, scale, bias, residual),
            mask,
            axes,
            **options,
            reproducible=self.reproducible,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
        )
        for average, each in zip((self.mean, self.var), batch, strict=True):
            now = moved(average[...], each, self.momentum)
            # A reference that is updated in place takes no derivative along.
            in_place = getattr(average, "_can_update", False)
            average[...] = jax.lax.stop_gradient(now) if in_place else now
        return y.astype(out)
