"""Calls in PyTorch's profiler, which shows those of operators: ours in their names, too.

Eager calls on plain tensors bypass the dispatcher, which would tell the profiler. Those that go
through autograd are shown by the names of their classes (`autograd`). Others come here where
`torch.autograd.profiler._is_profiler_enabled`, which takes 20 ns to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["name_of", "shown"]


def name_of(relu: bool, residual: Tensor | None, training: bool) -> str:
    """Return what a forward pass is called."""
    name = "batch_norm" + ("_add" if residual is not None else "") + ("_relu" if relu else "")
    return name if training else f"{name}_inference"


def shown(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `run`, which the profiler shows as an operator of ours."""

    def call(*arguments: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(f"backnorm::{name}"):
            return run(*arguments)

    return call
