"""Operations of PyTorch that random graphs put between layers.

Each one takes tensors of one shape, (N, C, ...) with two to five axes, and returns a tensor of that
shape. Together they save inputs, save results, return views, change a tensor in place, or hand
gradients on without a copy.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812

#: The bound of a ReLU with one; every type has it exactly.
CEILING = 0.75

#: Distances of elements from a kink of the function that was applied to them; None: not wanted.
_distances: list[float] | None = None


@contextlib.contextmanager
def distances() -> Iterator[list[float]]:
    """Collect the distance of the nearest element from a kink, for each call of a function."""
    global _distances
    _distances = []
    try:
        yield _distances
    finally:
        _distances = None


def _kink(t: Tensor, *places: float) -> Tensor:
    """Return t; note how near its elements are to the places where a derivative jumps.

    An element that lies on the place is not counted: a zero that another ReLU returned is exact.
    """
    if _distances is None or not t.numel():
        return t
    with torch.no_grad():
        values = t.detach()
        largest = values.abs().max().clamp(min=1.0)
        for place in places:
            away = (values - place).abs()
            _distances.append(float(torch.where(away > 0, away, torch.inf).min() / largest))
    return t


def activate(t: Tensor, activation: str | None, *, inplace: bool = False) -> Tensor:
    """Return t with an activation applied by PyTorch."""
    match activation:
        case "relu":
            return F.relu(_kink(t, 0.0), inplace=inplace)
        case "ceiling" | "relu6":
            ceiling = CEILING if activation == "ceiling" else 6.0
            return F.hardtanh(_kink(t, 0.0, ceiling), 0.0, ceiling, inplace=inplace)
        case "silu":
            return F.silu(t, inplace=inplace)
        case "hardswish":
            return F.hardswish(_kink(t, -3.0, 3.0), inplace=inplace)
    return t


def spread(t: Tensor) -> Tensor:
    """Return a copy of which every second element of wider memory is used."""
    wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
    wide[..., ::2] = t
    return wide[..., ::2]


def _swapped(t: Tensor, one: int, other: int) -> Tensor:
    """Return t with the same elements, in memory with two axes swapped."""
    return _contiguous(t.transpose(one, other)).transpose(one, other)


def _contiguous(t: Tensor) -> Tensor:
    """Return a contiguous copy: whether a tensor is one already may depend on the layer before."""
    return t.clone(memory_format=torch.contiguous_format)


def _channels_last(t: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if t.dim() in formats:
        return t.clone(memory_format=formats[t.dim()])
    return _swapped(t, 1, -1)


#: How a tensor lies in memory.
LAYOUTS = {
    "contiguous": _contiguous,
    "channels_last": _channels_last,
    "permuted": lambda t: _swapped(t, 0, -1),
    "spread": spread,
}


def _constants(like: Tensor, *shape: int) -> Tensor:
    """Return numbers between -0.6 and 0.6 that are the same in every call."""
    numbers = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).mul(1.7).sin() * 0.6
    return numbers.view(shape).to(like.dtype)


def _convolved(t: Tensor) -> Tensor:
    filters = _constants(t, t.shape[1], t.shape[1], *[3] * (t.dim() - 2))
    if t.dim() == 2:
        return F.linear(t, filters)
    return {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[t.dim()](t, filters, padding=1)


def _largest(t: Tensor) -> Tensor:
    if t.dim() == 2:
        return F.max_pool1d(t, 3, 1, 1)
    return {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[t.dim()](t, 3, 1, 1)


def _gathered(t: Tensor) -> Tensor:
    order = torch.arange(t.shape[1]).flip(0)
    return t.gather(1, order.view(-1, *[1] * (t.dim() - 2)).expand(t.shape))


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    _kink(a - b, 0.0)
    return torch.maximum(a, b)


#: Functions of one tensor.
UNARY = {
    "tanh": torch.tanh,
    "relu": lambda t: F.relu(_kink(t, 0.0)),
    "abs": lambda t: _kink(t, 0.0).abs(),
    "hardswish": lambda t: F.hardswish(_kink(t, -3.0, 3.0)),
    "silu": F.silu,
    "exp": lambda t: torch.exp(-t * t),
    "square": lambda t: (t * 0.4).square(),
    "sqrt": lambda t: torch.sqrt(1 + t * t),
    "softmax": lambda t: F.softmax(t, 1),
    "mul": lambda t: t * 1.5,
    "add": lambda t: t + 0.25,
    "clone": lambda t: t.clone(),
    "alias": lambda t: t,
    "view": lambda t: t.view(t.shape),
    "reshape": lambda t: _contiguous(t).flatten(1).view_as(t),
    "double transpose": lambda t: t.transpose(0, -1).transpose(0, -1),
    "slice": lambda t: t[:],
    "contiguous": _contiguous,
    "channels_last": _channels_last,
    "permuted": lambda t: _swapped(t, 0, -1),
    "spread": lambda t: F.pad(t.unsqueeze(-1), (0, 1))[..., 0],
    "detach": lambda t: t.detach() + t * 0.5,
    "expanded mean": lambda t: t.mean(0, keepdim=True).expand(t.shape),
    "cumsum": lambda t: t.cumsum(-1) * 0.4,
    "matmul": lambda t: t @ _constants(t, t.shape[-1], t.shape[-1]),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[1:]),
    "group_norm": lambda t: F.group_norm(t, 1),
    "conv": _convolved,
    "max_pool": _largest,
    "gather": _gathered,
    "masked_fill": lambda t: t.masked_fill(_constants(t, *t.shape) > 0.3, 0.75),
    "where": lambda t: torch.where(_constants(t, *t.shape) > 0.0, t, t * 0.3),
    "relu_": lambda t: F.relu_(_kink(t + 0, 0.0)),
    "add_": lambda t: t.mul(0.5).add_(1),
    "tanh_": lambda t: (t * 0.8).tanh_(),
    "silu_": lambda t: F.silu(t + 0.0, inplace=True),
    "copy_": lambda t: torch.empty_like(t).copy_(t),
    "filled": lambda t: t.clone().index_fill_(0, torch.tensor([0]), 0.5),
}

#: Functions of one tensor that draw random numbers; which ones must not depend on its layout.
RANDOM = {
    "dropout": lambda t: F.dropout(t.contiguous(), 0.4),
    "noise": lambda t: t + torch.randn(t.shape[1], dtype=t.dtype).view(-1, *[1] * (t.dim() - 2)),
}

#: Functions of two tensors.
BINARY = {
    "sum": torch.add,
    "product": lambda a, b: a * b * 0.5,
    "quotient": lambda a, b: a / (1 + b * b),
    "gate": lambda a, b: a * torch.sigmoid(b),
    "added to a copy": lambda a, b: a.clone().add_(b),
    "cat": lambda a, b: torch.cat((a, b), 1)[:, 1 : 1 + a.shape[1]],
    "maximum": _maximum,
    "mean of both": lambda a, b: (a + b.mean()) * 0.5,
}

#: Functions that change a tensor and return it.
IN_PLACE = {
    "t.mul_": lambda t: t.mul_(1.25),
    "t.add_": lambda t: t.add_(0.5),
    "t.tanh_": lambda t: t.tanh_(),
    "t.relu_": lambda t: F.relu_(_kink(t, 0.0)),
    "t.silu_": lambda t: F.silu(t, inplace=True),
    # A new tensor: a hook on one that was changed through a view of itself ends the process (2.13).
    "t[0].mul_": lambda t: (t[0].mul_(0.5), t)[1] * 1.0,
}


def _function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose derivative is written in Python. Both get the context first."""
    steps = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Custom", (Function,), steps).apply


