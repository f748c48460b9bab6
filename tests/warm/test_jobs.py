"""What there is to compile follows from what the operators and the plan do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import backnorm
from backnorm.dtypes import ELEMENT_TYPES, FLOAT32
from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.plan import plan
from backnorm.problem import Problem
from backnorm.warm import jobs as jobs_module
from backnorm.warm.jobs import OPERATIONS, Job, job_of, jobs

_EVERY = jobs(ELEMENT_TYPES, OPERATIONS)


def test_all_types_operations_and_geometries_have_a_job():
    assert len(set(_EVERY)) == len(_EVERY) == len(OPERATIONS) * len(ELEMENT_TYPES) * 2


@given(
    st.builds(Extents, st.integers(0, 5000), st.integers(0, 3000), st.integers(0, 70000)),
    st.builds(
        Machine,
        st.integers(1, 128),
        st.sampled_from([1 << 18, 1 << 21]),
        st.sampled_from([1 << 22, 1 << 29]),
        st.just("made up"),
    ),
    st.booleans(),
)
def test_no_plan_is_without_a_job(extents, machine, training):
    problem = Problem("backward", tuple(extents), 1, FLOAT32, FLOAT32, training=training)
    assert job_of(plan(problem, extents, machine)) in _EVERY


def test_operators_can_be_made_to_plan_for_another_machine():
    x = np.ones((2, 3, 64), np.float32)
    arguments = (x, x, x[0, :, 0], x[0, :, 0])
    for epsilon, machine in jobs_module._MACHINES.items():
        with jobs_module._planned_for(machine):
            fused = backnorm.explain(*arguments, epsilon=epsilon).fused
        assert fused == (machine.name == "large")


def test_a_job_is_all_the_calls_that_are_planned_alike(monkeypatch):
    seen = []

    def call(given):
        decided = backnorm.explain(
            given.x, given.dy, given.zeros, given.ones, given.ones, epsilon=given.epsilon
        )
        seen.append((job_of(decided), decided.fused, str(decided.problem.statistics_dtype)))

    monkeypatch.setitem(OPERATIONS, "backward", jobs_module._Kind(call))
    for job in jobs(ELEMENT_TYPES, ["backward"]):
        seen.clear()
        job.run()
        planned, fused, statistics = map(set, zip(*seen, strict=True))
        assert planned == {job}
        assert fused == ({False, True} if job.geometry == "segments" else {False})
        narrow = np.dtype(job.dtype if job.dtype != "bfloat16" else np.float16).itemsize == 2
        assert statistics == ({job.dtype, "float32"} if narrow else {job.dtype})


def test_a_job_is_described_in_a_few_words():
    assert str(Job("backward", "float32", "segments")) == "backward float32 segments"
