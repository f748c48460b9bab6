"""Write the tables and plots of the pages of measurements from the results in docs/bench.

A file in docs/bench is a result of `benchmarks operator` or of `benchmarks models`. Its contents,
not its name, say what it is. A result is of this version of backnorm if it was measured on the day
`SINCE` or later; set `SINCE` when a change of the code makes older results untrue. The README and
the first tables of docs/performance.md show results of this version only. Only text between the
markers is replaced. With --check: name the pages that are not current, and write nothing.

Usage: python -m scripts.update_performance_docs [--check]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.cells import LEAST_PASSES, OURS, OURS_IN_FLOAT32, PASSES
from benchmarks.models.cases import LAYOUTS
from benchmarks.models.report import FASTER, batches, comparisons, models_lines, plot_comparisons
from benchmarks.results import (
    DASH,
    Result,
    beside_best,
    bytes_text,
    column,
    geometric_mean,
    markdown,
    nbytes,
    operator_lines,
    operator_plot,
    operator_table,
    ratio_text,
    ratio_to_floor,
    ratios,
    read,
    shape_text,
)
from scripts.generated import between, options, write_or_check

ROOT = Path(__file__).resolve().parents[1]
BENCH = Path("docs/bench")
MEASURED = "docs/measurements"

#: The first day of results of this version: the last change of speed was before this day.
SINCE = "2026-11-27"

# Tables by cell have the project's main operator and the most common type in training.
_OP, _DTYPE = "backward", "float32"
_KIND = ["op", "dtype"]
# Types in the order of tables, and their names in tables of machines, which leave out float64.
_DTYPES = {"float32": "float32", "bfloat16": "16 bits", "float16": "16 bits", "float64": "64 bits"}

_CHANNELS = {"NCX": "channels first", "NXC": "channels last"}

# The most bytes of the processor's last-level cache that a virtual machine can rely on.
_MOST_SHARED = 32 << 20

# Tables by layout: bytes of x above which cells count (below, a call from Python costs more than
# the work), and bytes of all arrays together that no cache holds.
_SMALL, _FAR = 64 << 10, 48_000_000

# The tables of machines: heading, kind of elements, column of the cells.
_QUANTITIES = (
    ("float32, over the best peer", "float32", "ratio"),
    ('float32 in `arithmetic="float32"`, over the best peer', "float32", "in_float32"),
    ("float32, over PyTorch", "float32", "torch"),
    ("float32, over the floor", "float32", "far"),
    ("16 bits, over the best peer", "16 bits", "ratio"),
    ("16 bits, over the floor", "16 bits", "far"),
)

# The ratio above which a cell counts as much slower, and how many slower cells are shown.
_FAR_SLOWER, _SHOWN = 1.25, 3

# The variants, layouts, batches and allocators of tables of training steps.
_STEPS = {"backnorm-fused": "`fuse=True`", "backnorm-compiled": "compiled"}
_LAYOUTS = {
    FASTER: "each library with its faster layout",
    "contiguous": "both contiguous",
    "channels_last": "both channels_last",
}
_BATCHES = {"small": "8 x 160", "large": "16 x 224"}
# The fastest allocator first: the one that a user who wants speed compares with.
_ALLOCATORS = {
    "huge": "keeps memory in huge pages",
    "keeping": "keeps memory",
    "default": "default",
}

_GRADIENT = (
    "The gradient alone (`batch_norm_backward` in float32), compared with the fastest of PyTorch, "
    "TensorFlow, JAX, oneDNN and NumPy:\n"
)
#: The text of a number that was not measured with this version.
NONE = "none"


class _Operator(NamedTuple):
    """A result of the operator: its file, and its cells, sorted and with ratios."""

    file: str
    result: Result
    cells: pd.DataFrame

    @property
    def environment(self) -> dict[str, Any]:
        return self.result.environment

    @property
    def every_cell(self) -> str:
        return f"Every cell: [bench/{self.file}](../bench/{self.file})."

    def compared(self) -> pd.DataFrame:
        """Return the cells of `_OP` and `_DTYPE` that a peer computes, too."""
        chosen = (self.cells.op == _OP) & (self.cells["dtype"] == _DTYPE)
        return self.cells[chosen & self.cells.ratio.notna()]


class _Measured(NamedTuple):
    """The results in docs/bench: of the operator, the newest first, which pages show; of PyTorch's
    models, with this version and with earlier ones; of the models of other frameworks.
    """

    operator: list[_Operator]
    current: list[Result]
    earlier: list[Result]
    frameworks: list[Result]


def _measured(root: Path) -> _Measured:
    results = {path.name: read(path) for path in sorted((root / BENCH).glob("*.json"))}
    operator = [
        _Operator(name, result, _cells(result.frame))
        for name, result in results.items()
        if result.environment["command"] == "operator"
    ]
    models = [r for r in results.values() if r.environment["command"] == "models"]
    of_torch = [r for r in models if "torch.step" in r.frame]
    return _Measured(
        sorted(operator, key=lambda each: str(each.environment["date"]), reverse=True),
        [r for r in of_torch if _is_current(r)],
        [r for r in of_torch if not _is_current(r)],
        [r for r in models if "torch.step" not in r.frame],
    )


def _is_current(result: Result) -> bool:
    return str(result.environment["date"]) >= SINCE


def _cells(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the cells, sorted by operation and type, with further columns.

    These are `nbytes`, `kind` of elements, and the ratios of our time to others: to the best
    peer's, `ratio` and `in_float32`; to PyTorch's, `torch`; to the floor's, `floor`, and `far`
    where no cache holds the arrays.
    """
    sizes, floor = nbytes(frame), ratio_to_floor(frame)
    frame = frame.assign(
        nbytes=sizes,
        kind=frame["dtype"].map(_DTYPES),
        ratio=ratios(frame).ratio,
        in_float32=ratios(frame, OURS_IN_FLOAT32).ratio,
        floor=floor,
        far=floor.where(sizes * frame.op.map(LEAST_PASSES) > _FAR),
        torch=ratios(frame, OURS, ["torch"]).ratio,
        op=pd.Categorical(frame.op, tuple(PASSES), ordered=True),
        dtype=pd.Categorical(frame["dtype"], tuple(_DTYPES), ordered=True),
    )
    return frame.sort_values(_KIND, kind="stable", ignore_index=True)


