"""The table, the summary and the plot of `models`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.models.cases import BATCHES, LAYOUTS, MODELS
from benchmarks.results import (
    DASH,
    Result,
    column,
    geometric_mean,
    mean_text,
    milliseconds,
    ratio_plot,
    ratio_text,
)

__all__ = ["FASTER", "batches", "comparisons", "models_lines", "models_plot", "models_table",
           "plot_comparisons"]  # fmt: skip

#: The layout of a comparison in which each variant has the layout in which it is faster.
FASTER = "each its faster"


def models_table(result: Result) -> pd.DataFrame:
    """Return a row for each case and variant; ratios are to the framework's own layers."""
    frame, tables = result.frame, []
    case = ["model", "shape", "layout", "precision", "allocator"]
    for variant in _variants(frame):
        table = frame[case].assign(
            variant=variant,
            ms=column(frame, f"{variant}.step").map(milliseconds),
            ratio=column(frame, f"{variant}.ratio").map(lambda r: ratio_text(r, marked=True)),
            error=column(frame, f"{variant}.error").map("{:.1e}".format),
        )
        tables.append(table[table.ms != DASH])
    return pd.concat(tables).sort_index(kind="stable") if tables else frame[case]


def models_lines(result: Result) -> list[str]:
    """Return the means of each of our variants, and the reasons why others have no time."""
    frame, lines = result.frame, []
    for variant, base, found in _ratios(frame):
        line = f"{variant} / {base}: {mean_text(found)}"
        for quantity in ("normalization", "memory"):
            mean = column(frame, f"{variant}.{quantity}") / column(frame, f"{base}.{quantity}")
            line += f"; {quantity} {ratio_text(geometric_mean(mean))}"
        lines.append(line + _spread(frame, variant, base))
    for _, row in frame[frame.notes != ""].iterrows():
        lines.append(f"{row.model} {row['shape']} {row.layout} {row.precision}: {row.notes}")
    return lines


def _spread(frame: pd.DataFrame, variant: str, base: str) -> str:
    """Return by how much the processes of a case differ, if there were several."""
    numbers = range(1, 1 + sum(name.startswith(f"{variant}.ratio.") for name in frame))
    columns = [[column(frame, f"{each}.ratio.{k}") for k in numbers] for each in (variant, base)]
    ratios = pd.DataFrame([our / other for our, other in zip(*columns, strict=True)])
    spread = (ratios.max() - ratios.min()).dropna()
    if len(numbers) < 2 or spread.empty:
        return ""
    middle, most = map(ratio_text, (spread.median(), spread.max()))
    return f"; processes differ by {middle}, at most {most}"


def comparisons(result: Result) -> pd.DataFrame:
    """Return steps with our layers beside steps with the framework's, in each case and variant.

    Returns
    -------
    pandas.DataFrame
        "model", "batch", "precision", "allocator" (a dash if unknown), "layout"; "variant" and
        "base", the variant that it is compared with; "base_step", seconds; "ratio". A model with
        two layouts has one more row, whose layout is `FASTER`: each of the two variants has the
        layout in which it is faster.
    """
    frame = result.frame
    cases = pd.DataFrame(
        {
            "model": frame.model,
            "batch": batches(frame),
            "precision": frame.precision,
            "allocator": frame.get("allocator", DASH),
            "layout": frame.layout,
        }
    )
    of_model = [*cases.columns.drop("layout"), "variant", "base"]
    numbers = ["step", "base_step"]
    found = [cases.iloc[:0].assign(variant="", base="", step=0.0, base_step=0.0)]
    for variant, base, _ in _ratios(frame):
        # A ratio is a median over turns, in which both variants meet the same conditions. The
        # median of a variant's steps is less robust, so our step is the ratio times the base's.
        own = column(frame, f"{base.removesuffix('-compiled')}.step")
        step, base_step = (own * column(frame, f"{each}.ratio") for each in (variant, base))
        each = cases.assign(variant=variant, base=base, step=step, base_step=base_step).dropna()
        both = each.groupby(of_model).filter(lambda layouts: len(layouts) == len(LAYOUTS))
        faster = both.groupby(of_model, sort=False, as_index=False)[numbers].min()
        found += [each, faster.assign(layout=FASTER)]
    table = pd.concat(found, ignore_index=True)
    return table.assign(ratio=table.step / table.base_step).drop(columns="step")


def batches(frame: pd.DataFrame) -> pd.Series:
    """Return which of its model's batches each case has; small if its shape is none of them."""
    found = []
    for model, shape in zip(frame.model, frame["shape"], strict=True):
        shapes = [",".join(map(str, each)) for each in MODELS.get(model, ("", ()))[1]]
        found.append(BATCHES[shapes.index(shape)] if shape in shapes else BATCHES[0])
    return pd.Series(found, frame.index)


# A ring, because the faster layout's mark is often on that of one of the layouts.
_MARKERS = {
    "contiguous": {"marker": "o", "ms": 4},
    "channels_last": {"marker": "s", "ms": 4},
    FASTER: {"marker": "o", "ms": 9, "mfc": "none"},
}


def models_plot(result: Result, path: Path) -> None:
    """Plot the ratio of our step to the framework's own, for each case and variant."""
    plot_comparisons(comparisons(result), path)


def plot_comparisons(found: pd.DataFrame, path: Path) -> None:
    """Plot the ratios of `comparisons`: a panel for each condition, a row for each model."""
    conditions = [*found.columns.drop(["model", "layout", "base_step", "ratio", "base"])]
    panels = list(found.groupby(conditions, sort=False))
    models = list(found.model.unique())
    rows = max(1, len(panels))
    size = 5.5, 0.8 + rows * (0.7 + 0.2 * len(models))
    with ratio_plot(path, size, "x", rows=rows) as every:
        for axes, (condition, cases) in zip(every, panels, strict=False):
            for layout, of_layout in cases.groupby("layout", sort=False):
                places = of_layout.model.map(models.index)
                axes.plot(of_layout.ratio, places, ls="", label=layout, **_MARKERS[layout])
            axes.set_title(", ".join(map(str, condition)), fontsize="small")
            axes.set_yticks(range(len(models)), models, fontsize="small")
            axes.invert_yaxis()
        every[-1].set_xlabel("our step / the framework's")


def _variants(frame: pd.DataFrame) -> list[str]:
    return [name.removesuffix(".step") for name in frame if name.endswith(".step")]


def _ratios(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.Series]]:
    """Yield our variants, the variants they are compared with, and the ratios of their steps.

    Compiled variants are compared with the framework's own layers, compiled.
    """
    variants = _variants(frame)
    for variant in (name for name in variants if name.startswith("backnorm")):
        for base in (name for name in variants if not name.startswith("backnorm")):
            found = (frame[f"{variant}.ratio"] / frame[f"{base}.ratio"]).dropna()
            if len(found) and ("compiled" in variant) == ("compiled" in base):
                yield variant, base, found
