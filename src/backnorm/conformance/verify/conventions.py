"""Calling conventions: how a subject takes the inputs of a case, and returns results by name.

Each class of subjects has one calling convention: the canonical one (:class:`Function`), that of a
specification (:class:`OfDialect`; :class:`OfPeer` for packages that are known by name), or that of
C (:class:`OfLibrary`); :class:`.modules.OfModule` has that of a framework's layers.
:class:`Permuted` passes arrays in another layout to a subject. For another convention or another
kind of arrays, add a class, and a line to :func:`.subjects.subject_of`.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np

from backnorm.conformance.axes import BATCH_NORM
from backnorm.conformance.battery import Case
from backnorm.conformance.verify.dialect_calls import Inputs, arguments, shape_of_kept
from backnorm.conformance.verify.names import OperationName
from backnorm.conformance.verify.operations import OPERATIONS, RefusedError, operation_of
from backnorm.conformance.verify.row_operators import RowOperator
from backnorm.conformance.verify.tensors import as_array
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import element_type, is_16_bit

__all__ = ["Inputs", "Subject"]

Outputs = dict[str, np.ndarray | None]

# Maps an option to its usual value. If a function has no parameter for an option, it is run only on
# the cases in which the option has its usual value.
_USUAL = {"epsilon": 1e-5, "data_format": "NCX", "training": True}


class Subject(Protocol):
    """A callable with two arguments: the inputs of a case, by name, and the case itself, whose
    options the callable reads.
    """

    def __call__(self, inputs: Inputs, case: Case) -> Outputs:
        """Return the outputs of the subject by name. For an unsupported case, raise an error that
        `is_unsupported` accepts.
        """


class OutputError(AssertionError):
    """A subject returned a wrong number of outputs, or an object that is not an array."""


class Function:
    """A function ``f(x, dy, mean, variance, gamma, *, epsilon, data_format, training)``.

    A function with this signature computes the backward pass, and returns dx, dgamma and dbeta. A
    function that computes the forward pass is called as ``f(x, gamma, beta, *, epsilon,
    data_format)``, and returns y, mean and variance. An option is not passed if the function has no
    parameter for it. Such a function is called only on cases with the usual value of this option
    (`epsilon` 1e-5, `data_format` NCX, `training` True). Cases with other values are refused.
    `omitted` names the results that the function does not return.
    """

    def __init__(self, function: Callable[..., Any], omitted: Collection[str] = ()) -> None:
        self._function = function
        self._names = _parameters(function)
        self._omitted = omitted

    def __call__(self, inputs: Inputs, case: Case) -> Outputs:
        taken = {}
        for name, value in case.options.items():
            spellings = (name, "eps", "Epsilon") if name == "epsilon" else (name,)
            known = [n for n in spellings if self._names is None or n in self._names]
            if known:
                taken[known[0]] = value
            elif value != _USUAL.get(name):
                others = ", ".join((self._names or [])[len(inputs) :])
                known_text = f" (after the inputs, it has {others})" if others else ""
                raise RefusedError(f"the function has no parameter {name}{known_text}")
        names = [n for n in operation_of(case).results if n not in self._omitted]
        results = self._function(*inputs.values(), **taken)
        if case.data.normalization != BATCH_NORM and hasattr(results, "shape"):
            # A forward pass may return y alone.
            names = names[:1]
        if isinstance(results, tuple | list) and len(results) > len(names):
            expected = ", ".join(names)
            raise OutputError(f"the subject returned {len(results)} outputs; expected {expected}")
        return by_name(names, results)


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of a function's parameters, in order.

    Return None if the function takes any keyword argument (``**kwargs``), or if Python cannot find
    out the function's parameters.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return list(parameters)


class OfDialect:
    """A function with the arguments and results of a specification's operator, as the schema lists
    them.

    Parameters
    ----------
    function : callable
        Takes the inputs and attributes as the operator does: by position in the operator's order,
        and keyword-only ones by name.
    schema : OperatorSchema
    """

    def __init__(self, function: Callable[..., Any], schema: OperatorSchema) -> None:
        self._function, self._schema = function, schema

    def __call__(self, inputs: Inputs, case: Case) -> Outputs:
        schema = self._schema
        taken, attributes = arguments(schema, inputs, case)
        returned = self._results(taken, attributes)
        number = len(returned) if isinstance(returned, tuple | list) else len(schema.outputs)
        # PyTorch's operators update running statistics in place; the dialect's return them last.
        updated = {
            tensor.role: taken[tensor.name]
            for tensor in schema.inputs
            if tensor.role.startswith("running_")
            and tensor.role in (each.role for each in schema.outputs[number:])
        }
        returns = [tensor for tensor in schema.outputs if tensor.role not in updated]
        found = by_name([tensor.role for tensor in returns], returned) | updated
        for tensor in returns:
            array = found[tensor.role]
            if tensor.kind == "kept" and array is not None and array.shape == shape_of_kept(case):
                found[tensor.role] = array.reshape(-1)
        # `found` may have more results, such as an empty array, which are not judged.
        return {name: found[name] for name in OPERATIONS[schema.operation].outputs if name in found}

    def _results(self, inputs: dict[str, Any], attributes: dict[str, Any]) -> Any:
        """Return what the function returns; inputs and attributes are by the operator's names."""
        schema = self._schema
        values = inputs | attributes | {"output_mask": [True] * len(schema.outputs)}
        operands = {name: values[name] for name in schema.order if name in values}
        named = {name: operands.pop(name) for name in schema.keyword_only if name in operands}
        return self._function(*operands.values(), **named)


