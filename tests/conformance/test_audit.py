"""What a test's tolerance lets through."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.verify.audit import POLICIES, audit, policy_of
from backnorm.errors import ArgumentValueError


def names(entries):
    return {name for name, _ in entries}


def test_audit_loose_tolerance_lets_more_through():
    tight, loose = audit("pytorch"), audit("kernelbench")
    assert names(loose.missed) > names(tight.missed)
    assert "TakesMagnitudeOfGamma" in names(loose.invisible)


def test_audit_cube_of_a_layer_shows_every_formula():
    found = audit("rtol=1e-5,atol=1e-5", data="layer", loss="cube")
    assert len(found.caught) >= 21
    assert not {"DropsMeanOfDy", "ForgetsGamma", "EpsilonLeftOut"} & names(found.missed)


def test_audit_sum_loss_rejects_right_kernels():
    found = audit("pytorch", loss="sum")
    assert found.false_alarms["serial sums"] == found.runs


def test_audit_correlation_does_not_see_a_factor():
    assert "ForgetsGamma" not in names(audit("tt-metal", data="randn").caught)


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_right_result_is_accepted(policy):
    import numpy as np

    right = np.random.default_rng(0).standard_normal(100)
    assert policy_of(policy)(right, right)


def test_policy_unknown_measure_is_refused():
    with pytest.raises(ArgumentValueError, match="unknown measure"):
        policy_of("colour=1")


@pytest.mark.parametrize("shape", ["a,b", "3", "4,0", ""])
def test_tolerance_bad_shape_is_bad_usage(shape):
    done = CliRunner().invoke(app, ["tolerance", "--audit", "numpy", "--shape", shape])
    assert done.exit_code == 2
    assert "--shape" in done.output
