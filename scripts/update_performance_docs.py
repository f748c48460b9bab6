"""Write the tables and plots of the pages of measurements from the results in docs/bench.

A file in docs/bench is a result of `benchmarks operator` or of `benchmarks models`. Its contents,
not its name, say what it is. A result is of this version of backnorm if it was measured on the day
`SINCE` or later; set `SINCE` when a change of the code makes older results untrue. The README and
the first tables of docs/performance.md show results of this version only. Only text between the
markers is replaced. With --check: report the pages that are not current, and write nothing.

Usage, from the root of the repository: python -m scripts.update_performance_docs [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.cells import LEAST_PASSES, OURS, OURS_IN_FLOAT32, PASSES, SWEEP
from benchmarks.models.cases import LAYOUTS
from benchmarks.models.report import FASTER, batches, comparisons, plot_comparisons
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

#: The first day of results of this version: the last change of speed was before this day.
SINCE = "2026-11-27"

# The result of `benchmarks operator` that pages show while there is none of this version.
RESULT = "zen5.json"
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

# The variants of models in the tables of steps.
_STEPS = {"backnorm-fused": "`fuse=True`", "backnorm-compiled": "compiled"}
_ALLOCATORS = {"default": "default allocator", "keeping": "allocator that keeps memory"}
_BATCHES = {"small": "8 x 160", "large": "16 x 224"}
_LAYOUTS = (FASTER, "contiguous", "channels_last")

# Columns of the tables of models: heading, variant, quantity, variant and quantity that it is
# divided by.
_COLUMNS = (
    ("share", "torch", "normalization", "torch", "step"),
    ("normalisation", "backnorm-fused", "normalization", "torch", "normalization"),
    ("memory", "backnorm-fused", "memory", "torch", "memory"),
)
_VARIANTS = {
    "ours": "backnorm",
    "ours, float32": "backnorm-float32",
    "fused": "backnorm-fused",
    "fused, float32": "backnorm-fused-float32",
}

_MODELS_PLOT = (
    "![Time of a training step with backnorm, divided by that with PyTorch's layers: a row for "
    "each model, a mark for each layout, and a ring where each library has its faster layout. "
    "backnorm is faster left of the line.]"
    f"(../{BENCH.name}/models.svg)\n"
)

_GRADIENT = (
    "The gradient alone (`batch_norm_backward` in float32), compared with the fastest of PyTorch, "
    "TensorFlow, JAX, oneDNN and NumPy:\n"
)

# The columns of the cases of all results.
_CASES = ["processor", "threads", "model", "batch", "precision", "allocator", "layout", "variant",
          "base", "base_step", "ratio"]  # fmt: skip

#: The text of a number that was not measured with this version.
NONE = "none"


class _Measured(NamedTuple):
    """The results in docs/bench: of the operator, by file, the one that pages show first; of
    PyTorch's models, with this version and with earlier ones; of the models of other frameworks.
    """

    operator: dict[str, Result]
    current: list[Result]
    earlier: list[Result]
    frameworks: list[Result]


def _measured(root: Path) -> _Measured:
    results = {path.name: read(path) for path in sorted((root / BENCH).glob("*.json"))}
    operator = {name: r for name, r in results.items() if r.environment["command"] == "operator"}
    newest = sorted(operator, key=lambda name: operator[name].environment["date"], reverse=True)
    shown = next(filter(lambda name: _is_current(operator[name]), newest), RESULT)
    models = [r for r in results.values() if r.environment["command"] == "models"]
    of_torch = [r for r in models if "torch.step" in r.frame]
    return _Measured(
        {name: operator[name] for name in sorted(newest, key=lambda name: name != shown)},
        [r for r in of_torch if _is_current(r)],
        [r for r in of_torch if not _is_current(r)],
        [r for r in models if "torch.step" not in r.frame],
    )


def pages(root: Path) -> dict[Path, str]:
    """Return the text of the pages by path."""
    machines, current, earlier, frameworks = _measured(root)
    frames = {name: _cells(result) for name, result in machines.items()}
    shown, result = next(iter(machines.items()))
    frame = frames[shown]
    kinds = _kinds(_compared(frame), _caches(result))
    cases = _cases(current)
    parts = {
        "README.md": {"numbers": _numbers(cases, kinds if _is_current(result) else [], result)},
        "docs/performance.md": {
            "choices": _choices(cases),
            "steps": _steps(cases),
            "operator": _operator(result, frame, kinds),
        },
        f"{MEASURED}/training-steps.md": {
            "models": "\n".join([*map(_by_model, current), _MODELS_PLOT]),
            "earlier": _steps(_cases(earlier)),
            "frameworks": _frameworks(frameworks),
        },
        f"{MEASURED}/operator.md": {"bench": _cell_by_cell(shown, result, frame)},
        f"{MEASURED}/slower.md": {"slower": _slower(shown, result, frame)},
        f"{MEASURED}/machines.md": {"machines": _machines(machines, frames)},
    }
    found = {}
    for name, of_page in parts.items():
        text = (root / name).read_text(encoding="utf-8")
        for marker, part in of_page.items():
            text = between(name, text, part, marker)
        found[root / name] = text
    return found


def _plots(root: Path) -> None:
    """Write the plots of the shown result of the operator and of this version's models."""
    machines, current, *_ = _measured(root)
    result = next(iter(machines.values()))
    chosen = result.frame[result.frame["dtype"] == _DTYPE]
    folder = root / BENCH
    operator_plot(Result(result.environment, chosen), folder / "operator.svg")
    cases = _cases(current)
    cases = cases[cases.variant.isin(_STEPS)].assign(
        threads=cases.threads + " threads",
        batch=cases.batch.map(_BATCHES),
        variant=cases.variant.str.removeprefix("backnorm-"),
    )
    ordered = cases.sort_values(["variant", "allocator"], ascending=[False, True], kind="stable")
    plot_comparisons(ordered, folder / "models.svg")


