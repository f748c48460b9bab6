"""What a report says of a run on a GPU, and that one on the CPU says nothing of it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from backnorm.errors import ArgumentError
from benchmarks.model import Cell, Outcome, Row
from benchmarks.report import compare, read_result, to_html, to_markdown, write_result
from benchmarks.report.figures import cells, losing, summary
from benchmarks.report.gpu import attained, goals, notes, whole_calls
from benchmarks.report.words import DASH, speed_text

from . import synthetic_gpu
from .synthetic import squeezed
from .synthetic_gpu import GPU, LARGE, MIDDLE, SMALL, row

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def gpu_result():
    return synthetic_gpu.result()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.json"


def backward(shape=LARGE, suite="batch256", layout="NCX"):
    return Cell(suite, "backward", shape, layout, "float32")


def target(line, *rows):
    (found,) = [text for text in goals(synthetic_gpu.result(rows)) if text.startswith(line)]
    return found


def test_a_result_survives_a_file(gpu_result, path):
    write_result(gpu_result, path)
    assert read_result(path) == gpu_result


def test_a_file_of_the_cpu_has_no_trace_of_a_gpu(result, path):
    write_result(result, path)
    document = json.loads(path.read_text())
    assert "gpu" not in document
    assert all("whole" not in outcome for r in document["rows"] for outcome in r["outcomes"])
    assert read_result(path).gpu is None
    assert read_result(path).device == "cpu"


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("gpu",), [], "gpu: Input should be an object"),
        (("gpu", "name"), None, "gpu.name"),
        (("gpu", "cache"), -1, "gpu.cache: Input should be greater than or equal to 0"),
        (("gpu", "bandwidth"), 0, "gpu.bandwidth: Input should be greater than 0"),
        (("gpu", "bandwidth"), 10**400, "gpu.bandwidth: Input should be"),
        (("gpu", "bandwidth"), "fast", "gpu.bandwidth: Input should be a valid number"),
        (
            ("rows", 2, "outcomes", 0, "whole", "median"),
            0,
            "whole.median: Input should be",
        ),
        (
            ("rows", 2, "outcomes", 5, "status"),
            "ok",
            "outcomes[5]: Value error, must have",
        ),
    ],
)
def test_damage_is_named(gpu_result, path, place, value, expected):
    write_result(gpu_result, path)
    document = json.loads(path.read_text())
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ArgumentError) as caught:
        read_result(path)
    assert expected in str(caught.value)


def test_the_floor_is_the_least_that_must_be_moved(gpu_result):
    for each in gpu_result.rows:
        assert each.ratio_to_floor() == pytest.approx(1.6)
    # Two passes of a backward pass move 5 arrays in the time in which the floor moves 4.8.
    assert attained(gpu_result.rows[0], GPU) == pytest.approx(5 / 3 / 1.6)
    assert summary(cells(gpu_result)).share.tolist() == pytest.approx([1 / 1.6] * 3)


def test_targets_beside_peers():
    fine = row(backward())
    close = row(backward(MIDDLE), peers={"cudnn": 1 / 0.95})
    line = target("ours / best peer at batch 256", fine, close)
    assert "worst 0.95 (backward (256,512,7,7) NCX float32)" in line
    assert "above 0.90 in 1 of 2 cells" in line
    assert "geometric mean 0.69" in line
    assert "targets: 0.90 in every cell, 0.60 in the mean" in line


def test_other_suites_are_no_part_of_the_target():
    line = target("ours / best peer at batch 256", row(backward(suite="resnet50")))
    assert line.startswith("ours / best peer at batch 256: not measured")


def test_targets_of_bandwidth_look_beyond_the_l2_alone():
    slow = row(backward(), ours=5 / 3 / 0.8)
    fast = row(backward(layout="NXC"), ours=5 / 3 / 0.9)
    within = row(backward(MIDDLE), ours=10.0)
    assert within.cell.nbytes < GPU.cache < slow.cell.nbytes
    line = target("part of the bandwidth of copying", slow, fast, within)
    assert "x beyond the L2 (60 MiB): worst 80 % (backward (256,64,112,112) NCX float32)" in line
    assert "below 85 % in 1 of 2 cells, geometric mean 85 %" in line
    assert "target: 85 % in every cell; counted: backward 5, forward 3, inference 2" in line
    assert target("part of the", within).endswith(
        "not measured (target: 85 % in every cell; counted: backward 5, forward 3, inference 2)"
    )


def test_targets_of_whole_calls_are_to_pytorchs_operators():
    small = backward(SMALL, "small")
    line = target("whole call on (8,16,8,8)", row(small))
    assert "worst 0.80 (backward (8,16,8,8) NCX float32, 20.0 µs to 25.0 µs of PyTorch)" in line
    # What torch.compile takes does not matter here.
    assert target("whole call", row(small, whole={"compile": 1e-6})) == line
    line = target("whole call", row(small, whole={"cudnn": 16e-6}))
    assert "worst 1.25 (backward (8,16,8,8) NCX float32, 20.0 µs to 16.0 µs of cuDNN)" in line
    assert "not measured" in target("whole call", row(backward()))


def test_a_result_without_rows_has_targets_that_were_not_measured():
    lines = goals(synthetic_gpu.result([]))
    assert lines[0] == "bandwidth of copying: 4000 GB/s"
    assert all("not measured" in line for line in lines[1:])


def test_a_failure_of_ours_is_no_attained_bandwidth():
    crashed = Row(backward(), (Outcome("backnorm", "allocate", "crashed", detail="signal"),))
    assert attained(crashed, GPU) is None
    assert "not measured" in target("part of the", crashed)


def test_cells_without_a_figure_are_counted():
    crashed = Row(
        backward(layout="NXC"), (Outcome("backnorm", "allocate", "crashed", detail="signal"),)
    )
    for line in ("ours / best peer", "part of the bandwidth"):
        assert "1 cells (and 1 without such a figure), " in target(line, row(backward()), crashed)


def test_the_targets_of_a_cell_are_those_of_the_device(result):
    near = row(backward(), peers={"cudnn": 1 / 0.85})
    on_gpu = synthetic_gpu.result([near])
    assert not cells(on_gpu).near.any()
    # 0.85 is above the target of a backward pass on the CPU.
    assert cells(dataclasses.replace(on_gpu, gpu=None)).near.tolist() == [True]
    assert losing(cells(on_gpu)).empty


def test_whole_calls_have_a_table_of_their_own(gpu_result):
    calls = whole_calls(gpu_result)
    assert [*calls.columns[:3]] == ["cell", "backnorm, ms", "PyTorch, ms (ratio)"]
    assert len(calls) == 6
    assert calls.iloc[0].tolist() == [
        "backward (8,16,8,8) NCX float32",
        "0.0200",
        "0.0250 (0.80)",
        "0.0400 (0.50)",
        "0.0500 (0.40)",
    ]


def test_the_markdown_says_where_and_how(gpu_result):
    text = squeezed(to_markdown(gpu_result))
    for expected in (
        "NVIDIA H200, capability 9.0",
        "| Driver, CUDA | 580.65.06, 13.0 |",
        "| Memory, L2 | 141 GiB, 60 MiB |",
        "| Bandwidth of copying | 4000 GB/s, measured |",
        "A backward pass that goes over its data twice moves 5",
        "## Targets\n",
        "## Whole calls, dispatch included\n",
        "| backward (8,16,8,8) NCX float32 | 0.0200 | 0.0250 (0.80) |",
        "not installed: JAX (6 times: jax has no cuda device)",
    ):
        assert expected in text, expected
    for line in goals(gpu_result):
        assert f"- {line}\n" in text
    # Ours has one form here.
    assert "| allocate, ms |" in text
    assert "| out, ms |" not in text


def test_speeds_have_three_digits_and_no_exponent():
    assert [speed_text(s) for s in (7.123, 45.6, 999.4, 999.6, 4110.4, None)] == [
        "7.12",
        "45.6",
        "999",
        "1000",
        "4110",
        DASH,
    ]


def test_what_is_not_known_is_said_to_be_so(gpu_result):
    silent = dataclasses.replace(GPU, driver="", clock=0, memory_clock=0)
    text = squeezed(to_markdown(dataclasses.replace(gpu_result, gpu=silent)))
    assert "| Driver, CUDA | not known, 13.0 |" in text
    assert "| Highest clocks, memory | not known, not known |" in text


def test_the_page_says_the_same(gpu_result):
    page = to_html(gpu_result)
    assert "NVIDIA H200 · AMD EPYC" in page
    assert "Whole calls, dispatch included" in page
    for line in (*goals(gpu_result), *notes(gpu_result)):
        assert line.replace("'", "&#39;") in page, line
    assert "backward 0.9, forward 0.9, inference 0.9 of the best peer" in page
    assert ">nan<" not in page


def test_a_report_of_the_cpu_says_nothing_of_it(result):
    assert (goals(result), notes(result), len(whole_calls(result))) == ([], [], 0)
    for text in (to_markdown(result), to_html(result)):
        assert "CUDA" not in text
        assert "Whole calls" not in text
        assert "copying" not in text


def test_two_gpus_are_not_one(gpu_result, result):
    other = dataclasses.replace(GPU, name="NVIDIA A100", bandwidth=1.6e12)
    warnings = compare(gpu_result, dataclasses.replace(gpu_result, gpu=other)).warnings
    assert warnings == ("gpu name: NVIDIA H200, now NVIDIA A100",)
    # Every run measures another bandwidth, and times over the floor's allow for it.
    faster = dataclasses.replace(gpu_result, gpu=dataclasses.replace(GPU, bandwidth=4.1e12))
    assert compare(gpu_result, faster).warnings == ()
    assert "device: cpu, now cuda" in compare(result, gpu_result).warnings
