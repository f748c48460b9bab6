"""Plots of what was learnt: losses, accuracies, and gradients of the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from backnorm.training.frameworks import LAYERS, Layer
from backnorm.training.model import FirstStep, TrainingResult
from benchmarks.report.canvas import COLOURS, Plot, new_figure, quiet, show_legend
from benchmarks.report.numbers import power, scientific
from benchmarks.report.words import label

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["learning_plots"]

# Points.
_WIDTH = 700
_HEIGHT = 250
_LINE = 12.5

# Where zeros are drawn on a logarithmic axis that has nothing else to show.
_NOTHING = 1e-17
_MARGIN = 76


def learning_plots(result: TrainingResult) -> list[Plot]:
    """Draw what there is to draw; must be called in the context `look`."""
    plots = []
    if result.epochs:
        plots += [_losses(result), _accuracies(result)]
    if result.first is not None:
        plots.append(_gradients(result, result.first))
    return plots


def _losses(result: TrainingResult) -> Plot:
    name = label(result.settings.framework)
    figure, ((left, right),) = new_figure(_WIDTH, _HEIGHT, 1, 2)
    values = {layer: _by_seed(result, layer) for layer in LAYERS}
    for layer in LAYERS:
        _overlay(left, result, layer, _shown(values[layer]))
    left.set_title("Loss")
    apart = _shown([_apart(*pair) for pair in zip(*(values[x] for x in LAYERS), strict=False)])
    for run in apart:
        right.plot(range(1, len(run) + 1), run, color=COLOURS["muted"][0], linewidth=0.5, alpha=0.6)
    right.plot(*_middle(apart), color=COLOURS["ink"][0], linewidth=1.4)
    _powers(left, "y", [*values["own"], *values["backnorm"]])
    _powers(right, "y", apart)
    right.set_title("Difference of the two losses, relative")
    for axis in (left, right):
        axis.set_xlabel("step")
        quiet(axis)
    show_legend(figure, _handles(result))
    return Plot(
        "loss",
        "Loss of each step",
        "Thin lines: the seeds; thick lines: their median. Both networks begin with the same "
        "weights and get the same batches, so their losses differ by rounding at first; where they "
        "are equal, the line is at the bottom. At some point an activation is so near to 0 that "
        "rounding decides whether ReLU lets it pass; from then on the networks are different.",
        f"Loss by step with {name}'s layers and with ours, {len(apart)} seeds: both fall from "
        f"{_ends(values['own'])} and {_ends(values['backnorm'])}. The other panel has their "
        "relative difference.",
        figure,
    )


def _accuracies(result: TrainingResult) -> Plot:
    figure, ((left, right),) = new_figure(
        _WIDTH, _HEIGHT, 1, 2, gridspec_kw={"width_ratios": (1.25, 1)}
    )
    for layer in LAYERS:
        runs = [
            np.array([100 * epoch.test_accuracy for epoch in epochs])
            for epochs in result.runs(layer).values()
        ]
        _overlay(left, result, layer, runs)
    left.set_title("Test accuracy after each epoch, %")
    left.set_xlabel("epoch")
    left.locator_params(axis="x", integer=True)
    _final_accuracies(right, result)
    for axis in (left, right):
        quiet(axis)
    show_legend(figure, _handles(result))
    own, ours = (f"{100 * result.accuracy(layer):.2f} %" for layer in LAYERS)
    return Plot(
        "accuracy",
        "Test accuracy",
        "Thin lines: the seeds; thick lines: their median. On the right each seed at the end.",
        f"Test accuracy by epoch; at the end, in the mean of {len(result.finals())} seeds, {own} "
        f"with {label(result.settings.framework)}'s layers and {ours} with ours.",
        figure,
    )


def _final_accuracies(axis: Axes, result: TrainingResult) -> None:
    finals = result.finals()
    for place, pair in enumerate(finals.values()):
        own, ours = (100 * pair[layer] for layer in LAYERS)
        axis.plot([own, ours], [place, place], color=COLOURS["muted"][0], linewidth=1, zorder=1)
        for layer, value in zip(LAYERS, (own, ours), strict=True):
            axis.plot(value, place, **_mark(result, layer), zorder=3 if layer == "own" else 4)
    axis.set_title("At the end, %")
    axis.set_yticks(range(len(finals)), [f"seed {seed}" for seed in finals])
    axis.set_ylim(len(finals) - 0.4, -0.6)
    axis.margins(x=0.15)


def _gradients(result: TrainingResult, first: FirstStep) -> Plot:
    name = label(result.settings.framework)
    names = [gradient.name for gradient in first.gradients]
    figure, ((axis,),) = new_figure(_WIDTH, len(names) * _LINE + _MARGIN, 1, 1)
    exact = result.settings.dtype == "float64"
    values = _shown([np.array([g.between, g.own, g.backnorm]) for g in first.gradients])
    for place, (between, own, ours) in enumerate(values):
        axis.plot(between, place, **_DIFFERENCE, zorder=2)
        if not exact:
            axis.plot(own, place, **_mark(result, "own"), zorder=3)
            axis.plot(ours, place, **_mark(result, "backnorm"), zorder=4)
    _powers(axis, "x", values)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlabel("largest difference of an element / largest element (log scale)")
    quiet(axis)
    from matplotlib.lines import Line2D

    handles: list[Artist] = [
        Line2D([], [], label=f"{name}'s layers and ours", **_DIFFERENCE, linestyle="")
    ]
    if not exact:
        handles += [
            Line2D([], [], label=f"{text} and float64", linestyle="", **_mark(result, layer))
            for layer, text in zip(LAYERS, (f"{name}'s", "ours"), strict=True)
        ]
    show_legend(figure, handles)
    worst = first.worst()
    return Plot(
        "gradients",
        "Gradients of the first step, by parameter",
        "How far apart the gradients of one batch are, on identical weights: between the two "
        "networks, and of each from the same network in float64. What the convolutions round is in "
        "all of them.",
        f"For {len(names)} parameters the differences of gradients between the layers: at most "
        f"{scientific(worst.between)}, of {worst.name}. The table holds the values.",
        figure,
    )


_DIFFERENCE: dict[str, Any] = {
    "marker": "D",
    "markersize": 4,
    "color": COLOURS["ink"][0],
    "markerfacecolor": COLOURS["paper"][0],
}


def _overlay(axis: Axes, result: TrainingResult, layer: Layer, runs: Sequence[np.ndarray]) -> None:
    """Draw a line a seed and their median: ours thin on top of the framework's wide one."""
    colour = COLOURS[_role(result, layer)][0]
    own = layer == "own"
    for run in runs:
        places = range(1, len(run) + 1)
        axis.plot(places, run, color=colour, linewidth=0.5, alpha=0.4, zorder=2 if own else 3)
    axis.plot(
        *_middle(runs),
        color=colour,
        linewidth=3.4 if own else 1.4,
        solid_capstyle="round",
        zorder=4 if own else 5,
    )


