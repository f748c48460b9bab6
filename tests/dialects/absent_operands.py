"""Call every operator warm, then with an operand or attribute absent, of another kind or swapped.

Each line of output is a case with what came of it; after a crash the last line names the case. A
result is right if a first call gives it, of plain arrays and values: `invoke` repeats nothing.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Iterator

import numpy as np

from backnorm.arithmetics import own_arithmetic
from backnorm.dialects import _aten_phases, aten
from backnorm.dialects.registry import DIALECTS, PARTS, canonical, invoke, operators, parts
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES, channel
from tests.support.attributes import attributes_in_training
from tests.support.contract import begin, report, sampled, share_of

from ..support.kinds import (
    Kind,
    attempt,
    is_integer,
    is_number,
    kinds,
    own,
    values,
    verdict,
    verdict_of_refused,
)

CHANNELS = 5
SHAPES = {"NCX": (4, CHANNELS, 3, 3), "NXC": (4, 3, 3, CHANNELS)}


class Subject:
    """One operator in one revision, with good arguments."""

    def __init__(self, operator, schema):
        self.operator, self.schema = operator, schema
        self.attributes = attributes_in_training(schema, 1e-3)
        if schema.revision:
            self.attributes["revision"] = schema.revision
        self.shape = SHAPES[schema.formats[0].layout]
        self.kept = tuple(n if n == CHANNELS else 1 for n in self.shape)
        rule = schema.type_rules[0]
        self.types = {"data": ELEMENT_TYPE_NAMES[rule.data]}
        self.name = "-".join(filter(None, (schema.dialect, schema.op, schema.revision)))
        self.is_configured = schema.style == "configured"
        self.callable = operator(**self.attributes) if self.is_configured else operator
        self.fixed = {} if self.is_configured else dict(self.attributes)
        if schema.choice == "output_mask":
            self.fixed["output_mask"] = [True] * len(schema.outputs)
        self.inputs = schema.inputs
        self.memory = schema.outputs[0].name if schema.takes_memory else None

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
            for t in self.inputs
        }

    def call(self, inputs, **changed):
        """Return the results of a call by keyword, in a list."""
        function = self.callable
        if self.is_configured:
            attributes = {n: changed.pop(n) for n in [*changed] if n in self.known}
            if attributes:
                function = self.operator(**self.attributes | attributes)
        result = function(**inputs, **self.fixed | changed)
        return list(result) if isinstance(result, tuple) else [result]

    def fresh(self, inputs, **changed):
        """Return what a call gives that finds nothing of earlier calls."""
        outputs = changed.pop("outputs", None)
        settings = {"arithmetic": changed.pop("arithmetic", None)}
        if (mask := changed.pop("output_mask", None)) is not None:
            names = [tensor.name for tensor in self.schema.outputs]
            outputs = [name for name, flag in zip(names, mask, strict=True) if flag]
            found = self.operator.invoke(inputs, self.attributes | changed, outputs, **settings)
            return [found.get(name) for name in names]
        attributes = self.attributes | changed
        return list(self.operator.invoke(inputs, attributes, outputs, **settings).values())

    @property
    def known(self):
        """The names of the attributes."""
        return [spec.name for spec in self.schema.attributes]

    def options(self):
        """Yield the name of an attribute, or of a choice of outputs, and what stands there."""
        for spec in self.schema.attributes:
            # What is None where revisions have several defaults is the revision's own.
            if not self.schema.revision:
                yield spec.name, Kind("absent", None, None, refused=not spec.nullable)
            for kind in values():
                good = accepts(spec, kind.plain)
                yield spec.name, kind._replace(refused=kind.refused or not good)
        yield from arithmetics(self.types["data"])
        choice, names = self.schema.choice, [tensor.name for tensor in self.schema.outputs]
        if choice == "outputs":
            yield choice, Kind("absent", None, None)
            for number in range(len(names) + 2):
                yield choice, Kind(f"{number} names", names[:number], names[:number])
                yield choice, Kind(f"{number} swapped", {*names[:number]}, names[:number])
            yield choice, Kind("names as an array", np.array(names), names)
            yield choice, Kind("names by name", dict.fromkeys(names), names)
            yield choice, Kind("another name", ["dx"], None, refused=True)
            yield choice, Kind("a name", names[0], None, refused=True)
            yield choice, Kind("of arrays", [np.array(names)], None, refused=True)
            for kind in values():
                good = is_integer(kind.plain) and not kind.refused
                yield choice, kind._replace(refused=not good)
        elif choice == "output_mask":
            mask = [True, False, True]
            for kind in (list, tuple, np.array, lambda mask: [np.bool_(each) for each in mask]):
                yield choice, Kind(f"by {kind}", kind(mask), mask)
            for wrong in ([], [True] * 2, [True] * 4, [1, 0, 1], [mask] * 3, np.ones((3, 2), bool)):
                yield choice, Kind(f"{wrong}", wrong, None, refused=True)
            for kind in values():
                refused = type(kind.plain) is not list or kind.plain != mask
                yield choice, kind._replace(refused=refused)


class Phase(Subject):
    """One of ATen's phases, which are functions, keep nothing, and have flags for attributes."""

    def __init__(self, function, flags, inputs):
        whole = aten.native_batch_norm_backward
        super().__init__(whole, whole.schema)
        self.callable, self.name = function, f"aten-{function.__name__}"
        self.inputs, self.fixed = inputs, dict.fromkeys(flags, True)

    def good(self, seed=0):
        return super().good(seed) | ({} if self.fixed else {"count": np.array([30, 6])})

    def fresh(self, inputs, **changed):
        return self.call(inputs, **changed)

    def options(self):
        yield from arithmetics(self.types["data"])
        for flag in self.fixed:
            for kind in values():
                yield flag, kind._replace(refused=type(kind.plain) is not bool)