def _cases(results: Iterable[Result]) -> pd.DataFrame:
    """Return the comparisons of `_STEPS`, each with its processor and threads."""
    parts = [
        comparisons(result).assign(
            processor=_machine(result.environment), threads=str(result.environment["threads"])
        )
        for result in results
    ]
    if not parts:
        return pd.DataFrame()
    found = pd.concat(parts, ignore_index=True)
    found = found[found.variant.isin(_STEPS)]
    return found[["processor", "threads", *found.columns.drop(["processor", "threads"])]].assign(
        step=pd.Categorical(found.variant.map(_STEPS), tuple(_STEPS.values()), ordered=True),
        batch=found.batch.map(_BATCHES),
        layout=pd.Categorical(found.layout, tuple(_LAYOUTS), ordered=True),
        allocator=pd.Categorical(found.allocator, (*_ALLOCATORS, DASH), ordered=True),
    )


def _machine(where: dict[str, Any]) -> str:
    """Return the display name of a processor.

    LLVM does not know the name of every processor of a cloud, and then returns that of another one
    with the same instructions. Its names of AMD's and of these Intel processors are true.
    """
    kind = str(where.get("microarchitecture"))
    name = " ".join(where["cpu"].replace("(R)", "").removesuffix("Processor").split())
    if kind.startswith("znver"):
        name = kind.replace("znver", "AMD Zen ")
    elif kind.endswith("rapids"):
        name = f"{kind.removesuffix('rapids').title()} Rapids"
    return f"{name}, {where['host']}" if where.get("host") else name


def _where(result: Result) -> str:
    """Return the processor, the threads, the date and the versions of a run."""
    where = result.environment
    kind, host = where.get("microarchitecture"), where.get("host")
    ours = "(this version)" if _is_current(result) else "(an earlier version)"
    versions = where["versions"] | {"backnorm": ours}
    return (
        f"{where['cpu']}{f' ({kind})' if kind else ''}{f', {host}' if host else ''}, "
        f"{where['threads']} thread{'s' * (where['threads'] != 1)}, {where['date'][:10]}; "
        f"{', '.join(f'{name} {text}' for name, text in versions.items())}"
    )


