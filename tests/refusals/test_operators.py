"""Each bad argument of each operator is refused in the documented words.

`operators.json` has, for each operator, rows of changes to good arguments, and the message. A
change of an attribute is the attribute's value. A change of an array is: null, no array; a list, an
array of this shape; a word, an array of this element type, another argument, also "reversed", or
"read-only"; a number, one element; a boolean, which is passed. "(deleted)" deletes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import backnorm
from backnorm import ArgumentError
from backnorm.dialects.registry import DIALECTS
from tests.support.calls import PARTS_OF_GRADIENTS, SUBJECTS

TABLE = json.loads(Path(__file__).with_name("operators.json").read_text(encoding="utf-8"))
ALL = SUBJECTS | PARTS_OF_GRADIENTS


def changed(subject, change):
    """Return good arguments with a row's changes."""
    good = subject.good()
    # Arrays that are not among good arguments, and those of which they have shape and type.
    x, words = good[subject.schema.words["x"]], subject.schema.words
    others = {subject.memory: x} if subject.memory else {}
    for tensor in subject.schema.inputs:
        others[tensor.name] = x if tensor.kind == "data" else good.get(words.get("gamma"), x)
    if subject.schema.dialect == "backnorm":
        others |= own_arrays(subject, x)
    for name, value in change.items():
        if value == "(deleted)":
            del good[name]
        elif value is None or isinstance(value, bool):
            good[name] = value
        elif isinstance(good.get(name), np.ndarray):
            good[name] = array_of(value, good[name], good)
        elif name in others:
            good[name] = array_of(value, others[name].copy(), good)
        else:
            good[name] = value
    return good


def own_arrays(subject, x):
    """Return the arrays that a call with a ReLU takes, too."""
    if subject.schema.operation == "backward":
        return {"mask": backnorm.batch_norm_forward(x, epsilon=0.1, activation="relu").mask}
    return {"residual": x}


def array_of(value, array, others):
    """Return an array as a row describes it."""
    if isinstance(value, list):
        return np.resize(array, value)
    if not isinstance(value, str):
        array.flat[1] = value
        return array
    if value == "read-only":
        array.flags.writeable = False
        return array
    if value in others:
        return others[value]
    of = value.removesuffix(" reversed")
    return others[of][::-1] if of in others else array.astype(value)


def messages(subject, change):
    """Return the messages of both ways to call an operator, each once; one way may not apply."""
    arguments = changed(subject, change)
    is_python = "(deleted)" in change.values() or any("no_such" in name for name in change)
    ways = [] if is_python else [subject.call]
    if subject.schema.dialect in DIALECTS and not arguments.keys() & {
        "output_mask",
        "input_g",
        "count",
    }:
        ways.append(subject.invoke)
    said = []
    for way in ways:
        try:
            said.append(f"a result: {way(**arguments)}")
        except ArgumentError as error:
            said.append(str(error))
    return list(dict.fromkeys(said))


@pytest.mark.parametrize("name", TABLE)
def test_bad_arguments_of_operator_are_refused_with_documented_messages(name):
    said = [[change, *messages(ALL[name], change)] for change, _ in TABLE[name]]
    assert said == TABLE[name]


def test_refusals_name_each_argument_of_each_operator():
    for name, subject in ALL.items():
        schema = subject.schema
        checked = [tensor.name for tensor in schema.inputs if tensor.kind != "opaque"]
        checked += [spec.name for spec in schema.attributes]
        named = {message.partition(":")[0] for _, message in TABLE[name]}
        assert named >= {*checked}, (name, {*checked} - named)
