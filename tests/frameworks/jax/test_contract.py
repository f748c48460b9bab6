"""The contract of all front doors, for the functions and the layers of flax."""

from __future__ import annotations

from tests.contract.fronts import FrontContract

from .fronts import FRONTS


class TestFronts(FrontContract):
    fronts = FRONTS
    imports = "from tests.frameworks.jax.fronts import FRONTS as fronts"
