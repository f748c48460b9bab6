"""Write the type stubs of the dialects' modules from the operators' own descriptions.

With --check: say whether they are current, and write nothing.

Usage: python scripts/make_dialects_stubs.py [--check]
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from backnorm.dialects._source import Parameter, configuration, parameters_of, result_type
from backnorm.dialects.operator import Operator
from backnorm.dialects.registry import DIALECTS
from generated import write_or_check

FOLDER = Path(__file__).resolve().parents[1] / "src" / "backnorm" / "dialects"

HEAD = "# Written by scripts/make_dialects_stubs.py from the operators' schemas."
# What a stub may need, in the order of its imports.
IMPORTS = (
    ("collections.abc", ("Collection", "Sequence")),
    ("typing", ("NamedTuple",)),
    ("numpy as np", ("np",)),
    ("numpy.typing", ("ArrayLike",)),
    ("backnorm.arithmetics", ("Arithmetic",)),
    ("backnorm.dialects.operator", ("Operator",)),
    ("backnorm.dialects.schema", ("Required",)),
)


def stub(module: ModuleType) -> str:
    """Return the stub of a dialect's module."""
    imported, classes, names = [], [], []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value):
            imported.append((value.__module__, f"{name} as {name}"))
        elif isinstance(value, Operator):
            class_name = "_" + re.sub("_", "", value.schema.op.title() if "_" in name else name)
            classes.append(_class(class_name, value))
            names.append(f"{name}: {class_name}")
        elif inspect.isclass(value) and issubclass(value, Operator):
            classes.append(_class(name, value))
        elif inspect.isclass(value):
            fields = "".join(f"    {field}: np.ndarray\n" for field in value._fields)
            classes.append(f"class {name}(NamedTuple):\n{fields}")
        else:
            types = {"OPERATORS": "dict[str, Operator | type[Operator]]"}
            names.append(f"{name}: {types.get(name, 'tuple[str, ...]')}")
    body = "\n".join([*classes, "".join(f"{line}\n" for line in names)])
    return f"{HEAD}\n\n{_imports(body, imported)}\n{body}"


def _imports(body: str, further: list[tuple[str, str]]) -> str:
    lines = []
    for source, wanted in IMPORTS:
        used = [name for name in wanted if re.search(rf"\b{name}\b", body)]
        if used and " as " in source:
            lines.append(f"import {source}\n")
        elif used:
            lines.append(f"from {source} import {', '.join(used)}\n")
    standard = [line for line in lines if "collections" in line or "typing import N" in line]
    foreign = [line for line in lines if "numpy" in line]
    own = [line for line in lines if "backnorm" in line]
    own += [f"from {source} import (\n    {text},\n)\n" for source, text in further]
    own.sort()
    return "\n".join("".join(group) for group in (standard, foreign, own) if group)


def _class(name: str, operator: Operator | type[Operator]) -> str:
    schemas = list(operator.schemas.values())
    methods = []
    if schemas[0].style == "configured":
        methods.append(_method("__init__", configuration(schemas), "None"))
    if len(schemas) > 1:
        methods.append(_of_revisions(schemas))
    else:
        orders: Mapping[str, tuple[str, ...]] = {"__call__": (), **schemas[0].other_orders}
        for method, order in orders.items():
            parameters = parameters_of(schemas[0], order)
            methods.append(_method(method, parameters, result_type(schemas[0])))
    return f"class {name}(Operator):\n" + "".join(methods)


def _of_revisions(schemas: list) -> str:
    inputs = {tensor.name for schema in schemas for tensor in schema.inputs}
    further = [p for p in parameters_of(schemas[0]) if p.name not in inputs]
    lines = ["*inputs: ArrayLike | None,", *(f"{_text(p)}," for p in further)]
    lines.append("**named: ArrayLike | None,")
    return _signature("__call__", lines, result_type(schemas[0]))


def _method(name: str, parameters: Iterable[Parameter], returns: str) -> str:
    return _signature(name, list(_lines(parameters)), returns)


def _signature(name: str, lines: list[str], returns: str) -> str:
    listed = "".join(f"        {line}\n" for line in ["self,", *lines])
    return f"    def {name}(\n{listed}    ) -> {returns}: ...\n"


def _lines(parameters: Iterable[Parameter]) -> Iterator[str]:
    star = False
    for parameter in parameters:
        if parameter.is_keyword and not star:
            yield "*,"
            star = True
        yield f"{_text(parameter)},"


def _text(parameter: Parameter) -> str:
    default = "..." if parameter.default == "REQUIRED" else parameter.default
    return f"{parameter.name}: {parameter.type} = {default}".replace("'", '"')


if __name__ == "__main__":
    modules = {FOLDER / f"{dialect}.pyi": module for dialect, module in DIALECTS.items()}
    texts = {path: stub(importlib.import_module(module)) for path, module in modules.items()}
    raise SystemExit(write_or_check(texts))
