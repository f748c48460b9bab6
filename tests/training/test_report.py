"""Pages need nothing beside themselves, plots are valid, and files replace one another whole."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from PIL import Image

from backnorm.errors import ArgumentValueError, BacknormError
from backnorm.training.report.write import prepare, write_report
from benchmarks.report.canvas import COLOURS
from benchmarks.report.numbers import TIMES

from . import synthetic

KINDS = ("training", "wide")
PLOTS = {"training": ("loss", "accuracy", "gradients", "time"), "wide": ("steps", "stages")}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder of each kind of report."""
    folders = {}
    for kind in KINDS:
        folders[kind] = tmp_path_factory.mktemp(kind)
        write_report(getattr(synthetic, kind)(), folders[kind])
    return folders


@pytest.fixture(scope="module", params=KINDS)
def page(request, written):
    return (written[request.param] / "report.html").read_text()


def words(path):
    """Return what a page says, with a letter for the multiplication sign."""
    text = html.unescape(re.sub("<[^>]*>", " ", path.read_text()))
    return " ".join(text.split()).replace(TIMES, "x")


class _Structure(HTMLParser):
    def __init__(self):
        super().__init__()
        self.attributes = []
        self.ids = []

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]
        self.ids += [value for name, value in attributes if name == "id"]


def test_the_page_needs_nothing_beside_itself(page):
    structure = _Structure()
    structure.feed(page)
    for tag, name, value in structure.attributes:
        assert tag not in ("link", "img", "iframe", "object"), (tag, name, value)
        assert name not in ("src", "srcset", "xmlns"), (tag, name, value)
        if name == "href":
            assert value.startswith("#"), (tag, value)
            assert value[1:] in structure.ids, value
    assert len(structure.ids) == len(set(structure.ids))
    assert not re.search(r"https?://|@import|url\((?!#)", page)


def test_texts_are_text(page):
    assert "&lt;made up&gt; &amp; not measured" in page
    assert "<made up>" not in page


def test_every_plot_has_a_text_alternative(page):
    names = re.findall(r'role="img" aria-labelledby="([^"]+)"', page)
    assert len(names) in (2, 4)
    for name in names:
        assert re.search(rf'<span class="hidden" id="{name}">[^<]{{40,}}</span>', page)


def test_the_page_of_a_training_says_what_it_came_to(written):
    text = words(written["training"] / "report.html")
    assert "test accuracy at the end 93.00 %" in text
    assert "2.9x10⁻⁶ apart" in text
    assert "losses 2.0x10⁻⁷ apart" in text
    assert "normalisation 2.00 x faster" in text
    assert "2.25 ms, with PyTorch's layers 4.50 ms" in text


def test_the_page_of_wide_steps_says_what_they_came_to(written):
    text = words(written["wide"] / "report.html")
    assert "normalisation, ReLU, addition; channels_last 2.00 x faster" in text
    assert "16 random images of 224x224" in text


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_that_are_told(kind, tmp_path):
    result = getattr(synthetic, kind)()
    paths = write_report(result, tmp_path / "new" / "folder")
    assert sorted(paths) == sorted((tmp_path / "new" / "folder").iterdir())
    pictures = [f"{name}.{end}" for name in PLOTS[kind] for end in ("svg", "png")]
    assert [path.name for path in paths] == ["result.json", "report.html", *pictures]
    for name in PLOTS[kind]:
        svg = tmp_path / "new" / "folder" / f"{name}.svg"
        assert ElementTree.fromstring(svg.read_text()).tag == "{http://www.w3.org/2000/svg}svg"
        with Image.open(svg.with_suffix(".png")) as picture:
            assert picture.width == 1400
            assert len(picture.convert("RGB").getcolors(2**24)) > 20
    # A second report replaces the first.
    before = {path.name: path.read_bytes() for path in paths}
    paths[1].write_text("something else")
    again = write_report(result, tmp_path / "new" / "folder")
    assert {path.name: path.read_bytes() for path in again} == before


