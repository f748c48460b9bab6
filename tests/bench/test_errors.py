"""The table of errors: what it says of results that are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backnorm.dialects.aten import native_batch_norm_backward
from backnorm.dtypes import FLOAT32
from benchmarks import errors
from benchmarks.errors import Errors, errors_of, exact_of, larger, make, measured, tables

ENTRY = ("ours", "backnorm", "NXC")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(errors, "PLANES", (3, 4))
    monkeypatch.setattr(errors, "RATIOS", (1.0, 100.0))


def test_both_layouts_have_the_same_elements():
    one, other = make(4, 100.0, "NCX"), make(4, 100.0, "NXC")
    np.testing.assert_array_equal(np.moveaxis(one.x, 1, -1), other.x)
    np.testing.assert_array_equal(one.mean, other.mean)
    assert one.x.flags.c_contiguous
    assert other.x.flags.c_contiguous


def test_a_rounding_is_half_an_ulp_and_what_is_off_is_seen():
    data = make(4, 1.0, "NCX")
    exact = exact_of(data, takes_inverse=False)
    rounded = {name: getattr(exact, name).hi.astype(FLOAT32) for name in ("dx", "dgamma", "dbeta")}
    right = errors_of(rounded, exact)
    assert 0.4 < right.dx[0] <= 0.5
    assert 0.2 < right.dx[1] < 0.4
    assert max(right.dgamma[0], right.dbeta[0]) <= 1.0
    rounded["dgamma"][3] += exact.dgamma_terms[3] * 2.0**-18
    wrong = errors_of(rounded, exact)
    assert wrong.dgamma[0] == pytest.approx(64, abs=1)
    assert wrong.dgamma[1] == pytest.approx(16, abs=1)
    assert replace(wrong, dgamma=right.dgamma) == right


def test_who_is_given_a_rounded_inverse_is_judged_by_that():
    data = make(4, 1.0, "NCX")
    inverse = (1 / np.sqrt(data.variance.astype(float) + data.epsilon)).astype(FLOAT32)
    result = native_batch_norm_backward(
        data.dy, data.x, data.gamma, None, None, data.mean, inverse, True, 0.0, [True] * 3
    )
    found = dict(zip(("dx", "dgamma", "dbeta"), result, strict=True))
    assert errors_of(found, exact_of(data, takes_inverse=True)).dx[0] < 0.51
    assert errors_of(found, exact_of(data, takes_inverse=False)).dx[0] > 1


def test_a_contestant_is_measured_in_its_own_process():
    found = {(plane, ratio): each for plane, ratio, each in measured(ENTRY)}
    assert found.keys() == {(3, 1.0), (3, 100.0), (4, 1.0), (4, 100.0)}
    for each in found.values():
        assert 0.4 < each.dx[0] <= 0.51
    for planes, number in ((False, 2), (True, 4)):
        text = "\n".join(tables({"ours": found}, planes=planes))
        assert text.count("| ours | 0.5, 0.29 |") == number


def test_what_is_not_below_a_peer_is_said():
    def cells(mean):
        each = Errors((9.0, mean), (9.0, 1.0), (9.0, 1.0), (9.0, 1.0))
        better = Errors(*[(9.0, 0.5)] * 4)
        return {(3, 1.0): each, (4, 1.0): better}

    found = {
        "backnorm, float64": cells(8.0),
        "backnorm, float32, NCX": cells(2.0),
        "peer": {place: Errors(*[(1.0, 1.5)] * 4) for place in ((3, 1.0), (4, 1.0))},
    }
    line = "dx, 3 x 3, mean/deviation 1: backnorm, float32, NCX 2, peer 1.5"
    assert list(larger(found)) == [line]
