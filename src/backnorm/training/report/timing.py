"""Plots of time: whole steps with the normalisation in them, and the normalisation by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from backnorm.training.frameworks import LAYERS, Layer
from backnorm.training.model import TrainingResult
from backnorm.training.wide_model import WideResult
from benchmarks.report.canvas import COLOURS, Plot, new_figure, quiet, show_legend
from benchmarks.report.numbers import milliseconds
from benchmarks.report.words import label

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["timing_plots", "wide_plots"]

# Points.
_WIDTH = 700
_BAR = 26
_SITE = 21
_MARGIN = 84


def timing_plots(result: TrainingResult) -> list[Plot]:
    """Draw the time of a training's steps; must be called in the context `look`."""
    if not result.timed():
        return []
    framework = result.settings.framework
    name = label(framework)
    height = max(_SITE * len(result.sites), 2 * _BAR) + _MARGIN
    figure, ((left, right),) = new_figure(
        _WIDTH, height, 1, 2, gridspec_kw={"width_ratios": (1, 1.1)}
    )
    steps = {layer: result.step_timing(layer).median for layer in LAYERS}
    norms = {layer: result.norm_timing(layer).median for layer in LAYERS}
    _steps(left, framework, [("", steps, norms)])
    left.set_title("A step, ms")
    _bars(
        right,
        framework,
        [site for site, _ in result.sites],
        {layer: result.site_seconds(layer) for layer in LAYERS},
    )
    right.set_title("Normalisation by place, forward and backward, ms")
    show_legend(figure, _handles(framework))
    return [
        Plot(
            "time",
            "Time of a step and of its normalisation",
            "Medians. The dark part of a step is the time that its normalisation takes alone, "
            "forward and backward, on arrays of the same shapes.",
            f"A step takes {milliseconds(steps['own'])} ms with {name}'s layers and "
            f"{milliseconds(steps['backnorm'])} with ours; normalisation "
            f"{milliseconds(norms['own'])} and {milliseconds(norms['backnorm'])} ms.",
            figure,
        )
    ]


def wide_plots(result: WideResult) -> list[Plot]:
    """Draw the time of wide steps; must be called in the context `look`."""
    formats = result.formats()
    if not formats:
        return []
    framework = result.settings.framework
    figure, ((axis,),) = new_figure(_WIDTH, 3 * _BAR * len(formats) + _MARGIN, 1, 1)
    groups = [
        (
            memory,
            {layer: result.step_timing(memory, layer).median for layer in LAYERS},
            {layer: result.norm_timing(memory, layer).median for layer in LAYERS},
        )
        for memory in formats
    ]
    _steps(axis, framework, groups)
    axis.set_xlabel("ms")
    show_legend(figure, _handles(framework))
    told = "; ".join(
        f"{memory}: {milliseconds(steps['own'])} and {milliseconds(steps['backnorm'])} ms, "
        f"of that {milliseconds(norms['own'])} and {milliseconds(norms['backnorm'])}"
        for memory, steps, norms in groups
    )
    whole = Plot(
        "steps",
        "A whole step",
        "Medians. The dark part of a step is what lies between its convolutions: normalisation, "
        "ReLU and addition, forward and backward.",
        f"Time of a step with {label(framework)}'s layers and with ours. {told}.",
        figure,
    )
    return [whole, _stages(result, formats)]


def _stages(result: WideResult, formats: Sequence[str]) -> Plot:
    framework = result.settings.framework
    stages = list(result.stages(formats[0], "own"))
    passes = ("forward", "backward")
    figure, axes = new_figure(
        _WIDTH,
        len(formats) * (_SITE * len(stages) + 40) + _MARGIN,
        len(formats),
        2,
        sharey=True,
        sharex="row",
    )
    for line, memory in zip(axes, formats, strict=True):
        found = {layer: result.stages(memory, layer) for layer in LAYERS}
        for i, (axis, direction) in enumerate(zip(line, passes, strict=True)):
            values = {layer: [found[layer][stage][i] for stage in stages] for layer in LAYERS}
            _bars(axis, framework, stages, values)
            axis.set_title(f"{memory}, {direction}, ms")
    show_legend(figure, _handles(framework))
    return Plot(
        "stages",
        "Between the convolutions, by stage",
        "Medians of normalisation, ReLU and addition in each stage of the network.",
        f"Time between convolutions in {', '.join(stages)}, forward and backward, in "
        f"{' and '.join(formats)} memory. The table holds the values.",
        figure,
    )


def _steps(
    axis: Axes,
    framework: str,
    groups: Sequence[tuple[str, Mapping[Layer, float], Mapping[Layer, float]]],
) -> None:
    """Draw a bar a layer, and in it the normalisation; a group of bars for each name."""
    names, place = [], 0.0
    for name, steps, norms in groups:
        for layer in LAYERS:
            whole, part = 1e3 * steps[layer], 1e3 * norms[layer]
            colour = _colour(framework, layer)
            axis.barh(place, whole, 0.62, color=colour, alpha=0.3, linewidth=0)
            axis.barh(place, part, 0.62, color=colour, linewidth=0)
            axis.annotate(
                f"{milliseconds(steps[layer])}  ({milliseconds(norms[layer])})",
                (whole, place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
            text = label(framework) if layer == "own" else layer
            names.append((place, f"{name}\n{text}" if name else text))
            place += 1
        place += 0.6
    axis.set_yticks([place for place, _ in names], [name for _, name in names])
    axis.set_ylim(place - 1.0, -0.7)
    axis.margins(x=0.28)
    quiet(axis, "x")


def _bars(
    axis: Axes, framework: str, names: Sequence[str], values: Mapping[Layer, Sequence[float]]
) -> None:
    """Draw a pair of bars for each name."""
    for layer, shift in zip(LAYERS, (-0.19, 0.19), strict=True):
        places = [place + shift for place in range(len(names))]
        found = [1e3 * value for value in values[layer]]
        axis.barh(places, found, 0.34, color=_colour(framework, layer), linewidth=0)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    quiet(axis, "x")


def _colour(framework: str, layer: Layer) -> str:
    return COLOURS[framework if layer == "own" else "backnorm"][0]


def _handles(framework: str) -> list[Artist]:
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(
            color=_colour(framework, layer),
            linewidth=0,
            label=label(framework) if layer == "own" else layer,
        )
        for layer in LAYERS
    ]
    return handles
