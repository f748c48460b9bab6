"""The decorators of the kernels, with a common set of Numba options.

Decorating a function does not compile it. `backnorm_kernels.build` compiles the kernels when the
package is built. `tests/engine/test_vector.py`, which tests loads, stores and vectors, compiles the
functions that it calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core import typed_passes, untyped_passes
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.extending import intrinsic, overload

_PASSES = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    untyped_passes.ReconstructSSA,
    typed_passes.NopythonTypeInference,
    typed_passes.PreLowerStripPhis,
    typed_passes.NativeLowering,
    typed_passes.NoPythonBackend,
)


class _Pipeline(CompilerBase):
    """The passes of Numba that kernels need, in Numba's order.

    Numba's default has 19 more passes, for closures, exceptions, array expressions, branches on
    literals and counts of references, of which kernels have none. Kernels that are compiled without
    these passes have the same machine code, and Numba translates them in four fifths of the time.
    """

    def define_pipelines(self) -> list[PassManager]:
        manager = PassManager("kernels")
        for each in _PASSES:
            manager.add_pass(each, each._name)
        manager.finalize()
        return [manager]


_OPTIONS = {
    "pipeline_class": _Pipeline,
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    # Kernels own no objects whose references are counted.
    "_nrt": False,
}

#: All outlined functions. An entry is a pair: the function as a Numba dispatcher, and the LLVM
#: attributes that `build.frontend` gives to the machine code of the function. LLVM must not inline
#: these functions into their callers, because LLVM takes longer to optimise one large function than
#: several small ones.
OUTLINED: list[tuple[Any, tuple[str, ...]]] = []


def inlined(function: Callable[..., Any]) -> Any:
    """Compile `function` inline, as a part of the kernels that call it."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)


def outlined(function: Callable[..., Any]) -> Any:
    """Compile `function` separately: as a kernel, or as a function that kernels call."""
    return _outlined(function, "noinline")


def rare(function: Callable[..., Any]) -> Any:
    """Compile `function` separately, and mark it as rarely called.

    Without the mark, LLVM might spill registers in a loop of the caller, to prepare for a call that
    hardly ever happens.
    """
    return _outlined(function, "noinline", "cold")


def _outlined(function: Callable[..., Any], *attributes: str) -> Any:
    # `forceinline` is set to False, because a function that is compiled without this option takes
    # over the option of the first function that calls it.
    dispatcher = numba.njit(forceinline=False, **_OPTIONS)(function)
    OUTLINED.append((dispatcher, attributes))
    return dispatcher


def by_type(choose: Callable[..., Any]) -> Any:
    """Compile a function whose body depends on the types of its arguments.

    `choose` takes the types, and returns the body: a function with the same parameters.
    """

    @functools.wraps(choose)
    def function(*arguments: Any) -> None:
        raise NotImplementedError("kernels are compiled, not called from Python")

    overload(function, jit_options={**_OPTIONS, "forceinline": True}, strict=False)(choose)
    return function


def nothing(*_: Any) -> None:
    """Do nothing: a body that `by_type` may choose."""


def emitted(signature: Any) -> Any:
    """Return a decorator that makes an intrinsic of Numba from a function that emits LLVM code.

    The decorated function takes the IR builder and the values of the intrinsic's arguments, and
    returns the value of the result. `signature` is the intrinsic's Numba signature, or a function
    that gets the types of the arguments and returns the signature. If this function does not accept
    the types, it returns None.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _: Any, values: Any) -> Any:
            result = emit(builder, *values)
            return context.get_dummy_value() if result is None else result

        def typed(typingctx: Any, *arguments: Any) -> Any:
            found = signature(*arguments) if inspect.isfunction(signature) else signature
            return None if found is None else (found, codegen)

        functools.update_wrapper(typed, emit)
        names = ["typingctx", *list(inspect.signature(emit).parameters)[1:]]
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names
        ]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate


@emitted(types.intp(types.intp))
def integer(builder, number):
    """Return a constant as a plain integer.

    Each constant has its own (literal) type in Numba. With literal types, Numba would compile a
    function again for each constant that is passed to it, alone or in a tuple.
    """
    return number


@emitted(types.boolean(types.boolean))
def boolean(builder, value):
    """Return a constant as a plain boolean: see `integer`."""
    return value
