"""Whether results have the same bits."""

from __future__ import annotations

import numpy as np


def same(found, expected):
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(other), strict=True)


def differ(found, others):
    pairs = zip(found, others, strict=True)
    assert any((np.asarray(own) != np.asarray(other)).any() for own, other in pairs)
