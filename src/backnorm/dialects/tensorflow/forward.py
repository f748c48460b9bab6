"""FusedBatchNormV3 and its older versions."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._check import format_of
from backnorm.dialects._operator import DialectOperator
from backnorm.dialects._statistics import bessel_corrected, blend, undefined
from backnorm.dialects.schema import AttributeSpec, OperatorSchema, TensorSpec
from backnorm.dialects.tensorflow._common import (
    EPSILON,
    IS_TRAINING,
    NAME,
    SOURCE,
    data_format_attribute,
    empty_outputs,
    phrases,
    versions,
)
from backnorm.dtypes import FLOAT32
from backnorm.errors import ArgumentValueError

__all__ = [
    "Forward",
    "ForwardV3",
    "FusedBatchNorm",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
]

_FACTOR = AttributeSpec(
    "exponential_avg_factor",
    "f32",
    1.0,
    summary="weight of the batch in the running statistics; 1: the batch alone",
)


def _forward_schema(version: int) -> OperatorSchema:
    formats, rules, data, channel = versions(version)
    op = "FusedBatchNorm" + ("" if version == 1 else f"V{version}")
    opaque = TensorSpec("reserve_space_3", "empty", channel, "vector", summary="empty, shape (0,)")
    return OperatorSchema(
        dialect="tensorflow",
        op=op,
        operation="forward",
        summary="Batch normalisation, in training or with population statistics.",
        source=SOURCE.format(op=op),
        inputs=(
            TensorSpec("x", "x", data, "data", summary="input"),
            TensorSpec("scale", "gamma", channel, "channel", summary="scale"),
            TensorSpec("offset", "beta", channel, "channel", summary="offset"),
            TensorSpec("mean", "running_mean", channel, "vector", summary="population mean"),
            TensorSpec(
                "variance", "running_variance", channel, "vector", summary="population variance"
            ),
        ),
        outputs=(
            TensorSpec("y", "y", data, "data", summary="normalised output"),
            TensorSpec("batch_mean", "running_mean", channel, "channel", summary="running mean"),
            TensorSpec(
                "batch_variance",
                "running_variance",
                channel,
                "channel",
                summary="running variance, of variances with Bessel's correction",
            ),
            TensorSpec("reserve_space_1", "mean", channel, "channel", summary="batch mean"),
            TensorSpec(
                "reserve_space_2", "variance", channel, "channel", summary="biased batch variance"
            ),
            *((opaque,) if version == 3 else ()),
        ),
        attributes=(EPSILON, _FACTOR, data_format_attribute(formats), IS_TRAINING, NAME),
        type_rules=rules,
        formats=formats,
        ranks=(4, 5) if version == 3 else (4, 4),
        notes=(
            "mean and variance are read if is_training is False or exponential_avg_factor is "
            "not 1, and then have one value per channel; else they may be empty and are ignored.",
            "running = (1 - exponential_avg_factor) * old + exponential_avg_factor * batch.",
            "is_training=False returns mean and variance as given, four times over.",
            "In training an empty x gives NaN for batch_mean and batch_variance, as TensorFlow "
            "does, and zeros for the reserved statistics.",
        ),
        phrases=phrases("4 or 5" if version == 3 else "4"),
    )


class ForwardV3(NamedTuple):
    """Outputs of FusedBatchNormV3."""

    y: np.ndarray
    batch_mean: np.ndarray
    batch_variance: np.ndarray
    reserve_space_1: np.ndarray
    reserve_space_2: np.ndarray
    reserve_space_3: np.ndarray


class Forward(NamedTuple):
    """Outputs of FusedBatchNorm and FusedBatchNormV2."""

    y: np.ndarray
    batch_mean: np.ndarray
    batch_variance: np.ndarray
    reserve_space_1: np.ndarray
    reserve_space_2: np.ndarray


class _ForwardOperator(DialectOperator):
    """What the versions of FusedBatchNorm share."""

    @classmethod
    def check(cls, call: Call) -> None:
        """Check mean and variance where they are read."""
        training = call.attributes["is_training"]
        if training and call.number("exponential_avg_factor") == 1.0:
            return
        case = "exponential_avg_factor != 1" if training else "is_training=False"
        channels = call.inputs["scale"].shape[0]
        for name in ("mean", "variance"):
            size = call.inputs[name].shape[0]
            if size != channels:
                raise ArgumentValueError(
                    name,
                    f"with {case} must have the same number of elements as the channels of x",
                    came=f"{size} and {channels}",
                    accepted=f"shape ({channels},)",
                )

    @classmethod
    def canonical_call(cls, call: Call) -> CanonicalCall:
        """Return which canonical call this is: forward in training, else inference."""
        if call.attributes["is_training"]:
            return canonical_call(call)
        canonical = canonical_call(call, "inference")
        population = {"mean": "mean", "variance": "variance"}
        return replace(canonical, inputs=canonical.inputs | population)

    @classmethod
    def finish(cls, call: Call, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the running statistics and the empty reserve output."""
        old_mean, old_variance = call.inputs["mean"], call.inputs["variance"]
        if not call.attributes["is_training"]:
            for output in ("batch_mean", "reserve_space_1"):
                results[output] = old_mean.astype(FLOAT32)
            for output in ("batch_variance", "reserve_space_2"):
                results[output] = old_variance.astype(FLOAT32)
            return results | empty_outputs(call)
        mean, variance = results["reserve_space_1"], results["reserve_space_2"]
        x = call.inputs["x"]
        layout = format_of(call.schema, call.attributes).layout
        count = int(np.prod(np.delete(x.shape, 1 if layout == "NCX" else -1), dtype=np.int64))
        if count:
            weight = call.number("exponential_avg_factor")
            sample = bessel_corrected(variance, count)
            results["batch_mean"] = blend(old_mean, mean, weight, FLOAT32)
            results["batch_variance"] = blend(old_variance, sample, weight, FLOAT32)
        else:
            results["batch_mean"] = undefined(mean)
            results["batch_variance"] = undefined(variance)
        return results | empty_outputs(call)


