"""Whether the memory of tensors may be read now, or something watches the operators instead."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

__all__ = ["batched", "exporting", "exporting_to_onnx", "transformed", "watched"]

# Looked up once: this is asked in every call.
_functions_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
# PyTorch 2.6 does not have it.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


#: Whether a tensor is a batch of gradients (``is_grads_batched``).
batched = torch._C._functorch.is_legacy_batchedtensor


def watched(tensor: Tensor) -> bool:
    """Whether a call on `tensor` must be made of operators that the dispatcher knows.

    So it is under `torch.compile` and `torch.export` (`is_compiling`), under `torch.func`
    and forward-mode differentiation, under modes that see every operator (fake tensors, `make_fx`,
    FLOP counters) and `torch.jit.trace`, for batched gradients (`is_grads_batched`), and for
    tensors that are not plain ones on a CPU or a CUDA device.
    """
    return (
        is_compiling()
        or (type(tensor) is not Tensor and type(tensor) is not Parameter)
        or not (tensor.is_cpu or tensor.is_cuda)
        or _functions_transformed()
        or _modes() > 0
        or forward_ad._current_level >= 0
        or batched(tensor)
        or _tracing() is not None
    )


def transformed() -> bool:
    """Whether the derivative asked for is other than autograd's: torch.func or forward mode."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def exporting() -> bool:
    """Whether `torch.export` or `torch.jit.trace` records a program, which may run elsewhere."""
    return _is_exporting() or _tracing() is not None


def exporting_to_onnx() -> bool:
    """Whether `torch.onnx.export` records operators now."""
    # Importing it takes long, and who exports has imported it.
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


# A compiler takes the answers as constants, and does not look into the functions.
exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]
