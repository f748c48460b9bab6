"""Write the tables and plots of the pages of measurements from the results in docs/bench.

zen5.json is the result of `benchmarks operator` that the README shows; other files named after
processors are its results on other machines. The results of `benchmarks models` are models.json,
with whole models; models-of-*.json, on other machines; models-frameworks-*.json, of flax and Keras;
and models-zen4.json, of fused models with two allocators. The README shows the compiled models of
COMPILED. Only text between the markers is replaced. With --check: report the pages that are not
current, and write nothing.

Usage, from the root of the repository: python -m scripts.update_performance_docs [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.cells import LEAST_PASSES, OURS, OURS_IN_FLOAT32, PASSES, SWEEP
from benchmarks.models.report import models_plot
from benchmarks.results import (
    DASH,
    LABELS,
    Result,
    beside_best,
    bytes_text,
    column,
    geometric_mean,
    markdown,
    nbytes,
    operator_plot,
    ratio_text,
    ratio_to_floor,
    ratios,
    read,
    shape_text,
)
from scripts.generated import between, options

ROOT = Path(__file__).resolve().parents[1]
BENCH = Path("docs/bench")
RESULT, MODELS, ALLOCATORS = "zen5.json", "models.json", "models-zen4.json"
COMPILED = "models-of-zen4-compiled.json"
MEASURED = "docs/measurements"

# Tables by cell have the project's main operator and the most common type in training.
_OP, _DTYPE = "backward", "float32"
_KIND = ["op", "dtype"]
_DTYPES = ("float32", "bfloat16", "float16", "float64")

_CHANNELS = {"NCX": "channels first", "NXC": "channels last"}

_CALL = "a call from Python costs more than the work; oneDNN's primitive is made beforehand"
# Reasons for the ratios of cells, by layout and by the number of caches (a core's, the shared one)
# that x exceeds.
_WHY = {
    (0, "NCX"): _CALL,
    (0, "NXC"): _CALL,
    (1, "NCX"): "a group of channels is summed and written while it is cached",
    (1, "NXC"): "oneDNN computes in float32, and writes dx by streaming stores",
    (2, "NCX"): "three passes over memory where others make five",
    (2, "NXC"): "memory limits the fastest peers as it limits us",
}

# The most bytes of the processor's last-level cache that a virtual machine can rely on.
_MOST_SHARED = 32 << 20

# Tables by layout: bytes of x above which cells count (below, a call from Python costs more than
# the work), and bytes of all arrays together that no cache holds.
_SMALL, _FAR = 64 << 10, 48_000_000
_PEERS = ("torch", "tensorflow", "jax", "onednn")

# The tables of machines: heading, kind of elements, column of the cells.
_QUANTITIES = (
    ("float32, over the best peer", "float32", "ratio"),
    ('float32 in `arithmetic="float32"`, over the best peer', "float32", "in_float32"),
    ("float32, over PyTorch", "float32", "torch"),
    ("16 bits, over the best peer", "16 bits", "ratio"),
    ("float32, over the floor", "float32", "far"),
    ("16 bits, over the floor", "16 bits", "far"),
)

# The ratio above which a cell counts as much slower, and how many slower cells are shown.
_FAR_SLOWER, _SHOWN = 1.25, 3

# The largest ratio that a float32 cell should have: operation, compared time, ratio.
_LIMITS = (
    ("backward", "in_float32", 0.9),
    ("backward", "torch", 1.0),
    ("backward", "tensorflow", 1.0),
    ("backward", "jax", 1.0),
    ("backward", "onednn", 1.25),
    ("forward", "ratio", 0.9),
    ("inference", "ratio", 1.0),
)

# Columns of the tables of models: heading, variant, quantity, variant that it is compared with.
_COLUMNS = (
    ("normalisation", "backnorm-fused", "normalization", "torch"),
    ("memory", "backnorm-fused", "memory", "torch"),
)
_VARIANTS = {
    "ours": "backnorm",
    "ours, float32": "backnorm-float32",
    "fused": "backnorm-fused",
    "fused, float32": "backnorm-fused-float32",
}
_LEGEND = (
    "- **share**: part of the time of PyTorch's eager step that normalisations, activations and "
    "additions take.\n"
    "- **normalisation**: time of these operations in a fused step, divided by their time in "
    "PyTorch's step.\n"
    "- **memory**: growth of resident memory during the first three fused steps, divided by its "
    "growth during the first three of PyTorch's steps.\n"
    "- **fused**: time of a step after `convert(model, fuse=True)`, divided by that of PyTorch's "
    "step; **compiled**: the same after `convert(model)`, with both models compiled. These two "
    "columns have geometric means over all processors, threads, batches and element types (in "
    "brackets: least to most; number of cases).\n"
)


_MODELS_PLOT = (
    "![Time of a training step with backnorm, divided by that with PyTorch's layers, on an AMD "
    "Zen 5: a row for each case of the table above, a mark for each variant. backnorm is faster "
    "left of the line.]"
    f"(../{BENCH.name}/models.png)\n"
)


def pages(root: Path) -> dict[Path, str]:
    """Return the text of the pages by path."""
    folder = root / BENCH
    results = {path.name: read(path) for path in sorted(folder.glob("*.json"))}
    operator = {name: r for name, r in results.items() if r.environment["command"] == "operator"}
    newest = sorted(operator, key=lambda name: operator[name].environment["date"], reverse=True)
    machines = {name: operator[name] for name in sorted(newest, key=lambda name: name != RESULT)}
    frames = {name: _cells(result) for name, result in machines.items()}
    result, frame = machines[RESULT], frames[RESULT]
    of_models = [MODELS, *(name for name in results if name.startswith("models-of-"))]
    runs = {name: results[name] for name in of_models}
    others = [r for name, r in results.items() if name.startswith("models-frameworks-")]
    kinds = _kinds(_compared(frame), _caches(result))
    parts = {
        "README.md": {
            "numbers": _numbers(results[ALLOCATORS], results[COMPILED], others, result, kinds),
        },
        "docs/performance.md": {
            "operator": _operator(result, frame, kinds),
            "steps": _steps(runs.values()),
        },
        f"{MEASURED}/training-steps.md": {
            "allocators": _allocators_table(results[ALLOCATORS]),
            "models": "\n".join([_LEGEND, _models_table(results[MODELS], runs), _MODELS_PLOT]),
            "frameworks": _frameworks(others),
        },
        f"{MEASURED}/operator.md": {"bench": _cell_by_cell(result, frame)},
        f"{MEASURED}/slower.md": {"slower": _slower(result, frame)},
        f"{MEASURED}/machines.md": {"machines": _machines(machines, frames)},
    }
    found = {}
    for name, of_page in parts.items():
        text = (root / name).read_text(encoding="utf-8")
        for marker, part in of_page.items():
            text = between(name, text, part, marker)
        found[root / name] = text
    return found


def _cells(result: Result) -> pd.DataFrame:
    """Return the cells, sorted by operation and type, with further columns.

    These are `nbytes` and the ratios of our time to others: to the best peer's, `ratio` and
    `in_float32`; to each peer's, named like the peer; to the floor's, `to_floor` and
    `floor_in_float32`.
    """
    frame = result.frame
    frame = frame.assign(
        nbytes=nbytes(frame),
        ratio=ratios(frame).ratio,
        in_float32=ratios(frame, OURS_IN_FLOAT32).ratio,
        to_floor=ratio_to_floor(frame),
        floor_in_float32=ratio_to_floor(frame, OURS_IN_FLOAT32),
        **{peer: ratios(frame, OURS, [peer]).ratio for peer in _PEERS},
        op=pd.Categorical(frame.op, tuple(PASSES), ordered=True),
        dtype=pd.Categorical(frame["dtype"], _DTYPES, ordered=True),
    )
    return frame.sort_values(_KIND, kind="stable", ignore_index=True)


def _caches(result: Result) -> tuple[int, int]:
    where = result.environment
    return where["cache_per_core"], min(where["cache_shared"], _MOST_SHARED)


def _where_text(environment: Mapping[str, Any]) -> str:
    """Return the processor, the threads and the date of a run."""
    kind = environment.get("microarchitecture")
    cpu = f"{environment['cpu']} ({kind})" if kind else environment["cpu"]
    threads = f"{environment['threads']} thread" + "s" * (environment["threads"] != 1)
    return f"{cpu}, {threads}, {environment['date'][:10]}"


def _where(result: Result) -> str:
    return f"{_where_text(result.environment)}; {_versions(result)}"


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {text}" for name, text in result.environment["versions"].items())


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of `_OP` and `_DTYPE` that a peer computes, too."""
    return frame[(frame.op == _OP) & (frame["dtype"] == _DTYPE) & frame.ratio.notna()]