class _FusedBatchNormV3(_ForwardOperator):
    """Batch normalisation (FusedBatchNormV3)."""

    schema = _forward_schema(3)

    def __call__(
        self,
        *,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1.0,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
    ) -> ForwardV3:
        """Return y, batch_mean, batch_variance, reserve_space_1, _2 and the empty _3.

        Parameters
        ----------
        x : array of rank 4 or 5
            half, bfloat16 or float32.
        scale, offset : array of shape (C,)
            float32.
        mean, variance : array of shape (C,) or (0,)
            float32: population statistics. Empty where they are not read, that is in training
            with `exponential_avg_factor` 1.
        epsilon : float
            Not negative; rounded to float32.
        exponential_avg_factor : float
            Weight of the batch in the running statistics batch_mean and batch_variance.
        data_format : {"NHWC", "NCHW", "NDHWC", "NCDHW"}
        is_training : bool
            False: normalise with `mean` and `variance`.
        name : str, optional
            Ignored.
        """
        inputs = {"x": x, "scale": scale, "offset": offset, "mean": mean, "variance": variance}
        attributes = {
            "epsilon": epsilon,
            "exponential_avg_factor": exponential_avg_factor,
            "data_format": data_format,
            "is_training": is_training,
            "name": name,
        }
        return ForwardV3(**self.invoke(inputs, attributes))


class _FusedBatchNormV2(_ForwardOperator):
    """Batch normalisation (FusedBatchNormV2): V3 for rank 4, without reserve_space_3."""

    schema = _forward_schema(2)

    def __call__(
        self,
        *,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1.0,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
    ) -> Forward:
        """Return y, batch_mean, batch_variance, reserve_space_1, reserve_space_2.

        As FusedBatchNormV3, for rank 4. FusedBatchNorm, the first version, also lacks the
        16-bit types.
        """
        inputs = {"x": x, "scale": scale, "offset": offset, "mean": mean, "variance": variance}
        attributes = {
            "epsilon": epsilon,
            "exponential_avg_factor": exponential_avg_factor,
            "data_format": data_format,
            "is_training": is_training,
            "name": name,
        }
        return Forward(**self.invoke(inputs, attributes))


class _FusedBatchNorm(_FusedBatchNormV2):
    """Batch normalisation (FusedBatchNorm): V2 for float32 alone."""

    schema = _forward_schema(1)


FusedBatchNormV3 = _FusedBatchNormV3()
FusedBatchNormV2 = _FusedBatchNormV2()
FusedBatchNorm = _FusedBatchNorm()
