"""Each bad file of `backnorm run`, subject of `backnorm verify`, and option of both is refused in
the documented words.

`command.json` has, for `verify`, rows of its words and the message. For `run`, it has JSON
documents by name, and, for each document, rows of changes and the message. A change has the values
to set in it by their paths ("a.0" is the first entry of the list "a"; "(deleted)" deletes), and
further "options". What names no document is the text of a file. Three dots at the end of a message
stand for words of Python or NumPy, or for a list of names.
"""

from __future__ import annotations

import copy
import functools
import json
import operator
from pathlib import Path

import pytest

from backnorm.cli.app import app as command

TABLE = json.loads(Path(__file__).with_name("command.json").read_text(encoding="utf-8"))


@pytest.fixture
def app():
    return command


def edited(document, change):
    """Return a copy of a document with other values at some paths."""
    document = copy.deepcopy(document)
    for path, value in change.items():
        *way, last = (int(key) if key.isdecimal() else key for key in path.split("."))
        place = functools.reduce(operator.getitem, way, document)
        if value == "(deleted)":
            del place[last]
        elif isinstance(place, list):
            place[last : last + 1] = [value]
        else:
            place[last] = value
    return document


@pytest.mark.parametrize("file", TABLE["refusals"], ids=lambda file: file[:40])
def test_run_of_bad_file_or_option_prints_documented_messages(refused, tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    for change, message in TABLE["refusals"][file]:
        edits = {path: value for path, value in change.items() if path != "options"}
        known = file in TABLE["files"]
        text = json.dumps(edited(TABLE["files"][file], edits)) if known else file
        Path("file.json").write_text(text, encoding="utf-8")
        options = "--random", 0, "--repeat", 1, *change.get("options", ())
        assert says(refused("run", "file.json", *options), message), change


def says(line, message):
    """Whether an error is a message of the table."""
    said, expected = line.removeprefix("backnorm: error: "), message.removesuffix("...")
    return said == message or (expected != message and said.startswith(expected))


@pytest.mark.parametrize(("options", "message"), TABLE["verify"])
def test_verify_of_bad_subject_or_option_prints_documented_message(refused, options, message):
    line = refused("verify", *options.split())
    assert says(line, message), line


def test_run_with_deeply_nested_attribute_prints_one_line(refused, tmp_path):
    file = tmp_path / "file.json"
    file.write_text(json.dumps(TABLE["files"]["backward"]))
    line = refused("run", file, "--random", 0, "--op-attrs", "10:epsilon:" + "[" * 100_000)
    assert "--op-attrs 10:epsilon: cannot be read" in line
