"""The front doors for PyTorch, as functions of arrays."""

from __future__ import annotations

from contextlib import nullcontext

import torch

import backnorm.torch
from backnorm.torch import library
from backnorm.torch.memory import array_of, tensor_of
from tests.contract.fronts import EPSILON

#: The results, by the operands that they are gradients of.
_GRADIENTS = {"x": "dx", "gamma": "dgamma", "beta": "dbeta", "residual": "dresidual"}


class _Front:
    """A step by autograd of a function of a dictionary of tensors."""

    operands = "tensors of PyTorch"

    def __init__(self, name, forward, **takes):
        self.name, self.forward, self.takes = name, forward, takes

    def refuses(self, case):
        # In steps of PyTorch's, y is rounded before a residual is added, and a ReLU keeps NaN.
        special = case["residual"] or case["elements"] == "non-finite"
        return case["activation"] and special and (case["reproducible"] or self.name == "func")

    def tensor(self, array):
        return tensor_of(array.copy())

    def numpy(self, tensor):
        return array_of(tensor.detach())

    def run(self, data, options, backward=nullcontext):
        tensors = {}
        for name, each in vars(data).items():
            if each is not None:
                tensors[name] = self.tensor(each)
                if each.ndim > 1:
                    tensors[name] = tensors[name].movedim(options.axis, 1)
        y, gradients = self.step(tensors, options, backward)
        found = {"y": y} | {_GRADIENTS[name]: each for name, each in gradients.items()}
        return {
            name: self.numpy(each.movedim(1, options.axis) if each.dim() > 1 else each)
            for name, each in found.items()
        }

    def step(self, tensors, options, backward):
        sources = {name: tensors[name].requires_grad_() for name in _GRADIENTS if name in tensors}
        y = self.forward(tensors, options)
        with backward():
            y.backward(tensors["dy"])
        return y, {name: each.grad for name, each in sources.items()}


def statistics_of(tensors, options):
    """Return running statistics, which are none in training."""
    return (None, None) if options.training else (tensors["mean"], tensors["variance"])


def by_function(tensors, options):
    return backnorm.torch.batch_norm(
        tensors["x"], *statistics_of(tensors, options), tensors.get("gamma"), tensors.get("beta"),
        options.training, eps=EPSILON, activation=options.activation,
        residual=tensors.get("residual"), arithmetic=options.arithmetic,
        reproducible=options.reproducible,
    )  # fmt: skip


def by_layer(tensors, options):
    """Call a layer; with a ReLU, the layer that has one."""
    name, more, residual = "BatchNorm", {}, []
    if options.activation is not None:
        name = "BatchNormReLU"
        more = {"ceiling": getattr(options.activation, "ceiling", None)}
        residual = [tensors["residual"]] if "residual" in tensors else []
    layer = getattr(backnorm.torch, f"{name}{max(tensors['x'].dim() - 2, 1)}d")(
        len(tensors["mean"]), eps=EPSILON, affine="gamma" in tensors,
        arithmetic=options.arithmetic, reproducible=options.reproducible, **more,
    ).train(options.training)  # fmt: skip
    layer.running_mean, layer.running_var = tensors["mean"], tensors["variance"]
    if "gamma" in tensors:
        del layer.weight, layer.bias
        layer.weight, layer.bias = tensors["gamma"], tensors["beta"]
    return layer(tensors["x"], *residual)


def by_operator(tensors, options):
    x, mean, variance, gamma, beta = map(tensors.get, ("x", "mean", "variance", "gamma", "beta"))
    if options.training:
        return library.batch_norm(x, gamma, beta, EPSILON, options.arithmetic)[0]
    return library.batch_norm_inference(x, gamma, beta, mean, variance, EPSILON, options.arithmetic)


class Transformed(_Front):
    """The same, differentiated by `torch.func.vjp`."""

    def step(self, tensors, options, backward):
        sources = {name: tensors[name] for name in _GRADIENTS if name in tensors}
        y, pull = torch.func.vjp(lambda each: self.forward(tensors | each, options), sources)
        with backward():
            (gradients,) = pull(tensors["dy"])
        return y, gradients


class ForwardMode(_Front):
    """Forward mode: the Jacobian of y by x is symmetric."""

    def step(self, tensors, options, backward):
        y, dx = torch.func.jvp(
            lambda x: self.forward(tensors | {"x": x}, options), (tensors["x"],), (tensors["dy"],)
        )
        return y, {"x": dx}


_TRANSFORMED = {"reproducible": [False]}
FRONTS = [
    _Front("function", by_function),
    _Front("layer", by_layer, absent=[(), ("gamma", "beta")]),
    # Its arithmetic is its argument's or that of its elements, whose type the dispatcher checks.
    _Front("operator", by_operator, block=[None], activation=[None], residual=[False],
           reproducible=[False], wrong=["a name"]),
    Transformed("func", by_function, **_TRANSFORMED),
    ForwardMode("func jvp", by_function, **_TRANSFORMED, activation=[None], residual=[False],
                backward_in=[None]),
]  # fmt: skip