def _is_current(result: Result) -> bool:
    return str(result.environment["date"]) >= SINCE


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
    return f"{_where_text(result.environment)}; {_named(_versions(result))}"


def _named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in versions.items())


def _versions(result: Result) -> dict[str, str]:
    ours = "(this version)" if _is_current(result) else "(an earlier version)"
    return result.environment["versions"] | {"backnorm": ours}


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of `_OP` and `_DTYPE` that a peer computes, too."""
    return frame[(frame.op == _OP) & (frame["dtype"] == _DTYPE) & frame.ratio.notna()]


def _cases(results: Iterable[Result]) -> pd.DataFrame:
    """Return the comparisons of these results, each with its processor and threads."""
    parts = []
    for result in results:
        part = comparisons(result)
        part.insert(0, "processor", _machine(result.environment))
        part.insert(1, "threads", str(result.environment["threads"]))
        parts.append(part)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=_CASES)


def _table(lines: Sequence[Mapping[str, str]]) -> str:
    """Return lines as a table, or a sentence if there are none."""
    return markdown(pd.DataFrame(lines)) if lines else "Not measured with this version.\n"


def _numbers(cases: pd.DataFrame, kinds: Iterable[_Kind], result: Result) -> str:
    """Return the README's tables: training steps by layout, and the gradient by size."""
    cases = cases[(cases.batch == "small") & (cases.precision == "float32")]
    conditions = ["processor", "threads", "allocator"]
    columns = {
        f"{processor}, {threads} threads, {_ALLOCATORS[allocator]}": of_condition
        for (processor, threads, allocator), of_condition in cases.groupby(conditions)
    }
    steps = [
        {"training step": f"{step}, {_of_both(layout)}"}
        | {
            head: _with_slower(found[(found.variant == variant) & (found.layout == layout)])
            for head, found in columns.items()
        }
        for variant, step in _STEPS.items()
        for layout in _LAYOUTS
        if columns
    ]
    where = f"{_machine(result.environment)}, {result.environment['threads']} threads"
    gradient = [
        {
            "gradient": f"x {kind.size}, {_CHANNELS[kind.layout]}",
            where: _with_slower(kind.cells),
            "best": ratio_text(kind.cells.ratio.min()),
            "worst": ratio_text(kind.cells.ratio.max()),
        }
        for kind in kinds
    ]
    return "\n".join([_table(steps), _GRADIENT, _table(gradient)])


