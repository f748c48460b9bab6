"""What the tests of the GPU's kernels share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Read when the kernels are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from backnorm.gpu.device import KNOWN

from .. import interpreter

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def rounding():
    with interpreter.rounding_as_hardware_does():
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


@pytest.fixture(params=["h200", "l40s"])
def gpu(request):
    """A device that plans are made for: one with fast float64, and one that computes in pairs."""
    with interpreter.standing_in_for(KNOWN[request.param]) as device:
        yield device


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave to longer runs what pairs of float32 share with float64: geometry, and other types."""
    for item in items:
        # There may be other folders' tests in the same session.
        if FOLDER not in item.path.parents or not hasattr(item, "callspec"):
            continue
        operands = item.callspec.params
        rare = "float32-float32" not in operands.get("name", "float32-float32")
        rare |= str(operands.get("dtype", "float32")) != "float32"
        # A program a channel, of which the interpreter runs each.
        relu = item.originalname == "test_relu_passes_battery"
        rare |= relu and "NCX" in operands.get("name", "")
        if "schedule" in operands:
            rare |= (operands["layout"] == "NXC") is (operands["schedule"] == "complete")
        if operands.get("gpu") == "l40s" and rare:
            item.add_marker(pytest.mark.sweep)
        elif _is_long(item.originalname, operands.get("name", "residual")):
            item.add_marker(pytest.mark.long)


def _is_long(test, name):
    """Whether a case of a battery is left to `make test-all`: a second arithmetic, most of NCX."""
    if test in ("test_backward_passes_battery", "test_forward_and_inference_pass_judge"):
        return "-in-" in name
    kept = "ceiling-residual-float32" if "NCX" in name else "residual"
    relu = test in ("test_relu_passes_battery", "test_broken_relu_kernel_is_rejected")
    return relu and (kept not in name or ("NCX" in name and "-in-" in name))
