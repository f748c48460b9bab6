"""Sort the steps of a graph topologically."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from backnorm.errors import ArgumentValueError
from backnorm.graph.program import Step


def topological_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return `steps` in an order in which each step follows the producers of its inputs.

    The same file always gives the same order.

    Raises
    ------
    ArgumentValueError
        If two steps produce one tensor, or the graph has a cycle.
    """
    producer: dict[str, int] = {}
    for i, step in enumerate(steps):
        for j, key in enumerate(step.outputs.values()):
            if producer.setdefault(key, i) != i or [*step.outputs.values()].index(key) != j:
                raise ArgumentValueError(
                    f"graph[{i}].outputs[{j}]",
                    f"logical tensor {key} is already produced by graph[{producer[key]}]",
                )
    # First, all steps are added in the order of the file, without dependencies, so that the result
    # does not depend on the order in which dependencies are added later.
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(steps)), ()))
    for i, step in enumerate(steps):
        sorter.add(i, *(producer[key] for key in step.inputs.values() if key in producer))
    try:
        return tuple(steps[i] for i in sorter.static_order())
    except CycleError as error:
        raise ArgumentValueError(
            f"graph[{error.args[1][0]}]",
            "the operator depends on its own output: the graph has a cycle",
        ) from None
