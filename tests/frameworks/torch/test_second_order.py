"""The second order by PyTorch's operators, as on a GPU, against the oracle; its memory."""

from __future__ import annotations

import tracemalloc
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_double_backward
from backnorm.torch import cpu, gpu
from backnorm.torch.memory import array_of, tensor_of
from tests.support import internals
from tests.support.dtypes import ELEMENT_TYPES

NAMES = ("x", "dy", "mean", "variance", "gamma")
COTANGENTS = ("ddx", "ddgamma", "ddbeta")


def layer(rng, dtype, shape=(6, 5, 8), **options):
    """Return arrays by name, and epsilon."""
    data = realistic_data(shape, dtype, rng=rng, ratio=10.0, **options)
    ddgamma, ddbeta = rng.standard_normal((2, shape[1])).astype(data.mean.dtype)
    arrays = dict(zip(NAMES, data.backward_inputs, strict=True)) | {
        "ddx": (rng.standard_normal(shape) + 0.7).astype(dtype),
        "ddgamma": ddgamma,
        "ddbeta": ddbeta,
    }
    return arrays, data.options["epsilon"]


def double_backward(tensors, epsilon, training):
    elements = [tensors[name] for name in ("x", "dy", "ddx")]
    channels = [tensors[name] for name in (*NAMES[2:], "ddgamma", "ddbeta")]
    return gpu.double_backward(elements, channels, epsilon, training)


def check(arrays, epsilon, training, lay_out=lambda tensor: tensor):
    tensors = {name: None if array is None else tensor_of(array) for name, array in arrays.items()}
    for name in ("x", "dy", "ddx"):
        tensors[name] = None if tensors[name] is None else lay_out(tensors[name])
    arrays |= {n: array_of(tensors[n]) for n in ("x", "dy", "ddx") if tensors[n] is not None}
    gradients = double_backward(tensors, epsilon, training)
    found = tuple(array_of(gradient) for gradient in gradients)
    verdicts = check_double_backward(gradients=found, epsilon=epsilon, training=training, **arrays)
    assert [verdict.detail for verdict in verdicts.values() if not verdict.passed] == []
    assert all(one.stride() == torch.empty_like(tensors["x"]).stride() for one in gradients[:2])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(
    "absent", [(), ("gamma",), *((c,) for c in COTANGENTS), COTANGENTS], ids=str
)
def test_double_backward_is_within_budget(dtype, training, absent, rng):
    arrays, epsilon = layer(rng, dtype)
    check(arrays | dict.fromkeys(absent), epsilon, training)


@pytest.mark.parametrize("block", [1, 7, 30, 1 << 20])
def test_double_backward_in_blocks_of_any_size_and_layout_is_within_budget(
    block, layout, rng, monkeypatch
):
    internals.blocks_of_second_order_on_gpu(monkeypatch, block)
    arrays, epsilon = layer(rng, np.dtype(np.float64), (4, 5, 3, 2))
    check(arrays, epsilon, True, layout)


@pytest.mark.parametrize("shape", [(64, 2, 64, 32), (2, 1, 1 << 17)], ids=str)
def test_double_backward_of_long_float64_channels_is_within_budget(shape, rng):
    check(*layer(rng, np.dtype(np.float64), shape), True)


@pytest.mark.parametrize("training", [True, False])
def test_double_backward_of_constant_channel_is_finite(training, rng):
    arrays, _ = layer(rng, np.dtype(np.float64))
    arrays["x"][:, 1], arrays["mean"][1], arrays["variance"][1] = 3.0, 3.0, 0.0
    check(arrays, 1e-300, training)
    tensors = {name: tensor_of(array) for name, array in arrays.items()}
    assert all(each.isfinite().all() for each in double_backward(tensors, 1e-300, training))


def test_double_backward_of_bfloat16_gamma_returns_bfloat16_gradient(rng):
    arrays, epsilon = layer(rng, np.dtype(ml_dtypes.bfloat16), statistics_dtype=np.dtype("f4"))
    weight = tensor_of(arrays["gamma"]).bfloat16()
    tensors = {name: tensor_of(array) for name, array in arrays.items()} | {"gamma": weight}
    *_, gradient = double_backward(tensors, epsilon, True)
    assert gradient.dtype is torch.bfloat16


class Live(TorchDispatchMode):
    """The number of bytes of all tensors that were made within."""

    def __init__(self, *operands):
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in operands}
        self.peak = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_double_backward_by_operators_allocates_at_most_8_blocks(dtype, monkeypatch):
    internals.blocks_of_second_order_on_gpu(monkeypatch, 1 << 12)
    elements = [torch.randn(9, 8, 100, 41).to(dtype) for _ in range(3)]
    channels = [torch.ones(8, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(3)]
    x = elements[0]
    with Live(*elements, *channels) as live:
        gpu.double_backward(elements, (*channels, *channels[:2]), 1e-5, True)
    assert 2 * x.nbytes < live.peak < 2 * x.nbytes + 8.1 * 8 * (1 << 12)


def test_double_backward_on_cpu_allocates_little_beyond_results():
    x, dy, ddx = (torch.randn(16, 8, 128, 128) for _ in range(3))
    one = torch.ones(8)
    # The first call, and the first use of `Live`, import modules.
    with Live(x):
        cpu.double_backward((x[:1], dy[:1], ddx[:1]), [one] * 5, 1e-5, True)
    tracemalloc.start()
    try:
        with Live(x, dy, ddx, one) as live:
            cpu.double_backward((x, dy, ddx), [one] * 5, 1e-5, True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert live.peak < 2 * x.nbytes + (1 << 16)
    assert peak < 2 << 20
