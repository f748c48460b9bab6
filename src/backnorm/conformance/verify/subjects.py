"""Subjects: the functions and layers that are judged, found by their names.

:mod:`.conventions` describes how a subject is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import backnorm
from backnorm.conformance.verify.conventions import (
    Function,
    OfDialect,
    OfLibrary,
    OfPeer,
    OfRowOperator,
    OutputError,
    Permuted,
    Subject,
)
from backnorm.conformance.verify.dialect_calls import rules_of
from backnorm.conformance.verify.frameworks import kind_of
from backnorm.conformance.verify.modules import OfModule
from backnorm.conformance.verify.names import OperationName, PassName
from backnorm.conformance.verify.operations import RefusedError
from backnorm.conformance.verify.options import Options
from backnorm.conformance.verify.peers import PEERS, Pass, missing_package
from backnorm.conformance.verify.row_operators import RowOperator
from backnorm.conformance.verify.tensors import on_tensors, tensors_of
from backnorm.dialects.schema import OperatorSchema
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["function_of", "subject_from", "subject_of"]

# An exception whose name contains one of these words, such as NotImplementedError, means that the
# case is not supported.
_UNSUPPORTED = "Unimplemented", "NotImplemented", "Unsupported"
_USUAL_OPTIONS = Options()
# Prefixes of the paths of source files that are not the user's. "<" matches names such as "<frozen
# importlib>".
_PACKAGES = (
    "<",
    str(Path(backnorm.__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


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


def of_operator(
    function: Callable[..., Any],
    schema: OperatorSchema | RowOperator,
    kind: type[OfDialect] = OfDialect,
) -> Subject:
    """Return the subject of a function with the arguments and results of an operator."""
    if isinstance(schema, RowOperator):
        return OfRowOperator(function, schema)
    return kind(function, schema)


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
