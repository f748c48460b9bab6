"""The phases apart: what is known of parts of a batch adds up, and apply takes that of all."""

from __future__ import annotations

import pytest
import torch

from backnorm.activations import RELU
from backnorm.torch import cpu, kernels, phases
from backnorm.torch import gpu as engine

from ..interpreter import DEVICE

EPS = 1e-5
HOW = "float64"
ARITHMETICS = "float64", "float32"
# Shape, and whether it lies in memory as channels_last.
CASES = [((40, 6, 9), False), ((8, 5, 6, 7), False), ((8, 5, 6, 7), True), ((70, 3), False)]


@pytest.fixture(autouse=True)
def on_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "engine_of", lambda x: engine)


def parts_of(x, channels_last):
    """Return parts of unequal length, as machines have of a batch; one is empty."""
    cut = x.shape[0] // 3
    kind = torch.channels_last if channels_last else torch.contiguous_format
    return [each.to(DEVICE).contiguous(memory_format=kind) for each in (x[:cut], x[cut:], x[:0])]


def moments_of_all(every):
    """Return the moments of all parts, added up as `backnorm.ChannelMoments` are."""
    channels = every[0].numel() // 2
    counts = torch.stack([each[-1] for each in every])
    means = torch.stack([each[:channels] for each in every])
    variances = torch.stack([each[channels:-1] for each in every])
    shares = (counts / counts.sum())[:, None]
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean) ** 2)).sum(0)
    return torch.cat((mean, variance, counts.sum().view(1)))


@pytest.mark.parametrize("how", ARITHMETICS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("shape", "channels_last"), CASES, ids=str)
def test_parts_are_normalised_as_the_whole(shape, channels_last, relu, how):
    x, dy, residual = torch.randn(shape) + 3, torch.randn(shape), torch.randn(shape)
    x[: shape[0] // 2] -= 2
    weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
    given = x, residual if relu else None, weight, bias
    expected = cpu.forward(*given, None, None, EPS, "NCX", RELU if relu else None, how, False)
    y, mean, variance, mask = expected
    xs, dys, residuals = (parts_of(each, channels_last) for each in (x, dy, residual))
    whole = moments_of_all([phases.moments(each, how) for each in xs])
    assert whole[-1] == x.numel() // shape[1]
    weight, bias = weight.to(DEVICE), bias.to(DEVICE)
    found = [
        phases.apply_moments(part, other if relu else None, weight, bias, whole, EPS, relu, how)
        for part, other in zip(xs, residuals, strict=True)
    ]
    torch.testing.assert_close(torch.cat([each[0].cpu() for each in found]), y)
    for each in found:
        torch.testing.assert_close(each[1].cpu(), mean)
        torch.testing.assert_close(each[2].cpu(), variance)
    operands = x, dy, mask, mean, variance, weight.cpu()
    gradients = cpu.backward(*operands, EPS, "NCX", True, relu, how, False)
    mean, variance = mean.to(DEVICE), variance.to(DEVICE)
    masks = [each[3] if relu else None for each in found]
    every = zip(xs, dys, masks, strict=True)
    total = sum(phases.sums(*each, mean, how) for each in every)
    assert total[-1] == x.numel() // shape[1]
    results = [
        phases.apply_sums(*each, mean, variance, weight, total, EPS, relu, how)
        for each in zip(xs, dys, masks, strict=True)
    ]
    for k in (0, 3) if relu else (0,):
        together = torch.cat([each[min(k, 1)].cpu() for each in results])
        torch.testing.assert_close(together, gradients[k], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("shape", "channels_last"), CASES, ids=str)
def test_reproducible_sums_are_those_of_the_cpu(shape, channels_last, relu):
    x, dy = torch.randn(shape) + 3, torch.randn(shape)
    mean = torch.rand(shape[1])
    mask = None
    if relu:
        given = x, None, None, None, None, None, EPS, "NCX", RELU, HOW, False
        mask = cpu.forward(*given)[3]
    expected = cpu.reduce_forward_bins(x, HOW), cpu.reduce_bins(x, dy, mask, mean, HOW)
    mine = x.to(DEVICE), dy.to(DEVICE), None if mask is None else mask.to(DEVICE), mean.to(DEVICE)
    if channels_last and not relu:
        kind = torch.channels_last
        mine = (*(each.contiguous(memory_format=kind) for each in mine[:2]), *mine[2:])
    message = phases.binned_moments(mine[0], HOW)
    assert torch.equal(message[:-1].cpu(), expected[0][0].flatten())
    assert message[-1] == expected[0][1]
    message = phases.binned_sums(*mine, HOW)
    assert torch.equal(message[:-1].cpu(), expected[1][0].flatten())
    rounded = phases.rounded_sums(mine[0], message)
    plain = phases.sums(*mine, HOW)
    torch.testing.assert_close(rounded, plain, rtol=1e-9, atol=1e-9)


def test_no_elements_have_bins_of_nothing():
    x = torch.empty(0, 5, 3, device=DEVICE)
    (expected, _), found = cpu.reduce_forward_bins(x.cpu(), HOW), phases.binned_moments(x, HOW)
    assert torch.equal(found[:-1].cpu(), expected.flatten())
