"""Autograd adds the gradients of a tensor that is read twice in place, behind our layers too.

It does so where nothing but one tensor holds the storage of the first of them: any holder more, and
every block with a residual takes new memory and a pass more over it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import backnorm.torch
from backnorm.allocation import LARGE

CHANNELS = 16
SIZES = {"small": 6, "large": 96}
ADDITIONS = "aten::add", "aten::add_"


class Block(torch.nn.Module):
    """A residual block: what it reads has two gradients."""

    def __init__(self, activation, before):
        super().__init__()
        self.conv = torch.nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)
        self.bn = torch.nn.BatchNorm2d(CHANNELS)
        self.act, self.before = activation(), before

    def forward(self, x):
        if self.before:
            return self.conv(self.act(self.bn(x))) + x
        out = self.bn(self.conv(x))
        out += x
        return self.act(out)


def additions(model, x):
    """Return how many sums of gradients took new memory, and how many none, in a second step."""
    model(x).square().mean().backward()
    y = model(x).square().mean()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        y.backward()
    # Others are to the gradients of parameters.
    names = [e.name for e in found.events() if list(x.shape) in e.input_shapes[:1]]
    return [names.count(name) for name in ADDITIONS]


@pytest.mark.covering(1)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("activation", [torch.nn.ReLU, torch.nn.ReLU6, torch.nn.SiLU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
def test_gradients_of_residual_blocks_are_added_in_place(fuse, size, dtype, activation, before):
    model = torch.nn.Sequential(*[Block(activation, before) for _ in range(3)]).to(dtype)
    x = torch.randn(8, CHANNELS, SIZES[size], SIZES[size], dtype=dtype)
    assert (x.nbytes >= LARGE) is (size == "large")
    ours = copy.deepcopy(model)
    backnorm.torch.convert(ours, fuse=fuse)
    assert all(isinstance(block.bn, backnorm.torch.BatchNorm2d) for block in ours)
    # The first block's input needs no gradient: two blocks' inputs have two.
    assert additions(model, x) == additions(ours, x) == [0, 2]
