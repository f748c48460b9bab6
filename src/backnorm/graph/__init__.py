"""Graphs of operators: the oneDNN Graph JSON format, and programs that can be run.

``load_graph(path)`` reads a file, ``override_graph(graph, ...)`` changes shapes, types and
attributes, ``build_program(graph)`` makes a program with named ports and tensors, and
``run_program(program, tensors)`` runs it.
"""

from __future__ import annotations

from pathlib import Path

from backnorm.graph.build import build_program
from backnorm.graph.model import Graph, LogicalTensor, Operator
from backnorm.graph.override import override_graph
from backnorm.graph.parse import parse_graph
from backnorm.graph.program import Program, Step, Tensor
from backnorm.graph.run import run_program
from backnorm.graph.strict_json import read_json

__all__ = [
    "Graph",
    "LogicalTensor",
    "Operator",
    "Program",
    "Step",
    "Tensor",
    "build_program",
    "load_graph",
    "override_graph",
    "parse_graph",
    "run_program",
]


def load_graph(path: str | Path, *, only_known: bool = False) -> Graph:
    """Read and validate the oneDNN Graph JSON file at `path`: see `parse_graph`."""
    return parse_graph(read_json(Path(path)), str(path), only_known=only_known)
