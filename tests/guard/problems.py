"""Problems of the package's own functions, made from a seed: arrays, options, what to call."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from memory import ENDS
from operands import LAYOUTS, Operand, channel_values, data_values, laid_out, some_shape

import backnorm
from backnorm.activations import Activation
from backnorm.arithmetics import own_arithmetic
from backnorm.conformance import judge
from backnorm.dtypes import ELEMENT_TYPES, statistics_types
from backnorm.executable import compute
from backnorm.layout import mask_size, memory_order, order_mark
from backnorm.options import Options

__all__ = ["Maker", "Problem", "of_package", "some_arithmetic"]

Arrays = dict[str, Any]

#: The operand that is the memory for the first result.
OUT = "out"

_MIB = 1 << 20
_BYTE = np.dtype(np.uint8)


@dataclass
class Problem:
    """A call, with the arrays that it takes.

    Attributes
    ----------
    seed : int
    operands : dict of str to Operand
    call : callable
        From arrays by name to the arrays that come of it.
    verdicts : callable or None
        From arrays by name, and what came of the call, to the judge's verdicts.
    tags : dict of str to str
        What the problem is of, to count.
    expected : callable or None
        What gives the results in plain memory, if not `call`.
    ends : tuple of str
        Where arrays lie in guarded memory, one call after the other.
    threads : int
    caches : (int, int)
        Of the machine that is planned for.
    forces : bool
        Whether another plan is followed than the one that is made.
    """

    seed: int
    operands: dict[str, Operand]
    call: Callable[[Arrays], tuple[Any, ...]]
    verdicts: Callable[[Arrays, tuple[Any, ...]], dict[str, Any]] | None
    tags: dict[str, str]
    expected: Callable[[Arrays], tuple[Any, ...]] | None = None
    ends: tuple[str, ...] = ENDS[:1]
    threads: int = 1
    caches: tuple[int, int] = (0, 0)
    forces: bool = False


@dataclass
class Maker:
    """The random choices of a problem.

    Attributes
    ----------
    rnd : random.Random
    values : str
        What values of arrays are like: see `operands.data_values`.
    layout : str
        How arrays of x's shape lie: see `operands.LAYOUTS`.
    operands, tags
        See `Problem`.
    target : str
        The name of the array that is passed as `out`, if there is one.
    """

    rnd: random.Random
    values: str = "usual"
    layout: str = "rows"
    operands: dict[str, Operand] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    target: str = OUT

    def begin(self) -> None:
        """Choose what values are like, and how data lies."""
        self.values = self.rnd.choices(("usual", "wide", "unusual"), (65, 20, 15))[0]
        self.layout = self.rnd.choices(tuple(LAYOUTS), tuple(LAYOUTS.values()))[0]
        self.tags |= {"values": self.values, "layout": self.layout}

    def data(self, name: str, shape: tuple[int, ...], dtype: np.dtype, *, like_x: bool) -> None:
        """Add an array of x's shape."""
        if like_x and "x" in self.operands and self.rnd.random() < 0.7:
            x = self.operands["x"]
            count, offset, strides = x.content.size, x.offset, x.strides
        else:
            count, offset, strides = laid_out(self.rnd, shape, self.layout)
        content = data_values(self.rnd, dtype, count, self.values)
        self.operands[name] = Operand(shape, dtype, content, offset, strides)

    def channels(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, *, positive: bool = False
    ) -> None:
        """Add an array of a value a channel."""
        layout = "rows" if self.rnd.random() < 0.85 else "mixed"
        count, offset, strides = laid_out(self.rnd, shape, layout)
        content = channel_values(self.rnd, dtype, count, self.values, positive=positive)
        self.operands[name] = Operand(shape, dtype, content, offset, strides)

    def out(self, dtype: np.dtype, *, overwrites: str | None = None) -> None:
        """Add memory for the first result, or not, or let it be the operand that it may be."""
        x, kind = self.operands["x"], self.rnd.random()
        if kind < 0.5:
            self.tags["out"] = "none"
            return
        if overwrites is not None and kind < 0.6:
            self.writable(overwrites)
            self.target, self.tags["out"] = overwrites, "in place"
            return
        layout = "rows" if kind < 0.85 else self.rnd.choice(tuple(LAYOUTS))
        count, offset, strides = laid_out(self.rnd, x.shape, layout)
        self.memory(OUT, Operand(x.shape, dtype, np.full(count, np.nan, dtype), offset, strides))
        self.tags["out"] = layout

    def memory(self, name: str, operand: Operand) -> None:
        """Add an array that is written to."""
        self.operands[name] = operand
        self.writable(name)

    def writable(self, name: str) -> None:
        """Let an operand be written to."""
        one = self.operands[name]
        self.operands[name] = Operand(
            one.shape, one.dtype, one.content, one.offset, one.strides, read_only=False
        )

    def often(self, share: float) -> bool:
        """Return True in so large a share of the problems."""
        return self.rnd.random() < share

    def finished(self, seed: int, call: Any, verdicts: Any = None) -> Problem:
        """Return the problem of what was chosen."""
        rnd = self.rnd
        threads = rnd.choice((1, 1, 2, 3, 4))
        self.tags["threads"] = str(threads)
        return Problem(
            seed, self.operands, call, verdicts, self.tags,
            ends=tuple(rnd.sample(ENDS, 2)),
            threads=threads,
            caches=rnd.choice(((0, 0), (1 << 15, 1 << 17), (_MIB, 32 * _MIB), (1 << 40, 1 << 40))),
            forces=rnd.random() < 0.2,
        )  # fmt: skip


