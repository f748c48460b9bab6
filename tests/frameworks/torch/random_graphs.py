"""Random graphs in which our layers stand between other operations, beside PyTorch's layers.

`draw(seed)` returns a `Program`: what is computed, what is watched, and how it is differentiated.
`judge(program)` runs it with PyTorch's layers in float64 and with ours, and says what differs.
``python -m tests.frameworks.torch.random_graphs SEED ...`` prints programs and what differs.

What is compared: results, kept tensors and gradients as they are after the last backward pass,
gradients of inputs and parameters, which of them are None, running statistics and counters.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import backnorm.torch
from backnorm.activations import Activation

from . import random_operations as operations

__all__ = [
    "FIRST_OF_INDUCTOR",
    "PLANS",
    "PURE_PLANS",
    "Layer",
    "Program",
    "Step",
    "Verdict",
    "draw",
    "judge",
]

#: The bound of a ReLU with one; every type has it exactly.
CEILING = 0.75

#: The first seed whose program may be compiled by Inductor.
FIRST_OF_INDUCTOR = 1000

#: Gradients in one batched backward pass, or inputs of a mapped function.
BATCH = 2


@dataclass(frozen=True)
class Layer:
    """A normalisation, maybe with an addition and an activation behind it."""

    number: int
    #: "module", "converted", "function", or "sequential" with several modules.
    form: str
    activation: str | None
    residual: bool
    #: "training", "evaluation", or "frozen": evaluation without gradients of weight and bias.
    mode: str
    #: Which of weight and bias there are.
    parameters: str
    momentum: float | None
    #: Whether there are running statistics.
    tracked: bool
    #: What a hook of the module does.
    hook: str | None = None
    #: The modules of a "sequential".
    children: tuple[str, ...] = ()
    #: Whether activations of a "sequential" change their input.
    inplace: bool = False

    def __str__(self) -> str:
        name = "[" + " ".join(self.children) + "]" if self.children else "norm"
        name += "".join(f" {part}" for part in (self.residual and "add", self.activation) if part)
        if self.inplace:
            name += " inplace"
        settings = [self.form, self.mode]
        if self.parameters != "both":
            settings.append(f"parameters={self.parameters}")
        settings.append(f"momentum={self.momentum}" if self.tracked else "untracked")
        if self.hook:
            settings.append(f"hook={self.hook}")
        return f"L{self.number}:{name} ({', '.join(settings)})"


@dataclass(frozen=True)
class Step:
    """A chain of calls on two earlier values; the first call has both, the others the second."""

    calls: tuple[Layer | str, ...]
    inputs: tuple[int, int]
    #: What the calls run under: a checkpoint, hooks of saved tensors, no gradients.
    scope: str | None = None
    #: What is done with the result: kept, or its gradient kept or changed.
    watches: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = " > ".join(map(str, self.calls)) + f" of v{self.inputs[0]}, v{self.inputs[1]}"
        if self.scope:
            text += f" under {self.scope}"
        if self.watches:
            text += f", watched: {', '.join(self.watches)}"
        return text


@dataclass(frozen=True)
class Program:
    """A random graph, and how it is differentiated."""

    seed: int
    dtype: torch.dtype
    #: The type of weights and statistics.
    parameter_dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    #: How the gradient of a result lies in memory.
    dy_layout: str
    #: Whether the input is a leaf of the graph, as layers have it in the first place.
    direct: bool
    needs_gradient: bool
    steps: tuple[Step, ...]
    #: How many of the last values are results.
    results: int
    #: What hooks of saved tensors do in the whole forward pass.
    packing: str | None
    plan: str
    #: The backend of `torch.compile`.
    backend: str | None

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        if self.parameter_dtype is not self.dtype:
            kind += f" (parameters {str(self.parameter_dtype).removeprefix('torch.')})"
        head = f"seed {self.seed}: {kind} {self.shape} {self.layout}, dy {self.dy_layout}"
        flags = {
            "leaf": self.direct,
            "constant": not self.needs_gradient,
            f"packing={self.packing}": self.packing,
            f"backend={self.backend}": self.backend,
        }
        head += "".join(f", {name}" for name, said in flags.items() if said)
        steps = "; ".join(f"v{k + 1} = {step}" for k, step in enumerate(self.steps))
        return f"{head}; {steps}; {self.plan} of the last {self.results}"

    @property
    def layers(self) -> list[Layer]:
        """All layers, in the order of their numbers."""
        return [call for step in self.steps for call in step.calls if isinstance(call, Layer)]


# Drawing a program.

#: How a program is differentiated, and how often.
PLANS = {
    "backward": 30,
    "loss": 12,
    "repeated": 8,
    "accumulated": 8,
    "some inputs": 4,
    "grad": 8,
    "second": 10,
    "batched": 7,
    "batched second": 4,
    "third": 2,
}

#: The order of the derivatives, where it is not the first.
_ORDERS = {"second": 2, "batched second": 2, "third": 3}

#: Those of `torch.func`, of functions without any effect.
PURE_PLANS = {"vjp": 2, "jvp": 2, "mapped": 1, "mapped gradients": 1}

#: A backend of `torch.compile` takes half a second a program, Inductor ten.
_BACKENDS = {None: 972, "eager": 13, "aot_eager": 13, "inductor": 2}

_FIRST_ORDER = "backward", "loss", "repeated", "accumulated", "some inputs", "grad"

_SCOPES = {
    None: 84,
    "checkpoint": 4,
    "reentrant checkpoint": 3,
    "forgetful checkpoint": 1.5,
    "no_grad": 1.5,
    "packing=clone": 1,
    "packing=numpy": 1,
    "packing=layout": 1,
}

#: Hooks that pack a tensor as itself: autograd does not notice when it is changed later.
_UNCHECKED = "identity", "cpu"

_PACKINGS = {None: 80, "identity": 3, "clone": 3, "numpy": 6, "layout": 5, "cpu": 3}

_ACTIVATIONS = {None: 40, "relu": 24, "ceiling": 14, "silu": 13, "hardswish": 9}

_CHILDREN = (
    ("norm", "relu"),
    ("norm", "relu6"),
    ("norm", "silu"),
    ("norm", "hardswish"),
    ("norm", "identity", "relu"),
    ("norm", "relu", "norm", "silu"),
    ("conv", "norm", "relu", "conv", "norm"),
    ("norm", "tanh", "norm", "relu6"),
    ("conv", "norm", "silu", "norm"),
)


def _any(rng: random.Random, weights: dict[Any, float]) -> Any:
    """Return one of the keys."""
    return rng.choices(list(weights), list(weights.values()))[0]


def _shape(rng: random.Random) -> tuple[int, ...]:
    """Return a shape of two to five axes with a few dozen elements."""
    channels = rng.choice((1, 2, 3, 4, 5, 6, 7))
    match _any(rng, {2: 15, 3: 25, 4: 45, 5: 15}):
        case 2:
            shape = rng.randint(3, 9), channels
        case 3:
            shape = rng.randint(1, 4), channels, rng.randint(4, 9)
        case 4:
            shape = rng.randint(1, 4), channels, rng.randint(2, 5), rng.randint(2, 5)
        case _:
            shape = rng.randint(1, 3), channels, 2, rng.randint(1, 3), rng.randint(2, 3)
    if rng.random() < 0.005:
        # One value in a channel, which training refuses.
        shape = 1, channels, *[1] * (len(shape) - 2)
    return shape


class _Drawing:
    """Draws the steps of one program."""

    def __init__(
        self, rng: random.Random, rank: int, backend: str | None, plan: str, packing: str | None
    ) -> None:
        self.rng, self.backend, self.plan = rng, backend, plan
        # What is composed saves other tensors.
        self.in_place = packing not in _UNCHECKED and plan != "third"
        self.pure = plan in PURE_PLANS
        # Compiled and pure functions do nothing but compute.
        self.plain = self.pure or backend is not None
        # Those of a batched backward pass cannot be kept.
        self.keeps = "batched" not in plan
        self.layers = 0
        # Attention may draw random numbers, which mapped functions must not.
        self.unary = [
            name
            for name in operations.UNARY
            if operations.SMALLEST_RANK.get(name, 0) <= rank
            and (name, self.pure) != ("attention", True)
        ]
        self.rank = rank

    def layer(self, first_of_chain: bool) -> Layer:
        """Return a random layer."""
        rng, activation = self.rng, _any(self.rng, _ACTIVATIONS)
        forms = {"module": 35, "converted": 10, "function": 35, "sequential": 20}
        form = "function" if self.pure else _any(rng, forms)
        children: tuple[str, ...] = ()
        if form == "sequential":
            choices = [each for each in _CHILDREN if self.rank > 2 or "conv" not in each]
            children, activation = rng.choice(choices), None
        elif form == "converted":
            activation = None
        elif form == "module" and activation in ("silu", "hardswish"):
            activation = "relu"
        residual = first_of_chain and activation in ("relu", "ceiling") and rng.random() < 0.4
        function = form == "function"
        # PyTorch's second derivative of a function with a bias and without a weight raises.
        bias = function and self.plan not in _ORDERS
        parameters = _any(rng, {"both": 75, "none": 15, "weight": 5 * function, "bias": 5 * bias})
        mode = _any(rng, {"training": 70, "evaluation": 20, "frozen": 10})
        tracked = mode != "training" or (not self.pure and rng.random() < 0.7)
        if not function and mode != "training":
            tracked = rng.random() < 0.9
        self.layers += 1
        return Layer(
            number=self.layers - 1,
            form=form,
            activation=activation,
            residual=residual,
            mode=mode,
            parameters=parameters,
            momentum=rng.choice((0.1, 0.4) if function else (0.1, 0.4, None)),
            tracked=tracked,
            hook=self.hook() if form != "function" else None,
            children=children,
            inplace=form == "sequential" and rng.random() < 0.4,
        )

    def hook(self) -> str | None:
        """Return what a hook of a module does."""
        if self.plain:
            return None
        return _any(self.rng, {
            None: 80, "keep the result": 4, "change the result": 4, "change gradients": 4,
            "change dy": 3, "keep gradients": 5 * self.keeps,
        })  # fmt: skip

    def operation(self) -> str:
        """Return the name of an operation that is no layer."""
        kinds = {"unary": 60, "binary": 25, "custom": 15 * (not self.pure)}
        if not self.plain:
            kinds |= {"in place": 3 * self.in_place, "random": 3}
        match _any(self.rng, kinds):
            case "unary":
                return self.rng.choice(self.unary)
            case "binary":
                return self.rng.choice(list(operations.BINARY))
            case "custom":
                names = [
                    each for each in operations.CUSTOM
                    if not (self.plain and each in ("Copied", "Changed"))
                ]  # fmt: skip
                return self.rng.choice(names)
            case "in place":
                return self.rng.choice(list(operations.IN_PLACE))
        return self.rng.choice(list(operations.RANDOM))

    def step(self, values: int, last: Step | None) -> Step:
        """Return a step that has some of the last values."""
        rng = self.rng
        recent = range(max(0, values - 3), values)
        inputs = rng.choice(recent), rng.choice(recent)
        if last is not None and isinstance(last.calls[-1], Layer) and not self.plain:
            # What comes right behind a layer is where most can go wrong.
            chance = rng.random()
            hook = last.calls[-1].hook or ""
            if chance < 0.1 and self.in_place and not ("gradients" in hook or "dy" in hook):
                return Step((rng.choice(list(operations.IN_PLACE)),), (values - 1, values - 1))
            if chance < 0.15:
                return Step((rng.choice(("Stops", "StopsFirst")),), (values - 1, inputs[1]))
        scope = None if self.plain else _any(rng, _SCOPES)
        if scope == "reentrant checkpoint" and self.plan not in ("backward", "loss", "accumulated"):
            # It takes nothing but `backward`.
            scope = "checkpoint"
        if scope == "forgetful checkpoint" and self.plan in _ORDERS:
            # Each derivative has random numbers of its own.
            scope = "checkpoint"
        calls: list[Layer | str] = []
        if scope is None:
            calls.append(self.layer(True) if rng.random() < 0.45 else self.operation())
        else:
            calls.extend(
                self.layer(k == 0) if rng.random() < 0.6 else self.operation()
                for k in range(rng.randint(1, 3))
            )
            if scope == "forgetful checkpoint":
                calls = [rng.choice(list(operations.RANDOM)), *calls, self.layer(False)]
        return Step(tuple(calls), inputs, scope, self.watches())

    def watches(self) -> tuple[str, ...]:
        """Return what is done with a result."""
        if self.plain:
            return ()
        chances = {"hold": 0.12, "change": 0.05}
        if self.keeps:
            chances |= {"keep": 0.12, "retain": 0.06, "prehook": 0.04}
        return tuple(name for name, chance in chances.items() if self.rng.random() < chance)


def draw(seed: int) -> Program:
    """Return the program of a seed. Those of seeds below `FIRST_OF_INDUCTOR` are compiled fast."""
    rng = random.Random(seed)
    backend = _any(rng, _BACKENDS)
    if backend == "inductor" and seed < FIRST_OF_INDUCTOR:
        backend = None
    plans: dict[str, float] = PLANS | PURE_PLANS
    if backend:
        # Compiled graphs have one backward pass, of one gradient.
        plans = {name: share for name, share in PLANS.items() if name in _FIRST_ORDER}
    plan = _any(rng, plans)
    pure = plan in PURE_PLANS
    shape = _shape(rng)
    dtype = _any(rng, {torch.float64: 88, torch.float32: 8, torch.bfloat16: 4})
    mixed = dtype is torch.bfloat16 and rng.random() < 0.5
    packing = None if pure else _any(rng, _PACKINGS)
    drawing = _Drawing(rng, len(shape), backend, plan, packing)
    steps: list[Step] = []
    for k in range(rng.randint(2, 5 if backend else 9)):
        steps.append(drawing.step(k + 1, steps[-1] if steps else None))
    if not drawing.layers:
        steps.append(Step((drawing.layer(True),), (len(steps), len(steps))))
    return Program(
        seed=seed,
        dtype=dtype,
        parameter_dtype=torch.float32 if mixed else dtype,
        shape=shape,
        layout=_any(rng, {"contiguous": 40, "channels_last": 30, "permuted": 20, "spread": 10}),
        dy_layout=_any(rng, {"contiguous": 60, "channels_last": 15, "permuted": 15, "spread": 10}),
        direct=rng.random() < 0.3,
        needs_gradient=pure or rng.random() < 0.9,
        steps=tuple(steps),
        results=rng.randint(1, 3),
        packing=packing,
        plan=plan,
        backend=backend,
    )


# Layers.


def _unflattened(y: Tensor, x: Tensor) -> Tensor:
    """Return y in the shape of x; it is no view, as what a layer returns is none."""
    return torch.ops.aten._unsafe_view(y, x.shape)


class _Flat(nn.Module):
    """A layer of PyTorch of a batch of one sample, whose axes behind the channels are one.

    With strides of the first axis that a new tensor does not have, which views and hooks make,
    PyTorch 2.13 takes such a batch of images for one in channels_last, and returns other gradients.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return _unflattened(self.norm(x.flatten(2)), x)


