"""The examples, with few steps: both layers learn the same."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import backnorm.torch

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def digits(example):
    torch.set_num_threads(1)
    return example("train_digits_torch")


@pytest.fixture(scope="module")
def batch(digits):
    images, labels = digits.digits()[0]
    return images[:64], labels[:64]


def networks(digits, dtype=torch.float32):
    own = digits.network(0).to(dtype)
    return own, backnorm.torch.convert(copy.deepcopy(own), fuse=True)


@pytest.fixture(scope="module")
def exact(digits, batch):
    own = digits.network(0).double()
    return digits.first_step(own, batch[0].double(), batch[1])


def test_epoch_of_digits_improves(digits, rows, assert_one_epoch):
    digits.main(epochs=1)
    assert_one_epoch(rows())


def test_digits_step_in_float64_matches_within_rounding(digits, batch, exact, assert_as_exact):
    _, net = networks(digits, torch.float64)
    loss, gradients = digits.first_step(net, batch[0].double(), batch[1])
    assert loss == pytest.approx(exact[0], rel=1e-14)
    assert_as_exact(digits.farthest(gradients, exact[1]), 0, "float64")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_digits_gradients_in_16_bits_are_as_near_exact_as_pytorch(
    dtype, digits, batch, exact, assert_as_exact
):
    errors = []
    for net in networks(digits):
        with torch.autocast("cpu", dtype):
            _, gradients = digits.first_step(net, *batch)
        errors.append(digits.farthest(gradients, exact[1]))
    # Not all of it can be rounding away.
    assert min(errors) > 1e-4
    assert_as_exact(errors[1], errors[0], "float32")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_step_of_resnet_agrees_with_pytorch(memory_format, example):
    resnet = example("resnet_step")
    losses, seconds, apart, reports = resnet.compare(*resnet.images_of(4, 64), memory_format, 1)
    # All but the layers of the four shortcuts, which no activation follows.
    left = [report.name for report in reports if not report.fused]
    assert (len(reports), len(left)) == (53, 4)
    assert all("downsample" in name for name in left)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    # At random weights a network of this depth is ill-conditioned: some percent.
    assert apart < 0.3
    assert all(0 < each < 60 for each in seconds)


def test_distributed_example_has_gradients_of_one_process(tmp_path):
    pytest.importorskip("sklearn")
    program = Path(__file__).parents[3] / "examples" / "train_digits_distributed.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(program), "--epochs", "1"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split("│")[1:4] for line in done.stdout.splitlines() if "│" in line]
    found = {name.strip(): values for name, *values in lines}
    apart, together = map(float, found["error of its gradients"])
    assert together < 1e-5 < 1e-2 < apart


def test_padded_batches_have_losses_of_packed_batches_in_every_step(example, one_thread):
    padded = example("train_padded_sequences")
    torch.manual_seed(0)
    own = padded.Network().double()
    forms = padded.Network.packed, padded.Network.padded, padded.Network.padding_counted
    expected, found, counted = (padded.train(copy.deepcopy(own), form, 8, 0)[0] for form in forms)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    assert (counted / expected - 1).abs().max() > 1e-3
