"""How numbers and machines read."""

from __future__ import annotations

import pytest

from benchmarks.report.numbers import counted, machine_line


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 threads"), (1, "1 thread"), (2, "2 threads"), (21, "21 threads")]
)
def test_one_thing_is_singular(number, text):
    assert counted(number, "thread") == text


def test_a_machine_is_its_processor_its_threads_and_the_day():
    assert machine_line("A 9", 2, "2026-11-21T10:11:12+00:00") == "A 9 · 2 threads · 2026-11-21"


def test_what_is_not_known_of_a_machine_leaves_no_gap():
    assert machine_line("", 1, "") == "1 thread"
