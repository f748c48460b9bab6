"""Cases as modules of StableHLO, one file of MLIR a case.

The function `main` has no arguments. It returns the results of the operation on constants, and a
tensor<i1> for each result: whether each element is within the bound of serial sums, the worst that
`verify` accepts. The bound of an element is an interval between two numbers of its type, so the
module compares without rounding. Source: the StableHLO specification, v1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.conformance.verify._file_cases import FileCase, expected
from backnorm.dtypes import rounded

_TYPES = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}


def write(folder: Path, cases: Iterable[FileCase], made_by: Mapping[str, Any]) -> None:
    """Write a module for each case."""
    for found in cases:
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in _module(found))
        (folder / f"{found.case.name}.mlir").write_text(text)


def _module(found: FileCase) -> Iterator[str]:
    results, attributes = expected(found), found.call["attributes"]
    types = [_type(parts["rounded"]) for parts in results.values()]
    returned = ", ".join(types + ["tensor<i1>"] * len(types))
    epsilon = np.float32(float.fromhex(attributes["epsilon"]["value"]))
    yield "module @case {"
    yield f"  func.func public @main() -> ({returned}) {{"
    for name, array in found.inputs.items():
        yield _constant(name, array)
    yield f'    {_values(results)} = "stablehlo.{found.call["op"]}"({_values(found.inputs)}) {{'
    yield f"      epsilon = 0x{epsilon.view(np.uint32):08X} : f32,"
    yield f"      feature_index = {attributes['feature_index']['value']} : i64"
    taken = ", ".join(map(_type, found.inputs.values()))
    yield f"    }} : ({taken}) -> ({', '.join(types)})"
    yield "    %true = stablehlo.constant dense<true> : tensor<i1>"
    for name, parts in results.items():
        yield from _comparison(name, parts)
    yield f"    return {_values([*results, *map(_within, results)])} : {returned}"
    yield "  }"
    yield "}"


def _comparison(name: str, parts: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield the lines that compare a result with the interval of each element, or with NaN."""
    least, most = _interval(parts)
    of_type, flags = _type(least), _type(least).rpartition("x")[0] + "xi1>"
    yield _constant(f"{name}_least", least)
    yield _constant(f"{name}_most", most)
    for flag, compared in {
        "ge": f"GE, %{name}, %{name}_least",
        "le": f"LE, %{name}, %{name}_most",
        "nan": f"NE, %{name}, %{name}",
        "undefined": f"NE, %{name}_least, %{name}_least",
    }.items():
        compare = f"stablehlo.compare {compared}"
        yield f"    %{name}_{flag} = {compare} : ({of_type}, {of_type}) -> {flags}"
    for flag, combined in {
        "inside": f"and %{name}_ge, %{name}_le",
        "both_nan": f"and %{name}_nan, %{name}_undefined",
        "right": f"or %{name}_inside, %{name}_both_nan",
    }.items():
        yield f"    %{name}_{flag} = stablehlo.{combined} : {flags}"
    reduce = f"stablehlo.reduce(%{name}_right init: %true) applies stablehlo.and"
    axes = list(range(least.ndim))
    signature = f"({flags}, tensor<i1>) -> tensor<i1>"
    yield f"    %{_within(name)} = {reduce} across dimensions = {axes} : {signature}"


def _interval(parts: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the greatest number of the result's type within the worst bound."""
    # The bounds are the last parts, and the worst is the last of them.
    right, bound = parts["rounded"], list(parts.values())[-1]
    ends = []
    for sign, choice in ((-1, np.fmin), (1, np.fmax)):
        with np.errstate(all="ignore"):
            end = parts["high"] + (parts["low"] + sign * bound)
            inner = rounded(end, right.dtype)
            beyond = sign * inner.astype(np.float64) > sign * end
            inner[beyond] = np.nextafter(inner[beyond], right[beyond])
            ends.append(choice(inner, right))
    return ends[0], ends[1]


def _within(name: str) -> str:
    return f"{name}_within"


def _values(names: Iterable[str]) -> str:
    return ", ".join(f"%{name}" for name in names)


def _type(array: np.ndarray) -> str:
    return f"tensor<{'x'.join([*map(str, array.shape), _TYPES[str(array.dtype)]])}>"


def _constant(name: str, array: np.ndarray) -> str:
    elements = f'"0x{array.tobytes().hex().upper()}"' if array.size else ""
    return f"    %{name} = stablehlo.constant dense<{elements}> : {_type(array)}"
