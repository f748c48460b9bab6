"""Findings of `backnorm verify` on PyTorch's classes."""

from __future__ import annotations

import pytest
import torch

from backnorm.conformance.verify.subjects import function_of


class _Own(torch.autograd.Function):
    """A function that a user passes to verify instead of one that calls its backward."""


def test_verify_of_autograd_function_says_what_to_write():
    with pytest.raises(TypeError, match=r"not a torch\.autograd\.Function; .* calls its backward"):
        function_of(f"{__name__}:_Own", "SUBJECT")
