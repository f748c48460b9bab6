"""Put the operators of a graph in an order in which they can run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from backnorm.errors import ArgumentValueError
from backnorm.graph.model import Operator

__all__ = ["topological_order"]


def topological_order(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """Return `operators` so that each follows the producers of its inputs.

    The order is that of the file wherever it can be (Kahn's algorithm with a queue).

    Raises
    ------
    ArgumentValueError
        If two operators produce one logical tensor, or the graph has a cycle.
    """
    producer = _producers(operators)
    waiting = []
    consumers: dict[int, list[int]] = {i: [] for i in range(len(operators))}
    for i, operator in enumerate(operators):
        sources = {producer[id_] for id_ in operator.inputs if id_ in producer}
        waiting.append(len(sources))
        for source in sources:
            consumers[source].append(i)
    ready = deque(i for i, count in enumerate(waiting) if count == 0)
    order = []
    while ready:
        i = ready.popleft()
        order.append(i)
        for consumer in consumers[i]:
            waiting[consumer] -= 1
            if waiting[consumer] == 0:
                ready.append(consumer)
    if len(order) < len(operators):
        stuck = next(i for i, count in enumerate(waiting) if count)
        raise ArgumentValueError(
            f"graph[{stuck}]", "the operator waits for its own output: the graph has a cycle"
        )
    return tuple(operators[i] for i in order)


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
