"""Random graphs in which our layers stand between other operations, beside PyTorch's layers.

`programs` is a strategy of hypothesis. A `Program` says what is computed, what is watched, and how
it is differentiated. `judge(program)` runs it with PyTorch's layers and with ours, and says what
differs. What is compared: results, kept tensors and gradients as they are after the last backward
pass, gradients of inputs and parameters, which of them are None, running statistics and counters.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import backnorm.torch
from backnorm.activations import Activation

from . import random_operations as operations

#: The bound of a ReLU with one; every type has it exactly.
CEILING = 0.75

#: Gradients in one batched backward pass.
BATCH = 2


@dataclass(frozen=True)
class Layer:
    """A normalisation, maybe with an addition and an activation behind it."""

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
    #: Whether our converted "sequential" is copied.
    copied: bool = False


@dataclass(frozen=True)
class Step:
    """A chain of calls on two earlier values; the first call has both, the others the second."""

    calls: tuple[Layer | str, ...]
    inputs: tuple[int, int]
    #: What the calls run under: a checkpoint, hooks of saved tensors, no gradients.
    scope: str | None = None
    #: What is done with the result: kept, or its gradient kept or changed.
    watches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A random graph, and how it is differentiated."""

    seed: int
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

    @property
    def layers(self) -> dict[str, Layer]:
        """All layers, by names that say where they stand."""
        return {
            f"L{k}_{j}": call
            for k, step in enumerate(self.steps)
            for j, call in enumerate(step.calls)
            if isinstance(call, Layer)
        }


# Choosing a program.

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
}

_SCOPES = {
    None: 80,
    "checkpoint": 4,
    "forgetful checkpoint": 3,
    "no_grad": 2,
    "packing=clone": 1,
    "packing=numpy": 1,
    "packing=layout": 1,
}
_PACKINGS = {None: 80, "identity": 3, "clone": 3, "numpy": 6, "layout": 5, "cpu": 3}
_ACTIVATIONS = {None: 40, "relu": 24, "ceiling": 14, "silu": 13, "hardswish": 9}
_HOOKS = {
    None: 80, "keep the result": 4, "change the result": 4, "change gradients": 4, "change dy": 3,
    "keep gradients": 5,
}  # fmt: skip
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


