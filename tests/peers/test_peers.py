"""backnorm's backward pass beside TensorFlow's, PyTorch's and oneDNN Graph's, on the same data.

Two things are asked of every element. The peer agrees, within what float32 arithmetic can lose;
and backnorm is at least as close to the exact value as the peer is.
"""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm import reference
from backnorm.conformance.battery import Case
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import budget, ulp_error
from tests.support.dtypes import FLOAT16, FLOAT32
from tests.support.required import require

from . import peers

pytestmark = [pytest.mark.peer, pytest.mark.long]

SHAPES = {
    "NCX": ((4, 16, 7, 9), (3, 5, 1, 1), (2, 33, 14, 14), (1, 3, 5, 4)),
    "NXC": ((4, 7, 9, 16), (3, 1, 1, 5), (2, 14, 14, 33), (1, 5, 4, 3)),
}


def made(formats=("NCX", "NXC"), dtypes=(FLOAT32,), modes=(True,)):
    rng = np.random.default_rng(11)
    return [
        Case(
            f"{dtype}-{data_format}-{'x'.join(map(str, shape))}-{ratio:g}-{training}",
            # Every peer takes epsilon as float32: one that is a power of two is the same to all.
            realistic_data(
                shape, dtype, data_format=data_format, rng=rng, epsilon=2.0**-10, ratio=ratio
            ),
            training,
        )
        for dtype in dtypes
        for data_format in formats
        for training in modes
        for shape in SHAPES[data_format]
        # At 1e4 float32 implementations may lose nearly everything: there only the second counts.
        for ratio in (0.0, 4.0, 1e4)
    ]


def float32_loss(case):
    """Return the share of T that a float32 implementation may lose.

    Each sum of M terms, in any order, is off by at most M roundoffs (2**-24) of its magnitudes.
    x - mean, the product, s (a rounded root and a rounded quotient, which enters three times),
    the divisions by M and the operations of the element add at most 16 more. Peers that gather
    the mean into a constant pay for x and mean apart: 1 + 2 |mean|/deviation times as much.
    """
    data = case.data
    count = data.x.size // data.mean.size
    deviation = np.sqrt(data.variance.astype(float) + data.epsilon)
    spread = 1.0 + 2.0 * float(np.max(np.abs(data.mean) / deviation))
    return (count + 16) * spread * 2.0**-24


def disagreements(cases, results):
    found = []
    for case in cases:
        data = case.data
        ours = backnorm.batch_norm_backward(
            *data.backward_inputs, training=case.training, **data.options
        )
        exact = reference.backward(*data.backward_inputs, training=case.training, **data.options)
        for name, mine, theirs in zip(ours._fields, ours, results[case.name], strict=True):
            assert theirs.shape == mine.shape
            assert theirs.dtype == mine.dtype
            value, terms = getattr(exact, name), getattr(exact, f"{name}_terms")
            peer_error = np.abs((theirs.astype(float) - value.hi) - value.lo)
            own_error = np.abs((mine.astype(float) - value.hi) - value.lo)
            # One rounding to the type of the output, beside the arithmetic before it.
            ulp = np.abs(np.spacing(theirs)).astype(float)
            if not (peer_error <= float32_loss(case) * terms + ulp).all():
                found.append(f"{case.name}: the peer's {name} disagrees by {peer_error.max()}")
            slack = budget(name, mine.dtype, data.x.dtype).terms * terms
            if not (own_error <= peer_error + slack).all():
                worst = ulp_error(mine, value, mine.dtype).max()
                found.append(f"{case.name}: our {name} is farther off ({worst} ulp) than the peer")
    return found


def test_backward_agrees_with_tensorflow_and_is_at_least_as_accurate(tmp_path):
    require(peers.is_installed("tensorflow"), "TensorFlow")
    cases = made(dtypes=(FLOAT32, FLOAT16))
    # is_training=False is refused for NCHW on the CPU.
    cases += made(formats=("NXC",), modes=(False,))
    assert disagreements(cases, peers.run("tensorflow_driver.py", cases, tmp_path)) == []


def test_backward_agrees_with_pytorch_and_is_at_least_as_accurate(tmp_path):
    require(peers.is_installed("torch"), "PyTorch")
    cases = made(dtypes=(FLOAT32, FLOAT16), modes=(True, False))
    assert disagreements(cases, peers.run("torch_driver.py", cases, tmp_path)) == []


def test_backward_agrees_with_onednn_graph_and_is_at_least_as_accurate(tmp_path):
    library = peers.onednn_library()
    require(library is not None, "oneDNN (onednn-cpu-gomp)")
    cases = made()
    results = peers.run("onednn_graph_driver.py", cases, tmp_path, str(library))
    assert disagreements(cases, results) == []
