"""Translate kernels to LLVM code with Numba, so that LLVM optimises a whole library at once.

By default Numba optimises, links and compiles each function that a kernel calls before it compiles
the kernel. With this module, Numba only translates. Then all functions of a library are linked into
one module, and this module is optimised as a whole (see `machine`). Building a library in this way
takes half the time of Numba's default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target

from backnorm_kernels.kernels.jit import OUTLINED


class _Translated(JITCodeLibrary):  # type: ignore[misc]
    """A function that Numba translated and did not optimise."""

    def add_linking_library(self, library: Any) -> None:
        self._linking_libraries.append(library)

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout


def _translate_only() -> None:
    context = cpu_target.target_context
    context.codegen()._library_class = _Translated
    # Numba identifies a compiled function by the object that `get_executable` returns, so this
    # object must be a different one for each function. Each call of the lambda returns a new
    # object, the method of a new list.
    context.get_executable = lambda library, description, environment: [].append


def linked(entries: dict[str, tuple[Any, tuple[Any, ...]]], globals_: str) -> Any:
    """Return one module with the exported functions and all functions that they call.

    Parameters
    ----------
    entries : dict
        Maps each exported symbol to an outlined function and the types of its arguments. Arguments
        are integers; if there are three, the first is a constant. The function returns an integer,
        and does not raise.
    globals_ : str
        LLVM code of other globals of the module, which are also exported.

    Returns
    -------
    llvmlite.binding.ModuleRef
        A module in which only the exported symbols are visible.
    """
    _translate_only()
    compiled = {}
    for symbol, (dispatcher, signature) in entries.items():
        dispatcher.compile(signature)
        compiled[symbol] = dispatcher.overloads[signature]
    ordered: dict[int, Any] = {}
    for overload in compiled.values():
        _visit(overload.library, ordered)
    module = llvm.parse_assembly(_wrappers(compiled, globals_))
    for library in ordered.values():
        module.link_in(library._final_module.clone())
    attributes = {
        overload.fndesc.llvm_func_name: names
        for dispatcher, names in OUTLINED
        for overload in dispatcher.overloads.values()
    }
    for function in module.functions:
        if not function.is_declaration:
            for name in attributes.get(function.name, ()):
                function.add_function_attribute(name)
    exported = {*entries, *_names_in(globals_)}
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in exported:
            value.linkage = "internal"
    return module


def _visit(library: Any, ordered: dict[int, Any]) -> None:
    if id(library) not in ordered:
        ordered[id(library)] = library
        for used in library._linking_libraries:
            _visit(used, ordered)


def _names_in(code: str) -> Iterable[str]:
    return (line[1:].split(" ", 1)[0] for line in code.splitlines() if line.startswith("@"))


def _wrappers(compiled: dict[str, Any], globals_: str) -> str:
    """Return LLVM code of C functions that call the functions compiled by Numba.

    A function that Numba has compiled has the signature ``status(result*, error**, arguments...)``.
    If an argument is a compile-time constant, a null pointer is passed for it.
    """
    lines = [globals_]
    for symbol, overload in compiled.items():
        integers = overload.signature.args
        constant = len(integers) == 3
        if constant:
            integers = integers[1:]
        parameters = ", ".join(f"i64 %a{k}" for k in range(len(integers)))
        types_ = ", ".join(["ptr", "ptr", *["ptr"] * constant, *["i64"] * len(integers)])
        passed = ", ".join(["ptr %result", "ptr %error", *["ptr null"] * constant, *[parameters]])
        name = f'"{overload.fndesc.llvm_func_name}"'
        lines.append(
            f"""
declare i32 @{name}({types_})
define i64 @{symbol}({parameters}) {{
  %result = alloca i64
  %error = alloca ptr
  store i64 0, ptr %result
  %status = call i32 @{name}({passed})
  %value = load i64, ptr %result
  ret i64 %value
}}
"""
        )
    return "\n".join(lines)
