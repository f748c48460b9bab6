"""Results as JSON files; `docs/training.md` describes every field."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backnorm.files import atomic_writer, check_writable
from backnorm.training.frameworks import LAYERS
from backnorm.training.model import TrainingResult
from backnorm.training.wide_model import WideResult

__all__ = ["SCHEMA", "to_dict", "write_result"]

#: Name and version of the format. Fields may be added under the same version.
SCHEMA = "backnorm.train/1"


def write_result(result: TrainingResult | WideResult, path: Path) -> None:
    """Write `result` to the JSON file `path`, whole or not at all.

    Raises
    ------
    ArgumentValueError
        If `path` cannot be written.
    """
    check_writable(path)
    with atomic_writer(path) as stream:
        stream.write(_text(to_dict(result)).encode())


def to_dict(result: TrainingResult | WideResult) -> dict[str, Any]:
    """Return `result` as JSON can hold it: numbers that are not finite become null."""
    head = {
        "schema": SCHEMA,
        "model": "digits" if isinstance(result, TrainingResult) else "resnet50",
        "environment": asdict(result.environment),
        "settings": asdict(result.settings),
    }
    body = _training(result) if isinstance(result, TrainingResult) else _wide(result)
    finite: dict[str, Any] = _finite(head | body)
    return finite


def _training(result: TrainingResult) -> dict[str, Any]:
    timed = result.timed()
    return {
        "first_losses": None if result.first is None else result.first.losses,
        "gradients": [asdict(g) for g in (result.first.gradients if result.first else ())],
        "test_accuracy": {layer: result.accuracy(layer) for layer in LAYERS},
        "step": {x: asdict(result.step_timing(x)) for x in LAYERS} if timed else None,
        "normalisation": {x: asdict(result.norm_timing(x)) for x in LAYERS} if timed else None,
        "sites": _sites(result),
        "epochs": [asdict(epoch) for epoch in result.epochs],
    }


def _sites(result: TrainingResult) -> list[dict[str, Any]]:
    """Return name and shape of each site, and the median seconds of each layer there."""
    entries: list[dict[str, Any]] = [{"name": n, "shape": shape} for n, shape in result.sites]
    for layer in LAYERS if result.timed() else ():
        for entry, seconds in zip(entries, result.site_seconds(layer), strict=True):
            entry[layer] = seconds
    return entries


def _wide(result: WideResult) -> dict[str, Any]:
    return {
        "formats": [
            {
                "memory": memory,
                "step": {x: asdict(result.step_timing(memory, x)) for x in LAYERS},
                "normalisation": {x: asdict(result.norm_timing(memory, x)) for x in LAYERS},
            }
            for memory in result.formats()
        ],
        "checks": [asdict(check) for check in result.checks],
        "steps": [asdict(step) for step in result.steps],
    }


def _text(document: dict[str, Any]) -> str:
    """Return the JSON text: a line for each entry of a long list."""
    parts = []
    for name, value in document.items():
        if isinstance(value, list) and value:
            lines = ",\n    ".join(json.dumps(entry, allow_nan=False) for entry in value)
            text = f"[\n    {lines}\n  ]"
        else:
            text = json.dumps(value, allow_nan=False, indent=2).replace("\n", "\n  ")
        parts.append(f'  "{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
