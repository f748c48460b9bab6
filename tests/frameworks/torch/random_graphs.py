"""Random graphs in which our layers stand between other operations, beside PyTorch's layers.

`programs` is a strategy of hypothesis, which shrinks a program that differs. A `Program` says what
is computed, what is watched, and how it is differentiated. `judge(program)` runs it with PyTorch's
layers and with ours, and says what differs. What is compared: results, kept tensors and gradients
as they are after the last backward pass, gradients of inputs and parameters, which of them are
None, running statistics and counters.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import backnorm.torch
from backnorm.activations import Activation

from . import random_operations as operations
from .random_operations import CEILING

#: Gradients in one batched backward pass.
BATCH = 2


class Layer(NamedTuple):
    """A normalisation, maybe with an addition and an activation behind it."""

    #: "module", "function", or "sequential": several modules, which ours converts.
    form: str
    #: Of a module or function.
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
    hook: str | None
    #: The modules of a "sequential", whether its activations change their input, and whether it is
    #: copied after conversion.
    children: tuple[str, ...]
    inplace: bool
    copied: bool


class Step(NamedTuple):
    """A chain of calls on two earlier values; a call of one value has the first of them."""

    calls: tuple[Layer | str, ...]
    #: How far back the two values are, 0 for the last one.
    inputs: tuple[int, int] = (0, 0)
    #: What the calls run under: a checkpoint, hooks of saved tensors, no gradients.
    scope: str | None = None
    #: What is done with the result: kept, or its gradient kept or changed.
    watches: tuple[str, ...] = ()


class Program(NamedTuple):
    """A random graph, and how it is differentiated."""

    steps: tuple[Step, ...]
    #: One of `PLANS`: how it is differentiated, and how often.
    plan: str
    shape: tuple[int, ...]
    seed: int
    layout: str
    #: How the gradient of a result lies in memory.
    dy_layout: str
    #: Whether the input is a leaf of the graph, as layers have it in the first place.
    direct: bool
    needs_gradient: bool
    #: How many of the last values are results.
    results: int
    #: What hooks of saved tensors do in the whole forward pass.
    packing: str | None

    @property
    def is_batched(self) -> bool:
        """Whether gradients are batched."""
        return "batched" in self.plan

    @property
    def layers(self) -> dict[str, Layer]:
        """All layers, by names that say where they stand."""
        return {
            f"L{k}_{j}": call
            for k, step in enumerate(self.steps)
            for j, call in enumerate(step.calls)
            if isinstance(call, Layer)
        }


# Strategies. What is named first is what shrinking tries to reach.


def weighted(weights: dict[Any, int]) -> st.SearchStrategy[Any]:
    """Return a strategy for the keys, each as often as its weight says."""
    return st.sampled_from([key for key, weight in weights.items() for _ in range(weight)])


def chance(percent: int) -> st.SearchStrategy[bool]:
    """Return a strategy for whether something happens."""
    return weighted({False: 100 - percent, True: percent})


PLANS = {
    "backward": 30, "loss": 12, "repeated": 8, "accumulated": 8, "some inputs": 4, "grad": 8,
    "second": 10, "batched": 7, "batched second": 4,
}  # fmt: skip
_PACKINGS = {None: 80, "identity": 3, "clone": 3, "numpy": 6, "layout": 5, "cpu": 3}
_HOOKS = {
    None: 80, "keep the result": 4, "change the result": 4, "change gradients": 4, "change dy": 3,
    "keep gradients": 5,
}  # fmt: skip
_CHILDREN = (
    ("norm",),
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


@st.composite
def _layers(draw: Any) -> Layer:
    form = draw(weighted({"module": 35, "function": 35, "sequential": 30}))
    function, sequential = form == "function", form == "sequential"
    activations = {None: 40, "relu": 24, "ceiling": 14, "silu": 13, "hardswish": 9}
    activation = None if sequential else draw(weighted(activations))
    mode = draw(weighted({"training": 70, "evaluation": 20, "frozen": 10}))
    parameters = {"both": 70, "none": 14} | ({"weight": 8, "bias": 8} if function else {})
    tracked = draw(chance(70 if mode == "training" else 90))
    return Layer(
        form,
        activation,
        activation in ("relu", "ceiling") and draw(chance(50)),
        mode,
        draw(weighted(parameters)),
        draw(st.sampled_from((0.1, 0.4) if function else (0.1, 0.4, None))),
        tracked or (function and mode != "training"),
        None if function else draw(weighted(_HOOKS)),
        draw(st.sampled_from(_CHILDREN)) if sequential else (),
        sequential and draw(chance(40)),
        sequential and draw(chance(25)),
    )


@st.composite
def _calls(draw: Any) -> Layer | str:
    if draw(st.booleans()):
        return draw(st.sampled_from([*draw(st.sampled_from(operations.TABLES))]))
    return draw(_layers())


@st.composite
def _steps(draw: Any) -> Step:
    kind = draw(weighted({"one call": 74, "behind a layer": 10, "scope": 12, "forgetful": 4}))
    inputs, scope = draw(st.tuples(st.integers(0, 2), st.integers(0, 2))), None
    calls = [draw(_calls())]
    if kind == "behind a layer":
        # Right behind a layer most can go wrong.
        calls = [draw(_layers()), draw(st.sampled_from(operations.BEHIND))]
    elif kind == "scope":
        calls += draw(st.lists(_calls(), max_size=2))
        scopes = {"checkpoint": 5, "no_grad": 2, "clone": 1, "numpy": 1, "layout": 1}
        scope = draw(weighted(scopes))
    elif kind == "forgetful":
        # The recomputation has other random numbers.
        calls = [draw(st.sampled_from([*operations.RANDOM])), *calls, draw(_layers())]
        scope = "forgetful checkpoint"
    chances = {"hold": 12, "keep": 12, "retain": 6, "change": 5, "prehook": 4}
    watches = tuple(name for name, percent in chances.items() if draw(chance(percent)))
    return Step(tuple(calls), inputs, scope, watches)


@st.composite
def _shapes(draw: Any) -> tuple[int, ...]:
    """Draw a shape of two to five axes with a few dozen elements."""
    sizes = {2: (), 3: ((4, 9),), 4: ((2, 5), (2, 5)), 5: ((2, 2), (1, 3), (2, 3))}
    rank = draw(weighted({2: 15, 3: 25, 4: 45, 5: 15}))
    # PyTorch 2.13 takes one image for channels_last in some orders of memory, and returns other
    # gradients.
    batch = (3, 9) if rank == 2 else (1 + (rank > 3), 4)
    return tuple(draw(st.integers(*limits)) for limits in (batch, (1, 7), *sizes[rank]))


@st.composite
def _programs(draw: Any) -> Program:
    """Draw a program with at least one layer."""
    program = Program(
        (Step((draw(_layers()),)), *draw(st.lists(_steps(), max_size=8))),
        draw(weighted(PLANS)),
        draw(_shapes()),
        draw(st.integers(0, 99)),
        draw(weighted({"contiguous": 40, "channels_last": 30, "permuted": 20, "spread": 10})),
        draw(weighted({"contiguous": 60, "channels_last": 15, "permuted": 15, "spread": 10})),
        draw(chance(30)),
        not draw(chance(10)),
        draw(st.integers(1, 3)),
        draw(weighted(_PACKINGS)),
    )
    # PyTorch does not differentiate a layer twice that has a bias alone.
    has_bias_alone = any(layer.parameters == "bias" for layer in program.layers.values())
    assume(not (has_bias_alone and "second" in program.plan))
    return program


#: Hypothesis repeats parts of most examples in others, unless they are in a list whose elements
#: must differ: of such a list with one element, nothing is repeated.
programs = st.lists(_programs(), min_size=1, max_size=1, unique_by=id).map(lambda found: found[0])


# Layers.


class _Activated(nn.Module):
    """PyTorch's layer, with an addition and an activation behind it."""

    def __init__(self, norm: nn.Module, activation: str | None, inplace: bool = False) -> None:
        super().__init__()
        self.norm, self.activation, self.inplace = norm, activation, inplace

    def forward(self, x: Tensor, *residual: Tensor) -> Tensor:
        y = sum(residual, self.norm(x))
        return operations.activate(y, self.activation, inplace=self.inplace)


