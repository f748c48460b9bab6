"""Subjects that get tensors; each is wrong in the way that its name says, except `right`."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from backnorm.peers.torch_tensors import to_array, to_tensor
from tests.conformance import forward_subjects
from tests.conformance.wrong_kernels import Kernel

_kernel = Kernel()


def right(*tensors, **options):
    """Compute the gradients with NumPy, and return them as tensors on the device of x."""
    return _of_torch(_kernel, tensors, options)


def right_forward(*tensors, **options):
    return _of_torch(forward_subjects.right, tensors, options)


def _of_torch(function, tensors, options):
    import torch

    assert all(isinstance(each, torch.Tensor) for each in tensors if each is not None)
    arrays = [None if each is None else to_array(each) for each in tensors]
    found = function(*arrays, **options)
    return tuple(to_tensor(np.array(each)).to(tensors[0].device) for each in found)


def right_of_jax(x, dy, mean, variance, gamma, **options):
    import jax

    arrays = x, dy, mean, variance, gamma
    assert all(isinstance(each, jax.Array) for each in arrays if each is not None)
    return _kernel(*[None if a is None else np.asarray(a) for a in arrays], **options)


def keeps_running(x, gamma, beta, mean, variance, *others):
    """Call PyTorch's operator with copies of the running statistics."""
    import torch

    statistics = mean.clone(), variance.clone()
    return torch.ops.aten.native_batch_norm(x, gamma, beta, *statistics, *others)


def writes_dy(x, dy, *others, **options):
    found = right(x, dy, *others, **options)
    dy.mul_(2)
    return found


def reads_beyond_dy(x, dy, *others, **options):
    found = right(x, dy, *others, **options)
    ctypes.string_at(dy.data_ptr() + dy.nbytes, 1)
    return found


def changes_shapes(x, dy, mean, *others, **options):
    found = right(x, dy, mean, *others, **options)
    mean.unsqueeze_(0)
    return found


def fails_later(x, *others, **options):
    """Let the device report an error of the cases without training after the call."""
    import torch

    def synchronize():
        if not options["training"]:
            raise RuntimeError("an illegal memory access was encountered")

    torch.cpu.synchronize = synchronize
    return right(x, *others, **options)


def fails_in_threads(*tensors, **options):
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("a call in another thread")
    return right(*tensors, **options)
