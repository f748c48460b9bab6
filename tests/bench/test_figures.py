"""Figures of the documentation can be read on white and on black."""

from __future__ import annotations

import re

import pytest

from benchmarks.results import STYLE
from tests.support.pages import ROOT

FIGURES = [*(ROOT / "docs").glob("*.svg"), *(ROOT / "docs" / "bench").glob("*.svg")]

# Backgrounds of GitHub and of the site. Least contrast of graphics: WCAG 2.1, 1.4.11.
BACKGROUNDS, LEAST = ("ffffff", "0d1117", "1e2129"), 3.0


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_black_and_white_is_21():
    assert contrast("000000", "ffffff") == pytest.approx(21)


def test_docs_have_four_figures_and_no_other_pictures():
    names = sorted(path.name for path in FIGURES)
    assert names == ["conformance.svg", "error.svg", "models.svg", "operator.svg"]
    assert not [*(ROOT / "docs").rglob("*.png")]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_colours_of_figure_contrast_with_light_and_dark_background(path):
    text = path.read_text()
    colours = set(re.findall(r"#([0-9a-f]{6})\b", text))
    assert len(colours) > 2
    for colour in colours:
        for background in BACKGROUNDS:
            assert contrast(colour, background) >= LEAST, (colour, background)
    # A text without a colour is black.
    for style in re.findall(r'<text[^>]*style="([^"]*)"', text):
        assert "fill: #" in style


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_text_of_figure_is_nine_pixels_high_where_it_is_400_pixels_wide(path):
    text = path.read_text()
    width = float(re.search(r'viewBox="0 0 ([0-9.]+)', text)[1])
    sizes = [float(size) for size in re.findall(r"(?:font|font-size): ([0-9.]+)px", text)]
    assert sizes
    assert min(sizes) * 400 / width >= 9, STYLE
