"""A result as one web page that needs nothing beside itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from backnorm.training.frameworks import LAYERS
from backnorm.training.model import TrainingResult
from backnorm.training.wide_model import WideResult
from benchmarks.model import Environment, Timing
from benchmarks.report.canvas import Plot
from benchmarks.report.numbers import (
    DASH,
    TIMES,
    counted,
    machine_line,
    milliseconds,
    percent,
    ratio_text,
    scientific,
)
from benchmarks.report.render import render
from benchmarks.report.words import environment_lines, label

__all__ = ["training_page", "wide_page"]

_PACKAGE = "backnorm.training.report"


def training_page(result: TrainingResult, plots: Sequence[Plot]) -> str:
    """Return the page of a training; its plots by name, as far as there are any."""
    settings = result.settings
    return render(
        _PACKAGE,
        "training",
        name=label(settings.framework),
        machine=_machine(result.environment),
        settings=settings,
        plots={plot.name: plot for plot in plots},
        cards=_cards(result),
        seeds=[
            [str(seed), *(_points(pair[layer]) for layer in LAYERS), _difference(pair)]
            for seed, pair in result.finals().items()
        ],
        means=[
            *(_points(result.accuracy(layer)) for layer in LAYERS),
            _difference({layer: result.accuracy(layer) for layer in LAYERS}),
        ],
        gradients=[
            [g.name, *(scientific(v) for v in (g.between, g.own, g.backnorm))]
            for g in (result.first.gradients if result.first else ())
        ],
        losses=result.first.losses if result.first else {},
        failures=result.failures(),
        timings=_timings(result),
        sites=_sites(result),
        facts=environment_lines(result.environment) + _settings_lines(result),
    )


def wide_page(result: WideResult, plots: Sequence[Plot]) -> str:
    """Return the page of wide steps."""
    settings = result.settings
    formats = result.formats()
    return render(
        _PACKAGE,
        "wide",
        name=label(settings.framework),
        machine=_machine(result.environment),
        settings=settings,
        plots=plots,
        cards=[_wide_card(result, memory) for memory in formats],
        rows=[_wide_row(result, memory) for memory in formats],
        stages=[line for memory in formats for line in _stage_lines(result, memory)],
        checks=[
            [c.memory, f"{c.own_loss:.6f}", f"{c.backnorm_loss:.6f}"]
            + [scientific(v) for v in (c.loss_difference(), c.gradients)]
            for c in result.checks
        ],
        facts=environment_lines(result.environment) + _settings_lines(result),
    )


def _machine(environment: Environment) -> str:
    return machine_line(environment.cpu, environment.threads, environment.date)


def _cards(result: TrainingResult) -> list[dict[str, Any]]:
    name = label(result.settings.framework)
    cards: list[dict[str, Any]] = []
    finals = result.finals()
    if finals:
        own, ours = (result.accuracy(layer) for layer in LAYERS)
        cards.append(
            {
                "what": "test accuracy at the end",
                "big": _points(ours),
                "unit": "%",
                "text": f"with {name}'s layers {_points(own)} %: "
                f"{100 * (ours - own):+.2f} points, mean of {counted(len(finals), 'seed')}",
            }
        )
    if result.first is not None:
        worst, apart = result.first.worst(), result.first.loss_difference()
        cards.append(
            {
                "what": "first step, gradients",
                "big": scientific(worst.between),
                "unit": "apart",
                "text": f"at most, relative: {worst.name}; losses "
                f"{scientific(apart) + ' apart' if apart else 'equal'}",
                "lost": bool(result.failures()),
            }
        )
    if result.timed():
        for what, take in (("whole step", result.step_timing), ("normalisation", None)):
            timings = [(take or result.norm_timing)(layer) for layer in LAYERS]
            cards.append(_speed_card(name, what, *timings))
        share = [
            result.norm_timing(layer).median / result.step_timing(layer).median for layer in LAYERS
        ]
        cards[-1]["foot"] = f"of a step: {percent(share[1])}, with {name}'s {percent(share[0])}"
        rates = [
            f"{result.settings.batch / result.step_timing(layer).median:.0f}" for layer in LAYERS
        ]
        cards[-2]["foot"] = f"images/s: {rates[1]}, with {name}'s {rates[0]}"
    return cards


def _speed_card(name: str, what: str, own: Timing, ours: Timing) -> dict[str, Any]:
    faster = ours.median <= own.median
    ratio = own.median / ours.median if faster else ours.median / own.median
    return {
        "what": what,
        "big": ratio_text(ratio),
        "unit": f"{TIMES} {'faster' if faster else 'slower'}",
        "text": f"{milliseconds(ours.median)} ms, with {name}'s layers "
        f"{milliseconds(own.median)} ms",
        "lost": not faster,
    }


def _timings(result: TrainingResult) -> list[list[str]]:
    if not result.timed():
        return []
    rows = []
    for what, take in (("whole step", result.step_timing), ("normalisation", result.norm_timing)):
        rows.append([what, *_pair(take("own"), take("backnorm"))])
    return rows


def _pair(own: Timing, ours: Timing) -> list[str]:
    """Return medians with percentiles in ms, and the ratio, of two timings."""
    return [*(_spread(t) for t in (own, ours)), ratio_text(ours.median / own.median)]


def _spread(t: Timing) -> str:
    return f"{milliseconds(t.median)} ({milliseconds(t.p20)}{DASH}{milliseconds(t.p80)})"


def _sites(result: TrainingResult) -> list[list[str]]:
    if not result.timed():
        return []
    both = zip(*(result.site_seconds(layer) for layer in LAYERS), strict=True)
    return [
        [
            name,
            TIMES.join(map(str, shape)),
            milliseconds(own),
            milliseconds(ours),
            ratio_text(ours / own),
        ]
        for (name, shape), (own, ours) in zip(result.sites, both, strict=True)
    ]


def _wide_card(result: WideResult, memory: str) -> dict[str, Any]:
    name = label(result.settings.framework)
    norms, steps = (
        [take(memory, layer) for layer in LAYERS]
        for take in (result.norm_timing, result.step_timing)
    )
    card = _speed_card(name, f"normalisation, ReLU, addition; {memory}", *norms)
    whole = _speed_card(name, "", *steps)
    card["foot"] = f"whole step {whole['big']} {whole['unit']}: {whole['text']}"
    return card


def _wide_row(result: WideResult, memory: str) -> dict[str, Any]:
    norms = {layer: result.norm_timing(memory, layer) for layer in LAYERS}
    steps = {layer: result.step_timing(memory, layer) for layer in LAYERS}
    shares = [percent(norms[layer].median / steps[layer].median) for layer in LAYERS]
    return {
        "memory": memory,
        "rows": [
            ["whole step", *_pair(steps["own"], steps["backnorm"])],
            ["between the convolutions", *_pair(norms["own"], norms["backnorm"])],
            ["share of the step", *shares, ""],
        ],
    }


def _stage_lines(result: WideResult, memory: str) -> list[list[str]]:
    own, ours = (result.stages(memory, layer) for layer in LAYERS)
    return [
        [memory, stage, direction, milliseconds(a), milliseconds(b), ratio_text(b / a)]
        for stage in own
        for direction, a, b in zip(("forward", "backward"), own[stage], ours[stage], strict=True)
    ]


def _settings_lines(result: TrainingResult | WideResult) -> list[tuple[str, str]]:
    s = result.settings
    lines = [("Framework", label(s.framework)), ("Type", s.dtype), ("Batch", str(s.batch))]
    if isinstance(result, WideResult):
        size = result.settings.size
        return [
            *lines,
            ("Images", f"3{TIMES}{size}{TIMES}{size}, random"),
            ("Steps of each in each format", str(result.settings.rounds)),
        ]
    return [
        *lines,
        ("Seeds, epochs", f"{result.settings.seeds}, {result.settings.epochs}"),
        ("Learning rate", f"{result.settings.rate:g} at first, to 0 by a cosine; momentum 0.9"),
    ]


def _points(share: float) -> str:
    """Return a share in percent, without the sign."""
    return DASH if math.isnan(share) else f"{100 * share:.2f}"


def _difference(pair: dict[Any, float]) -> str:
    value = 100 * (pair["backnorm"] - pair["own"])
    return DASH if math.isnan(value) else f"{value:+.2f}"