# How often: a pass of the package's own, and what it has beside x.
_KINDS = {
    "forward": 15, "relu forward": 14, "running": 4, "inference": 6, "relu inference": 8,
    "backward": 15, "relu backward": 20, "frozen": 9, "double_backward": 2,
    "phases": 7, "relu phases": 5, "forward phases": 5, "relu forward phases": 5,
}  # fmt: skip


def of_package(seed: int, rnd: random.Random) -> Problem:
    """Return the problem of one of the package's own functions."""
    make = Maker(rnd)
    make.begin()
    kind = rnd.choices(tuple(_KINDS), tuple(_KINDS.values()))[0]
    shape, data_format = some_shape(rnd)
    dtype = rnd.choice(ELEMENT_TYPES)
    statistics = rnd.choice(statistics_types(dtype))
    make.tags |= {
        "operation": kind, "type": str(dtype), "statistics": str(statistics),
        "format": data_format if isinstance(data_format, str) else "axes",
        "rank": str(len(shape)), "dialect": "ours",
    }  # fmt: skip
    axes = data_format
    if isinstance(axes, str):
        axes = (1,) if axes == "NCX" else (len(shape) - 1,)
    channels = (math.prod(shape[axis] for axis in axes),)
    epsilon = rnd.choice((1e-5, 1e-3, 0.0, 1.0))
    options: dict[str, Any] = {"epsilon": epsilon, "data_format": data_format}
    if kind != "double_backward":
        options["arithmetic"] = some_arithmetic(make, dtype)
    make.data("x", shape, dtype, like_x=False)
    build = _backward
    if "forward" in kind or kind == "running":
        build = _forward
    elif "inference" in kind:
        build = _inference
    call, verdicts = build(make, kind, shape, dtype, channels, statistics, options)
    # The oracle has the two formats that have a name.
    return make.finished(seed, call, verdicts if isinstance(data_format, str) else None)


def some_arithmetic(make: Maker, dtype: np.dtype) -> str:
    """Return what to compute in, and tag it."""
    chosen = own_arithmetic(dtype)
    if dtype != np.float64 and make.often(0.4):
        chosen = "float32" if chosen == "float64" else "float64"
    make.tags["arithmetic"] = f"{dtype} in {chosen}"
    return chosen


def _some_sums(make: Maker) -> dict[str, Any]:
    """Return how sums are to be made, and tag it."""
    reproducible = make.often(0.25)
    make.tags["sums"] = "reproducible" if reproducible else "usual"
    return {"reproducible": True} if reproducible else {}


def _parameters(make: Maker, channels: tuple[int, ...], dtype: np.dtype, *names: str) -> None:
    for name in names:
        if make.often(0.85):
            make.channels(name, channels, dtype)


def _relu(
    make: Maker, kind: str, shape: tuple[int, ...], dtype: np.dtype, options: dict[str, Any]
) -> None:
    """Let a ReLU follow, with or without a residual and a ceiling."""
    if kind.startswith("relu"):
        options["activation"] = _some_relu(make)
        if make.often(0.5):
            make.data("residual", shape, dtype, like_x=True)


