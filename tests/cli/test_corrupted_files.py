"""Whatever the bytes of its files, the command ends with a table or with one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.cli.safetensors_file import write_safetensors

RNG = np.random.default_rng(5)
X = RNG.normal(size=(3, 2, 2)).astype(np.float32)
TENSORS = {
    "x": X,
    "dy": RNG.normal(size=X.shape).astype(np.float32),
    "mean": X.mean((0, 2)),
    "variance": X.var((0, 2)),
}
CALL = {
    "dialect": "onednn_spec",
    "op": "BatchNormTrainingBackprop",
    "attributes": {"epsilon": 1e-5, "data_format": "NCX"},
    "inputs": {
        "input_forward": "x",
        "output_delta": "dy",
        "mean": "mean",
        "variance": "variance",
    },
}
fuzz = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def damage(draw, size):
    """Return what to do to a file of `size` bytes: overwrite some, then cut or append."""
    edits = draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 255)), min_size=0, max_size=4)
    )
    end = draw(st.one_of(st.just(size), st.integers(0, size)))
    return edits, end, draw(st.binary(max_size=8))


def damaged(data, how):
    edits, end, tail = how
    data = bytearray(data)
    for place, value in edits:
        data[place] = value
    return bytes(data[:end]) + tail


def run(tmp_path, program, tensors, suffix):
    (tmp_path / "call.json").write_bytes(program)
    path = tmp_path / f"in{suffix}"
    path.write_bytes(tensors)
    out = tmp_path / "out.npz"
    out.unlink(missing_ok=True)
    arguments = ["run", tmp_path / "call.json", "--tensors", path, "--out", out, "--repeat", "1"]
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2)
    assert (result.exit_code == 0) == out.exists()
    if result.exit_code == 2:
        assert result.stderr.count("\n") == 1
        assert result.stderr.strip().isprintable()
    assert not list(tmp_path.glob(".*"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The undamaged tensor files, by suffix."""
    folder = tmp_path_factory.mktemp("whole")
    np.savez(folder / "stored.npz", **TENSORS)
    np.savez_compressed(folder / "deflated.npz", **TENSORS)
    with (folder / "x.safetensors").open("wb") as stream:
        write_safetensors(stream, TENSORS)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["stored.npz", "deflated.npz", "x.safetensors"])
def test_damaged_tensor_files(tmp_path, files, name):
    whole = files[name]
    program = json.dumps(CALL).encode()

    @fuzz
    @given(damage(len(whole)))
    def attempt(how):
        run(tmp_path, program, damaged(whole, how), name[name.rindex(".") :])

    attempt()


def test_damaged_programs(tmp_path, files):
    program = json.dumps(CALL).encode()

    @fuzz
    @given(damage(len(program)))
    def attempt(how):
        run(tmp_path, damaged(program, how), files["stored.npz"], ".npz")

    attempt()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


def test_calls_with_anything_anywhere(tmp_path, files):
    @fuzz
    @given(st.sampled_from([*CALL, "outputs", "shapes", "types"]), JSON)
    def attempt(key, value):
        program = json.dumps(CALL | {key: value}).encode()
        run(tmp_path, program, files["stored.npz"], ".npz")

    attempt()


def test_attributes_with_anything_in_them(tmp_path, files):
    @fuzz
    @given(st.sampled_from(["epsilon", "data_format", "revision", "is_training"]), JSON)
    def attempt(key, value):
        program = json.dumps(CALL | {"attributes": CALL["attributes"] | {key: value}}).encode()
        run(tmp_path, program, files["stored.npz"], ".npz")

    attempt()