def _numbers(
    allocators: Result,
    models: Result,
    frameworks: Iterable[Result],
    result: Result,
    kinds: Iterable[_Kind],
) -> str:
    """Return a line for each kind of measurement: mean, best and worst ratio."""
    compiled = column(models.frame, "backnorm-compiled.ratio") / column(
        models.frame, "torch-compiled.ratio"
    )
    own = pd.concat([column(r.frame, "backnorm.ratio") for r in frameworks])
    fused = _by_allocator(allocators)["backnorm-fused.ratio"]
    sets = {
        "training step, `fuse=True`": fused["default"],
        "the same, an allocator that keeps memory": fused["keeping"],
        "training step under Inductor": compiled,
        "training step in flax and Keras": own,
        **{
            f"gradient, x {kind.size}, {_CHANNELS[kind.layout]}": kind.cells.ratio for kind in kinds
        },
    }
    ratios_of = {name: found.dropna() for name, found in sets.items()}
    table = pd.DataFrame(
        {
            "what is timed": list(ratios_of),
            "cases": [len(found) for found in ratios_of.values()],
            "mean": [f"**{_mean(found)}**" for found in ratios_of.values()],
            "best": [ratio_text(found.min()) for found in ratios_of.values()],
            "worst": [ratio_text(found.max()) for found in ratios_of.values()],
        }
    )
    return f"{markdown(table)}"


