"""For griffe, which reads the sources for the reference: what only the imported package knows.

The dialects' operators are made from schemas when they are imported. Their signatures are in the
stubs, their documentation in the operators. `backnorm.tensorflow` has the names of `backnorm.keras`
when it is asked for them. And docstrings are reStructuredText where pages are Markdown.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

from backnorm.dialects.registry import DIALECTS

__all__ = ["Operators"]

_LENT = {"backnorm.keras": "backnorm.tensorflow"}

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=`)")
# What announces an indented block: on a line of its own, or behind text.
_ALONE = re.compile(r"^[ \t]*::[ \t]*\n", re.MULTILINE)
_BEHIND = re.compile(r"::[ \t]*$", re.MULTILINE)


class Operators(griffe.Extension):
    """Make members of the package what they are at run time."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Write a docstring as Markdown."""
        if obj.docstring:
            obj.docstring.value = _markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Describe the operators of all dialects, and names that a module has of another."""
        if pkg.path != "backnorm":
            return
        for dialect in DIALECTS:
            _describe(pkg[f"dialects.{dialect}"])
        for lender, borrower in _LENT.items():
            names, module = (pkg[path.partition(".")[2]] for path in (lender, borrower))
            for name in names.exports:
                if name in module.exports and name not in module.members:
                    module.set_member(name, griffe.Alias(name, f"{lender}.{name}"))


def _markdown(text: str) -> str:
    return _BEHIND.sub(":", _ALONE.sub("", _ROLE.sub("", text)))


def _describe(module: griffe.Module) -> None:
    imported = importlib.import_module(module.path)
    path = module.filepath.with_suffix(".pyi")
    stubs = griffe.visit(module.path, path, path.read_text(encoding="utf-8"))
    for name, found in imported.OPERATORS.items():
        if isinstance(module[name], griffe.Function):
            # Written out as a function, documentation and all.
            continue
        if isinstance(found, type):
            described = stubs[name]
            described["__call__"].docstring = _docstring(found.__call__)
        else:
            described = _function(name, stubs[stubs[name].annotation.name]["__call__"])
        described.docstring = _docstring(found)
        module.set_member(name, described)


def _function(name: str, call: griffe.Function) -> griffe.Function:
    # An operator without a configuration is called as a function is, so it is shown as one.
    parameters = griffe.Parameters(*list(call.parameters)[1:])
    return griffe.Function(name, parameters=parameters, returns=call.returns, lineno=call.lineno)


def _docstring(found: object) -> griffe.Docstring:
    return griffe.Docstring(_markdown(inspect.getdoc(found) or ""), parser="numpy")