def _composed(x: Tensor, mean: Tensor | None, variance: Tensor | None, *affine: Any) -> Tensor:
    """Return a normalisation by operations; without statistics, by those of the batch.

    The third derivative of PyTorch's own function is wrong in 2.13.
    """
    axes = 0, *range(2, x.dim())
    channels = 1, -1, *[1] * (x.dim() - 2)
    if mean is None or variance is None:
        mean = x.mean(axes, keepdim=True)
        variance = (x - mean).square().mean(axes, keepdim=True)
    y = (x - mean.view(channels)) / torch.sqrt(variance.view(channels) + 1e-5)
    weight, bias = affine
    y = y if weight is None else y * weight.view(channels)
    y = y if bias is None else y + bias.view(channels)
    # Parameters may be of float32 beside 16 bits.
    return y.to(x.dtype)


class _Composed(nn.Module):
    """A layer of PyTorch, whose result is composed."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        with torch.no_grad():
            # It counts, moves statistics, and raises.
            norm(x.detach())
        operands = (None, None) if norm.training else (norm.running_mean, norm.running_var)
        return _composed(x, *operands, norm.weight, norm.bias)


class _Activated(nn.Module):
    """PyTorch's layer, with an addition and an activation behind it."""

    def __init__(self, norm: nn.Module, activation: str | None) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        if residual is not None:
            y = y + residual
        return operations.activate(y, self.activation, CEILING)


