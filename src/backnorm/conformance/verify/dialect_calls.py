"""A case as the call of a dialect's operator: its inputs and attributes, and what it is judged by.

The rules of the operator (`OperatorSchema`) say which input and which attribute is what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.data import read_only
from backnorm.conformance.verify.operations import OPERATIONS, RefusedError
from backnorm.conformance.verify.row_operators import ROW_OPERATORS, RowOperator, row_operator
from backnorm.dialects import registry
from backnorm.dialects.registry import CanonicalCall
from backnorm.dialects.schema import OperatorSchema
from backnorm.errors import ArgumentError, ArgumentValueError
from backnorm.layout import kept_shape

__all__ = ["Inputs", "arguments", "received", "rules_of", "schema_of", "shape_of_kept"]

Inputs = Mapping[str, np.ndarray | None]


def arguments(
    schema: OperatorSchema, inputs: Inputs, case: Case
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs and the attributes of a call by the operator's names; None: not passed.

    If the operator requires gamma or beta, and the case has none, ones or zeros are passed. An
    attribute that only backnorm has is not passed.

    Raises
    ------
    RefusedError
        If the operator does not accept the case.
    """
    taken, attributes, _ = _call(schema, inputs, case)
    return taken, attributes


def _call(
    schema: OperatorSchema, inputs: Inputs, case: Case
) -> tuple[dict[str, Any], dict[str, Any], CanonicalCall]:
    """Return the inputs and attributes of a call, and the canonical call that it corresponds to."""
    data, rank = case.data, case.data.x.ndim
    flags = _flags(case, schema)
    if not flags and case.training == schema.frozen:
        kind = "statistics of training" if schema.frozen else "frozen statistics"
        raise RefusedError(f"the operator has no {kind}")
    formats = [f for f in schema.formats if f.is_any or f.layout == data.data_format]
    if not formats:
        raise RefusedError(f"the operator has no layout {data.data_format}")
    # If the operator has no layout of this rank, the dialect's rules refuse the rank.
    fitting = next((f for f in formats if f.rank in (None, rank)), formats[0])
    known = {
        "epsilon": _epsilon(case, schema),
        "channel_axis": data.channel_axis,
        "reduced_axes": tuple(k for k in range(rank) if k != data.channel_axis),
        "data_format": fitting.name,
    }
    attributes = {
        spec.name: known.get(spec.role or "", spec.typical)
        for spec in schema.attributes
        if not spec.extension
    } | flags
    taken = _inputs(schema, inputs, case)
    try:
        canonical = registry.operator(schema.dialect, schema.op).canonical(taken, attributes)
    except ArgumentError as error:
        accepted = f"; expected {error.accepted}" if error.accepted else ""
        raise RefusedError(f"{error.argument}: {error.problem}{accepted}") from error
    if canonical.blended:
        raise RefusedError("the operator has other results for such a case, by its own rule")
    return taken, attributes, canonical


def _inputs(schema: OperatorSchema, inputs: Inputs, case: Case) -> dict[str, Any]:
    mean, variance = case.data.mean, case.data.variance
    usual = {"gamma": np.ones_like(mean), "beta": np.zeros_like(mean)}
    known: dict[str, Any] = dict(inputs)
    if schema.operation == "backward":
        data = replace(case.data, epsilon=_epsilon(case, schema))
        known |= {"inverse_deviation": data.inverse_deviation, "beta": usual["beta"]}
    if not case.training:
        known |= {"running_mean": read_only(mean), "running_variance": read_only(variance)}
    elif schema.operation == "forward":
        # An operator may update its running statistics in place.
        known |= {"running_mean": mean.copy(), "running_variance": variance.copy()}
    # The value of an input that the specification requires but the operator does not read.
    known |= {"ignored": np.empty(0, mean.dtype), "reserve": np.empty(0, np.uint8)}
    values = {}
    for tensor in _schema_of_call(case, schema).inputs:
        value = known.get(tensor.role)
        if value is None and tensor.required:
            value = usual.get(tensor.role)
        is_running = tensor.role.startswith("running_")
        if value is not None and tensor.kind == "vector" and case.training and not is_running:
            value = value[:0]
        if value is not None and tensor.kind == "kept":
            value = value.reshape(shape_of_kept(case))
        values[tensor.name] = value
    return values


