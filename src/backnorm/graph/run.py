"""Run a program, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np

from backnorm.arithmetics import Arithmetic
from backnorm.dialects import registry
from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from backnorm.graph.pointwise import POINTWISE
from backnorm.graph.program import Program, Step, Tensor
from backnorm.layout import by_strides, restore

Arrays = dict[str, np.ndarray]
#: Takes a step, its inputs, and a function that computes its outputs, which it returns.
Watch = Callable[[Step, Arrays, Callable[[], Arrays]], Arrays]
#: Takes a step, the inputs that it has, and those that are missing, which it returns.
Fill = Callable[[Step, Arrays, Mapping[str, Tensor]], Arrays]


def run_program(
    program: Program,
    tensors: Mapping[str, np.ndarray],
    *,
    arithmetic: Arithmetic | None = None,
    watch: Watch | None = None,
    fill: Fill | None = None,
) -> Arrays:
    """Run `program` on named tensors and return its results by name.

    Parameters
    ----------
    program : Program
    tensors : mapping of str to numpy.ndarray
        The program's inputs under any of their names; further entries are ignored.
    arithmetic : {"float32", "float64"}, optional
        The type in which batch normalisations compute elements; see `backnorm.arithmetic`.
    watch : callable, optional
        ``watch(step, inputs, call)`` is called for each step, to time or judge it. It returns the
        outputs of the step, which ``call()`` computes. Arrays have the operator's names.
    fill : callable, optional
        ``fill(step, inputs, missing)`` returns arrays for the inputs of a step that `tensors` lacks
        and no step produces. `missing` has their declarations. Default: missing tensors are an
        error.

    Raises
    ------
    ArgumentError
        If an input is missing or differs from its declaration, or an operator rejects its
        arguments.
    """
    found = program.find_inputs(tensors.keys())
    values = {key: _supplied(program.tensors[key], tensors[name]) for key, name in found.items()}
    missing = [key for key in program.inputs if key not in values]
    if missing and fill is None:
        raise ArgumentValueError("tensors", f"missing: {', '.join(missing)}")
    for step in program.steps:
        with _errors_of(step):
            inputs = {port: values[key] for port, key in step.inputs.items() if key in values}
            absent = {p: program.tensors[k] for p, k in step.inputs.items() if k not in values}
            if fill is not None and absent:
                for port, array in fill(step, inputs, absent).items():
                    values[step.inputs[port]] = _supplied(absent[port], array)
                inputs = {port: values[key] for port, key in step.inputs.items()}
            call = partial(run_step, program, step, inputs, arithmetic)
            outputs = call() if watch is None else watch(step, inputs, call)
            for port, key in step.outputs.items():
                _check_declared(program.tensors[key], outputs[port])
                values[key] = outputs[port]
    return {name: values[key] for name, key in program.results.items()}


def run_step(
    program: Program, step: Step, inputs: Arrays, arithmetic: Arithmetic | None = None
) -> Arrays:
    """Return the requested outputs of one step, by the operator's names for them."""
    pointwise = POINTWISE.get(step.op)
    if pointwise is None:
        requested = tuple(step.outputs)
        return registry.operator(step.dialect, step.op).invoke(
            inputs, step.attributes, requested, arithmetic=arithmetic
        )
    ((port, key),) = step.outputs.items()
    return {port: pointwise.compute(step.attributes, program.tensors[key].dtype, **inputs)}


@contextmanager
def _errors_of(step: Step) -> Iterator[None]:
    """In errors of a bad argument, put the graph operator's name before the argument's name."""
    try:
        yield
    except ArgumentError as error:
        # The step of a single call has no name: its label is the name of the operator.
        if step.label == step.op:
            raise
        argument = f"{step.label} ({step.op}) {error.argument}"
        raise type(error)(**error.parts() | {"argument": argument}) from None


def _supplied(tensor: Tensor, array: np.ndarray) -> np.ndarray:
    """Check `array` against the declaration of a tensor; return it in the declared layout.

    In memory, the result's axes have the order that the declared strides give. The result has no
    gaps between elements, even if the declared strides have.
    """
    _check_declared(tensor, array)
    if tensor.stride is None or array.size == 0:
        return array
    order = by_strides(tensor.stride)
    return restore(np.ascontiguousarray(array.transpose(order)), order)


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
