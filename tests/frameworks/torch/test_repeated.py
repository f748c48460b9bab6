"""Repeated calls of `batch_norm`: they skip the checks of the first call, so their keys have all
facts.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backnorm.activations import Activation
from backnorm.errors import ArgumentError
from backnorm.executable import forget
from backnorm.torch import batch_norm, engines

TRAINING = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


@pytest.fixture(autouse=True)
def uncached():
    forget()
    yield
    forget()


def operands():
    """Return input, mean, variance, weight and bias."""
    x, channels = torch.randn(4, 3, 2, 2), torch.rand(4, 3) + 0.5
    return x, *channels.unbind()


def _of_ended_transform():
    kept = []
    torch.vmap(lambda x: kept.append(x) or x)(torch.randn(2, 4, 3, 2, 2))
    return kept[0]


@TRAINING
def test_repeated_step_is_planned_once(training, monkeypatch):
    planned, plan = [], engines.planned
    monkeypatch.setattr(
        engines, "planned", lambda name, *others: planned.append(name) or plan(name, *others)
    )
    dy = torch.randn(4, 3, 2, 2)
    for _ in range(3):
        x, mean, variance, weight, bias = operands()
        y = batch_norm(x, mean, variance, weight.requires_grad_(), bias, training)
        y.backward(dy)
    assert planned == ["forward" if training else "inference", "backward"]


@TRAINING
@pytest.mark.parametrize("activation", ["relu", None])
def test_repeated_call_has_bits_of_first(training, activation):
    x, mean, variance, weight, bias = operands()
    results = []
    for _ in range(2):
        running, scale = (mean.clone(), variance.clone()), weight.clone().requires_grad_()
        y = batch_norm(x, *running, scale, bias, training, activation=activation)
        (gradient,) = torch.autograd.grad(y, scale, x)
        results.append((y, gradient, *running))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@TRAINING
def test_call_that_differs_in_one_fact_from_an_earlier_call_is_checked(training):
    x, mean, variance, weight, bias = operands()

    def call(x=x, mean=mean, weight=weight, **options):
        return batch_norm(x, mean, variance, weight, bias, training, **options)

    call()
    call(activation=Activation("relu"))
    wrong = [
        {"mean": mean.clone().requires_grad_()},
        {"weight": weight.double()},
        {"weight": weight[:2]},
        {"weight": weight.to("meta")},
        {"x": x.to_sparse()},
        {"x": _of_ended_transform()},
        {"activation": ("relu", None)},
        {"residual": x[:2], "activation": "relu"},
    ]
    for changed in wrong:
        with pytest.raises(ArgumentError):
            call(**changed)


@TRAINING
def test_call_on_other_facts_after_an_equal_call_follows_them(training):
    x, mean, variance, weight, bias = operands()

    def call(x, weight=weight):
        return batch_norm(x, mean.clone(), variance, weight, bias, training)

    expected = call(x)
    assert call(x, weight.clone().requires_grad_()).requires_grad
    with torch.no_grad():
        assert not call(x, nn.Parameter(weight)).requires_grad
    # The memory of a lazily negated tensor has the elements before negation.
    torch.testing.assert_close(call(torch._neg_view(-x)), expected)
    assert torch._is_functional_tensor(call(x, torch._to_functional_tensor(weight)))
    torch.testing.assert_close(call(x.to(memory_format=torch.channels_last)), expected)
