"""FusedBatchNormGradV3 and its older versions."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._operator import DialectOperator
from backnorm.dialects._statistics import check_inverse
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
from backnorm.errors import ArgumentValueError

__all__ = [
    "FusedBatchNormGrad",
    "FusedBatchNormGradV2",
    "FusedBatchNormGradV3",
    "Gradient",
    "GradientV3",
]


_RESERVE_SPACE_2_IS = AttributeSpec(
    "reserve_space_2_is",
    "string",
    "variance",
    choices=("variance", "inverse_standard_deviation"),
    extension=True,
    summary=(
        "what reserve_space_2 holds in training: the biased variance (CPU) or "
        "1 / sqrt(variance + epsilon) (cuDNN), where epsilon is not used again"
    ),
)


def _gradient_schema(version: int) -> OperatorSchema:
    formats, rules, data, channel = versions(version)
    op = "FusedBatchNormGrad" + ("" if version == 1 else f"V{version}")
    opaque = TensorSpec(
        "reserve_space_3", "ignored", channel, "opaque", summary="opaque; required and ignored"
    )
    first_reserve = 4 if version == 3 else 3
    return OperatorSchema(
        dialect="tensorflow",
        op=op,
        operation="backward",
        summary="Gradients of batch normalisation.",
        source=SOURCE.format(op=op),
        inputs=(
            TensorSpec("y_backprop", "dy", data, "data", summary="gradient of y"),
            TensorSpec("x", "x", data, "data", summary="input of the forward"),
            TensorSpec("scale", "gamma", "float32", "channel", summary="scale"),
            TensorSpec(
                "reserve_space_1",
                "mean",
                channel,
                "channel",
                summary="batch mean; population mean if not is_training",
            ),
            TensorSpec(
                "reserve_space_2",
                "variance",
                channel,
                "channel",
                summary="biased batch variance; population variance if not is_training",
            ),
            *((opaque,) if version == 3 else ()),
        ),
        outputs=(
            TensorSpec("x_backprop", "dx", data, "data", summary="gradient of x"),
            TensorSpec("scale_backprop", "dgamma", channel, "channel", summary="of scale"),
            TensorSpec("offset_backprop", "dbeta", channel, "channel", summary="of offset"),
            *(
                TensorSpec(
                    f"reserve_space_{first_reserve + i}",
                    "empty",
                    channel,
                    "vector",
                    summary="empty, shape (0,)",
                )
                for i in (0, 1)
            ),
        ),
        attributes=(
            EPSILON,
            data_format_attribute(formats),
            IS_TRAINING,
            NAME,
            _RESERVE_SPACE_2_IS,
        ),
        type_rules=rules,
        formats=formats,
        ranks=(4, 5) if version == 3 else (4, 4),
        notes=(
            "TensorFlow's eager mode lets a data_format whose length is not the rank of x "
            "through; here it is an error.",
            "TensorFlow's CPU kernel refuses NCHW with is_training=False; here it works.",
            "An empty x gives an empty x_backprop and zeros for the parameters.",
        ),
        phrases=phrases("4 or 5" if version == 3 else "4"),
    )


class GradientV3(NamedTuple):
    """Outputs of FusedBatchNormGradV3."""

    x_backprop: np.ndarray
    scale_backprop: np.ndarray
    offset_backprop: np.ndarray
    reserve_space_4: np.ndarray
    reserve_space_5: np.ndarray


class Gradient(NamedTuple):
    """Outputs of FusedBatchNormGrad and FusedBatchNormGradV2."""

    x_backprop: np.ndarray
    scale_backprop: np.ndarray
    offset_backprop: np.ndarray
    reserve_space_3: np.ndarray
    reserve_space_4: np.ndarray


class _GradientOperator(DialectOperator):
    """What the versions of FusedBatchNormGrad share."""

    @classmethod
    def check(cls, call: Call) -> None:
        """Check an inverse standard deviation."""
        if call.attributes["reserve_space_2_is"] == "variance":
            return
        if not call.attributes["is_training"]:
            raise ArgumentValueError(
                "reserve_space_2_is",
                "is_training=False takes the population variance",
                came="'inverse_standard_deviation'",
                accepted="'variance'",
            )
        check_inverse("reserve_space_2", call.inputs["reserve_space_2"])

    @classmethod
    def canonical_call(cls, call: Call) -> CanonicalCall:
        """Return which canonical call this is."""
        canonical = canonical_call(call)
        if call.attributes["reserve_space_2_is"] == "variance":
            return canonical
        return replace(canonical, epsilon=0.0, inverse_std=True)

    @classmethod
    def finish(cls, call: Call, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the empty reserve outputs."""
        return results | empty_outputs(call)