class _Kinked(nn.Module):
    """An activation whose kinks are noted."""

    def __init__(self, activation: str, inplace: bool) -> None:
        super().__init__()
        self.activation, self.inplace = activation, inplace

    def forward(self, y: Tensor) -> Tensor:
        ceiling = CEILING if self.activation == "ceiling" else 6.0
        name = "ceiling" if self.activation == "relu6" else self.activation
        return operations.activate(y, name, ceiling, inplace=self.inplace)


class _Apart(nn.Module):
    """A layer whose input and result are not the tensors that others have.

    What others change in place is then nothing that the layer saved.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *residual: Tensor) -> Tensor:
        return self.layer(x.clone(), *residual).clone()


_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
_MODULES = {"relu": nn.ReLU, "relu6": nn.ReLU6, "silu": nn.SiLU, "hardswish": nn.Hardswish}


class _Function(nn.Module):
    """A function with its parameters and statistics."""

    def __init__(self, layer: Layer, channels: int, library: str) -> None:
        super().__init__()
        self.spec, self.library = layer, library
        has_weight, has_bias = (layer.parameters in ("both", each) for each in ("weight", "bias"))
        self.weight = nn.Parameter(torch.empty(channels)) if has_weight else None
        self.bias = nn.Parameter(torch.empty(channels)) if has_bias else None
        self.register_buffer("running_mean", torch.empty(channels) if layer.tracked else None)
        self.register_buffer("running_var", torch.empty(channels) if layer.tracked else None)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        layer = self.spec
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        settings = layer.mode == "training", layer.momentum, 1e-5
        if self.library != "ours":
            if self.library == "composed":
                with torch.no_grad():
                    F.batch_norm(x.detach(), *tensors, *settings)
                operands = (None, None) if settings[0] else tensors[:2]
                y = _composed(x, *operands, *tensors[2:])
            elif x.dim() > 3 and x.shape[0] == 1:
                # As in `_Flat`.
                y = _unflattened(F.batch_norm(x.flatten(2), *tensors, *settings), x)
            else:
                y = F.batch_norm(x, *tensors, *settings)
            if residual is not None:
                y = y + residual
            return operations.activate(y, layer.activation, CEILING)
        activation: Any = layer.activation
        if activation == "ceiling":
            activation = Activation("relu", CEILING)
        return backnorm.torch.batch_norm(
            x, *tensors, *settings, activation=activation, residual=residual
        )


def _norm(layer: Layer, shape: tuple[int, ...], library: Any = nn, **options: Any) -> nn.Module:
    name = _NORMS[len(shape)].__name__
    if library is not nn and layer.activation is not None:
        name = name.replace("BatchNorm", "BatchNormReLU")
    return getattr(library, name)(
        shape[1],
        momentum=layer.momentum,
        affine=layer.parameters == "both",
        track_running_stats=layer.tracked,
        **options,
    )


def _reference(layer: Layer, shape: tuple[int, ...], library: str) -> nn.Module:
    """Return PyTorch's layer."""
    if library == "composed":
        return _Composed(_norm(layer, shape))
    if shape[0] > 1 or len(shape) < 4:
        return _norm(layer, shape)
    return _Flat(_norm(layer, (*shape[:2], math.prod(shape[2:]))))


