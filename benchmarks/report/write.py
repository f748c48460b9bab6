"""A result's files in a folder."""

from __future__ import annotations

from pathlib import Path

from backnorm.files import atomic_writer, check_writable, prepare_folder
from benchmarks.model import Result
from benchmarks.report.html import to_html
from benchmarks.report.markdown import to_markdown
from benchmarks.report.result_file import write_result

__all__ = ["prepare", "write_report"]

_FILES = ("result.json", "report.md", "report.html")


def prepare(folder: Path) -> None:
    """Make a folder for a report, and see that its files can be written; before any work is done.

    Raises
    ------
    ArgumentValueError
        If there is something else of the name of the folder, or of a file.
    OSError
        If the folder cannot be made.
    """
    prepare_folder(folder, *_FILES)


def write_report(result: Result, directory: str | Path) -> list[Path]:
    """Write `result.json`, `report.md` and `report.html` to a folder, and return their paths.

    The JSON comes first: whatever keeps a page from being drawn does not cost the measurements.

    Parameters
    ----------
    result : Result
    directory : str or Path
        Made, with its parents, if it does not exist.

    Raises
    ------
    BacknormError
        If the folder cannot be written to, or Jinja or matplotlib is not installed.
    """
    folder = Path(directory)
    prepare_folder(folder)
    json, markdown, html = (folder / name for name in _FILES)
    write_result(result, json)
    _write(markdown, to_markdown(result))
    _write(html, to_html(result))
    return [json, markdown, html]


def _write(path: Path, text: str) -> None:
    check_writable(path)
    with atomic_writer(path) as stream:
        stream.write(text.encode())
