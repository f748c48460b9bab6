"""oneDNN Graph specification: BatchNormTrainingBackprop-1 and its partners.

Three texts went by these names; ``revision`` chooses one:

``"latest"``
    input_forward, output_delta, mean, variance, gamma?; one element type T2 for all
    per-channel tensors.
``"2020-21"``
    input, output_delta, gamma?, beta?, mean, variance; per-channel tensors in f32; attribute
    is_training.
``"early"``
    As 2020-21, without type rules: each per-channel tensor may be f32 or of the input's type.

==========================================  =============================
here                                        canonical
==========================================  =============================
input_forward / input, output_delta         x, dy
input_delta, gamma_delta, beta_delta        dx, dgamma, dbeta
mean, variance, gamma, beta                 the same
epsilon (f32), data_format, is_training     epsilon, data_format, training
==========================================  =============================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from backnorm.dialects._attributes import check_attributes
from backnorm.dialects._call import Call
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
    TypeRule,
)
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.problem import Operation

__all__ = [
    "OPERATORS",
    "REVISIONS",
    "BatchNormForwardTraining",
    "BatchNormInference",
    "BatchNormTrainingBackprop",
]

REVISIONS = ("latest", "2020-21", "early")

_REVISION = AttributeSpec(
    "revision",
    "string",
    "latest",
    choices=REVISIONS,
    extension=True,
    summary="which of the texts that went by this name",
)
_IS_TRAINING = AttributeSpec(
    "is_training",
    "bool",
    True,
    role="training",
    summary="False: mean and variance are running statistics, constants to the gradient",
)
_TYPES = {
    "latest": TYPE_RULES,
    "2020-21": tuple(TypeRule(name, ("f32",)) for name in ("f32", "bf16", "f16")),
    "early": (
        TypeRule("f32", ("f32",)),
        TypeRule("bf16", ("f32", "bf16")),
        TypeRule("f16", ("f32", "f16")),
    ),
}
_EARLY_NOTE = (
    "The text has no type rules: each per-channel tensor is f32 or of the input's type on its "
    "own, and a gradient has the type of its parameter (of gamma, then mean, where the "
    "parameter is absent)."
)


def _schema(
    revision: str,
    op: str,
    operation: Operation,
    summary: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    attributes: Sequence[AttributeSpec],
    notes: tuple[str, ...] = (),
) -> OperatorSchema:
    """Return one revision's schema: the type symbols and rules are the revision's."""
    data, channel = {
        "latest": ("T1", "T2"),
        "2020-21": ("T", "f32"),
        "early": ("any", "any"),
    }[revision]
    return OperatorSchema(
        dialect="onednn_spec",
        op=op,
        revision=revision,
        operation=operation,
        summary=summary,
        source=f"oneDNN Graph specification, {op}-1 ({revision} revision)",
        inputs=tuple(_typed(tensor, data, channel) for tensor in inputs),
        outputs=tuple(_typed(tensor, data, channel) for tensor in outputs),
        attributes=(*attributes, _REVISION),
        type_rules=_TYPES[revision],
        formats=FORMATS,
        one_channel_type=revision != "early",
        notes=notes + ((_EARLY_NOTE,) if revision == "early" else ()),
    )


def _typed(tensor: TensorSpec, data: str, channel: str) -> TensorSpec:
    return replace(tensor, type=data if tensor.kind == "data" else channel)


def _data(name: str, role: str, summary: str) -> TensorSpec:
    return TensorSpec(name, role, "", "data", summary=summary)


def _channel(name: str, role: str, summary: str, *, required: bool = True) -> TensorSpec:
    return TensorSpec(name, role, "", "channel", required, summary)


_GAMMA = _channel("gamma", "gamma", "scale; absent: 1", required=False)
_BETA = _channel("beta", "beta", "offset; absent: 0", required=False)


class _RevisedOperator(DialectOperator):
    """An operator whose description depends on the attribute `revision`.

    Attributes
    ----------
    schema : OperatorSchema
        Of the class: the latest revision's; of an instance: its own revision's.
    schemas : dict of str to OperatorSchema
        By revision.
    """

    schemas: Mapping[str, OperatorSchema]
    attributes: Mapping[str, object]

    @classmethod
    def schema_for(cls, attributes: Mapping[str, object]) -> OperatorSchema:
        """Return the schema of the revision that the attributes choose."""
        revision = attributes.get("revision", "latest")
        if not isinstance(revision, str):
            raise ArgumentTypeError(
                "revision", "must be a string", came=repr(revision), accepted=" or ".join(REVISIONS)
            )
        if revision not in cls.schemas:
            raise ArgumentValueError(
                "revision",
                f"unknown revision of {cls.schema.op}-1",
                came=repr(revision),
                accepted=" or ".join(map(repr, REVISIONS)),
            )
        return cls.schemas[revision]

    def _configure(self, attributes: Mapping[str, object]) -> None:
        self.schema = self.schema_for(attributes)
        self.attributes = check_attributes(self.schema, attributes)

    def _named(
        self, positional: Sequence[object], named: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the inputs by name: positional ones in the order of the revision."""
        names = [tensor.name for tensor in self.schema.inputs]
        if len(positional) > len(names):
            raise ArgumentTypeError(
                self.schema.op,
                "too many inputs",
                came=len(positional),
                accepted=f"{', '.join(names)}, then keywords",
            )
        inputs = dict(zip(names, positional, strict=False))
        for name, value in named.items():
            if name in inputs:
                raise ArgumentTypeError(name, "given twice", came="by position and by name")
            inputs[name] = value
        return inputs


