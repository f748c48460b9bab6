"""The code of the page of documentation runs, and does what its text says."""

from __future__ import annotations

import subprocess
import sys

import equinox
import jax
import numpy as np
import pytest

import backnorm.jax

from ...support.pages import blocks as blocks_of
from ...support.pages import pages_of, run
from .conftest import agree, textbook

pytestmark = pytest.mark.long

PAGE, SEVERAL = "docs/jax.md", "docs/how-to/several-machines.md"


@pytest.fixture(autouse=True)
def without_64_bits():
    """Have JAX as the reader has it."""
    with jax.enable_x64(False):
        yield


BLOCKS = [block.code for block in blocks_of(PAGE)]


def blocks(word):
    return [block for block in BLOCKS if word in block]


def test_jax_pages_have_expected_number_of_blocks():
    assert pages_of("jax") == [SEVERAL, PAGE]
    flax, of_equinox, others = blocks("flax"), blocks("equinox"), plain()
    assert [len(each) for each in (flax, of_equinox, others)] == [2, 1, 10]
    assert len(BLOCKS) == 13


def test_several_machines_page_runs_on_several_devices():
    assert jax.device_count() > 1
    run(SEVERAL)


def plain():
    return [block for block in BLOCKS if "flax" not in block and "equinox" not in block]


def test_function_blocks_compute_documented_results(tmp_path):
    *here, elsewhere = plain()
    assert "deserialize" in elsewhere
    names = {}
    exec("\n".join(here), names)  # the reader runs them one after the other, too
    y, mean, _ = names["normalize"](names["x"], *names["parameters"])
    assert y.shape == names["x"].shape
    agree(mean, names["x"].mean((0, 1, 2)), 1e-6)
    target, channels = names["x"][::-1], names["parameters"]
    found = names["gradients"](names["x"], *channels, target)
    expected = names["gradients"](names["x"][::-1], *channels, target[::-1])
    for mine, other in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(mine, other)
    state = names["state"]
    agree(state.mean, 0.01 * names["x"].mean((0, 1, 2)), 1e-6)

    (tmp_path / "serialized").write_bytes(names["serialized"])
    operands = {"x": names["x"]}
    for name in ("parameters", "averages"):
        operands |= {f"{name}{k}": each for k, each in enumerate(names[name])}
    np.savez(tmp_path / "given.npz", **operands)
    program = f"""
import numpy
given = numpy.load({str(tmp_path / "given.npz")!r})
x = given["x"]
parameters, averages = ([given[name + k] for k in "01"] for name in ("parameters", "averages"))
serialized = bytearray(open({str(tmp_path / "serialized")!r}, "rb").read())
{elsewhere}
numpy.savez({str(tmp_path / "found.npz")!r}, *parameters, *averages, value)
"""
    expected = names["step"](names["parameters"], names["averages"], names["x"], names["x"][::-1])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "found.npz") as found:
        agree([found[name] for name in found], jax.tree.leaves(expected), 1e-6)
    without = program.replace("import backnorm.jax\n", "")
    done = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, timeout=300
    )
    assert "No FFI handler registered for backnorm_kernel" in done.stderr


def test_flax_blocks_import_layer_of_backnorm():
    for block, module in zip(blocks("flax"), ("linen", "nnx"), strict=True):
        names = {}
        exec(block, names)
        assert names["BatchNorm"].__module__ == f"backnorm.jax.{module}"


def test_equinox_block_matches_textbook_and_equinox_layer():
    (block,) = blocks("equinox")
    names = {}
    exec(block, names)
    model, mapped, batch = (names[name] for name in ("model", "mapped", "batch"))
    expected, mean, variance = textbook(batch, model.gamma, model.beta, epsilon=1e-5, axis=1)
    agree(names["y"], expected, 1e-5)
    moved = names["state"].get(model.statistics)
    assert isinstance(moved, backnorm.jax.RunningStatistics)
    agree(moved, (0.01 * mean, 0.99 + 0.01 * variance), 1e-6)

    frozen = equinox.nn.inference_mode(model)
    still = jax.vmap(frozen, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    y, state = still(batch, names["state"])
    agree(state.get(model.statistics), moved)
    column = (-1, 1, 1)
    expected = (batch - moved.mean.reshape(column)) / np.sqrt(moved.variance + 1e-5).reshape(column)
    agree(y, expected, 1e-5)

    # The gradients are those of equinox's own layer, which normalises by the batch, too.
    peer, peer_state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(3, "batch", mode="batch")
    weights = np.random.default_rng(0).standard_normal(batch.shape)

    def loss(model, state, batch):
        y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            batch, state
        )
        return (np.float32(1.0) * y * weights).sum() + (y**3).sum(), state

    first = names["equinox"].nn.make_with_state(names["BatchNorm"])(3, "batch")[1]
    found = [
        jax.jit(jax.grad(lambda batch, m=m, s=s: loss(m, s, batch)[0]))(batch)
        for m, s in ((model, first), (peer, peer_state))
    ]
    agree(*found, 1e-4)
    assert mapped(batch, names["state"])[0].shape == batch.shape
