"""A repeated call, then one with an operand absent, of another kind or in another's place."""

from __future__ import annotations

import pytest
import tensorflow as tf

import backnorm.tensorflow as ours

from .. import operands

FUNCTIONS = [name for name in operands.CANONICAL if hasattr(ours, name)]
KINDS = {"tensors": tf.convert_to_tensor, "variables": tf.Variable}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_operand(name, kind):
    wrong, count = operands.failures(getattr(ours, name), KINDS[kind])
    assert not wrong, f"{len(wrong)} kinds in {count} calls:\n" + "\n".join(wrong)
    assert count > 80


def test_all_functions_are_checked():
    assert set(FUNCTIONS) == set(operands.CANONICAL)
