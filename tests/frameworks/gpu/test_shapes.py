"""Every geometry and schedule: awkward shapes, beside the CPU's results."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial

import numpy as np
import pytest
import torch

from backnorm.activations import RELU
from backnorm.conformance.battery import Case, examine
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_forward
from backnorm.executable import compute
from backnorm.gpu.kernels.parameters import Sizes, encoded
from backnorm.gpu.kernels.tuning import CONFIGURATIONS
from backnorm.gpu.plan import plan_gpu
from backnorm.layout import extents_of
from backnorm.options import Options
from backnorm.torch import cpu, gpu
from backnorm.torch.memory import unpack_mask
from tests.support import internals
from tests.support.dtypes import BFLOAT16, FLOAT32
from tests.support.relu_battery import examine_relu, relu_case

from .. import interpreter
from ..interpreter import DEVICE
from . import arrays

# What a plan can be made of: segments and columns, one tile and many, rows joined, a last row that
# is not full, more columns than a tile, runs that are not aligned, one channel, one sample.
SHAPES = [
    (8, 16, 8, 8),
    (3, 5, 7, 3),
    (2, 3, 11, 13),
    (70, 3, 5),
    (33, 2, 7, 7),
    (40, 6, 9),
    (300, 7),
    (37, 130),
    (5, 1, 33),
    (1, 4, 230),
    (2, 2, 1101),
    (1, 9),
]
SCHEDULES = ["complete", "two passes"]
LAYOUTS = ["NCX", "NXC"]


def laid_out(x, layout):
    return x if layout == "NCX" else x.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.fixture
def scheduled(monkeypatch):
    """Return a function that forces a schedule, and skips the test if the shape forbids it."""

    def plan(problem, extents, schedule):
        made = plan_gpu(problem, extents)
        if made.schedule != schedule:
            pytest.skip("the elements of a channel are in several units")
        return made

    def force(schedule):
        if schedule == "two passes":
            internals.complete_up_to(monkeypatch, -1)
        monkeypatch.setattr(gpu, "plan_gpu", partial(plan, schedule=schedule))
        internals.forget_plans()

    yield force
    internals.forget_plans()


def unequal(ours, theirs):
    """Return the number of float32 that are not the same, and by how many ulp at the most."""
    a, b = (
        np.asarray(value.contiguous()).view(np.int32).astype(np.int64) for value in (ours, theirs)
    )
    return int((a != b).sum()), int(np.abs(a - b).max(initial=0))


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "relu", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "relu"]
)
def test_forced_schedule_matches_cpu_within_one_ulp(shape, schedule, layout, relu, scheduled):
    scheduled(schedule)
    x, dy, residual = (laid_out(torch.randn(shape), layout) for _ in range(3))
    if not relu:
        residual = None
    weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
    operands = x, residual, weight, bias, None, None
    options = Options(1e-5, activation=RELU if relu else None)
    *ours, mask = compute("forward", there(operands), options, arrays=gpu.TENSORS)
    *theirs, bits = compute("forward", operands, options, arrays=cpu.TENSORS)
    compare(ours, theirs)
    if relu:
        positive = unpack_mask(bits, x)
        assert torch.equal(unpack_mask(mask.cpu(), x), positive)
        assert torch.equal(unpack_mask(mask, *there([x])).cpu(), positive)
    operands = x, dy, bits, *theirs[1:], weight
    options = Options(1e-5, residual=relu)
    *ours, dresidual = compute("backward", there(operands), options, arrays=gpu.TENSORS)
    *theirs, expected = compute("backward", operands, options, arrays=cpu.TENSORS)
    compare(ours, theirs)
    if relu:
        assert torch.equal(dresidual.cpu(), expected)


def there(tensors):
    """Return tensors where the GPU's kernels take them."""
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def compare(ours, theirs):
    """The arithmetic differs by 2**-45: what is as near to a tie may be rounded another way."""
    for one, other in zip(ours, theirs, strict=True):
        count, distance = unequal(one.cpu(), other)
        assert distance <= 1
        assert count <= max(1, one.numel() // 1000)


def in_float32(shape, dtype, layout):
    """Return data of a shape, and what asks for it and judges it."""
    if layout == "NXC":
        shape = (shape[0], *shape[2:], shape[1])
    rng = np.random.default_rng(5)
    data = realistic_data(shape, dtype, data_format=layout, rng=rng, ratio=10.0)
    return data, {"arithmetic": "float32"}


# The CPU's float32 adds up in another order: here the judge decides, by the same budget.
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype", [FLOAT32, pytest.param(BFLOAT16, marks=pytest.mark.long)], ids=str
)
def test_float32_arithmetic_keeps_its_budget(dtype, shape, schedule, layout, scheduled):
    scheduled(schedule)
    data, settings = in_float32(shape, dtype, layout)
    verdicts = examine(partial(arrays.backward, **settings), Case("", data, **settings))
    operands, settings = (data.x, data.gamma, data.beta), {**data.options, **settings}
    verdicts |= check_forward(*operands, arrays.forward(*operands, **settings), **settings)
    assert [str(verdict) for verdict in verdicts.values() if not verdict.passed] == []


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_arithmetic_keeps_its_budget_with_relu(shape, schedule, layout, scheduled):
    scheduled(schedule)
    data, settings = in_float32(shape, FLOAT32, layout)
    case = dataclasses.replace(relu_case("", data, np.random.default_rng(6)), **settings)
    verdicts = examine_relu(arrays.WithRelu(**settings), case)
    assert [str(verdict) for verdict in verdicts.values() if not verdict.passed] == []