def _table(table: pd.DataFrame) -> str:
    """Return a table of texts, or a sentence if it has no rows."""
    return "Not measured with this version.\n" if table.empty else markdown(table)


def _mean(found: pd.Series) -> str:
    return ratio_text(geometric_mean(found))


def _with_slower(found: pd.Series) -> str:
    return f"**{_mean(found)}** (slower in {(found > 1).sum()} of {len(found)})"


def _above(found: pd.Series) -> str:
    """Return the mean, and the number of ratios above 1."""
    above = (found > 1).sum()
    return f"{_mean(found)} ({above})" if above else _mean(found)


def _range(found: pd.Series) -> str:
    found = found.dropna()
    ends = DASH.join(map(ratio_text, (found.min(), found.max())))
    return f"{_mean(found)} ({ends}; {len(found)})" if len(found) else NONE


def _numbers(measured: _Measured) -> str:
    """Return the README's tables: training steps by layout, and the gradient by size."""
    cases, shown = _cases(measured.current), measured.operator[0]
    steps = gradient = pd.DataFrame()
    if len(cases):
        cases = cases[(cases.batch == _BATCHES["small"]) & (cases.precision == "float32")]
        cases = cases.assign(
            machine=cases.processor + ", " + cases.threads + " threads",
            allocator=cases.allocator.cat.rename_categories(_ALLOCATORS),
        )
        steps = cases.groupby(["step", "allocator", "machine", "layout"]).ratio.agg(_with_slower)
        steps = steps.unstack("layout").reindex(columns=[*_LAYOUTS]).fillna(NONE)
        steps = steps.rename(columns=_LAYOUTS).reset_index()
    if _is_current(shown.result):
        kinds = _kinds(shown)
        where = f"{_machine(shown.environment)}, {shown.environment['threads']} threads"
        gradient = pd.DataFrame(
            {
                "gradient": "x " + kinds["size of x"] + ", " + kinds.layout.map(_CHANNELS),
                where: kinds.slower,
                "best": kinds["best cell"].str.partition(":")[0],
                "worst": kinds["worst cell"].str.partition(":")[0],
            }
        )
    return "\n".join([_table(steps), _GRADIENT, _table(gradient)])


def _choices(measured: _Measured) -> str:
    """Return what a layout and an allocator change in PyTorch's own steps, for each processor."""
    cases, machine = _cases(measured.current), ["processor", "threads"]
    if cases.empty:
        return _table(cases)
    fused = cases[(cases.variant == "backnorm-fused") & (cases.layout != FASTER)]
    steps = fused.pivot(
        index=[*machine, "model", "batch", "precision"],
        columns=["allocator", "layout"],
        values="base_step",
    ).reindex(columns=pd.MultiIndex.from_product([_ALLOCATORS, LAYOUTS]))
    last = steps.xs("channels_last", axis=1, level=1)
    first = steps.xs("contiguous", axis=1, level=1)
    found = {
        "channels_last over contiguous": (last / first).stack(),
        "keeping over default allocator": (steps["keeping"] / steps["default"]).stack(),
        "huge pages over keeping": (steps["huge"] / steps["keeping"]).stack(),
        "channels_last and keeping": last["keeping"] / first["default"],
        "all three": last["huge"] / first["default"],
    }
    texts = {name: ratio.groupby(machine).agg(_range) for name, ratio in found.items()}
    return markdown(pd.DataFrame(texts).reset_index())


def _steps(results: Iterable[Result]) -> str:
    """Return a line for each variant, machine, batch, precision and allocator."""
    cases = _cases(results)
    if cases.empty:
        return _table(cases)
    condition = ["step", "processor", "threads", "batch", "precision", "allocator"]
    texts = cases.groupby([*condition, "layout"]).ratio.agg(_range).unstack("layout")
    return markdown(texts.reindex(columns=[*_LAYOUTS]).fillna(NONE).reset_index())


