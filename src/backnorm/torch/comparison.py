"""Compare training steps of a model: with PyTorch's layers, and with backnorm's."""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from backnorm.errors import ArgumentTypeError, ArgumentValueError, BacknormError, described
from backnorm.steps import judge, take_turns
from backnorm.torch.conversion import ConversionWarning, convert, revert
from backnorm.torch.fusion import check_fuse
from backnorm.torch.modules import _BatchNorm
from backnorm.torch.proof import call, copied, to_type
from backnorm.torch.training import (
    CHANNELS_LAST,
    TrainingStep,
    disable_dropout,
    in_layout,
    lay_out,
)

# Each variant's name, and its layers as the printed table shows them.
_VARIANTS = {"torch": "PyTorch's", "backnorm": "converted", "backnorm-fused": "converted, fused"}
# The least turns of all variants, then of the fastest two.
_LEAST, _LEAST_FASTEST = 3, 10


@dataclass(frozen=True)
class MeasuredStep:
    """A training step of a model with the layers of one library, in one layout.

    Attributes
    ----------
    variant : {"torch", "backnorm", "backnorm-fused"}
        PyTorch's layers, `convert(model)` or `convert(model, fuse=fuse)`.
    layout : {"contiguous", "channels_last"}
        The memory format of the model and of the batch.
    layers, fused : int
        The number of backnorm's layers, and how many of them are fused.
    error : float or None
        The Euclidean distance of the gradients of all parameters from those of a float64 copy,
        divided by their length. None: the step failed.
    detail : str
        The reason why the step was not timed, such as wrong gradients; empty if it was timed.
    seconds : float or None
        The median time of a step: gradients of the loss, and SGD with momentum.
    ratio : float or None
        The median over turns of this time, divided by that with PyTorch's layers in this layout.
    memory : int or None
        The most bytes that the forward and backward pass hold at once, including gradients, without
        the model and the optimizer.
    """

    variant: Literal["torch", "backnorm", "backnorm-fused"]
    layout: Literal["contiguous", "channels_last"]
    layers: int
    fused: int
    error: float | None
    detail: str = ""
    seconds: float | None = None
    ratio: float | None = None
    memory: int | None = None


@dataclass(frozen=True)
class ModelComparison:
    """The result of `compare`; ``str()`` makes it a table with a verdict.

    Attributes
    ----------
    steps : tuple of MeasuredStep
        All steps, of each layout and variant.
    threads : int
        PyTorch's number of threads.
    theirs, ours : MeasuredStep or None
        The fastest step with PyTorch's layers, and the fastest with backnorm's. None: no such step
        was timed.
    share : float or None
        The share of the time of `theirs` that normalisation, activations and additions take.
    ratio, ratio_p20, ratio_p80 : float or None
        The time of `ours` divided by that of `theirs`: median, 20th and 80th percentile over
        further turns of these two.
    turns : int
        The number of these turns.
    """

    steps: tuple[MeasuredStep, ...]
    threads: int
    theirs: MeasuredStep | None = None
    ours: MeasuredStep | None = None
    share: float | None = None
    ratio: float | None = None
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    turns: int = 0

    @property
    def verdict(self) -> Literal["keep", "revert", "no difference measured", "not timed"]:
        """Whether to keep backnorm's layers: "keep" if `ratio_p80` is below 1, "revert" if
        `ratio_p20` is above 1.
        """
        if self.ratio_p20 is None or self.ratio_p80 is None:
            return "not timed"
        if self.ratio_p80 < 1:
            return "keep"
        return "revert" if self.ratio_p20 > 1 else "no difference measured"

    def __str__(self) -> str:
        columns = "{:14}{:17}{:>7}{:>7}{:>11}{:>7}{:>11}{:>10}  {}"
        heads = "layout", "layers", "ours", "fused", "step", "ratio", "memory", "error", ""
        lines = [columns.format(*heads).rstrip()]
        for each in self.steps:
            texts = (
                _text(each.seconds, "{:.1f} ms", 1e3),
                _text(each.ratio, "{:.2f}"),
                _text(each.memory, "{:.1f} MB", 1e-6),
                _text(each.error, "{:.1e}"),
            )
            numbers = each.layers, each.fused, *texts
            line = columns.format(each.layout, _VARIANTS[each.variant], *numbers, each.detail)
            lines.append(line.rstrip())
        if self.theirs is not None and self.ours is not None:
            names = [f"{_VARIANTS[e.variant]} ({e.layout})" for e in (self.ours, self.theirs)]
            lines += [
                "",
                f"share: normalisation, activations and additions take {self.share:.2f} of the "
                "fastest step with PyTorch's layers",
                f"fastest: {names[0]} takes {self.ratio:.3f} ({self.ratio_p20:.3f} to "
                f"{self.ratio_p80:.3f}; {self.turns} turns, {self.threads} threads) of the time of "
                f"{names[1]}",
                "allocator: one that keeps freed memory (jemalloc, TCMalloc) may speed up all "
                "steps, and change their ratio",
            ]
        return "\n".join([*lines, f"verdict: {self.verdict}"])


