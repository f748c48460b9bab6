"""Run a program, one step after the other."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import numpy as np

from backnorm.arithmetics import Arithmetic
from backnorm.dialects import registry
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.program import Program, Step, Tensor
from backnorm.layout import by_strides, restore


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
        The type in which all operators compute elements; see `backnorm.arithmetic`.

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
        store(program, step, values, run_step(step, gather(step, values), arithmetic))
    return {name: values[key] for name, key in program.results.items()}


def supply(program: Program, key: str, array: np.ndarray) -> np.ndarray:
    """Check `array` against the declaration of the tensor `key`; return it in the declared layout.

    The order of axes in memory is that of the declared strides. Declared padding between elements
    is not reproduced, because it has no values.
    """
    tensor = program.tensors[key]
    _check_declared(tensor, array)
    if tensor.stride is None or array.size == 0:
        return array
    order = by_strides(tensor.stride)
    return restore(np.ascontiguousarray(array.transpose(order)), order)


def gather(step: Step, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs of `step`, by the operator's names for them."""
    return {port: values[key] for port, key in step.inputs.items()}


def run_step(
    step: Step, inputs: Mapping[str, np.ndarray], arithmetic: Arithmetic | None = None
) -> dict[str, np.ndarray]:
    """Return the requested outputs of one step, by the operator's names for them."""
    how = step.attributes, tuple(step.outputs)
    return registry.invoke(step.dialect, step.op, inputs, *how, arithmetic=arithmetic)


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