def _backprop(revision: str) -> OperatorSchema:
    outputs = (
        _data("input_delta", "dx", "gradient of the input"),
        _channel("gamma_delta", "dgamma", "gradient of gamma", required=False),
        _channel("beta_delta", "dbeta", "gradient of beta", required=False),
    )
    op, summary = "BatchNormTrainingBackprop", "Gradients of batch normalisation in training."
    delta = _data("output_delta", "dy", "gradient of the output")
    inputs: tuple[TensorSpec, ...]
    if revision == "latest":
        inputs = (
            _data("input_forward", "x", "input of the forward"),
            delta,
            _channel("mean", "mean", "batch mean"),
            _channel("variance", "variance", "biased batch variance"),
            _GAMMA,
        )
        return _schema(revision, op, "backward", summary, inputs, outputs, (EPSILON, DATA_FORMAT))
    inputs = (
        _data("input", "x", "input of the forward"),
        delta,
        _GAMMA,
        _channel("beta", "beta", "offset; checked, enters no result", required=False),
        _channel("mean", "mean", "batch mean; running mean if not is_training"),
        _channel("variance", "variance", "batch variance; running variance if not is_training"),
    )
    return _schema(
        revision, op, "backward", summary, inputs, outputs, (EPSILON, _IS_TRAINING, DATA_FORMAT)
    )


def _forward(revision: str) -> OperatorSchema:
    x = _data("input", "x", "input")
    old = (
        _channel("mean", "running_mean", "old running mean"),
        _channel("variance", "running_variance", "old running variance"),
    )
    affine = (_GAMMA, _BETA)
    outputs = (
        _data("output", "y", "normalised output"),
        _channel("running_mean", "running_mean", ""),
        _channel("running_variance", "running_variance", ""),
        _channel("batch_mean", "mean", ""),
        _channel("batch_variance", "variance", "biased"),
    )
    momentum = (
        replace(MOMENTUM, default=0.1, nullable=False, summary="weight of the old statistics")
        if revision == "early"
        else MOMENTUM
    )
    return _schema(
        revision,
        "BatchNormForwardTraining",
        "forward",
        "Batch normalisation in training, with running statistics.",
        (x, *old, *affine) if revision == "latest" else (x, *affine, *old),
        outputs,
        (EPSILON, momentum, DATA_FORMAT),
        (RUNNING_NOTE,),
    )


def _inference(revision: str) -> OperatorSchema:
    inputs = (
        _data("input", "x", "input"),
        _channel("gamma", "gamma", "scale"),
        _channel("beta", "beta", "offset"),
        _channel("mean", "mean", ""),
        _channel("variance", "variance", ""),
    )
    outputs = (_data("output", "y", "normalised output"),)
    return _schema(
        revision,
        "BatchNormInference",
        "inference",
        "Batch normalisation with given statistics.",
        inputs,
        outputs,
        (EPSILON, DATA_FORMAT),
    )


