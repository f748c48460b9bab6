"""Means by layout count the cells that they say, and no others."""

from __future__ import annotations

import math

import pytest

from benchmarks.model import Cell, Outcome, Result, Row
from benchmarks.report.layouts import LIMITS, layout_cells, layout_tables, limits_table
from benchmarks.report.words import DASH

from .synthetic import environment, timing

SMALL, MIDDLE, LARGE = (1, 64, 16, 16), (1, 64, 16, 17), (64, 64, 32, 32)
TWICE = (2, *MIDDLE[1:])
EVERYONE = {"backnorm": 1.0, "backnorm-float32": 0.5, "floor": 0.25, "torch": 2.0, "onednn": 0.8}


def row(shape=MIDDLE, layout="NCX", dtype="float32", op="backward", allocated=(), **seconds):
    """Return a cell in which everybody writes to memory that is given, as fast as ever or not."""
    outcomes = [outcome(name, "out", time) for name, time in (EVERYONE | seconds).items()]
    outcomes += [outcome(name, "allocate", time) for name, time in dict(allocated).items()]
    return Row(Cell("suite", op, shape, layout, dtype), tuple(outcomes))


def outcome(contestant, form, seconds):
    if seconds is None:
        return Outcome(contestant, form, "unsupported")
    return Outcome(contestant, form, "ok", timing(seconds))


def found(*rows):
    return layout_cells(Result(environment(), {}, rows))


def texts(frame):
    """Return the lines of the tables, by operation and layout, after their headings."""
    return [
        {line.iloc[0]: dict(line.iloc[1:]) for _, line in table.iterrows()}
        for table in layout_tables(frame)
    ]


@pytest.mark.parametrize(("shape", "dtype"), [(SMALL, "float32"), (MIDDLE, "float64")])
def test_small_cells_and_float64_do_not_count(shape, dtype):
    assert len(found(row(shape, dtype=dtype))) == 0
    assert len(found(row())) == 1
    assert not list(layout_tables(found(row(shape, dtype=dtype))))


def test_a_peer_is_compared_in_its_better_form():
    frame = found(
        row(),
        row(TWICE, torch=None),
        row(LARGE, allocated={"backnorm": 3.0, "torch": 1.5}),
    )
    assert frame.torch.tolist() == [0.5, pytest.approx(math.nan, nan_ok=True), 2.0]
    assert frame.onednn.tolist() == [1.25] * 3
    assert frame.ratio.tolist() == [1.25, 1.25, 2.0]
    assert frame.in_float32.tolist() == [0.625] * 3


def test_the_floor_is_beside_what_no_cache_holds():
    frame = found(row(), row(LARGE), row(LARGE, op="forward"))
    none = pytest.approx(math.nan, nan_ok=True)
    assert frame.far.tolist() == [none, 4.0, none]
    assert frame.far_in_float32.tolist() == [none, 2.0, none]


def test_a_line_a_layout_and_one_of_both():
    (table,) = texts(
        found(
            row(onednn=2.0, torch=4.0),
            row(TWICE, onednn=0.5),
            row(layout="NXC", onednn=0.5),
        )
    )
    assert [*table] == ["backward, NCX", "backward, NXC", "backward, both"]
    assert table["backward, NCX"] == {
        "default, best peer": "1.00 (1 of 2)",
        '`arithmetic="float32"`, best peer': "0.50",
        "PyTorch": "0.35",
        "TensorFlow": DASH,
        "JAX": DASH,
        "oneDNN": "1.00 (1)",
        "floor, default and float32": f"{DASH}, {DASH}",
    }
    assert table["backward, NXC"]["default, best peer"] == "2.00 (1 of 1)"
    assert table["backward, both"]["default, best peer"] == "1.26 (2 of 3)"


def test_both_types_of_16_bits_are_in_one_table():
    rows = [row(TWICE, dtype=dtype, floor=2.0) for dtype in ("bfloat16", "float16")]
    wide, narrow = texts(found(row(op="inference"), *rows))
    assert [*wide] == ["inference, NCX", "inference, both"]
    assert narrow["backward, NCX"]["best peer"] == "1.25 (2 of 2)"
    assert narrow["backward, NCX"]["floor"] == DASH


def test_limits_are_counted_machine_by_machine():
    one = found(row(), row(layout="NXC", onednn=0.5), row(op="inference", onednn=1.0))
    other = found(row(op="forward"), row(dtype="float16"))
    table = limits_table({"one": one, "other": other})
    assert table.columns.tolist() == ["float32 cells", "one", "other"]
    counts = {line.iloc[0]: tuple(line.iloc[1:]) for _, line in table.iterrows()}
    assert len(counts) == len(LIMITS)
    assert counts == {
        'backward with `arithmetic="float32"`, above 0.9 of the best peer': ("1 of 2", DASH),
        "backward, slower than PyTorch": ("0 of 2", DASH),
        "backward, slower than TensorFlow": (DASH, DASH),
        "backward, slower than JAX": (DASH, DASH),
        "backward, above 1.25 of oneDNN": ("1 of 2", DASH),
        "forward, above 0.9 of the best peer": (DASH, "1 of 1"),
        "inference, slower than the best peer": ("0 of 1", DASH),
    }


@pytest.mark.parametrize(("floor", "below"), [(0.44, 0), (0.46, 1), (0.64, 2)])
def test_limits_that_lie_below_the_floor_are_counted(floor, below):
    # oneDNN takes 0.5: 0.9 of that is 0.45, and 1.25 times as much 0.625.
    table = limits_table({"one": found(row(onednn=0.5, floor=floor))})
    texts = [line.one for _, line in table.iterrows() if line.one.startswith("1 of 1")]
    expected = ["1 of 1; 1 below the floor"] * below + ["1 of 1"] * (2 - below)
    assert texts == expected