# In segments, and in columns.
TUNED = {"NCX": (8, 5, 8, 16), "NXC": (40, 6, 9)}


def training_step(shape, layout, dtype, arithmetic):
    """Return the bytes of all results of a training step, and of an inference pass."""
    torch.manual_seed(2)
    x, dy, residual = (laid_out(torch.randn(shape), layout).to(dtype) for _ in range(3))
    weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
    running = torch.zeros(shape[1]), torch.ones(shape[1])
    operands = there([x, residual, weight, bias, *running])
    options = Options(1e-5, activation=RELU, arithmetic=arithmetic)
    y, mean, variance, mask = compute(
        "forward", operands, options, arrays=gpu.TENSORS, momentum=0.3
    )
    x, out = there([x, dy])
    # dx overwrites a copy of dy.
    out = out.clone(memory_format=torch.preserve_format)
    saved = x, out, mask, mean, variance, operands[2]
    options = Options(1e-5, residual=True, arithmetic=arithmetic)
    gradients = compute("backward", saved, options, out, arrays=gpu.TENSORS)
    return [
        each.cpu().contiguous().view(torch.uint8)
        for each in (y, mean, variance, unpack_mask(mask, y), *operands[4:], *gradients)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [
        (torch.float32, "float64"),
        pytest.param(torch.float32, "float32", marks=pytest.mark.long),
        pytest.param(torch.bfloat16, "float32", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_training_step_in_every_configuration_has_the_same_bits(
    layout, dtype, arithmetic, scheduled
):
    scheduled("two passes")
    results = []
    for configuration in CONFIGURATIONS:
        with interpreter.in_configuration(configuration):
            results.append(training_step(TUNED[layout], layout, dtype, arithmetic))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="times are made up")
def test_step_that_tunes_gives_the_bits_of_the_step_after_it(scheduled, monkeypatch):
    scheduled("two passes")
    runs = []

    def run_twice(call, quantiles):
        # The autotuner chooses the configuration of the shortest time, here the second.
        call()
        call()
        runs.append(call)
        return [(3.0, 1.0, 2.0)[len(runs) % 3 - 1]] * len(quantiles)

    for kernel in interpreter.tuned_kernels():
        monkeypatch.setattr(kernel, "configs", CONFIGURATIONS)
        monkeypatch.setattr(kernel, "cache", {})
        monkeypatch.setattr(kernel, "_do_bench", run_twice)
        kernel.__dict__.pop("do_bench", None)
    first = training_step(TUNED["NCX"], "NCX", torch.float32, "float64")
    measured = len(runs)
    assert measured == len(CONFIGURATIONS) * len(interpreter.tuned_kernels())
    for kernel in interpreter.tuned_kernels():
        assert kernel.best_config == CONFIGURATIONS[1]
        # Triton keeps choices on disk, as JSON.
        json.dumps(list(kernel.cache))
    second = training_step(TUNED["NCX"], "NCX", torch.float32, "float64")
    assert len(runs) == measured
    assert all(map(torch.equal, first, second))
    internals.forget_plans()
    # Other sizes with the same FORM are not measured again.
    training_step((8, 7, 8, 16), "NCX", torch.float32, "float64")
    assert len(runs) == measured


def test_sizes_are_passed_so_that_triton_specialises_no_kernel():
    sizes = encoded(Sizes(1, 2, 3, 8, 15, 16, 2**31, 1, 7))
    assert all(size > 1 and size % 2 for size in sizes)


def test_shapes_cover_all_properties_of_tilings(scheduled):
    scheduled("two passes")
    from backnorm.problem import problem_of
    from backnorm.torch.memory import metadata, order_of

    seen = set()
    for shape, layout, relu in itertools.product(SHAPES, LAYOUTS, [False, True]):
        x = laid_out(torch.empty(shape), layout)
        channel = metadata(torch.empty(shape[1]))
        problem = problem_of(
            "backward", metadata(x), metadata(x), None, channel, channel, channel, epsilon=1e-5
        )
        problem = dataclasses.replace(problem, activation=RELU if relu else None, residual=relu)
        extents = extents_of(shape, (1,), order_of(x))
        tiling = plan_gpu(problem, extents).tiling
        seen |= {
            ("columns", tiling.columns),
            ("repeats", tiling.repeats > 1),
            ("partial", tiling.partial),
            ("units", tiling.units > 1),
            ("blocks", tiling.blocks > 1),
            ("pieces", tiling.pieces > 1),
            ("unaligned", tiling.align < 4),
        }
    names = ["columns", "repeats", "partial", "units", "blocks", "pieces", "unaligned"]
    assert seen == set(itertools.product(names, [False, True]))