def _operator(result: Result, frame: pd.DataFrame, kinds: Iterable[_Kind]) -> str:
    chosen = _compared(frame)
    return (
        f"{_where(result)}.\n\n{markdown(_kinds_table(kinds))}\n"
        f"A peer is faster in {(chosen.ratio > 1).sum()} of {len(chosen)} cells.\n\n"
        f"{_plot(f'{BENCH.name}/operator.png')}"
    )


def _plot(path: str) -> str:
    return (
        "![Time of backnorm over that of the fastest peer for every cell in float32, by the size "
        f"of x. backnorm is faster below the line.]({path})\n"
    )


class _Kind(NamedTuple):
    """Cells of arrays of one range of sizes and one layout."""

    size: str
    layout: str
    cells: pd.DataFrame
    why: str


def _kinds(compared: pd.DataFrame, caches: Iterable[int]) -> list[_Kind]:
    """Return the compared cells, grouped by the keys of `_WHY`."""
    texts = [bytes_text(size) for size in caches]
    sizes = [*(f"up to {text}" for text in texts), f"above {texts[-1]}"]
    larger_than = sum((compared.nbytes > size).astype(int) for size in caches)
    return [
        _Kind(sizes[kind[0]], kind[1], found, _WHY[kind])
        for kind, found in compared.groupby([larger_than, compared.layout])
    ]


def _kinds_table(kinds: Iterable[_Kind]) -> pd.DataFrame:
    lines = []
    for kind in kinds:
        ratio = kind.cells.ratio
        best = beside_best(kind.cells)
        texts = (
            ratio.map(ratio_text)
            + ": "
            + kind.cells["shape"].map(shape_text)
            + ", "
            + (best.ours + " ms, " + best.peer + " " + best.time + " ms")
        )
        lines.append(
            (
                kind.size,
                kind.layout,
                len(kind.cells),
                f"**{ratio_text(geometric_mean(ratio))}**",
                *(texts[at] for at in (ratio.idxmin(), ratio.idxmax())),
                kind.why,
            )
        )
    columns = ["size of x", "layout", "cells", "mean", "best cell", "worst cell", "why"]
    return pd.DataFrame(lines, columns=columns)


def _steps(results: Iterable[Result]) -> str:
    """Return a line for each machine, batch and precision: mean and range of the steps."""
    lines: dict[tuple[str, int, str], dict[str, str]] = {}
    for result in results:
        frame, where = result.frame, result.environment
        size = frame["shape"].str.endswith("224,224").map({True: "16 x 224", False: "8 x 160"})
        for (precision, batch), cases in frame.groupby([frame.precision, size]):
            ours = column(cases, "backnorm-compiled.ratio")
            steps = {
                "fused": column(cases, "backnorm-fused.ratio").dropna(),
                "compiled": (ours / column(cases, "torch-compiled.ratio")).dropna(),
            }
            found = {name: _range(ratio) for name, ratio in steps.items() if len(ratio) > 1}
            key = (_machine(where), where["threads"], f"{batch}, {precision}")
            lines[key] = lines.get(key, {}) | found
    table = [
        {"processor": key[0], "threads": str(key[1]), "batch": key[2], "fused": DASH} | found
        for key, found in sorted(lines.items())
        if found
    ]
    return markdown(pd.DataFrame(table).fillna(DASH))


