"""mkdocs hooks: run the notebooks of examples/, and add them as pages with their output."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_FOLDER = Path(__file__).resolve().parents[2] / "examples"

# The section of the notebooks in the navigation, and the folder of their pages.
_SECTION = "Tutorial"
_PAGES = "tutorial/notebooks"


def on_config(config: Any) -> Any:
    """Add the pages to the navigation."""
    for section in config.nav:
        if _SECTION in section:
            section[_SECTION] += [{_title(path): _page(path)} for path in _notebooks()]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Run the notebooks; an error in one ends the build."""
    for path in _notebooks():
        names: dict[str, object] = {}
        content = "\n\n".join(part for cell in _cells(path) for part in _markdown(cell, names))
        # Links between notebooks become links between pages.
        content = re.sub(r"(?<=\]\()(\w+)\.ipynb\b", r"\1.md", content)
        files.append(File.generated(config, _page(path), content=content + "\n"))
    return files


def _notebooks() -> list[Path]:
    return sorted(_FOLDER.glob("*.ipynb"))


def _page(path: Path) -> str:
    return f"{_PAGES}/{path.stem}.md"


def _title(path: Path) -> str:
    first = "".join(_cells(path)[0]["source"]).splitlines()[0]
    return f"{first.removeprefix('# ')} (notebook)"


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def _markdown(cell: dict[str, Any], names: dict[str, object]) -> Iterator[str]:
    """Yield a cell as Markdown: its text, or its code and what it prints."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield source
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # The code is our own. Jupyter would be a dependency only for this.
        exec(compile(source, f"notebook, {cell['id']}", "exec"), names)  # noqa: S102
    yield f"```python\n{source}\n```"
    if printed.getvalue():
        yield f"```text\n{printed.getvalue()}```"
