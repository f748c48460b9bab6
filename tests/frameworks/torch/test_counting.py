"""The counter of batches: moved in memory, and by PyTorch's operator where that is not all."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import backnorm.torch
from backnorm.torch import counting


@pytest.fixture
def operators(monkeypatch):
    """Return the numbers that were added by the operator."""
    added, add = [], torch.Tensor.add_
    monkeypatch.setattr(torch.Tensor, "add_", lambda self, n: (added.append(n), add(self, n))[1])
    return added


@pytest.mark.parametrize("start", [0, 5, 2**40, -1])
def test_it_counts_in_memory(start, operators):
    storage = torch.tensor([7, start, 9])
    counting.count(storage[1])
    assert storage.tolist() == [7, start + 1, 9]
    assert operators == []


def test_what_is_no_such_number_is_left_to_pytorch(operators):
    counters = [
        torch.tensor(3, dtype=torch.int32),
        torch.tensor(3.0),
        torch.tensor([3, 3]),
        torch.tensor(3, device="meta"),
        torch.tensor(3).as_subclass(type("Mine", (torch.Tensor,), {})),
    ]
    for counter in counters:
        before = len(operators)
        counting.count(counter)
        # A subclass calls it once more.
        assert len(operators) > before
    assert [counters[k].tolist() for k in (0, 1, 2, 4)] == [4, 4.0, [4, 4], 4]


def test_one_whose_memory_is_gone_is_left_to_pytorch(operators, monkeypatch):
    counter = torch.tensor(3)
    counter.untyped_storage().resize_(0)
    monkeypatch.setattr(torch.Tensor, "add_", lambda self, n: operators.append(n))
    counting.count(counter)
    assert operators == [1]


@pytest.mark.parametrize("kind", [TorchFunctionMode, TorchDispatchMode])
def test_who_watches_operators_sees_it(kind):
    seen = []

    class Watch(kind):
        def _seen(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        __torch_function__ = __torch_dispatch__ = _seen

    layer, x = backnorm.torch.BatchNorm1d(3), torch.randn(4, 3)
    with Watch():
        layer(x)
    assert any("add_" in each for each in seen)
    assert layer.num_batches_tracked == 1


def test_a_layer_counts_as_pytorchs_does():
    layers = [kind(3) for kind in (backnorm.torch.BatchNorm1d, torch.nn.BatchNorm1d)]
    x = torch.randn(4, 3)
    for _ in range(3):
        assert len({int(layer.num_batches_tracked) for layer in layers}) == 1
        for layer in layers:
            layer(x)
    for layer in layers:
        layer.num_batches_tracked = None
        layer(x)
        del layer.num_batches_tracked
        layer.num_batches_tracked = torch.tensor(8)
        layer(x)
        assert layer.num_batches_tracked == 9