def _kinds(shown: _Operator) -> pd.DataFrame:
    """Return the compared cells by the number of caches that x exceeds, and by layout."""
    cells, where = shown.compared(), shown.environment
    caches = where["cache_per_core"], min(where["cache_shared"], _MOST_SHARED)
    best = beside_best(cells)
    cells = cells.assign(
        text=cells.ratio.map(ratio_text) + ": " + cells["shape"].map(shape_text) + ", "
        + best.ours + " ms, " + best.peer + " " + best.time + " ms",
    )  # fmt: skip
    sizes = [*(f"up to {bytes_text(size)}" for size in caches), f"above {bytes_text(caches[1])}"]
    exceeded = sum((cells.nbytes > size).astype(int) for size in caches)
    return pd.DataFrame(
        {
            "size of x": sizes[kind[0]],
            "layout": kind[1],
            "cells": len(found),
            "mean": f"**{_mean(found.ratio)}**",
            "best cell": found.text[found.ratio.idxmin()],
            "worst cell": found.text[found.ratio.idxmax()],
            "slower": _with_slower(found.ratio),
        }
        for kind, found in cells.groupby([exceeded, cells.layout])
    )


def _operator(measured: _Measured) -> str:
    shown = measured.operator[0]
    ratio = shown.compared().ratio
    return (
        f"{_where(shown.result)}.\n\n{markdown(_kinds(shown).drop(columns='slower'))}\n"
        f"A peer is faster in {(ratio > 1).sum()} of {len(ratio)} cells.\n"
    )


def _models(results: Iterable[Result]) -> str:
    """Return the means of each result, and a line for each model and layout.

    The columns have seconds of steps with the framework's own layers, and our ratios to them.
    """
    parts, index = [], ["model", "layout"]
    for result in results:
        # Results of other frameworks have too few cases for means.
        lines = models_lines(result) if "torch.step" in result.frame else []
        parts += [f"{_where(result)}.\n", *(f"- {line}" for line in lines)]
        for (batch, precision), found in comparisons(result).groupby(["batch", "precision"]):
            compiled = found.variant.str.contains("compiled").map({True: ", compiled", False: ""})
            long = pd.concat(
                [
                    found.assign(of="own" + compiled, text=found.base_step.map("{:.3f} s".format)),
                    found.assign(of=found.variant, text=found.ratio.map(ratio_text)),
                ]
            )
            table = long.assign(of=long.of + ", " + long.allocator)
            table = table.drop_duplicates([*index, "of"]).pivot(
                index=index, columns="of", values="text"
            )
            rows = pd.MultiIndex.from_product(
                [found.model.unique(), [*LAYOUTS, FASTER]], names=index
            )
            table = table.reindex(rows[rows.isin(table.index)])
            table = table.join(_quantities(result.frame, batch, precision)).fillna(DASH)
            table = table.reset_index()
            parts += [f"\n{batch} batch, {precision}:\n", markdown(table)]
    return "\n".join(parts)


def _quantities(frame: pd.DataFrame, batch: str, precision: str) -> pd.DataFrame:
    """Return the known ones of share and normalisation, by model and layout."""
    frame = frame[(batches(frame) == batch) & (frame.precision == precision)]
    own, ours = (column(frame, f"{each}.normalization") for each in ("torch", "backnorm-fused"))
    known = frame.assign(share=own / column(frame, "torch.step"), normalisation=ours / own)
    known = known[["model", "layout", "share", "normalisation"]].dropna(axis=1, how="all")
    return known.groupby(["model", "layout"]).agg(_mean)


def _bench(measured: _Measured) -> str:
    """Return the means and every cell of the shown result."""
    shown = measured.operator[0]
    lines = [f"- {line}" for line in operator_lines(shown.result)]
    head = f"{_where(shown.result)}. {shown.every_cell}\n"
    return "\n".join([head, *lines, "", markdown(operator_table(shown.result))])


def _slower(measured: _Measured) -> str:
    """Return the cells in which a peer is faster: their number, and the worst of each kind."""
    shown = measured.operator[0]
    compared = shown.cells[shown.cells.ratio.notna()]
    lines = []
    for kind, cells in compared.groupby([*_KIND, "layout"], observed=True):
        lost = cells[cells.ratio > 1].sort_values("ratio", ascending=False, kind="stable")
        if lost.empty:
            continue
        texts = lost.ratio.map(ratio_text) + " " + lost["shape"].map(shape_text)
        lines.append(
            {
                "cells": ", ".join(kind),
                "slower": f"{len(lost)} of {len(cells)}",
                "by a quarter": str((lost.ratio > _FAR_SLOWER).sum()),
                "the worst": ", ".join((texts + " " + beside_best(lost).peer).head(_SHOWN)),
            }
        )
    return (
        f"{_where(shown.result)}. A peer is faster in {(compared.ratio > 1).sum()} of "
        f"{len(compared)} cells. {shown.every_cell}\n\n{markdown(pd.DataFrame(lines))}"
    )