def _middle(runs: Sequence[np.ndarray]) -> tuple[Sequence[int], np.ndarray]:
    """Return places from 1 and medians over the seeds, as far as all go."""
    shortest = min((len(run) for run in runs), default=0)
    places = range(1, shortest + 1)
    return places, np.median([run[:shortest] for run in runs], axis=0) if shortest else np.array([])


def _apart(own: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Return the relative difference of two runs as far as both go; NaN where one diverged."""
    shortest = min(len(own), len(ours))
    own, ours = own[:shortest], ours[:shortest]
    with np.errstate(invalid="ignore", divide="ignore"):
        difference: np.ndarray = np.abs(own - ours) / np.abs(own)
    return difference


def _by_seed(result: TrainingResult, layer: Layer) -> list[np.ndarray]:
    return [
        np.array([loss for epoch in epochs for loss in epoch.losses])
        for epochs in result.runs(layer).values()
    ]


def _shown(runs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return values for a logarithmic axis: zeros at its bottom, gaps for what is not finite."""
    everything = np.concatenate([np.empty(0), *runs])
    positive = everything[(everything > 0) & np.isfinite(everything)]
    bottom = 10.0 ** np.floor(np.log10(positive.min())) if positive.size else _NOTHING
    return [np.where(np.isfinite(run), np.maximum(run, bottom), np.nan) for run in runs]


def _powers(axis: Axes, which: Literal["x", "y"], runs: Sequence[np.ndarray]) -> None:
    """Make the axis of `runs` logarithmic, with labels at powers of ten."""
    if not any(np.isfinite(run).any() for run in runs):
        return
    axis.set(**{f"{which}scale": "log"})
    side = axis.xaxis if which == "x" else axis.yaxis
    side.set_major_formatter(lambda value, _: power(round(np.log10(value))))
    side.set_minor_formatter(lambda *_: "")


def _ends(runs: Sequence[np.ndarray]) -> str:
    return (
        f"{np.median([run[0] for run in runs]):.2f} to {np.median([run[-1] for run in runs]):.3f}"
    )


def _role(result: TrainingResult, layer: Layer) -> str:
    return result.settings.framework if layer == "own" else "backnorm"


def _mark(result: TrainingResult, layer: Layer) -> dict[str, Any]:
    own = layer == "own"
    return {
        "marker": "s" if own else "o",
        "markersize": 5.5 if own else 4.2,
        "color": COLOURS[_role(result, layer)][0],
        "markeredgecolor": COLOURS["paper"][0],
        "markeredgewidth": 0.5,
    }


def _handles(result: TrainingResult) -> list[Artist]:
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [],
            [],
            color=COLOURS[_role(result, layer)][0],
            linewidth=3.4 if layer == "own" else 1.4,
            label=label(result.settings.framework) if layer == "own" else "backnorm",
        )
        for layer in LAYERS
    ]
