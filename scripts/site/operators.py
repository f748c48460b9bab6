"""Extend griffe, which reads the sources for the reference, by facts of the imported package.

Most operators of the dialects are instances of a class, but are called like functions.
Docstrings are reStructuredText, and pages are Markdown.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import griffe

from backnorm.dialects.registry import DIALECTS

__all__ = ["Operators"]

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=`)")
# Two colons before an indented block: on a line of their own, or behind text.
_ALONE = re.compile(r"^[ \t]*::[ \t]*\n", re.MULTILINE)
_BEHIND = re.compile(r"::[ \t]*$", re.MULTILINE)


class Operators(griffe.Extension):
    """Describes members of the package as they are at run time."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Write a docstring as Markdown."""
        if obj.docstring:
            obj.docstring.value = _markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Describe the operators of all dialects."""
        if pkg.path != "backnorm":
            return
        for dialect in DIALECTS:
            _describe(pkg[f"dialects.{dialect}"])


def _markdown(text: str) -> str:
    return _BEHIND.sub(":", _ALONE.sub("", _ROLE.sub("", text)))


def _describe(module: griffe.Module) -> None:
    """Describe each operator that is an instance as a function, because it is called like one."""
    for name, operator in importlib.import_module(module.path).OPERATORS.items():
        if not isinstance(operator, type):
            # The class that defines the method: versions of an operator share it.
            owner = type(operator).__call__.__qualname__.partition(".")[0]
            module.set_member(name, _function(name, module[owner]["__call__"]))


def _function(name: str, call: griffe.Function) -> griffe.Function:
    parameters = griffe.Parameters(*list(call.parameters)[1:])
    return griffe.Function(
        name,
        parameters=parameters,
        returns=call.returns,
        lineno=call.lineno,
        endlineno=call.endlineno,
        docstring=call.docstring,
    )
