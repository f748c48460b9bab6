"""Fixtures of the tests of the GPU's kernels."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

# Read when the kernels are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from backnorm.gpu.kernels.tuning import CONFIGURATIONS

from .. import interpreter

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def rounding():
    with interpreter.rounding_as_hardware_does() if interpreter.INTERPRETED else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def untuned():
    # The interpreter cannot measure configurations, and on a GPU every kernel would be compiled for
    # each. `gpu_device` has the tests of tuning.
    with interpreter.in_configuration(CONFIGURATIONS[-1]):
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave to longer runs what other cases of a battery cover."""
    for item in items:
        # There may be other folders' tests in the same session.
        if FOLDER not in item.path.parents or not hasattr(item, "callspec"):
            continue
        if _is_long(item.originalname, item.callspec.params.get("name", "residual")):
            item.add_marker(pytest.mark.long)


def _is_long(test, name):
    """Whether a case of a battery is left to `make test-all`: a second arithmetic, most of NCX."""
    if test in ("test_backward_passes_battery", "test_forward_and_inference_pass_judge"):
        return "-in-" in name
    kept = "ceiling-residual-float32" if "NCX" in name else "residual"
    relu = test in ("test_relu_passes_battery", "test_broken_relu_kernel_is_rejected")
    return relu and (kept not in name or ("NCX" in name and "-in-" in name))
