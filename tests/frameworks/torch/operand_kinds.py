"""What may come in the place of a tensor: of the same elements, and of others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Mine(Tensor):
    """A subclass of tensors."""


def _negative(tensor):
    """Return a tensor that is yet to be negated, if there is one of its type."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def _behind(tensor):
    """Return a tensor that does not begin where its storage does."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def _spread(tensor):
    """Return a tensor with gaps between its elements, in the same order."""
    twice = [2 * step for step in tensor.stride()]
    memory = torch.full((2 * tensor.numel(),), torch.nan).to(tensor.dtype)
    return memory.as_strided(tensor.shape, twice).copy_(tensor)


def _permuted(tensor):
    """Return a tensor whose last axis is the slowest."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def _made_in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


def _without_memory(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


#: With the elements of the tensor, all of which are accepted.
SAME = {
    "itself": lambda tensor: tensor,
    "a parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "of a subclass": lambda tensor: tensor.as_subclass(Mine),
    "not contiguous": _spread,
    "permuted": _permuted,
    "behind others": _behind,
    "to be negated": _negative,
    "made in inference mode": _made_in_inference_mode,
}

#: With other elements, or none at all.
OTHER = {
    "absent": lambda tensor: None,
    "a list": lambda tensor: tensor.tolist(),
    "an array": lambda tensor: tensor.float().numpy(),
    "a number": lambda tensor: 1.5,
    "a string": lambda tensor: "weight",
    "an object": lambda tensor: object(),
    **{
        f"of {str(dtype).removeprefix('torch.')}": lambda tensor, dtype=dtype: tensor.to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2,
            torch.int64, torch.uint8, torch.bool, torch.complex64,
        )
    },
    "too long": lambda tensor: torch.cat([tensor, tensor]),
    "too short": lambda tensor: tensor[:-1],
    "one element": lambda tensor: tensor.flatten()[:1],
    "empty": lambda tensor: tensor[:0],
    "of rank 0": lambda tensor: tensor.flatten()[0],
    "of a higher rank": lambda tensor: tensor[None],
    "flat": lambda tensor: tensor.flatten(),
    "a column": lambda tensor: tensor[..., None],
    "all zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "one element expanded": lambda tensor: tensor.flatten()[:1].expand(tensor.numel()).view(
        tensor.shape) if tensor.dim() == 1 else tensor[:1].expand(tensor.shape),
    "a parameter with a gradient": lambda tensor: torch.nn.Parameter(
        tensor, requires_grad=tensor.is_floating_point()),
    "on the meta device": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "compressed": lambda tensor: tensor.float().reshape(-1, 1).to_sparse_csr(),
    "of MKL-DNN": lambda tensor: tensor.float().to_mkldnn(),
    "without memory": _without_memory,
}  # fmt: skip


def elements_of(value):
    """Return a tensor's elements in a plain tensor of float64, None for None.

    Raises
    ------
    ValueError
        If it is no tensor that has elements here.
    """
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.is_cpu:
        raise ValueError
    value = value.detach().as_subclass(Tensor)
    if value._is_zerotensor():
        return torch.zeros(value.shape, dtype=torch.float64)
    if value.numel() and not value.data_ptr():
        raise ValueError
    # By way of NumPy: what is to be negated is.
    if value.is_complex():
        raise ValueError
    return torch.from_numpy(np.array(value.resolve_neg().double().numpy(), order="C"))
