"""The ATen dialect against PyTorch's operators."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest
import torch

from backnorm.dialects import aten

NATIVE = torch.ops.aten.native_batch_norm_backward
EPS = 1e-5
TYPES = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16 and float32": (torch.float16, torch.float32),
    "bfloat16 and float32": (torch.bfloat16, torch.float32),
}
SHAPES = [(7, 3), (4, 3, 5), (4, 3, 5, 6), (3, 2, 4, 2, 5), (2, 3, 1, 1), (8, 4, 20, 20)]
ALL = [True, True, True]


def array(tensor):
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def arguments(shape, data=torch.float32, channel=None, *, train=True, weighted=True, last=False):
    """Return the arguments of the operator, those of an autograd call."""
    channel = channel or data
    generator = torch.Generator().manual_seed(sum(shape) + train)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    x = (normal(*shape) * 3 + 1).to(data)
    if last:
        x = x.to(memory_format=torch.channels_last)
    dy, c = normal(*shape).to(data), shape[1]
    weight = normal(c).to(channel) if weighted else None
    running = normal(c).to(channel), (normal(c).abs() + 0.5).to(channel)
    # Beside a 16-bit x without weight only the running statistics say the type.
    _, *saved = torch.native_batch_norm(
        x, weight, weight, running[0].clone(), running[1].clone(), train, 0.1, EPS
    )
    return [dy, x, weight, *running, *saved, train, EPS]


def wide(values):
    """Return the arguments in float64, and the inverse deviation as it is."""
    return [v.double() if isinstance(v, torch.Tensor) else v for v in values]


def close(actual, expected, dtype):
    digits = {2: 2e-2, 4: 3e-5, 8: 1e-12}[dtype.itemsize]
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected, rtol=digits, atol=digits * scale)


def cases(shape, types):
    """Yield the arguments in training and frozen, with and without weight, in every layout."""
    for train in (True, False):
        for weighted in (True, False):
            for last in (False, True) if len(shape) == 4 else (False,):
                yield arguments(shape, *TYPES[types], train=train, weighted=weighted, last=last)


@pytest.mark.covering(1)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_aten_backward_matches_float64_of_pytorch(shape, types):
    for operands in cases(shape, types):
        ours = aten.native_batch_norm_backward(*map_arrays(operands), output_mask=ALL)
        exact = NATIVE(*wide(operands), output_mask=ALL)
        own = NATIVE(*operands, output_mask=ALL)
        for actual, expected, theirs in zip(map(tensor, ours), exact, own, strict=True):
            assert actual.dtype is theirs.dtype
            assert actual.shape == theirs.shape
            close(actual, expected, actual.dtype)


def map_arrays(operands):
    return [array(v) if isinstance(v, torch.Tensor) else v for v in operands]


def tensor(values):
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


@pytest.mark.parametrize(
    "name",
    ["native_batch_norm_backward", "batch_norm_backward_reduce", "batch_norm_backward_elemt"],
)
def test_aten_signatures_match_pytorch_schemas(name):
    schema = getattr(torch.ops.aten, name).default._schema
    ours = inspect.signature(getattr(aten, name)).parameters.values()
    theirs = [argument.name for argument in schema.arguments]
    assert [
        operands.name for operands in ours if operands.kind is not operands.KEYWORD_ONLY
    ] == theirs
    # Ours alone, and by keyword alone.
    assert [operands.name for operands in ours if operands.kind is operands.KEYWORD_ONLY] == [
        "arithmetic"
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_aten_reduce_and_elemt_match_gradient_of_pytorch(dtype):
    operands = arguments((6, 3, 8), dtype)
    dy, x, weight, _, _, mean, invstd = map_arrays(operands[:7])
    reduced = aten.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
    part = aten.batch_norm_backward_elemt(
        dy, x, mean, invstd, weight, *reduced[:2], np.array([48], np.int32)
    )
    exact = NATIVE(*wide(operands), output_mask=ALL)
    for actual, expected in zip((part, *reduced[2:]), exact, strict=True):
        close(tensor(actual), expected, dtype)
