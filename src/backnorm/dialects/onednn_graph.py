"""oneDNN Graph, as the oneDNN developer guide specifies it.

Source: oneDNN developer guide, operations BatchNormTrainingBackward, BatchNormForwardTraining
and BatchNormInference (oneDNN 3.x).

==============================  =======================================
here                            canonical
==============================  =======================================
src, diff_dst, diff_src, dst    x, dy, dx, y
mean, variance, gamma, beta     the same
diff_gamma, diff_beta           dgamma, dbeta
epsilon (f32), data_format      the same; data_format defaults to NXC
==============================  =======================================
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from backnorm.dialects._attributes import check_attributes
from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._onednn import (
    DATA_FORMAT,
    EPSILON,
    FORMATS,
    MOMENTUM,
    RUNNING_NOTE,
    TYPE_RULES,
    with_running_statistics,
)
from backnorm.dialects._operator import DialectOperator
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    OperatorSchema,
    Required,
    TensorSpec,
)

__all__ = [
    "OPERATORS",
    "BatchNormForwardTraining",
    "BatchNormInference",
    "BatchNormTrainingBackward",
]

_SOURCE = "oneDNN developer guide, {op} (oneDNN 3.x)"
_EMPTY_NOTE = "Empty N, spatial axes or C succeed, with zeros."


class BatchNormTrainingBackward(DialectOperator):
    """Gradients of batch normalisation in training.

    Parameters
    ----------
    epsilon : float
        Positive; rounded to float32. Required.
    data_format : {"NXC", "NCX"}
    single_output : {"specification", "onednn"}
        What `outputs` = 1 means, where the guide says that gamma is ignored: "specification"
        is the training formula with gamma = 1; "onednn" is what the library computes there,
        ``diff_dst / sqrt(variance + epsilon)``, which treats the statistics as constants. An
        extension of backnorm.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> src, diff_dst = rng.normal(size=(2, 8, 5, 5, 3)).astype("float32")
    >>> mean, variance = src.mean((0, 1, 2)), src.var((0, 1, 2))
    >>> op = BatchNormTrainingBackward(epsilon=1e-5)
    >>> diff_src, diff_gamma, diff_beta = op(src, diff_dst, mean, variance)
    >>> diff_src.shape, diff_gamma.shape
    ((8, 5, 5, 3), (3,))
    """

    schema = OperatorSchema(
        dialect="onednn_graph",
        op="BatchNormTrainingBackward",
        operation="backward",
        summary="Gradients of batch normalisation in training.",
        source=_SOURCE.format(op="BatchNormTrainingBackward"),
        inputs=(
            TensorSpec("src", "x", "T1", "data", summary="input of the forward"),
            TensorSpec("diff_dst", "dy", "T1", "data", summary="gradient of the output"),
            TensorSpec("mean", "mean", "T2", "channel", summary="batch mean"),
            TensorSpec("variance", "variance", "T2", "channel", summary="biased batch variance"),
            TensorSpec("gamma", "gamma", "T2", "channel", False, "scale; absent: 1"),
        ),
        outputs=(
            TensorSpec("diff_src", "dx", "T1", "data", summary="gradient of src"),
            TensorSpec("diff_gamma", "dgamma", "T2", "channel", False, "gradient of gamma"),
            TensorSpec("diff_beta", "dbeta", "T2", "channel", False, "gradient of beta"),
        ),
        attributes=(
            EPSILON,
            DATA_FORMAT,
            AttributeSpec(
                "single_output",
                "string",
                "specification",
                choices=("specification", "onednn"),
                extension=True,
                summary="formula of diff_src when neither diff_gamma nor diff_beta is requested",
            ),
        ),
        type_rules=TYPE_RULES,
        formats=FORMATS,
        outputs_together=(("diff_gamma", "diff_beta"),),
        notes=(
            "diff_src may be the memory of diff_dst, which is then overwritten.",
            "With neither diff_gamma nor diff_beta requested gamma is ignored, i.e. taken as 1. "
            "The oneDNN library computes diff_dst / sqrt(variance + epsilon) there, the formula "
            'with constant statistics; single_output="onednn" does the same.',
            "The library accepts epsilon <= 0, a short gamma and rank 6 (half of it unwritten); "
            "here the first two are errors, and every rank from 2 up works.",
            _EMPTY_NOTE,
        ),
    )

    def __init__(
        self,
        epsilon: float | Required = REQUIRED,
        data_format: str = "NXC",
        *,
        single_output: str = "specification",
    ) -> None:
        self.attributes = check_attributes(
            self.schema,
            {"epsilon": epsilon, "data_format": data_format, "single_output": single_output},
        )

    def __call__(
        self,
        src: ArrayLike | None = None,
        diff_dst: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        outputs: int | Collection[str] = 3,
        *,
        diff_src: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        """Return the requested outputs in index order: diff_src, diff_gamma, diff_beta.

        Parameters
        ----------
        src, diff_dst : array
            Of one shape and element type (f32, bf16 or f16).
        mean, variance, gamma : array of shape (C,)
            f32, or with bf16 data also bf16; gamma is optional.
        outputs : int or collection of str
            3: all; 1: diff_src alone, for which gamma is ignored.
        diff_src : numpy.ndarray, optional
            Memory for the first output; may be `diff_dst`, which is then overwritten.
        """
        inputs = {
            "src": src,
            "diff_dst": diff_dst,
            "mean": mean,
            "variance": variance,
            "gamma": gamma,
        }
        return tuple(self.invoke(inputs, self.attributes, outputs, out=diff_src).values())

    @classmethod
    def canonical_call(cls, call: Call) -> CanonicalCall:
        """Return which canonical call this is."""
        canonical = canonical_call(call)
        if len(call.outputs) > 1:
            return canonical
        inputs = {role: name for role, name in canonical.inputs.items() if role != "gamma"}
        training = call.attributes["single_output"] != "onednn"
        return replace(canonical, inputs=inputs, training=training)


class BatchNormForwardTraining(DialectOperator):
    """Batch normalisation in training, with running statistics.

    Parameters
    ----------
    epsilon : float
        Positive; rounded to float32. Required.
    momentum : float, optional
        Positive; the weight of the old running statistics. Not given: their simple average
        with those of the batch.
    data_format : {"NXC", "NCX"}
    """

    schema = OperatorSchema(
        dialect="onednn_graph",
        op="BatchNormForwardTraining",
        operation="forward",
        summary="Batch normalisation in training, with running statistics.",
        source=_SOURCE.format(op="BatchNormForwardTraining"),
        inputs=(
            TensorSpec("src", "x", "T1", "data", summary="input"),
            TensorSpec("mean", "running_mean", "T2", "channel", summary="old running mean"),
            TensorSpec(
                "variance", "running_variance", "T2", "channel", summary="old running variance"
            ),
            TensorSpec("gamma", "gamma", "T2", "channel", False, "scale; absent: 1"),
            TensorSpec("beta", "beta", "T2", "channel", False, "offset; absent: 0"),
        ),
        outputs=(
            TensorSpec("dst", "y", "T1", "data", summary="normalised output"),
            TensorSpec("running_mean", "running_mean", "T2", "channel"),
            TensorSpec("running_variance", "running_variance", "T2", "channel"),
            TensorSpec("batch_mean", "mean", "T2", "channel"),
            TensorSpec("batch_variance", "variance", "T2", "channel", summary="biased"),
        ),
        attributes=(EPSILON, MOMENTUM, DATA_FORMAT),
        type_rules=TYPE_RULES,
        formats=FORMATS,
        inputs_together=(("gamma", "beta"),),
        notes=(RUNNING_NOTE, _EMPTY_NOTE),
    )

    def __init__(
        self,
        epsilon: float | Required = REQUIRED,
        momentum: float | None = None,
        data_format: str = "NXC",
    ) -> None:
        self.attributes = check_attributes(
            self.schema, {"epsilon": epsilon, "momentum": momentum, "data_format": data_format}
        )

    def __call__(
        self,
        src: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        *,
        dst: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        """Return dst, running_mean, running_variance, batch_mean, batch_variance.

        Parameters
        ----------
        src : array
            f32, bf16 or f16.
        mean, variance : array of shape (C,)
            The old running statistics: f32, or with bf16 data also bf16.
        gamma, beta : array of shape (C,), optional
            Of the type of `mean`; both or neither.
        dst : numpy.ndarray, optional
            Memory for the first output.
        """
        inputs = {"src": src, "mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
        return tuple(self.invoke(inputs, self.attributes, out=dst).values())

    @classmethod
    def finish(cls, call: Call, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the running statistics."""
        return with_running_statistics(call, results)