def _some_relu(make: Maker) -> Activation:
    """Return a ReLU, with a ceiling that every type has exactly, or without one."""
    return Activation("relu", make.rnd.choice((None, None, 0.5, 6.0)))


def _forward(
    make: Maker, kind: str, shape: Any, dtype: Any, channels: Any, statistics: Any, options: Any
) -> tuple[Any, Any]:
    if kind == "running":
        return _running(make, shape, dtype, channels, statistics, options)
    _parameters(make, channels, statistics, "gamma", "beta")
    _relu(make, kind, shape, dtype, options)
    make.out(dtype, overwrites="x")
    sums = _some_sums(make)

    def call(arguments: Arrays) -> tuple[Any, ...]:
        arguments = arguments | {OUT: arguments.get(make.target)}
        if not kind.endswith("phases"):
            return tuple(backnorm.batch_norm_forward(**arguments, **options, **sums))
        settings = {name: options[name] for name in ("data_format", "arithmetic")}
        moments = backnorm.reduce_forward(arguments["x"], **settings, **sums)
        return tuple(backnorm.apply_forward(**arguments, moments=moments, **options))

    def verdicts(arguments: Arrays, results: tuple[Any, ...]) -> dict[str, Any]:
        inputs = arguments["x"], arguments.get("gamma"), arguments.get("beta"), results
        mean, variance = (np.asarray(each, np.float64) for each in results[1:3])
        if sums and not (variance >= 2.0**-40 * np.square(mean)).all():
            # Reproducible sums have no pivot: what is less is not the exact variance to an ulp.
            return {}
        return judge.check_forward(*inputs, residual=arguments.get("residual"), **options)

    return call, verdicts


def _running(
    make: Maker, shape: Any, dtype: Any, channels: Any, statistics: Any, options: Any
) -> tuple[Any, Any]:
    """Return the forward pass of a layer, which moves running statistics."""
    _parameters(make, channels, statistics, "gamma", "beta")
    relu = make.often(0.4)
    if relu and make.often(0.5):
        make.data("residual", shape, dtype, like_x=True)
    activation = _some_relu(make) if relu else None
    for name in ("running_mean", "running_variance"):
        values = channel_values(
            make.rnd, statistics, channels[0], make.values, positive=name != "running_mean"
        )
        make.memory(name, Operand(channels, statistics, values))
    make.out(dtype, overwrites="x")
    momentum = make.rnd.choice((0.1, 1.0, 0.0))
    names = "x", "residual", "gamma", "beta", "running_mean", "running_variance"

    def call(arguments: Arrays) -> tuple[Any, ...]:
        operands = tuple(arguments.get(name) for name in names)
        known = Options(**options, activation=activation)
        results = compute("forward", operands, known, arguments.get(make.target), momentum=momentum)
        moved = arguments["running_mean"], arguments["running_variance"]
        return (*(one for one in results if one is not None), *moved)

    def verdicts(arguments: Arrays, results: tuple[Any, ...]) -> dict[str, Any]:
        inputs = arguments["x"], arguments.get("gamma"), arguments.get("beta")
        added = {"residual": arguments.get("residual"), "activation": activation}
        # The running statistics are last.
        return judge.check_forward(*inputs, results[:-2], **added, **options)

    return call, verdicts


def _inference(
    make: Maker, kind: str, shape: Any, dtype: Any, channels: Any, statistics: Any, options: Any
) -> tuple[Any, Any]:
    make.channels("mean", channels, statistics)
    make.channels("variance", channels, statistics, positive=True)
    _parameters(make, channels, statistics, "gamma", "beta")
    _relu(make, kind, shape, dtype, options)
    make.out(dtype, overwrites="x")

    def call(arguments: Arrays) -> tuple[Any, ...]:
        arguments = arguments | {OUT: arguments.get(make.target)}
        return (backnorm.batch_norm_inference(**arguments, **options),)

    def verdicts(arguments: Arrays, results: tuple[Any, ...]) -> dict[str, Any]:
        names = "x", "mean", "variance", "gamma", "beta"
        inputs = *(arguments.get(name) for name in names), results[0]
        return judge.check_inference(*inputs, residual=arguments.get("residual"), **options)

    return call, verdicts


