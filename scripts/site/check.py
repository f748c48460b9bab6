"""Check the built site: its inventory has every public name, and no page loads from other sites.

If a browser is installed (Debian's package chromium), it must open some pages without an error.

Usage: python scripts/site/check.py [SITE]
"""

from __future__ import annotations

import ast
import functools
import http.server
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SOURCE = ROOT / "src" / "backnorm"

# The packages of the public interface; those in _WHOLE with their public modules.
_PACKAGES = ("", "torch", "jax", "tensorflow", "keras", "graph")
_MODULES = ("jax/linen.py", "jax/nnx.py")
_WHOLE = ("dialects", "conformance")

# Elements that a browser fetches by itself, unlike links.
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|(?:@import\s*["']?|url\(["']?)(?:https?:)?//[^"')\s]+""",
    re.IGNORECASE,
)

# One page of each kind, and the browsers that can open them without a screen.
_SHOWN = ("index.html", "how-to/which-variance.html", "reference/backnorm.html")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def public_names() -> set[str]:
    """Return the names in ``__all__`` of the public modules; nothing is imported."""
    files = [_SOURCE / package / "__init__.py" for package in _PACKAGES]
    files += [_SOURCE / module for module in _MODULES]
    for package in _WHOLE:
        files += [
            path
            for path in sorted((_SOURCE / package).rglob("*.py"))
            if not path.stem.startswith("_") or path.stem == "__init__"
        ]
    return {f"{_module(path)}.{name}" for path in files for name in _exported(path)}


def missing(site: Path) -> list[str]:
    """Return the public names that the site's inventory lacks."""
    # Four lines of text precede the compressed lines, whose first word is a name.
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}
    return sorted(public_names() - known)


def fetched(site: Path) -> list[str]:
    """Return what pages and styles of the site would fetch from other sites."""
    return [
        f"{path.relative_to(site)}: {match[0]}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for match in _FETCHED.finditer(path.read_text(encoding="utf-8"))
    ]


def complaints(site: Path, browser: str) -> list[str]:
    """Return what a browser writes to its console when it opens some pages."""
    handler = functools.partial(_Quiet, directory=str(site))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    found = []
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory() as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page in _SHOWN:
            address = f"http://127.0.0.1:{server.server_port}/{page}"
            command = [browser, *options, f"--user-data-dir={profile}", "--dump-dom", address]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)  # noqa: S603 (a browser)
            lines = done.stderr.splitlines()
            found += [f"{page}: {line}" for line in lines if "CONSOLE" in line]
            # The theme's scripts replace "no-js" with "js" when they run.
            if done.returncode or not re.search(r'<html[^>]* class="js\b', done.stdout):
                found.append(f"{page}: is not shown")
        server.shutdown()
    return found


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def _module(path: Path) -> str:
    parts = path.relative_to(_SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def main() -> int:
    """Print what is wrong with the site; return the exit status."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    wrong = [f"not in the inventory: {name}" for name in missing(site)]
    wrong += [f"fetched from another site: {what}" for what in fetched(site)]
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser:
        wrong += [f"in the browser: {line}" for line in complaints(site, browser)]
    else:
        print("no browser: the pages were not opened in one (apt-get install chromium)")
    print(*wrong, sep="\n", file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
