"""JSON from untrusted sources: what is parsed, and what is rejected."""

from __future__ import annotations

import pytest

from backnorm.errors import ArgumentError, ArgumentValueError
from backnorm.graph import strict_json
from backnorm.graph.strict_json import expect_integer, expect_list, parse_json, read_json


def test_parse_json_returns_value_of_document():
    value = {"a": [1, -2.5, "é", None, True]}
    assert parse_json(b'{"a": [1, -2.5, "\xc3\xa9", null, true]}', "here") == value


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "line 1, column 1"),
        (b"{'a': 1}", "not JSON"),
        (b"[1] 2", "Extra data"),
        (b"\xff", "UTF-8"),
        (b"\xef\xbb\xbf[]", "BOM"),
        (b"[NaN]", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"[-1e400]", "too large"),
        (b"9" * 10_000, "not acceptable"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"a":' * 10**6, "nested too deeply"),
    ],
)
def test_parse_json_rejects_bad_documents(data, says):
    with pytest.raises(ArgumentValueError, match=says) as caught:
        parse_json(data, "here")
    assert caught.value.argument == "here"


def test_read_json_of_file_beyond_limit_raises_value_error(tmp_path, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_BYTES", 10)
    path = tmp_path / "a.json"
    path.write_text("[1, 2, 3]")
    assert read_json(path) == [1, 2, 3]
    path.write_text("[1, 2, 3, 4]")
    with pytest.raises(ArgumentValueError, match="too large"):
        read_json(path)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [], {}])
def test_expect_integer_rejects_other_types(value):
    with pytest.raises(ArgumentError, match="an integer"):
        expect_integer(value, "here", high=9)


def test_expect_list_beyond_limit_raises_value_error():
    assert expect_list([1, 2], "here", most=2) == [1, 2]
    with pytest.raises(ArgumentValueError, match="at most 1"):
        expect_list([1, 2], "here", most=1)
