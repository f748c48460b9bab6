"""Errors of results that are known, as the documentation quotes them."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm.conformance.judge import GRADIENTS
from backnorm.dialects.aten import native_batch_norm_backward
from benchmarks.studies import errors
from benchmarks.studies.errors import (
    errors_of,
    exact_gradients,
    make,
    measured,
    second_order,
    tables,
)
from tests.support.dtypes import FLOAT32


def test_make_gives_both_layouts_the_same_elements():
    one, other = make(4, 100.0, "NCX"), make(4, 100.0, "NXC")
    np.testing.assert_array_equal(np.moveaxis(one.x, 1, -1), other.x)
    np.testing.assert_array_equal(one.mean, other.mean)
    assert one.x.flags.c_contiguous
    assert other.x.flags.c_contiguous


def test_errors_of_rounded_results_are_half_an_ulp_and_show_wrong_element():
    truth = exact_gradients(make(4, 1.0, "NCX"), takes_inverse=False)
    rounded = {name: truth[name][0].hi.astype(FLOAT32) for name in GRADIENTS}
    right = errors_of(rounded, truth)
    assert 0.4 < right["dx in ulp"][0] <= 0.5
    assert 0.2 < right["dx in ulp"][1] < 0.4
    assert max(right["dgamma in 2⁻²⁴ T"][0], right["dbeta in 2⁻²⁴ T"][0]) <= 1.0
    rounded["dgamma"][3] += truth["dgamma"][1][3] * 2.0**-18
    wrong = errors_of(rounded, truth)
    assert wrong["dgamma in 2⁻²⁴ T"] == pytest.approx((64, 16), abs=1)
    assert {**wrong, "dgamma in 2⁻²⁴ T": right["dgamma in 2⁻²⁴ T"]} == right


def test_exact_gradients_with_takes_inverse_use_rounded_inverse():
    data = make(4, 1.0, "NCX")
    inverse = (1 / np.sqrt(data.variance.astype(float) + data.epsilon)).astype(FLOAT32)
    result = native_batch_norm_backward(
        data.dy, data.x, data.gamma, None, None, data.mean, inverse, True, 0.0, [True] * 3
    )
    found = dict(zip(GRADIENTS, result, strict=True))
    judged = errors_of(found, exact_gradients(data, takes_inverse=True))
    assert judged["dx in ulp"][0] < 0.51
    assert errors_of(found, exact_gradients(data, takes_inverse=False))["dx in ulp"][0] > 1


def test_tables_show_measured_errors_of_contestant(monkeypatch):
    monkeypatch.setattr(errors, "PLANES", (3, 4))
    monkeypatch.setattr(errors, "RATIOS", (1.0, 100.0))
    found = dict(measured("backnorm", "NXC"))
    assert found.keys() == {(3, 1.0), (3, 100.0), (4, 1.0), (4, 100.0)}
    text = "\n".join(tables({"ours": found}))
    assert text.count("| ours | 0.5, 0.29 |") == 2


def test_second_order_of_backnorm_is_rounded_once_in_float32():
    pytest.importorskip("torch")
    rows = [row for row in second_order() if row[0] == "backnorm"]
    assert [str(row[1]) for row in rows] == ["float32", "float64"]
    errors = [[float(each) for each in row[2:]] for row in rows]
    # Rounding loses half an ulp, which is at most u |value| and thus u T.
    assert 0 < max(errors[0]) <= 1
    assert 0 < max(errors[1]) < 10