def received(case: Case, schema: OperatorSchema | RowOperator) -> Case:
    """Return the case of the numbers that `OfDialect` passes; an operator is judged by them.

    epsilon is a float32 if the operator's attribute is one. If the operator takes an inverse
    standard deviation, which is rounded to the type of the statistics, `variance` is the float64
    for which 1/sqrt(variance + epsilon) is this rounded number. If the operator updates running
    statistics, `momentum` is the weight of the batch in them.
    """
    if isinstance(schema, RowOperator):
        return schema.received(case)
    momentum = None
    if schema.operation == "forward":
        momentum = _call(schema, case.inputs, case)[2].weight
    data = replace(case.data, epsilon=_epsilon(case, schema))
    if any(t.role == "inverse_deviation" for t in _schema_of_call(case, schema).inputs):
        data = data.with_inverse_deviation()
    return replace(case, data=replace(data, momentum=momentum, unbiased=schema.unbiased))


def _epsilon(case: Case, schema: OperatorSchema) -> float:
    """Return the epsilon of a case in the type of the operator's attribute."""
    is_narrow = any(spec.role == "epsilon" and spec.type == "f32" for spec in schema.attributes)
    return float(np.float32(case.data.epsilon)) if is_narrow else case.data.epsilon


def _schema_of_call(case: Case, schema: OperatorSchema) -> OperatorSchema:
    """Return the rules for calls with the statistics of a case, in training or constant."""
    return registry.operator(schema.dialect, schema.op).schema_for(_flags(case, schema))


def _flags(case: Case, schema: OperatorSchema) -> dict[str, bool]:
    """Return the values of the attributes that say whether the statistics are constants."""
    values = {"training": case.training, "frozen": not case.training}
    named = {spec.name: spec.role for spec in schema.attributes}
    return {name: values[role] for name, role in named.items() if role in values}


def rules_of(dialect: str, op: str | None, operation: str) -> OperatorSchema | RowOperator:
    """Return the rules of an operator, as :func:`schema_of` does, or of one that is only judged."""
    for each in ROW_OPERATORS:
        if (each.dialect, each.op) == (dialect, op) and each.operation != operation:
            problem = f"must be {each.operation} for {op}"
            raise ArgumentValueError("--operation", problem, came=operation)
    if any(each.operation == operation for each in ROW_OPERATORS):
        return row_operator(dialect, op, operation)
    return schema_of(dialect, op, operation)


def schema_of(dialect: str, op: str | None, operation: str) -> OperatorSchema:
    """Return the rules of an operator; the default is the dialect's first operator for `operation`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If there is no such dialect or operator, or if it computes another operation.
    """
    if dialect in registry.PARTS and dialect not in registry.DIALECTS:
        raise ArgumentValueError(
            "dialect", "has only parts of a gradient, which verify does not call", came=dialect,
            accepted=", ".join(registry.DIALECTS),
        )  # fmt: skip
    known = registry.operators(dialect)
    fitting = [name for name, each in known.items() if each.schema.operation == operation]
    if not fitting:
        raise ArgumentValueError("dialect", f"has no {operation} pass in training", came=dialect)
    schema = registry.operator(dialect, op or fitting[0]).schema
    if schema.operation != operation:
        other = schema.operation
        raise ArgumentValueError(
            "op", f"must be a {operation} pass", came=op, accepted=", ".join(fitting),
            hint=f"--operation {other} verifies a {other} pass" if other in OPERATIONS else None,
        )  # fmt: skip
    return schema


def shape_of_kept(case: Case) -> tuple[int, ...]:
    """Return the shape of a per-channel tensor that has the rank of x."""
    return kept_shape(case.data.x.shape, (case.data.channel_axis,))
