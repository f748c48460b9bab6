"""Ratios, tables, summaries and plots of results that are known, and their files."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from benchmarks.models.report import (
    FASTER,
    comparisons,
    models_lines,
    models_plot,
    models_table,
)
from benchmarks.results import (
    DASH,
    Result,
    beside_best,
    bytes_text,
    geometric_mean,
    markdown,
    milliseconds,
    operator_lines,
    operator_plot,
    operator_table,
    ratio_to_floor,
    ratios,
    read,
    result_of,
    write,
)

CELL = {"suite": "small", "op": "backward", "shape": "2,64,4,4", "layout": "NCX"}
ROWS = [
    # The best peer is oneDNN, whose form is another than that of PyTorch's quicker call.
    CELL
    | {"dtype": "float32", "notes": "", "floor.out": 1e-3}
    | {"backnorm.out": 2e-3, "backnorm.allocate": 4e-3, "backnorm-float32.out": 1e-3}
    | {"torch.allocate": 3e-3, "onednn.out": 1e-3, "numpy.allocate": 9e-3},
    CELL
    | {"dtype": "float16", "notes": "onednn out unsupported: not today: x; jax out missing: -"}
    | {"backnorm.allocate": 1e-3, "torch.allocate": 4e-3, "floor.out": 2e-3},
    CELL
    | {"dtype": "float64", "notes": "backnorm out inaccurate: dx[0] = 1; jax out missing: -"}
    | {"torch.allocate": 4e-3},
]
GPU = {"device": {"bandwidth": 4.2e12}}


@pytest.fixture
def result():
    return result_of({"command": "operator", "device": {}}, ROWS)


def test_ratios_compare_each_form_with_the_same_form(result):
    found = ratios(result.frame)
    assert found.ratio[:2].tolist() == pytest.approx([2.0, 0.25])
    assert found.peer.tolist() == ["onednn.out", "torch.allocate", None]
    assert math.isnan(found.ratio[2])


def test_ratios_use_given_peers_and_contestant(result):
    assert ratios(result.frame, peers=["torch"]).ratio[0] == pytest.approx(4 / 3)
    assert ratios(result.frame, "backnorm-float32").ratio[0] == pytest.approx(1.0)
    assert ratios(result.frame, peers=["cudnn"]).ratio.isna().all()


def test_ratio_to_floor_prefers_out_form(result):
    assert ratio_to_floor(result.frame)[:2].tolist() == pytest.approx([2.0, 0.5])


def test_beside_best_has_times_of_the_same_form(result):
    lines = beside_best(result.frame).to_numpy().tolist()
    assert lines == [
        ["2.00", "1.00", "oneDNN", "out", "**2.00** (slower)"],
        ["1.00", "4.00", "PyTorch", "allocate", "0.25"],
        [DASH] * 5,
    ]


def test_operator_table_has_all_rows_and_marks_slower_ones(result):
    table = operator_table(result)
    assert len(table) == len(ROWS)
    assert table.ratio.tolist() == ["**2.00** (slower)", "0.25", DASH]
    assert table.floor.tolist() == ["2.00", "0.50", DASH]
    # Five passes over 8 KiB in 2 ms.
    assert table["GB/s"][0] == f"{5 * 8192 / 2e-3 / 1e9:.3g}"
    assert "whole call" not in table


def test_operator_table_of_a_gpu_has_ratios_of_whole_calls():
    row = ROWS[1] | {"backnorm.allocate.whole": 3e-5, "torch.allocate.whole": 2e-5}
    table = operator_table(result_of(GPU, [row | {"cudnn.allocate.whole": 4e-5}]))
    assert table["whole call"].tolist() == ["**1.50** (slower)"]


def test_operator_lines_have_means_and_count_reasons(result):
    lines = operator_lines(result)
    mean = math.sqrt(2.0 * 0.25)
    expected = f"backnorm: {mean:.2f} in the geometric mean (slower in 1 of 2, 2.00 in the worst)"
    assert lines[0] == f"{expected} of the best peer's time; 1.00 of the floor's"
    assert "jax out missing: - (2 of 3 cells)" in lines
    assert "onednn out unsupported: not today (1 of 3 cells)" in lines
    assert "copying: 4200 GB/s" in operator_lines(result_of(GPU, ROWS))


def test_geometric_mean_leaves_out_missing_values():
    assert geometric_mean(pd.Series([0.5, math.nan, 2.0])) == pytest.approx(1.0)
    assert math.isnan(geometric_mean(pd.Series([math.nan])))


def test_write_and_read_give_the_same_result(result, tmp_path):
    path = tmp_path / "result.json"
    write(result, path)
    again = read(path)
    assert again.environment == result.environment
    pd.testing.assert_frame_equal(again.frame, result.frame, check_dtype=False, rtol=1e-5)
    assert path.read_text().count("\n[") == len(ROWS)


def test_plots_write_svg_without_background_and_with_text(result, tmp_path):
    operator_plot(result, tmp_path / "operator.svg")
    models_plot(MODELS, tmp_path / "models.svg")
    for path, text in (("operator.svg", "backward, NCX"), ("models.svg", "contiguous")):
        found = (tmp_path / path).read_text()
        assert text in found
        assert "ffffff" not in found


def test_models_plot_of_own_layers_alone_has_no_mark(tmp_path):
    own = [name for name in MODELS.frame if not name.startswith("backnorm")]
    models_plot(Result({}, MODELS.frame[own]), tmp_path / "models.svg")
    assert "contiguous" not in (tmp_path / "models.svg").read_text()


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1500"), (0.0123456, "12.3"), (9.9e-6, "0.00990"), (math.nan, DASH)]
)
def test_milliseconds_has_three_digits(seconds, text):
    assert milliseconds(seconds) == text


def test_bytes_text_uses_largest_unit():
    assert [bytes_text(size) for size in (64, 1 << 10, 3 << 19, 1 << 30)] == [
        "64 B",
        "1 KiB",
        "1.5 MiB",
        "1 GiB",
    ]


def test_markdown_escapes_pipes():
    assert "a \\| b" in markdown(pd.DataFrame({"x": ["a | b"]}))


CASE = {
    "model": "resnet18", "shape": "2,3,40,40", "layout": "contiguous", "precision": "float32",
    "allocator": "keeping",
}  # fmt: skip
MODELS = result_of(
    {"command": "models"},
    [
        CASE
        | {"notes": "backnorm-fused: RuntimeError: no compiler"}
        | {"torch.step": 1.0, "torch.ratio": 1.0, "torch.memory": 1000.0, "torch.error": 1e-6}
        | {"backnorm.step": 1.2, "backnorm.ratio": 1.25, "backnorm.memory": 900.0}
        | {"torch-compiled.step": 0.5, "torch-compiled.ratio": 0.5}
        | {"torch-compiled.ratio.1": 0.4, "torch-compiled.ratio.2": 0.6}
        | {"backnorm-compiled.step": 0.4, "backnorm-compiled.ratio": 0.4}
        | {"backnorm-compiled.ratio.1": 0.3, "backnorm-compiled.ratio.2": 0.54}
    ],
)


def test_models_table_has_all_timed_variants_and_marks_slower_ones():
    table = models_table(MODELS)
    assert table.variant.tolist() == ["torch", "backnorm", "torch-compiled", "backnorm-compiled"]
    assert table.ratio.tolist() == ["1.00", "**1.25** (slower)", "0.50", "0.40"]
    assert table.ms.tolist() == ["1000", "1200", "500", "400"]


def test_models_lines_compare_compiled_variants_and_list_failures():
    mean = "in the geometric mean (slower in"
    assert models_lines(MODELS) == [
        f"backnorm / torch: 1.25 {mean} 1 of 1, 1.25 in the worst); normalization {DASH}; "
        "memory 0.90",
        f"backnorm-compiled / torch-compiled: 0.80 {mean} 0 of 1, 0.80 in the worst); "
        f"normalization {DASH}; memory {DASH}; processes differ by 0.15, at most 0.15",
        "resnet18 2,3,40,40 contiguous float32: backnorm-fused: RuntimeError: no compiler",
    ]


def _layouts(contiguous, channels_last):
    """Return a result of a model in two layouts, each with (PyTorch's step, our ratio)."""
    both = {"contiguous": contiguous, "channels_last": channels_last}
    return result_of(
        {"command": "models"},
        [
            CASE
            | {"layout": layout, "notes": "", "torch.step": step, "torch.ratio": 1.0}
            | {"backnorm-fused.step": 9.0, "backnorm-fused.ratio": ratio}
            for layout, (step, ratio) in both.items()
        ],
    )


def test_comparisons_of_faster_layouts_divide_least_step_by_least_step():
    # Ours takes 0.9 contiguous and 0.88 channels_last; PyTorch's takes 1 and 0.8.
    found = comparisons(_layouts((1.0, 0.9), (0.8, 1.1))).set_index("layout")
    assert found.ratio.to_dict() == pytest.approx(
        {"contiguous": 0.9, "channels_last": 1.1, FASTER: 0.88 / 0.8}
    )
    assert found.base_step[FASTER] == 0.8
    # Ours is faster in another layout than PyTorch's.
    found = comparisons(_layouts((1.0, 0.5), (0.8, 1.1))).set_index("layout")
    assert found.ratio[FASTER] == pytest.approx(0.5 / 0.8)


def test_comparisons_of_model_that_lacks_one_layout_have_no_faster_one():
    found = comparisons(_layouts((1.0, 0.9), (0.8, math.nan)))
    assert found.layout.tolist() == ["contiguous"]


def test_comparisons_use_compiled_steps_for_compiled_variants():
    found = comparisons(MODELS).set_index("variant")
    assert found.ratio.to_dict() == pytest.approx({"backnorm": 1.25, "backnorm-compiled": 0.8})
    assert found.base_step["backnorm-compiled"] == 0.5
