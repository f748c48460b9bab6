"""The tables of `backnorm train`, and what they come to."""

from __future__ import annotations

import math

from rich.table import Table

from backnorm.cli.render import captioned_table
from backnorm.cli.text import counted, plain
from backnorm.training.frameworks import LAYERS, Layer
from backnorm.training.model import TrainingResult
from backnorm.training.wide_model import WideResult
from benchmarks.model import Environment, Timing
from benchmarks.report.numbers import milliseconds, percent, ratio_text
from benchmarks.report.words import label

__all__ = ["training_lines", "training_table", "wide_lines", "wide_table"]


def training_table(result: TrainingResult) -> Table:
    """Return a row a layer: accuracy, loss, times."""
    caption = (
        f"{_machine(result.environment)}. accuracy: on the test images at the end, mean of the "
        "seeds; loss: mean of the last epoch; step, norm: medians in ms, norm being all "
        "normalisation of a step, forward and backward, timed alone."
    )
    title = f"Digits with {label(result.settings.framework)}, {result.settings.dtype}"
    table = _table(title, caption)
    for heading in ("layers", "accuracy %", "loss", "step", "images/s", "norm", "share"):
        table.add_column(heading, justify="left" if heading == "layers" else "right", no_wrap=True)
    for layer in LAYERS:
        step, norm = result.step_timing(layer), result.norm_timing(layer)
        table.add_row(
            _name(result.settings.framework, layer),
            _percents(result.accuracy(layer)),
            f"{_last_loss(result, layer):.4f}",
            milliseconds(step.median),
            f"{result.settings.batch / step.median:.0f}",
            milliseconds(norm.median),
            percent(norm.median / step.median),
        )
    return table


def training_lines(result: TrainingResult) -> list[str]:
    """Return how far the networks are apart, and who is faster."""
    lines = []
    if result.first is not None:
        worst = result.first.worst()
        lines.append(
            f"first step: losses {result.first.loss_difference():.1e} apart, gradients "
            f"{worst.between:.1e} at most ({worst.name}), relative"
        )
    finals = result.finals()
    if finals:
        own, ours = (result.accuracy(layer) for layer in LAYERS)
        seeds = counted(len(finals), "seed")
        lines.append(f"test accuracy: {100 * (ours - own):+.2f} points, mean of {seeds}")
    if result.timed():
        lines.append(
            "times, ours over the framework's: "
            f"step {_ratio(*map(result.step_timing, LAYERS))}, "
            f"normalisation {_ratio(*map(result.norm_timing, LAYERS))}"
        )
    return lines


def wide_table(result: WideResult) -> Table:
    """Return two rows a memory format: whole steps and what lies between the convolutions."""
    s = result.settings
    caption = (
        f"{_machine(result.environment)}; images {s.batch}x3x{s.size}x{s.size}. Medians in ms; "
        "norm: normalisation, ReLU and addition within the step, forward and backward."
    )
    table = _table(f"A step of ResNet-50, {s.dtype}", caption)
    for heading in ("memory", "layers", "step", "norm", "share"):
        text = heading in ("memory", "layers")
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    for memory in result.formats():
        for layer in LAYERS:
            step, norm = (t(memory, layer) for t in (result.step_timing, result.norm_timing))
            table.add_row(
                memory,
                _name(s.framework, layer),
                milliseconds(step.median),
                milliseconds(norm.median),
                percent(norm.median / step.median),
            )
    return table


def wide_lines(result: WideResult) -> list[str]:
    """Return the ratios of each format, and how far the first steps are apart."""
    lines = []
    for memory in result.formats():
        ratios = [
            _ratio(*(take(memory, layer) for layer in LAYERS))
            for take in (result.step_timing, result.norm_timing)
        ]
        lines.append(
            f"{memory}: times, ours over the framework's: step {ratios[0]}, "
            f"normalisation, ReLU and addition {ratios[1]}"
        )
    return lines + [
        f"{check.memory}, first step: losses {check.loss_difference():.1e} apart, gradients "
        f"{check.gradients:.1e}, relative"
        for check in result.checks
    ]


def _table(title: str, caption: str) -> Table:
    return captioned_table(title, plain(caption), padding=(0, 1, 0, 0))


def _machine(environment: Environment) -> str:
    return f"{environment.cpu}, {counted(environment.threads, 'thread')}"


def _name(framework: str, layer: Layer) -> str:
    return label(framework) if layer == "own" else layer


def _ratio(own: Timing, ours: Timing) -> str:
    return ratio_text(ours.median / own.median)


def _percents(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:.2f}"


def _last_loss(result: TrainingResult, layer: Layer) -> float:
    """Return the mean loss of the last epoch of each seed."""
    losses = [loss for epochs in result.runs(layer).values() for loss in epochs[-1].losses]
    return sum(losses) / len(losses)
