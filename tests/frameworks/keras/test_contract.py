"""The contract of all front doors, for the layer."""

from __future__ import annotations

from tests.contract.fronts import FrontContract

from .fronts import FRONTS


class TestFronts(FrontContract):
    fronts = FRONTS
    # Tests of the backends' own front doors have this one.
    test_front_without_kernels_raises_one_line = None
