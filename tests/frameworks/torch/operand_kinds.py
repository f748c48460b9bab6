"""Values that replace a tensor: with the same elements, and with others."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor, nested
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn import Buffer, UninitializedBuffer, UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor

#: Of kinds that PyTorch warns of.
quietly = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta",
    "ignore:The PyTorch API of MaskedTensors is in prototype stage",
    "ignore:The PyTorch API of nested tensors is in prototype stage",
    "ignore:torch.quantize_per_tensor",
)


class Mine(Tensor):
    """A subclass of tensors."""


class Liar(Tensor):
    """A subclass that tells of other memory than there is."""

    shape = property(lambda self: torch.Size([1000]))
    dtype = property(lambda self: torch.float64)
    nbytes = property(lambda self: 8000)
    ndim = property(lambda self: 1)
    is_cpu = property(lambda self: True)

    def stride(self):
        return (1,)

    def data_ptr(self):
        return 64

    def is_contiguous(self):
        return True

    def is_neg(self):
        return False

    def untyped_storage(self):
        return torch.empty(1000).untyped_storage()


class Unwatched(Tensor):
    """A subclass whose operators give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


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


def without_memory(tensor):
    """Return a tensor whose storage was taken away."""
    return _emptied(tensor.clone())


def _emptied(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@functools.cache
def _mesh():
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,))


def _distributed(tensor):
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, _mesh())


def _of_numbers(make, tensor):
    """Return what is made of a tensor, which is itself if it is a mask."""
    return make(tensor) if tensor.is_floating_point() else tensor


def _quantised(tensor):
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.quint8)


#: With the elements of the tensor, all of which are accepted.
SAME = {
    "itself": lambda tensor: tensor,
    "a parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "of a subclass": lambda tensor: tensor.as_subclass(Mine),
    "not contiguous": _spread,
    "permuted": _permuted,
    "behind others": _behind,
    "to be negated": _negative,
    "a view to be negated": lambda tensor: _of_numbers(lambda t: torch._neg_view(-t), tensor),
    "a buffer": Buffer,
    "of a subclass that lies": lambda tensor: tensor.as_subclass(Liar),
    "of a subclass with plain results": lambda tensor: tensor.as_subclass(Unwatched),
    "wrapped": lambda tensor: TwoTensor(tensor, tensor.clone()),
    "traced": torch._to_functional_tensor,
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
    "without memory": without_memory,
    "behind others without memory": lambda tensor: _emptied(_behind(tensor)),
    "to be negated, without memory": lambda tensor: _of_numbers(
        torch._neg_view, without_memory(tensor)),
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "distributed": _distributed,
    "masked": lambda tensor: masked_tensor(
        tensor.float(), torch.ones_like(tensor, dtype=torch.bool)),
    "nested": lambda tensor: nested.nested_tensor([tensor, tensor]),
    "jagged": lambda tensor: nested.nested_tensor([tensor, tensor], layout=torch.jagged),
    "quantised": _quantised,
    "conjugate": lambda tensor: torch.complex(tensor.float(), tensor.float()).conj(),
    "an uninitialised parameter": lambda tensor: UninitializedParameter(),
    "an uninitialised buffer": lambda tensor: UninitializedBuffer(),
    "of a vmap that is over": lambda tensor: torch._C._functorch._add_batch_dim(
        tensor[None], 0, 1),
}  # fmt: skip


def plain(tensor):
    """Return a tensor of a subclass that is memory as one of PyTorch's own."""
    if isinstance(tensor, (Mine, Liar, Unwatched)):
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.as_subclass(tensor, Tensor)
    return tensor


def elements_of(value):
    """Return a tensor's elements in a plain tensor of float64, None for None.

    Raises
    ------
    ValueError
        If it is no tensor that has elements here.
    """
    if value is None:
        return None
    if type(value) is TwoTensor:
        return elements_of(value.a)
    if not isinstance(value, Tensor) or value.is_nested or value.is_quantized:
        raise ValueError
    keys = torch._C._dispatch_keys(value)
    if any(map(keys.has, (torch._C.DispatchKey.Python, torch._C.DispatchKey.FuncTorchBatched))):
        raise ValueError
    if torch._is_functional_tensor(value):
        torch._sync(value)
        value = torch._from_functional_tensor(value)
    value = plain(value).detach()
    if value.layout is not torch.strided or not value.is_cpu:
        raise ValueError
    if value._is_zerotensor():
        return torch.zeros(value.shape, dtype=torch.float64)
    try:
        # It looks at the storage.
        value.as_strided(value.shape, value.stride())
    except RuntimeError as error:
        raise ValueError from error
    # By way of NumPy: what is to be negated is.
    if value.is_complex():
        raise ValueError
    return torch.from_numpy(np.array(value.resolve_neg().double().numpy(), order="C"))
