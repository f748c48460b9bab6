"""The README's code for torch runs."""

from __future__ import annotations


def test_the_code_of_the_readme_runs(run_readme):
    names = run_readme("backnorm.torch")
    model = names["model"]
    assert not any(type(module) is names["torch"].nn.BatchNorm2d for module in model.modules())
    assert model(names["torch"].randn(2, 3, 8, 8)).shape == (2, 8, 6, 6)