def compare(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    fuse: bool | Iterable[tuple[str, str]] = True,
    seconds: float = 20.0,
) -> ModelComparison:
    """Measure whether backnorm's layers make the training steps of a model faster.

    Eager steps of copies of the model take turns: with PyTorch's layers, after `convert(model)` and
    after `convert(model, fuse=fuse)`, each contiguous and in channels_last memory. The verdict
    compares the fastest step with backnorm's layers with the fastest step with PyTorch's layers.

    Before a step is timed, its gradients are compared with those of a float64 copy. They may be off
    by at most 5 %, or by at most twice as much as the gradients with PyTorch's layers; the larger
    limit counts. Steps with other gradients are not timed.

    Parameters
    ----------
    model : torch.nn.Module
        In training mode, on the CPU. It is not changed.
    batch : Tensor, tuple, list or dict
        The input of the model, its positional arguments or its keyword arguments, on the CPU.
    loss : callable, optional
        Maps the model's output to a scalar tensor. None: the sum of the means of all outputs, each
        multiplied by fixed random numbers.
    fuse : bool or iterable of (str, str)
        The argument of `convert` for fused layers.
    seconds : float
        The time for steps in turns, half of it for the two fastest steps alone. The remaining work
        takes some ten steps of each variant and layout. Each variant takes at least three turns,
        the two fastest at least ten more, so slow models take longer.

    Returns
    -------
    ModelComparison

    Raises
    ------
    ArgumentTypeError
        If an argument has a wrong type, or `loss` does not return a scalar tensor.
    ArgumentValueError
        If the model has no batch normalisation that `convert` converts, is in evaluation mode, or
        its step fails in float64; if the model or the batch is not on the CPU; if a pair of names
        cannot be fused, or changes a result of a training step on the batch.

    Notes
    -----
    Dropout modules and stochastic depth are inactive in the copies, so that all copies compute the
    same. Channels-last steps are measured if a tensor of the batch has four or five axes. All steps
    share one process and its allocator, as they would not in training. Other work on the machine
    widens the interval of the ratio, and can change the verdict.
    """
    fuse = check_fuse(fuse)
    inputs = tree_map(_checked_input, dict(batch) if isinstance(batch, Mapping) else batch)
    shapes = [each.dim() for each in tree_leaves(inputs) if isinstance(each, Tensor)]
    if not shapes:
        problem = "must be a tensor, or a tuple, list or dict of inputs with a tensor"
        raise ArgumentTypeError("batch", problem, came=described(batch))
    if loss is not None and not callable(loss):
        raise ArgumentTypeError(
            "loss", "must map the model's output to a scalar tensor", came=described(loss)
        )
    if not seconds > 0:
        raise ArgumentValueError("seconds", "must be positive", came=seconds)
    # Named pairs must be proved on an example.
    options = {"fuse": fuse, "example": inputs if isinstance(fuse, list) else None}
    base = _checked_copy(model, options)
    layouts = ["contiguous", "channels_last"][: 1 + any(axes in CHANNELS_LAST for axes in shapes)]
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        trainers = {
            each: _Trainer(base, inputs, loss or _random_loss, options, each) for each in layouts
        }
        rows = [row for layout in layouts for row in _judged(trainers[layout], layout)]
        steps = {row: trainers[row.layout].steps[row.variant] for row in rows if not row.detail}
        return _measured(rows, steps, seconds)


class _Trainer:
    """A model and a batch in one layout; see `backnorm.steps.Trainer`. It keeps its steps."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[[Any], Any],
        options: dict[str, Any],
        layout: str,
    ) -> None:
        self._model, self._loss, self._options = copy.deepcopy(model), loss, options
        lay_out(self._model, layout)
        self._batch = tree_map(
            lambda each: in_layout(each, layout) if isinstance(each, Tensor) else each, batch
        )
        self.steps: dict[str, TrainingStep] = {}

    def step(self, variant: str) -> TrainingStep:
        """Return a step of a variant."""
        model = copy.deepcopy(self._model)
        loss = partial(self._loss_of, model, self._batch)
        self.steps[variant] = TrainingStep(model, variant, loss, **self._options)
        return self.steps[variant]

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""
        model = copy.deepcopy(self._model).double()
        batch = to_type(self._batch, torch.float64)
        # A user's loss may have tensors of the model's type.
        dtypes = (each.dtype for each in self._model.parameters() if each.is_floating_point())
        loss = partial(self._loss_of, model, batch, next(dtypes, None))
        return TrainingStep(model, "torch", loss).gradients()

    def _loss_of(self, model: nn.Module, batch: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return the loss of the model's output, with numbers of type `dtype` if it is not None."""
        output = call(model, batch)
        loss = self._loss(output if dtype is None else to_type(output, dtype))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            problem = "must return a scalar tensor that depends on the model's parameters"
            raise ArgumentTypeError("loss", problem, came=described(loss))
        return loss


