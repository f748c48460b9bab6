"""Find and call any dialect's operator by name, for the command and for graphs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from backnorm.dialects._call import CanonicalCall
from backnorm.dialects.operator import Operator
from backnorm.dialects.schema import OperatorSchema
from backnorm.errors import ArgumentValueError, shown
from backnorm.scalars import check_word

__all__ = [
    "DIALECTS",
    "PARTS",
    "CanonicalCall",
    "operator",
    "operators",
    "parts",
]

#: The module of each dialect, which is imported when it is first needed.
DIALECTS: Mapping[str, str] = {
    name: f"backnorm.dialects.{name}"
    for name in (
        "onednn_graph",
        "onednn_spec",
        "ngraph",
        "tensorflow",
        "aten",
        "stablehlo",
        "onnxruntime",
        "cudnn",
        "directml",
        "paddle",
    )
}

#: Some dialects have functions that compute only a part of a gradient. This mapping has the module
#: of each of these dialects. These functions are not operators: graphs and the commands `run` and
#: `verify` cannot call them.
PARTS: Mapping[str, str] = {
    name: f"backnorm.dialects.{name}" for name in ("aten", "mpsgraph", "cann")
}


def parts(dialect: str) -> Mapping[str, OperatorSchema]:
    """Return the rules, by name, of a dialect's functions that compute a part of a gradient.

    A dialect that is not in `PARTS` has no such functions.
    """
    dialect = check_word("dialect", dialect, accepted=", ".join(PARTS))
    if dialect not in PARTS:
        return {}
    module = importlib.import_module(PARTS[dialect])
    return {op: declared.schema for op, declared in _declared(module) if declared.is_part}


def operators(dialect: str) -> Mapping[str, Operator]:
    """Return the operators of a dialect by name.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If there is no such dialect.
    """
    dialect = check_word("dialect", dialect, accepted=", ".join(DIALECTS))
    if dialect not in DIALECTS:
        raise ArgumentValueError(
            "dialect", "unknown dialect", came=shown(dialect), accepted=", ".join(DIALECTS)
        )
    name = DIALECTS[dialect]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            error.add_note(f"DIALECTS must have names of modules; got {dialect!r}")
        raise
    return {op: declared for op, declared in _declared(module) if not declared.is_part}


def _declared(module: ModuleType) -> Iterator[tuple[str, Operator]]:
    """Yield the names and the operators that a dialect's module declares, in their order."""
    for name, value in vars(module).items():
        declared = getattr(value, "operator", None)
        if isinstance(declared, Operator):
            yield name, declared


def operator(dialect: str, op: str) -> Operator:
    """Return an operator. ``.schema``, or ``.schema_for(attributes)``, describes it; ``.invoke``
    calls it with inputs and attributes by name, and ``.canonical`` returns the canonical call.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If there is no such dialect or operator.
    """
    known = operators(dialect)
    op = check_word("op", op, accepted=", ".join(known))
    if op not in known:
        raise ArgumentValueError(
            "op", f"unknown operator of {dialect}", came=shown(op), accepted=", ".join(known)
        )
    return known[op]
