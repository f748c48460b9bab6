"""Modules of StableHLO that `cases export` writes: XLA parses, compiles and runs them."""

from __future__ import annotations

import numpy as np
import pytest
from jax.extend.backend import get_backend
from jaxlib import _jax

from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.export import export

# Of cases of 16 bits, only the grid's options have per-channel tensors of the type of x.
ONLY = ("realistic-*", "no-gamma-*", "nan-in-*", "grid-epsilon-*", "grid-gamma-epsilon-0-*")


def returned(text):
    """Return what the function `main` of a module returns, as XLA computes it on the CPU."""
    client = get_backend("cpu")
    devices = _jax.DeviceList(tuple(client.local_devices()[:1]))
    executed = client.compile_and_load(text, devices).execute_sharded([])
    return [np.asarray(shards[0]) for shards in executed.disassemble_into_single_device_arrays()]


@pytest.mark.parametrize(
    ("operation", "swapped"),
    [("backward", ("%mean", "%variance")), ("forward", ("%scale", "%offset"))],
)
def test_exported_module_accepts_results_of_xla_and_rejects_wrong_ones(
    operation, swapped, tmp_path
):
    selection = Selection(dtypes=("float32", "bfloat16"), only=ONLY, operation=operation)
    number, _ = export(tmp_path, selection, form="mlir")
    paths = sorted(tmp_path.glob("*.mlir"))
    assert len(paths) == number >= 8
    types = set()
    for path in paths:
        *results, _, _, _ = found = returned(path.read_text())
        assert [bool(each) for each in found[3:]] == [True] * 3, path.name
        types.add(str(results[0].dtype))
        assert np.isnan(results[0]).any() == path.name.startswith("nan-in-")
    assert types == {"float32", "bfloat16"}
    right = (tmp_path / "realistic-float32-float32-NXC.mlir").read_text()
    wrong = right.replace(", ".join(swapped), ", ".join(reversed(swapped)))
    assert wrong != right
    assert not returned(wrong)[3]
