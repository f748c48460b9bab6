"""A result's files in a folder."""

from __future__ import annotations

from pathlib import Path

from backnorm.files import atomic_writer, check_writable, prepare_folder
from backnorm.training.model import TrainingResult
from backnorm.training.report.html import training_page, wide_page
from backnorm.training.report.learning import learning_plots
from backnorm.training.report.timing import timing_plots, wide_plots
from backnorm.training.result_file import write_result
from backnorm.training.wide_model import WideResult
from benchmarks.report.canvas import Plot, look
from benchmarks.report.libraries import needs

__all__ = ["prepare", "write_report"]


def prepare(folder: Path) -> None:
    """Make a folder for a report, and see that one can be drawn; before any work is done.

    Raises
    ------
    BacknormError
        If there is something else of that name, or Jinja or matplotlib is not installed.
    OSError
        If the folder cannot be made.
    """
    for module in ("jinja2", "matplotlib"):
        needs(module, "--out", "'backnorm[train]'")
    prepare_folder(folder, "result.json", "report.html")


def write_report(result: TrainingResult | WideResult, folder: Path) -> list[Path]:
    """Write `result.json`, `report.html` and each plot as SVG and PNG; return the paths.

    Files of these names are replaced, each whole or not at all. The JSON comes first: whatever
    keeps a page from being drawn does not cost the measurements.
    """
    prepare(folder)
    json = folder / "result.json"
    write_result(result, json)
    with look():
        if isinstance(result, TrainingResult):
            plots = [*learning_plots(result), *timing_plots(result)]
            page = training_page(result, plots)
        else:
            plots = wide_plots(result)
            page = wide_page(result, plots)
        files = {"report.html": page.encode(), **_pictures(plots)}
    for name, content in files.items():
        check_writable(folder / name)
        with atomic_writer(folder / name) as stream:
            stream.write(content)
    return [json, *(folder / name for name in files)]


def _pictures(plots: list[Plot]) -> dict[str, bytes]:
    files = {}
    for plot in plots:
        files[f"{plot.name}.svg"] = plot.standalone().encode()
        files[f"{plot.name}.png"] = plot.picture()
    return files
