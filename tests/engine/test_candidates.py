"""The plans worth trying: the one that is chosen first, all legal, and all of the same bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from backnorm.arrays import NUMPY
from backnorm.conformance.data import realistic_data
from backnorm.cpu.candidates import candidates, is_legal
from backnorm.cpu.geometry import Segments
from backnorm.cpu.launch import Launch
from backnorm.cpu.plan import plan
from backnorm.dtypes import FLOAT16, FLOAT32
from backnorm.executable import Executable
from backnorm.layout import extents_of
from backnorm.machine import Machine
from backnorm.problem import problem_of
from backnorm.signature import SIGNATURES

SHAPES = {
    "segments": ("NCX", (3, 20, 30, 30)),
    "segments of 49": ("NCX", (40, 20, 49)),
    "short planes": ("NCX", (300, 37, 4)),
    "rows": ("NXC", (50, 20, 64)),
    "ragged rows": ("NXC", (2100, 17)),
    "few rows": ("NXC", (70, 512)),
    "one channel": ("NCX", (7, 1, 33)),
    "nothing": ("NCX", (0, 4, 5)),
}
OPERATIONS = ("backward", "forward", "relu forward", "inference")
_MACHINE = Machine(2, 1 << 21, 1 << 25, "made up")


@pytest.fixture(params=SHAPES)
def data(request, rng):
    data_format, shape = SHAPES[request.param]
    dtype = rng.choice([FLOAT32, FLOAT16])
    return realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=4.0)


def planned(data, operation):
    """Return the operands of an operation, its problem and the extents of its arrays."""
    name = operation.removeprefix("relu ")
    operands = [getattr(data, operand.name, None) for operand in SIGNATURES[name].operands]
    problem = problem_of(name, *operands, **data.options, relu=name != operation)
    return operands, problem, extents_of(problem.shape, problem.channel_axes, axes(data))


def axes(data):
    return tuple(range(data.x.ndim))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_chosen_plan_is_the_first_and_others_differ_in_schedule_alone(data, operation):
    _, problem, extents = planned(data, operation)
    chosen, *others = candidates(problem, extents, _MACHINE)
    assert chosen == plan(problem, extents, _MACHINE)
    cuts = ("rows", "length", "chunks", "block", "blocks", "width", "rest", "repeats")
    seen = set()
    for other in [chosen, *others]:
        assert (other.problem, other.extents) == (problem, extents)
        assert type(other.geometry) is type(chosen.geometry)
        for name in cuts:
            assert getattr(other.geometry, name, None) == getattr(chosen.geometry, name, None)
        assert is_legal(other)
        # Inference has no sums to group, rows of channels no groups.
        grouped = isinstance(other.geometry, Segments) and problem.operation != "inference"
        assert grouped or other.grouped == chosen.grouped
        seen.add(dataclasses.replace(other, reasons=()))
    assert len(seen) == 1 + len(others)
    assert len(others) >= 2 or not problem.size


@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_of_them_give_the_same_bits(data, operation):
    operands, problem, extents = planned(data, operation)
    expected = None
    for decided in candidates(problem, extents, _MACHINE):
        launch = Launch(problem, decided)
        run = Executable(problem, axes(data), NUMPY, decided, launch).plain
        found = [np.asarray(each).tobytes() for each in run(*operands) if each is not None]
        expected = expected or found
        assert found == expected, decided
