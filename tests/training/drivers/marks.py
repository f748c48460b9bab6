"""Times what lies between modules that take known times; prints seconds by stage as JSON."""

from __future__ import annotations

import json
import time

import torch
from torch import nn

from backnorm.training.wide_step import between, enclose


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_time = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.backward_time)
        return dy.clone(), None, None


class Norm(nn.Module):
    def __init__(self, forward, backward):
        super().__init__()
        self.times = forward, backward

    def forward(self, x):
        return Slow.apply(x, *self.times)


class Conv(nn.Conv2d):
    """A convolution that takes long itself, which must not count."""

    def forward(self, x):
        return Slow.apply(super().forward(x), 0.3, 0.3)


class Block(nn.Module):
    """Two branches, as a bottleneck with its shortcut has them."""

    def __init__(self, forward, backward):
        super().__init__()
        self.conv1, self.norm1 = Conv(1, 1, 1), Norm(forward, backward)
        self.downsample = nn.Sequential(Conv(1, 1, 1), Norm(forward, backward))

    def forward(self, x):
        return self.norm1(self.conv1(x)) + self.downsample(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = Conv(1, 1, 1), Norm(0.02, 0.03)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = Block(0.04, 0.01)
        self.layer2 = nn.Sequential(Conv(1, 1, 1), Norm(0.0, 0.06))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(1, 1)

    def forward(self, x):
        x = self.layer2(self.layer1(self.maxpool(self.norm1(self.conv1(x)))))
        x = Slow.apply(self.avgpool(x), 0.3, 0.3)
        return self.fc(torch.flatten(x, 1))


torch.manual_seed(0)
net, stamps = Net(), []
enclose(net, stamps)
net(torch.randn(2, 1, 4, 4)).square().sum().backward()
print(json.dumps(between(stamps)))