def _backward(
    make: Maker, kind: str, shape: Any, dtype: Any, channels: Any, statistics: Any, options: Any
) -> tuple[Any, Any]:
    make.data("dy", shape, dtype, like_x=True)
    make.channels("mean", channels, statistics)
    make.channels("variance", channels, statistics, positive=True)
    _parameters(make, channels, statistics, "gamma")
    options["training"] = kind != "frozen" and make.often(0.8)
    if kind == "double_backward":
        return _second(make, shape, dtype, channels, statistics, options)
    more: dict[str, Any] = {}
    if kind.startswith("relu"):
        size = mask_size(math.prod(shape))
        mark = order_mark(shape, memory_order(make.operands["x"].plain()))
        mask = np.frombuffer(make.rnd.randbytes(size - len(mark)) + mark, np.uint8)
        make.operands["mask"] = Operand((size,), _BYTE, mask)
        more["residual"] = make.often(0.5)
    if kind.endswith("phases"):
        return _phases(make, dtype, options, more)
    make.out(dtype, overwrites="dy")
    settings = more | _some_sums(make)

    def call(arguments: Arrays) -> tuple[Any, ...]:
        out = arguments.get(make.target)
        return tuple(
            backnorm.batch_norm_backward(**(arguments | {OUT: out}), **options, **settings)
        )

    def verdicts(arguments: Arrays, results: tuple[Any, ...]) -> dict[str, Any]:
        inputs = (
            *(arguments[name] for name in ("x", "dy", "mean", "variance")),
            arguments.get("gamma"),
        )
        return judge.check_backward(*inputs, results, mask=arguments.get("mask"), **more, **options)

    return call, verdicts


def _phases(
    make: Maker, dtype: np.dtype, options: dict[str, Any], more: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the two phases of a backward pass as calls of their own."""
    make.out(dtype, overwrites="dy")
    names = "x", "dy", "mean", "variance"
    of_sums = _some_sums(make)

    def call(arguments: Arrays) -> tuple[Any, ...]:
        out = arguments.get(make.target)
        inputs = [arguments[name] for name in names]
        settings = {name: options[name] for name in ("data_format", "arithmetic")}
        mask = arguments.get("mask")
        sums: Any = backnorm.reduce(*inputs[:3], mask=mask, **settings, **of_sums)
        written = backnorm.apply(
            *inputs, arguments.get("gamma"), sums, mask=mask, out=out, **options, **more
        )
        dx, *others = written if isinstance(written, tuple) else (written,)
        sums = sums.rounded() if of_sums else sums
        return dx, sums.sum_dy, sums.sum_dy_xmu, *others

    def verdicts(arguments: Arrays, results: tuple[Any, ...]) -> dict[str, Any]:
        inputs = *(arguments[name] for name in names), arguments.get("gamma")
        mask = arguments.get("mask")
        dgamma, dbeta = backnorm.batch_norm_backward(*inputs, mask=mask, **options)[1:3]
        found = results[0], dgamma, dbeta, *results[3:]
        return judge.check_backward(*inputs, found, mask=mask, **more, **options)

    return call, verdicts


def _second(
    make: Maker, shape: Any, dtype: Any, channels: Any, statistics: Any, options: Any
) -> tuple[Any, Any]:
    """Return the gradients of the backward pass."""
    if make.often(0.7):
        make.data("ddx", shape, dtype, like_x=True)
    _parameters(make, channels, statistics, "ddgamma", "ddbeta")

    def call(arguments: Arrays) -> tuple[Any, ...]:
        return tuple(backnorm.batch_norm_double_backward(**arguments, **options))

    def verdicts(arguments: Arrays, results: tuple[Any, ...]) -> dict[str, Any]:
        if not all(np.isfinite(array.astype(float)).all() for array in arguments.values()):
            # What comes of infinity depends on the order of the terms, and on which are absent.
            return {}
        inputs = (
            *(arguments[name] for name in ("x", "dy", "mean", "variance")),
            arguments.get("gamma"),
        )
        cotangents = {name: arguments.get(name) for name in ("ddx", "ddgamma", "ddbeta")}
        return judge.check_double_backward(*inputs, results, **cotangents, **options)

    return call, verdicts