def _random_loss(output: Any) -> Tensor:
    """Return the sum of the means of all outputs, each multiplied by fixed random numbers."""
    tensors = [each for each in tree_leaves(output) if getattr(each, "requires_grad", False)]
    if not tensors:
        problem = "must be given, because the output of {model} has no tensor with a gradient"
        raise ArgumentValueError("loss", problem, came=f"None, and output {type(output).__name__}")
    generator = torch.Generator().manual_seed(0)
    factors = (torch.randn(each.shape, generator=generator).to(each.dtype) for each in tensors)
    means = [(each * factor).mean() for each, factor in zip(tensors, factors, strict=True)]
    return torch.stack(means).sum()


def _checked_copy(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Return a copy of the model with PyTorch's layers, or raise if it cannot be compared.

    `options` are the arguments `fuse` and `example` of `convert`.
    """
    base = revert(copied(model))
    if not model.training:
        problem = "must be in training mode, because training steps are compared"
        raise ArgumentValueError("model", problem, hint="call model.train() first")
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            raise ArgumentValueError("model", "has lazy layers", hint="call it on a batch first")
        _check_device("model", tensor)
    if any(isinstance(each, _BatchNorm) for each in base.modules()):
        problem = "has layers with an activation of their own, which PyTorch does not have"
        raise ArgumentValueError("model", problem)
    disable_dropout(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConversionWarning)
        try:
            convert(copy.deepcopy(base), **options)
        except ConversionWarning as warning:
            problem = f"has no batch normalisation to compare: {warning}"
            raise ArgumentValueError("model", problem) from None
    return base


def _checked_input(each: Any) -> Any:
    if not isinstance(each, Tensor):
        return each
    _check_device("batch", each)
    # The model may change its input in place.
    return each.detach().clone()


def _check_device(argument: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        problem, came = "must be on the CPU, where steps are timed", f"device {tensor.device}"
        raise ArgumentValueError(argument, problem, came=came, accepted="cpu")


def _judged(trainer: _Trainer, layout: Any) -> list[MeasuredStep]:
    """Return the steps of a layout, their gradients judged."""
    try:
        judgements = judge(trainer, tuple(_VARIANTS))
    except BacknormError:
        raise
    except Exception as error:  # a model can raise any
        problem = "fails in a training step on {batch} in float64, which judges the gradients"
        raise ArgumentValueError("model", problem, came=_line(error)) from error
    return [
        MeasuredStep(variant, layout, each.layers, each.fused, each.error, each.detail)  # type: ignore[arg-type]
        for variant, each in judgements.items()
    ]


def _measured(
    rows: list[MeasuredStep], steps: dict[MeasuredStep, TrainingStep], seconds: float
) -> ModelComparison:
    """Time and profile steps."""
    threads = torch.get_num_threads()
    turns = {row: partial(_turn, step) for row, step in steps.items()}
    own = {row.layout: row for row in steps if row.variant == "torch"}
    if len(steps) == len(own):
        return ModelComparison(tuple(rows), threads)
    # The first turn warms up: the optimizer and the allocator take memory.
    taken = sum(map(sum, take_turns(turns, 1).values()))
    samples = take_turns(turns, max(_LEAST, int(seconds / 2 / taken)))
    medians = {row: float(np.median(found)) for row, found in samples.items()}
    theirs = min(own.values(), key=medians.__getitem__)
    ours = min(steps.keys() - own.values(), key=medians.__getitem__)
    # Further turns decide, because the fastest of several steps was often lucky in its turns.
    rounds = max(_LEAST_FASTEST, int(seconds / 2 / (medians[theirs] + medians[ours])))
    further = take_turns({row: turns[row] for row in (theirs, ours)}, rounds)
    low, ratio, high = np.percentile(np.divide(further[ours], further[theirs]), (20, 50, 80))
    profiles = {row: step.profile(3 if row == theirs else 1) for row, step in steps.items()}
    measured = {
        row: dataclasses.replace(
            row,
            seconds=medians[row],
            ratio=float(np.median(np.divide(samples[row], samples[own[row.layout]]))),
            memory=profiles[row].memory,
        )
        for row in steps
    }
    return ModelComparison(
        tuple(measured.get(row, row) for row in rows),
        threads,
        measured[theirs],
        measured[ours],
        profiles[theirs].share,
        float(ratio),
        float(low),
        float(high),
        rounds,
    )


def _turn(step: Callable[[], None]) -> list[float]:
    begin = time.perf_counter()
    step()
    return [time.perf_counter() - begin]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _text(number: float | None, form: str, scale: float = 1.0) -> str:
    return "" if number is None else form.format(number * scale)
