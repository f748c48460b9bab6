"""Without kernels, or within the block of another engine, calls on tensors raise one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import backnorm
import backnorm.torch
from backnorm.errors import ArgumentValueError
from backnorm.reproducible_sums import bins_of

CALLS = {
    "function": "batch_norm(x, None, None, training=True)",
    "evaluation": "batch_norm(x, ones, ones)",
    "layer": "backnorm.torch.BatchNorm1d(3)(x)",
    "layer in evaluation": "backnorm.torch.BatchNorm1d(3).eval()(x)",
    "reproducible layer": "backnorm.torch.BatchNorm1d(3, reproducible=True)(x)",
    "gradient": "batch_norm(x.requires_grad_(), None, None, training=True)",
    "compiled": "torch.compile(backnorm.torch.BatchNorm1d(3), backend='aot_eager')(x)",
}


def test_import_without_kernels_succeeds_and_calls_raise_one_line(without_kernels):
    code = f"""
import torch
import backnorm.torch
from backnorm.torch import batch_norm
from backnorm.errors import MachineCodeError
x, ones = torch.rand(4, 3, 2), torch.ones(3)
for _ in range(2):
    for call in {list(CALLS.values())!r}:
        try:
            eval(call)
        except MachineCodeError as error:
            print(error)
"""
    done = without_kernels(code)
    assert done.returncode == 0, done.stderr
    message = (
        "calls on tensors of PyTorch on the CPU need the kernels: "
        "pip install ./kernels in a checkout of backnorm"
    )
    assert done.stdout.splitlines() == 2 * len(CALLS) * [message]


@pytest.mark.parametrize("call", [call for name, call in CALLS.items() if name != "compiled"])
def test_call_within_numpy_engine_raises_before_and_after_call_with_kernels(call):
    names = {
        "x": torch.rand(4, 3, 2),
        "ones": torch.ones(3),
        "batch_norm": backnorm.torch.batch_norm,
        "backnorm": backnorm,
    }
    for _ in range(2):
        with (
            pytest.raises(
                ArgumentValueError, match=r"^engine: calls on tensors of PyTorch"
            ) as caught,
            backnorm.engine("numpy"),
        ):
            eval(call, names)
        assert "got 'numpy'; expected 'kernels'" in str(caught.value)
        assert "\n" not in str(caught.value)
        eval(call, names)


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize(
    "size",
    [1.0, 1e-300, 1.7 * 2.0**990, 2.0**1000, 1.6e308, np.finfo(float).max, np.nan, -np.inf],
)
def test_bins_of_tensors_equal_bins_of_arrays(size, itemsize, rng):
    terms, factors = rng.standard_normal((2, 5, 33))
    terms[1, 3], terms[4, 30], factors[2, 7] = size, -size, size
    factors[1], factors[4] = 0.0, 1.3 * 2.0**-60
    terms[3], factors[3] = 2.0**-100, size
    with np.errstate(all="ignore"):
        expected = bins_of(terms, factors, itemsize, np)
    found = bins_of(torch.from_numpy(terms), torch.from_numpy(factors), itemsize, torch)
    np.testing.assert_array_equal(found.numpy(), expected)
