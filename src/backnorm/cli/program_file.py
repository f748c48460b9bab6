"""The FILE of `backnorm run`: oneDNN Graph JSON or a call, told apart by their keys."""

from __future__ import annotations

from pathlib import Path

from backnorm.cli.allowance import Allowance
from backnorm.cli.call import parse_call
from backnorm.errors import ArgumentValueError
from backnorm.graph import build_program, parse_graph
from backnorm.graph.program import Program
from backnorm.graph.strict_json import expect_object, read_json

__all__ = ["load_program"]


def load_program(path: Path, allowance: Allowance) -> Program:
    """Return the program that the JSON file at `path` describes."""
    document = expect_object(read_json(path, allowance.text, allowance.hint), str(path))
    if "graph" in document:
        return build_program(parse_graph(document, str(path)))
    if "dialect" in document:
        return parse_call(document)
    raise ArgumentValueError(
        str(path),
        "is neither a oneDNN graph nor a call",
        accepted="an object with the key 'graph' or the key 'dialect'",
    )
