"""Every plan that is legal, forced, on every kind of shape.

A plan decides how the arrays are cut, which the bits may depend on, and how the work is shared
out, which they may not. So for each shape here are several cuts, judged by the oracle, and for
each cut many schedules, which must give its bits.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import backnorm
from backnorm.activations import RELU
from backnorm.arithmetics import own_arithmetic
from backnorm.conformance import judge
from backnorm.conformance.data import realistic_data
from backnorm.executable import forget
from backnorm_kernels import engine
from backnorm_kernels.geometry import Columns, Segments
from backnorm_kernels.plan import is_legal
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32
from tests.support.relu_battery import random_mask

SHAPES = {
    "long-segments": ("NCX", (2, 3, 5000)),
    "segments-of-49": ("NCX", (9, 20, 49)),
    "segments-of-16": ("NCX", (5, 7, 16)),
    "ragged-segments": ("NCX", (37, 6, 23)),
    "tiny-segments": ("NCX", (6, 5, 4)),
    "wide-rows": ("NXC", (19, 2048)),
    "narrow-rows": ("NXC", (1001, 3)),
    "ragged-rows": ("NXC", (131, 17)),
    "many-rows": ("NXC", (300, 2, 32)),
    # A tile of registers, vectors, and a part of one.
    "mixed-rows": ("NXC", (131, 109)),
    "one-channel": ("NCX", (7, 1, 33)),
    "one-sample": ("NCX", (1, 6, 300)),
    "no-sample": ("NCX", (0, 4, 5)),
    "no-space": ("NCX", (3, 4, 0)),
}
OPERATIONS = (
    "backward",
    "frozen",
    "phases",
    "forward",
    "inference",
    "forward in place",
    "inference in place",
    "relu forward",
    "relu inference",
    "relu backward",
)


# Schedules beside those that differ in one respect alone.
_MIXED = 8


def new(x, offset):
    """Return an array like x, full of NaN, `offset` elements after an aligned address."""
    memory = np.full(64 + offset + x.size, np.nan, x.dtype)
    start = -memory.ctypes.data % 64 // memory.itemsize + offset
    return memory[start : start + x.size].reshape(x.shape)


def results(operation, data, offset):
    """Return what the operators make of the data, under whatever is planned; see `new`."""
    out = new(data.x, offset)
    inputs, options = data.backward_inputs, data.options
    if operation == "backward":
        return backnorm.batch_norm_backward(*inputs, out=out, **options)
    if operation == "frozen":
        return backnorm.batch_norm_backward(*inputs, training=False, out=out, **options)
    if operation == "phases":
        sums = backnorm.reduce(*inputs[:3], data_format=data.data_format)
        dx = backnorm.apply(*inputs, sums, out=out, **options)
        return dx, *backnorm.batch_norm_backward(*inputs, **options)[1:]
    x = data.x
    if operation.endswith("in place"):
        out[...] = x
        x = out
    if operation.startswith("forward"):
        return backnorm.batch_norm_forward(x, data.gamma, data.beta, out=out, **options)
    # The gradient is as good a residual as any.
    if operation == "relu forward":
        return backnorm.batch_norm_forward(
            data.x, data.gamma, data.beta, residual=data.dy, **options, activation="relu"
        )
    if operation == "relu backward":
        return backnorm.batch_norm_backward(*inputs, mask=some_mask(data), residual=True, **options)
    per_channel = (data.mean, data.variance, data.gamma, data.beta)
    if operation == "relu inference":
        return (
            backnorm.batch_norm_inference(
                data.x, *per_channel, residual=data.dy, **options, activation="relu"
            ),
        )
    return (backnorm.batch_norm_inference(x, *per_channel, out=out, **options),)


def verdicts(operation, data, arrays, arithmetic):
    options = {**data.options, "arithmetic": arithmetic}
    if operation.startswith("forward"):
        return judge.check_forward(data.x, data.gamma, data.beta, arrays, **options)
    if operation == "relu forward":
        return judge.check_forward(
            data.x, data.gamma, data.beta, arrays, residual=data.dy, activation=RELU, **options
        )
    if operation == "relu backward":
        mask = some_mask(data)
        return judge.check_backward(
            *data.backward_inputs, arrays, mask=mask, residual=True, **options
        )
    per_channel = (data.mean, data.variance, data.gamma, data.beta)
    if operation == "relu inference":
        return judge.check_inference(
            data.x, *per_channel, *arrays, residual=data.dy, activation=RELU, **options
        )
    if operation.startswith("inference"):
        return judge.check_inference(data.x, *per_channel, *arrays, **options)
    training = operation != "frozen"
    return judge.check_backward(*data.backward_inputs, arrays, training=training, **options)


def some_mask(data):
    """Return a mask that is the same in every call."""
    return random_mask(data.x, np.random.default_rng(5))


def bits(arrays):
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


def up(value, multiple):
    return -(-value // multiple) * multiple


def segments(extents):
    """Yield legal cuts into segments: chunks of rows, of pieces; blocks small and large."""
    outer, channels, inner = extents
    # A vector across a border belongs to two channels, not three.
    if inner < 16 and channels != 1:
        return
    whole = max(16, up(inner, 16))
    cuts = [(1, length) for length in (16, 64, 2048) if length < whole]
    if whole <= 2048:
        # Each of sixteen running sums takes at most 130 elements.
        cuts += [(rows, whole) for rows in (1, 3, max(1, 2048 // whole))]
    for (rows, length), whole_block in itertools.product(cuts, (False, True)):
        chunks = -(-outer // rows) * max(1, -(-inner // length))
        block = max(1, chunks) if whole_block else 1
        blocks = max(1, -(-chunks // block))
        yield Segments(rows, length, chunks, block, blocks, group=1, batch=1, share=1 << 16)


def columns(extents):
    """Yield legal cuts into columns: rows joined more or less, blocks small and large."""
    outer, channels, inner = extents
    row = channels * inner
    least = -(-16 // row) if row else 1
    for repeats, block in itertools.product((least, least + 2), (64, 1024)):
        rows, left = divmod(outer, repeats)
        blocks = max(1, -(-rows // block) + (left > 0))
        width, tile = row * repeats, max(16, up(row * repeats, 16))
        if tile <= 1 << 14:
            yield Columns(
                rows,
                width,
                left * row,
                repeats,
                block,
                blocks,
                tile,
                depth=1,
                share=max(1, rows),
                abreast=1,
            )


def choices(plan, operation):
    """Return, by the name of a field, the values that the bits may not depend on.

    "offset", where the output lies, is no field of a plan, but matters to streaming stores.
    """
    found = {"offset": [0, 1, 13], "streaming": [False, True], "threads": [1, 2, 3]}
    extents, geometry = plan.extents, plan.geometry
    if isinstance(geometry, Segments):
        if operation not in ("phases", "inference", "relu inference"):
            found["grouped"] = [False, True]
        found["group"] = [1, 2, max(1, extents.channels)]
        found["batch"] = [1, 2, 5]
        found["share"] = [48, 1000, 1 << 16]
    else:
        found["tile"] = [16, 48, max(16, up(geometry.width, 16))]
        found["depth"] = [1, 2, 4, 8]
        found["share"] = [1, 5, max(1, geometry.rows)]
        found["abreast"] = [1, 4]
    return found


def schedules(found, rng):
    """Yield choices: each value once beside the first of everything else, and mixtures."""
    plain = {name: values[0] for name, values in found.items()}
    yield plain
    for name, values in found.items():
        yield from (plain | {name: value} for value in values[1:])
    for _ in range(_MIXED):
        yield {name: values[rng.integers(len(values))] for name, values in found.items()}


def changed(plan, geometry=None, **values):
    """Return the plan with another cut and schedule."""
    geometry = geometry or plan.geometry
    of_plan = {
        name: values.pop(name) for name in ("grouped", "streaming", "threads") & values.keys()
    }
    # Segments alone can be grouped, and grouping is for calls in one pass.
    grouped = of_plan.pop("grouped", isinstance(geometry, Segments) and plan.grouped)
    geometry = dataclasses.replace(geometry, **values)
    return dataclasses.replace(plan, geometry=geometry, grouped=grouped, **of_plan)


class Forced:
    """Makes the engine follow a changed plan."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self._plan = engine.plan

    def results(self, operation, data, change, offset=0):
        seen = []

        def plan(*arguments):
            decided = change(self._plan(*arguments))
            if not is_legal(decided):
                # Another cut may have to give up grouping.
                decided = dataclasses.replace(decided, grouped=False)
            assert is_legal(decided)
            # What is exchanged cannot be grouped.
            grouped = decided.grouped and not decided.problem.signature.is_phase
            seen.append(dataclasses.replace(decided, grouped=grouped))
            return seen[-1]

        with self._monkeypatch.context() as context:
            context.setattr(engine, "plan", plan)
            forget()
            arrays = results(operation, data, offset)
        forget()
        assert seen
        return arrays, seen[0]


