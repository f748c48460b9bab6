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

from scripts.generated import options, write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "features.md"
TESTS = ROOT / "tests" / "frameworks"
SOURCE = TESTS / "features.toml"

#: The columns, and where the tests of each are.
FRAMEWORKS = {
    "PyTorch": "torch",
    "JAX": "jax",
    "flax": "jax",
    "TensorFlow": "tensorflow",
    "Keras": "keras",
}

INTRODUCTION = """\
# What works in which framework

For users who compare frameworks. *yes* means that tests cover the row; where possible, they
compare with the framework's own operator or layer. `tests/frameworks/features.toml` names the
tests. A dash means that the framework has no such thing. Cells with *no* say why.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *_table(features())]) + "\n"


@functools.cache
def features() -> list[dict[str, Any]]:
    """Return the rows of the table: a name, and a cell for each framework."""
    found: list[dict[str, Any]] = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["feature"]
    return found


def _table(features: list[dict[str, Any]]) -> Iterator[str]:
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


def missing() -> Iterator[str]:
    """Yield a line for each missing or invalid cell of the source, and each missing test."""
    for feature in features():
        for framework, folder in FRAMEWORKS.items():
            found = feature.get(framework)
            if found is None:
                yield f"{feature['name']}: nothing for {framework}"
                continue
            if set(found) not in ({"tests"}, {"tests", "but"}, {"no"}, set()):
                yield f"{feature['name']}, {framework}: {sorted(found)}"
            for test in found.get("tests", ()):
                file, *_, name = test.split("::")
                if name not in _functions(TESTS / folder / file):
                    yield f"{feature['name']}, {framework}: there is no {test}"


@functools.cache
def _functions(file: Path) -> frozenset[str]:
    """Return the names of all functions in a file; none if the file does not exist."""
    if not file.exists():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def main() -> int:
    """Write the page; with --check, say whether it is current."""
    is_check = options(__doc__).check
    wrong = list(missing())
    if wrong:
        print("\n".join([f"{SOURCE.name}:", *wrong]), file=sys.stderr)
        return 1
    return write_or_check({PAGE: page()}, check=is_check)


if __name__ == "__main__":
    raise SystemExit(main())
