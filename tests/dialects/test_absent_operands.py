"""A warm call, then one with an operand or attribute absent, of another kind or in another's place.

For every operand and attribute of every operator, from the schemas: the documented error or the
right result, never a crash, in one process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.calls import PARTS_OF_GRADIENTS, dialect_subjects

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases(Path(__file__).with_name("absent_operands.py"))


def test_process_with_absent_operands_exits_with_0(cases):
    cases.check_survival()


def test_absent_operand_cases_cover_operands_and_options_of_operators(cases):
    for subject in dialect_subjects():
        schema = subject.schema
        choice = [] if schema.choice == "all" else [schema.choice]
        memory = [schema.outputs[0].name] if schema.takes_memory else []
        options = [*(spec.name for spec in schema.attributes), *choice, *memory]
        least = {tensor.name: 150 for tensor in schema.inputs} | dict.fromkeys(options, 80)
        for name, number in least.items():
            among = [case for case in cases.found if case.startswith(f"{subject.name}: {name} ")]
            assert len(among) > number, (subject.name, name)


@pytest.mark.parametrize("name", PARTS_OF_GRADIENTS)
def test_absent_operand_cases_cover_functions_of_parts(cases, name):
    assert sum(case.startswith(f"{name}: ") for case in cases.found) > 400


def test_calls_with_absent_operands_give_documented_error_or_right_result(cases):
    cases.check_outcomes()