def _sequential(layer: Layer, shape: tuple[int, ...], library: str) -> nn.Sequential:
    ours = library == "ours"
    modules: list[nn.Module] = []
    for child in layer.children:
        if child == "norm":
            modules.append(_norm(layer, shape) if ours else _reference(layer, shape, library))
        elif child == "conv":
            modules.append(_CONVOLUTIONS[len(shape)](shape[1], shape[1], 1, bias=False))
        elif child == "identity":
            modules.append(nn.Identity())
        elif child == "tanh":
            modules.append(nn.Tanh())
        elif ours:
            modules.append(_MODULES[child](inplace=layer.inplace))
        else:
            modules.append(_Kinked(child, layer.inplace))
    return nn.Sequential(*modules)


def _made(layer: Layer, shape: tuple[int, ...], library: str) -> nn.Module:
    """Return a layer of a library: "ours", "PyTorch", and "apart" and "composed", which are its."""
    ours = library == "ours"
    if layer.form == "function":
        module: nn.Module = _Function(layer, shape[1], library)
    elif layer.form == "sequential":
        module = _sequential(layer, shape, library)
        if ours:
            module = backnorm.torch.convert(module, fuse=True)
            if layer.number % 4 == 3:
                module = copy.deepcopy(module)
    elif not ours:
        module = _Activated(_reference(layer, shape, library), layer.activation)
    elif layer.form == "converted":
        module = backnorm.torch.convert(_norm(layer, shape))
    else:
        bound = {"ceiling": CEILING} if layer.activation == "ceiling" else {}
        module = _norm(layer, shape, backnorm.torch, **bound)
    return _Apart(module) if library == "apart" else module