def _of_both(layout: str) -> str:
    return "each library with its faster layout" if layout == FASTER else f"both {layout}"


def _with_slower(cases: pd.DataFrame) -> str:
    if cases.empty:
        return NONE
    return f"**{_mean(cases.ratio)}** (slower in {(cases.ratio > 1).sum()} of {len(cases)})"


def _choices(cases: pd.DataFrame) -> str:
    """Return what a layout and an allocator change in PyTorch's own steps, for each processor."""
    cases = cases[(cases.variant == "backnorm-fused") & (cases.layout != FASTER)]
    lines = []
    machine = ["processor", "threads"]
    for names, of_machine in cases.groupby(machine):
        index = ["model", "batch", "precision"]
        steps = of_machine.pivot(index=index, columns=["allocator", "layout"], values="base_step")
        steps = steps.reindex(columns=pd.MultiIndex.from_product([_ALLOCATORS, LAYOUTS]))
        last = steps.xs("channels_last", axis=1, level=1)
        first = steps.xs("contiguous", axis=1, level=1)
        ratios_of = {
            "channels_last over contiguous": (last / first).stack(),
            "keeping over default allocator": (steps["keeping"] / steps["default"]).stack(),
            "both": last["keeping"] / first["default"],
        }
        found = {name: _range(ratio.dropna()) for name, ratio in ratios_of.items()}
        lines.append(dict(zip(machine, names, strict=True)) | found)
    return _table(lines)


