"""The check of a batch normalisation in groups of channels."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from backnorm.conformance.judge import calls
from backnorm.dialects import registry

OP = "onednn_graph", "BatchNormTrainingBackward"


@pytest.fixture(params=["NCX", "NXC"])
def operands(request, rng):
    """The operator's inputs, of 40 channels, and its attributes."""
    shape = (6, 40, 5, 7) if request.param == "NCX" else (6, 5, 7, 40)
    src, diff_dst = rng.normal(size=(2, *shape)).astype(np.float32)
    channels = rng.uniform(0.5, 1.5, (3, 40)).astype(np.float32)
    inputs = {"src": src, "diff_dst": diff_dst}
    inputs |= dict(zip(("mean", "variance", "gamma"), channels, strict=True))
    return inputs, {"epsilon": 0.1, "data_format": request.param}


def verdicts_of(operands, outputs):
    return calls.check_call(registry.operator(*OP).canonical(*operands), operands[0], outputs)


@pytest.mark.parametrize("wrong", [None, "diff_src", "diff_gamma", "diff_beta"])
def test_check_in_groups_gives_verdicts_of_whole_check(operands, monkeypatch, wrong):
    outputs = registry.operator(*OP).invoke(*operands)
    if wrong is not None:
        array = outputs[wrong]
        place = np.unravel_index(array.size - array.size // 3, array.shape)
        array[place] += 1
    whole = verdicts_of(operands, outputs)
    monkeypatch.setattr(calls, "_JUDGED_TOGETHER", 6 * 35 * 3)
    parts = verdicts_of(operands, outputs)
    assert parts.keys() == whole.keys()
    for name, verdict in whole.items():
        assert parts[name].passed == verdict.passed == (name != wrong)
        assert parts[name].where == verdict.where
        assert parts[name].worst_ulp == verdict.worst_ulp
        assert parts[name].worst_excess == verdict.worst_excess
        assert parts[name].detail.startswith("of the part from ")
    if wrong is not None:
        assert whole[wrong].where == tuple(int(i) for i in place)


def test_check_memory_is_bounded_by_group_size(rng, monkeypatch):
    monkeypatch.setattr(calls, "_JUDGED_TOGETHER", 2**17)
    src, diff_dst = rng.normal(size=(2, 64, 64, 16, 16)).astype(np.float32)
    channels = dict.fromkeys(("mean", "variance", "gamma"), np.ones(64, np.float32))
    inputs = {"src": src, "diff_dst": diff_dst} | channels
    operands = inputs, {"epsilon": 0.1, "data_format": "NCX"}
    outputs = registry.operator(*OP).invoke(*operands)
    verdicts_of(operands, outputs)
    tracemalloc.start()
    try:
        verdicts_of(operands, outputs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 80 bytes an element, and what does not grow with them.
    assert peak < 80 * 2**17 + 2**22


def test_check_of_empty_batch_passes(rng):
    src = np.empty((0, 3, 4), np.float32)
    ones = np.ones(3, np.float32)
    inputs = {"src": src, "diff_dst": src, "mean": ones, "variance": ones, "gamma": ones}
    operands = inputs, {"epsilon": 0.1, "data_format": "NCX"}
    verdicts = verdicts_of(operands, registry.operator(*OP).invoke(*operands))
    assert len(verdicts) == 3
    assert all(verdict.passed for verdict in verdicts.values())


@pytest.mark.parametrize("wrong", [False, True])
def test_check_of_relu_in_parts_gives_verdict_of_whole_check(rng, monkeypatch, wrong):
    src = rng.normal(size=(7, 5, 4)).astype(np.float32)
    outputs = {"dst": np.maximum(src, 0)}
    if wrong:
        outputs["dst"][5, 2, 1] = -1
    whole = calls.check_pointwise("ReLU", {}, {"src": src}, outputs)["dst"]
    monkeypatch.setattr(calls, "_JUDGED_TOGETHER", 40)
    parts = calls.check_pointwise("ReLU", {}, {"src": src}, outputs)["dst"]
    assert parts.passed == whole.passed == (not wrong)
    assert parts.detail.startswith("of the part from ")
