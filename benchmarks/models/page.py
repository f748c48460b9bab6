"""The results of models as the documentation shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from backnorm.cli.text import counted
from benchmarks.model import geometric_mean
from benchmarks.report.tables import markdown
from benchmarks.report.words import DASH, TIMES, ratio_text

__all__ = ["frameworks_page", "models_page"]

# Heading, the variant, what of it, and the variant that it is beside.
_COLUMNS = (
    ("ours", "backnorm", "ratio", "torch"),
    ("fused", "backnorm-fused", "ratio", "torch"),
    ("ours compiled", "backnorm-compiled", "ratio", "torch-compiled"),
    ("normalisation", "backnorm-fused", "normalization", "torch"),
    ("memory", "backnorm-fused", "memory", "torch"),
    ("error", "backnorm-fused", "error", "torch"),
    ("error compiled", "backnorm-compiled", "error", "torch-compiled"),
)

_STEPS = ("layers", "PyTorch", "PyTorch compiled", "share")
_HEADINGS = ["model", "batch", "layout", *_STEPS, *(each[0] for each in _COLUMNS)]

# The same where the framework's own is the first variant.
_VARIANTS = (
    ("ours", "backnorm"),
    ("ours, float32", "backnorm-float32"),
    ("fused", "backnorm-fused"),
    ("fused, float32", "backnorm-fused-float32"),
)


def models_page(paths: Sequence[Path]) -> str:
    """Return the text and the tables of files that `python -m benchmarks models` wrote."""
    legend = (
        "Training steps in float32, if the batch does not say bfloat16 (autocast), in turns; our "
        "time over that of the same step with PyTorch's layers, below 1 we are faster: "
        "`convert(model)`; with `fuse=True`; and `convert(model)` beside PyTorch's, both under "
        "`torch.compile`. Layers is how many of batch normalisation are ours; share that of "
        "normalisation, activations and additions in PyTorch's eager step, so what a step could "
        "gain at most; normalisation the eager fused model's time in them over PyTorch's, memory "
        "what its steps add to the resident memory, error the distance of all gradients from those "
        "in float64: a hundred times as much or as little is an element or two on the other side "
        "of a ReLU.\n"
    )
    return "\n".join([legend, *map(_models_table, paths)])


def _models_table(path: Path) -> str:
    file = json.loads(path.read_text(encoding="utf-8"))
    where, rows = file["environment"], file["rows"]
    versions = ", ".join(f"{name} {text}" for name, text in where["versions"].items())
    lines = [_line(row) for row in rows]
    table = pd.DataFrame([*lines, _means(rows)], columns=_HEADINGS, dtype=str)
    threads = counted(where["threads"], "thread")
    caption = f"{_processor(where)}, {threads}, {where['date'][:10]}; {versions}:\n"
    return "\n".join([caption, markdown(table)])


def frameworks_page(paths: Sequence[Path]) -> str:
    """Return the text and the table of files of other frameworks: one for each number of threads.

    They are of one machine.
    """
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    lines = [
        [_name(row), str(file["environment"]["threads"]), *_beside_own(row)]
        for file in files
        for row in file["rows"]
    ]
    headings = ["model, batch", "threads", "own layers", *(name for name, _ in _VARIANTS)]
    where = files[0]["environment"]
    versions = {
        name: text for file in files for name, text in file["environment"]["versions"].items()
    }
    named = ", ".join(f"{name} {text}" for name, text in versions.items())
    return "\n".join(
        [
            f"{_processor(where)}, {where['date'][:10]}; {named}. Training steps in float32, "
            "channels last, in turns; our time over that of the same step with the framework's own "
            "layers, below 1 we are faster, and in brackets the middle three fifths of a step's "
            "times over their median.\n",
            markdown(pd.DataFrame(lines, columns=headings, dtype=str)),
        ]
    )


def _processor(where: dict[str, Any]) -> str:
    kind = where.get("microarchitecture")
    return f"{where['cpu']} ({kind})" if kind else str(where["cpu"])


def _name(row: dict[str, Any]) -> str:
    count, _, *space = row["case"]["shape"]
    return f"{row['case']['model']}, {TIMES.join(map(str, (count, *space)))}"


def _beside_own(row: dict[str, Any]) -> list[str]:
    """Return the time of a step with a framework's own layers, and what ours take of it."""
    known, own = _known(row), row["outcomes"][0]["variant"]
    ratios = [_ratio(known, variant, "ratio", own) for _, variant in _VARIANTS]
    texts = [DASH if ratio is None else ratio_text(ratio) for ratio in ratios]
    return [f"{_milliseconds(known.get(own))}{_spread(known.get(own))}", *texts]


def _spread(outcome: Any) -> str:
    if outcome is None:
        return ""
    step = outcome["step"]
    low, high = (step[each] / step["median"] for each in ("p20", "p80"))
    return f" ({low:.2f} to {high:.2f})"


def _line(row: dict[str, Any]) -> list[str]:
    case, known = row["case"], _known(row)
    shape = TIMES.join(map(str, (case["shape"][0], *case["shape"][2:])))
    if case["precision"] != "float32":
        shape = f"{shape}, {case['precision']}"
    layers = max(each["layers"] for each in row["outcomes"])
    times = [_milliseconds(known.get(name)) for name in ("torch", "torch-compiled")]
    steps = [str(layers), *times, _share(known.get("torch"))]
    ratios = [_ratio(known, *column[1:]) for column in _COLUMNS]
    texts = [DASH if ratio is None else ratio_text(ratio) for ratio in ratios]
    return [case["model"], shape, case["layout"], *steps, *texts]


def _means(rows: list[dict[str, Any]]) -> list[str]:
    """Return the line of geometric means; of errors there is none, as chance decides them."""
    found = []
    for column in _COLUMNS:
        if column[2] == "error":
            found.append("")
            continue
        ratios = [_ratio(_known(row), *column[1:]) for row in rows]
        measured = [each for each in ratios if each is not None]
        found.append(f"**{ratio_text(geometric_mean(measured))}**" if measured else DASH)
    return ["geometric mean", "", "", *("" for _ in _STEPS), *found]


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {each["variant"]: each for each in row["outcomes"] if each["step"] is not None}


def _ratio(known: dict[str, Any], variant: str, what: str, beside: str) -> float | None:
    values = [known.get(name, {}).get(what) for name in (variant, beside)]
    return None if not all(values) else float(values[0] / values[1])


def _share(outcome: Any) -> str:
    """Return what part of a step is normalisation."""
    if outcome is None or outcome["normalization"] is None:
        return DASH
    return f"{outcome['normalization'] / outcome['step']['median']:.2f}"


def _milliseconds(outcome: Any) -> str:
    return DASH if outcome is None else f"{outcome['step']['median'] * 1e3:.0f} ms"
