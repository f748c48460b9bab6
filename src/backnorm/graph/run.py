"""Run a program, one step after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from backnorm.activations import RELU
from backnorm.arithmetics import Arithmetic
from backnorm.dialects import registry
from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from backnorm.graph.pointwise import POINTWISE
from backnorm.graph.program import RELU_PORT, Program, Step, Tensor
from backnorm.layout import by_strides, restore
from backnorm.operators import batch_norm_backward
from backnorm.reference import counting, pack_mask


def run_program(
    program: Program,
    tensors: Mapping[str, np.ndarray],
    *,
    arithmetic: Arithmetic | None = None,
) -> dict[str, np.ndarray]:
    """Run `program` on named tensors and return its results by name.

    Parameters
    ----------
    program : Program
    tensors : mapping of str to numpy.ndarray
        The program's inputs under any of their names; further entries are ignored.
    arithmetic : {"float32", "float64"}, optional
        The type in which batch normalisations compute elements; see `backnorm.arithmetic`.

    Raises
    ------
    ArgumentError
        If an input is missing or differs from its declaration, or an operator rejects its
        arguments.
    """
    found = program.find_inputs(tensors.keys())
    missing = [key for key in program.inputs if key not in found]
    if missing:
        raise ArgumentValueError("tensors", f"missing: {', '.join(missing)}")
    values = {key: supply(program, key, tensors[name]) for key, name in found.items()}
    for step in program.steps:
        with errors_of(step):
            store(program, step, values, run_step(step, gather(step, values), arithmetic))
    return {name: values[key] for name, key in program.results.items()}


@contextmanager
def errors_of(step: Step) -> Iterator[None]:
    """In errors of a bad argument, put the graph operator's name before the argument's name."""
    try:
        yield
    except ArgumentError as error:
        # The step of a single call (`cli.call`) has no name: its label is the name of the operator.
        if step.label == step.op:
            raise
        argument = f"{step.label} ({step.op}) {error.argument}"
        raise type(error)(**error.parts() | {"argument": argument}) from None


def supply(program: Program, key: str, array: np.ndarray) -> np.ndarray:
    """Check `array` against the declaration of the tensor `key`; return it in the declared layout.

    In memory, the result's axes have the order that the declared strides give. The result has no
    gaps between elements, even if the declared strides have.
    """
    tensor = program.tensors[key]
    _check_declared(tensor, array)
    if tensor.stride is None or array.size == 0:
        return array
    order = by_strides(tensor.stride)
    return restore(np.ascontiguousarray(array.transpose(order)), order)


def gather(step: Step, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs of `step` by the names of the operator's ports."""
    return {port: values[key] for port, key in step.inputs.items()}


def run_step(
    step: Step, inputs: Mapping[str, np.ndarray], arithmetic: Arithmetic | None = None
) -> dict[str, np.ndarray]:
    """Return the requested outputs of one step, by the operator's names for them."""
    pointwise = POINTWISE.get(step.op)
    if pointwise is not None:
        (port,) = step.outputs
        return {port: pointwise.compute(step.attributes, step.dtype, **inputs)}
    if RELU_PORT in inputs:
        return _masked_backward(step, inputs, arithmetic)
    return registry.invoke(
        step.dialect,
        step.op,
        inputs,
        step.attributes,
        tuple(step.outputs),
        arithmetic=arithmetic,
        activation=RELU if step.relu else None,
    )


def _masked_backward(
    step: Step, inputs: Mapping[str, np.ndarray], arithmetic: Arithmetic | None
) -> dict[str, np.ndarray]:
    """Return the gradients of a normalisation that is followed by a ReLU. The input `RELU_PORT` of
    the step is the ReLU's own input (src) or output (dst). The ReLU passes dy where this tensor is
    positive.
    """
    arrays = dict(inputs)
    x, relu = arrays["src"], arrays.pop(RELU_PORT)
    call = registry.canonical(
        step.dialect, step.op, arrays, step.attributes, tuple(step.outputs), arithmetic=arithmetic
    )
    if relu.shape != x.shape:
        raise ArgumentValueError(
            step.inputs[RELU_PORT],
            "must have the shape of src",
            came=f"shape {relu.shape}",
            accepted=f"shape {x.shape}",
        )
    operands: dict[str, Any] = dict(call.arrays(arrays))
    gradients = batch_norm_backward(
        **operands,
        mask=pack_mask(counting(relu), x),
        epsilon=call.epsilon,
        data_format=call.data_format,
        training=call.training,
        arithmetic=call.arithmetic,
    )
    return {name: getattr(gradients, role) for role, name in call.outputs.items()}


def store(
    program: Program,
    step: Step,
    values: MutableMapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
) -> None:
    """Check the outputs of `step` against their declarations, and add them to `values`."""
    for port, key in step.outputs.items():
        _check_declared(program.tensors[key], outputs[port])
        values[key] = outputs[port]


def _check_declared(tensor: Tensor, array: np.ndarray) -> None:
    if tensor.shape is not None and array.shape != tensor.shape:
        raise ArgumentValueError(
            tensor.key,
            "differs from the declared shape",
            came=f"shape {array.shape}",
            accepted=f"shape {tensor.shape}",
        )
    if tensor.dtype is not None and array.dtype != tensor.dtype:
        raise ArgumentTypeError(
            tensor.key,
            "differs from the declared data type",
            came=array.dtype,
            accepted=tensor.dtype,
        )
