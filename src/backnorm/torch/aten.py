"""PyTorch's own native_batch_norm_backward on the CPU, computed by backnorm.

What calls that operator, autograd above all, then runs on our kernel without knowing it: models,
losses and optimizers stay as they are, and so does PyTorch's forward pass.

The kernel is registered for the dispatch key CPU when `use_for_aten` is first entered, and stays.
Outside of every `use_for_aten` it hands each call to PyTorch's kernel (some 3 µs). It is not
taken away again, because PyTorch's table of kernels may not change while another thread is in a
backward pass.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backnorm.dialects.aten import native_batch_norm_backward
from backnorm.dialects.operator import function
from backnorm.errors import ArgumentError, BacknormError
from backnorm.torch.checks import in_words
from backnorm.torch.classes import in_memory
from backnorm.torch.memory import array_of, check_memory, dense, empty_like, tensor_of

__all__ = ["use_for_aten"]

_OPERATOR = "native_batch_norm_backward"
_NAMES = tuple(each.name for each in native_batch_norm_backward.schema.inputs)

# The dialect's operator that also takes memory for its first output.
_operator = function(replace(native_batch_norm_backward.schema, takes_memory=True))

Result = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Switch:
    """Whether the operator is ours: as long as someone is inside, in whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._library: Any = None
        self._original: Any = None

    @property
    def on(self) -> bool:
        return self._inside > 0

    def enter(self) -> None:
        with self._lock:
            if self._library is None:
                self._register()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1

    def original(self, keys: Any, *args: Any) -> Result:
        """Call PyTorch's kernel."""
        result: Result = self._original.call_boxed(keys, *args)
        return result

    def _register(self) -> None:
        if not hasattr(torch.library, "get_kernel"):
            raise BacknormError(
                "use_for_aten needs a PyTorch whose kernels can be called after they were replaced "
                f"(torch.library.get_kernel), which PyTorch {torch.__version__} has not"
            )
        self._original = torch.library.get_kernel(f"aten::{_OPERATOR}", "CPU")
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # That a kernel is replaced is what is asked for.
            warnings.simplefilter("ignore")
            library.impl(_OPERATOR, _kernel, "CPU", with_keyset=True)
        self._library = library


_switch = _Switch()


@contextlib.contextmanager
def use_for_aten() -> Iterator[None]:
    """Make PyTorch's native_batch_norm_backward on the CPU use backnorm, within a ``with`` block.

    ::

        with backnorm.torch.use_for_aten():
            loss.backward()

    It holds for all threads of the process (autograd may run a backward pass in threads of its
    own), may be nested, and ends with the last block; also usable as a decorator. Batch
    normalisation in training and in evaluation, in float64, float32, float16 and bfloat16, and its
    second order, which PyTorch composes of other operators, work as before; results are those of
    `backnorm.dialects.aten.native_batch_norm_backward`.

    Code that `torch.compile` generated does not call the operator, and stays as it is. Enter the
    first block while no other thread is in a backward pass.

    Raises
    ------
    BacknormError
        On entering, if this PyTorch has no `torch.library.get_kernel`.
    TensorTypeError, TensorValueError
        From a backward pass, for arguments that are not accepted (and that end the process where
        PyTorch's kernel does not check them), in the words of the operator.
    """
    _switch.enter()
    try:
        yield
    finally:
        _switch.leave()


def _kernel(
    keys: Any,
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Result:
    rest = weight, running_mean, running_var, save_mean, save_invstd
    if not _switch.on:
        return _switch.original(keys, grad_out, input, *rest, train, eps, output_mask)
    input = in_memory(input, "input")
    check_memory(input, "input")
    input = dense(input)
    dx = empty_like(input) if output_mask[0] else None
    arrays = [
        None if tensor is None else array_of(tensor, name)
        for name, tensor in zip(_NAMES, (grad_out, input, *rest), strict=True)
    ]
    out = None if dx is None else array_of(dx)
    try:
        _, dweight, dbias = _operator(*arrays, train, eps, output_mask, grad_input=out)
    except ArgumentError as error:
        raise in_words(error, {}) from None
    return (
        dx,
        None if dweight is None else tensor_of(dweight),
        None if dbias is None else tensor_of(dbias),
    )
