"""The phases apart: what is known of parts of a batch adds up, and apply takes that of all."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(("shape", "channels_last"), CASES, ids=str)
def test_parts_are_normalised_as_the_whole(shape, channels_last, arithmetic):
    x, dy = torch.randn(shape) + 3, torch.randn(shape)
    x[: shape[0] // 2] -= 2
    weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
    operands = x, None, weight, bias, None, None
    y, mean, variance, _ = cpu.forward(*operands, EPS, "NCX", None, arithmetic, False)
    xs, dys = (parts_of(each, channels_last) for each in (x, dy))
    whole = moments_of_all([phases.moments(each, arithmetic) for each in xs])
    assert whole[-1] == x.numel() // shape[1]
    weight, bias = weight.to(DEVICE), bias.to(DEVICE)
    found = [phases.apply_moments(part, weight, bias, whole, EPS, arithmetic) for part in xs]
    torch.testing.assert_close(torch.cat([each[0].cpu() for each in found]), y)
    for each in found:
        torch.testing.assert_close(each[1].cpu(), mean)
        torch.testing.assert_close(each[2].cpu(), variance)
    operands = x, dy, None, mean, variance, weight.cpu()
    expected, *_ = cpu.backward(*operands, EPS, "NCX", True, False, arithmetic, False, None)
    mean, variance = mean.to(DEVICE), variance.to(DEVICE)
    pairs = list(zip(xs, dys, strict=True))
    total = sum(phases.sums(*pair, mean, arithmetic) for pair in pairs)
    assert total[-1] == x.numel() // shape[1]
    results = [
        phases.apply_sums(*pair, mean, variance, weight, total, EPS, arithmetic) for pair in pairs
    ]
    together = torch.cat([each.cpu() for each in results])
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("shape", "channels_last"), CASES, ids=str)
def test_reproducible_sums_are_those_of_the_cpu(shape, channels_last):
    x, dy = torch.randn(shape) + 3, torch.randn(shape)
    mean = torch.rand(shape[1])
    moments, count = cpu.reduce_forward(x, "NCX", HOW, True)
    sums, _ = cpu.reduce(x, dy, None, mean, "NCX", HOW, True)
    kind = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (each.to(DEVICE).contiguous(memory_format=kind) for each in (x, dy))
    message = phases.binned_moments(x, HOW)
    assert torch.equal(message[:-1].cpu(), moments.flatten())
    assert message[-1] == count
    message = phases.binned_sums(x, dy, mean.to(DEVICE), HOW)
    assert torch.equal(message[:-1].cpu(), sums.flatten())
    rounded = phases.rounded_sums(x, message)
    plain = phases.sums(x, dy, mean.to(DEVICE), HOW)
    torch.testing.assert_close(rounded, plain, rtol=1e-9, atol=1e-9)


def test_no_elements_have_bins_of_nothing():
    x = torch.empty(0, 5, 3, device=DEVICE)
    (expected, _), found = (
        cpu.reduce_forward(x.cpu(), "NCX", HOW, True),
        phases.binned_moments(x, HOW),
    )
    assert torch.equal(found[:-1].cpu(), expected.flatten())
