"""A warm call, then one with an operand or attribute absent, of another kind or in another's place.

For every operand and attribute of every operator, from the schemas: the documented error or the
right result, never a crash, in one process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from backnorm.dialects.registry import DIALECTS, PARTS, operators, parts

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases(Path(__file__).with_name("absent_operands.py"))


def test_process_with_absent_operands_exits_with_0(cases):
    cases.check_survival()


def test_absent_operand_cases_cover_operands_and_options_of_operators(cases):
    found = cases.found
    for dialect in DIALECTS:
        for operator in operators(dialect).values():
            schema = operator.schema
            name = f"{dialect}-{schema.op}"
            for tensor in schema.inputs:
                among = [case for case in found if case.startswith(f"{name}: {tensor.name} ")]
                assert len(among) > 150, (name, tensor.name)
            choice = [] if schema.choice == "all" else [schema.choice]
            memory = [schema.outputs[0].name] if schema.takes_memory else []
            for option in [*(spec.name for spec in schema.attributes), *choice, *memory]:
                among = [case for case in found if case.startswith(f"{name}: {option} ")]
                assert len(among) > 80, (name, option)


@pytest.mark.parametrize("name", [f"{dialect}-{op}" for dialect in PARTS for op in parts(dialect)])
def test_absent_operand_cases_cover_functions_of_parts(cases, name):
    assert sum(case.startswith(f"{name}: ") for case in cases.found) > 400


def test_calls_with_absent_operands_give_documented_error_or_right_result(cases):
    cases.check_outcomes()
