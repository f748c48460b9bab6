"""Sort the operators of a graph topologically."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from backnorm.errors import ArgumentValueError
from backnorm.graph.model import Operator


def topological_order(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """Return `operators` in an order in which each operator follows the producers of its inputs.

    The same file always gives the same order.

    Raises
    ------
    ArgumentValueError
        If two operators produce one logical tensor, or the graph has a cycle.
    """
    producer = _producers(operators)
    # First, all operators are added in the order of the file, without dependencies, so that the
    # result does not depend on the order in which dependencies are added later.
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(operators)), ()))
    for i, operator in enumerate(operators):
        sorter.add(i, *(producer[id_] for id_ in operator.inputs if id_ in producer))
    try:
        return tuple(operators[i] for i in sorter.static_order())
    except CycleError as error:
        raise ArgumentValueError(
            f"graph[{error.args[1][0]}]",
            "the operator depends on its own output: the graph has a cycle",
        ) from None


def _producers(operators: Sequence[Operator]) -> dict[int, int]:
    producer: dict[int, int] = {}
    for i, operator in enumerate(operators):
        for j, id_ in enumerate(operator.outputs):
            if id_ in producer:
                raise ArgumentValueError(
                    f"graph[{i}].outputs[{j}]",
                    f"logical tensor {id_} is already produced by graph[{producer[id_]}]",
                )
            producer[id_] = i
    return producer