class _FusedBatchNormGradV3(_GradientOperator):
    """Gradients of batch normalisation (FusedBatchNormGradV3)."""

    schema = _gradient_schema(3)

    def __call__(
        self,
        *,
        y_backprop: ArrayLike | None = None,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        reserve_space_1: ArrayLike | None = None,
        reserve_space_2: ArrayLike | None = None,
        reserve_space_3: ArrayLike | None = None,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        reserve_space_2_is: str = "variance",
    ) -> GradientV3:
        """Return x_backprop, scale_backprop, offset_backprop and two empty arrays.

        Parameters
        ----------
        y_backprop, x : array of rank 4 or 5
            Of one shape and element type (half, bfloat16 or float32).
        scale : array of shape (C,)
            float32.
        reserve_space_1 : array of shape (C,)
            float32: the batch mean; the population mean if not `is_training`.
        reserve_space_2 : array of shape (C,)
            float32: the biased batch variance, or what `reserve_space_2_is` says; the
            population variance if not `is_training`.
        reserve_space_3 : array
            Opaque; required and ignored.
        epsilon : float
            Not negative; rounded to float32.
        data_format : {"NHWC", "NCHW", "NDHWC", "NCDHW"}
            As many letters as `x` has axes.
        is_training : bool
            False: the statistics are constants.
        name : str, optional
            Ignored.
        reserve_space_2_is : {"variance", "inverse_standard_deviation"}
            The second is what cuDNN saves; it has epsilon inside. An extension of backnorm.
        """
        inputs = {
            "y_backprop": y_backprop,
            "x": x,
            "scale": scale,
            "reserve_space_1": reserve_space_1,
            "reserve_space_2": reserve_space_2,
            "reserve_space_3": reserve_space_3,
        }
        attributes = {
            "epsilon": epsilon,
            "data_format": data_format,
            "is_training": is_training,
            "name": name,
            "reserve_space_2_is": reserve_space_2_is,
        }
        return GradientV3(**self.invoke(inputs, attributes))


class _FusedBatchNormGradV2(_GradientOperator):
    """Gradients of batch normalisation (FusedBatchNormGradV2): V3 without reserve_space_3."""

    schema = _gradient_schema(2)

    def __call__(
        self,
        *,
        y_backprop: ArrayLike | None = None,
        x: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        reserve_space_1: ArrayLike | None = None,
        reserve_space_2: ArrayLike | None = None,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        name: str | None = None,
        reserve_space_2_is: str = "variance",
    ) -> Gradient:
        """Return x_backprop, scale_backprop, offset_backprop and two empty arrays.

        As FusedBatchNormGradV3, for rank 4 and without reserve_space_3. FusedBatchNormGrad, the
        first version, also lacks the 16-bit types.
        """
        inputs = {
            "y_backprop": y_backprop,
            "x": x,
            "scale": scale,
            "reserve_space_1": reserve_space_1,
            "reserve_space_2": reserve_space_2,
        }
        attributes = {
            "epsilon": epsilon,
            "data_format": data_format,
            "is_training": is_training,
            "name": name,
            "reserve_space_2_is": reserve_space_2_is,
        }
        return Gradient(**self.invoke(inputs, attributes))


class _FusedBatchNormGrad(_FusedBatchNormGradV2):
    """Gradients of batch normalisation (FusedBatchNormGrad): V2 for float32 alone."""

    schema = _gradient_schema(1)


FusedBatchNormGradV3 = _FusedBatchNormGradV3()
FusedBatchNormGradV2 = _FusedBatchNormGradV2()
FusedBatchNormGrad = _FusedBatchNormGrad()