def _operator(result: Result, frame: pd.DataFrame, kinds: Iterable[_Kind]) -> str:
    chosen = _compared(frame)
    return (
        f"{_where(result)}.\n\n{markdown(_kinds_table(kinds))}\n"
        f"A peer is faster in {(chosen.ratio > 1).sum()} of {len(chosen)} cells.\n\n"
        f"{_plot(f'{BENCH.name}/operator.svg')}"
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


def _steps(cases: pd.DataFrame) -> str:
    """Return a line for each variant, machine, batch, precision and allocator."""
    lines = []
    condition = ["processor", "threads", "batch", "precision", "allocator"]
    for variant, step in _STEPS.items():
        for names, found in cases[cases.variant == variant].groupby(condition):
            by_layout = {layout: _range(found.ratio[found.layout == layout]) for layout in _LAYOUTS}
            facts = dict(zip(condition, names, strict=True))
            facts["batch"] = _BATCHES[facts["batch"]]
            lines.append({"step": step} | facts | by_layout)
    return _table(lines)


def _machine(where: Mapping[str, Any]) -> str:
    """Return the display name of a processor.

    LLVM does not know the name of every processor of a cloud, and then returns that of another one
    with the same instructions. Its names of AMD's and of these Intel processors are true.
    """
    kind = str(where.get("microarchitecture"))
    if kind.startswith("znver"):
        return kind.replace("znver", "AMD Zen ")
    if kind.endswith("rapids"):
        return f"{kind.removesuffix('rapids').title()} Rapids"
    return " ".join(where["cpu"].replace("(R)", "").removesuffix("Processor").split())


def _by_model(result: Result) -> str:
    """Return a line for each model and layout of a result: its steps under each condition."""
    tables = []
    for (batch, precision), found in comparisons(result).groupby(["batch", "precision"]):
        rows = pd.MultiIndex.from_product([found.model.unique(), (*LAYOUTS, FASTER)])
        table, means = rows.to_frame(index=False, name=["model", "layout"]), {}
        of_rows = found.set_index(["model", "layout"])
        if "backnorm-fused.step" in result.frame:
            quantities = _quantities(result, batch, precision).reindex(rows).fillna("")
            table = table.join(quantities.reset_index(drop=True))
        conditions = ["variant", "base", "allocator"]
        for (variant, base, allocator), each in of_rows.groupby(conditions, sort=True):
            own = "PyTorch" if base == "torch" else "PyTorch compiled"
            ours = f"{variant.removeprefix('backnorm-')}, {allocator}"
            each = each.reindex(rows)
            table[f"{own}, {allocator}"] = [*each.base_step.map(_whole_milliseconds)]
            table[ours] = [*each.ratio.map(ratio_text)]
            means[ours] = each.ratio.groupby(level=1).agg(geometric_mean).map(ratio_text)
        for layout in (*LAYOUTS, FASTER):
            last = {name: f"**{of_layout[layout]}**" for name, of_layout in means.items()}
            last |= {"model": "geometric mean", "layout": layout}
            table.loc[len(table)] = [last.get(name, "") for name in table]
        tables.append(
            f"{_where(result)}; batch {_BATCHES[batch]}, {precision}.\n\n{markdown(table)}"
        )
    return "\n".join(tables)


def _quantities(result: Result, batch: str, precision: str) -> pd.DataFrame:
    """Return texts of fused layers, share, normalisation and memory; means over allocators."""
    frame = result.frame
    numbers = pd.DataFrame(
        {
            heading: column(frame, f"{variant}.{quantity}") / column(frame, f"{beside}.{other}")
            for heading, variant, quantity, beside, other in _COLUMNS
        }
    )
    layers = frame.fused.astype(str) + " of " + frame.layers.astype(str)
    chosen = (batches(frame) == batch) & (frame.precision == precision)
    grouped = numbers.assign(model=frame.model, layout=frame.layout, layers=layers)[chosen].groupby(
        ["model", "layout"]
    )
    means = {name: grouped[name].agg(geometric_mean).map(ratio_text) for name in numbers}
    return pd.DataFrame({"fused layers": grouped.layers.first()} | means)


def _cell_by_cell(name: str, result: Result, frame: pd.DataFrame) -> str:
    chosen = _compared(frame)
    return "\n".join(
        [
            f"{_where(result)}. {_every_cell(name)}\n",
            "## Means\n",
            markdown(_means(frame, frame.nbytes > _caches(result)[-1])),
            f"## {_OP}, {_DTYPE}\n",
            markdown(_by_shape(chosen[chosen.suite != SWEEP])),
        ]
    )


def _every_cell(name: str) -> str:
    return f"Every cell: [bench/{name}](../bench/{name})."


def _slower(name: str, result: Result, frame: pd.DataFrame) -> str:
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
        f"cells. {_every_cell(name)}\n\n{markdown(pd.DataFrame(lines))}"
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
        machine = _machine(environment)
        # An older result of the same machine is of no use.
        if machine in limits:
            continue
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
                "version": "this" if _is_current(result) else "earlier",
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


def _exceeded(frame: pd.DataFrame, op: str, name: str, most: float) -> str:
    found = frame[(frame.kind == "float32") & (frame.op == op)][name].dropna()
    return f"{(found > most).mean() * 100:.0f} %" if len(found) else DASH


def _beside(found: pd.Series) -> str:
    above = (found > 1).sum()
    return f"{_mean(found)} ({above})" if above else _mean(found)


def _mean(found: pd.Series) -> str:
    return ratio_text(geometric_mean(found))


def _range(ratio: pd.Series) -> str:
    if ratio.empty:
        return NONE
    ends = DASH.join(map(ratio_text, (ratio.min(), ratio.max())))
    return f"{_mean(ratio)} ({ends}; {len(ratio)})"


def _frameworks(results: Iterable[Result]) -> str:
    """Return the text and the table of other frameworks; each result has another thread count."""
    lines, versions = [], {}
    for result in results:
        where = result.environment
        versions |= _versions(result)
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
    cpu, _, day = _where_text(where).rsplit(", ", 2)
    return (
        f"{cpu}, {day}; {_named(versions)}. The columns after *own layers* have the time of a "
        "training step (float32, channels last), divided by that with the framework's own layers. "
        "In brackets: 20th and 80th percentile of the steps' times, divided by their median.\n\n"
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
    _plots(ROOT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
