"""The code on the pages of the documentation: it runs, and prints what the page says it prints.

A page's blocks are run from top to bottom in one namespace. The block of text right after a block
of code is its output. A page belongs to the one framework that its code imports, and is run in the
process of that framework's checks; pages of none are run by `test_pages.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

_CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```)?", re.S | re.M)
# backnorm.dialects.tensorflow is NumPy's.
_FRAMEWORKS = {
    "torch": r"^(?:import|from) (?:torch|backnorm\.torch)\b",
    "jax": r"^(?:import|from) (?:jax|flax|equinox|backnorm\.jax)\b",
    "keras": r"^(?:import|from) (?:keras|backnorm\.keras)\b",
    "tensorflow": r"^(?:import|from) (?:tensorflow|backnorm\.tensorflow)\b",
}


class Block(NamedTuple):
    """Code on a page, what it prints (None where the page does not say), and where it begins."""

    code: str
    output: str | None
    line: int


def pages() -> dict[str, str | None]:
    """Return all pages that have code, as paths in the repository, and the framework of each."""
    found = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = path.relative_to(ROOT).as_posix()
        if blocks(name):
            found[name] = _framework(name)
    return found


def pages_of(framework: str | None) -> list[str]:
    """Return the pages whose code needs a framework, or none."""
    return [page for page, needed in pages().items() if needed == framework]


def blocks(page: str) -> list[Block]:
    """Return the blocks of Python on a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in _CODE.finditer(text)
    ]


def run(page: str, **names: object) -> dict[str, object]:
    """Run the code of a page, which finds `names`; returns all names that it leaves."""
    for block in blocks(page):
        printed = io.StringIO()
        # Lines as on the page, for tracebacks.
        code = compile("\n" * (block.line - 1) + block.code, page, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block.output is not None:
            assert printed.getvalue() == block.output, f"{page}, the code of line {block.line}"
    return names


def _framework(page: str) -> str | None:
    code = "\n".join(block.code for block in blocks(page))
    needed = [name for name, imports in _FRAMEWORKS.items() if re.search(imports, code, re.M)]
    # Keras's own tensors are TensorFlow's by default.
    needed = needed if needed != ["keras", "tensorflow"] else ["tensorflow"]
    assert len(needed) < 2, f"{page} needs the processes of {needed}: split it"
    return needed[0] if needed else None