class _Numbers:
    """Random numbers of a program, which depend on a name alone."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed numbers that `dtype` has, in float64."""
        seed = zlib.crc32(f"{self.program.seed} {name}".encode())
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return numbers.to(dtype or self.program.dtype).double()


class Network(nn.Module):
    """The forward pass of a program."""

    def __init__(self, program: Program, library: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.program, self.dtype = program, dtype
        self.numbers = _Numbers(program)
        self.norms = nn.ModuleList(_made(layer, program.shape, library) for layer in program.layers)
        self.events: list[tuple[str, Any]] = []
        #: The largest elements of gradients in between; None: not wanted.
        self.largest: list[Tensor] | None = None
        self.parameter_dtype = program.parameter_dtype if dtype is program.dtype else dtype
        for layer, module in zip(program.layers, self.norms, strict=True):
            self._fill(layer, module)
            self._hook(layer, module)

    def tensors(self, layer: Layer, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers by names that do not depend on the library."""
        named = [*module.named_parameters(), *module.named_buffers()]
        found, seen = [], dict.fromkeys(("weight", "bias", "mean", "var", "tracked"), 0)
        for name, tensor in named:
            kind = name.rpartition(".")[2].rpartition("_")[2]
            found.append((f"L{layer.number}.{kind}{seen[kind]}", tensor))
            seen[kind] += 1
        return found

    def state(self) -> list[tuple[str, Tensor]]:
        """Return all parameters and buffers, by name."""
        layers = zip(self.program.layers, self.norms, strict=True)
        return [each for layer, module in layers for each in self.tensors(layer, module)]

    def _fill(self, layer: Layer, module: nn.Module) -> None:
        kind = self.program.parameter_dtype
        for name, tensor in self.tensors(layer, module):
            if tensor.dtype is torch.int64:
                tensor.zero_()
                continue
            numbers = self.numbers(name, *tensor.shape, dtype=kind)
            if "var" in name or ("weight" in name and tensor.dim() == 1):
                numbers = (numbers.abs() + 0.5).to(kind)
            # A parameter stays what it is, and conversion has already been.
            tensor.data = numbers.to(self.parameter_dtype if tensor.dim() == 1 else self.dtype)
            if layer.mode == "frozen":
                tensor.requires_grad_(False)
        module.train(layer.mode == "training")

    def _hook(self, layer: Layer, module: nn.Module) -> None:
        number, note = layer.number, self.events.append
        match layer.hook:
            case "keep the result":
                module.register_forward_hook(lambda m, x, y: note((f"result of L{number}", y)))
            case "change the result":
                module.register_forward_hook(lambda m, x, y: y * 1.1)
            case "keep gradients":
                module.register_full_backward_hook(
                    lambda m, dx, dy: note((f"gradients at L{number}", (dx[:1], dy)))
                )
            case "change gradients":
                module.register_full_backward_hook(
                    lambda m, dx, dy: tuple(map(_mapped(lambda g: g * 1.25), dx))
                )
            case "change dy":
                module.register_full_backward_pre_hook(
                    lambda m, dy: tuple(map(_mapped(lambda g: g * 0.8), dy))
                )

    def forward(self, leaf: Tensor) -> list[Tensor]:
        """Return the last values."""
        values = [leaf if self.program.direct else leaf * 1.0]
        for k, step in enumerate(self.program.steps):
            y = self._value(step, values[step.inputs[0]], values[step.inputs[1]])
            for watch in step.watches:
                self._watch(watch, y, k + 1)
            values.append(y)
        return values[-self.program.results :]

    def _value(self, step: Step, one: Tensor, other: Tensor) -> Tensor:
        if step.scope is None:
            return self._chain(step.calls, one, other)
        if step.scope == "no_grad":
            with torch.no_grad():
                return self._chain(step.calls, one, other)
        if not step.scope.endswith("checkpoint"):
            with packed(step.scope.removeprefix("packing=")):
                return self._chain(step.calls, one, other)
        call_options: dict[str, Any] = {"use_reentrant": step.scope == "reentrant checkpoint"}
        if step.scope == "forgetful checkpoint":
            call_options["preserve_rng_state"] = False
        return checkpoint(lambda a, b: self._chain(step.calls, a, b), one, other, **call_options)

    def _chain(self, calls: tuple[Layer | str, ...], one: Tensor, other: Tensor) -> Tensor:
        for call in calls:
            one = self._call(call, one, other)
            if self.largest is not None and one.requires_grad:
                one.register_hook(self._note_largest)
        return one

    def _note_largest(self, gradient: Tensor | None) -> None:
        if gradient is not None and not torch._C._functorch.is_legacy_batchedtensor(gradient):
            self.largest.append(gradient.detach().abs().max())

    def _call(self, call: Layer | str, one: Tensor, other: Tensor) -> Tensor:
        if isinstance(call, Layer):
            module = self.norms[call.number]
            return module(one, other) if call.residual else module(one)
        if call in operations.CUSTOM:
            count, function = operations.CUSTOM[call]
            return function(one, other) if count == 2 else function(one)
        if call in operations.BINARY:
            return operations.BINARY[call](one, other)
        for table in (operations.UNARY, operations.IN_PLACE, operations.RANDOM):
            if call in table:
                return table[call](one)
        raise KeyError(call)

    def _watch(self, watch: str, y: Tensor, number: int) -> None:
        note = self.events.append
        if watch == "hold":
            note((f"v{number}", y))
        elif not y.requires_grad:
            note((f"v{number} needs no gradient", None))
        elif watch == "keep":
            # Whoever returns None keeps dy.
            copied = _mapped(torch.clone)
            y.register_hook(lambda g: note((f"gradient of v{number}", (g, copied(g)))))
        elif watch == "change":
            y.register_hook(_mapped(lambda g: g * 1.5))
        elif watch == "retain":
            y.retain_grad()
            note((f"v{number}.grad", _Grad(y)))
        elif y.grad_fn is not None:
            y.grad_fn.register_prehook(lambda g: note((f"before v{number}", g[:1])))


def _mapped(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor | None], Tensor | None]:
    """Return a function that leaves a gradient which is absent as it is."""
    return lambda gradient: None if gradient is None else function(gradient)


class _Grad(NamedTuple):
    """A tensor whose gradient is read when all is done."""

    of: Tensor


# Hooks of saved tensors.


def _to_numpy(t: Tensor) -> Any:
    if t.dtype is torch.bfloat16:
        return t.detach().clone(memory_format=torch.contiguous_format)
    return np.array(t.detach().numpy(), order="C")


def _from_numpy(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else torch.from_numpy(packed)


def _laid_out(t: Tensor) -> Tensor:
    lay_out = operations.LAYOUTS["channels_last" if t.dim() > 1 else "contiguous"]
    return lay_out(t.detach())


def packed(kind: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which saved tensors are packed."""
    match kind:
        case None:
            return contextlib.nullcontext()
        case "identity":
            return graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        case "clone":
            return graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        case "numpy":
            return graph.saved_tensors_hooks(_to_numpy, _from_numpy)
        case "layout":
            return graph.saved_tensors_hooks(_laid_out, lambda t: t)
    return graph.save_on_cpu()


# Running a program.


@dataclass
class _Run:
    """What a program returned, by name."""

    network: Network
    #: The network, or what a compiler made of it.
    function: Callable[..., list[Tensor]]
    found: dict[str, Tensor | None] = field(default_factory=dict)
    finished: bool = False

    def put(self, name: str, value: Any) -> None:
        """Add a tensor, or those of a tuple."""
        if isinstance(value, tuple) and not isinstance(value, _Grad):
            for k, each in enumerate(value):
                self.put(f"{name}[{k}]", each)
            return
        if isinstance(value, _Grad):
            value = value.of.grad
        while name in self.found:
            name += "'"
        self.found[name] = value

    def forward(self, leaf: Tensor) -> list[Tensor]:
        """Return results that have a gradient, of a forward pass."""
        with packed(self.network.program.packing):
            results = self.function(leaf)
        for k, y in enumerate(results):
            self.put(f"result {k}", y)
            self.put(f"result {k} has a gradient", torch.tensor(y.requires_grad))
        return [y for y in results if y.requires_grad]

    def dys(self, results: list[Tensor], *batch: int) -> tuple[Tensor, ...]:
        """Return gradients of results."""
        lay_out = operations.LAYOUTS[self.network.program.dy_layout]
        made = []
        for k, y in enumerate(results):
            numbers = self.network.numbers(f"dy {k}", *batch, *y.shape).to(y.dtype)
            made.append(numbers if batch else lay_out(numbers))
        return tuple(made)

    def finish(self) -> None:
        """Add what was kept, and the state of layers, as they are now.

        A second derivative may call hooks once more, and run checkpoints again, or not.
        """
        for name, value in self.network.events:
            self.put(name, value)
        for name, value in self.network.state():
            self.put(name, value.detach().clone())
        self.finished = True

    def loss(self, tensors: Any, name: str) -> Tensor | None:
        """Return a number that depends on all elements, on none of them linearly."""
        terms = []
        for k, t in enumerate(tensors):
            if t is not None and t.requires_grad:
                factors = self.network.numbers(f"{name} {k}", *t.shape).to(t.dtype)
                terms.append((torch.sin(t) * factors + 0.1 * t * t * factors.flip(0)).sum())
        return sum(terms[1:], terms[0]) if terms else None


def _differentiate(run: _Run, leaf: Tensor) -> None:
    """Run the forward pass and the plan of a program."""
    program = run.network.program
    parameters = [(n, t) for n, t in run.network.state() if t.requires_grad]
    named = [("leaf", leaf)] * leaf.requires_grad + parameters
    inputs = [tensor for _, tensor in named]
    plan = program.plan
    for _ in range(1 + (plan == "accumulated")):
        results = run.forward(leaf)
        if not results or not inputs:
            return
        if plan == "loss":
            run.loss(results, "loss").backward()
        elif plan in ("backward", "accumulated"):
            torch.autograd.backward(results, run.dys(results))
        elif plan == "repeated":
            for _ in range(2):
                torch.autograd.backward(results, run.dys(results), retain_graph=True)
        elif plan == "some inputs":
            some = inputs[:: 1 + program.seed % 3]
            torch.autograd.backward(results, run.dys(results), inputs=some)
    if plan in ("grad", "batched", *_ORDERS):
        order, batched = _ORDERS.get(plan, 1), "batched" in plan
        gradients = torch.autograd.grad(
            results,
            inputs,
            run.dys(results, *[BATCH] * batched),
            create_graph=order > 1,
            is_grads_batched=batched,
            allow_unused=True,
        )
        for (name, _), gradient in zip(named, gradients, strict=True):
            run.put(f"gradient of {name}", gradient)
        for k in range(2, order + 1):
            loss = run.loss(gradients, f"order {k}")
            if not run.finished:
                run.finish()
            gradients = [None] * len(inputs)
            if loss is not None:
                gradients = torch.autograd.grad(
                    loss, inputs, create_graph=k < order, allow_unused=True
                )
            for (name, tensor), gradient in zip(named, gradients, strict=True):
                # Of what does not depend on a tensor it may be None, or zero.
                found = torch.zeros_like(tensor) if gradient is None else gradient
                run.put(f"gradient {k} of {name}", found)
        return
    for name, tensor in named:
        run.put(f"gradient of {name}", tensor.grad)


def _transform(run: _Run, leaf: Tensor) -> None:
    """Run a program under `torch.func`."""
    network, plan = run.network, run.network.program.plan
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def function(x: Tensor, values: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.func.functional_call(network, values, (x,)))

    x = leaf.detach()
    if plan == "vjp":
        results, pull = torch.func.vjp(function, x, parameters)
        dx, others = pull(run.dys(list(results)))
        run.put("result", results)
        run.put("gradient", (dx, *others.values()))
    elif plan == "jvp":
        tangents = [
            network.numbers(f"tangent {k}", *t.shape).to(t.dtype)
            for k, t in enumerate((x, *parameters.values()))
        ]
        along = tangents[0], dict(zip(parameters, tangents[1:], strict=True))
        run.put("tangent", torch.func.jvp(function, (x, parameters), along))
    else:
        inputs = network.numbers("inputs", BATCH, *x.shape).to(x.dtype)
        if plan == "mapped":
            mapped = torch.func.vmap(function, in_dims=(0, None))
            run.put("mapped", mapped(inputs, parameters))
            return

        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return sum((torch.sin(y) * (1 + y)).sum() for y in function(x, values))

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        if parameters:
            run.put("gradients", tuple(each(parameters, inputs).values()))


def _found(
    program: Program, library: str, dtype: torch.dtype, largest: list[Tensor] | None = None
) -> dict[str, Tensor | None]:
    """Return everything that a program computes with a library's layers, by name.

    With a list for the largest elements of gradients in between, add those.
    """
    network = Network(program, library, dtype)
    leaf = operations.LAYOUTS[program.layout](network.numbers("leaf", *program.shape).to(dtype))
    leaf = leaf.detach().requires_grad_(program.needs_gradient)
    if program.plan not in PURE_PLANS:
        network.largest = largest
    function: Callable[..., list[Tensor]] = network
    if program.backend:
        torch._dynamo.reset()
        function = torch.compile(network, backend=program.backend)
    run = _Run(network, function)
    torch.manual_seed(program.seed)
    if program.plan in PURE_PLANS:
        _transform(run, leaf)
    else:
        _differentiate(run, leaf)
    if not run.finished:
        run.finish()
    return {name: None if value is None else value.detach() for name, value in run.found.items()}


# Judging what it returned.


class Verdict(NamedTuple):
    """What became of a program."""

    #: "alike", "raised" by both, "unjudged", or "different".
    kind: str
    #: What differs, or why nothing was said.
    text: str = ""


#: The largest values that are judged, and the smallest distance from a kink.
_LARGEST, _NEAREST = 1e6, {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.0}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _attempt(
    program: Program, library: str, dtype: torch.dtype, largest: list[Tensor] | None = None
) -> Any:
    """Return what a program computes, or the error that it raises."""
    try:
        return _found(program, library, dtype, largest)
    except Exception as error:
        # A traceback holds tensors.
        return error.with_traceback(None)


def _message(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _scale(found: dict[str, Tensor | None], largest: list[Tensor]) -> float:
    """Return the largest magnitude of all values and gradients, at least 1, or NaN."""
    floats = [t for t in found.values() if t is not None and t.is_floating_point() and t.numel()]
    every = [1.0, *map(float, largest), *(float(t.abs().max()) for t in floats)]
    return float(np.max(every))


def judge(program: Program) -> Verdict:
    """Run a program with PyTorch's layers and with ours, and compare."""
    eager = program
    if program.backend:
        eager = Program(**{**vars(program), "backend": None})
    largest: list[Tensor] = []
    library = "composed" if program.plan == "third" else "PyTorch"
    with _quiet():
        with operations.distances() as distances:
            exact = _attempt(eager, library, torch.float64, largest)
        ours = _attempt(program, "ours", program.dtype)
        if isinstance(exact, Exception):
            if isinstance(ours, Exception):
                return Verdict("raised", _message(exact))
            # A layer of ours may have saved less than PyTorch's; its result must be right then.
            said = _message(exact)
            exact = _attempt(eager, "apart", torch.float64, largest)
            if isinstance(exact, Exception):
                return Verdict("different", f"PyTorch raises, ours does not: {said}")
        own = exact
        if program.dtype is not torch.float64:
            own = _attempt(eager, library, program.dtype)
            if isinstance(own, Exception):
                return Verdict("unjudged", f"PyTorch raises in this type: {_message(own)}")
    if isinstance(ours, Exception):
        said = _message(ours)
        if program.backend:
            with _quiet():
                compiled = _attempt(program, "PyTorch", program.dtype)
            if isinstance(compiled, Exception):
                return Verdict("raised", _message(compiled))
        if "modified by an inplace" in said and program.shape[0] == 1 and len(program.shape) > 3:
            return Verdict("unjudged", "PyTorch's layer may have had a copy")
        return Verdict("different", f"ours raises: {said}")
    scale = _scale(exact, largest)
    if not scale < _LARGEST:
        return Verdict("unjudged", "large values")
    if distances and min(distances) < _NEAREST[program.dtype]:
        return Verdict("unjudged", "an element near a kink")
    differences = _differences(program.dtype, ours, own, exact, scale)
    if not differences:
        return Verdict("alike")
    if _agrees_with_another_reference(program, eager, ours, own, scale):
        return Verdict("unjudged", "PyTorch's layer differs from another reference, ours does not")
    return Verdict("different", "; ".join(differences))


def _agrees_with_another_reference(
    program: Program,
    eager: Program,
    ours: dict[str, Tensor | None],
    own: dict[str, Tensor | None],
    scale: float,
) -> bool:
    """Return whether ours agrees with another reference than PyTorch's layer in eager mode.

    PyTorch 2.13 has errors of its own. Its gradients of a batch of one are wrong in some orders of
    memory, and it does not call a hook behind a reentrant checkpoint: the formula shows both. A
    checkpoint reads a ReLU's result after an in-place addition to it: layers between clones show
    it. A compiled program may return results that do not require a gradient.
    """
    references = [(eager, "composed"), (eager, "apart")]
    if program.backend:
        references.append((program, "PyTorch"))
    for variant, library in references:
        with _quiet():
            exact = _attempt(variant, library, torch.float64)
        if isinstance(exact, Exception):
            continue
        beside = own if own.keys() == exact.keys() else exact
        if not _differences(program.dtype, ours, beside, exact, scale):
            return True
    return False


def _differences(
    dtype: torch.dtype,
    ours: dict[str, Tensor | None],
    own: dict[str, Tensor | None],
    exact: dict[str, Tensor | None],
    scale: float,
) -> list[str]:
    """Return a line for each value that differs."""
    if ours.keys() != exact.keys():
        return [f"other names: {sorted(ours.keys() ^ exact.keys())}"]
    found = []
    for name, expected in exact.items():
        actual, beside = ours[name], own[name]
        if actual is None or expected is None:
            if actual is not expected:
                found.append(f"{name}: {'None' if actual is None else 'a tensor'}")
        elif actual.shape != expected.shape:
            found.append(f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
        elif not actual.is_floating_point():
            if not torch.equal(actual, expected):
                found.append(f"{name}: {actual.tolist()}, not {expected.tolist()}")
        elif actual.dtype != beside.dtype and not name.startswith(("tangent", "mapped")):
            # PyTorch's transforms apply weight and bias in their own type, after the layer.
            found.append(f"{name}: {actual.dtype}, not {beside.dtype}")
        elif actual.numel():
            error = _error(actual, expected)
            bound = _bound(dtype, beside, expected, scale)
            if not error <= bound:
                most = float(expected.abs().max())
                found.append(f"{name}: off by {error:.2g} of {most:.2g} ({bound:.2g} allowed)")
    return found


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max())


def _bound(dtype: torch.dtype, own: Tensor, exact: Tensor, scale: float) -> float:
    """Return the error that a tensor may have.

    A wrong formula shows in float64 in the first nine digits. What cancels, as the gradient of a
    layer before another does, has the rounding of terms as large as anything in the graph.
    In other types PyTorch's own layer is the measure, as what follows a layer rounds the most.
    """
    most = float(exact.abs().max())
    if dtype is torch.float64:
        return 1e-9 * most + 1e-11 * scale
    unit = torch.finfo(dtype).eps
    return 16 * _error(own, exact) + 64 * unit * most + 16 * unit * scale


def _main() -> None:
    for seed in map(int, sys.argv[1:]):
        program = draw(seed)
        print(program)
        print(*judge(program))


if __name__ == "__main__":
    _main()