def test_plots_in_pages_take_their_colours_from_them(page):
    body = page[page.index("<body>") :]
    drawings = re.findall(r"<svg.*?</svg>", body, flags=re.DOTALL)
    assert drawings
    for svg in drawings:
        assert not re.search("#[0-9a-f]{6}", re.sub(r'url\(#|href="#', "", svg))
        assert set(re.findall(r"var\(--(\w+)\)", svg)) <= set(COLOURS)
        assert "mathdefault" not in svg


def test_the_beginning_of_a_training_is_a_page(training, tmp_path):
    training.epochs, training.normalised = training.epochs[:3], []
    paths = write_report(training, tmp_path)
    assert not (tmp_path / "time.svg").exists()
    assert "At the end" in (tmp_path / "accuracy.svg").read_text()
    assert paths[1].read_text().count("<figure") == 3


def test_a_training_that_diverged_is_a_page(training, tmp_path):
    training.epochs = [
        dataclasses.replace(epoch, losses=(1.0, math.inf, math.nan, math.nan))
        for epoch in training.epochs
    ]
    write_report(training, tmp_path)


def test_a_training_without_any_difference_is_a_page(training, tmp_path):
    gradients = tuple(
        dataclasses.replace(g, between=0.0, own=0.0, backnorm=0.0) for g in training.first.gradients
    )
    training.first = synthetic.first_step(
        gradients=gradients, losses=dict.fromkeys(("own", "backnorm", "exact"), 2.5)
    )
    for i, epoch in enumerate(training.epochs):
        training.epochs[i] = dataclasses.replace(epoch, losses=(2.0, 1.0, 0.5, 0.25))
    write_report(training, tmp_path)
    assert "losses equal" in (tmp_path / "report.html").read_text()


def test_failures_are_on_the_page(training, tmp_path):
    worst = dataclasses.replace(training.first.gradients[0], backnorm=0.5)
    training.first = synthetic.first_step(gradients=(worst, *training.first.gradients[1:]))
    write_report(training, tmp_path)
    assert (
        "the gradient of stem.weight is 5.0e-01 from the exact one"
        in (tmp_path / "report.html").read_text()
    )


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_named_before_any_work(monkeypatch, tmp_path, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BacknormError, match=rf"{library}.*pip install 'backnorm\[train\]'"):
        prepare(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "report"
    path.touch()
    with pytest.raises(ArgumentValueError, match="is not a folder"):
        prepare(path)


def test_importing_loads_no_framework_plots_or_templates():
    code = """
import sys
import backnorm.training.report, backnorm.training.runner, backnorm.training.worker
heavy = {"matplotlib", "jinja2", "sklearn", "torch", "jax", "tensorflow", "keras"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "paper"),
    [((), (245, 246, 248)), (("--blink-settings=preferredColorScheme=0",), (13, 17, 23))],
    ids=["light", "dark"],
)
def test_a_screenshot_shows_something_on_the_right_paper(browse, page, tmp_path, options, paper):
    picture = tmp_path / "page.png"
    browse(page, f"--screenshot={picture}", "--window-size=1200,2000", *options)
    with Image.open(picture) as image:
        image = image.convert("RGB")
        assert image.getpixel((3, 3)) == paper
        colours = image.getcolors(2**24)
    assert len(colours) > 200
    most = max(count for count, _ in colours)
    assert most < 0.8 * image.width * image.height


def test_on_a_telephone_the_page_is_not_wider_than_the_screen(browse, page):
    # Chromium's windows are at least 500 pixels wide; a frame is as narrow as it is told.
    text = json.dumps(page).replace("</", r"<\/")
    frame = f"""<!doctype html><iframe id="f" width="360" height="800"></iframe><script>
const frame = document.getElementById("f");
frame.onload = () => {{
  const root = frame.contentDocument.documentElement;
  document.body.dataset.overflow = root.scrollWidth - root.clientWidth;
}};
frame.srcdoc = {text};
</script>"""
    dom = browse(frame, "--dump-dom", "--virtual-time-budget=2000")
    assert 'data-overflow="0"' in dom
