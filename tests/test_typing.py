"""Type checkers see the signature that a function of a dialect declares."""

from __future__ import annotations

import re

import pytest

api = pytest.importorskip("mypy.api")

CALLS = """\
import numpy as np
from backnorm.dialects import onednn_spec, stablehlo

x, c = np.ones((2, 3)), np.ones(3)
dx, dgamma, dbeta = stablehlo.batch_norm_grad(x, c, c, c, x, epsilon=1e-5, feature_index=1)
y: np.ndarray = stablehlo.batch_norm_inference(x, c, c, c, c, 1e-5, 1)
stablehlo.batch_norm_grad()
stablehlo.batch_norm_grad(x, c, c, c, x, 1e-5)
stablehlo.batch_norm_grad(x, c, c, c, x, epsilon="1e-5", feature_index=1)
onednn_spec.BatchNormTrainingBackprop(x, x, c, c, epsilon=1e-5, data_format="NHWC")
onednn_spec.BatchNormTrainingBackprop_2020_21(x, x, c, c)
onednn_spec.BatchNormTrainingBackprop_early(x, x, c, c)
"""

EXPECTED = [
    (7, 'Missing positional arguments "operand", "scale", "mean", "variance", "grad_output", '
        '"epsilon", "feature_index" in call to "batch_norm_grad"'),
    (8, 'Missing positional argument "feature_index" in call to "batch_norm_grad"'),
    (9, 'Argument "epsilon" to "batch_norm_grad" has incompatible type "str"; expected "float"'),
    (10, 'Argument "data_format" to "BatchNormTrainingBackprop" has incompatible type '
         '''"Literal['NHWC']"; expected "Literal['NXC', 'NCX']"'''),
    (11, 'Missing positional arguments "mean", "variance" in call to '
         '"BatchNormTrainingBackprop_2020_21"'),
    (11, 'Missing named argument "epsilon" for "BatchNormTrainingBackprop_2020_21"'),
    # The operator of the early version is a variable.
    (12, "Too few arguments"),
    (12, 'Missing named argument "epsilon"'),
]  # fmt: skip


def test_mypy_refuses_calls_without_required_arguments_or_with_wrong_types(tmp_path):
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    told, errors, _ = api.run(["--strict", "--cache-dir", str(tmp_path / "cache"), str(file)])
    assert errors == ""
    found = re.findall(r"calls\.py:(\d+): error: (.*)  \[", told)
    assert [(int(line), message) for line, message in found] == EXPECTED
