"""mkdocs hooks: add pages from outside docs/, and adapt links to files outside docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[2]

# Files outside `docs`, and their pages.
_ABOVE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages, with links relative to docs/."""
    for name, page in _ABOVE.items():
        text = (_ROOT / name).read_text(encoding="utf-8")
        if name == "LICENSE":
            text = f"# Licence\n\n```text\n{text}```\n"
        files.append(File.generated(config, page, content=_LINK.sub(_from_docs, text)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Change links to files outside docs/ to their pages; if there is no page, keep the text."""
    folders = page.file.src_uri.count("/")
    up, down = "../" * (folders + 1), "../" * folders

    def target(match: re.Match[str]) -> str:
        text, path, anchor = match.groups()
        found = _ABOVE.get(path)
        return f"[{text}]({down}{found}{anchor})" if found else text

    return re.sub(rf"\[([^\]]*)\]\({re.escape(up)}([^)#]*)([^)]*)\)", target, markdown)


def _from_docs(match: re.Match[str]) -> str:
    path = match[1]
    return _ABOVE.get(path) or path.removeprefix("docs/")
