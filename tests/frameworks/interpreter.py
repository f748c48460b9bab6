"""Triton's interpreter in the place of a GPU: kernels run on CPU tensors, a program at a time.

With TRITON_INTERPRET=1, or without a CUDA device. Otherwise the tests in `gpu` run on the GPU.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Where tensors are that the GPU's kernels take.
DEVICE = "cpu" if INTERPRETED else "cuda"


@contextmanager
def rounding_as_hardware_does():
    """Let float32 be rounded to bfloat16, ties to even, and small bfloat16 be read.

    Triton 3.9's interpreter cuts off the one and takes the other, where it is subnormal, for 0
    (`runtime/interpreter.py`, `cast_impl` and `_convert_float`).
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values, source, target, mode):
        if source == tl.float32 and target == tl.bfloat16:
            with np.errstate(all="ignore"):
                return values.astype(ml_dtypes.bfloat16).view(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return values.view(ml_dtypes.bfloat16).astype(np.float32)
        return original(values, source, target, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        # Its arithmetic is NumPy's, which warns where a GPU does not.
        with np.errstate(all="ignore"):
            yield


def tuned_kernels():
    """Return the kernels that Triton's autotuner configures."""
    from backnorm.gpu.kernels import backward, forward

    return [
        *(forward.forward_sums, forward.forward_apply),
        *(backward.backward_sums, backward.backward_apply),
    ]


@contextmanager
def in_configuration(configuration):
    """Let kernels have one configuration, so that the autotuner measures nothing."""
    from backnorm.executable import forget

    with pytest.MonkeyPatch.context() as patch:
        for kernel in tuned_kernels():
            patch.setattr(kernel, "configs", [configuration])
        forget()
        yield
    forget()


@contextmanager
def for_every_tensor():
    """Let new tensors be where the GPU's kernels take them, and the adapter use these."""
    import torch

    from backnorm.executable import forget
    from backnorm.torch import gpu, kernels

    with pytest.MonkeyPatch.context() as patch, torch.device(DEVICE):
        if INTERPRETED:
            patch.setattr(kernels, "engine_of", lambda x: gpu)
        forget()
        yield
    forget()


def arithmetics_planned(monkeypatch, module):
    """Return a list, to which a module's plans then add their operation and arithmetic."""
    from backnorm.gpu.plan import plan_gpu

    seen = []

    def plan(*operands):
        made = plan_gpu(*operands)
        seen.append((made.problem.operation, made.arithmetic))
        return made

    monkeypatch.setattr(module, "plan_gpu", plan)
    return seen
