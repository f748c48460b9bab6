"""The phases apart: moments and sums of parts of a batch add up, and give the results of all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backnorm.executable import compute
from backnorm.layout import mask_size
from backnorm.options import Options
from backnorm.torch import cpu, synchronised
from backnorm.torch import gpu as engine

from ..interpreter import DEVICE

EPS = 1e-5
# Arguments of the operators: sums that are not reproducible, a layer without name, no group.
ALONE = False, "", None
ARITHMETICS = "float64", "float32"
# Shape, and whether it lies in memory as channels_last.
CASES = [((40, 6, 9), False), ((8, 5, 6, 7), False), ((8, 5, 6, 7), True), ((70, 3), False)]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(synchronised, "engine_of", lambda x: engine)


def parts_of(x, channels_last):
    """Return parts of unequal length, as machines have of a batch; one is empty."""
    cut = x.shape[0] // 3
    kind = torch.channels_last if channels_last else torch.contiguous_format
    return [each.to(DEVICE).contiguous(memory_format=kind) for each in (x[:cut], x[cut:], x[:0])]


EXACT = Options(arithmetic="float64", reproducible=True)


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


@pytest.mark.covering(1)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(("shape", "channels_last"), CASES, ids=str)
def test_synchronised_parts_match_whole_batch(shape, channels_last, arithmetic):
    x, dy = torch.randn(shape) + 3, torch.randn(shape)
    x[: shape[0] // 2] -= 2
    weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
    known = Options(EPS, arithmetic=arithmetic)
    operands = x, None, weight, bias, None, None
    y, mean, variance, _ = compute("forward", operands, known, arrays=cpu.TENSORS)
    xs, dys = (parts_of(each, channels_last) for each in (x, dy))
    operators, options = torch.ops.backnorm, (EPS, arithmetic)
    results = [operators.synchronised(part, None, None, *options, *ALONE) for part in xs]
    whole = moments_of_all([moments for _, moments in results])
    assert whole[-1] == x.numel() // shape[1]
    torch.testing.assert_close(whole[:-1].cpu(), torch.cat((mean, variance)).double())
    weight, bias = weight.to(DEVICE), bias.to(DEVICE)
    *of_all, _ = engine.parts(whole)
    phase = {"arrays": engine.TENSORS, "sums": tuple(of_all)}
    results = [
        compute("apply_forward", (part, None, weight, bias), known, **phase)[0] for part in xs
    ]
    torch.testing.assert_close(torch.cat([each.cpu() for each in results]), y)
    operands = x, dy, None, mean, variance, weight.cpu()
    expected, *_ = compute("backward", operands, known, arrays=cpu.TENSORS)
    pairs = list(zip(xs, dys, strict=True))
    sums = [operators.synchronised_sums(*pair, whole, *options, *ALONE) for pair in pairs]
    total = sum(each for _, each in sums)
    assert total[-1] == x.numel() // shape[1]
    operands = weight, whole, total, *options
    results = [operators.synchronised_gradient(*pair, *operands) for pair in pairs]
    together = torch.cat([each.cpu() for each in results])
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("shape", "channels_last"), [*CASES, ((0, 5, 3), False)], ids=str)
def test_reproducible_sums_equal_those_of_the_cpu(shape, channels_last):
    x, dy, mean = torch.randn(shape) + 3, torch.randn(shape), torch.rand(shape[1])
    kind = torch.channels_last if channels_last else torch.contiguous_format
    operands = [each.contiguous(memory_format=kind) for each in (x, dy)]
    results = []
    for module, device in ((cpu, "cpu"), (engine, DEVICE)):
        x, dy = (each.to(device) for each in operands)
        moments, count = module.reduce("reduce_forward", (x,), EXACT)
        assert count == x.numel() // shape[1]
        sums, _ = module.reduce("reduce", (x, dy, None, mean.to(device)), EXACT)
        results.append((moments.cpu(), sums.cpu()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    moments = torch.cat((mean, mean, mean[:1])).double().to(DEVICE)
    plain, rounded = (
        torch.ops.backnorm.synchronised_sums(
            x, dy, moments, EPS, "float64", reproducible, "", None
        )[1]
        for reproducible in (False, True)
    )
    torch.testing.assert_close(rounded, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), -float("inf"), 0.0])
def test_reproducible_sums_of_special_values_equal_those_of_the_cpu(dtype, special):
    x, dy = (torch.randn(9, 4, 31, dtype=torch.float64) for _ in range(2))
    x, dy = (x * torch.logspace(-4, 4, 4, dtype=torch.float64)[:, None]).to(dtype), dy.to(dtype)
    if special is not None:
        x[3, 1, 7] = dy[5, 2, 1] = special
        dy[:, 3] = special
    mean = torch.linspace(-3, 3, 4, dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    bits = np.packbits((torch.rand(x.shape) > 0.4).numpy(), bitorder="little")
    mask = torch.from_numpy(np.pad(bits, (0, mask_size(x.numel()) - bits.size)))
    results = []
    for module, device in ((cpu, "cpu"), (engine, DEVICE)):
        ours = x.to(device)
        found = [module.reduce("reduce_forward", (ours,), EXACT)]
        for each in (None, mask.to(device)):
            operands = ours, dy.to(device), each, mean.to(device)
            found.append(module.reduce("reduce", operands, EXACT))
        results.append([(sums.cpu(), count) for sums, count in found])
    for (sums, count), (expected, expected_count) in zip(*results, strict=True):
        assert torch.equal(sums, expected)
        assert count == expected_count == 9 * 31
