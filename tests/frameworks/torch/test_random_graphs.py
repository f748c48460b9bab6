"""Random graphs in which our layers stand between other operations, beside PyTorch's layers.

A failure names the seed, and prints the program: `random_graphs` says how to run it alone.
"""

from __future__ import annotations

import collections

import pytest

from . import random_graphs as graphs
from . import random_operations as operations

#: Programs of `make test`, of `make test-all` and of the sweep, and those of one test of each.
FEWEST = 90
FEW, A_FEW = 300, 15
MANY, A_LOT = 20_000, 200

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_alike(seeds):
    """Judge the programs of some seeds; most must be judged, and none may differ."""
    kinds, different = collections.Counter(), []
    for seed in seeds:
        program = graphs.draw(seed)
        kind, text = graphs.judge(program)
        kinds[kind] += 1
        if kind == "different":
            different.append(f"{program}\n    {text}")
    assert not different, "\n".join(different)
    assert kinds["alike"] >= 0.6 * len(seeds), kinds


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[] if first < FEWEST else pytest.mark.long)
        for first in range(0, FEW, A_FEW)
    ],
)
def test_random_graphs_match_layers_of_pytorch(first):
    assert_alike(range(first, first + A_FEW))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "first", range(graphs.FIRST_OF_INDUCTOR, graphs.FIRST_OF_INDUCTOR + MANY, A_LOT)
)
def test_many_random_graphs_match_layers_of_pytorch(first):
    assert_alike(range(first, first + A_LOT))


def has_relu(layer):
    """Whether a layer has a ReLU, maybe with a ceiling, and keeps a mask in training."""
    return layer.activation in ("relu", "ceiling") or bool({"relu", "relu6"} & {*layer.children})


def behind_layers(program):
    """Return the pairs of a layer and the name of an operation that has its result."""
    values = [None, *(step.calls[-1] for step in program.steps)]
    return [
        (layer, step.calls[0])
        for step in program.steps
        for layer in map(values.__getitem__, step.inputs)
        if isinstance(layer, graphs.Layer) and isinstance(step.calls[0], str)
    ]


#: Situations that have been wrong, each for a reason of its own.
SITUATIONS = {
    "batched gradients, differentiated again": lambda p: p.plan == "batched second",
    "a mask whose x comes back in another layout": lambda p: (
        p.packing in ("numpy", "layout")
        and p.layout != "contiguous"
        and any(has_relu(layer) and layer.mode == "training" for layer in p.layers)
    ),
    "recomputed statistics of other values": lambda p: any(
        step.scope == "forgetful checkpoint" for step in p.steps
    ),
    "no gradient for a layer": lambda p: any(
        name in ("Stops", "StopsFirst") for _, name in behind_layers(p)
    ),
    "a ceiling with given statistics, changed in place": lambda p: any(
        layer.mode != "training" and layer.activation == "ceiling" and name in operations.IN_PLACE
        for layer, name in behind_layers(p)
    ),
    "a compiled graph": lambda p: p.backend,
    "a transformed function": lambda p: p.plan in graphs.PURE_PLANS,
}


def test_draw_of_2000_seeds_contains_each_operation_and_situation():
    found = collections.Counter()
    for seed in range(2000):
        program = graphs.draw(seed)
        calls = [call for step in program.steps for call in step.calls]
        found.update(call for call in calls if isinstance(call, str))
        for layer in program.layers:
            found.update((layer.form, layer.mode, layer.hook, f"activation {layer.activation}"))
        found.update(step.scope for step in program.steps)
        found.update(watch for step in program.steps for watch in step.watches)
        found.update((program.plan, program.packing, program.layout, program.dtype))
        found.update(name for name, holds in SITUATIONS.items() if holds(program))
    tables = operations.UNARY, operations.BINARY, operations.CUSTOM, operations.IN_PLACE
    wanted = {name for table in (*tables, operations.RANDOM) for name in table}
    wanted |= {*graphs.PLANS, *graphs.PURE_PLANS, *SITUATIONS}
    assert {name: found[name] for name in wanted if found[name] < 5} == {}
    assert min(found.values()) >= 5
