"""The phases apart: sums of parts of a batch add up, and apply takes the sums of all."""

from __future__ import annotations

import pytest
import torch

from backnorm.gpu.launch import BackwardLaunch
from backnorm.gpu.plan import plan_gpu
from backnorm.layout import extents_of
from backnorm.problem import problem_of
from backnorm.torch.kernels import backward, forward
from backnorm.torch.memory import order_of
from backnorm.torch.metadata import metadata

from ..interpreter import DEVICE


def launch_of(problem, x, device):
    plan = plan_gpu(problem, extents_of(problem.shape, (1,), order_of(x)), device)
    assert plan.schedule == "two passes"

    def new(count):
        # What is not written must not be read.
        return torch.full((count,), float("nan"), dtype=torch.float64, device=DEVICE)

    return BackwardLaunch(problem, plan, new)


@pytest.mark.parametrize("shape", [(40, 6, 9), (8, 5, 6, 7), (70, 3)], ids=str)
def test_sums_of_parts_add_up(shape, gpu):
    x, dy = torch.randn(shape), torch.randn(shape)
    weight = torch.rand(shape[1]) + 0.5
    _, mean, variance, *_ = forward(x, None, weight, None, 1e-5, None, False, "float64")
    expected, *_ = backward(x, dy, None, mean, variance, weight, 1e-5, True, False, "float64")
    x, dy, weight, mean, variance = (value.to(DEVICE) for value in (x, dy, weight, mean, variance))
    channel = metadata(weight)
    # Of unequal length, as of machines with unequal parts of a batch.
    cut = shape[0] // 3
    parts = [(x[:cut], dy[:cut]), (x[cut:], dy[cut:])]
    parts = [tuple(value.contiguous() for value in part) for part in parts]
    total = torch.zeros(2 * shape[1] + 1, dtype=torch.float64, device=DEVICE)
    for a, b in parts:
        problem = problem_of("reduce", metadata(a), metadata(b), channel)
        total += launch_of(problem, a, gpu).reduce((a, b, None, mean, None, None))
    assert total[-1] == x.numel() // shape[1]
    results = []
    for a, b in parts:
        problem = problem_of(
            "apply", metadata(a), metadata(b), channel, channel, channel, epsilon=1e-5
        )
        dx = torch.full_like(a, float("nan"))
        launch_of(problem, a, gpu).apply((a, b, None, mean, variance, weight), total, dx)
        results.append(dx.cpu())
    torch.testing.assert_close(torch.cat(results), expected, rtol=1e-6, atol=1e-7)