@pytest.fixture
def forced(monkeypatch):
    return Forced(monkeypatch)


@pytest.fixture
def arithmetic(request):
    """The arithmetic of all calls of a test."""
    with backnorm.arithmetic(request.param):
        yield request.param


# Element types and arithmetics that kernels are made for, and one that a number asks for.
COMPUTED = pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [
        pytest.param(dtype, name, marks=[] if dtype in (FLOAT32, BFLOAT16) else pytest.mark.long)
        for dtype, name in (
            *((dtype, own_arithmetic(dtype)) for dtype in ELEMENT_TYPES),
            (FLOAT32, "float32"),
            (FLOAT16, "float64"),
        )
    ],
    indirect=["arithmetic"],
    ids=str,
)


@pytest.mark.covering(2)
@pytest.mark.parametrize("operation", OPERATIONS)
@COMPUTED
@pytest.mark.parametrize("name", SHAPES)
def test_forced_cuts_pass_judge_and_their_schedules_have_the_same_bits(
    name, dtype, arithmetic, operation, forced, rng
):
    data_format, shape = SHAPES[name]
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=4.0)
    _, default = forced.results(operation, data, lambda plan: plan)
    cuts = [None, *segments(default.extents), *columns(default.extents)]
    for cut in cuts:
        expected, first = forced.results(operation, data, lambda plan, cut=cut: changed(plan, cut))
        for quantity, verdict in verdicts(operation, data, expected, arithmetic).items():
            assert verdict.passed, (quantity, first.geometry, verdict.detail)
        every = list(schedules(choices(first, operation), rng))
        # All of them for the plan's own cut, for the others some.
        for values in every if cut is None else every[-_MIXED:]:
            offset = values.pop("offset")
            if not is_legal(changed(first, cut, **values)):
                continue
            got, plan = forced.results(
                operation,
                data,
                lambda plan, cut=cut, values=values: changed(plan, cut, **values),
                offset,
            )
            assert bits(got) == bits(expected), (plan, offset)


