"""A plan is legal only if no two items write to the same byte of a mask."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from backnorm.addresses import HEADER
from backnorm.conformance.data import realistic_data
from backnorm.layout import extents_of
from backnorm.machine import Machine
from backnorm.problem import problem_of
from backnorm.signature import SIGNATURES
from backnorm_kernels.geometry import Columns
from backnorm_kernels.launch import Launch
from backnorm_kernels.plan import is_legal, plan
from tests.support.dtypes import FLOAT16, FLOAT32

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
_MACHINE = Machine(2, 1 << 21, 1 << 25, "made up")


@pytest.fixture(params=SHAPES)
def data(request, rng):
    data_format, shape = SHAPES[request.param]
    dtype = rng.choice([FLOAT32, FLOAT16])
    return realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=4.0)


def planned(data, operation):
    """Return the problem of an operation and the extents of its arrays."""
    *follows, name = operation.split()
    operands = [getattr(data, operand.name, None) for operand in SIGNATURES[name].operands]
    activation = follows[0] if follows else None
    problem = problem_of(name, *operands, **data.options, activation=activation)
    return problem, extents_of(problem.shape, problem.channel_axes, tuple(range(data.x.ndim)))


@pytest.mark.parametrize("operation", ["relu forward", "relu apply_forward"])
def test_is_legal_requires_items_to_begin_at_whole_mask_bytes(data, operation):
    """For every share; the last item may end within a byte."""
    problem, extents = planned(data, operation)
    chosen = dataclasses.replace(plan(problem, extents, _MACHINE), grouped=False)
    columns = isinstance(chosen.geometry, Columns)
    elements, run = (chosen.geometry.rows, chosen.geometry.width) if columns else (problem.size, 1)
    for share in (*range(1, 25), elements - 1, elements, elements + 1):
        if share > 0:
            geometry = dataclasses.replace(chosen.geometry, share=share)
            begins = np.arange(0, elements, share) * run
            legal = is_legal(dataclasses.replace(chosen, geometry=geometry))
            assert legal == (begins % 8 == 0).all(), geometry


@pytest.mark.parametrize("data", ["segments", "segments of 49", "one channel"], indirect=True)
def test_is_legal_requires_groups_to_begin_at_whole_mask_bytes(data):
    problem, extents = planned(data, "relu forward")
    chosen = plan(problem, extents, _MACHINE)
    for group in range(1, extents.channels + 1):
        geometry = dataclasses.replace(chosen.geometry, group=group, batch=1)
        samples = np.arange(extents.outer)[:, None] * extents.channels
        begins = (samples + np.arange(0, extents.channels, group)) * extents.inner
        legal = is_legal(dataclasses.replace(chosen, geometry=geometry, grouped=True))
        assert legal == (begins % 8 == 0).all(), geometry


@pytest.mark.parametrize("data", ["segments"], indirect=True)
def test_launch_of_illegal_plan_raises_error(data):
    problem, extents = planned(data, "relu forward")
    chosen = dataclasses.replace(plan(problem, extents, _MACHINE), grouped=False)
    geometry = dataclasses.replace(chosen.geometry, share=chosen.geometry.share + 1)
    with pytest.raises(AssertionError):
        Launch(problem, dataclasses.replace(chosen, geometry=geometry), HEADER)
