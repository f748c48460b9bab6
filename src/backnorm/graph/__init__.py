"""Graphs of operators: the oneDNN Graph JSON format, and programs that can be run.

``load_graph(path)`` reads a file as a program with named ports and tensors,
``override_graph(program, ...)`` changes shapes, types and attributes, and
``run_program(program, tensors)`` runs it.
"""

from __future__ import annotations

from pathlib import Path

from backnorm.graph.override import override_graph
from backnorm.graph.parse import parse_graph
from backnorm.graph.program import Program, Step, Tensor
from backnorm.graph.run import run_program
from backnorm.graph.strict_json import read_json

__all__ = [
    "Program",
    "Step",
    "Tensor",
    "load_graph",
    "override_graph",
    "parse_graph",
    "run_program",
]


def load_graph(path: str | Path, *, only_known: bool = False) -> Program:
    """Return the program of the oneDNN Graph JSON file at `path`: see `parse_graph`."""
    return parse_graph(read_json(Path(path)), str(path), only_known=only_known)
