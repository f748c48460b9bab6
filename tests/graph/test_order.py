"""The order in which operators run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backnorm.graph import Step
from backnorm.graph.order import topological_order


def operator(id_, inputs, outputs):
    ports = ({str(i): str(key) for i, key in enumerate(keys)} for keys in (inputs, outputs))
    return Step("onednn_graph", "any", str(id_), {}, *ports, id_)


def ids(operators):
    return [operator.id for operator in operators]


def test_topological_order_puts_producers_first():
    operators = [operator(0, [11], [12]), operator(1, [10], [11]), operator(2, [], [10])]
    assert ids(topological_order(operators)) == [2, 1, 0]


def test_topological_order_keeps_order_of_independent_operators():
    operators = [operator(i, [100], [i]) for i in (3, 1, 2)]
    assert ids(topological_order(operators)) == [3, 1, 2]


def test_topological_order_accepts_operator_that_reads_tensor_twice():
    operators = [operator(0, [5, 5], [6]), operator(1, [], [5])]
    assert ids(topological_order(operators)) == [1, 0]


def test_topological_order_of_5000_operators_does_not_exceed_recursion_limit():
    operators = [operator(i, [i + 1], [i]) for i in range(5000)]
    assert ids(topological_order(operators)) == list(range(4999, -1, -1))


@given(st.data())
def test_topological_order_of_random_graph_puts_producers_first(data):
    size = data.draw(st.integers(1, 8))
    # Operator i produces tensor i and reads tensors of lower number, in a shuffled file.
    reads = [data.draw(st.lists(st.integers(0, i - 1))) if i else [] for i in range(size)]
    shuffled = data.draw(st.permutations(range(size)))
    order = ids(topological_order([operator(i, reads[i], [i]) for i in shuffled]))
    assert sorted(order) == list(range(size))
    for i in range(size):
        assert all(order.index(source) < order.index(i) for source in reads[i])
