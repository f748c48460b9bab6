"""The contract of all front doors, for the functions on tensors."""

from __future__ import annotations

from tests.contract.fronts import FrontContract

from .fronts import FRONTS


class TestFronts(FrontContract):
    fronts = FRONTS
    imports = "from tests.frameworks.tensorflow.fronts import FRONTS as fronts"
