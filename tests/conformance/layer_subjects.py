"""Modules of PyTorch, right ones, and wrong ones that their names describe."""

from __future__ import annotations

import torch
from torch import nn


class Right(nn.Module):
    """Batch normalisation by autograd, of tensors of any rank; subclasses are wrong in a step."""

    def __init__(self, channels, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_var", torch.ones(channels))

    def forward(self, x):
        axes = [0, *range(2, x.ndim)]
        mean, variance = self.moving_mean, self.moving_var
        if self.uses_batch:
            variance, mean = torch.var_mean(x, axes, correction=0)
            self.update(mean.detach(), variance.detach(), x.numel() // x.shape[1])
        gamma, beta, mean, variance = (
            each.reshape(1, -1, *[1] * (x.ndim - 2))
            for each in (self.gamma, self.beta, mean, variance)
        )
        return self.scaled((x - mean) * self.inverse(variance), gamma, beta)

    @property
    def uses_batch(self):
        return self.training

    def inverse(self, variance):
        return torch.rsqrt(variance + self.eps)

    def scaled(self, normalized, gamma, beta):
        return gamma * normalized + beta

    def update(self, mean, variance, count):
        self.moving_mean.lerp_(mean, self.momentum)
        self.moving_var.lerp_(variance * count / (count - 1), self.momentum)


class OtherOptions(Right):
    def __init__(self, channels):
        super().__init__(channels, eps=1e-3, momentum=0.3)


class WithoutGamma(Right):
    def scaled(self, normalized, gamma, beta):
        return normalized + beta


class WithoutParameters(Right):
    """A module that has no gamma and no beta, and does not say so by `affine`."""

    def __init__(self, channels):
        super().__init__(channels)
        del self.gamma, self.beta
        self.gamma, self.beta = torch.ones(channels), torch.zeros(channels)


class WithoutBeta(Right):
    def scaled(self, normalized, gamma, beta):
        return gamma * normalized


class WithoutBetaForEvenChannels(Right):
    def scaled(self, normalized, gamma, beta):
        return gamma * normalized + (beta.numel() % 2) * beta


class LargerEpsilon(Right):
    def inverse(self, variance):
        return torch.rsqrt(variance + 10 * self.eps)


class BiasedRunning(Right):
    def update(self, mean, variance, count):
        super().update(mean, variance * (count - 1) / count, count)


class KeepsRunning(Right):
    def update(self, mean, variance, count):
        pass


class SwappedMomentum(Right):
    def update(self, mean, variance, count):
        self.moving_mean.lerp_(mean, 1 - self.momentum)
        self.moving_var.lerp_(variance * count / (count - 1), 1 - self.momentum)


class BatchInEvaluation(Right):
    uses_batch = True


class RunningInTraining(Right):
    uses_batch = False


class RightFunction(torch.autograd.Function):
    """Batch normalisation with all arguments, by PyTorch's operators."""

    @staticmethod
    def forward(x, weight, bias, running_mean, running_var, training, momentum=0.3, eps=1e-3):
        return torch.native_batch_norm(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, *running, ctx.training, _, ctx.eps = inputs
        ctx.save_for_backward(x, weight, *running, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx, dy, *others):
        found = torch.ops.aten.native_batch_norm_backward(
            dy, *ctx.saved_tensors, ctx.training, ctx.eps, [True] * 3
        )
        return *found, *[None] * 5


class OfGroups(torch.autograd.Function):
    """A function with a parameter that batch normalisation has not."""

    @staticmethod
    def forward(ctx, x, weight, bias, groups):
        return x


class LacksProjectionFunction(torch.autograd.Function):
    """Batch normalisation in training, whose dx lacks the term of the variance."""

    @staticmethod
    def forward(ctx, x, gamma, beta):
        axes = [0, *range(2, x.ndim)]
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        s = torch.rsqrt(variance + 1e-5)
        normalized = (x - mean) * s
        ctx.save_for_backward(normalized, s * gamma.reshape(s.shape))
        return gamma.reshape(s.shape) * normalized + beta.reshape(s.shape)

    @staticmethod
    def backward(ctx, dy):
        normalized, gain = ctx.saved_tensors
        axes = [0, *range(2, dy.ndim)]
        dx = gain * (dy - dy.mean(axes, keepdim=True))
        return dx, (dy * normalized).sum(axes), dy.sum(axes)


class LacksProjection(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return LacksProjectionFunction.apply(x, self.weight, self.bias)


# The channels of a case come in groups of 4 channels.
instance = Right(4)
