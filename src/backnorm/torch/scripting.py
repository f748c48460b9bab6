"""The refusal of `torch.jit.script`, which compiles Python and cannot compile ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from backnorm.errors import BacknormError

__all__ = ["refuse", "unscriptable"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def unscriptable(function: _Function) -> _Function:
    """Have `torch.jit.script` refuse a function, also where another calls it."""
    name = f"{function.__name__}; script torch.nn.functional.batch_norm"
    # PyTorch asks anything that it compiles for it, and modules by a method of this name.
    function.__dict__["__prepare_scriptable__"] = lambda: refuse(name)
    return function


def refuse(what: str) -> NoReturn:
    """Raise for what is compiled, and say what to compile instead."""
    raise BacknormError(
        f"torch.jit.script cannot compile backnorm's {what} instead, or use torch.compile, "
        "torch.export or torch.jit.trace"
    )
