"""The stored result of docs/conformance.md has every row that the package could have."""

from __future__ import annotations

import json

import pytest

from backnorm.conformance.audit.policies import POLICIES
from backnorm.conformance.formula import WRONG
from backnorm.conformance.ladder import RUNGS
from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))


def test_stored_result_of_each_policy_has_its_text_and_complete_counts(result):
    stored = {each["label"]: each for each in result["tests"]}
    for name, policy in POLICIES.items():
        found = stored[name]
        assert found["tolerance"] == policy.text("float32"), name
        assert found["source"] == policy.source, name
        assert found["caught"] + found["missed"] + found["invisible"] == len(WRONG), name


def test_stored_battery_catches_every_wrong_kernel_and_no_right_one(result):
    battery = result["battery"]
    assert battery["caught"] == battery["of"] == len(WRONG)
    assert not any(battery["false_alarms"].values())


def test_stored_cells_of_backnorm_are_in_the_best_three_rungs(result):
    for subject in result["subjects"]:
        if subject["label"].startswith("backnorm"):
            statuses = {s for outputs in subject["cells"].values() for s in outputs.values()}
            assert statuses <= {*RUNGS[:3]}


def test_stored_findings_have_reproduce_command_with_subject_and_case(result):
    for subject in result["subjects"]:
        assert subject["passed"] <= subject["judged"]
        for finding in subject["findings"]:
            assert " --only " in finding["reproduce"]
            assert f"verify {subject['command'].split('verify ')[1]}" in finding["reproduce"]


def test_conformance_svg_is_smaller_than_150_kb():
    assert (ROOT / "docs" / "conformance.svg").stat().st_size < 150_000
