"""The contract of functions on tensors: they refuse what NumPy's functions do, in the same words.

A group of tests names its functions in a subclass of `RefusalContract`, which pytest collects. The
words are those of `tests/refusals/operators.json`, up to what is expected instead.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backnorm import ArgumentError
from tests.support.calls import SUBJECTS

__all__ = ["RefusalContract"]

TABLE = json.loads((Path(__file__).parents[1] / "refusals/operators.json").read_text("utf-8"))

#: What NumPy's functions do not have, or the table does not: an option, a value, and the message.
OF_OPTIONS = [
    *(("axis", each, f"is not an axis of x, which has rank 4; got {each}") for each in (4, -5)),
    *(
        ("axis", each, f"must be an integer, the position of the channels; got {each!r} of type")
        for each in (1.0, True, "NHWC", None)
    ),
    *(("epsilon", each, f"must be a real number; got {each!r} of type") for each in (True, 1j)),
    *(("epsilon", each, "must be finite and not negative; got ") for each in (-1.0, 10**400)),
    ("arithmetic", np.float32, "must be a string; got <class 'numpy.float32'> of type type"),
    *(
        ("reproducible", each, f"must be a boolean; got {each!r} of type")
        for each in (1, "yes", None)
    ),
]


#: Where a message ends in words, or in axes, that are a framework's own.
ENDS = ("is required", "of x; got shape (2, ", "of x; got shape (1, 3, ", "; expected")
#: What a framework refuses by rules of its own: ranks, activations, and what values show.
OWN = ("must have rank", "ReLU", "must be a supported activation", "in every channel")


def rows_of(operation: str, names: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield changes to a good call, by name, and how the message begins."""
    good = SUBJECTS[f"backnorm.batch_norm_{operation}"].good()
    for change, message in TABLE[f"backnorm.batch_norm_{operation}"]:
        if change.keys() <= names.keys() and not any(each in message for each in OWN):
            # The end says what is expected; a graph of TensorFlow has axes in its own order.
            end = next(each for each in ENDS if each in message)
            yield change, message.partition(end)[0]
    for name, value, message in OF_OPTIONS:
        if name in names:
            yield {name: value}, f"{name}: {message}"
    for name in good.keys() & names.keys() - {"epsilon"}:
        if isinstance(good[name], np.ndarray):
            yield {name: np.ma.masked_array(good[name])}, f"{name}: "
            for dtype in ("bool", "complex64"):
                yield {name: dtype}, f"{name}: "


class RefusalContract:
    """The tests; a subclass names the functions."""

    #: By operation.
    functions: Mapping[str, Callable]
    #: Makes a tensor of an array.
    tensor: Callable[[np.ndarray], Any]
    #: Ways to call a function with keywords.
    ways: Mapping[str, Callable[[Callable], Callable]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each function its wrong arguments."""
        rows = [
            pytest.param(
                operation, change, message, id=f"{operation}-{list(change)}-{message[:60]}"
            )
            for operation, function in self.functions.items()
            for change, message in rows_of(operation, inspect.signature(function).parameters)
        ]
        metafunc.parametrize(("operation", "change", "message"), rows)
        metafunc.parametrize("way", self.ways)

    def test_function_with_wrong_arguments_raises_error_of_numpy_function(
        self, operation: str, change: dict[str, Any], message: str, way: str
    ) -> None:
        call = self.ways[way](self.functions[operation])
        good = SUBJECTS[f"backnorm.batch_norm_{operation}"].good()
        # The good arguments have their channels on axis 1.
        arguments = {"axis": 1} | good
        for name, value in change.items():
            array = good["x"] if name == "residual" else good.get(name)
            if isinstance(array, np.ndarray) and isinstance(value, list):
                value = np.resize(array, value)
            elif isinstance(array, np.ndarray) and isinstance(value, str):
                value = array.astype(value)
            arguments[name] = value
        taken = inspect.signature(self.functions[operation]).parameters
        arguments = {
            name: self.tensor(each) if type(each) is np.ndarray else each
            for name, each in arguments.items()
            if name in taken
        }
        for _ in range(2):
            with pytest.raises(ArgumentError) as raised:
                call(**arguments)
            assert str(raised.value).startswith(message)
            assert raised.value.argument == message.partition(":")[0]
