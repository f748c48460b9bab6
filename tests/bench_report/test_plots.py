"""Plots are valid SVG that says what it shows, the same bytes every time."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from benchmarks.report.numbers import TIMES
from benchmarks.report.plots import COLOURS, draw

from . import synthetic

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
        root = ElementTree.fromstring(plot.standalone())
        assert root.tag == f"{SVG}svg"
        text = ElementTree.tostring(root, encoding="unicode")
        assert plot.title in text
        assert plot.alternative.split(":")[0] in text


def test_files_are_the_same_every_time(plots):
    again = {plot.name: plot for plot in draw(synthetic.result())}
    for name in ("ratio-backward-float32", "roofline-float32", "sweep"):
        assert plots[name].standalone() == again[name].standalone()
        assert plots[name].inline() == again[name].inline()


def test_elements_for_the_page_are_well_formed_and_refer_to_themselves(plots):
    for plot in plots.values():
        svg = plot.inline()
        root = ElementTree.fromstring(svg)
        names = [element.get("id") for element in root.iter() if element.get("id")]
        assert len(names) == len(set(names))
        assert all(name.startswith(f"{plot.name}-") for name in names)
        assert set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", svg)) <= set(names)


def test_elements_for_the_page_take_their_colours_from_it(plots):
    for plot in plots.values():
        svg = plot.inline()
        assert not re.search("#[0-9a-f]{6}", svg.replace("url(#", ""))
        assert set(re.findall(r"var\(--(\w+)\)", svg)) <= set(COLOURS)


def test_every_colour_on_light_paper_has_one_role():
    light = [pair[0] for pair in COLOURS.values()]
    assert len(light) == len(set(light))


def test_axes_say_what_they_measure(plots):
    def words(name):
        root = ElementTree.fromstring(plots[name].inline())
        return [element.text for element in root.iter("text")]

    assert "our time / peer's time (log scale)" in words("ratio-backward-float32")
    assert "50x64x112x112".replace("x", TIMES) in words("ratio-backward-float32")
    assert "GB/s" in words("roofline-float32")
    assert {"ns per byte of x (log scale)", "size of x", "16 MiB"} <= set(words("sweep"))
