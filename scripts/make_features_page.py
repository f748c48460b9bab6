"""Write docs/features.md from tests/frameworks/features.toml, whose tests must exist.

Usage: python -m scripts.make_features_page [--check]
"""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.generated import between, options, write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "features.md"
TESTS = ROOT / "tests" / "frameworks"
SOURCE = TESTS / "features.toml"

#: The columns, and the folders of each one's tests.
FRAMEWORKS = {"PyTorch": "torch", "JAX": "jax", "flax": "jax", "TensorFlow": "tensorflow",
              "Keras": "keras"}  # fmt: skip


def table(features: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| | " + " | ".join(FRAMEWORKS) + " |"
    yield "|---" * (len(FRAMEWORKS) + 1) + "|"
    for feature in features:
        cells = [_cell(feature[framework]) for framework in FRAMEWORKS]
        yield f"| {feature['name']} | " + " | ".join(cells) + " |"


def _cell(found: dict[str, Any]) -> str:
    """Return "yes", perhaps with a remark; or "no" with the reason; or a dash."""
    if "tests" in found:
        return f"yes; {found['but']}" if "but" in found else "yes"
    return f"no: {found['no']}" if "no" in found else "-"


def missing(features: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each missing or invalid cell of the source, and each missing test."""
    for feature in features:
        for framework, folder in FRAMEWORKS.items():
            place, found = f"{feature['name']}, {framework}", feature.get(framework)
            if found is None or {*found} not in ({"tests"}, {"tests", "but"}, {"no"}, set()):
                yield f"{place}: {found and sorted(found)}"
                continue
            for test in found.get("tests", ()):
                file, *_, name = test.split("::")
                if name not in _functions(TESTS / folder / file):
                    yield f"{place}: there is no {test}"


@functools.cache
def _functions(file: Path) -> frozenset[str]:
    """Return the names of all functions in a file; none if the file does not exist."""
    tree = ast.parse(file.read_text(encoding="utf-8") if file.exists() else "")
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def main() -> int:
    """Write the page; with --check, say whether it is current."""
    is_check = options(__doc__).check
    features = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["feature"]
    if wrong := list(missing(features)):
        sys.exit("\n".join([f"{SOURCE.name}:", *wrong]))
    text = between(PAGE.name, PAGE.read_text(encoding="utf-8"), "\n".join(table(features)), "table")
    return write_or_check({PAGE: text}, check=is_check)


if __name__ == "__main__":
    raise SystemExit(main())
