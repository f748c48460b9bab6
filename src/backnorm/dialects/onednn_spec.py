"""oneDNN Graph specification: BatchNormTrainingBackprop-1 and its forward operators.

Three versions of the specification have operators of these names; ``revision`` selects one. The
versions differ in the inputs of BatchNormTrainingBackprop and in the element types. Below, ``?``
marks an optional input:

``"latest"``
    input_forward, output_delta, mean, variance, gamma?; one element type T2 for all
    per-channel tensors.
``"2020-21"``
    input, output_delta, gamma?, beta?, mean, variance; per-channel tensors in f32; attribute
    is_training.
``"early"``
    Like ``"2020-21"``, but this version of the specification has no rules for types. Each
    per-channel tensor may be f32, or may have the type of the input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from backnorm.arithmetics import Arithmetic
from backnorm.dialects._attributes import refuse_unknown
from backnorm.dialects._onednn import (
    DATA_FORMAT,
    EPSILON,
    FORMATS,
    MOMENTUM,
    TYPE_RULES,
    DataFormat,
    Forward,
)
from backnorm.dialects.operator import Operator, by_name
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    OperatorSchema,
    Required,
    TensorSpec,
    channel,
    data,
    type_rules,
)
from backnorm.errors import ArgumentTypeError

__all__ = [
    "OPERATORS",
    "REVISIONS",
    "BatchNormForwardTraining",
    "BatchNormInference",
    "BatchNormTrainingBackprop",
]

REVISIONS = ("latest", "2020-21", "early")
Revision = Literal["latest", "2020-21", "early"]

_REVISION = AttributeSpec("revision", "string", choices=REVISIONS, extension=True)
_IS_TRAINING = AttributeSpec("is_training", "bool", role="training", default=True)
# For each revision: the symbol for the type of data, the symbol for the type of per-channel
# tensors, and the permitted types.
_TYPES = {
    "latest": ("T1", "T2", TYPE_RULES),
    "2020-21": ("T", "f32", type_rules(f32="f32", bf16="f32", f16="f32")),
    "early": ("any", "any", type_rules(f32="f32", bf16="f32 bf16", f16="f32 f16")),
}


def _rules(
    revision: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    attributes: Sequence[AttributeSpec],
    **rules: Any,
) -> OperatorSchema:
    """Return the rules of an operator in a revision, with the type symbols of that revision."""
    of_data, of_channels, types = _TYPES[revision]

    def typed(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(replace(t, type=of_data if t.kind == "data" else of_channels) for t in tensors)

    return OperatorSchema(
        dialect="onednn_spec",
        revision=revision,
        source=f"oneDNN Graph specification, {{op}}-1 ({revision} revision)",
        inputs=typed(inputs),
        outputs=typed(outputs),
        attributes=(*attributes, _REVISION),
        type_rules=types,
        formats=FORMATS,
        one_channel_type=revision != "early",
        **rules,
    )


_MEAN, _VARIANCE = channel("mean", "mean", ""), channel("variance", "variance", "")
_GAMMA = channel("gamma", "gamma", "", required=False)
_BETA = channel("beta", "beta", "", required=False)


def _backprop(revision: str) -> OperatorSchema:
    delta = data("output_delta", "dy", "")
    inputs: tuple[TensorSpec, ...]
    attributes: tuple[AttributeSpec, ...]
    if revision == "latest":
        inputs = (data("input_forward", "x", ""), delta, _MEAN, _VARIANCE, _GAMMA)
        attributes = (EPSILON, DATA_FORMAT)
    else:
        inputs = (data("input", "x", ""), delta, _GAMMA, _BETA, _MEAN, _VARIANCE)
        attributes = (EPSILON, _IS_TRAINING, DATA_FORMAT)
    outputs = (
        data("input_delta", "dx", ""),
        channel("gamma_delta", "dgamma", "", required=False),
        channel("beta_delta", "dbeta", "", required=False),
    )
    named = {"op": "BatchNormTrainingBackprop", "operation": "backward"}
    return _rules(revision, inputs, outputs, attributes, **named)


def _forward(revision: str) -> OperatorSchema:
    x, affine = data("input", "x", ""), (_GAMMA, _BETA)
    old = (channel("mean", "running_mean", ""), channel("variance", "running_variance", ""))
    outputs = (
        data("output", "y", ""),
        channel("running_mean", "running_mean", ""),
        channel("running_variance", "running_variance", ""),
        channel("batch_mean", "mean", ""),
        channel("batch_variance", "variance", ""),
    )
    inputs = (x, *old, *affine) if revision == "latest" else (x, *affine, *old)
    momentum = replace(MOMENTUM, default=0.1) if revision == "early" else MOMENTUM
    named = {"op": "BatchNormForwardTraining", "operation": "forward"}
    return _rules(revision, inputs, outputs, (EPSILON, momentum, DATA_FORMAT), **named)


def _inference(revision: str) -> OperatorSchema:
    required = (replace(tensor, required=True) for tensor in (_GAMMA, _BETA))
    inputs = (data("input", "x", ""), *required, _MEAN, _VARIANCE)
    named = {"op": "BatchNormInference", "operation": "inference"}
    return _rules(revision, inputs, (data("output", "y", ""),), (EPSILON, DATA_FORMAT), **named)


class _OfRevision(Operator):
    """An operator whose inputs depend on its revision."""

    def _arranged(
        self, inputs: tuple[ArrayLike | None, ...], named: Mapping[str, ArrayLike | None]
    ) -> tuple[ArrayLike | None, ...]:
        """Return all inputs in the order of this revision.

        `inputs` were passed by position, `named` by name.
        """
        names = self.schema.order
        if len(inputs) == len(names) and not named:
            return inputs
        if len(inputs) > len(names):
            raise ArgumentTypeError(
                self.schema.op,
                "too many inputs",
                came=len(inputs),
                accepted=f"{', '.join(names)}, then keywords",
            )
        for name in named:
            if name in names[: len(inputs)]:
                raise ArgumentTypeError(name, "given twice", came="by position and by name")
        refuse_unknown(named, names, "input", self.schema)
        return (*inputs, *map(named.get, names[len(inputs) :]))


class BatchNormTrainingBackprop(_OfRevision):
    """Gradients of batch normalisation in training.

    Parameters
    ----------
    epsilon : float, finite and positive, rounded to float32
        added to the variance
    data_format : {"NCX", "NXC"}, default "NXC"
        channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes
    revision : {"latest", "2020-21", "early"}, default "latest"
        which version of the specification; an extension of backnorm
    is_training : bool, optional
        False: mean and variance are running statistics and constant. Only the revisions "2020-21"
        and "early" have this attribute, with the default True
    """

    rules = tuple(map(_backprop, REVISIONS))

    def __init__(
        self,
        epsilon: float | Required = REQUIRED,
        data_format: DataFormat = "NXC",
        revision: Revision = "latest",
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
        arithmetic: Arithmetic | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]:
        """Gradients of batch normalisation in training.

        With M elements per channel, s = 1 / sqrt(variance + epsilon), x the first input and
        c = x - mean::

            beta_delta  = sum output_delta
            gamma_delta = s * sum output_delta*c
            input_delta = gamma*s * (output_delta - beta_delta/M - c*s * gamma_delta/M)

        If not is_training, input_delta = gamma*s * output_delta.

        Parameters
        ----------
        input_forward : array of T1, rank 2 or more
            input of the forward; in the older revisions its name is input
        input : array of T, rank 2 or more
            input of the forward, in the revisions "2020-21" and "early"
        output_delta : array of the type of the input
            gradient of the output
        mean : array of T2, shape (C,)
            batch mean; running mean if not is_training
        variance : array of T2, shape (C,)
            biased batch variance; running variance if not is_training
        gamma : array of T2, shape (C,), optional
            scale; absent: 1
        beta : array of f32, shape (C,), optional
            offset, in the revisions "2020-21" and "early"; checked, but not used
        outputs : int or collection of str
            the number of outputs, counted from the first, or their names
        input_delta : numpy.ndarray, optional
            memory for this output; may be output_delta, which is then overwritten
        arithmetic : {"float32", "float64"}, optional
            an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

        Returns
        -------
        input_delta : array of the type of the input
            gradient of the input
        gamma_delta : array of T2, shape (C,)
            gradient of gamma
        beta_delta : array of T2, shape (C,)
            gradient of beta

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            if an argument does not match its description; the error names the argument

        Notes
        -----
        Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16, f16
        with f32; bf16 only with f32 in the revision "2020-21".

        - The revision "early" has no type rules: each per-channel tensor may be f32 or of the
          input's type, independently of the others.
        - A gradient has the type of its parameter. If the parameter is absent, the gradient has
          the type of gamma or, without gamma, the type of mean.
        """
        operands = self._arranged(inputs, named)
        return self._run(operands, outputs=outputs, memory=input_delta, arithmetic=arithmetic)


class BatchNormForwardTraining(_OfRevision, Forward):
    """Batch normalisation in training, with running statistics.

    Parameters
    ----------
    epsilon : float, finite and positive, rounded to float32
        added to the variance
    momentum : float, finite and positive, rounded to float32, optional
        weight of the old running statistics; not given: 0.5, as in the oneDNN library, and 0.1 in
        the revision "early". The specification's own rule, the average over all batches, would
        need their number, which is no input
    data_format : {"NCX", "NXC"}, default "NXC"
        channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes
    revision : {"latest", "2020-21", "early"}, default "latest"
        which version of the specification; an extension of backnorm
    """

    rules = tuple(map(_forward, REVISIONS))

    def __init__(
        self,
        epsilon: float | Required = REQUIRED,
        momentum: float | None = None,
        data_format: DataFormat = "NXC",
        revision: Revision = "latest",
    ) -> None:
        attributes = {"epsilon": epsilon, "data_format": data_format, "revision": revision}
        if momentum is not None:
            attributes["momentum"] = momentum
        self._configure(attributes)

    def __call__(
        self,
        *inputs: ArrayLike | None,
        output: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]:
        """Batch normalisation in training, with running statistics.

        The inputs mean and variance are the old running statistics::

            output           = gamma * (input - batch_mean) / sqrt(batch_variance + epsilon) + beta
            running_mean     = momentum * mean + (1 - momentum) * batch_mean
            running_variance = momentum * variance + (1 - momentum) * batch_variance

        Parameters
        ----------
        input : array of T1, rank 2 or more
            input
        mean : array of T2, shape (C,)
            old running mean
        variance : array of T2, shape (C,)
            old running variance
        gamma : array of T2, shape (C,), optional
            scale; absent: 1
        beta : array of T2, shape (C,), optional
            offset; absent: 0
        output : numpy.ndarray, optional
            memory for this output; may be input, which is then overwritten
        arithmetic : {"float32", "float64"}, optional
            an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

        Returns
        -------
        output : array of T1
            normalised output
        running_mean : array of T2, shape (C,)
            new running mean
        running_variance : array of T2, shape (C,)
            new running variance
        batch_mean : array of T2, shape (C,)
            mean of the batch
        batch_variance : array of T2, shape (C,)
            biased

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            if an argument does not match its description; the error names the argument

        Notes
        -----
        Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16, f16
        with f32; bf16 only with f32 in the revision "2020-21".

        - The revision "early" has no type rules: each per-channel tensor may be f32 or of the
          input's type, independently of the others.
        - The new running statistics are momentum * old + (1 - momentum) * batch, with the biased
          batch variance, as in oneDNN 3.2. PyTorch's momentum is one minus this momentum. An empty
          batch (M = 0) does not change the running statistics.
        """
        operands = self._arranged(inputs, named)
        return self._run(operands, memory=output, arithmetic=arithmetic)


class BatchNormInference(_OfRevision):
    """Batch normalisation with given statistics.

    Parameters
    ----------
    epsilon : float, finite and positive, rounded to float32
        added to the variance
    data_format : {"NCX", "NXC"}, default "NXC"
        channel axis: 1 for NCX, the last for NXC; X is any number of spatial axes
    revision : {"latest", "2020-21", "early"}, default "latest"
        which version of the specification; an extension of backnorm
    """

    rules = tuple(map(_inference, REVISIONS))

    def __init__(
        self,
        epsilon: float | Required = REQUIRED,
        data_format: DataFormat = "NXC",
        revision: Revision = "latest",
    ) -> None:
        self._configure({"epsilon": epsilon, "data_format": data_format, "revision": revision})

    def __call__(
        self,
        *inputs: ArrayLike | None,
        output: np.ndarray | None = None,
        arithmetic: Arithmetic | None = None,
        **named: ArrayLike | None,
    ) -> tuple[np.ndarray, ...]:
        """Batch normalisation with given statistics.

        ::

            output = gamma * (input - mean) / sqrt(variance + epsilon) + beta

        Parameters
        ----------
        input : array of T1, rank 2 or more
            input
        gamma : array of T2, shape (C,)
            scale
        beta : array of T2, shape (C,)
            offset
        mean : array of T2, shape (C,)
            mean to normalise with
        variance : array of T2, shape (C,)
            variance to normalise with
        output : numpy.ndarray, optional
            memory for this output; may be input, which is then overwritten
        arithmetic : {"float32", "float64"}, optional
            an extension of backnorm: the compute type of elements; see `backnorm.arithmetic`

        Returns
        -------
        output : array of T1
            normalised output

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            if an argument does not match its description; the error names the argument

        Notes
        -----
        Element types of data and of per-channel tensors: f32 with f32, bf16 with f32 or bf16, f16
        with f32; bf16 only with f32 in the revision "2020-21".

        - The revision "early" has no type rules: each per-channel tensor may be f32 or of the
          input's type, independently of the others.
        """
        operands = self._arranged(inputs, named)
        return self._run(operands, memory=output, arithmetic=arithmetic)


OPERATORS = by_name(BatchNormTrainingBackprop, BatchNormForwardTraining, BatchNormInference)
