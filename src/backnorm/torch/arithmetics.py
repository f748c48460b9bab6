"""In what a call on tensors computes, decided when it is made: its backward pass does the same.

By then a block of `backnorm.arithmetic` may have ended, and another one begun.
"""

from __future__ import annotations

import functools

import torch

from backnorm.arithmetics import Arithmetic, asked, chosen, own_arithmetic, resolved
from backnorm.torch.metadata import element_type

__all__ = ["decided", "named", "of_call", "own", "traced"]


def of_call(dtype: torch.dtype, arithmetic: object) -> Arithmetic | None:
    """Return the arithmetic of a call of operators.

    In a graph it is None where nothing is asked for: who compiles it may then choose (`lowering`).
    """
    if torch.compiler.is_dynamo_compiling():
        return traced(dtype, arithmetic)
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return asked(element_type(dtype), arithmetic)
    return decided(dtype, arithmetic)


def decided(dtype: torch.dtype, arithmetic: object) -> Arithmetic:
    """Return the arithmetic of a call on elements of a type, which asks for one, or (None) not.

    Raises as `backnorm.arithmetics.resolved` does.
    """
    if arithmetic is None or type(arithmetic) is str:
        return _known(dtype, arithmetic, chosen())
    return resolved(element_type(dtype), arithmetic)


def traced(dtype: torch.dtype, arithmetic: object) -> Arithmetic | None:
    """Return what is asked for while Dynamo traces, which takes it as a constant.

    What it compiles holds for calls in blocks that ask for the same; in another, it traces anew.
    """
    if arithmetic is None:
        # Dynamo knows no context variables, and would take what it found once for all calls.
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
        from torch._dynamo.symbolic_convert import InstructionTranslator

        module = InstructionTranslator.current_tx().import_source("backnorm.arithmetics")
        block = CallFunctionNoArgsSource(AttrSource(module, "chosen"))
        install_guard(block.make_guard(GuardBuilder.EQUALS_MATCH))
    return asked(element_type(dtype), arithmetic)


# A compiler calls it when it comes across it.
traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def own(dtype: torch.dtype, arithmetic: str | None) -> str:
    """Return what an operator is asked for, without that what is the elements' own.

    A graph is to mean the same wherever it is run.
    """
    return own_arithmetic(element_type(dtype)) if arithmetic is None else arithmetic


def named(text: str, arithmetic: Arithmetic | None) -> str:
    """Return the text of a layer with its arithmetic, if it says one."""
    return text if arithmetic is None else f"{text}, arithmetic={arithmetic!r}"


@functools.cache
def _known(dtype: torch.dtype, arithmetic: str | None, _block: Arithmetic | None) -> Arithmetic:
    """Return what is decided in a block. Words that are none raise, and are not kept."""
    return resolved(element_type(dtype), arithmetic)
