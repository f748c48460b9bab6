"""Plots are valid SVG that says what it shows, the same bytes every time."""

from __future__ import annotations

import base64
import dataclasses
import re
from xml.etree import ElementTree

import pytest

from benchmarks.report.plots import draw
from benchmarks.report.words import TIMES

from . import synthetic

pytestmark = pytest.mark.long

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plots():
    return {plot.name: plot for plot in draw(synthetic.result())}


def test_there_is_a_plot_for_everything_that_was_measured(plots):
    ops, dtypes = ("backward", "forward", "inference"), ("float32", "float64")
    assert list(plots) == [
        *(f"ratio-{op}-{dtype}" for op in ops for dtype in dtypes),
        *(f"roofline-{dtype}" for dtype in dtypes),
        "sweep",
    ]


def test_without_a_sweep_there_is_no_plot_of_one(result):
    rows = tuple(row for row in result.rows if row.cell.suite != "sweep")[:4]
    assert [plot.name for plot in draw(dataclasses.replace(result, rows=rows))] == [
        "ratio-backward-float32",
        "roofline-float32",
    ]
    assert draw(dataclasses.replace(result, rows=())) == []


def test_files_are_svg_with_a_title_and_a_description(plots):
    for plot in plots.values():
        root = ElementTree.fromstring(plot.svg())
        assert root.tag == f"{SVG}svg"
        text = ElementTree.tostring(root, encoding="unicode")
        assert plot.title in text
        assert plot.alternative.split(":")[0] in text


def test_files_are_the_same_every_time(plots):
    again = {plot.name: plot for plot in draw(synthetic.result())}
    for name in ("ratio-backward-float32", "roofline-float32", "sweep"):
        assert plots[name].svg() == again[name].svg()


def test_axes_say_what_they_measure(plots):
    def words(name):
        # Of text that is drawn as outlines, comments keep the letters.
        return re.findall("<!-- (.*?) -->", plots[name].svg())

    assert "our time / peer's time (log scale)" in words("ratio-backward-float32")
    assert "50x64x112x112".replace("x", TIMES) in words("ratio-backward-float32")
    assert "GB/s" in words("roofline-float32")
    assert {"ns per byte of x (log scale)", "size of x", "16 MiB"} <= set(words("sweep"))


def test_the_address_of_an_image_holds_all_of_it(plots):
    for plot in plots.values():
        kind, data = plot.address().split(",")
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(data).decode() == plot.svg()


def test_marks_are_where_the_ratios_are(result):
    """A mark for every peer that computed a cell, and one line to the best of each."""
    rows = [row for row in result.rows if row.cell.suite == "resnet50"][:4]
    (plot, *_) = draw(dataclasses.replace(result, rows=tuple(rows)))
    axes = plot.figure.axes[0]
    drawn = {x for line in axes.lines for x in line.get_xdata()}
    for row in rows:
        if row.cell.layout == "NCX":
            assert {row.ratio_to(peer) for peer in row.peers()} <= drawn
            ends = {x for lines in axes.collections for x in _ends(lines)}
            assert row.ratio() in ends


def _ends(lines):
    return [end for _, (end, _) in lines.get_segments()]
