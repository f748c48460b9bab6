"""Options of a call: validated once, and used in the forward and the backward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from backnorm.activations import Activation, check_activation
from backnorm.arithmetics import (
    Arithmetic,
    check_arithmetic,
    own_arithmetic,
    requested,
    resolved,
)
from backnorm.errors import ArgumentValueError
from backnorm.options import Options
from backnorm.scalars import check_flag, check_number
from backnorm.torch.memory import element_type


def options_of(
    training: bool, eps: float, activation: Any, arithmetic: Any, dtype: torch.dtype
) -> Options:
    """Check the options of a call, and return them.

    In a traced graph, the arithmetic is None if the caller has not chosen one. The compiler may
    then choose one (see `lowering`).
    """
    if torch.compiler.is_dynamo_compiling():
        return _of_dynamo(training, eps, activation, arithmetic, dtype)
    _check_eps(training, eps)
    kind = element_type(dtype)
    follows = check_activation(activation, kind)
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    choose = requested if traced else resolved
    return Options(eps, "NCX", training, follows, arithmetic=choose(kind, arithmetic))


def _of_dynamo(
    training: bool, eps: float, activation: Any, arithmetic: Any, dtype: torch.dtype
) -> Options:
    _check_eps(training, eps)
    ceiling = None
    if isinstance(activation, Activation):
        # Dynamo cannot pass a named tuple from traced code to a function that it does not trace, so
        # `_traced_activation` gets the two fields of the tuple.
        activation, ceiling = activation.name, activation.ceiling
    if ceiling is not None:
        # Dynamo turns a number that differs between calls or layers into a symbol. `guard_scalar`
        # turns the symbol of the ceiling into a constant of the graph.
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        ceiling = guard_scalar(ceiling)
    activation = _traced_activation(activation, ceiling, dtype)
    arithmetic = _traced_arithmetic(arithmetic, dtype)
    return Options(eps, "NCX", training, activation, arithmetic=arithmetic)


def _traced_activation(name: Any, ceiling: float | None, dtype: torch.dtype) -> Activation | None:
    value = name if ceiling is None else Activation(name, ceiling)
    return check_activation(value, element_type(dtype))


def _traced_arithmetic(arithmetic: Any, dtype: torch.dtype) -> Arithmetic | None:
    """Return the arithmetic of a traced call. If the call requests no arithmetic, a guard makes
    Dynamo trace again as soon as a block `with backnorm.arithmetic(...)` sets another arithmetic.
    """
    if arithmetic is None:
        # Dynamo does not guard context variables, and a block `with backnorm.arithmetic(...)` sets
        # such a variable. Without this guard, all calls would use the arithmetic of the first call.
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
        from torch._dynamo.symbolic_convert import InstructionTranslator

        module = InstructionTranslator.current_tx().import_source("backnorm.arithmetics")
        block = CallFunctionNoArgsSource(AttrSource(module, "chosen"))
        install_guard(block.make_guard(GuardBuilder.EQUALS_MATCH))
    return requested(element_type(dtype), arithmetic)


# Dynamo calls these functions while it traces, and treats their results as constants.
_traced_activation._dynamo_marked_constant = True  # type: ignore[attr-defined]
_traced_arithmetic._dynamo_marked_constant = True  # type: ignore[attr-defined]


def arithmetic_of(dtype: torch.dtype, arithmetic: str | None) -> Arithmetic:
    """Return the arithmetic of an operator: its argument, or the default of the element type.

    When a graph is traced, the value of the argument becomes part of the graph. So if the graph
    runs later in a block ``with backnorm.arithmetic(...)``, this block has no effect.
    """
    return (
        own_arithmetic(element_type(dtype)) if arithmetic is None else check_arithmetic(arithmetic)
    )


def check_numbers(training: Any, momentum: Any, eps: Any) -> tuple[bool, float, float]:
    """Return training, momentum and eps as Python's own types, or raise.

    As in PyTorch, a boolean or a zero-dimensional tensor is accepted as a number.
    """
    return check_flag("training", training), _number("momentum", momentum), _number("eps", eps)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return value
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
        value = value.item()
    if isinstance(value, bool | np.bool_):
        value = float(value)
    return check_number(name, value, accepted="float")


def _check_eps(training: bool, eps: float) -> None:
    """Raise for an eps that PyTorch does not accept."""
    if eps > 0.0:
        return
    if training:
        raise ArgumentValueError(
            "eps", f"batch_norm eps must be positive during training, but got {eps}"
        )
    if not eps >= 0.0:
        raise ArgumentValueError("eps", f"batch_norm eps must be non-negative, but got {eps}")


def named(text: str, arithmetic: Arithmetic | None) -> str:
    """Return `text`, which describes a layer, with the arithmetic appended if it is not None."""
    return text if arithmetic is None else f"{text}, arithmetic={arithmetic!r}"
