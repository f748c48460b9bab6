"""The command on files with damaged bytes, or with any JSON anywhere: a table, or one line."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backnorm.tensor_files import write_tensors

fuzz = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@st.composite
def damaged(draw, data):
    """Overwrite some bytes, then cut or append."""
    place = st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255))
    edited = bytearray(data)
    for index, value in draw(st.lists(place, max_size=4)):
        edited[index] = value
    end = draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    return bytes(edited[:end]) + draw(st.binary(max_size=8))


@pytest.fixture
def check_run(cli, tmp_path):
    """Run the command with --out; assert that it writes a result, or says in one line why not."""

    def check(file, tensors):
        out = tmp_path / "out.npz"
        out.unlink(missing_ok=True)
        result = cli("run", file, "--tensors", tensors, "--out", out, "--repeat", 1)
        assert result.exit_code in (0, 2)
        assert (result.exit_code == 0) == out.exists()
        if result.exit_code == 2:
            assert result.stderr.count("\n") == 1
            assert result.stderr.strip().isprintable()
        assert not list(tmp_path.glob(".*"))

    return check


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_run_of_damaged_tensor_file_writes_result_or_one_line_error(
    check_run, write_json, call, tmp_path, tensors, suffix
):
    file, path = write_json(call()), tmp_path / f"in{suffix}"
    write_tensors(path, tensors)
    whole = path.read_bytes()

    @fuzz
    @given(damaged(whole))
    def attempt(data):
        path.write_bytes(data)
        check_run(file, path)

    attempt()


def test_run_of_damaged_call_writes_result_or_one_line_error(check_run, call, tmp_path, npz):
    file = tmp_path / "damaged.json"

    @fuzz
    @given(damaged(json.dumps(call()).encode()))
    def attempt(data):
        file.write_bytes(data)
        check_run(file, npz)

    attempt()


def test_run_with_arbitrary_value_of_key_writes_result_or_one_line_error(
    check_run, write_json, call, npz
):
    @fuzz
    @given(st.sampled_from([*call(), "outputs", "shapes", "types"]), JSON)
    def attempt(key, value):
        check_run(write_json(call(**{key: value})), npz)

    attempt()


def test_run_with_arbitrary_attribute_writes_result_or_one_line_error(
    check_run, write_json, call, npz
):
    @fuzz
    @given(st.sampled_from(["epsilon", "data_format", "axis"]), JSON)
    def attempt(key, value):
        attributes = call()["attributes"] | {key: value}
        check_run(write_json(call(attributes=attributes)), npz)

    attempt()