def _machine(where: Mapping[str, Any]) -> str:
    """Return the display name of a processor's microarchitecture."""
    kind = where.get("microarchitecture") or "Intel Xeon"
    return str(kind).replace("znver", "AMD Zen ")


def _by_allocator(result: Result) -> pd.DataFrame:
    """Return a row for each model and layout, and columns of (quantity, allocator)."""
    quantities = ["torch.step", "backnorm-fused.ratio", "fused", "layers"]
    index = ["model", "layout"]
    table = result.frame.pivot(index=index, columns="allocator", values=quantities)
    return table.reindex(pd.MultiIndex.from_frame(result.frame[index].drop_duplicates()))


def _allocators_table(result: Result) -> str:
    """Return a line for each model and layout: steps with both allocators."""
    found = _by_allocator(result)
    table = found.index.to_frame(index=False)
    counts = found["fused"]["keeping"], found["layers"]["keeping"]
    table["fused layers"] = [
        f"{fused:.0f} of {layers:.0f}" for fused, layers in zip(*counts, strict=True)
    ]
    last = ["geometric mean", "", ""]
    for allocator in ("default", "keeping"):
        steps = found["torch.step"][allocator].map(_whole_milliseconds)
        ratios = found["backnorm-fused.ratio"][allocator]
        table[f"PyTorch, {allocator}"] = steps.to_numpy()
        table[allocator] = ratios.map(ratio_text).to_numpy()
        means = [ratios.xs(layout, level="layout") for layout in ("contiguous", "channels_last")]
        last += ["", " / ".join(f"**{_mean(found)}**" for found in means)]
    table.loc[len(table)] = last
    return f"{_where(result)}.\n\n{markdown(table)}"


def _cell_by_cell(result: Result, frame: pd.DataFrame) -> str:
    chosen = _compared(frame)
    return "\n".join(
        [
            f"{_where(result)}. All numbers: [bench/{RESULT}](../bench/{RESULT}).\n",
            "## Means\n",
            markdown(_means(frame, frame.nbytes > _caches(result)[-1])),
            f"## {_OP}, {_DTYPE}\n",
            markdown(_by_shape(chosen[chosen.suite != SWEEP])),
        ]
    )


def _slower(result: Result, frame: pd.DataFrame) -> str:
    """Return the cells in which a peer is faster: their number, and the worst of each kind."""
    compared = frame[frame.ratio.notna()]
    lines = []
    for (op, dtype, layout), cells in compared.groupby([*_KIND, "layout"], observed=True):
        lost = cells[cells.ratio > 1].sort_values("ratio", ascending=False, kind="stable")
        if lost.empty:
            continue
        best = beside_best(lost)
        texts = lost.ratio.map(ratio_text) + " " + lost["shape"].map(shape_text)
        lines.append(
            {
                "cells": f"{op}, {dtype}, {layout}",
                "slower": f"{len(lost)} of {len(cells)}",
                "by a quarter": str((lost.ratio > _FAR_SLOWER).sum()),
                "the worst": ", ".join((texts + " " + best.peer).head(_SHOWN)),
            }
        )
    return (
        f"{_where(result)}. A peer is faster in {(compared.ratio > 1).sum()} of {len(compared)} "
        f"cells.\n\n{markdown(pd.DataFrame(lines))}"
    )


