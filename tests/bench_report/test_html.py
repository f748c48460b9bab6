"""The page needs nothing beside itself, and works in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from benchmarks.model import Cell, Outcome, Row, geometric_mean
from benchmarks.report import to_html, write_report
from benchmarks.report.figures import cells
from benchmarks.report.words import TIMES, bytes_text

from . import synthetic

pytestmark = pytest.mark.long

# What a person would do, done by a script that leaves its findings in the page's body.
VISIT = """
<script>
const seen = {};
const table = document.querySelector("#table-backward-float32 table");
const column = (i) => [...table.tBodies[0].rows].map((row) => row.cells[i].textContent);
const click = (i) => table.tHead.rows[0].cells[i].querySelector("button").click();
click(2); seen.ratio_up = column(2); seen.sort = table.tHead.rows[0].cells[2].ariaSort;
click(2); seen.ratio_down = column(2);
const size = table.tHead.rows[0].cells.length - 2;
click(size); seen.sizes = column(size);
const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
const torch = heads.findIndex((head) => head.startsWith("PyTorch"));
click(torch); seen.peer = column(torch);
const visible = () => [...document.querySelectorAll(".sortable tbody tr:not([hidden])")];
const type = (text) => {
  const input = document.getElementById("filter");
  input.value = text;
  input.dispatchEvent(new Event("input"));
  return visible().length;
};
seen.filtered = type("7x7 nxc resnet50");
seen.count = document.getElementById("count").textContent;
seen.all = type("");
document.getElementById("only-lost").click();
seen.lost = visible().length;
seen.lost_only = visible().every((row) => row.classList.contains("lost"));
location.hash = "#table-forward-float64";
seen.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
document.body.dataset.seen = JSON.stringify(seen);
</script>
"""


@pytest.fixture(scope="module")
def page():
    return to_html(synthetic.result())


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
        assert tag not in ("link", "iframe", "object"), (tag, name, value)
        assert name not in ("srcset", "xmlns"), (tag, name, value)
        assert name != "src" or value.startswith("data:"), (tag, value)
        if name == "href":
            assert value.startswith("#"), (tag, value)
            assert value[1:] in structure.ids, value
    assert not re.search(r"https?://|@import|url\((?!#)", page)


def test_names_in_the_page_are_unique(page):
    structure = _Structure()
    structure.feed(page)
    assert len(structure.ids) == len(set(structure.ids))


def test_texts_of_a_result_are_text(page, result):
    assert "&lt;made up&gt; &amp; not measured" in page
    assert "<made up>" not in page
    cell = Cell(r"<b>suite $\frac$</b>", "backward", (2, 3), "NCX", "float32")
    timed = tuple(
        Outcome(name, "out", "inaccurate", synthetic.timing(1.0), "<script>alert(1)</script>")
        for name in ("backnorm", "<i>peer</i>")
    )
    text = to_html(dataclasses.replace(result, rows=(Row(cell, timed),)))
    assert not re.search("<b>suite|<i>peer|<script>alert", text)


def test_a_headline_says_what_the_table_does(page, result):
    frame = cells(result)
    found = frame[(frame.op == "backward") & (frame.dtype == "float32")]
    workload = found[found.suite != "sweep"]
    mean = geometric_mean(workload.ratio)
    card = page.split("<article")[1].split("</article>")[0]
    assert (
        f"{max(mean, 1 / mean):.2f}<small>{TIMES} {'faster' if mean < 1 else 'slower'}</small>"
        in card
    )
    assert f": {mean:.2f} of its time, geometric mean of 17 cells without the sweep<" in card
    assert len(workload) == 17
    assert 0 < found.lost.sum() < len(found)
    assert f"a peer is faster in {found.lost.sum()} of {len(found)}" in card
    row = re.search(r"<td>backward, float32</td>\s*<td>17</td>\s*<td>([\d.]+)</td>", page)
    assert row[1] == f"{mean:.2f}"


def test_the_page_is_small(result):
    rows = [synthetic.row(row.cell, seed=1) for row in result.rows]
    shifted = [
        dataclasses.replace(
            row, cell=dataclasses.replace(row.cell, shape=(3, *row.cell.shape[1:]), dtype="float16")
        )
        for row in rows
    ]
    many = (*result.rows, *shifted)
    assert len(many) > 260
    assert len(to_html(dataclasses.replace(result, rows=many)).encode()) < 1_600_000


def test_every_plot_has_a_text_alternative(page):
    assert len(re.findall(r'<img alt="[^"]{40,}" src="data:', page)) == page.count("<img") == 9


def test_the_condition_is_told(page, result):
    after = to_html(dataclasses.replace(result, rows=(), condition="after-convolution"))
    head = '<p class="machine">[^<]* · {}</p>'
    assert re.search(head.format("calls in a row"), page)
    assert re.search(head.format("each call right after a convolution"), after)
    assert "<li>Condition: quiet. " in page
    assert "<li>Condition: after-convolution. " in after


def test_a_result_without_rows_is_a_page(result):
    text = to_html(dataclasses.replace(result, rows=()))
    assert "No peer is faster anywhere." in text


def test_a_browser_shows_it_and_its_tables_sort_and_filter(browse, page, result):
    dom = browse(page.replace("</body>", f"{VISIT}</body>"), "--dump-dom")
    attribute = re.search(r'data-seen="([^"]*)"', dom)
    assert attribute, "the script did not come to its end"
    seen = json.loads(attribute[1].replace("&quot;", '"').replace("&amp;", "&"))

    def numbers(texts):
        return [float(text.strip("▲△ ").split("‡")[0]) for text in texts]

    assert seen["sort"] == "ascending"
    assert numbers(seen["ratio_up"]) == sorted(numbers(seen["ratio_up"]))
    assert numbers(seen["ratio_down"]) == sorted(numbers(seen["ratio_down"]), reverse=True)
    sizes = {bytes_text(row.cell.nbytes): row.cell.nbytes for row in result.rows}
    assert seen["sizes"] == sorted(seen["sizes"], key=sizes.get)
    assert seen["peer"][-2:] == ["crashed", "crashed"]
    # Two shapes, three operations, two types.
    assert seen["filtered"] == 12
    assert seen["count"] == "12 of 134 cells"
    assert seen["all"] == len(result.rows) - 1
    assert 0 < seen["lost"] < seen["all"]
    assert seen["lost_only"]
    assert not seen["wide"]


@pytest.mark.parametrize(
    ("options", "paper"),
    [((), (245, 246, 248)), (("--blink-settings=preferredColorScheme=0",), (13, 17, 23))],
    ids=["light", "dark"],
)
def test_a_screenshot_shows_something_on_the_right_paper(browse, page, tmp_path, options, paper):
    picture = tmp_path / "page.png"
    browse(page, f"--screenshot={picture}", "--window-size=1400,3000", *options)
    with Image.open(picture) as image:
        image = image.convert("RGB")
        assert image.size == (1400, 3000)
        assert image.getpixel((3, 3)) == paper
        colours = image.getcolors(2**24)
    assert len(colours) > 200
    # More than margins: cards, plots and text are on it.
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


def test_a_report_is_three_files(result, tmp_path):
    paths = write_report(result, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["result.json", "report.md", "report.html"]
    assert all(path.stat().st_size > 1000 for path in paths)
    assert sorted(paths) == sorted((tmp_path / "new" / "folder").iterdir())