class BatchNormInference(DialectOperator):
    """Batch normalisation with given statistics.

    Parameters
    ----------
    epsilon : float
        Positive; rounded to float32. Required.
    data_format : {"NXC", "NCX"}
    """

    schema = OperatorSchema(
        dialect="onednn_graph",
        op="BatchNormInference",
        operation="inference",
        summary="Batch normalisation with given statistics.",
        source=_SOURCE.format(op="BatchNormInference"),
        inputs=(
            TensorSpec("src", "x", "T1", "data", summary="input"),
            TensorSpec("gamma", "gamma", "T2", "channel", summary="scale"),
            TensorSpec("beta", "beta", "T2", "channel", summary="offset"),
            TensorSpec("mean", "mean", "T2", "channel"),
            TensorSpec("variance", "variance", "T2", "channel"),
        ),
        outputs=(TensorSpec("dst", "y", "T1", "data", summary="normalised output"),),
        attributes=(EPSILON, DATA_FORMAT),
        type_rules=TYPE_RULES,
        formats=FORMATS,
        notes=(_EMPTY_NOTE,),
    )

    def __init__(self, epsilon: float | Required = REQUIRED, data_format: str = "NXC") -> None:
        self.attributes = check_attributes(
            self.schema, {"epsilon": epsilon, "data_format": data_format}
        )

    def __call__(
        self,
        src: ArrayLike | None = None,
        gamma: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        mean: ArrayLike | None = None,
        variance: ArrayLike | None = None,
        *,
        dst: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        """Return the tuple of the one output, dst.

        Parameters
        ----------
        src : array
            f32, bf16 or f16.
        gamma, beta, mean, variance : array of shape (C,)
            f32, or with bf16 data also bf16.
        dst : numpy.ndarray, optional
            Memory for the output.
        """
        inputs = {"src": src, "gamma": gamma, "beta": beta, "mean": mean, "variance": variance}
        return tuple(self.invoke(inputs, self.attributes, out=dst).values())


OPERATORS: dict[str, type[DialectOperator]] = {
    op.schema.op: op
    for op in (BatchNormTrainingBackward, BatchNormForwardTraining, BatchNormInference)
}
