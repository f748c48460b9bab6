"""Call every operator warm, then with each operand absent, of another kind or in another's place.

Each line of output is a case with what came of it; after a crash the last line names the case. A
result is right if a first call gives it: `invoke` repeats nothing.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator

import numpy as np

from backnorm import BacknormError
from backnorm.dialects.registry import DIALECTS, operators
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES

CHANNELS = 5
SHAPES = {"NCX": (4, CHANNELS, 3, 3), "NXC": (4, 3, 3, CHANNELS)}


class Subject:
    """One operator in one revision, with good arguments."""

    def __init__(self, operator, schema):
        self.operator, self.schema = operator, schema
        values = {"epsilon": 1e-3, "training": True, "channel_axis": 1}
        self.attributes = {
            a.name: values.get(a.role, a.usual) for a in schema.attributes if a.required
        }
        if schema.revision:
            self.attributes["revision"] = schema.revision
        self.shape = SHAPES[schema.formats[0].layout]
        self.kept = tuple(n if n == CHANNELS else 1 for n in self.shape)
        rule = schema.type_rules[0]
        self.types = {"data": ELEMENT_TYPE_NAMES[rule.data]}
        self.name = "-".join(filter(None, (schema.dialect, schema.op, schema.revision)))
        configured = schema.style == "configured"
        self.callable = operator(**self.attributes) if configured else operator
        self.fixed = {} if configured else dict(self.attributes)
        if schema.choice == "output_mask":
            self.fixed["output_mask"] = [True] * len(schema.outputs)

    def good(self, seed=0):
        """Return good inputs by name."""
        rng = np.random.default_rng(seed)
        shapes = {"data": self.shape, "kept": self.kept}
        own = self.types["data"]
        channel = ELEMENT_TYPE_NAMES[self.schema.type_rules[0].channel[0]]
        return {
            t.name: rng.uniform(0.5, 2, shapes.get(t.kind, CHANNELS)).astype(
                own if t.kind == "data" else channel
            )
            for t in self.schema.inputs
        }

    def call(self, inputs):
        """Return the results of a call by keyword, in a list."""
        result = self.callable(**inputs, **self.fixed)
        return [result] if isinstance(result, np.ndarray) else list(result)

    def fresh(self, inputs):
        """Return what a call gives that finds nothing of earlier calls."""
        return list(self.operator.invoke(inputs, self.attributes).values())


def subjects() -> Iterator[Subject]:
    for dialect in DIALECTS:
        for operator in operators(dialect).values():
            for schema in operator.schemas.values():
                yield Subject(operator, schema)


def kinds(array, others):
    """Yield what may stand in the place of an operand, each with its name."""
    yield "absent", None
    yield "a list", array.tolist()
    yield "a string", "mean"
    yield "a number", 1.5
    yield "an object", object()
    yield "of integers", array.astype(np.int64)
    yield "in float16", array.astype(np.float16)
    yield "byte-swapped", array.astype(array.dtype.newbyteorder())
    yield "too short", array[:-1]
    yield "empty", array[:0]
    yield "of rank 0", array.reshape(-1)[0]
    yield "of higher rank", array[None]
    yield "not contiguous", np.repeat(array, 2, axis=array.ndim - 1)[..., ::2]
    yield "of a subclass", array.view(Mine)
    yield "masked", np.ma.masked_array(array, array > 1)
    for name, other in others.items():
        yield f"which is {name}", other


class Mine(np.ndarray):
    """A subclass of NumPy's arrays."""


def outcome(subject, inputs):
    """Return what came of a call: an error of ours, the right result, or what is wrong."""
    expected = error = None
    # The memory for an output is among the inputs: each call gets its own.
    try:
        expected = subject.fresh(copied(inputs))
    except Exception as found:
        error = found
    try:
        results = subject.call(copied(inputs))
    except BacknormError as found:
        return "error" if str(found) == str(error) else f"{found!r}, but at first {error!r}"
    except Exception as found:
        return f"not ours: {found!r}"
    if error is not None:
        return f"a result, but at first {error!r}"
    same = len(results) == len(expected) and all(
        a.dtype == e.dtype and a.shape == e.shape and a.tobytes() == e.tobytes()
        for a, e in zip(results, expected, strict=True)
    )
    return "result" if same else "another result"


def copied(inputs):
    return {n: a.copy() if type(a) is np.ndarray and a.flags.c_contiguous else a
            for n, a in inputs.items()}  # fmt: skip


def cases(subject):
    good = subject.good()
    required = {t.name: good[t.name] for t in subject.schema.inputs if t.required}
    for given in [good] if required.keys() == good.keys() else [good, required]:
        for name in good:
            others = {other: good[other] for other in good if other != name}
            for label, value in kinds(good[name], others):
                changed = {n: a for n, a in given.items() if n != name}
                yield f"{name} {label}, with {len(given)} inputs", given, changed | {name: value}
    # A key that left out what is absent would take one of these for the other.
    bound = {name for group in subject.schema.inputs_together for name in group}
    optional = [name for name in good if name not in required and name not in bound]
    for one, other in itertools.permutations(optional, 2):
        yield f"{one}, then {other}", required | {one: good[one]}, required | {other: good[one]}


def main() -> None:
    warnings.simplefilter("error")
    for subject in subjects():
        for label, warm, changed in cases(subject):
            print(json.dumps({"begins": f"{subject.name}: {label}"}), flush=True)
            for _ in range(2):
                subject.call(copied(warm))
            # Twice: what the first call may have kept is there for the second.
            found = {outcome(subject, changed) for _ in range(2)}
            print(json.dumps({"case": f"{subject.name}: {label}", "found": sorted(found)}))


if __name__ == "__main__":
    main()