def _machines(measured: _Measured) -> str:
    """Return the machines, the means of each by layout, and the cells above the limits."""
    machines: dict[str, _Operator] = {}
    for each in measured.operator:
        # An older result of the same machine is of no use.
        machines.setdefault(_machine(each.environment), each)
    where = pd.DataFrame(
        {
            "machine": machine,
            "version": "this" if _is_current(each.result) else "earlier",
            "threads, date": f"{each.environment['threads']}, {each.environment['date'][:10]}",
            "cache of a core": bytes_text(each.environment["cache_per_core"]),
            "shared": bytes_text(each.environment["cache_shared"]),
            "cells": f"[{len(each.cells)}](../bench/{each.file})",
        }
        for machine, each in machines.items()
    )
    cells = pd.concat(
        {machine: each.cells for machine, each in machines.items()}, names=["machine"]
    )
    cells = cells[cells.nbytes > _SMALL]
    parts = [markdown(where)]
    for heading, kind, quantity in _QUANTITIES:
        found = cells[(cells.kind == kind) & cells[quantity].notna()]
        text = _mean if quantity == "far" else _above
        table = found.groupby(["op", "layout", "machine"], observed=True)[quantity].agg(text)
        table = table.unstack()
        # In the order of the machines, not of their names.
        table = table[[machine for machine in machines if machine in table]].fillna(DASH)
        table.insert(0, "", [", ".join(row) for row in table.index])
        parts += [f"### {heading}\n", markdown(table)]
    return "\n".join(parts)


#: The generated parts of pages: page, marker, and the function that returns the text.
_PARTS: tuple[tuple[str, str, Callable[[_Measured], str]], ...] = (
    ("README.md", "numbers", _numbers),
    ("docs/performance.md", "choices", _choices),
    ("docs/performance.md", "steps", lambda measured: _steps(measured.current)),
    ("docs/performance.md", "operator", _operator),
    (f"{MEASURED}/training-steps.md", "models", lambda measured: _models(measured.current)),
    (f"{MEASURED}/training-steps.md", "earlier", lambda measured: _steps(measured.earlier)),
    (f"{MEASURED}/training-steps.md", "frameworks", lambda measured: _models(measured.frameworks)),
    (f"{MEASURED}/operator.md", "bench", _bench),
    (f"{MEASURED}/slower.md", "slower", _slower),
    (f"{MEASURED}/machines.md", "machines", _machines),
)


def pages(root: Path) -> dict[Path, str]:
    """Return the text of the pages by path."""
    measured, found = _measured(root), dict[Path, str]()
    for name, marker, part in _PARTS:
        path = root / name
        text = found.get(path) or path.read_text(encoding="utf-8")
        found[path] = between(name, text, part(measured), marker)
    return found


def _plots(root: Path) -> None:
    """Write the plots of the shown result of the operator and of this version's models."""
    measured = _measured(root)
    result = measured.operator[0].result
    chosen = result.frame[result.frame["dtype"] == _DTYPE]
    operator_plot(Result(result.environment, chosen), root / BENCH / "operator.svg")
    cases = _cases(measured.current)
    cases = cases.assign(
        threads=cases.threads + " threads", variant=cases.variant.str.removeprefix("backnorm-")
    ).drop(columns="step")
    ordered = cases.sort_values(["variant", "allocator"], ascending=[False, True], kind="stable")
    plot_comparisons(ordered, root / BENCH / "models.svg")


def main() -> int:
    """Write pages and plots; with --check, name the pages that are not current."""
    is_check = options(__doc__).check
    if not is_check:
        _plots(ROOT)
    return write_or_check(pages(ROOT), check=is_check)


if __name__ == "__main__":
    raise SystemExit(main())
