"""The number of threads of a pass does not depend on the pass before it."""

from __future__ import annotations

import threading

import pytest
import torch

import backnorm
import backnorm.torch
from backnorm import machine
from backnorm.executable import forget
from backnorm_kernels.stage import Stage

pytestmark = pytest.mark.skipif(machine.processors() < 2, reason="needs two processors")


@pytest.fixture
def participants(monkeypatch):
    """Return a list of how many may take part in each call from now on."""
    found, call = [], Stage.__call__

    def counted(self, *args, **kwargs):
        found.append(self.participants)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Stage, "__call__", counted)
    # An executable keeps what it calls.
    forget()
    yield found
    forget()


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return backnorm.torch.BatchNorm2d(16), torch.randn(8, 16, 40, 40), torch.randn(8, 16, 40, 40)


def _step(layer, forward, backward):
    module, x, dy = layer
    x = x.clone().requires_grad_()
    with backnorm.num_threads(forward):
        y = module(x)
    with backnorm.num_threads(backward):
        y.backward(dy)
    return x.grad


@pytest.mark.parametrize("numbers", [[(2, 1), (2, 2), (1, 2), (1, 1), (2, 1)], [(1, 2), (2, 2)]])
def test_forward_and_backward_use_num_threads_of_their_call(layer, participants, numbers):
    torch.set_num_threads(2)
    gradients = [_step(layer, *pair) for pair in numbers for _ in range(3)]
    assert participants == [number for pair in numbers for _ in range(3) for number in pair]
    for gradient in gradients:
        assert torch.equal(gradient, gradients[0])


def test_set_num_threads_of_pytorch_limits_participants(layer, participants):
    before = torch.get_num_threads()
    try:
        for number in (1, 2, 1):
            torch.set_num_threads(number)
            _step(layer, 2, 2)
    finally:
        torch.set_num_threads(before)
    assert participants == [1, 1, 2, 2, 1, 1]


def test_layer_in_concurrent_threads_returns_same_gradients(layer):
    torch.set_num_threads(2)
    expected, wrong = _step(layer, 2, 2), []

    def work():
        wrong.extend(k for k in range(20) if not torch.equal(_step(layer, 2, 2), expected))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