class Part(Subject):
    """A function that computes a part of a gradient, and keeps nothing."""

    def __init__(self, schema):
        module = importlib.import_module(PARTS[schema.dialect])
        super().__init__(getattr(module, schema.op), schema)

    def fresh(self, inputs, **changed):
        return self.call(inputs, **changed)

    def options(self):
        # Which axes fit depends on the shapes of others.
        return (found for found in super().options() if found[0] != "reductionAxes")


def phases() -> Iterator[Subject]:
    reduced, applied = aten.batch_norm_backward_reduce, aten.batch_norm_backward_elemt
    inputs = _aten_phases.INPUTS
    yield Phase(reduced, ("input_g", "weight_g", "bias_g"), inputs)
    sums = [channel(name, name, "V") for name in ("sum_dy", "sum_dy_xmu", "count")]
    yield Phase(applied, (), (*inputs, *sums))
    for dialect in PARTS:
        if dialect != "aten":
            yield from map(Part, parts(dialect).values())


def arithmetics(dtype):
    """Yield what may stand in the place of the arithmetic, which no schema has."""
    name = own_arithmetic(dtype)
    yield "arithmetic", Kind("absent", None, None)
    yield "arithmetic", Kind("a word of NumPy", np.str_(name), name)
    for kind in values():
        yield "arithmetic", kind._replace(refused=kind.refused or kind.plain is not None)


def accepts(spec, plain):
    """Whether an attribute may have a plain value."""
    if plain is None:
        return spec.nullable
    if spec.type == "bool":
        return type(plain) is bool
    if spec.type == "string":
        return type(plain) is str and (not spec.choices or plain in spec.choices)
    if spec.type == "i64":
        return is_integer(plain) and (spec.range == "any" or plain >= 0)
    if not is_number(plain):
        return False
    with np.errstate(all="ignore"):
        number = np.float32(plain) if spec.type == "f32" else np.float64(plain)
    least = {"any": -np.inf, "not negative": 0.0, "positive": np.nextafter(0.0, 1.0)}
    return bool(np.isfinite(number)) and number >= least[spec.range]


def subjects() -> Iterator[Subject]:
    for dialect in DIALECTS:
        for operator in operators(dialect).values():
            for schema in operator.schemas.values():
                yield Subject(operator, schema)


def outcome(subject, name, kind, inputs, changed):
    """Return what came of a call: an error of ours, the right result, or what is wrong.

    `changed` are attributes with the value that came and with the plain one.
    """
    came, plain = changed
    others = {n: a for n, a in inputs.items() if n != name}
    is_input = not came
    # The memory for an output is among the inputs: each call gets its own.
    operands = copied(others) | ({name: kind.value} if is_input else {})
    found = attempt(subject.call, operands, **came)
    data = [tensor.name for tensor in subject.inputs if tensor.kind == "data"]
    # Where x has another shape or type, or another axis that of the channels, others do not fit.
    names = [*inputs] if name in (*data, "Mean") or not is_input else [name]
    if found.results is not None and issubclass(type(kind.value), np.ndarray):
        # Memory for an output stays in its byte order.
        results = [native(each) if each is kind.value else each for each in found.results]
        found = found._replace(results=results)
    if kind.refused:
        return verdict_of_refused(found, name)
    meant = copied(others) | ({name: kind.plain} if is_input else {})
    return verdict(found, attempt(subject.fresh, meant, **plain), name, *names)


def native(array):
    """Return an array in this machine's byte order, whatever its methods do."""
    plain = own(array)
    return plain.astype(plain.dtype.newbyteorder("="))


def copied(inputs):
    return {n: a.copy() if type(a) is np.ndarray and a.flags.c_contiguous else a
            for n, a in inputs.items()}  # fmt: skip