def _means(frame: pd.DataFrame, large: pd.Series) -> pd.DataFrame:
    """Return a line for every operation and type.

    Means of ratios to peers leave out the sweep; the worst ratio and means to the floor include it.
    """
    workload = frame[frame.suite != SWEEP].groupby(_KIND, observed=True)
    every = frame.groupby(_KIND, observed=True)
    beyond = frame[large].groupby(_KIND, observed=True)
    table = pd.DataFrame(
        {
            "cells": workload.ratio.count().astype(str),
            "to the best peer": workload.ratio.agg(geometric_mean).map(ratio_text),
            "worst": every.ratio.max().map(ratio_text),
            "in float32 arithmetic": workload.in_float32.agg(geometric_mean).map(ratio_text),
            "share of the floor": (1 / every.to_floor.agg(geometric_mean)).map(_percent),
            "beyond the cache": (1 / beyond.to_floor.agg(geometric_mean)).map(_percent),
        },
    )
    table.insert(0, "", [f"{op}, {dtype}" for op, dtype in table.index])
    return table


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _by_shape(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a line per shape, both layouts side by side, and their geometric means."""
    sides, shapes = [], [*frame["shape"].map(shape_text).unique(), "geometric mean"]
    for layout, found in frame.groupby("layout"):
        best = beside_best(found)
        side = pd.DataFrame(
            {
                f"{layout}, ms": best.ours,
                f"{layout}, best peer": best.peer + " " + best.time,
                f"{layout}, ratio": best.ratio,
            }
        ).set_index(found["shape"].map(shape_text))
        side.loc["geometric mean"] = ["", "", f"**{ratio_text(geometric_mean(found.ratio))}**"]
        sides.append(side.reindex(shapes, fill_value=DASH))
    return pd.concat(sides, axis=1).rename_axis("shape").reset_index()


def _machines(results: Mapping[str, Result], frames: Mapping[str, pd.DataFrame]) -> str:
    """Return the machines, the means of each by layout, and the cells above the limits."""
    where: list[dict[str, str]] = []
    tables: dict[str, dict[str, pd.Series]] = {}
    limits = {}
    for name, result in results.items():
        environment = result.environment
        machine = _short(environment)
        kinds = frames[name]["dtype"].map(
            {"float32": "float32", "bfloat16": "16 bits", "float16": "16 bits"}
        )
        frame = frames[name].assign(kind=kinds.astype(object))
        frame = frame[(frame.nbytes > _SMALL) & frame.kind.notna()]
        far = frame.nbytes * frame.op.astype(str).map(LEAST_PASSES) > _FAR
        frame = frame.assign(
            far=frame.to_floor.where(far), far_in_float32=frame.floor_in_float32.where(far)
        )
        limits[machine] = [_exceeded(frame, *limit) for limit in _LIMITS]
        where.append(
            {
                "machine": machine,
                "threads, date": f"{environment['threads']}, {environment['date'][:10]}",
                "cache of a core": bytes_text(environment["cache_per_core"]),
                "shared": bytes_text(environment["cache_shared"]),
                "cells": f"[{len(frames[name])}](../bench/{name})",
            }
        )
        for heading, kind, quantity in _QUANTITIES:
            of_kind = frame[frame.kind == kind]
            if of_kind[quantity].notna().any():
                text = _mean if quantity == "far" else _beside
                by_layout = of_kind.groupby(["op", "layout"], observed=True)[quantity].agg(text)
                tables.setdefault(heading, {})[machine] = by_layout
    parts = [markdown(pd.DataFrame(where))]
    for heading, columns in tables.items():
        table = pd.DataFrame(columns).fillna(DASH)
        table.insert(0, "", [", ".join(map(str, at)) for at in table.index])
        parts += [f"### {heading}\n", markdown(table.reset_index(drop=True))]
    arithmetic = {"in_float32": ' with `arithmetic="float32"`'}
    names = [
        f"{op}{arithmetic.get(name, '')}, "
        f"{'slower than' if most == 1 else f'above {most:g} of'} "
        f"{LABELS.get(name, 'the best peer')}"
        for op, name, most in _LIMITS
    ]
    parts += ["### Cells above the limits\n", markdown(pd.DataFrame({"float32": names, **limits}))]
    return "\n".join(parts)


def _short(environment: Mapping[str, Any]) -> str:
    """Return the name of a machine for the head of a column."""
    return _machine(environment).replace("emeraldrapids", "Emerald Rapids")


def _exceeded(frame: pd.DataFrame, op: str, name: str, most: float) -> str:
    found = frame[(frame.kind == "float32") & (frame.op == op)][name].dropna()
    return f"{(found > most).mean() * 100:.0f} %" if len(found) else DASH


def _beside(found: pd.Series) -> str:
    above = (found > 1).sum()
    return f"{_mean(found)} ({above})" if above else _mean(found)


def _mean(found: pd.Series) -> str:
    return ratio_text(geometric_mean(found))


def _models_table(result: Result, runs: Mapping[str, Result]) -> str:
    """Return a line for each model and layout: figures of one machine, and steps of all."""
    frame, steps = result.frame, _runs(runs)
    table = pd.DataFrame(
        {
            "model": frame.model,
            "layout": frame.layout,
            "share": (column(frame, "torch.normalization") / column(frame, "torch.step")).map(
                ratio_text
            ),
        }
    )
    for heading, variant, quantity, beside in _COLUMNS:
        found = column(frame, f"{variant}.{quantity}") / column(frame, f"{beside}.{quantity}")
        table[heading] = found.map(ratio_text)
    table = table.merge(steps, on=["model", "layout"], validate="one_to_one")
    return f"{_where(result)}:\n\n{markdown(table)}"


def _runs(results: Mapping[str, Result]) -> pd.DataFrame:
    """Return the steps of each model over all machines, batches and element types."""
    frames = []
    for result in results.values():
        frame = result.frame
        ours = column(frame, "backnorm-compiled.ratio")
        compiled = ours / column(frame, "torch-compiled.ratio")
        frames.append(
            frame[["model", "layout"]].assign(
                fused=column(frame, "backnorm-fused.ratio"), compiled=compiled
            )
        )
    lines = [
        {"model": model, "layout": layout}
        | {name: _range(found[name].dropna()) for name in ("fused", "compiled")}
        for (model, layout), found in pd.concat(frames).groupby(["model", "layout"])
    ]
    return pd.DataFrame(lines)


def _range(ratio: pd.Series) -> str:
    if ratio.empty:
        return DASH
    ends = DASH.join(map(ratio_text, (ratio.min(), ratio.max())))
    return f"{_mean(ratio)} ({ends}; {len(ratio)})"


def _frameworks(results: Iterable[Result]) -> str:
    """Return the text and the table of other frameworks; each result has another thread count."""
    lines, versions = [], {}
    for result in results:
        where = result.environment
        versions |= where["versions"]
        for _, row in result.frame.iterrows():
            own = row.model.split("-")[0]
            step = row[f"{own}.step"]
            spread = f"({row[f'{own}.p20'] / step:.2f} to {row[f'{own}.p80'] / step:.2f})"
            ours = (row.get(f"{variant}.ratio", float("nan")) for variant in _VARIANTS.values())
            lines.append(
                [
                    f"{row.model}, {_images(row['shape'])}",
                    where["threads"],
                    f"{_whole_milliseconds(step)} {spread}",
                    *map(ratio_text, ours),
                ]
            )
    headings = ["model, batch", "threads", "own layers", *_VARIANTS]
    named = ", ".join(f"{name} {text}" for name, text in versions.items())
    cpu, _, day = _where_text(where).rsplit(", ", 2)
    return (
        f"{cpu}, {day}; {named}. The columns after *own layers* have the time of a training step "
        "(float32, channels last), divided by that with the framework's own layers. In brackets: "
        "20th and 80th percentile of the steps' times, divided by their median.\n\n"
        f"{markdown(pd.DataFrame(lines, columns=headings))}"
    )


def _images(shape: str) -> str:
    count, _, *space = shape.split(",")
    return shape_text(",".join((count, *space)))


def _whole_milliseconds(seconds: float) -> str:
    return DASH if pd.isna(seconds) else f"{seconds * 1e3:.0f} ms"


def main() -> int:
    """Write pages and plots, or with --check report the pages that are not current."""
    is_check = options(__doc__).check
    found = pages(ROOT)
    if is_check:
        old = [path for path, text in found.items() if path.read_text(encoding="utf-8") != text]
        for path in old:
            print(f"{path.relative_to(ROOT)} is not current: run "
                  "python -m scripts.update_performance_docs", file=sys.stderr)  # fmt: skip
        return 1 if old else 0
    for path, text in found.items():
        path.write_text(text, encoding="utf-8")
    folder = ROOT / BENCH
    result = read(folder / RESULT)
    chosen = result.frame[result.frame["dtype"] == _DTYPE]
    operator_plot(Result(result.environment, chosen), folder / "operator.png")
    models_plot(read(folder / MODELS), folder / "models.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
