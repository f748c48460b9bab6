"""Results survive a file, and files that are not results are refused with a reason."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest

from backnorm.errors import ArgumentError, ArgumentValueError
from benchmarks.model import CONDITIONS
from benchmarks.report import read_result, write_result


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.json"


@pytest.fixture
def document(result, path):
    """The JSON of a small result, to be damaged."""
    write_result(dataclasses.replace(result, rows=result.rows[:2]), path)
    return json.loads(path.read_text())


def test_a_result_survives_a_file(result, path):
    write_result(result, path)
    assert read_result(path) == result
    assert read_result(str(path)) == result


def test_a_result_without_rows_survives_a_file(result, path):
    empty = dataclasses.replace(result, rows=(), settings={})
    write_result(empty, path)
    assert read_result(path) == empty


def test_there_is_a_line_for_every_cell(result, path):
    write_result(result, path)
    lines = path.read_text().splitlines()
    assert sum('"outcomes"' in line for line in lines) == len(result.rows)


def test_unknown_fields_are_ignored(document, path):
    expected = read_result(path)
    document["later"] = document["environment"]["later"] = document["rows"][0]["later"] = 1
    path.write_text(json.dumps(document))
    assert read_result(path) == expected


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_condition_survives_a_file(result, path, condition):
    changed = dataclasses.replace(result, rows=result.rows[:1], condition=condition)
    write_result(changed, path)
    document = json.loads(path.read_text())
    assert document["condition"] == condition
    assert read_result(path) == changed


def test_files_from_before_there_were_conditions_are_quiet(document, path):
    del document["condition"]
    path.write_text(json.dumps(document))
    assert read_result(path).condition == "quiet"


def test_files_from_before_the_processors_kind_was_asked_for_do_not_know_it(document, path):
    assert document["environment"].pop("microarchitecture") == ""
    path.write_text(json.dumps(document))
    assert read_result(path).environment.microarchitecture == ""


def _outcome(document):
    return document["rows"][1]["outcomes"][0]


def _set(*keys, to):
    def damage(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return damage


TIMING = ("rows", 1, "outcomes", 0, "timing")

DAMAGES = {
    "foreign": (lambda d: d.pop("schema"), "schema: Field required"),
    "later version": (
        _set("schema", to="backnorm.bench/2"),
        "schema: Input should be 'backnorm.bench/1'; got 'backnorm.bench/2'",
    ),
    "no rows": (lambda d: d.pop("rows"), "rows: Field required"),
    "rows": (_set("rows", to={}), "rows: Input should be a valid array; got {}"),
    "cpu": (
        _set("environment", "cpu", to=1),
        "environment.cpu: Input should be a valid string; got 1",
    ),
    "threads": (
        _set("environment", "threads", to=0),
        "environment.threads: Input should be greater than or equal to 1; got 0",
    ),
    "version": (
        _set("environment", "versions", "torch", to=None),
        "environment.versions.torch: Input should be a valid string; got None",
    ),
    "condition": (
        _set("condition", to="noisy"),
        "condition: Input should be 'quiet' or 'after-convolution'; got 'noisy'",
    ),
    "no condition": (
        _set("condition", to=None),
        "condition: Input should be 'quiet' or 'after-convolution'; got None",
    ),
    "setting": (_set("settings", "rounds", to=[1]), "settings.rounds"),
    "flag": (_set("settings", "rounds", to=True), "settings.rounds"),
    "op": (
        _set("rows", 1, "op", to="sideways"),
        "rows[1].op: Input should be 'backward', 'forward' or 'inference'; got 'sideways'",
    ),
    "layout": (
        _set("rows", 1, "layout", to="NCHW"),
        "rows[1].layout: Input should be 'NCX' or 'NXC'",
    ),
    "dtype": (_set("rows", 1, "dtype", to="int8"), "rows[1].dtype"),
    "rank": (_set("rows", 1, "shape", to=[5]), "rows[1].shape: Tuple should have at least 2 items"),
    "extent": (
        _set("rows", 1, "shape", to=[5, 0]),
        "rows[1].shape[1]: Input should be greater than or equal to 1; got 0",
    ),
    "status": (_set(*TIMING[:4], "status", to="slow"), "rows[1].outcomes[0].status"),
    "form": (_set(*TIMING[:4], "form", to="in"), "rows[1].outcomes[0].form"),
    "no timing": (
        lambda d: _outcome(d).pop("timing"),
        "outcomes[0]: Value error, must have a timing where it was timed, and only there",
    ),
    "timing of nothing": (
        _set(*TIMING[:4], "status", to="crashed"),
        "outcomes[0]: Value error, must have a timing where it was timed, and only there",
    ),
    "no time": (
        _set(*TIMING, "median", to=0),
        "timing.median: Input should be greater than 0; got 0",
    ),
    "negative": (
        _set(*TIMING, "p20", to=-1.0),
        "timing.p20: Input should be greater than 0; got -1.0",
    ),
    "huge": (_set(*TIMING, "p80", to=10**400), "timing.p80: Input should be"),
    "text": (_set(*TIMING, "p80", to="1"), "timing.p80: Input should be a valid number; got '1'"),
    "order": (
        _set(*TIMING, "p80", to=1e-12),
        "timing: Value error, must have p20 <= median <= p80",
    ),
    "samples": (
        _set(*TIMING, "samples", to=0),
        "timing.samples: Input should be greater than or equal to 1; got 0",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_with_file_and_place(document, path, name):
    damage, expected = DAMAGES[name]
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ArgumentError) as caught:
        read_result(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Invalid JSON: EOF"),
        ("[]", "Input should be an object"),
        ('{"schema": "backnorm.bench/1"', "Invalid JSON: EOF"),
        ('{"schema": NaN}', "Input should be 'backnorm.bench/1'; got nan"),
    ],
)
def test_a_file_that_is_no_result_is_refused(path, text, expected):
    path.write_text(text)
    with pytest.raises(ArgumentError, match=expected) as caught:
        read_result(path)
    assert str(path) in str(caught.value)


def test_a_cut_file_is_refused_wherever_it_is_cut(document, path):
    text = path.read_bytes()
    for size in range(0, len(text) - 2, 97):
        path.write_bytes(text[:size])
        with pytest.raises(ArgumentError):
            read_result(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError) as caught:
        read_result(path)
    assert caught.value.filename == str(path)


def test_a_number_that_json_lacks_is_refused_and_nothing_is_written(result, path):
    with pytest.raises(ArgumentValueError, match="NaN or inf"):
        write_result(dataclasses.replace(result, settings={"rounds": float("nan")}), path)
    assert not path.exists()


def test_an_interrupted_write_leaves_what_was_there(result, path, monkeypatch):
    path.write_text("before")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("backnorm.files.os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_result(result, path)
    assert path.read_text() == "before"
    assert list(path.parent.iterdir()) == [path]


def _places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from _places(entry, (*path, key))


@pytest.mark.parametrize(
    "value", [None, True, -1, 0, 1.5, 1e308, 10**400, "", "\x1b[31m", "NaN", [], {}, [[]]], ids=repr
)
def test_whatever_a_value_is_exchanged_for_is_read_or_refused_in_one_line(document, path, value):
    for place in list(_places(document)):
        changed = json.loads(json.dumps(document))
        if not place:
            changed = value
        else:
            *way, last = place
            parent = changed
            for key in way:
                parent = parent[key]
            parent[last] = value
        path.write_text(json.dumps(changed))
        with contextlib.suppress(ArgumentError):
            read_result(path)
            continue
        with pytest.raises(ArgumentError) as refusal:
            read_result(path)
        assert str(refusal.value).startswith(str(path))
        assert "\n" not in str(refusal.value)