def kinds_of_input(subject, name, good):
    """Yield what may stand in the place of an input."""
    (tensor,) = [tensor for tensor in subject.inputs if tensor.name == name]
    for kind in kinds(good):
        if tensor.role.startswith("memory_") and kind.value is not None:
            # Written to: it is nothing but an array.
            kind = kind._replace(
                refused=kind.refused or not issubclass(type(kind.value), np.ndarray)
            )
        elif name == "count" and type(kind.value) is bytearray:
            # An array of bytes.
            kind = kind._replace(plain=np.frombuffer(kind.value, np.uint8), refused=False)
        elif tensor.kind == "opaque" and kind.label == "an object without attributes":
            # Nothing refuses it, and what it raises is not ours to keep.
            continue
        elif tensor.kind == "opaque":
            kind = kind._replace(plain=good if kind.value is not None else None, refused=False)
        yield kind


def cases(subject):
    """Yield a name, the kind that stands there, the other inputs, and changed attributes."""
    good = subject.good()
    required = {t.name: good[t.name] for t in subject.inputs if t.required}
    for operands in [good] if required.keys() == good.keys() else [good, required]:
        for name in good:
            for other in good:
                if other != name:
                    # Of its own, should it be written to.
                    kind = Kind(f"which is {other}", good[other].copy(), good[other].copy())
                    yield name, kind, operands, ({}, {})
            for kind in kinds_of_input(subject, name, good[name]):
                yield name, kind, operands, ({}, {})
    # A key that left out what is absent would take one of these for the other.
    bound = {name for group in subject.schema.inputs_together for name in group}
    optional = [name for name in good if name not in required and name not in bound]
    for one, other in itertools.permutations(optional, 2):
        kind = Kind(f"given, after {one}", good[other], good[other])
        yield other, kind, required | {one: good[one]}, ({}, {})
    for name, kind in subject.options():
        yield name, kind, good, ({name: kind.value}, {name: kind.plain})


def outcome_of_memory(subject, kind, inputs):
    """Return what came of a call with memory for the first output."""
    found = attempt(subject.call, inputs, **{subject.memory: kind.value})
    if found.results is None:
        return verdict_of_refused(found, subject.memory)
    expected = attempt(subject.fresh, inputs)
    if kind.refused:
        return "a result"
    if found.results[0] is not kind.value and kind.value is not None:
        return "another array"
    first, *others = found.results
    return verdict(found._replace(results=[native(first), *others]), expected)


def cases_of_registry():
    """Yield a label, a call, and the argument that it must name."""
    ngraph = operators("ngraph")["BatchNormTraining"]
    inputs, attributes = Subject(ngraph, ngraph.schema).good(), {"epsilon": 1e-3}
    good = ["ngraph", "BatchNormTraining", inputs, attributes, None]
    names = ("dialect", "op", "inputs", "attributes", "outputs")
    for function in (invoke, canonical):
        function(*good)
        for place, name in enumerate(names):
            for kind in values():
                refused = kind.refused or name != "outputs" or not is_integer(kind.plain)
                operands = [*good[:place], kind.value, *good[place + 1 :]]
                label = f"{function.__name__}: {name} {kind.label}"
                # A dictionary of no input is a mapping.
                known = {"inputs": [*inputs, "a"], "attributes": ["epsilon", "a"]}
                yield label, function, operands, refused, [*known.get(name, []), name]


def main() -> None:
    warnings.simplefilter("error")
    share = share_of()
    for label, function, operands, refused, names in sampled(
        cases_of_registry(), share, "registry"
    ):
        begin(label)
        found = attempt(function, *operands)
        ours = "result" if found.results is not None else verdict_of_refused(found, *names)
        report(label, [verdict_of_refused(found, *names) if refused else ours])
    for subject in [*subjects(), *phases()]:
        for name, kind, warm, changed in sampled(cases(subject), share, subject.name):
            case = f"{subject.name}: {name} {kind.label}, with {len(warm)} inputs"
            begin(case)
            for _ in range(2):
                subject.call(copied(warm))
            # Twice: what the first call may have kept is there for the second.
            report(case, [outcome(subject, name, kind, warm, changed) for _ in range(2)])
        if subject.memory is None:
            continue
        good = subject.good()
        for kind in sampled(kinds(subject.fresh(good)[0]), share, f"{subject.name} memory"):
            begin(f"{subject.name}: {subject.memory} {kind.label}")
            if kind.label != "absent":
                subject.call(good, **{subject.memory: np.empty_like(subject.fresh(good)[0])})
            outcomes = [outcome_of_memory(subject, kind, good) for _ in range(2)]
            report(f"{subject.name}: {subject.memory} {kind.label}", outcomes)


if __name__ == "__main__":
    main()