class _Choices:
    """Choices that bytes make; a byte of 0, and the end of the bytes, choose what is named first.

    The bytes are one value of hypothesis. If a program were drawn from many strategies, most
    programs would repeat parts of earlier ones, because hypothesis varies its own examples.
    """

    def __init__(self, data: bytes) -> None:
        self.data = iter(data)

    def among(self, values: Iterable[Any]) -> Any:
        """Return one of at most 256 values."""
        values = list(values)
        return values[next(self.data, 0) * len(values) // 256]

    def weighted(self, weights: dict[Any, int]) -> Any:
        """Return one of the keys."""
        return self.among(key for key, weight in weights.items() for _ in range(weight))

    def integer(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`."""
        return self.among(range(low, high + 1))

    def chance(self, percent: int) -> bool:
        """Return whether something happens."""
        return self.weighted({False: 100 - percent, True: percent})


def _shape(choices: _Choices) -> tuple[int, ...]:
    """Return a shape of two to five axes with a few dozen elements."""
    sizes = {2: (), 3: ((4, 9),), 4: ((2, 5), (2, 5)), 5: ((2, 2), (1, 3), (2, 3))}
    rank = choices.weighted({2: 15, 3: 25, 4: 45, 5: 15})
    # PyTorch 2.13 takes one image for channels_last in some orders of memory, and returns other
    # gradients.
    batch = choices.integer(*((3, 9) if rank == 2 else (1 + (rank > 3), 4)))
    spatial = (choices.integer(low, high) for low, high in sizes[rank])
    return batch, choices.integer(1, 7), *spatial


class _Context(NamedTuple):
    """The parts of a program on which its steps depend."""

    rank: int
    plan: str
    packing: str | None

    @property
    def keeps(self) -> bool:
        """Whether gradients can be kept: those of a batched backward pass cannot."""
        return "batched" not in self.plan

    @property
    def in_place(self) -> bool:
        """Whether tensors may change: hooks that pack a tensor as itself hide it from autograd."""
        return self.packing not in ("identity", "cpu")


def _layer(choices: _Choices, context: _Context, first: bool) -> Layer:
    form = choices.weighted({"module": 35, "function": 35, "sequential": 20, "converted": 10})
    function, sequential = form == "function", form == "sequential"
    activation = choices.weighted(_ACTIVATIONS)
    if form == "module" and activation in ("silu", "hardswish"):
        activation = "relu"
    elif form in ("converted", "sequential"):
        activation = None
    # PyTorch's second derivative of a function with a bias and without a weight raises.
    bias = function and "second" not in context.plan
    mode = choices.weighted({"training": 70, "evaluation": 20, "frozen": 10})
    hooks = {name: n for name, n in _HOOKS.items() if context.keeps or name != "keep gradients"}
    children = [each for each in _CHILDREN if context.rank > 2 or "conv" not in each]
    tracked = choices.chance(70 if mode == "training" else 90)
    return Layer(
        form,
        activation,
        first and activation in ("relu", "ceiling") and choices.chance(40),
        mode,
        choices.weighted({"both": 75, "none": 15, "weight": 5 * function, "bias": 5 * bias}),
        choices.among((0.1, 0.4) if function else (0.1, 0.4, None)),
        tracked or (function and mode != "training"),
        None if function else choices.weighted(hooks),
        choices.among(children) if sequential else (),
        sequential and choices.chance(40),
        sequential and choices.chance(25),
    )


def _operation(choices: _Choices, context: _Context) -> str:
    """Return the name of an operation that is no layer."""
    smallest = operations.SMALLEST_RANK
    unary = [name for name in operations.UNARY if smallest.get(name, 0) <= context.rank]
    tables = {
        "unary": (60, unary),
        "binary": (25, operations.BINARY),
        "custom": (15, operations.CUSTOM | operations.CUSTOM_OF_TWO),
        "in place": (3 * context.in_place, operations.IN_PLACE),
        "random": (3, operations.RANDOM),
    }
    table = choices.weighted({name: weight for name, (weight, _) in tables.items()})
    return choices.among(list(tables[table][1]))


def _step(choices: _Choices, context: _Context, values: int, last: Step | None) -> Step:
    """Return a step that has some of the last values."""
    # The last value first.
    recent = range(values - 1, max(0, values - 3) - 1, -1)
    inputs = choices.among(recent), choices.among(recent)
    if last is not None and isinstance(last.calls[-1], Layer):
        # What comes right behind a layer is where most can go wrong.
        hook = last.calls[-1].hook or ""
        in_place = context.in_place and not ("gradients" in hook or "dy" in hook)
        behind = choices.weighted({None: 85, "in place": 10 * in_place, "stops": 5})
        if behind == "in place":
            name = choices.among(list(operations.IN_PLACE))
            return Step((name,), (values - 1, values - 1))
        if behind == "stops":
            return Step((choices.among(["Stops", "StopsFirst"]),), (values - 1, inputs[1]))
    scope = choices.weighted(_SCOPES)
    if scope == "forgetful checkpoint" and "second" in context.plan:
        # Each derivative has random numbers of its own.
        scope = "checkpoint"
    calls = [
        _layer(choices, context, k == 0) if choices.chance(50) else _operation(choices, context)
        for k in range(1 if scope is None else choices.integer(1, 3))
    ]
    if scope == "forgetful checkpoint":
        random = choices.among(list(operations.RANDOM))
        calls = [random, *calls, _layer(choices, context, first=False)]
    chances = {"hold": 12, "change": 5}
    if context.keeps:
        chances |= {"keep": 12, "retain": 6, "prehook": 4}
    watches = tuple(name for name, percent in chances.items() if choices.chance(percent))
    return Step(tuple(calls), inputs, scope, watches)


def _program(data: bytes) -> Program:
    """Return a program with at least one layer. Each step has bytes of its own."""
    choices, *later = (_Choices(data[k : k + 32]) for k in range(0, len(data), 32))
    shape, plan = _shape(choices), choices.weighted(PLANS)
    context = _Context(len(shape), plan, choices.weighted(_PACKINGS))
    number = choices.integer(0, len(later))
    steps = [Step((_layer(choices, context, first=True),), (0, 0))]
    for each in later[:number]:
        steps.append(_step(each, context, len(steps) + 1, steps[-1]))
    return Program(
        choices.integer(0, 99),
        shape,
        choices.weighted({"contiguous": 40, "channels_last": 30, "permuted": 20, "spread": 10}),
        choices.weighted({"contiguous": 60, "channels_last": 15, "permuted": 15, "spread": 10}),
        choices.chance(30),
        not choices.chance(10),
        tuple(steps),
        choices.integer(1, 3),
        context.packing,
        plan,
    )


programs = st.binary(min_size=288, max_size=288).map(_program)


# Layers.


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

    def __init__(self, layer: Layer, channels: int, ours: bool) -> None:
        super().__init__()
        self.spec, self.ours = layer, ours
        has_weight, has_bias = (layer.parameters in ("both", each) for each in ("weight", "bias"))
        self.weight = nn.Parameter(torch.empty(channels)) if has_weight else None
        self.bias = nn.Parameter(torch.empty(channels)) if has_bias else None
        self.register_buffer("running_mean", torch.empty(channels) if layer.tracked else None)
        self.register_buffer("running_var", torch.empty(channels) if layer.tracked else None)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        layer = self.spec
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        settings = layer.mode == "training", layer.momentum, 1e-5
        if not self.ours:
            y = F.batch_norm(x, *tensors, *settings)
            y = y if residual is None else y + residual
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


def _sequential(layer: Layer, shape: tuple[int, ...], ours: bool) -> nn.Sequential:
    modules: list[nn.Module] = []
    for child in layer.children:
        if child == "norm":
            modules.append(_norm(layer, shape))
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
    """Return a layer of a library: "ours", "PyTorch", and "apart", PyTorch's between clones."""
    ours = library == "ours"
    if layer.form == "function":
        module: nn.Module = _Function(layer, shape[1], ours)
    elif layer.form == "sequential":
        module = _sequential(layer, shape, ours)
        if ours:
            module = backnorm.torch.convert(module, fuse=True)
            if layer.copied:
                module = copy.deepcopy(module)
    elif not ours:
        module = _Activated(_norm(layer, shape), layer.activation)
    elif layer.form == "converted":
        module = backnorm.torch.convert(_norm(layer, shape))
    else:
        bound = {"ceiling": CEILING} if layer.activation == "ceiling" else {}
        module = _norm(layer, shape, backnorm.torch, **bound)
    return _Apart(module) if library == "apart" else module


class Network(nn.Module):
    """The forward pass of a program."""

    def __init__(self, program: Program, library: str) -> None:
        super().__init__()
        self.program = program
        layers = program.layers.items()
        self.norms = nn.ModuleDict({n: _made(layer, program.shape, library) for n, layer in layers})
        self.events: list[tuple[str, Any]] = []
        #: The largest elements of gradients in between; None: not wanted.
        self.largest: list[Tensor] | None = None
        for name, layer in layers:
            self._fill(name, layer)
            self._hook(name, layer)

    def numbers(self, name: str, *shape: int) -> Tensor:
        """Return normally distributed numbers, which depend on the name and the program's seed."""
        seed = zlib.crc32(f"{self.program.seed} {name}".encode())
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def tensors(self, layer: str) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers by names that do not depend on the library."""
        module = self.norms[layer]
        named = [*module.named_parameters(), *module.named_buffers()]
        found, seen = [], dict.fromkeys(("weight", "bias", "mean", "var", "tracked"), 0)
        for name, tensor in named:
            kind = name.rpartition(".")[2].rpartition("_")[2]
            found.append((f"{layer}.{kind}{seen[kind]}", tensor))
            seen[kind] += 1
        return found

    def state(self) -> list[tuple[str, Tensor]]:
        """Return all parameters and buffers, by name."""
        return [each for layer in self.norms for each in self.tensors(layer)]

    def _fill(self, layer: str, spec: Layer) -> None:
        for name, tensor in self.tensors(layer):
            if tensor.dtype is torch.int64:
                tensor.zero_()
                continue
            numbers = self.numbers(name, *tensor.shape)
            positive = "var" in name or ("weight" in name and tensor.dim() == 1)
            # A parameter stays what it is, and conversion has already been.
            tensor.data = numbers.abs() + 0.5 if positive else numbers
            if spec.mode == "frozen":
                tensor.requires_grad_(False)
        self.norms[layer].train(spec.mode == "training")

    def _hook(self, name: str, layer: Layer) -> None:
        module, note = self.norms[name], self.events.append
        match layer.hook:
            case "keep the result":
                module.register_forward_hook(lambda m, x, y: note((f"result of {name}", y)))
            case "change the result":
                module.register_forward_hook(lambda m, x, y: y * 1.1)
            case "keep gradients":
                module.register_full_backward_hook(
                    lambda m, dx, dy: note((f"gradients at {name}", (dx[:1], dy)))
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
            y = self._value(k, step, *(values[i] for i in step.inputs))
            for watch in step.watches:
                self._watch(watch, y, k + 1)
            values.append(y)
        return values[-self.program.results :]

    def _value(self, number: int, step: Step, one: Tensor, other: Tensor) -> Tensor:
        if step.scope is None:
            return self._chain(number, step, one, other)
        if not step.scope.endswith("checkpoint"):
            no_grad = step.scope == "no_grad"
            with torch.no_grad() if no_grad else packed(step.scope.removeprefix("packing=")):
                return self._chain(number, step, one, other)
        return checkpoint(
            lambda a, b: self._chain(number, step, a, b),
            one,
            other,
            use_reentrant=False,
            preserve_rng_state=step.scope != "forgetful checkpoint",
        )

    def _chain(self, number: int, step: Step, one: Tensor, other: Tensor) -> Tensor:
        for j, call in enumerate(step.calls):
            if isinstance(call, Layer):
                residual = (other,) if call.residual else ()
                one = self.norms[f"L{number}_{j}"](one, *residual)
            else:
                one = operations.call(call, one, other)
            if self.largest is not None and one.requires_grad:
                one.register_hook(self._note_largest)
        return one

    def _note_largest(self, gradient: Tensor | None) -> None:
        if gradient is not None and not torch._C._functorch.is_legacy_batchedtensor(gradient):
            self.largest.append(gradient.detach().abs().max())

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
    return np.array(t.detach().numpy(), order="C")


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
            return graph.saved_tensors_hooks(_to_numpy, torch.from_numpy)
        case "layout":
            return graph.saved_tensors_hooks(_laid_out, lambda t: t)
    return graph.save_on_cpu()


# Running a program.


@dataclass
class _Run:
    """What a program returned, by name."""

    network: Network
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
            results = self.network(leaf)
        for k, y in enumerate(results):
            self.put(f"result {k}", y)
            self.put(f"result {k} has a gradient", torch.tensor(y.requires_grad))
        return [y for y in results if y.requires_grad]

    def dys(self, results: list[Tensor], *batch: int) -> tuple[Tensor, ...]:
        """Return gradients of results."""
        lay_out = operations.LAYOUTS[self.network.program.dy_layout]
        made = []
        for k, y in enumerate(results):
            numbers = self.network.numbers(f"dy {k}", *batch, *y.shape)
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
                factors = self.network.numbers(f"{name} {k}", *t.shape)
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
    if plan in ("grad", "second", "batched", "batched second"):
        second, batched = "second" in plan, "batched" in plan
        gradients = torch.autograd.grad(
            results,
            inputs,
            run.dys(results, *[BATCH] * batched),
            create_graph=second,
            is_grads_batched=batched,
            allow_unused=True,
        )
        for (name, _), gradient in zip(named, gradients, strict=True):
            run.put(f"gradient of {name}", gradient)
        if second:
            loss = run.loss(gradients, "second order")
            run.finish()
            gradients = [None] * len(inputs)
            if loss is not None:
                gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
            for (name, tensor), gradient in zip(named, gradients, strict=True):
                # Of what does not depend on a tensor it may be None, or zero.
                found = torch.zeros_like(tensor) if gradient is None else gradient
                run.put(f"second gradient of {name}", found)
        return
    for name, tensor in named:
        run.put(f"gradient of {name}", tensor.grad)


def _found(
    program: Program, library: str, largest: list[Tensor] | None = None
) -> dict[str, Tensor | None]:
    """Return everything that a program computes with a library's layers, by name.

    With a list for the largest elements of gradients in between, add those.
    """
    network = Network(program, library)
    network.largest = largest
    leaf = operations.LAYOUTS[program.layout](network.numbers("leaf", *program.shape))
    leaf = leaf.detach().requires_grad_(program.needs_gradient)
    run = _Run(network)
    torch.manual_seed(program.seed)
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
_LARGEST, _NEAREST = 1e6, 1e-9


def _attempt(program: Program, library: str, largest: list[Tensor] | None = None) -> Any:
    """Return what a program computes, or the error that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _found(program, library, largest)
        except Exception as error:
            # A traceback holds tensors.
            return error.with_traceback(None)


def _message(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def judge(program: Program) -> Verdict:
    """Run a program with PyTorch's layers and with ours, and compare."""
    largest: list[Tensor] = []
    with operations.distances() as distances:
        exact = _attempt(program, "PyTorch", largest)
    ours = _attempt(program, "ours")
    if isinstance(exact, Exception):
        if isinstance(ours, Exception):
            return Verdict("raised", _message(exact))
        # A layer of ours may have saved less than PyTorch's; its result must be right then.
        raised = _message(exact)
        exact = _attempt(program, "apart", largest)
        if isinstance(exact, Exception):
            return Verdict("different", f"PyTorch raises, ours does not: {raised}")
    if isinstance(ours, Exception):
        return Verdict("different", f"ours raises: {_message(ours)}")
    floats = [t for t in exact.values() if t is not None and t.is_floating_point() and t.numel()]
    # NaN if one of them is NaN.
    scale = float(np.max([1.0, *map(float, largest), *(float(t.abs().max()) for t in floats)]))
    if not scale < _LARGEST:
        return Verdict("unjudged", "large values")
    if distances and min(distances) < _NEAREST:
        return Verdict("unjudged", "an element near a kink")
    differences = _differences(ours, exact, scale)
    if not differences:
        return Verdict("alike")
    # A checkpoint of PyTorch 2.13 reads a ReLU's result after an in-place addition to it. Layers
    # between clones do not.
    exact = _attempt(program, "apart")
    if not isinstance(exact, Exception) and not _differences(ours, exact, scale):
        return Verdict("unjudged", "PyTorch's layer differs from itself between clones")
    return Verdict("different", "; ".join(differences))


def _differences(
    ours: dict[str, Tensor | None], exact: dict[str, Tensor | None], scale: float
) -> list[str]:
    """Return a line for each value that differs.

    A wrong formula shows in the first nine digits. What cancels, as the gradient of a layer before
    another does, has the rounding of terms as large as anything in the graph.
    """
    if ours.keys() != exact.keys():
        return [f"other names: {sorted(ours.keys() ^ exact.keys())}"]
    found = []
    for name, expected in exact.items():
        actual = ours[name]
        if actual is None or expected is None:
            if actual is not expected:
                found.append(f"{name}: {'None' if actual is None else 'a tensor'}")
        elif (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            found.append(f"{name}: {actual.dtype} {actual.shape}, not {expected.shape}")
        elif actual.numel():
            most = float(expected.double().abs().max())
            error = float((actual.double() - expected.double()).abs().max())
            if not error <= 1e-9 * most + 1e-11 * scale * actual.is_floating_point():
                found.append(f"{name}: off by {error:.2g} of {most:.2g}")
    return found
