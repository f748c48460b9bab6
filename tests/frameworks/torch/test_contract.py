"""The contract of all front doors, for functions, layers and operators on tensors."""

from __future__ import annotations

import pytest

from tests.contract.fronts import FrontContract

from .fronts import FRONTS


# PyTorch compiles its decompositions when the first dual number is made.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
class TestFronts(FrontContract):
    fronts = FRONTS
    imports = "from tests.frameworks.torch.fronts import FRONTS as fronts"
