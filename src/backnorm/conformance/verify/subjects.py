"""Subjects: the functions that are judged, and their calling conventions.

A subject takes the inputs of a case and returns the operation's results by name. Each class of
subjects has one calling convention: the canonical one (:class:`Function`), that of a specification
(:class:`OfDialect`; :class:`OfPeer` for packages that are known by name), that of C
(:class:`OfLibrary`), or that of a framework's layers (:class:`.modules.OfModule`).
:class:`Permuted` passes arrays in another layout to a subject. For another convention or another
kind of arrays, add a class, and a line to :func:`subject_of`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol, get_args

import numpy as np

import backnorm
from backnorm.conformance.axes import BATCH_NORM
from backnorm.conformance.battery import Case
from backnorm.conformance.verify.dialect_calls import (
    Inputs,
    arguments,
    rules_of,
    shape_of_kept,
)
from backnorm.conformance.verify.frameworks import kind_of
from backnorm.conformance.verify.modules import OfModule
from backnorm.conformance.verify.names import OperationName, PassName
from backnorm.conformance.verify.operations import (
    OPERATIONS,
    RefusedError,
    operation_of,
)
from backnorm.conformance.verify.options import Options
from backnorm.conformance.verify.peers import PEERS, Pass, missing_package
from backnorm.conformance.verify.row_operators import RowOperator
from backnorm.conformance.verify.tensors import as_array, on_tensors, tensors_of
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import element_type, is_16_bit
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["Inputs", "Subject", "function_of", "subject_from", "subject_of"]

Outputs = dict[str, np.ndarray | None]

# An exception whose name contains one of these words, such as NotImplementedError, means that the
# case is not supported.
_UNSUPPORTED = "Unimplemented", "NotImplemented", "Unsupported"
# Maps an option to its usual value. If a function has no parameter for an option, it is run only on
# the cases in which the option has its usual value.
_USUAL = {"epsilon": 1e-5, "data_format": "NCX", "training": True}
_USUAL_OPTIONS = Options()
# Prefixes of the paths of source files that are not the user's. "<" matches names such as "<frozen
# importlib>".
_PACKAGES = (
    "<",
    str(Path(backnorm.__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


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
        return _by_name(names, results)


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
        found = _by_name([tensor.role for tensor in returns], returned) | updated
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
        found = _by_name(self._operator.results, self._function(*operands, **named))
        # The statistics of operators with a normalized_shape have the rank of x.
        shape = case.data.mean.shape
        for name in ("mean", "inverse_deviation"):
            array = found.get(name)
            if array is not None and array.shape == (*shape, 1):
                found[name] = array.reshape(shape)
        return found


def of_operator(
    function: Callable[..., Any],
    schema: OperatorSchema | RowOperator,
    kind: type[OfDialect] = OfDialect,
) -> Subject:
    """Return the subject of a function with the arguments and results of an operator."""
    if isinstance(schema, RowOperator):
        return OfRowOperator(function, schema)
    return kind(function, schema)


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


def subject_of(
    name: str, operation: OperationName = "backward", options: Options = _USUAL_OPTIONS
) -> Any:
    """Return the subject that a name on the command line refers to.

    Parameters
    ----------
    name : str
        ``module:function``, ``file.py:function``, ``library.so:symbol``, or a name in the table of
        peers.
    operation : OperationName
    options : Options
        Those that say which arguments, and which tensors, the function gets.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If there is no such module, file, function, operator, framework or device.
    """
    peers = {peer: passes[operation] for peer, passes in PEERS.items() if operation in passes}
    place, colon, attribute = name.partition(":")
    is_library = place.endswith((".so", ".dylib"))
    if not colon and name not in peers:
        raise ArgumentValueError(
            "SUBJECT",
            "unknown",
            came=repr(name),
            accepted="module:function, file.py:function, library.so:symbol, " + ", ".join(peers),
        )
    if options.dialect is not None and (is_library or not colon):
        raise ArgumentValueError(
            "--dialect",
            f"must be absent with {name}, which has the canonical arguments",
            came=options.dialect,
            hint=f"judge the dialect's operator: backnorm.dialects.{options.dialect}:OPERATOR",
        )
    if options.tensors is not None and (is_library or not colon):
        raise ArgumentValueError(
            "--tensors",
            f"must be absent with {name}, which takes arrays of the CPU",
            came=options.tensors,
        )
    schema = schema_of_subject(name, operation, options)
    if not colon:
        return _peer(name, peers[name], schema)
    if is_library:
        if operation not in ("backward", "forward"):
            problem = "must be backward or forward for a function in C"
            raise ArgumentValueError("--operation", problem, came=operation)
        return OfLibrary(str(Path(place).resolve()), attribute, operation)
    return subject_from(function_of(name, "SUBJECT"), operation, schema, options)


def subject_from(
    found: Any,
    operation: OperationName,
    schema: OperatorSchema | RowOperator | None,
    options: Options,
) -> Subject:
    """Return the subject that a function or a layer is.

    Raises
    ------
    ArgumentValueError
        If the operation is not that of `found`, or the tensors are not those of the layer.
    """
    known = kind_of(found)
    if (known is not None) != (operation == "layer"):
        accepted = ", ".join(get_args(PassName)) if known is None else "layer"
        raise ArgumentValueError(
            "--operation", f"does not fit {getattr(found, '__name__', type(found).__name__)}",
            came=operation, accepted=accepted,
        )  # fmt: skip
    if known is not None:
        kind, framework = known
        if options.tensors not in (None, framework):
            raise ArgumentValueError(
                "--tensors", "must be those of the layer", came=options.tensors, accepted=framework
            )
        return OfModule(found, kind, tensors_of(framework, options.device))
    if options.tensors is not None:
        found = on_tensors(found, tensors_of(options.tensors, options.device))
    return Function(found) if schema is None else of_operator(found, schema)


def _peer(name: str, known: Pass, schema: OperatorSchema | RowOperator | None) -> Subject:
    package = missing_package(name)
    if package is not None:
        raise ArgumentValueError("SUBJECT", f"needs {package}, which is not installed", came=name)
    subject: Subject = (
        Function(known.function, known.omitted)
        if schema is None
        else of_operator(known.function, schema, OfPeer)
    )
    return Permuted(subject) if known.is_strided else subject


def schema_of_subject(
    name: str, operation: OperationName, options: Options
) -> OperatorSchema | RowOperator | None:
    """Return the rules of the operator whose arguments a subject has; None: the canonical ones."""
    dialect = options.dialect
    if dialect is None and name in PEERS and operation in PEERS[name]:
        dialect = PEERS[name][operation].dialect
    return None if dialect is None else rules_of(dialect, options.op, operation)


def function_of(name: str, argument: str) -> Callable[..., Any]:
    """Return the function that `name` refers to: ``module:function`` or ``file.py:function``.

    Parameters
    ----------
    name : str
    argument : str
        The name of the argument, for errors.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If there is no such module, file or function.
    """
    place, _, attribute = name.partition(":")
    try:
        found: Any = _module(place, argument)
    except ModuleNotFoundError as error:
        if error.name is None or not place.startswith(error.name):
            raise
        accepted = "module:function, file.py:function"
        accepted += ", library.so:symbol" if argument == "SUBJECT" else ""
        raise ArgumentValueError(
            argument, "no such module", came=place, accepted=accepted
        ) from error
    functions = [
        name for name, value in vars(found).items()
        if callable(value) and getattr(value, "__module__", None) == found.__name__
    ]  # fmt: skip
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ArgumentValueError(
                argument, f"{place} has no {part}", came=name, accepted=", ".join(functions) or None
            )
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentTypeError(
            argument, "must name a function", came=f"{name} of type {type(found).__name__}"
        )
    function: Callable[..., Any] = found
    return function


def _module(place: str, argument: str) -> ModuleType:
    if not place.endswith(".py"):
        # As with `python -m`, the working directory is put on the search path, so that modules in
        # this directory are found.
        sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise ArgumentValueError(argument, "no such file", came=str(path))
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def is_unsupported(error: Exception) -> bool:
    """Whether the type of an exception means that the subject does not support the case.

    All other exceptions are mistakes of the subject.
    """
    name = type(error).__name__
    return isinstance(error, RefusedError) or any(word in name for word in _UNSUPPORTED)


def described(error: Exception) -> str:
    """Return the first line of an exception's message.

    If the subject raised the exception itself, the text also has the exception's type, and the file
    and line of the source.
    """
    if isinstance(error, RefusedError | OutputError):
        return _first_line(str(error))
    return _first_line(f"{type(error).__name__}: {error}") + _place(error)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _place(error: Exception) -> str:
    """Return file and line of the error's last frame outside of installed packages, or ""."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [(name, line) for name, line in frames if not name.startswith(_PACKAGES)]
    return f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""


def _by_name(names: Any, results: Any) -> Outputs:
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