# Powers of two for x and dy (None: dy is zero) of one channel after another: what float32 has the
# range for, what it has not, and what comes near the limits of bfloat16 and float32.
RANGES = [
    (0, 0), (0, -125), (40, 90), (-45, -60), (0, None), (58, 0), (0, 126), (-58, 60), (0, -133),
]  # fmt: skip
REACHING = ["long-segments", "segments-of-49", "ragged-rows", "tiny-segments"]


def wide_ranging(data, dtype):
    """Scale every channel of the data by its powers of two, and let single elements stand out."""
    axis = 1 if data.data_format == "NCX" else data.x.ndim - 1
    for c in range(data.mean.size):
        power, gradient = RANGES[c % len(RANGES)]
        if dtype == FLOAT16:
            power, gradient = power // 8, gradient and gradient // 8
        at = (slice(None),) * axis + (c,)
        data.x[at] = np.ldexp(data.x[at].astype(float), power).astype(dtype)
        data.mean[c], data.variance[c] = data.mean[c] * 2.0**power, data.variance[c] * 4.0**power
        scaled = data.dy[at].astype(float) * (0 if gradient is None else 2.0**gradient)
        limit = 65504 if dtype == FLOAT16 else 3e38
        data.dy[at] = np.clip(scaled, -limit, limit).astype(dtype)
        if c % 4 == 3 and data.x[at].size:
            data.x[at][(0,) * data.x[at].ndim] = dtype.type(6e4 if dtype == FLOAT16 else 1e30)
    return data


@pytest.mark.covering(2)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [(FLOAT16, "float32"), (BFLOAT16, "float32"), (FLOAT32, "float32")],
    indirect=["arithmetic"],
    ids=str,
)
@pytest.mark.parametrize("name", REACHING)
def test_forced_schedules_beyond_float32_range_have_the_bits_of_default(
    name, dtype, arithmetic, operation, forced, rng
):
    data_format, shape = SHAPES[name]
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=4.0)
    wide_ranging(data, dtype)
    expected, first = forced.results(operation, data, lambda plan: plan)
    for quantity, verdict in verdicts(operation, data, expected, arithmetic).items():
        assert verdict.passed, (quantity, verdict.detail)
    for values in list(schedules(choices(first, operation), rng)):
        offset = values.pop("offset")
        if not is_legal(changed(first, **values)):
            continue
        got, plan = forced.results(
            operation, data, lambda plan, values=values: changed(plan, **values), offset
        )
        assert bits(got) == bits(expected), (plan, offset)