class OfPeer(OfDialect):
    """The function of a peer, which calls the operator of a dialect in another package."""

    def _results(self, inputs: dict[str, Any], attributes: dict[str, Any]) -> Any:
        return self._function(self._schema, inputs, attributes)


class OfRowOperator:
    """A function with the arguments and results of a :class:`.row_operators.RowOperator`."""

    def __init__(self, function: Callable[..., Any], operator: RowOperator) -> None:
        self._function, self._operator = function, operator

    def __call__(self, inputs: Inputs, case: Case) -> Outputs:
        operands, named = self._operator.operands(dict(inputs), case)
        found = by_name(self._operator.results, self._function(*operands, **named))
        # The statistics of operators with a normalized_shape have the rank of x.
        shape = case.data.mean.shape
        for name in ("mean", "inverse_deviation"):
            array = found.get(name)
            if array is not None and array.shape == (*shape, 1):
                found[name] = array.reshape(shape)
        return found


class Permuted:
    """A subject that takes arrays in NCX with any strides; those in NXC are passed as views."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __call__(self, inputs: Inputs, case: Case) -> Outputs:
        data = case.data
        if data.data_format == "NCX":
            return self._subject(inputs, case)
        moved = {name: _moved(array, -1, 1) for name, array in inputs.items()}
        x, dy = _moved(data.x, -1, 1), _moved(data.dy, -1, 1)
        permuted = replace(case, data=replace(data, x=x, dy=dy, data_format="NCX"))
        outputs = self._subject(moved, permuted)
        return {name: _moved(array, 1, -1) for name, array in outputs.items()}


def _moved(array: Any, source: int, target: int) -> Any:
    """Return a view with an axis at another place; an array of one value a channel unchanged."""
    return array if array is None or array.ndim == 1 else np.moveaxis(array, source, target)


class OfLibrary:
    """A function of a shared library; ``cases export`` writes its declaration in C.

    The function returns 0, or another number if it does not support the case.
    """

    _TYPES: ClassVar[dict[str, int]] = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}

    def __init__(self, library: str, symbol: str, operation: OperationName) -> None:
        self._function = getattr(ctypes.CDLL(library), symbol)
        self._function.restype = ctypes.c_int
        # A forward pass takes two operands less, and not the argument `training`.
        arrays, flags = (8, 2) if operation == "backward" else (6, 1)
        self._function.argtypes = (
            *(ctypes.c_void_p,) * arrays,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_double,
            *(ctypes.c_int,) * flags,
        )

    #: Whether the subject writes its results to arrays that its caller passes.
    writes = True

    def __call__(self, inputs: Inputs, case: Case, memory: Mapping[str, np.ndarray]) -> Outputs:
        x = case.data.x
        if is_16_bit(case.data.mean.dtype):
            raise RefusedError("a function in C has no argument for the type of 16-bit statistics")
        if not all(a is None or a.flags.c_contiguous for a in inputs.values()):
            raise RefusedError("a function in C has no argument for strides")
        pointers = [None if a is None else a.ctypes.data for a in inputs.values()]
        operation = operation_of(case)
        pointers += [memory[name].ctypes.data for name in operation.results]
        shape = (ctypes.c_int64 * x.ndim)(*x.shape)
        kind = self._TYPES[str(element_type(x.dtype))]
        axis, epsilon = case.data.channel_axis, case.data.epsilon
        flags = [int(case.training)] if operation.name == "backward" else []
        status = self._function(*pointers, shape, x.ndim, axis, epsilon, *flags, kind)
        if status:
            raise RefusedError(f"the function returned {status}")
        return dict(memory)


def by_name(names: Any, results: Any) -> Outputs:
    """Return the results of a subject as NumPy arrays by name.

    `results` is what the subject returned: one array, a tuple or list of arrays, or a mapping from
    names to arrays. The arrays may be of any library.
    """
    if isinstance(results, Mapping):
        values = {name: results.get(name) for name in names}
    else:
        if not isinstance(results, tuple | list):
            results = (results,)
        values = dict(zip(names, results, strict=False))
    return {name: _array(values.get(name)) for name in names}


def _array(value: Any) -> np.ndarray | None:
    if value is None:
        return None
    array = as_array(value)
    if array.dtype.kind not in "biufcV":
        kind = type(value).__name__
        raise OutputError(f"the subject returned an object of type {kind}; expected an array")
    return array