class BatchNormTrainingBackprop(_RevisedOperator):
    """Gradients of batch normalisation in training.

    Parameters
    ----------
    epsilon : float
        Positive; rounded to float32. Required.
    data_format : {"NXC", "NCX"}
    revision : {"latest", "2020-21", "early"}
    is_training : bool, optional
        Only in the earlier revisions, there True by default; False takes mean and variance as
        constants.
    """

    schemas = {revision: _backprop(revision) for revision in REVISIONS}  # noqa: RUF012
    schema = schemas["latest"]

    def __init__(
        self,
        epsilon: float | Required = REQUIRED,
        data_format: str = "NXC",
        revision: str = "latest",
        *,
        is_training: bool | None = None,
    ) -> None:
        attributes = {"epsilon": epsilon, "data_format": data_format, "revision": revision}
        if is_training is not None:
            attributes["is_training"] = is_training
        self._configure(attributes)

    def __call__(
        self,
        *inputs: ArrayLike | None,
        outputs: int | Collection[str] = 3,
        input_delta: np.ndarray | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]:
        """Return the requested outputs in index order: input_delta, gamma_delta, beta_delta.

        Parameters
        ----------
        *inputs, **named : array
            In the order of the revision, or by name. Latest: input_forward, output_delta,
            mean, variance, gamma (optional). Earlier: input, output_delta, gamma (optional),
            beta (optional), mean, variance, where None stands for an input not given.
        outputs : int or collection of str
            That many from the first, or their names; gamma_delta and beta_delta are optional
            each on its own.
        input_delta : numpy.ndarray, optional
            Memory for the first output; may be `output_delta`.
        """
        given = self._named(inputs, named)
        return tuple(self.invoke(given, self.attributes, outputs, out=input_delta).values())


class BatchNormForwardTraining(_RevisedOperator):
    """Batch normalisation in training, with running statistics.

    Parameters
    ----------
    epsilon : float
        Positive; rounded to float32. Required.
    momentum : float, optional
        Positive; the weight of the old running statistics. Not given: their simple average
        with those of the batch (0.1 in the early revision).
    data_format : {"NXC", "NCX"}
    revision : {"latest", "2020-21", "early"}
    """

    schemas = {revision: _forward(revision) for revision in REVISIONS}  # noqa: RUF012
    schema = schemas["latest"]

    def __init__(
        self,
        epsilon: float | Required = REQUIRED,
        momentum: float | None = None,
        data_format: str = "NXC",
        revision: str = "latest",
    ) -> None:
        attributes = {"epsilon": epsilon, "data_format": data_format, "revision": revision}
        if momentum is not None:
            attributes["momentum"] = momentum
        self._configure(attributes)

    def __call__(
        self,
        *inputs: ArrayLike | None,
        output: np.ndarray | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]:
        """Return output, running_mean, running_variance, batch_mean, batch_variance.

        Parameters
        ----------
        *inputs, **named : array
            In the order of the revision, or by name. Latest: input, mean, variance,
            gamma (optional), beta (optional). Earlier: input, gamma (optional),
            beta (optional), mean, variance.
        output : numpy.ndarray, optional
            Memory for the first output.
        """
        given = self._named(inputs, named)
        return tuple(self.invoke(given, self.attributes, out=output).values())

    @classmethod
    def finish(cls, call: Call, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the running statistics."""
        return with_running_statistics(call, results)


class BatchNormInference(_RevisedOperator):
    """Batch normalisation with given statistics.

    Parameters
    ----------
    epsilon : float
        Positive; rounded to float32. Required.
    data_format : {"NXC", "NCX"}
    revision : {"latest", "2020-21", "early"}
        They differ in the types they accept.
    """

    schemas = {revision: _inference(revision) for revision in REVISIONS}  # noqa: RUF012
    schema = schemas["latest"]

    def __init__(
        self,
        epsilon: float | Required = REQUIRED,
        data_format: str = "NXC",
        revision: str = "latest",
    ) -> None:
        self._configure({"epsilon": epsilon, "data_format": data_format, "revision": revision})

    def __call__(
        self,
        *inputs: ArrayLike | None,
        output: np.ndarray | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]:
        """Return the tuple of the one output.

        Parameters
        ----------
        *inputs, **named : array
            input, gamma, beta, mean, variance, by position or by name.
        output : numpy.ndarray, optional
            Memory for the output.
        """
        given = self._named(inputs, named)
        return tuple(self.invoke(given, self.attributes, out=output).values())


OPERATORS: dict[str, type[DialectOperator]] = {
    op.schema.op: op
    for op in (BatchNormTrainingBackprop, BatchNormForwardTraining, BatchNormInference)
}
