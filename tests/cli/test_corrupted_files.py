"""Whatever the bytes of its files, the command ends with a table or with one line.

Files are damaged in two ways: bytes anywhere, with hypothesis; and what the bytes say, from a seed:
numbers, names and structure, in a file that is otherwise whole.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import time
import warnings
import zipfile
from pathlib import Path

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
# Seconds that a run on a few numbers may take on a busy machine.
LONGEST = 20
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


def run(tmp_path, program, tensors, suffix, *options):
    (tmp_path / "call.json").write_bytes(program)
    path = tmp_path / f"in{suffix}"
    path.write_bytes(tensors)
    out = tmp_path / "out.npz"
    out.unlink(missing_ok=True)
    arguments = ["run", tmp_path / "call.json", "--tensors", path, "--out", out, "--repeat", "1"]
    check_end(tmp_path, [*arguments, *options], out)


def check_end(tmp_path, arguments, out=None):
    begun = time.monotonic()
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2)
    assert time.monotonic() - begun < LONGEST
    assert out is None or (result.exit_code == 0) == out.exists()
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


# What a number, a name or a value is replaced by.
NUMBERS = [
    "-1", "0", "1", "2", "3", "7", "2147483648", "4294967296", "281474976710656",
    "4611686018427387904", "9223372036854775807", "9223372036854775808", "18446744073709551616",
    "1" + "0" * 40, "-9223372036854775808", "1.5", "2.0", "1e400", "-0.0", "1e-400", "NaN",
]  # fmt: skip
VALUES = [
    *NUMBERS, "null", "true", "false", "[]", "{}", '""', '"x"', '"\\u0000"', '"\\ud800"', '"é"',
    "[" * 200 + "]" * 200, '{"a":' * 100 + "1" + "}" * 100, '"' + "y" * 300 + '"', "Infinity",
    '"__metadata__"', '"float16"', '"bf16"', '"NXC"', '"../../x"', '"\\u001b[31m"',
]  # fmt: skip
JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[\[\]{},:]')
HEADER_TOKENS = [
    *NUMBERS, "()", "(2,)", "(0, 281474976710656)", "(281474976710656, 0, 281474976710656)", "True",
    "'<f4'", "'>f8'", "'|V2'", "'|O'", "'O'", "'<U9'", "'f4,f4'", "[('a', '<f4')]", "None", "{}",
    "'shape'", "b'x'", "...", "-" * 500 + "1", "(" * 500 + ")" * 500, "1j", "'<f4\\x00'",
    "'a'", "'m8'",
]  # fmt: skip


def mutated_text(text, pattern, values, chance):
    """Replace, drop, double or exchange a few of the tokens of a text."""
    tokens = list(re.finditer(pattern, text))
    pieces, end = [], 0
    for token in tokens:
        pieces += [text[end : token.start()], token[0]]
        end = token.end()
    pieces.append(text[end:])
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        place = 2 * chance.randrange(len(tokens)) + 1
        other = 2 * chance.randrange(len(tokens)) + 1
        match chance.randrange(6):
            case 0:
                pieces[place] = ""
            case 1:
                pieces[place] *= 2
            case 2:
                pieces[place], pieces[other] = pieces[other], pieces[place]
            case _:
                pieces[place] = chance.choice(values)
    return "".join(pieces)


def mutated_json(data, chance):
    return mutated_text(data.decode(), JSON_TOKEN, VALUES, chance).encode()


def mutated_npz(whole, chance):
    """Change a member's header, members, or numbers of the archive's own records."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    kind = chance.randrange(3)
    place = chance.randrange(len(members))
    name, data = members[place]
    if kind == 0:
        length = int.from_bytes(data[8:10], "little")
        pattern = r"'[^']*'|-?\d+|\([^)]*\)|True|False|[{}:,]"
        text = mutated_text(data[10 : 10 + length].decode(), pattern, HEADER_TOKENS, chance)
        text = text.encode("latin-1", "replace")
        members[place] = name, data[:8] + struct.pack("<H", len(text)) + text + data[10 + length :]
    elif kind == 1:
        members[place] = chance.choice((
            (chance.choice(("x", "x.npy ", "../x.npy", "é.npy", "x" * 70_000, "/", "")), data),
            (name, data[: chance.randrange(len(data))]),
            (name, data + bytes(chance.choice((1, 8, 2**20)))),
            (name, b""),
            members[chance.randrange(len(members))],
        ))  # fmt: skip
    packed = io.BytesIO()
    compression = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for name, data in members:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Duplicate name")
                archive.writestr(zipfile.ZipInfo(name[:60_000]), data, compression)
    result = bytearray(packed.getvalue())
    if kind == 2:
        mark = chance.choice((b"PK\1\2", b"PK\3\4", b"PK\5\6"))
        places = [found.start() for found in re.finditer(re.escape(mark), result)]
        at = chance.choice(places) + chance.randrange(4, {b"PK\5\6": 22}.get(mark, 46))
        size = chance.choice((1, 2, 4, 8))
        value = chance.choice((0, 1, 2, 8, 99, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
        result[at : at + size] = (value % 256**size).to_bytes(size, "little")
    return bytes(result)


def mutated_safetensors(whole, chance):
    """Change the header, or its length."""
    length = int.from_bytes(whole[:8], "little")
    text = mutated_json(whole[8 : 8 + length], chance)
    told = chance.choice([len(text)] * 9 + [0, 1, len(text) - 1, 2**31, 2**63, 2**64 - 1])
    return struct.pack("<Q", told) + text + whole[8 + length :]


GRAPH = Path(__file__).parents[2] / "docs" / "examples" / "graph_training_step.json"


def mutation(tmp_path, files, seed):
    """Run the command on files of which the seed says what is wrong with them."""
    chance = random.Random(seed)
    program = json.dumps(CALL).encode()
    options = chance.choice(((), ("--check",), ("--json",), ("--max-unpacked", 1)))
    match chance.choice(("call", "graph", "npz", "npz", "safetensors")):
        case "call":
            declared = CALL | {
                "shapes": {"input_forward": [3, 2, 2]},
                "types": {"input_forward": "float32"},
                "outputs": {"input_delta": "dx"},
            }
            program = mutated_json(json.dumps(declared).encode(), chance)
            options = chance.choice((options, ("--random", 1)))
            run(tmp_path, program, files["stored.npz"], ".npz", *options)
        case "graph":
            program = mutated_json(GRAPH.read_bytes(), chance)
            run(tmp_path, program, files["stored.npz"], ".npz", "--random", 1, *options)
        case "npz":
            whole = files[chance.choice(("stored.npz", "deflated.npz"))]
            run(tmp_path, program, mutated_npz(whole, chance), ".npz", *options)
        case "safetensors":
            data = mutated_safetensors(files["x.safetensors"], chance)
            run(tmp_path, program, data, ".safetensors", *options)


@pytest.mark.long
@pytest.mark.parametrize("block", range(4))
def test_mutated_files(tmp_path, files, block):
    for seed in range(100 * block, 100 * block + 100):
        mutation(tmp_path, files, seed)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(1, 21))
def test_many_mutated_files(tmp_path, files, block):
    for seed in range(5000 * block, 5000 * block + 5000):
        mutation(tmp_path, files, seed)