class _Apart(nn.Module):
    """A layer whose input and result are not the tensors that others have.

    What others change in place is then nothing that the layer saved.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *residual: Tensor) -> Tensor:
        return self.layer(x.clone(), *residual).clone()


class _Function(nn.Module):
    """A function with its parameters and statistics."""

    def __init__(self, layer: Layer, channels: int, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.settings = function, (layer.mode == "training", layer.momentum, 1e-5)
        for name in ("weight", "bias"):
            has = layer.parameters in ("both", name)
            self.register_parameter(name, nn.Parameter(torch.empty(channels)) if has else None)
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.empty(channels) if layer.tracked else None)

    def forward(self, x: Tensor, *residual: Tensor) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        ours = {"residual": residual[0]} if residual else {}
        return self.function(x, *tensors, *self.settings, **ours)


_NORMS = {2: "BatchNorm1d", 3: "BatchNorm1d", 4: "BatchNorm2d", 5: "BatchNorm3d"}
_LINEAR = {
    2: nn.Linear,
    3: partial(nn.Conv1d, kernel_size=1),
    4: partial(nn.Conv2d, kernel_size=1),
    5: partial(nn.Conv3d, kernel_size=1),
}
_ACTIVATIONS = {"relu": nn.ReLU, "relu6": nn.ReLU6, "silu": nn.SiLU, "hardswish": nn.Hardswish}


def _norm(layer: Layer, shape: tuple[int, ...], library: Any = nn, **options: Any) -> nn.Module:
    affine, tracked = layer.parameters == "both", layer.tracked
    options |= {"momentum": layer.momentum, "affine": affine, "track_running_stats": tracked}
    return getattr(library, _NORMS[len(shape)])(shape[1], **options)


def _sequential(layer: Layer, shape: tuple[int, ...], ours: bool) -> nn.Sequential:
    made: dict[str, Callable[[], nn.Module]] = {
        "norm": lambda: _norm(layer, shape),
        "conv": lambda: _LINEAR[len(shape)](shape[1], shape[1], bias=False),
        "identity": nn.Identity,
        "tanh": nn.Tanh,
    }
    for name, module in _ACTIVATIONS.items():
        # Of PyTorch's, kinks are noted.
        noted = partial(_Activated, nn.Identity(), name)
        made[name] = partial(module if ours else noted, inplace=layer.inplace)
    return nn.Sequential(*(made[child]() for child in layer.children))


def _made(layer: Layer, shape: tuple[int, ...], library: str) -> nn.Module:
    """Return a layer of a library: "ours", "PyTorch", and "apart", PyTorch's between clones."""
    ours, function = library == "ours", layer.form == "function"
    activation: Any = layer.activation
    if ours and activation == "ceiling":
        activation = Activation("relu", CEILING)
    if layer.form == "sequential":
        module: nn.Module = _sequential(layer, shape, ours)
        if ours:
            module = backnorm.torch.convert(module, fuse=True)
        if ours and layer.copied:
            module = copy.deepcopy(module)
    elif ours and function:
        batch_norm = partial(backnorm.torch.batch_norm, activation=activation)
        module = _Function(layer, shape[1], batch_norm)
    elif ours:
        module = _norm(layer, shape, backnorm.torch, activation=activation)
    else:
        norm = _Function(layer, shape[1], F.batch_norm) if function else _norm(layer, shape)
        module = _Activated(norm, activation)
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
        found, seen = [], dict.fromkeys(("weight", "bias", "mean", "var", "tracked"), 0)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
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
        module, note = self.norms[name], self._note
        match layer.hook:
            case "keep the result":
                module.register_forward_hook(lambda m, x, y: note(f"result of {name}", y))
            case "change the result":
                module.register_forward_hook(lambda m, x, y: y * 1.1)
            case "keep gradients" if not self.program.is_batched:
                module.register_full_backward_hook(
                    lambda m, dx, dy: note(f"gradients at {name}", (dx[:1], dy))
                )
            case "change gradients":
                module.register_full_backward_hook(lambda m, dx, dy: tuple(map(_times(1.25), dx)))
            case "change dy":
                module.register_full_backward_pre_hook(lambda m, dy: tuple(map(_times(0.8), dy)))

    def _note(self, name: str, value: Any) -> None:
        self.events.append((name, value))

    def forward(self, leaf: Tensor) -> list[Tensor]:
        """Return the last values."""
        values = [leaf if self.program.direct else leaf * 1.0]
        for k, step in enumerate(self.program.steps):
            y = self._value(
                k, step, *(values[max(-1 - back, -len(values))] for back in step.inputs)
            )
            for watch in step.watches:
                self._watch(watch, y, k + 1)
            values.append(y)
        return values[-self.program.results :]

    def _value(self, number: int, step: Step, one: Tensor, other: Tensor) -> Tensor:
        chain = partial(self._chain, number, step)
        if step.scope in ("checkpoint", "forgetful checkpoint"):
            # If it is differentiated twice, each derivative would have random numbers of its own.
            keeps = step.scope == "checkpoint" or "second" in self.program.plan
            return checkpoint(chain, one, other, use_reentrant=False, preserve_rng_state=keeps)
        with torch.no_grad() if step.scope == "no_grad" else packed(step.scope):
            return chain(one, other)

    def _chain(self, number: int, step: Step, one: Tensor, other: Tensor) -> Tensor:
        for j, call in enumerate(step.calls):
            if isinstance(call, Layer):
                one = self.norms[f"L{number}_{j}"](one, *[other] * call.residual)
            else:
                if call in operations.IN_PLACE and self.program.packing in ("identity", "cpu"):
                    # Hooks that pack a tensor as itself hide from autograd that it changes.
                    one = one.clone()
                one = operations.call(call, one, other)
            if self.largest is not None and one.requires_grad:
                one.register_hook(self._note_largest)
        return one

    def _note_largest(self, gradient: Tensor | None) -> None:
        if gradient is not None and not torch._C._functorch.is_legacy_batchedtensor(gradient):
            self.largest.append(gradient.detach().abs().max())

    def _watch(self, watch: str, y: Tensor, number: int) -> None:
        name, note = f"v{number}", self._note
        if watch == "hold":
            note(name, y)
        elif not y.requires_grad:
            note(f"{name} needs no gradient", None)
        elif watch == "change":
            y.register_hook(_times(1.5))
        elif self.program.is_batched:
            # Gradients of a batched backward pass cannot be kept.
            return
        elif watch == "keep":
            # Whoever returns None keeps dy.
            y.register_hook(lambda g: note(f"gradient of {name}", (g, _times(1.0)(g))))
        elif watch == "retain":
            y.retain_grad()
            note(f"{name}.grad", lambda: y.grad)
        elif y.grad_fn is not None:
            y.grad_fn.register_prehook(lambda g: note(f"before {name}", g[:1]))