def _changed(ctx: Any, t: Tensor) -> Tensor:
    ctx.mark_dirty(t)
    return t.mul_(0.75)


def _sum_and_difference(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    ctx.set_materialize_grads(False)
    return a + b, a - b


def _of_sum_and_difference(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Tensor, ...]:
    """Return the same tensor twice if the difference has no gradient."""
    if dz is None:
        return dy, dy
    return (dz, -dz) if dy is None else (dy + dz, dy - dz)


_both = _function(_sum_and_difference, _of_sum_and_difference)
_change = _function(_changed, lambda ctx, dy: dy * 0.75)

#: Functions of one tensor whose derivatives are written in Python.
CUSTOM = {
    "same dy": _function(lambda ctx, t: t.clone(), lambda ctx, dy: dy),
    "dx in another order": _function(
        lambda ctx, t: t * 1.0, lambda ctx, dy: dy.transpose(0, 1).contiguous().transpose(0, 1)
    ),
    "expanded dx": _function(
        lambda ctx, t: t.sum(0, keepdim=True).mul(0.5).expand(t.shape).contiguous(),
        lambda ctx, dy: dy.sum(0, keepdim=True).mul(0.5).expand(dy.shape),
    ),
    "dx of NumPy": _function(
        lambda ctx, t: t.clone(),
        lambda ctx, dy: torch.from_numpy(dy.double().numpy().copy()).to(dy.dtype),
    ),
    "changed in place": lambda t: _change(t * 1.0),
    "no dx": _function(lambda ctx, t: t.tanh(), lambda ctx, dy: None),
}

#: The same, of two tensors.
CUSTOM_OF_TWO = {
    "no first dx": _function(lambda ctx, a, b: a * 0.5 + b, lambda ctx, dy: (None, dy)),
    "sum of both": lambda a, b: _both(a, b)[0],
    "difference of both": lambda a, b: _both(a, b)[1],
}

#: Functions that are tried right behind a layer.
BEHIND = [*IN_PLACE, "no dx", "no first dx"]

#: The tables from which a step of a program takes an operation, each as often as it is here.
TABLES = [UNARY] * 20 + [BINARY] * 8 + [CUSTOM, CUSTOM, CUSTOM_OF_TWO] * 2 + [IN_PLACE, RANDOM]

_OF_ONE, _OF_TWO = UNARY | CUSTOM | IN_PLACE | RANDOM, BINARY | CUSTOM_OF_TWO


def call(name: str, one: Tensor, other: Tensor) -> Tensor:
    """Return the result of the operation of this name."""
    return _OF_TWO[name](one, other) if name in _OF_TWO else _OF_ONE[name](one)
