"""Whether a call may read the memory of tensors, or must be made of operators of the dispatcher.

A call on plain tensors bypasses the dispatcher, and with it PyTorch's profiler; `profiled` shows
such a call by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.compiler import is_compiling
from torch.nn import Parameter

__all__ = [
    "is_batched",
    "is_exporting",
    "is_exporting_to_onnx",
    "is_transformed",
    "needs_dispatcher",
    "profiled",
]

# Looked up once, because every call needs them.
_are_transforms_active = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
# PyTorch 2.6 does not have it.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)

#: Whether a tensor is a batch of gradients (``is_grads_batched``).
is_batched = torch._C._functorch.is_legacy_batchedtensor


def needs_dispatcher(tensor: Tensor) -> bool:
    """Whether a call on `tensor` must be made of operators that the dispatcher knows.

    It must under `torch.compile` and `torch.export` (`is_compiling`), under `torch.func` and
    forward-mode differentiation, under modes that see every operator (fake tensors, `make_fx`, FLOP
    counters) and `torch.jit.trace`, for batched gradients (``is_grads_batched``), and for tensors
    other than plain ones on a CPU or a CUDA device.
    """
    return (
        is_compiling()
        or (type(tensor) is not Tensor and type(tensor) is not Parameter)
        or not (tensor.is_cpu or tensor.is_cuda)
        or _are_transforms_active()
        or _modes() > 0
        or forward_ad._current_level >= 0
        or is_batched(tensor)
        or _tracing() is not None
    )


def is_transformed() -> bool:
    """Whether `torch.func` or forward mode differentiates."""
    return forward_ad._current_level >= 0 or _are_transforms_active()


def is_exporting() -> bool:
    """Whether `torch.export` or `torch.jit.trace` records a program, which may run elsewhere."""
    return _is_exporting() or _tracing() is not None


def is_exporting_to_onnx() -> bool:
    """Whether `torch.onnx.export` records operators now."""
    # Importing torch.onnx takes long, and a caller that exports has imported it.
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


# A compiler calls these while it traces, and takes their results as constants.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def profiled(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `run`, or while a profiler is enabled a function that the profiler shows."""
    # Reading the flag takes 20 ns.
    if not profiler._is_profiler_enabled:
        return run

    def call(*arguments: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(f"backnorm::{name}"):
            return run(*arguments)

    return call