def _times(factor: float) -> Callable[[Tensor | None], Tensor | None]:
    """Return a function that multiplies a gradient, and leaves one that is absent as it is."""
    return lambda gradient: None if gradient is None else gradient * factor


def packed(kind: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which saved tensors are packed."""
    match kind:
        case "identity":
            return graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        case "clone":
            return graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        case "numpy":
            return graph.saved_tensors_hooks(
                lambda t: np.array(t.detach().numpy(), order="C"), torch.from_numpy
            )
        case "layout":
            return graph.saved_tensors_hooks(
                lambda t: operations.LAYOUTS["channels_last" if t.dim() > 1 else "contiguous"](
                    t.detach()
                ),
                lambda t: t,
            )
        case "cpu":
            return graph.save_on_cpu()
    return contextlib.nullcontext()


# Running a program.


class _Run:
    """A run of a program, and what it returned, by name."""

    def __init__(self, program: Program, library: str, largest: list[Tensor] | None) -> None:
        self.network, self.program = Network(program, library), program
        self.network.largest = largest
        self.found: dict[str, Tensor | None] = {}
        self.finished = False

    def put(self, name: str, value: Any) -> None:
        """Add a tensor, or those of a tuple."""
        if isinstance(value, tuple):
            for k, each in enumerate(value):
                self.put(f"{name}[{k}]", each)
            return
        while name in self.found:
            name += "'"
        self.found[name] = value() if callable(value) else value

    def forward(self, leaf: Tensor) -> list[Tensor]:
        """Return results that have a gradient, of a forward pass."""
        with packed(self.program.packing):
            results = self.network(leaf)
        for k, y in enumerate(results):
            self.put(f"result {k}", y)
            self.put(f"result {k} has a gradient", torch.tensor(y.requires_grad))
        return [y for y in results if y.requires_grad]

    def dys(self, results: list[Tensor], *batch: int) -> list[Tensor]:
        """Return gradients of results."""
        lay_out = operations.LAYOUTS["contiguous" if batch else self.program.dy_layout]
        dys = (self.network.numbers(f"dy {k}", *batch, *y.shape) for k, y in enumerate(results))
        return [lay_out(dy) for dy in dys]

    def finish(self) -> None:
        """Add what was kept, and the state of layers, as they are now.

        A second derivative may call hooks once more, and run checkpoints again, or not.
        """
        if not self.finished:
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

    def differentiate(self, leaf: Tensor) -> None:
        """Run the forward pass and the plan of a program."""
        plan = self.program.plan
        parameters = [(n, t) for n, t in self.network.state() if t.requires_grad]
        named = [("leaf", leaf)] * leaf.requires_grad + parameters
        inputs = [tensor for _, tensor in named]
        for _ in range(2 if plan == "accumulated" else 1):
            results = self.forward(leaf)
            if not results or not inputs:
                return
            backward = partial(torch.autograd.backward, results, self.dys(results))
            if plan == "loss":
                self.loss(results, "loss").backward()
            elif plan in ("backward", "accumulated"):
                backward()
            elif plan == "repeated":
                backward(retain_graph=True)
                backward(retain_graph=True)
            elif plan == "some inputs":
                backward(inputs=inputs[:: 1 + self.program.seed % 3])
            else:
                self.gradients(results, named, inputs)
                return
        for name, tensor in named:
            self.put(f"gradient of {name}", tensor.grad)

    def gradients(
        self, results: list[Tensor], named: list[tuple[str, Tensor]], inputs: list[Tensor]
    ) -> None:
        """Run a plan that asks for gradients, and maybe for second ones."""
        second, batched = "second" in self.program.plan, self.program.is_batched
        gradients = torch.autograd.grad(
            results,
            inputs,
            self.dys(results, *[BATCH] * batched),
            create_graph=second,
            is_grads_batched=batched,
            allow_unused=True,
        )
        for (name, _), gradient in zip(named, gradients, strict=True):
            self.put(f"gradient of {name}", gradient)
        if not second:
            return
        loss = self.loss(gradients, "second order")
        self.finish()
        gradients = [None] * len(inputs)
        if loss is not None:
            gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        for (name, tensor), gradient in zip(named, gradients, strict=True):
            # Of what does not depend on a tensor it may be None, or zero.
            found = torch.zeros_like(tensor) if gradient is None else gradient
            self.put(f"second gradient of {name}", found)


def _found(
    program: Program, library: str, largest: list[Tensor] | None = None
) -> dict[str, Tensor | None]:
    """Return everything that a program computes with a library's layers, by name.

    With a list for the largest elements of gradients in between, add those.
    """
    run = _Run(program, library, largest)
    leaf = operations.LAYOUTS[program.layout](run.network.numbers("leaf", *program.shape))
    torch.manual_seed(program.seed)
    run.differentiate(leaf.detach().requires_grad_(program.needs_gradient))
    run.finish()
    return {name: None if value is None else value.detach() for name, value in run.found.items()}


# Judging what it returned.


class Verdict(NamedTuple):
    """The outcome of a program."""

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
